"""Times of GPU work: medians, with a cold L2 cache, free of what the host takes to launch."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

COPY_BYTES = 2**30


def require_cuda(what: str) -> None:
    """ValueError where there is no CUDA device to measure."""
    if not torch.cuda.is_available():
        raise ValueError(f"{what} measures a CUDA device, and torch sees none here; run it on a machine with one")


def milliseconds(call: Callable[[], object], rep_ms: int = 150, leaves: Sequence[Tensor] = ()) -> float:
    """Median time of a call; the L2 cache is overwritten before each, and gradients of the leaves start anew."""
    from triton.testing import do_bench

    return do_bench(call, warmup=30, rep=rep_ms, return_mode="median", grad_to_none=list(leaves) or None)


def microseconds_each(calls: Sequence[Callable[[], object]], rep_ms: int = 60) -> float:
    """Median time of one of several calls that follow each other in a CUDA graph.

    For work of a few microseconds. Give as many calls on as many weights as overflow the L2 cache.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return milliseconds(graph.replay, rep_ms) * 1e3 / len(calls)


def copy_speed() -> float:
    """GB/s of a copy of 1 GiB, bytes read and bytes written: the bound of everything that moves memory."""
    source = torch.randint(0, 255, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / milliseconds(lambda: target.copy_(source)) / 1e6


def kernel_names(call: Callable[[], object]) -> list[str]:
    """The GPU kernels that a call launches, in order, by the profiler's names without their template arguments."""
    return [name for name, _ in _kernels(call)]


def kernel_milliseconds(call: Callable[[], object]) -> dict[str, float]:
    """Kernel -> time of all its launches in a call, longest first."""
    total: dict[str, float] = {}
    for name, milliseconds in _kernels(call):
        total[name] = total.get(name, 0.0) + milliseconds
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _kernels(call: Callable[[], object]) -> list[tuple[str, float]]:
    """Name and milliseconds of each kernel of the second of two calls, in order."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    on_device = [event for event in profile.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    found = [(event.name, event.device_time / 1e3) for event in sorted(on_device, key=lambda e: e.time_range.start)]
    kernels = [(name, ms) for name, ms in found if not name.startswith(("Mem", "cuda"))]
    return [(re.sub(r"[<(].*", "", name).removeprefix("void "), ms) for name, ms in kernels]
