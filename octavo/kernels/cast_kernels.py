"""The Triton kernels of `kernels.cast`."""

from __future__ import annotations

from octavo.kernels.e4m3 import inverse_of, magnitude_bits, minus_quotient, pack4, quotient, scale_from_bits, to_e4m3
from octavo.kernels.early_launch import begin
from octavo.kernels.tile import (
    amax_columns,
    amax_rows,
    cast_tile,
    load_tile,
    store_column_scales,
    store_row_scales,
    store_rows,
    store_transposed,
    values_of,
)
from octavo.kernels.triton_shim import tl, triton


@triton.jit
def rows_kernel(
    x_ptr, q_ptr, scale_ptr, T, K, stride, T_out, K_out, stride_q, stride_s,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr, POWER_OF_TWO: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program for BLOCK_M rows of a block of BLOCK_K columns: a scale per row and block."""
    begin(EARLY)
    rows = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    row, column = rows[:, None], k[None, :]
    x = tl.load(x_ptr + row * stride + column, mask=(row < T) & (column < K), other=0.0).to(tl.float32)
    scale = scale_from_bits(tl.max(magnitude_bits(x), axis=1), POWER_OF_TWO)
    tl.store(scale_ptr + tl.program_id(1).to(tl.int64) * stride_s + rows, scale, mask=rows < T_out)
    q = to_e4m3(quotient(x, scale[:, None], inverse_of(scale)[:, None]))
    tl.store(q_ptr + row * stride_q + column, q, mask=(row < T_out) & (column < K_out))


@triton.jit
def tile_kernel(
    x_ptr, q_ptr, scale_ptr, q_t_ptr, scale_t_ptr, T, K, stride,
    T_out, K_out, words, stride_q, stride_s, words_t, stride_t, stride_s_t,
    WORDS: tl.constexpr, ALIGNED: tl.constexpr, PLAIN: tl.constexpr, TRANSPOSED: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """One program for 128 rows and 2 * WORDS columns: 1x128, 128x1 transposed, or both."""
    row_block, column_block = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    t, word = row_block * 128 + 4 * tl.arange(0, 32), column_block * WORDS + tl.arange(0, WORDS)
    w0, w1, w2, w3 = load_tile(x_ptr, t, word, T, K, stride, ALIGNED)
    cast_tile(
        w0, w1, w2, w3, row_block, column_block, t, word, q_ptr, scale_ptr, q_t_ptr, scale_t_ptr,
        T_out, K_out, words, stride_q, stride_s, words_t, stride_t, stride_s_t, PLAIN, TRANSPOSED, POWER_OF_TWO,
    )  # fmt: skip


@triton.jit
def block_kernel(
    w_ptr, q_ptr, q_t_ptr, scale_ptr, N, K, stride, N_out, K_out, stride_q, K_t, words_t, stride_t, stride_s,
    TRANSPOSED: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """One program for 128 x 128 of a weight: the cast and its transpose, eight rows to a 64-bit word.

    Words of 64 bits, as Triton 3.6 transposes bytes and 32-bit words of this layout wrongly (through stmatrix).
    """
    column_block, row_block = tl.program_id(0), tl.program_id(1).to(tl.int64)
    n8 = tl.arange(0, 16)
    k = column_block * 128 + tl.arange(0, 128)
    n = row_block * 128 + 8 * n8
    x0, x1, x2, x3 = _load4(w_ptr, n, k, N, K, stride)
    x4, x5, x6, x7 = _load4(w_ptr, n + 4, k, N, K, stride)
    bits = tl.maximum(_max4(x0, x1, x2, x3), _max4(x4, x5, x6, x7))
    scale = scale_from_bits(tl.max(tl.max(bits, axis=1), axis=0), POWER_OF_TWO)
    tl.store(scale_ptr + row_block * stride_s + column_block, scale)
    low, high = _pack4(x0, x1, x2, x3, scale), _pack4(x4, x5, x6, x7, scale)
    if TRANSPOSED:
        words = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
        word = row_block * 16 + n8[None, :]
        at = q_t_ptr.to(tl.pointer_type(tl.int64)) + k[:, None].to(tl.int64) * stride_t + word
        tl.store(at, tl.trans(words), mask=(k[:, None] < K_t) & (word < words_t))
    n = n[:, None]
    at = q_ptr + n * stride_q + k[None, :]
    for j in tl.static_range(4):
        q = ((low >> (8 * j)) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        tl.store(at + j * stride_q, q, mask=(n + j < N_out) & (k[None, :] < K_out))
        q = ((high >> (8 * j)) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        tl.store(at + (j + 4) * stride_q, q, mask=(n + j + 4 < N_out) & (k[None, :] < K_out))


@triton.jit
def _load4(x_ptr, n, k, N, K, stride):
    """Rows n, n + 1, n + 2, n + 3, each [rows, columns] fp32, zeros beyond the matrix."""
    row, inside = n[:, None], k[None, :] < K
    at = x_ptr + row * stride + k[None, :]
    x0 = tl.load(at, mask=inside & (row < N), other=0.0).to(tl.float32)
    x1 = tl.load(at + stride, mask=inside & (row + 1 < N), other=0.0).to(tl.float32)
    x2 = tl.load(at + 2 * stride, mask=inside & (row + 2 < N), other=0.0).to(tl.float32)
    x3 = tl.load(at + 3 * stride, mask=inside & (row + 3 < N), other=0.0).to(tl.float32)
    return x0, x1, x2, x3


@triton.jit
def _max4(x0, x1, x2, x3):
    low = tl.maximum(magnitude_bits(x0), magnitude_bits(x1))
    return tl.maximum(low, tl.maximum(magnitude_bits(x2), magnitude_bits(x3)))


@triton.jit
def _pack4(x0, x1, x2, x3, scale):
    inverse = inverse_of(scale)
    y0, y1 = minus_quotient(x0, scale, inverse), minus_quotient(x1, scale, inverse)
    return pack4(y0, y1, minus_quotient(x2, scale, inverse), minus_quotient(x3, scale, inverse))


@triton.jit
def amax_kernel(
    x_ptr, bits_ptr, groups_ptr, T, K, stride, T_out, K_out, row_bits,
    WORDS: tl.constexpr, ALIGNED: tl.constexpr, PER_COLUMN: tl.constexpr, PER_ROW: tl.constexpr,
    SPLIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program for 128 rows and 2 * WORDS columns: raises the bits of the largest magnitudes so far.

    One for each projection; or for each column, of each projection along the rows, and then from `row_bits` on for each
    row, of each projection along the columns. Maxima do not depend on the order of programs.
    """
    begin(EARLY)
    row_block, column_block = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    row_group, _ = _group_of(groups_ptr, row_block, SPLIT == "rows")
    column_group, _ = _group_of(groups_ptr, column_block, SPLIT == "columns")
    t, word = row_block * 128 + 4 * tl.arange(0, 32), column_block * WORDS + tl.arange(0, WORDS)
    w0, w1, w2, w3 = load_tile(x_ptr, t, word, T, K, stride, ALIGNED)
    low, high = amax_columns(w0, w1, w2, w3)
    if PER_COLUMN:
        column = 2 * word
        at = bits_ptr + row_group * K_out + column
        tl.atomic_max(at, low, mask=column < K_out, sem="relaxed")
        tl.atomic_max(at + 1, high, mask=column + 1 < K_out, sem="relaxed")
    else:
        tl.atomic_max(bits_ptr + row_group + column_group, tl.max(tl.maximum(low, high), axis=0), sem="relaxed")
    if PER_ROW:
        at = bits_ptr + row_bits + column_group * T_out + t
        tl.atomic_max(at, amax_rows(w0), mask=t < T_out, sem="relaxed")
        tl.atomic_max(at + 1, amax_rows(w1), mask=t + 1 < T_out, sem="relaxed")
        tl.atomic_max(at + 2, amax_rows(w2), mask=t + 2 < T_out, sem="relaxed")
        tl.atomic_max(at + 3, amax_rows(w3), mask=t + 3 < T_out, sem="relaxed")


@triton.jit
def scaled_kernel(
    x_ptr, bits_ptr, groups_ptr, saturated_ptr, q_ptr, scale_ptr, q_t_ptr, scale_t_ptr, T, K, stride,
    T_out, K_out, words, stride_q, stride_s, words_t, stride_t, stride_s_t, row_bits,
    WORDS: tl.constexpr, ALIGNED: tl.constexpr, PLAIN: tl.constexpr, TRANSPOSED: tl.constexpr,
    PER_COLUMN: tl.constexpr, PER_ROW: tl.constexpr, SPLIT: tl.constexpr, GIVEN: tl.constexpr, COUNT: tl.constexpr,
    POWER_OF_TWO: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program for 128 rows and 2 * WORDS columns: by scales from `amax_kernel`, or by one that is GIVEN.

    The last tiles go first: what `amax_kernel` read last may still be in the cache.
    """
    begin(EARLY)
    row_block = (tl.num_programs(1) - 1 - tl.program_id(1)).to(tl.int64)
    column_block = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64)
    row_group, begins_rows = _group_of(groups_ptr, row_block, SPLIT == "rows")
    column_group, begins_columns = _group_of(groups_ptr, column_block, SPLIT == "columns")
    t, word = row_block * 128 + 4 * tl.arange(0, 32), column_block * WORDS + tl.arange(0, WORDS)
    w0, w1, w2, w3 = load_tile(x_ptr, t, word, T, K, stride, ALIGNED)
    if PER_COLUMN:
        column = 2 * word
        at = bits_ptr + row_group * K_out + column
        low = scale_from_bits(tl.load(at, mask=column < K_out, other=0), POWER_OF_TWO)
        high = scale_from_bits(tl.load(at + 1, mask=column + 1 < K_out, other=0), POWER_OF_TWO)
        if begins_rows:
            store_column_scales(scale_t_ptr + row_group * stride_s_t, low, high, word, K_out)
    else:
        if GIVEN:
            scale = tl.load(scale_ptr)
        else:
            scale = scale_from_bits(tl.load(bits_ptr + row_group + column_group), POWER_OF_TWO)
            if begins_rows & begins_columns:  # one program for each projection
                tl.store(scale_ptr + row_group + column_group * stride_s, scale)
        if COUNT:
            limit = 448.0 * scale
            beyond = _num_beyond(w0, limit) + _num_beyond(w1, limit) + _num_beyond(w2, limit) + _num_beyond(w3, limit)
            tl.atomic_add(saturated_ptr, beyond.to(tl.int64), sem="relaxed")
        low = tl.full([WORDS], 0.0, tl.float32) + scale
        high = low
    if PLAIN:
        if PER_ROW:
            at = bits_ptr + row_bits + column_group * T_out + t
            s0 = scale_from_bits(tl.load(at, mask=t < T_out, other=0), POWER_OF_TWO)
            s1 = scale_from_bits(tl.load(at + 1, mask=t + 1 < T_out, other=0), POWER_OF_TWO)
            s2 = scale_from_bits(tl.load(at + 2, mask=t + 2 < T_out, other=0), POWER_OF_TWO)
            s3 = scale_from_bits(tl.load(at + 3, mask=t + 3 < T_out, other=0), POWER_OF_TWO)
            if begins_columns:
                store_row_scales(scale_ptr + column_group * stride_s, s0, s1, s2, s3, t, T_out)
        else:
            s0 = tl.full([32], 0.0, tl.float32) + scale
            s1, s2, s3 = s0, s0, s0
        store_rows(q_ptr, w0, w1, w2, w3, s0, s1, s2, s3, t, word, T_out, words, stride_q, GIVEN)
    if TRANSPOSED:
        store_transposed(q_t_ptr, w0, w1, w2, w3, low, high, row_block, word, K_out, words_t, stride_t, GIVEN)


@triton.jit
def _group_of(groups_ptr, block, SPLIT: tl.constexpr):
    """Which of the projections along its dimension a block is of, and whether it is the first one of it."""
    if SPLIT:
        group = tl.load(groups_ptr + block + 1)
        return group, group != tl.load(groups_ptr + block)
    else:
        return 0, block == 0


@triton.jit
def _num_beyond(words, limit):
    """How many magnitudes are above the limit."""
    low, high = values_of(words)
    return tl.sum(tl.sum((tl.abs(low) > limit).to(tl.int32) + (tl.abs(high) > limit).to(tl.int32), axis=1), axis=0)
