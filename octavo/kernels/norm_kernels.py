"""The Triton kernels of `kernels.norm`."""

from __future__ import annotations

from octavo.kernels.e4m3 import (
    inverse_of,
    magnitude_bits,
    quotient,
    raise_amax,
    round_bf16,
    scale_from_bits,
    to_e4m3,
)
from octavo.kernels.early_launch import begin
from octavo.kernels.tile import bf16_words, cast_tile, load_tile, values_of
from octavo.kernels.triton_shim import tl, triton


@triton.jit
def norm_kernel(
    x_ptr, gain_ptr, y_ptr, inverse_ptr, num_rows, B, stride_a, stride_b,
    R: tl.constexpr, BLOCK_D: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, NORM_EPS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One program for R rows of X [A, B, D]."""
    begin(EARLY)
    rows = tl.program_id(0) * R + tl.arange(0, R)
    d = tl.arange(0, BLOCK_D)[None, :]
    inside = (rows[:, None] < num_rows) & (d < D)
    x = _load_rows(x_ptr, rows, d, inside, B, stride_a, stride_b)
    inverse = inverse_rms_of(x, D, BITS, NORM_EPS)
    tl.store(inverse_ptr + rows, inverse, mask=rows < num_rows)
    y = x * inverse[:, None] * tl.load(gain_ptr + d, mask=d < D, other=0.0)
    tl.store(y_ptr + rows[:, None].to(tl.int64) * D + d, round_bf16(y), mask=inside)


@triton.jit
def backward_kernel(
    x_ptr, gain_ptr, inverse_ptr, grad_y_ptr, grad_added_ptr, grad_x_ptr, partial_ptr,
    num_rows, steps, B, stride_a, stride_b, grad_B, grad_stride_a, grad_stride_b,
    R: tl.constexpr, BLOCK_D: tl.constexpr, D: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """One program for `steps` times R rows, whose part of the gain's gradient it adds up."""
    d = tl.arange(0, BLOCK_D)[None, :]
    gain = tl.load(gain_ptr + d, mask=d < D, other=0.0)
    grad_gain = tl.zeros([R, BLOCK_D], tl.float32)
    first = tl.program_id(0).to(tl.int64) * steps
    for step in range(steps):
        rows = (first + step) * R + tl.arange(0, R)
        inside = (rows[:, None] < num_rows) & (d < D)
        x = _load_rows(x_ptr, rows, d, inside, B, stride_a, stride_b)
        grad_y = _load_rows(grad_y_ptr, rows, d, inside, grad_B, grad_stride_a, grad_stride_b)
        inverse = tl.load(inverse_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
        normalized = x * inverse
        grad_gain += grad_y * normalized
        grad_normalized = grad_y * gain
        projection = tl.sum(grad_normalized * normalized, axis=1)[:, None] / D
        grad_x = round_bf16((grad_normalized - normalized * projection) * inverse)
        at = rows[:, None].to(tl.int64) * D + d
        if ADD:
            grad_x = round_bf16(grad_x + tl.load(grad_added_ptr + at, mask=inside, other=0.0).to(tl.float32))
        tl.store(grad_x_ptr + at, grad_x, mask=inside)
    at = partial_ptr + tl.program_id(0) * D + tl.arange(0, BLOCK_D)
    tl.store(at, tl.sum(grad_gain, axis=0), mask=tl.arange(0, BLOCK_D) < D)


@triton.jit
def norm_cast_kernel(
    residual_ptr, delta_ptr, gain_ptr, h_ptr, inverse_ptr, q_ptr, scale_ptr, T, T_out, D_out, stride_q, stride_s,
    R: tl.constexpr, BLOCK_D: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, NORM_EPS: tl.constexpr,
    ADD: tl.constexpr, PER_ROW: tl.constexpr, POWER_OF_TWO: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program for R rows: h, its norm, and the cast of that, of which only h and the cast are stored."""
    begin(EARLY)
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    d = tl.arange(0, BLOCK_D)[None, :]
    y = _norm_of_sum(residual_ptr, delta_ptr, gain_ptr, h_ptr, inverse_ptr, rows, d, T, D, BITS, NORM_EPS, ADD)
    if PER_ROW:
        scale = scale_from_bits(tl.max(magnitude_bits(y), axis=1), POWER_OF_TWO)
        tl.store(scale_ptr + rows, scale, mask=rows < T_out)
        y = quotient(y, scale[:, None], inverse_of(scale)[:, None])
    else:
        BLOCKS: tl.constexpr = BLOCK_D // 128
        y = tl.reshape(y, [R, BLOCKS, 128])
        scale = scale_from_bits(tl.max(magnitude_bits(y), axis=2), POWER_OF_TWO)
        block = tl.arange(0, BLOCKS)[None, :]
        inside_blocks = (rows[:, None] < T_out) & (block * 128 < D_out)
        tl.store(scale_ptr + block.to(tl.int64) * stride_s + rows[:, None], scale, mask=inside_blocks)
        y = tl.reshape(quotient(y, scale[:, :, None], inverse_of(scale)[:, :, None]), [R, BLOCK_D])
    tl.store(q_ptr + rows[:, None] * stride_q + d, to_e4m3(y), mask=(rows[:, None] < T_out) & (d < D_out))


@triton.jit
def sum_norm_kernel(
    residual_ptr, delta_ptr, gain_ptr, h_ptr, inverse_ptr, y_ptr, bits_ptr, T,
    R: tl.constexpr, BLOCK_D: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, NORM_EPS: tl.constexpr,
    ADD: tl.constexpr, AMAX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program for R rows: h and its norm. With AMAX it raises the bits of the norm's largest magnitude so far."""
    begin(EARLY)
    rows = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    d = tl.arange(0, BLOCK_D)[None, :]
    y = _norm_of_sum(residual_ptr, delta_ptr, gain_ptr, h_ptr, inverse_ptr, rows, d, T, D, BITS, NORM_EPS, ADD)
    tl.store(y_ptr + rows[:, None] * D + d, y, mask=(rows[:, None] < T) & (d < D))
    if AMAX:
        raise_amax(bits_ptr, y)


@triton.jit
def _norm_of_sum(
    residual_ptr, delta_ptr, gain_ptr, h_ptr, inverse_ptr, rows, d, T,
    D: tl.constexpr, BITS: tl.constexpr, NORM_EPS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """The norm of residual + delta, zeros outside the matrix; stores that sum and the inverse root mean squares."""
    inside = (rows[:, None] < T) & (d < D)
    at = rows[:, None] * D + d
    h = tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        h = round_bf16(h + tl.load(delta_ptr + at, mask=inside, other=0.0).to(tl.float32))
        tl.store(h_ptr + at, h, mask=inside)
    inverse = inverse_rms_of(h, D, BITS, NORM_EPS)
    tl.store(inverse_ptr + rows, inverse, mask=rows < T)
    y = round_bf16(h * inverse[:, None] * tl.load(gain_ptr + d, mask=d < D, other=0.0))
    return tl.where(inside, y, 0.0)  # not -0 of a negative gain, nor NaN of a row's


@triton.jit
def norm_transposed_kernel(
    h_ptr, gain_ptr, inverse_ptr, q_t_ptr, scale_t_ptr, T, D, K, stride, K_out, words_t, stride_t, stride_s_t,
    WORDS: tl.constexpr, ALIGNED: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """One program for 128 rows and 2 * WORDS columns of h: the 128x1 cast of its norm, transposed."""
    row_block, column_block = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    t, word = row_block * 128 + 4 * tl.arange(0, 32), column_block * WORDS + tl.arange(0, WORDS)
    w0, w1, w2, w3 = load_tile(h_ptr, t, word, T, K, stride, ALIGNED)
    column = 2 * word
    low = tl.load(gain_ptr + column, mask=column < D, other=0.0)[None, :]
    high = tl.load(gain_ptr + column + 1, mask=column + 1 < D, other=0.0)[None, :]
    w0 = _norm_words(w0, inverse_ptr, t, T, low, high)
    w1 = _norm_words(w1, inverse_ptr, t + 1, T, low, high)
    w2 = _norm_words(w2, inverse_ptr, t + 2, T, low, high)
    w3 = _norm_words(w3, inverse_ptr, t + 3, T, low, high)
    if (row_block * 128 + 128 > T) | ((column_block + 1) * (2 * WORDS) > D):
        w0, w1 = _only_inside(w0, t, column, T, D), _only_inside(w1, t + 1, column, T, D)
        w2, w3 = _only_inside(w2, t + 2, column, T, D), _only_inside(w3, t + 3, column, T, D)
    cast_tile(
        w0, w1, w2, w3, row_block, column_block, t, word, q_t_ptr, scale_t_ptr, q_t_ptr, scale_t_ptr,
        0, K_out, 0, 0, 0, words_t, stride_t, stride_s_t, False, True, POWER_OF_TWO,
    )  # fmt: skip


@triton.jit
def _norm_words(words, inverse_ptr, t, T, gain_low, gain_high):
    low, high = values_of(words)
    inverse = tl.load(inverse_ptr + t, mask=t < T, other=0.0)[:, None]
    return bf16_words(low * inverse * gain_low, high * inverse * gain_high)


@triton.jit
def _only_inside(words, t, column, T, D):
    """0 outside the matrix: not -0 of a negative gain, nor NaN of a row's."""
    columns = tl.where(column < D, 0xFFFF, 0) | tl.where(column + 1 < D, -0x10000, 0)
    return tl.where(t[:, None] < T, words & columns[None, :], 0)


@triton.jit
def _load_rows(x_ptr, rows, d, inside, B, stride_a, stride_b):
    """Rows of X [A, B, D], counted through A and B, fp32."""
    at = (rows // B).to(tl.int64) * stride_a + rows % B * stride_b
    return tl.load(x_ptr + at[:, None] + d, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def inverse_rms_of(x, D: tl.constexpr, BITS: tl.constexpr, NORM_EPS: tl.constexpr):
    """1 / sqrt(mean(x^2) + norm_eps) of the rows of x [R, columns] fp32; NaN where a row is not finite.

    Magnitudes are rounded to whole numbers of BITS bits, 2**exponent above the row's largest, as `to_grid` does; the
    sum of their squares is a whole number below 2**53, and the rest is done in float64 as in the reference.
    """
    amax = tl.max(magnitude_bits(x), axis=1)
    shift = BITS - ((amax >> 23) - 126)  # amax < 2**exponent
    half = shift >> 1  # the factor itself may be no FP32 number
    first = ((half + 127) << 23).to(tl.float32, bitcast=True)[:, None]
    second = ((shift - half + 127) << 23).to(tl.float32, bitcast=True)[:, None]
    whole = tl.fma(tl.abs(x) * first, second, 8388608.0).to(tl.int32, bitcast=True) & 0x7FFFFF  # 2**23 has no fraction
    total = tl.sum(whole.to(tl.int64) * whole.to(tl.int64), axis=1).to(tl.float64)
    unit = ((1023 - 2 * shift).to(tl.int64) << 52).to(tl.float64, bitcast=True) * tl.full(
        total.shape, 1 / D, tl.float64
    )
    inverse = _inverse_root(total * unit + tl.full(total.shape, NORM_EPS, tl.float64)).to(tl.float32)
    return tl.where(amax < 0x7F800000, inverse, float("nan"))


@triton.jit
def _inverse_root(x):
    """1 / sqrt(x) of positive float64, infinity of 0: FP32's, made exact by two steps of Newton's method.

    The hardware's own root and division in float64 take ten times as many instructions.
    """
    half = ((x.to(tl.int64, bitcast=True) >> 52) - 1023) >> 1  # x = 4**half times a number from 1 to 4
    near_one = (x.to(tl.int64, bitcast=True) - (half << 53)).to(tl.float64, bitcast=True)
    root = tl.rsqrt(near_one.to(tl.float32)).to(tl.float64)
    root = root * (1.5 - (0.5 * near_one) * root * root)
    root = root * (1.5 - (0.5 * near_one) * root * root)
    return tl.where(x > 0.0, root * ((1023 - half) << 52).to(tl.float64, bitcast=True), float("inf"))
