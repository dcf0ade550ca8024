"""triton where it is installed; elsewhere stand-ins, so that files with kernels can be imported on any machine.

A kernel runs for CUDA tensors only, and those need triton: `require_triton` says so once, before a launch.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's CPU interpreter, for tests."""


class _Absent:
    """Keeps decorated kernels as plain functions that nothing calls, and constants as they are."""

    def jit(self, function: Any) -> Any:
        return function

    def constexpr(self, value: Any) -> Any:
        return value


def _load(name: str) -> Any:
    return importlib.import_module(name) if HAS_TRITON else _Absent()


triton, tl = _load("triton"), _load("triton.language")
constexpr = tl.constexpr
"""Of a global constant that kernels read."""


def require_triton(what: str) -> None:
    """ValueError when a kernel is wanted and triton is not installed."""
    if not HAS_TRITON:
        raise ValueError(f"{what} on a CUDA tensor needs triton, which is not installed. pip install triton")


def on_gpu(x: Tensor, what: str) -> bool:
    """Whether `what` runs as a kernel: by the tensor's device. The interpreter runs kernels on CPU tensors, too."""
    if x.is_cuda or INTERPRETED:
        require_triton(what)
        return True
    return False
