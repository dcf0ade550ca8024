"""Back end `scaled_mm`: FP8 products by cuBLASLt, through `torch.nn.functional.scaled_mm`.

Its layouts are particular, and a wrong one can give plausible wrong numbers: scales of 1x128 blocks lie with the outer
dimension contiguous, those of 128x128 blocks are passed transposed with the K blocks padded to four.

A row's bits do not depend on the number of rows above 64 (with fewer, cuBLASLt may split K); below, zeros fill up.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

MIN_ROWS = 64
"""Products of fewer rows are padded to this."""


def block_product(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """X [M, K] . W [N, K]^T, both E4M3 with scales per block of 128 along K; blocks added in FP32 in ascending K.

    Args:
        x, w: e4m3, K contiguous and a multiple of 128; N a multiple of 16.
        x_scale: [M, K / 128] fp32 with strides (1, M).
        w_scale: [N / 128, K / 128] fp32, or [N, K / 128] with strides (1, N).
        bias: [N] bf16, or None.
        dtype: bf16 or fp32.

    Returns:
        [M, N].
    """
    M, N = x.shape[0], w.shape[0]
    rows = max(MIN_ROWS, -(-M // 4) * 4)
    if rows != M:
        x, x_scale = _more_rows(x, rows), _more_rows(x_scale.T, rows, dim=1).T
    one_row = functional.ScalingType.BlockWise1x128
    if w_scale.shape[0] == N:
        right, w_scaling = w_scale, one_row
    else:
        right, w_scaling = _k_blocks_by_four(w_scale).T, functional.ScalingType.BlockWise128x128
    y = functional.scaled_mm(x, w.T, x_scale, one_row, right, w_scaling, bias=bias, output_dtype=dtype)
    return y[:M]


def row_product(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """X [M, K] . W [N, K]^T, both E4M3 with a scale per row; one sum over K with fast accumulation, scaled at the end.

    Args:
        x, w: e4m3, K contiguous; N and K multiples of 16.
        x_scale, w_scale: [M, 1] and [N, 1] fp32.
        bias: [N] bf16, or None.
        dtype: bf16 or fp32.

    Returns:
        [M, N].
    """
    M = x.shape[0]
    if M < MIN_ROWS:
        x, x_scale = _more_rows(x, MIN_ROWS), _more_rows(x_scale, MIN_ROWS)
    by_row = functional.ScalingType.RowWise
    y = functional.scaled_mm(
        x,
        w.T,
        x_scale.contiguous(),
        by_row,
        w_scale.T.contiguous(),
        by_row,
        bias=bias,
        output_dtype=dtype,
        use_fast_accum=True,
    )
    return y[:M]


def _more_rows(x: Tensor, size: int, dim: int = 0) -> Tensor:
    """Zeros after the last row (or column), contiguous."""
    shape = list(x.shape)
    shape[dim] = size
    out = torch.zeros(shape, dtype=x.dtype, device=x.device)
    out.narrow(dim, 0, x.shape[dim]).copy_(x)
    return out


def _k_blocks_by_four(scale: Tensor) -> Tensor:
    """[N blocks, K blocks] with rows a multiple of four numbers apart."""
    if scale.shape[1] % 4 == 0 and scale.is_contiguous():
        return scale
    return _more_rows(scale, -(-scale.shape[1] // 4) * 4, dim=1)[:, : scale.shape[1]]
