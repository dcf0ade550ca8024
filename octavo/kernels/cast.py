"""Casts to FP8 in the layouts that the GEMMs of each recipe read, each tensor read as rarely as it can be.

    cast_rows      X [M, K]  ->  q [M, K], a scale per row                         rowwise
    cast_1x128     X [M, K]  ->  q [M, K], a scale per row and 128 columns         FProp X, DGrad dY
    cast_128x1     X [T, K]  ->  q [K, T], a scale per column and 128 rows         WGrad X, dY: reduced over T
    cast_both      the last two from one read                                      a gradient
    cast_128x128   W [N, K]  ->  q [N, K], its transpose, a scale per 128 x 128    a weight, once per optimiser step

Scales of whole columns and matrices are in `kernels.cast_whole`.

The bytes and scales are those of `numerics.fp8.quantize`, on any device. A GEMM reads scales along its outer
dimension, so they lie with that dimension contiguous: a scale [M, B] has strides (1, M).

`pad_to=(1, 128)` rounds the columns of each q up to a multiple of 128, which a GEMM reduces over, and the result is the
cast of X with zeros there. `out` is what the function returns, to be written into: it may be a slice of rows or columns
of larger tensors, and where it is larger than X it is the cast of X with zeros, too.

`activation` is for what a product waits for, never for a weight: the kernel after this one may start before its end
(`kernels.early_launch`).
"""

from __future__ import annotations

from torch import Tensor

from octavo.kernels.cast_kernels import block_kernel, rows_kernel, tile_kernel
from octavo.kernels.cast_outputs import (
    BLOCK,
    COLUMN_TILE,
    TILE,
    UNPADDED,
    Cast,
    Padding,
    check_matrix,
    check_pair,
    copy_both_ways,
    cover,
    matrix,
    outputs,
    reference,
    scales,
    tile_grid,
    tile_sizes,
    zeros_around,
)
from octavo.kernels.device import on_gpu
from octavo.kernels.early_launch import early_launch
from octavo.kernels.tile import in_words
from octavo.kernels.triton_shim import triton
from octavo.numerics.fp8 import BLOCK_1X128, BLOCK_128X128, PER_ROW, ScaleRounding, quantize

ROWS_1X128 = 32
"""Rows of a program of the 1x128 cast."""


def cast_rows(
    x: Tensor,
    rounding: ScaleRounding = "none",
    *,
    pad_to: Padding = UNPADDED,
    out: Cast | None = None,
    activation: bool = False,
) -> Cast:
    """X [M, K] bf16 or fp32 -> q [M, K] e4m3, scale [M, 1] fp32.

    Raises:
        ValueError: x is no floating-point matrix with unit stride along K, or `out` does not fit it.
    """
    check_matrix(x, "cast_rows")
    q, scale = outputs("cast_rows", x.shape, PER_ROW, x.device, pad_to, out)
    if not on_gpu(x, "a cast to FP8"):
        return reference(x, PER_ROW, rounding, q, scale)
    if q.numel():
        _launch_rows(x, q, scale, 1, triton.next_power_of_2(q.shape[1]), rounding, activation)
    return q, scale


def cast_1x128(
    x: Tensor,
    rounding: ScaleRounding = "none",
    *,
    pad_to: Padding = UNPADDED,
    out: Cast | None = None,
    activation: bool = False,
) -> Cast:
    """X [M, K] bf16 or fp32 -> q [M, K] e4m3, scale [M, ceil(K / 128)] fp32 with strides (1, M).

    Raises:
        ValueError: x is no floating-point matrix with unit stride along K, or `out` does not fit it.
    """
    check_matrix(x, "cast_1x128")
    q, scale = outputs("cast_1x128", x.shape, BLOCK_1X128, x.device, pad_to, out)
    if not on_gpu(x, "a cast to FP8"):
        return reference(x, BLOCK_1X128, rounding, q, scale)
    if q.numel():
        _launch_rows(x, q, scale, ROWS_1X128, BLOCK, rounding, activation)
    return q, scale


def cast_128x1(
    x: Tensor, rounding: ScaleRounding = "none", *, pad_to: Padding = UNPADDED, out: Cast | None = None
) -> Cast:
    """X [T, K] bf16 or fp32 -> q [K, T] e4m3, scale [K, ceil(T / 128)] fp32 with strides (1, K).

    Raises:
        ValueError: x is no floating-point matrix with unit stride along K, or `out` does not fit it.
    """
    check_matrix(x, "cast_128x1")
    q_t, scale_t = outputs("cast_128x1", x.T.shape, BLOCK_1X128, x.device, pad_to, out)
    if not on_gpu(x, "a cast to FP8"):
        return reference(x.T, BLOCK_1X128, rounding, q_t, scale_t)
    if q_t.numel():
        _launch_tiles(x, None, (q_t, scale_t), rounding)
    return q_t, scale_t


