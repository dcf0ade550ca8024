"""Programmatic dependent launch: the kernels of a decode step start while the one ahead of each still ends.

A kernel that is launched so first waits until the kernel ahead has ended, and only then lets the next one start. So
whatever starts, all but the kernel just ahead of it has ended, and a buffer that is freed and given out again is never
written while it is read. What `decode_gemm` reads before its own wait is a weight: a kernel that writes one is never
launched early, as the product after it would start in the middle of it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from octavo.kernels.device import suits_kernels
from octavo.kernels.triton_shim import HAS_GLUON, INTERPRETED, gdc, tl, triton

MAX_EARLY_ROWS = 256
"""Tokens of a decode step, at most; kernels of more run long enough for their launch not to matter."""


def early_launch(x: Tensor, allowed: bool = True) -> dict[str, Any]:
    """EARLY, which the kernel hands to `begin`, and the option of its launch.

    Args:
        x: [T, ...], what the kernel reads.
        allowed: False where it may write a weight.
    """
    few = allowed and x.is_cuda and len(x) <= MAX_EARLY_ROWS
    early = few and HAS_GLUON and not INTERPRETED and suits_kernels(x.device)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def begin(EARLY: tl.constexpr):
    """Comes before whatever a kernel reads or writes in global memory."""
    if EARLY:
        gdc.gdc_wait()
        gdc.gdc_launch_dependents()
