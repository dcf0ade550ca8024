"""What the kernels need of a GPU."""

from __future__ import annotations

import torch

from octavo.kernels.triton_shim import HAS_TRITON

CAPABILITY = 9
"""Major compute capability of Hopper, whose FP8 tensor cores and bulk copies the kernels are written for."""


def require_kernels(device: torch.device | str, high_precision: str) -> None:
    """Refuse a CUDA device on which BF16 and FP8 products cannot run; the FP32 recipe needs no kernel.

    Raises:
        ValueError: no GPU, another than Hopper, one that is not the current device, or no triton.
    """
    device = torch.device(device)
    if device.type != "cuda" or high_precision == "fp32":
        return
    if not torch.cuda.is_available():
        raise ValueError(f"device={str(device)!r} cannot be used here: torch sees no GPU. Use device=cpu")
    major, minor = torch.cuda.get_device_capability(device)
    if major != CAPABILITY:
        raise ValueError(
            f"the kernels for BF16 and FP8 are for Hopper GPUs (H100, H200: compute capability 9.0); "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}. Use device=cpu, or precision.recipe=fp32"
        )
    if not HAS_TRITON:
        raise ValueError("the kernels for BF16 and FP8 need triton, which is not installed. pip install triton")
    current = torch.cuda.current_device()
    if device.index not in (None, current):  # where Triton launches, wherever its tensors are
        raise ValueError(
            f"the kernels run on torch's current device, cuda:{current}, and {str(device)!r} was asked for. Call "
            f"torch.cuda.set_device({device.index}) first"
        )
