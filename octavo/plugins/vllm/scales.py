"""Whether vLLM leaves scales as they are: its DeepGEMM, on Hopper and later, makes them powers of two by default."""

import torch
from torch import Tensor


def check_kept(name: str, scale: Tensor) -> None:
    """Refuse a scale that vLLM would round to a power of two, and quantise its weight again.

    Args:
        name: of the scale.
        scale: fp32, of a weight's blocks.

    Raises:
        ValueError: vLLM runs DeepGEMM with E8M0 scales, and this one is no power of two.
    """
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used

    if is_deep_gemm_e8m0_used() and bool((torch.frexp(scale).mantissa != 0.5).any()):
        weight = name.removesuffix("_scale_inv")
        raise ValueError(
            f"vLLM's DeepGEMM rounds scales to powers of two and would quantise {weight} again. Train with "
            f"scale_rounding=power_of_two, or start vLLM with VLLM_USE_DEEP_GEMM_E8M0=0"
        )
