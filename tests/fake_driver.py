"""NVIDIA's driver as far as memory goes, over memory of the host."""

import ctypes
import gc
import mmap

import torch

from octavo.rollout import kv_cache, lent_memory
from octavo.rollout.lent_memory import SIGNATURES

LENT, STALE = 0xFF, 0x7F
"""Bytes of memory that is lent, and of what comes back: NaN in FP8, 0xFF in FP32 and BF16, too."""
OUT_OF_MEMORY = 2


class FakeDriver:
    """Functions that C calls, by the signatures that libcuda is called by.

    `calls` names what was called, `faults` fails calls by name and count, and `broken` has what the driver would not
    have taken.

    Args:
        free: bytes of physical memory.
        granularity: of all sizes.
    """

    def __init__(self, free=2**40, granularity=4096):
        self.free, self.granularity = free, granularity
        self.calls, self.faults, self.broken = [], {}, []
        self.reserved, self.mapped, self.handles, self.accessible = {}, {}, {}, set()

    def __getattr__(self, name):
        def function(*arguments):
            self.calls.append(name)
            try:
                return self.faults.get((name, self.calls.count(name))) or getattr(self, f"_{name}")(*arguments) or 0
            except (AssertionError, LookupError) as error:  # which C would swallow
                self.broken.append(error)
                return 999

        if name not in SIGNATURES:
            raise AttributeError(name)
        return ctypes.CFUNCTYPE(ctypes.c_int, *SIGNATURES[name])(function)

    def _cuGetErrorString(self, code, text):
        text[0] = {2: b"out of memory", 801: b"operation not supported"}.get(code)

    def _cuMemGetAllocationGranularity(self, size, properties, option):
        self._check_properties(properties[0])
        assert option == 0
        size[0] = self.granularity

    def _cuMemAddressReserve(self, address, size, alignment, at, flags):
        assert size > 0 and size % self.granularity == alignment == at == flags == 0
        memory = mmap.mmap(-1, size)
        address[0] = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.reserved[address[0]] = size, memory
        ctypes.memset(address[0], LENT, size)

    def _cuMemCreate(self, handle, size, properties, flags):
        self._check_properties(properties[0])
        assert size > 0 and size % self.granularity == flags == 0
        if size > self.free:
            return OUT_OF_MEMORY
        self.free -= size
        handle[0] = 2**40 + len(self.calls)
        self.handles[handle[0]] = size
        return 0

    def _cuMemMap(self, address, size, offset, handle, flags):
        assert self.handles[handle] == size and address not in self.mapped and offset == flags == 0
        assert ctypes.string_at(address, size) == bytes([LENT]) * size, "written while it was lent"
        ctypes.memset(address, STALE, size)
        self.mapped[address] = size
        self.handles[handle] = 0  # to be freed with the mapping

    def _cuMemSetAccess(self, address, size, access, count):
        location = access[0].location
        assert (location.type, location.id, access[0].flags, count) == (1, 0, 3, 1)
        assert sum(part for at, part in self.mapped.items() if address <= at < address + size) == size
        self.accessible.add(address)

    def _cuMemUnmap(self, address, size):
        assert self.mapped.pop(address) == size
        self.free += size
        ctypes.memset(address, LENT, size)
        self.accessible.discard(address)

    def _cuMemRelease(self, handle):
        self.free += self.handles.pop(handle)

    def _cuMemAddressFree(self, address, size):
        assert not any(address <= at < address + size for at in self.mapped), "unmap it first"
        assert self.reserved.pop(address)[0] == size

    def _check_properties(self, properties):
        location = properties.location
        assert (properties.type, properties.handle_types, location.type, location.id) == (1, 0, 1, 0)
        assert not properties.win32_meta_data and bytes(properties.flags) == bytes(8)


def pretend_driver(monkeypatch):
    """A driver for this process, and caches of a CPU that can lend; what torch is asked of its GPU is among `calls`.

    A generator, for a fixture: yields the driver, and in the end has seen nothing wrong.
    """
    driver = FakeDriver()
    monkeypatch.setattr(lent_memory, "cuda_driver", lambda: driver)
    monkeypatch.setattr(lent_memory, "as_tensor", host_tensor)
    monkeypatch.setattr(
        kv_cache, "LentMemory", lambda num_bytes, _: lent_memory.LentMemory(num_bytes, torch.device("cuda", 0))
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: driver.calls.append("synchronize"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: driver.calls.append("empty_cache"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (driver.free, 2**40))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2**30)
    yield driver
    gc.collect()  # memory that a test left
    assert not driver.broken and not driver.reserved and not driver.handles


def host_tensor(span):
    """As `lent_memory.as_tensor`, by its interface too."""
    interface = span.__cuda_array_interface__
    (address, read_only), (size,) = interface["data"], interface["shape"]
    assert interface["typestr"] == "|u1" and interface["version"] == 3 and not read_only
    memory = (ctypes.c_ubyte * size).from_address(address)
    memory.owner = span  # what torch holds on to
    return torch.frombuffer(memory, dtype=torch.uint8)
