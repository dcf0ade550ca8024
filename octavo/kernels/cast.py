"""Casts to FP8 in the layouts that the GEMMs of each recipe read, each tensor read once.

    cast_rows      X [M, K]  ->  q [M, K], a scale per row                         rowwise
    cast_1x128     X [M, K]  ->  q [M, K], a scale per row and 128 columns         FProp X, DGrad dY
    cast_128x1     X [T, K]  ->  q [K, T], a scale per column and 128 rows         WGrad X, dY: reduced over T
    cast_both      the last two from one read                                      a gradient
    cast_128x128   W [N, K]  ->  q [N, K], its transpose, a scale per 128 x 128    a weight, once per optimiser step

The bytes and scales are those of `numerics.fp8.quantize`, on any device. A GEMM reads scales along its outer
dimension, so they lie with that dimension contiguous: a scale [M, B] has strides (1, M).
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.e4m3 import inverse_of, magnitude_bits, pack4, quotient, scale_from_bits, to_e4m3
from octavo.kernels.triton_shim import INTERPRETED, require_triton, tl, triton
from octavo.numerics.fp8 import (
    BLOCK_1X128,
    BLOCK_128X1,
    BLOCK_128X128,
    E4M3,
    PER_ROW,
    ScaleRounding,
    quantize,
)

BLOCK = 128
ROWS_1X128 = 32
"""Rows of a program of the 1x128 cast."""
COLUMNS_128X1 = 64
"""Columns of a program of the 128x1 cast."""


def cast_rows(x: Tensor, rounding: ScaleRounding = "none") -> tuple[Tensor, Tensor]:
    """X [M, K] bf16 or fp32 -> q [M, K] e4m3, scale [M, 1] fp32.

    Raises:
        ValueError: x is no floating-point matrix with unit stride along K.
    """
    _check(x, "cast_rows")
    if not _on_gpu(x):
        return quantize(x, PER_ROW, rounding)
    M, K = x.shape
    q = torch.empty(M, K, dtype=E4M3, device=x.device)
    scale = torch.empty(M, 1, device=x.device)
    if x.numel():
        block = triton.next_power_of_2(K)
        _rows_kernel[(M,)](
            x, q, scale, K, x.stride(0), BLOCK_K=block, num_warps=4, POWER_OF_TWO=rounding == "power_of_two"
        )
    return q, scale


def cast_1x128(x: Tensor, rounding: ScaleRounding = "none") -> tuple[Tensor, Tensor]:
    """X [M, K] bf16 or fp32 -> q [M, K] e4m3, scale [M, ceil(K / 128)] fp32 with strides (1, M).

    Raises:
        ValueError: x is no floating-point matrix with unit stride along K.
    """
    _check(x, "cast_1x128")
    if not _on_gpu(x):
        q, scale = quantize(x, BLOCK_1X128, rounding)
        return q, scale.T.contiguous().T
    M, K = x.shape
    q = torch.empty(M, K, dtype=E4M3, device=x.device)
    scale = torch.empty(-(-K // BLOCK), M, device=x.device).T
    if x.numel():
        grid = (-(-M // ROWS_1X128), -(-K // BLOCK))
        _1x128_kernel[grid](
            x, q, scale, M, K, x.stride(0), BLOCK_M=ROWS_1X128, num_warps=4, POWER_OF_TWO=rounding == "power_of_two"
        )
    return q, scale


def cast_128x1(x: Tensor, rounding: ScaleRounding = "none") -> tuple[Tensor, Tensor]:
    """X [T, K] bf16 or fp32 -> q [K, T] e4m3, scale [K, ceil(T / 128)] fp32 with strides (1, K).

    Raises:
        ValueError: x is no floating-point matrix with unit stride along K.
    """
    _check(x, "cast_128x1")
    if not _on_gpu(x):
        q, scale = quantize(x, BLOCK_128X1, rounding)
        return q.T.contiguous(), scale.T
    T, K = x.shape
    q_t, scale_t = _transposed(x)
    if x.numel():
        grid = (-(-K // COLUMNS_128X1), scale_t.shape[1])
        _128x1_kernel[grid](
            x,
            q_t,
            scale_t,
            T,
            K,
            x.stride(0),
            q_t.stride(0),
            BLOCK_K=COLUMNS_128X1,
            num_warps=2,
            POWER_OF_TWO=rounding == "power_of_two",
        )
    return q_t[:, :T], scale_t


def cast_both(x: Tensor, rounding: ScaleRounding = "none") -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """`cast_1x128` and `cast_128x1` of X [T, K] from one read.

    Raises:
        ValueError: x is no floating-point matrix with unit stride along K.
    """
    _check(x, "cast_both")
    if not _on_gpu(x):
        return cast_1x128(x, rounding), cast_128x1(x, rounding)
    T, K = x.shape
    q = torch.empty(T, K, dtype=E4M3, device=x.device)
    scale = torch.empty(-(-K // BLOCK), T, device=x.device).T
    q_t, scale_t = _transposed(x)
    if x.numel():
        _both_kernel[(scale.shape[1], scale_t.shape[1])](
            x,
            q,
            scale,
            q_t,
            scale_t,
            T,
            K,
            x.stride(0),
            q_t.stride(0),
            num_warps=4,
            POWER_OF_TWO=rounding == "power_of_two",
        )
    return (q, scale), (q_t[:, :T], scale_t)


def cast_128x128(w: Tensor, rounding: ScaleRounding = "none") -> tuple[Tensor, Tensor, Tensor]:
    """W [N, K] bf16 or fp32 -> q [N, K] e4m3, q^T [K, N] e4m3, scale [ceil(N / 128), ceil(K / 128)] fp32.

    Raises:
        ValueError: w is no floating-point matrix with unit stride along K.
    """
    _check(w, "cast_128x128")
    if not _on_gpu(w):
        q, scale = quantize(w, BLOCK_128X128, rounding)
        return q, q.T.contiguous(), scale
    N, K = w.shape
    q = torch.empty(N, K, dtype=E4M3, device=w.device)
    q_t = torch.empty(K, -(-N // BLOCK) * BLOCK, dtype=E4M3, device=w.device)
    scale = torch.empty(-(-N // BLOCK), -(-K // BLOCK), device=w.device)
    if w.numel():
        _128x128_kernel[(scale.shape[1], scale.shape[0])](
            w, q, q_t, scale, N, K, w.stride(0), q_t.stride(0), num_warps=4, POWER_OF_TWO=rounding == "power_of_two"
        )
    return q, q_t[:, :N], scale


def _transposed(x: Tensor) -> tuple[Tensor, Tensor]:
    """Where a transposed cast of X [T, K] goes: whole blocks of 128 rows, zeros after the last."""
    T, K = x.shape
    num_blocks = -(-T // BLOCK)
    q_t = torch.empty(K, num_blocks * BLOCK, dtype=E4M3, device=x.device)
    return q_t, torch.empty(num_blocks, K, device=x.device).T


def _check(x: Tensor, name: str) -> None:
    if x.ndim != 2 or not x.is_floating_point() or x.stride(1) != 1:
        raise ValueError(
            f"{name} wants a floating-point matrix [M, K] with unit stride along K; got shape {tuple(x.shape)}, stride "
            f"{x.stride()}, dtype {x.dtype}"
        )


def _on_gpu(x: Tensor) -> bool:
    """Chosen by the tensor's device. The interpreter, which tests switch on, runs kernels on CPU tensors."""
    if x.is_cuda or INTERPRETED:
        require_triton("a cast to FP8")
        return True
    return False


