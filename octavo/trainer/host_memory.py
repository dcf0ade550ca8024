"""The host's memory: what is free of it, and pages that stay where they are, for copies to and from a GPU."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from octavo.rollout.lent_memory import tensor_bytes

GIB = 2**30
PORTABLE = 1
"""cudaHostRegisterPortable: locked for every CUDA context."""


def memory_bytes() -> tuple[int, int]:
    """Free and total bytes of main memory; the limit of a container counts where there is one, but not the files that
    it has read and could forget."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = free = page * os.sysconf("SC_PHYS_PAGES")
    information = Path("/proc/meminfo")
    if information.is_file():
        fields = dict(line.split(":", 1) for line in information.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used, parts = (Path("/sys/fs/cgroup") / f"memory.{name}" for name in ("max", "current", "stat"))
    if limit.is_file() and used.is_file() and limit.read_text().strip().isdecimal():
        total = min(total, int(limit.read_text()))
        kept = dict(line.split() for line in parts.read_text().splitlines()) if parts.is_file() else {}
        free = min(free, total - int(used.read_text()) + int(kept.get("inactive_file", 0)))
    return free, total


def require_room(parts: Mapping[str, int]) -> None:
    """Refuse to lock what the host has no room for; the system would end the process.

    Args:
        parts: what for -> bytes.

    Raises:
        ValueError: they are more than are free.
    """
    wanted, free = sum(parts.values()), memory_bytes()[0]
    if wanted > free:
        detail = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in parts.items())
        raise ValueError(
            f"offload_moments=true needs {wanted} bytes of the host's memory ({detail}), where {max(0, free)} "
            f"({max(0, free) / GIB:.2f} GiB) are free. Set it to false, or use optimizer.state_format=int8, or a host "
            f"with more"
        )


class PinnedMemory:
    """Memory of the host that a GPU reads and writes by itself. Locked until this is dropped; tensors may outlive it.

    Not by torch's `pin_memory`, which takes the next power of two for a size.

    Args:
        num_bytes: `tensor_bytes` of all tensors together.

    Raises:
        ValueError: the host does not have as much, or CUDA cannot lock it.
    """

    def __init__(self, num_bytes: int) -> None:
        require_room({"moments": num_bytes})
        try:
            self._pages = torch.empty(num_bytes, dtype=torch.uint8)
        except RuntimeError as error:  # the allocator's, of a process with a limit
            raise _refusal(num_bytes, str(error).splitlines()[0].removesuffix(".")) from error
        self._used = 0
        lock(self._pages)
        weakref.finalize(self, unlock, self._pages).atexit = False

    def tensor_like(self, other: Tensor) -> Tensor:
        """The next tensor, of unknown values."""
        first, size = self._used, other.numel() * other.element_size()
        self._used += tensor_bytes(other.shape, other.dtype)
        assert self._used <= self._pages.numel(), f"{tuple(other.shape)} does not fit into {self._pages.numel()} bytes"
        return self._pages[first : first + size].view(other.dtype).view(other.shape)


def lock(pages: Tensor) -> None:
    """Have CUDA keep pages where they are.

    Raises:
        ValueError: it cannot.
    """
    code = int(torch.cuda.cudart().cudaHostRegister(pages.data_ptr(), pages.numel(), PORTABLE))
    if code:
        raise _refusal(pages.numel(), f"cudaHostRegister returned {code}")


def unlock(pages: Tensor) -> None:
    """Let go of them, when nothing is copied there any more."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(pages.data_ptr())


def _refusal(num_bytes: int, why: str) -> ValueError:
    return ValueError(
        f"offload_moments=true could not lock {num_bytes} bytes ({num_bytes / GIB:.2f} GiB) of the host's memory: "
        f"{why}. Set it to false, or use optimizer.state_format=int8, or a host with more"
    )
