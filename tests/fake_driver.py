"""NVIDIA's driver as far as memory goes, over memory of the host."""

import ctypes
import mmap

import torch

from octavo.rollout import kv_cache, lent_memory

LENT, STALE = 0xFF, 0x7F
"""Bytes of memory that is lent, and of what comes back: NaN in FP8, 0xFF in FP32 and BF16, too."""
OUT_OF_MEMORY = 2


class FakeDriver:
    """Addresses are those of anonymous maps; `calls` names what was called and `faults` fails calls by name and count.

    Args:
        free: bytes of physical memory.
        granularity: of all sizes.
    """

    def __init__(self, free=2**40, granularity=4096):
        self.free, self.granularity = free, granularity
        self.calls, self.faults = [], {}
        self.reserved, self.mapped, self.handles, self.accessible = {}, {}, {}, set()

    def __getattr__(self, name):
        def function(*arguments):
            self.calls.append(name)
            code = self.faults.get((name, self.calls.count(name)), 0)
            return code or getattr(self, f"_{name}")(*arguments) or 0

        return function

    def cuGetErrorString(self, code, text):
        text._obj.value = {2: b"out of memory", 801: b"operation not supported"}.get(code, b"invalid value")
        return 0

    def _cuMemGetAllocationGranularity(self, size, properties, option):
        location = properties._obj.location
        assert (properties._obj.type, location.type, location.id, option) == (1, 1, 0, 0)
        size._obj.value = self.granularity

    def _cuMemAddressReserve(self, address, size, alignment, at, flags):
        assert size > 0 and size % self.granularity == 0
        memory = mmap.mmap(-1, size)
        address._obj.value = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.reserved[address._obj.value] = size, memory
        self._fill(address._obj.value, size, LENT)

    def _cuMemCreate(self, handle, size, properties, flags):
        assert size > 0 and size % self.granularity == 0
        if size > self.free:
            return OUT_OF_MEMORY
        self.free -= size
        handle._obj.value = len(self.calls)
        self.handles[handle._obj.value] = size
        return 0

    def _cuMemMap(self, address, size, offset, handle, flags):
        assert self.handles[handle.value] == size and address not in self.mapped and offset == 0
        kept = bytes((ctypes.c_ubyte * size).from_address(address))
        assert kept == bytes([LENT]) * size, "written while it was lent"
        self._fill(address, size, STALE)
        self.mapped[address] = size
        self.handles[handle.value] = 0  # to be freed with the mapping

    def _cuMemSetAccess(self, address, size, access, count):
        assert (access._obj.location.type, access._obj.location.id, access._obj.flags, count) == (1, 0, 3, 1)
        assert sum(self.mapped.values()) >= size
        self.accessible.add(address)

    def _cuMemUnmap(self, address, size):
        assert self.mapped.pop(address) == size
        self.free += size
        self._fill(address, size, LENT)
        self.accessible.discard(address)

    def _cuMemRelease(self, handle):
        self.free += self.handles.pop(handle.value)

    def _cuMemAddressFree(self, address, size):
        assert self.reserved.pop(address)[0] == size
        assert not any(address <= at < address + size for at in self.mapped), "unmap it first"

    def _fill(self, address, size, byte):
        ctypes.memset(address, byte, size)


def pretend_driver(monkeypatch, **settings):
    """A driver for this process, and caches of a CPU that can lend; what torch is asked of its GPU is among `calls`."""
    driver = FakeDriver(**settings)
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
    return driver


def host_tensor(span):
    """As `lent_memory.as_tensor`, by its interface too."""
    interface = span.__cuda_array_interface__
    (address, read_only), (size,) = interface["data"], interface["shape"]
    assert interface["typestr"] == "|u1" and interface["version"] == 3 and not read_only
    memory = (ctypes.c_ubyte * size).from_address(address)
    memory.owner = span  # what torch holds on to
    return torch.frombuffer(memory, dtype=torch.uint8)
