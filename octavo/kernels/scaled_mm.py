"""Back end `scaled_mm`: FP8 products by cuBLASLt, through `torch.nn.functional.scaled_mm`.

Its layouts are particular, and a wrong one can give plausible wrong numbers: scales of 1x128 blocks lie with the outer
dimension contiguous, those of 128x128 blocks are passed transposed with the K blocks filled up to a multiple of four.

A row's bits do not depend on the number of rows above 64 (with fewer, cuBLASLt may split K); below, zeros fill up.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

MIN_ROWS = 64
"""Products of fewer rows are filled up to this."""
MULTIPLE = 16
"""M and N of a product, filled up with zeros."""


def block_product(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """X [M, K] . W [N, K]^T, both E4M3 with scales per block of 128 along K; blocks added in FP32 in ascending K.

    Args:
        x, w: e4m3, K contiguous and a multiple of 128.
        x_scale: [M, K / 128] fp32 with strides (1, any).
        w_scale: [ceil(N / 128), K / 128] fp32, or [N, K / 128] with strides (1, any).
        bias: [N] bf16, or None.
        dtype: bf16 or fp32.

    Returns:
        [M, N].
    """
    M, N = len(x), len(w)
    one_row, square = functional.ScalingType.BlockWise1x128, functional.ScalingType.BlockWise128x128
    x, x_scale = _filled(x, _rows(M)), _filled(x_scale.T, _rows(M), dim=1).T
    w = _filled(w, _columns(N))
    if len(w_scale) == N:
        right, scaling = _filled(w_scale.T, _columns(N), dim=1).T, one_row
    else:
        right, scaling = _filled(w_scale, -(-w_scale.shape[1] // 4) * 4, dim=1).T, square
    inside, after = (bias, None) if dtype == torch.bfloat16 else (None, bias)
    inside = None if inside is None else _filled(inside, _columns(N))
    y = functional.scaled_mm(x, w.T, x_scale, one_row, right, scaling, bias=inside, output_dtype=dtype)[:M, :N]
    return y if after is None else y + after


def row_product(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """X [M, K] . W [N, K]^T, both E4M3 with a scale per row; one sum over K with fast accumulation, scaled at the end.

    Args:
        x, w: e4m3, K contiguous and a multiple of 16.
        x_scale, w_scale: [M, 1] and [N, 1] fp32.
        bias: [N] bf16, or None.
        dtype: bf16 or fp32.

    Returns:
        [M, N].
    """
    M, N = len(x), len(w)
    x, x_scale = _filled(x, _rows(M)), _filled(x_scale, _rows(M))
    w, w_scale = _filled(w, _columns(N)), _filled(w_scale, _columns(N))
    inside, after = (bias, None) if dtype == torch.bfloat16 else (None, bias)
    by_row = functional.ScalingType.RowWise
    y = functional.scaled_mm(
        x,
        w.T,
        x_scale,
        by_row,
        w_scale.T,
        by_row,
        bias=None if inside is None else _filled(inside, _columns(N)),
        output_dtype=dtype,
        use_fast_accum=True,
    )[:M, :N]
    return y if after is None else y + after


def _rows(M: int) -> int:
    return max(MIN_ROWS, _columns(M))


def _columns(N: int) -> int:
    return -(-N // MULTIPLE) * MULTIPLE


def _filled(x: Tensor, size: int, dim: int = 0) -> Tensor:
    """Zeros after the last row (or column); packed and aligned to 16 bytes, without which cuBLASLt refuses."""
    packed = x.is_contiguous() and (x.ndim == 1 or x.shape[1] == 1 or x.stride(0) == x.shape[1])
    if x.shape[dim] == size and packed and x.data_ptr() % 16 == 0:
        return x
    shape = list(x.shape)
    shape[dim] = size
    out = torch.zeros(shape, dtype=x.dtype, device=x.device)
    out.narrow(dim, 0, x.shape[dim]).copy_(x)
    return out
