"""Memory of a CUDA device that comes and goes under addresses that stay, as CUDA graphs want them.

torch's allocator gives a tensor and its memory together. Here the driver's virtual memory management keeps them apart:
a range of addresses is reserved once, and physical memory is mapped under it, taken away and mapped anew.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import warnings
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CHUNK_BYTES = 2**30
"""Of physical memory that are asked for at once."""
ALIGNMENT = 512
"""Bytes to whose multiples tensors begin, as those of torch's allocator."""
GIB = 2**30
OUT_OF_MEMORY = 2
"""The driver's code."""
PINNED, ON_DEVICE, READ_WRITE = 1, 1, 3
"""What is asked of the driver: memory that stays on its device, to be read and written there."""


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", Location),
        ("win32_meta_data", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", ctypes.c_int)]


_size, _flags = ctypes.c_size_t, ctypes.c_ulonglong
_address = _handle = ctypes.c_ulonglong
SIGNATURES: dict[str, list[Any]] = {
    "cuMemGetAllocationGranularity": [ctypes.POINTER(_size), ctypes.POINTER(Properties), ctypes.c_int],
    "cuMemAddressReserve": [ctypes.POINTER(_address), _size, _size, _address, _flags],
    "cuMemCreate": [ctypes.POINTER(_handle), _size, ctypes.POINTER(Properties), _flags],
    "cuMemMap": [_address, _size, _size, _handle, _flags],
    "cuMemSetAccess": [_address, _size, ctypes.POINTER(Access), _size],
    "cuMemUnmap": [_address, _size],
    "cuMemRelease": [_handle],
    "cuMemAddressFree": [_address, _size],
    "cuGetErrorString": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
}
"""Arguments of the driver's functions; each returns a code, 0 for success."""


@functools.cache
def cuda_driver() -> Any:
    """libcuda, loaded when it is first asked for.

    Raises:
        ValueError: there is none.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ValueError(
            f"rollout.engine.lend_memory=true needs NVIDIA's driver, which cannot be loaded: {error}. Set it to false"
        ) from error
    for name, arguments in SIGNATURES.items():
        getattr(driver, name).argtypes = arguments
    return driver


class DriverError(Exception):
    """A call of the driver failed."""

    def __init__(self, name: str, code: int) -> None:
        text = ctypes.c_char_p()
        cuda_driver().cuGetErrorString(code, ctypes.byref(text))
        super().__init__(f"{name}: {(text.value or b'unknown error').decode()} ({code})")
        self.code = code


def call(name: str, *arguments: Any) -> None:
    """A function of the driver.

    Raises:
        DriverError: it failed.
    """
    if code := getattr(cuda_driver(), name)(*arguments):
        raise DriverError(name, code)


def expand_segments() -> None:
    """Let torch take memory from now on by segments that grow and shrink by pages, and give back pages between tensors.

    Without that 20 GiB lay unused between the tensors of an 8B model once it had trained. Nothing is changed where
    PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF name expandable_segments themselves; what else they say is said again,
    as torch takes what is left out for its default.
    """
    given = [text for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF") if (text := os.environ.get(name))]
    if any("expandable_segments" in text for text in given):
        return
    with warnings.catch_warnings(action="ignore"):  # deprecated for a function that is not public either
        torch.cuda.memory._set_allocator_settings(",".join([*given, "expandable_segments:True"]))


class LentMemory:
    """Memory for tensors, which may be lent: then they keep their addresses, and must be neither read nor written.

    Args:
        num_bytes: `tensor_bytes` of all tensors together.
        device: a CUDA device.

    Raises:
        ValueError: the device is none, does not have as much, or has a driver that cannot do this.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(
                f"rollout.engine.lend_memory=true lends the memory of a CUDA device, and the model is on {device}. Set "
                f"it to false"
            )
        self.device = device
        self._mapped: list[tuple[int, int]] = []
        location = Location(ON_DEVICE, torch.cuda.current_device() if device.index is None else device.index)
        self._properties, self._access = Properties(PINNED, 0, location), Access(location, READ_WRITE)
        granularity, address = _size(), _address()
        try:
            call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._properties), 0)
            self._chunk_bytes = filled_up(CHUNK_BYTES, granularity.value)
            self.num_bytes = filled_up(num_bytes, granularity.value)
            call("cuMemAddressReserve", ctypes.byref(address), self.num_bytes, 0, 0, 0)
        except DriverError as error:
            raise self._refusal(error) from error
        self._first = self._next = address.value
        weakref.finalize(self, _free, device, self._first, self.num_bytes, self._mapped).atexit = False
        self.take_back()

    @property
    def mapped_bytes(self) -> int:
        """Of the device's memory that are taken now."""
        return sum(size for _, size in self._mapped)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The next tensor, of unknown contents; made while nothing is lent. It keeps all of the memory alive."""
        num_bytes, address = math.prod(shape) * dtype.itemsize, self._next
        self._next += tensor_bytes(shape, dtype)
        assert self._next <= self._first + self.num_bytes, f"{shape} of {dtype} does not fit into {self.num_bytes} B"
        return as_tensor(Span(self, address, num_bytes)).view(dtype).view(shape)

    def lend(self) -> None:
        """Give the memory to whoever asks the device next; nothing where it is lent."""
        if self._mapped:
            torch.cuda.synchronize(self.device)  # steps under way may write to it
            _unmap(self._mapped)

    def take_back(self) -> bool:
        """Have memory under the addresses again, of unknown contents. Returns whether it was lent.

        Raises:
            ValueError: the device does not give it; all is lent then.
        """
        if self._mapped:
            return False
        torch.cuda.empty_cache()
        with ExitStack() as undo:
            undo.callback(_unmap, self._mapped)
            try:
                for offset in range(0, self.num_bytes, self._chunk_bytes):
                    self._map(self._first + offset, min(self._chunk_bytes, self.num_bytes - offset))
                call("cuMemSetAccess", self._first, self.num_bytes, ctypes.byref(self._access), 1)
            except DriverError as error:
                raise self._refusal(error) from error
            undo.pop_all()
        return True

    def _map(self, address: int, size: int) -> None:
        """Physical memory, which lives as long as it is mapped."""
        handle = _handle()
        call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), 0)
        try:
            call("cuMemMap", address, size, 0, handle, 0)
            self._mapped.append((address, size))
        finally:
            call("cuMemRelease", handle)

    def _refusal(self, error: DriverError) -> ValueError:
        if error.code != OUT_OF_MEMORY:
            return ValueError(
                f"rollout.engine.lend_memory=true does not work on {self.device}: {error}. Set it to false"
            )
        free = torch.cuda.mem_get_info(self.device)[0] + self.mapped_bytes
        kept = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return ValueError(
            f"the KV cache wants {self.num_bytes} bytes ({self.num_bytes / GIB:.2f} GiB) of {self.device}, where "
            f"{free} ({free / GIB:.2f} GiB) are free and {kept / GIB:.2f} GiB lie unused between torch's tensors. "
            f"Lower rollout.engine.kv_cache_tokens; with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False more lies "
            f"between them than without"
        )


@dataclass(frozen=True, eq=False)
class Span:
    """Bytes of a memory that it keeps alive, as torch takes them."""

    memory: LentMemory
    address: int
    num_bytes: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def as_tensor(span: Span) -> Tensor:
    """uint8 over a span, not a copy."""
    return torch.as_tensor(span, device=span.memory.device)


def tensor_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """That a tensor takes of a memory."""
    return filled_up(math.prod(shape) * dtype.itemsize, ALIGNMENT)


def filled_up(num_bytes: int, multiple: int) -> int:
    """The next multiple."""
    return -(-num_bytes // multiple) * multiple


def _unmap(mapped: list[tuple[int, int]]) -> None:
    while mapped:
        call("cuMemUnmap", *mapped[-1])
        mapped.pop()


def _free(device: torch.device, first: int, num_bytes: int, mapped: list[tuple[int, int]]) -> None:
    """Give memory and addresses back, when no tensor is left."""
    if mapped:
        torch.cuda.synchronize(device)
        _unmap(mapped)
    call("cuMemAddressFree", first, num_bytes)