def cast_both(
    x: Tensor,
    rounding: ScaleRounding = "none",
    *,
    pad_to: Padding = UNPADDED,
    out: tuple[Cast, Cast] | None = None,
) -> tuple[Cast, Cast]:
    """`cast_1x128` and `cast_128x1` of X [T, K] from one read.

    Raises:
        ValueError: x is no floating-point matrix with unit stride along K, or `out` does not fit it.
    """
    check_matrix(x, "cast_both")
    plain, transposed = out or (None, None)
    plain = outputs("cast_both", x.shape, BLOCK_1X128, x.device, pad_to, plain)
    transposed = outputs("cast_both", x.T.shape, BLOCK_1X128, x.device, pad_to, transposed)
    check_pair("cast_both", plain[0], transposed[0])
    if not on_gpu(x, "a cast to FP8"):
        return reference(x, BLOCK_1X128, rounding, *plain), reference(x.T, BLOCK_1X128, rounding, *transposed)
    if plain[0].numel():
        _launch_tiles(x, plain, transposed, rounding)
    return plain, transposed


def cast_128x128(
    w: Tensor,
    rounding: ScaleRounding = "none",
    *,
    transposed: bool = True,
    pad_to: Padding = UNPADDED,
    out: tuple[Tensor, Tensor | None, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """W [N, K] bf16 or fp32 -> q [N, K] e4m3, q^T [K, N] e4m3, scale [ceil(N / 128), ceil(K / 128)] fp32.

    Args:
        w: the weight.
        rounding: of the scales.
        transposed: False leaves q^T out: None.
        pad_to, out: see the head of the file.

    Raises:
        ValueError: w is no floating-point matrix with unit stride along K, or `out` does not fit it.
    """
    check_matrix(w, "cast_128x128")
    given_q, given_q_t, given_scale = out or (None, None, None)
    q = matrix("cast_128x128", w.shape, w.device, pad_to, given_q)
    q_t = matrix("cast_128x128", w.T.shape, w.device, pad_to, given_q_t) if transposed else None
    check_pair("cast_128x128", q, q_t)
    scale = scales("cast_128x128", q.shape, BLOCK_128X128, w.device, given_scale)
    if not on_gpu(w, "a cast to FP8"):
        whole, new_scale = quantize(zeros_around(w, cover(q, q_t)), BLOCK_128X128, rounding)
        copy_both_ways(whole, q, q_t)
        return q, q_t, scale.copy_(new_scale)
    if q.numel():
        transpose = q if q_t is None else q_t
        block_kernel[scale.shape[1], scale.shape[0]](
            w,
            q,
            transpose,
            scale,
            *w.shape,
            w.stride(0),
            *q.shape,
            q.stride(0),
            transpose.shape[0],
            -(-transpose.shape[1] // 8),
            transpose.stride(0) // 8,
            scale.stride(0),
            TRANSPOSED=transposed,
            POWER_OF_TWO=rounding == "power_of_two",
            num_warps=4,
        )
    return q, q_t, scale


def _launch_rows(
    x: Tensor, q: Tensor, scale: Tensor, rows: int, columns: int, rounding: ScaleRounding, activation: bool
) -> None:
    """Programs of rows x columns, a scale per row of each."""
    grid = (-(-q.shape[0] // rows), -(-q.shape[1] // columns))
    sizes = (*x.shape, x.stride(0), *q.shape, q.stride(0), scale.stride(1))
    rows_kernel[grid](
        x,
        q,
        scale,
        *sizes,
        BLOCK_M=rows,
        BLOCK_K=columns,
        POWER_OF_TWO=rounding == "power_of_two",
        num_warps=4,
        **early_launch(x, activation),
    )


def _launch_tiles(x: Tensor, plain: Cast | None, transposed: Cast | None, rounding: ScaleRounding) -> None:
    """Tiles of 128 rows, cast along rows, along columns, or both."""
    words, num_warps = TILE if plain else COLUMN_TILE
    aligned, *source = in_words(x)
    either = plain or transposed
    assert either is not None
    q, scale = plain or either
    q_t, scale_t = transposed or either
    tile_kernel[tile_grid(q if plain else q_t.T, words)](
        x,
        q,
        scale,
        q_t,
        scale_t,
        x.shape[0],
        *source,
        *tile_sizes(q, scale, q_t, scale_t),
        WORDS=words,
        ALIGNED=aligned,
        PLAIN=plain is not None,
        TRANSPOSED=transposed is not None,
        POWER_OF_TWO=rounding == "power_of_two",
        num_warps=num_warps,
    )
