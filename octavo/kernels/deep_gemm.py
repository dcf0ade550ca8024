"""Back end `deep_gemm`: FP8 products by blocks from DeepGEMM (https://github.com/deepseek-ai/DeepGEMM), if installed.

Never chosen, only asked for: `product(..., backend="deep_gemm")`.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


@lru_cache(maxsize=1)
def deep_gemm() -> Any | None:
    """The module, or None where it is not installed."""
    return importlib.import_module("deep_gemm") if importlib.util.find_spec("deep_gemm") is not None else None


def deep_gemm_product(x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """X [M, K] . W [N, K]^T as `scaled_mm.block_product`; with a scale per row and block on both sides, fp32 only.

    Raises:
        ValueError: deep_gemm is not installed.
    """
    module = deep_gemm()
    if module is None:
        raise ValueError("backend 'deep_gemm' was asked for, and the package deep_gemm is not installed; use scaled_mm")
    y = torch.zeros(len(x), len(w), dtype=dtype, device=x.device)
    if len(w_scale) == len(w):
        module.fp8_gemm_nt((x, x_scale), (w, w_scale), y, c=y, recipe=(1, 1, 128))  # adds to zeros
    else:
        module.fp8_gemm_nt((x, x_scale), (w, w_scale), y)
    return y
