"""The Triton kernels of `kernels.swiglu`. All of them take the value and the gradients from the same two functions."""

from __future__ import annotations

from octavo.kernels.e4m3 import (
    inverse_of,
    magnitude_bits,
    quotient,
    raise_amax,
    rough_inverse,
    round_bf16,
    scale_from_bits,
    to_e4m3,
)
from octavo.kernels.early_launch import begin
from octavo.kernels.tile import bf16_words, cast_tile, load_words, values_of
from octavo.kernels.triton_shim import constexpr, tl, triton

_MINUS_LOG2_E = constexpr(-1.4426950408889634)


@triton.jit
def gated(gate, up):
    """silu(gate) * up, fp32."""
    return gate * _sigmoid(gate) * up


@triton.jit
def gradients(gate, up, grad_y):
    """Gradients of gate and up, fp32."""
    sigmoid = _sigmoid(gate)
    return grad_y * up * sigmoid * tl.fma(gate, 1.0 - sigmoid, 1.0), grad_y * gate * sigmoid


@triton.jit
def _sigmoid(x):
    return rough_inverse(1.0 + tl.exp2(x * _MINUS_LOG2_E))


@triton.jit
def swiglu_kernel(
    gate_ptr, up_ptr, y_ptr, bits_ptr, T, F, stride,
    R: tl.constexpr, BLOCK_F: tl.constexpr, AMAX: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program for R rows and BLOCK_F columns. With AMAX it raises the bits of the largest magnitude so far."""
    begin(EARLY)
    rows, columns, inside = _place(T, F, R, BLOCK_F)
    at = rows * stride + columns
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = round_bf16(gated(gate, up))
    tl.store(y_ptr + rows * F + columns, y, mask=inside)
    if AMAX:
        raise_amax(bits_ptr, y)


@triton.jit
def backward_kernel(
    gate_ptr, up_ptr, grad_y_ptr, grad_gate_ptr, grad_up_ptr, bits_ptr, T, F, stride, stride_y,
    R: tl.constexpr, BLOCK_F: tl.constexpr, AMAX: tl.constexpr,
):  # fmt: skip
    """One program for R rows and BLOCK_F columns; the gradients of gate and up lie side by side, as do their bits."""
    rows, columns, inside = _place(T, F, R, BLOCK_F)
    at = rows * stride + columns
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    grad_y = tl.load(grad_y_ptr + rows * stride_y + columns, mask=inside, other=0.0).to(tl.float32)
    grad_gate, grad_up = gradients(gate, up, grad_y)
    grad_gate, grad_up = round_bf16(grad_gate), round_bf16(grad_up)
    out = rows * (2 * F) + columns
    tl.store(grad_gate_ptr + out, grad_gate, mask=inside)
    tl.store(grad_up_ptr + out, grad_up, mask=inside)
    if AMAX:
        raise_amax(bits_ptr, grad_gate)
        raise_amax(bits_ptr + 1, grad_up)


@triton.jit
def cast_rows_kernel(
    gate_ptr, up_ptr, q_ptr, scale_ptr, T, F, stride, T_out, F_out, stride_q, stride_s,
    R: tl.constexpr, BLOCK_F: tl.constexpr, POWER_OF_TWO: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program for R rows and BLOCK_F columns of the result: a scale per row and block."""
    begin(EARLY)
    rows, columns, inside = _place(T, F, R, BLOCK_F)
    at = rows * stride + columns
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = round_bf16(gated(gate, up))
    scale = scale_from_bits(tl.max(magnitude_bits(y), axis=1), POWER_OF_TWO)[:, None]
    tl.store(scale_ptr + tl.program_id(1).to(tl.int64) * stride_s + rows, scale, mask=rows < T_out)
    q = to_e4m3(quotient(y, scale, inverse_of(scale)))
    tl.store(q_ptr + rows * stride_q + columns, q, mask=(rows < T_out) & (columns < F_out))


@triton.jit
def cast_both_kernel(
    gate_ptr, up_ptr, q_ptr, scale_ptr, q_t_ptr, scale_t_ptr, T, F, stride,
    T_out, F_out, words, stride_q, stride_s, words_t, stride_t, stride_s_t,
    ALIGNED: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """One program for 128 rows and 128 columns of the result: both casts."""
    row_block, column_block, t, word = _tile_place()
    w0 = _gated_words(gate_ptr, up_ptr, t, word, T, F, stride, ALIGNED)
    w1 = _gated_words(gate_ptr, up_ptr, t + 1, word, T, F, stride, ALIGNED)
    w2 = _gated_words(gate_ptr, up_ptr, t + 2, word, T, F, stride, ALIGNED)
    w3 = _gated_words(gate_ptr, up_ptr, t + 3, word, T, F, stride, ALIGNED)
    cast_tile(
        w0, w1, w2, w3, row_block, column_block, t, word, q_ptr, scale_ptr, q_t_ptr, scale_t_ptr,
        T_out, F_out, words, stride_q, stride_s, words_t, stride_t, stride_s_t, True, True, POWER_OF_TWO,
    )  # fmt: skip


@triton.jit
def backward_cast_kernel(
    gate_ptr, up_ptr, grad_y_ptr, q_ptr, scale_ptr, q_t_ptr, scale_t_ptr, q_up_ptr, scale_up_ptr, q_t_up_ptr,
    scale_t_up_ptr, T, F, stride, stride_y, T_out, F_out, words, stride_q, stride_s, words_t, stride_t, stride_s_t,
    ALIGNED: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """One program for 128 rows and 128 columns of gate and of up: both casts of the gradient of each."""
    row_block, column_block, t, word = _tile_place()
    g0, u0 = _gradient_words(gate_ptr, up_ptr, grad_y_ptr, t, word, T, F, stride, stride_y, ALIGNED)
    g1, u1 = _gradient_words(gate_ptr, up_ptr, grad_y_ptr, t + 1, word, T, F, stride, stride_y, ALIGNED)
    g2, u2 = _gradient_words(gate_ptr, up_ptr, grad_y_ptr, t + 2, word, T, F, stride, stride_y, ALIGNED)
    g3, u3 = _gradient_words(gate_ptr, up_ptr, grad_y_ptr, t + 3, word, T, F, stride, stride_y, ALIGNED)
    cast_tile(
        g0, g1, g2, g3, row_block, column_block, t, word, q_ptr, scale_ptr, q_t_ptr, scale_t_ptr,
        T_out, F_out, words, stride_q, stride_s, words_t, stride_t, stride_s_t, True, True, POWER_OF_TWO,
    )  # fmt: skip
    cast_tile(
        u0, u1, u2, u3, row_block, column_block, t, word, q_up_ptr, scale_up_ptr, q_t_up_ptr, scale_t_up_ptr,
        T_out, F_out, words, stride_q, stride_s, words_t, stride_t, stride_s_t, True, True, POWER_OF_TWO,
    )  # fmt: skip


@triton.jit
def _place(T, F, R: tl.constexpr, BLOCK_F: tl.constexpr):
    """Rows [R, 1] and columns [1, BLOCK_F] of a program, and which of them are inside."""
    rows = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]
    columns = (tl.program_id(1) * BLOCK_F + tl.arange(0, BLOCK_F))[None, :]
    return rows, columns, (rows < T) & (columns < F)


@triton.jit
def _tile_place():
    """Blocks, rows and words of a program for 128 rows and 128 columns."""
    row_block, column_block = tl.program_id(1).to(tl.int64), tl.program_id(0).to(tl.int64)
    return row_block, column_block, row_block * 128 + 4 * tl.arange(0, 32), column_block * 64 + tl.arange(0, 64)


@triton.jit
def _gated_words(gate_ptr, up_ptr, t, word, T, F, stride, ALIGNED: tl.constexpr):
    gate_low, gate_high = values_of(load_words(gate_ptr, t[:, None], word[None, :], T, F, stride, ALIGNED))
    up_low, up_high = values_of(load_words(up_ptr, t[:, None], word[None, :], T, F, stride, ALIGNED))
    return bf16_words(gated(gate_low, up_low), gated(gate_high, up_high))


@triton.jit
def _gradient_words(gate_ptr, up_ptr, grad_y_ptr, t, word, T, F, stride, stride_y, ALIGNED: tl.constexpr):
    gate_low, gate_high = values_of(load_words(gate_ptr, t[:, None], word[None, :], T, F, stride, ALIGNED))
    up_low, up_high = values_of(load_words(up_ptr, t[:, None], word[None, :], T, F, stride, ALIGNED))
    grad_low, grad_high = values_of(load_words(grad_y_ptr, t[:, None], word[None, :], T, F, stride_y, ALIGNED))
    gate_of_low, up_of_low = gradients(gate_low, up_low, grad_low)
    gate_of_high, up_of_high = gradients(gate_high, up_high, grad_high)
    return bf16_words(gate_of_low, gate_of_high), bf16_words(up_of_low, up_of_high)
