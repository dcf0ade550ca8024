"""triton where it is installed; elsewhere stand-ins, so that files with kernels can be imported on any machine.

A kernel needs triton: `require_triton` says so once, before a launch.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's CPU interpreter, for tests."""


class _Absent:
    """Keeps decorated kernels as plain functions that nothing calls, and constants as they are."""

    def jit(self, function: Any = None, **options: Any) -> Any:
        return function or (lambda kernel: kernel)

    def constexpr(self, value: Any) -> Any:
        return value


def triton_module(name: str = "") -> Any:
    """A module of triton by its dotted name below `triton`."""
    return importlib.import_module(f"triton.{name}" if name else "triton")


triton: Any = triton_module() if HAS_TRITON else _Absent()
tl: Any = triton_module("language") if HAS_TRITON else _Absent()
constexpr = tl.constexpr
"""Of a global constant that kernels read."""

try:
    gluon: Any = triton_module("experimental.gluon")
    gl: Any = triton_module("experimental.gluon.language")
    ampere: Any = triton_module("experimental.gluon.language.nvidia.ampere")
    hopper: Any = triton_module("experimental.gluon.language.nvidia.hopper")
    gdc: Any = triton_module("language.extra.cuda")
    tma_load: Any = getattr(hopper.tma, "async_load", None) or hopper.tma.async_copy_global_to_shared  # until 3.6
    copy_async: Any = getattr(ampere.async_copy, "async_load", None) or ampere.async_copy.async_copy_global_to_shared
    thread_barrier: Any = getattr(gl, "thread_barrier", None) or gl.barrier  # from 3.7
    HAS_REINTERPRET = constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))  # likewise
    HAS_GLUON = True
except (ImportError, AttributeError):  # another triton: the kernels in plain Triton give the same bits
    gluon, gl = _Absent(), _Absent()
    ampere = hopper = gdc = tma_load = copy_async = thread_barrier = HAS_REINTERPRET = None
    HAS_GLUON = False


def require_triton(what: str) -> None:
    """ValueError when a kernel is wanted and triton is not installed."""
    if not HAS_TRITON:
        raise ValueError(f"{what} on a CUDA tensor needs triton, which is not installed. pip install triton")
