"""Whether kernels run, and what they need of a GPU.

A tensor on a CUDA device is worked on by kernels, one elsewhere by the reference in plain torch. `choose_kernels` has
the reference work on both: simulated FP8, and BF16, on a GPU that the kernels are not for.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from octavo.kernels.triton_shim import HAS_TRITON, INTERPRETED, require_triton

CAPABILITY = 9
"""Major compute capability of Hopper, whose FP8 tensor cores and bulk copies the kernels are written for."""

Kernels = Literal["by_device", "reference"]

# Like torch's current device it is the process's: autograd runs a backward in threads of its own.
_kernels: Kernels = "by_device"


def choose_kernels(kernels: Kernels) -> None:
    """Kernels on CUDA devices, or the reference everywhere, from here on; what was made ready before is of no use."""
    global _kernels
    _kernels = kernels


def runs_kernels(x: Tensor) -> bool:
    """Whether kernels work on x: by its device, unless the reference was chosen."""
    return x.is_cuda and _kernels == "by_device"


def on_gpu(x: Tensor, what: str) -> bool:
    """Whether `what` runs as a Triton kernel. The interpreter runs them on CPU tensors, too."""
    if runs_kernels(x) or INTERPRETED:
        require_triton(what)
        return True
    return False


def suits_kernels(device: torch.device | str) -> bool:
    """Whether a GPU is one that the kernels are written for."""
    return torch.cuda.get_device_capability(device)[0] == CAPABILITY


def require_kernels(device: torch.device | str, high_precision: str) -> None:
    """Refuse a CUDA device on which BF16 and FP8 products cannot run; the reference and the FP32 recipe need no kernel.

    Raises:
        ValueError: no GPU, another than Hopper, one that is not the current device, or no triton.
    """
    device = torch.device(device)
    if device.type != "cuda" or high_precision == "fp32" or _kernels == "reference":
        return
    if not torch.cuda.is_available():
        raise ValueError(f"device={str(device)!r} cannot be used here: torch sees no GPU. Use device=cpu")
    if not suits_kernels(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise ValueError(
            f"the kernels for BF16 and FP8 are for Hopper GPUs (H100, H200: compute capability 9.0); "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}. Use kernels=reference, which simulates them "
            f"there in plain torch, device=cpu, or precision.recipe=fp32"
        )
    if not HAS_TRITON:
        raise ValueError("the kernels for BF16 and FP8 need triton, which is not installed. pip install triton")
    current = torch.cuda.current_device()
    if device.index not in (None, current):  # where Triton launches, wherever its tensors are
        raise ValueError(
            f"the kernels run on torch's current device, cuda:{current}, and {str(device)!r} was asked for. Call "
            f"torch.cuda.set_device({device.index}) first"
        )
