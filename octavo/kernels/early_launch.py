"""Programmatic dependent launch: the kernels of a decode step start while the one ahead of each still ends.

A kernel that is launched so first waits until the kernel ahead, and with it all before that, has ended; only then does
it let the next one start. So it reads what they wrote, and writes to no buffer that one of them still reads, freed and
given out again as it may be. Two read before they wait. The products of `decode_gemm` read a weight: what may write one
lets nothing start early. The kernels of `spread_attention` read what was written before the kernel ahead of them began.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from octavo.kernels.device import suits_kernels
from octavo.kernels.triton_shim import HAS_GLUON, INTERPRETED, gdc, tl, triton

MAX_EARLY_ROWS = 64
"""Tokens of a decode step, at most. Steps of 128 draw all the power that an H200 may: there a kernel that waits takes
clocks from the one that works, and gains nothing (LOG.md)."""

_wanted = True


@contextmanager
def one_after_another() -> Iterator[None]:
    """Inside no kernel starts early: a profile would count its wait as its time."""
    global _wanted
    _wanted = False
    try:
        yield
    finally:
        _wanted = True


def early_launch(x: Tensor, allowed: bool = True) -> dict[str, Any]:
    """EARLY, which the kernel hands to `begin`, and the option of its launch; False but on Hopper, for few rows.

    Args:
        x: [T, ...], what the kernel reads.
        allowed: False where it may write a weight.
    """
    few = _wanted and allowed and x.is_cuda and len(x) <= MAX_EARLY_ROWS
    early = few and HAS_GLUON and not INTERPRETED and suits_kernels(x.device)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def begin(EARLY: tl.constexpr):
    """Comes before whatever a kernel writes in global memory, and reads but for what the head of this file names.

    In this order: a kernel of the ordinary kind has let this one start as it ended, its writes perhaps still on their
    way, and if they are a weight, the product after this one is not to see less of them.
    """
    if EARLY:
        gdc.gdc_wait()
        gdc.gdc_launch_dependents()