@triton.jit
def _rows_kernel(x_ptr, q_ptr, scale_ptr, K, stride, BLOCK_K: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    inside = k < K
    x = tl.load(x_ptr + row * stride + k, mask=inside, other=0.0).to(tl.float32)
    scale = scale_from_bits(tl.max(magnitude_bits(x), axis=0), POWER_OF_TWO)
    tl.store(scale_ptr + row, scale)
    tl.store(q_ptr + row * K + k, to_e4m3(quotient(x, scale, inverse_of(scale))), mask=inside)


@triton.jit
def _1x128_kernel(x_ptr, q_ptr, scale_ptr, M, K, stride, BLOCK_M: tl.constexpr, POWER_OF_TWO: tl.constexpr):
    """One program for BLOCK_M rows of a block of 128 columns."""
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column_block = tl.program_id(1)
    k = column_block * 128 + tl.arange(0, 128)
    inside = (rows[:, None] < M) & (k[None, :] < K)
    offsets = rows[:, None].to(tl.int64)
    x = tl.load(x_ptr + offsets * stride + k[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = scale_from_bits(tl.max(magnitude_bits(x), axis=1), POWER_OF_TWO)
    tl.store(scale_ptr + column_block.to(tl.int64) * M + rows, scale, mask=rows < M)
    tl.store(
        q_ptr + offsets * K + k[None, :],
        to_e4m3(quotient(x, scale[:, None], inverse_of(scale)[:, None])),
        mask=inside,
    )


@triton.jit
def _128x1_kernel(
    x_ptr, q_t_ptr, scale_t_ptr, T, K, stride, stride_t, BLOCK_K: tl.constexpr, POWER_OF_TWO: tl.constexpr
):
    """One program for 128 rows and BLOCK_K columns, written transposed.

    Row 4 i + j is row i of the j-th of four tiles, so that four values which lie together in the transpose are one
    32-bit word of one thread: transposing words moves a quarter of what transposing bytes does.
    """
    row_block = tl.program_id(1).to(tl.int64)
    t = row_block * 128 + 4 * tl.arange(0, 32)
    k = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    x0, x1, x2, x3 = _load4(x_ptr, t, k, T, K, stride, "")
    bits = tl.max(_max4(x0, x1, x2, x3), axis=0)
    scale = scale_from_bits(bits, POWER_OF_TWO)
    tl.store(scale_t_ptr + row_block * K + k, scale, mask=k < K)
    _store_transposed(q_t_ptr, x0, x1, x2, x3, scale, row_block * 32, k, K, stride_t)


@triton.jit
def _both_kernel(x_ptr, q_ptr, scale_ptr, q_t_ptr, scale_t_ptr, T, K, stride, stride_t, POWER_OF_TWO: tl.constexpr):
    """One program for 128 rows and 128 columns, in halves of 64 columns: the largest magnitudes, then both casts.

    The second reading of the tile comes from the L1 cache; holding it in registers instead leaves too few threads to
    hide the memory's latency.
    """
    column_block, row_block = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    t = row_block * 128 + 4 * tl.arange(0, 32)
    left = column_block * 128 + tl.arange(0, 64)
    right = left + 64
    columns_left, l0, l1, l2, l3 = _tile_amax(x_ptr, t, left, T, K, stride)
    columns_right, r0, r1, r2, r3 = _tile_amax(x_ptr, t, right, T, K, stride)
    s0 = scale_from_bits(tl.maximum(l0, r0), POWER_OF_TWO)
    s1 = scale_from_bits(tl.maximum(l1, r1), POWER_OF_TWO)
    s2 = scale_from_bits(tl.maximum(l2, r2), POWER_OF_TWO)
    s3 = scale_from_bits(tl.maximum(l3, r3), POWER_OF_TWO)
    at = scale_ptr + column_block * T + t
    tl.store(at, s0, mask=t < T)
    tl.store(at + 1, s1, mask=t + 1 < T)
    tl.store(at + 2, s2, mask=t + 2 < T)
    tl.store(at + 3, s3, mask=t + 3 < T)
    scale_left = scale_from_bits(columns_left, POWER_OF_TWO)
    scale_right = scale_from_bits(columns_right, POWER_OF_TWO)
    tl.store(scale_t_ptr + row_block * K + left, scale_left, mask=left < K)
    tl.store(scale_t_ptr + row_block * K + right, scale_right, mask=right < K)
    _write_both(x_ptr, q_ptr, q_t_ptr, s0, s1, s2, s3, scale_left, t, row_block * 32, left, T, K, stride, stride_t)
    _write_both(x_ptr, q_ptr, q_t_ptr, s0, s1, s2, s3, scale_right, t, row_block * 32, right, T, K, stride, stride_t)


@triton.jit
def _tile_amax(x_ptr, t, k, T, K, stride):
    """Largest magnitudes, as bits: of the columns, and of the rows t, t + 1, t + 2, t + 3."""
    x0, x1, x2, x3 = _load4(x_ptr, t, k, T, K, stride, "evict_last")
    b0, b1, b2, b3 = magnitude_bits(x0), magnitude_bits(x1), magnitude_bits(x2), magnitude_bits(x3)
    columns = tl.max(tl.maximum(tl.maximum(b0, b1), tl.maximum(b2, b3)), axis=0)
    return columns, tl.max(b0, axis=1), tl.max(b1, axis=1), tl.max(b2, axis=1), tl.max(b3, axis=1)


@triton.jit
def _write_both(x_ptr, q_ptr, q_t_ptr, s0, s1, s2, s3, scale_t, t, first_word, k, T, K, stride, stride_t):
    """Both casts of a tile."""
    x0, x1, x2, x3 = _load4(x_ptr, t, k, T, K, stride, "evict_first")
    at = q_ptr + t[:, None] * K + k[None, :]
    inside, row = k[None, :] < K, t[:, None]
    tl.store(at, _cast_rows_of(x0, s0), mask=inside & (row < T))
    tl.store(at + K, _cast_rows_of(x1, s1), mask=inside & (row + 1 < T))
    tl.store(at + 2 * K, _cast_rows_of(x2, s2), mask=inside & (row + 2 < T))
    tl.store(at + 3 * K, _cast_rows_of(x3, s3), mask=inside & (row + 3 < T))
    _store_transposed(q_t_ptr, x0, x1, x2, x3, scale_t, first_word, k, K, stride_t)


@triton.jit
def _cast_rows_of(x, scale):
    return to_e4m3(quotient(x, scale[:, None], inverse_of(scale)[:, None]))


@triton.jit
def _store_transposed(q_t_ptr, x0, x1, x2, x3, scale, first_word, k, K, stride_t):
    """Rows t to t + 3 by a scale per column, as words of the transpose, whose rows are whole blocks of 128."""
    words = pack4(x0, x1, x2, x3, scale[None, :], inverse_of(scale)[None, :])
    word = first_word + tl.arange(0, 32)[None, :]
    at = q_t_ptr.to(tl.pointer_type(tl.int32)) + k[:, None].to(tl.int64) * (stride_t // 4) + word
    tl.store(at, tl.trans(words), mask=(k[:, None] < K) & (word >= 0))


@triton.jit
def _load4(x_ptr, t, k, T, K, stride, EVICT: tl.constexpr):
    """Rows t, t + 1, t + 2, t + 3, each [rows, columns] fp32, zeros beyond the matrix."""
    t = t[:, None]
    at = x_ptr + t * stride + k[None, :]
    inside = k[None, :] < K
    x0 = tl.load(at, mask=inside & (t < T), other=0.0, eviction_policy=EVICT).to(tl.float32)
    x1 = tl.load(at + stride, mask=inside & (t + 1 < T), other=0.0, eviction_policy=EVICT).to(tl.float32)
    x2 = tl.load(at + 2 * stride, mask=inside & (t + 2 < T), other=0.0, eviction_policy=EVICT).to(tl.float32)
    x3 = tl.load(at + 3 * stride, mask=inside & (t + 3 < T), other=0.0, eviction_policy=EVICT).to(tl.float32)
    return x0, x1, x2, x3


@triton.jit
def _128x128_kernel(w_ptr, q_ptr, q_t_ptr, scale_ptr, N, K, stride, stride_t, POWER_OF_TWO: tl.constexpr):
    """One program a block of 128 x 128, written both ways, eight rows to a 64-bit word.

    Words of 64 bits, as Triton 3.6 transposes bytes and 32-bit words of this layout wrongly (through stmatrix).
    """
    column_block, row_block = tl.program_id(0), tl.program_id(1)
    n8 = tl.arange(0, 16)
    k = column_block * 128 + tl.arange(0, 128)
    n = row_block.to(tl.int64) * 128 + 8 * n8
    x0, x1, x2, x3 = _load4(w_ptr, n, k, N, K, stride, "")
    x4, x5, x6, x7 = _load4(w_ptr, n + 4, k, N, K, stride, "")
    bits = tl.maximum(_max4(x0, x1, x2, x3), _max4(x4, x5, x6, x7))
    scale = scale_from_bits(tl.max(tl.max(bits, axis=1), axis=0), POWER_OF_TWO)
    tl.store(scale_ptr + row_block * tl.num_programs(0) + column_block, scale)
    inverse = inverse_of(scale)
    low = pack4(x0, x1, x2, x3, scale, inverse)
    high = pack4(x4, x5, x6, x7, scale, inverse)
    words = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
    out = k[:, None].to(tl.int64) * (stride_t // 8) + row_block * 16 + n8[None, :]
    tl.store(q_t_ptr.to(tl.pointer_type(tl.int64)) + out, tl.trans(words), mask=(k[:, None] < K) & (n8[None, :] >= 0))
    n = n[:, None]
    at = q_ptr + n * K + k[None, :]
    for j in tl.static_range(4):
        q = ((low >> (8 * j)) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        tl.store(at + j * K, q, mask=(n + j < N) & (k[None, :] < K))
        q = ((high >> (8 * j)) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        tl.store(at + (j + 4) * K, q, mask=(n + j + 4 < N) & (k[None, :] < K))


@triton.jit
def _max4(x0, x1, x2, x3):
    low = tl.maximum(magnitude_bits(x0), magnitude_bits(x1))
    return tl.maximum(low, tl.maximum(magnitude_bits(x2), magnitude_bits(x3)))
