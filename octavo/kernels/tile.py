"""A tile of 128 rows inside a Triton kernel, held once and cast along its rows, along its columns, or both.

    w0, w1, w2, w3 = load_tile(x_ptr, t, word, ...)          row 4 i + j is row i of the j-th of four
    s0, s1, s2, s3 = row_scales(w0, w1, w2, w3, False)       a scale per row of each
    low, high = column_scales(w0, w1, w2, w3, False)         of the even columns and of the odd ones

A word holds two neighbouring columns: BF16 pairs are int32, FP32 pairs int64. So half as many registers hold a BF16
tile, and one instruction takes the larger of two magnitudes twice. Four rows apart from each other, as four values
that lie together in the transpose are then one 32-bit word of one thread: transposing words moves a quarter of what
transposing bytes does.
"""

from __future__ import annotations

from torch import Tensor

from octavo.kernels.e4m3 import (
    inverse_of,
    minus_quotient,
    minus_saturating_quotient,
    pack2,
    pack4,
    round_bf16,
    scale_from_bits,
)
from octavo.kernels.triton_shim import INTERPRETED, constexpr, tl, triton

_CURE = constexpr(INTERPRETED)
"""The interpreter runs no inline assembly."""


def in_words(x: Tensor, *others: Tensor) -> tuple[bool, int, int]:
    """How `load_tile` reads X [T, K]: ALIGNED, columns and row stride, these two in words if X and the others are."""
    numbers = [n for y in (x, *others) for n in (y.shape[1], y.stride(0), y.data_ptr() // y.element_size())]
    size = 2 if all(n % 2 == 0 for n in numbers) else 1
    return size == 2, x.shape[1] // size, x.stride(0) // size


@triton.jit
def load_tile(x_ptr, t, word, T, K, stride, ALIGNED: tl.constexpr):
    """Rows t, t + 1, t + 2, t + 3 as words, zeros beyond the matrix; K and stride as `in_words` gives them."""
    w0 = load_words(x_ptr, t[:, None], word[None, :], T, K, stride, ALIGNED)
    w1 = load_words(x_ptr, t[:, None] + 1, word[None, :], T, K, stride, ALIGNED)
    w2 = load_words(x_ptr, t[:, None] + 2, word[None, :], T, K, stride, ALIGNED)
    w3 = load_words(x_ptr, t[:, None] + 3, word[None, :], T, K, stride, ALIGNED)
    return w0, w1, w2, w3


@triton.jit
def load_words(x_ptr, row, word, T, K, stride, ALIGNED: tl.constexpr):
    """Words of the rows [rows, 1] and columns [1, words]."""
    WIDE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    if ALIGNED:
        at = x_ptr.to(tl.pointer_type(tl.int64 if WIDE else tl.int32)) + row * stride + word
        return tl.load(at, mask=(row < T) & (word < K), other=0)
    else:
        column = 2 * word
        at = x_ptr.to(tl.pointer_type(tl.int32 if WIDE else tl.int16)) + row * stride + column
        low = tl.load(at, mask=(row < T) & (column < K), other=0)
        high = tl.load(at + 1, mask=(row < T) & (column + 1 < K), other=0)
        if WIDE:
            return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
        else:
            return (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)


@triton.jit
def values_of(words):
    """Even and odd columns, fp32."""
    if words.dtype == tl.int64:
        return words.to(tl.int32).to(tl.float32, bitcast=True), (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        return (words << 16).to(tl.float32, bitcast=True), (words & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def bf16_words(low, high):
    """Even and odd columns, fp32 -> words of BF16, rounded to nearest."""
    if _CURE:
        low, high = round_bf16(low).to(tl.int32, bitcast=True), round_bf16(high).to(tl.int32, bitcast=True)
        return ((low >> 16) & 0xFFFF) | (high & -0x10000)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def _max_pairs(a, b):
    """The larger magnitude of each half of two int32."""
    return tl.inline_asm_elementwise("max.u16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _amax_bits(words, axis: tl.constexpr):
    """Largest magnitudes of BF16 along an axis, as the bits of fp32: of the even columns and of the odd ones."""
    if _CURE:
        return tl.max(words & 0x7FFF, axis=axis) << 16, tl.max(words & 0x7FFF0000, axis=axis)
    else:
        largest = tl.reduce(words & 0x7FFF7FFF, axis, _max_pairs)
        return largest << 16, largest & 0x7FFF0000


@triton.jit
def _magnitudes(words):
    """Bits of the magnitudes in int64 words, of the even columns and of the odd ones."""
    return words.to(tl.int32) & 0x7FFFFFFF, (words >> 32).to(tl.int32) & 0x7FFFFFFF


@triton.jit
def amax_columns(w0, w1, w2, w3):
    """Largest magnitudes of the even columns and of the odd ones, as bits."""
    if w0.dtype == tl.int64:
        low0, high0 = _magnitudes(w0)
        low1, high1 = _magnitudes(w1)
        low2, high2 = _magnitudes(w2)
        low3, high3 = _magnitudes(w3)
        low = tl.maximum(tl.maximum(low0, low1), tl.maximum(low2, low3))
        high = tl.maximum(tl.maximum(high0, high1), tl.maximum(high2, high3))
        return tl.max(low, axis=0), tl.max(high, axis=0)
    elif _CURE:
        low0, high0 = _amax_bits(w0, 0)
        low1, high1 = _amax_bits(w1, 0)
        low2, high2 = _amax_bits(w2, 0)
        low3, high3 = _amax_bits(w3, 0)
        low = tl.maximum(tl.maximum(low0, low1), tl.maximum(low2, low3))
        return low, tl.maximum(tl.maximum(high0, high1), tl.maximum(high2, high3))
    else:
        largest = _max_pairs(w0 & 0x7FFF7FFF, w1 & 0x7FFF7FFF)
        return _amax_bits(_max_pairs(largest, _max_pairs(w2 & 0x7FFF7FFF, w3 & 0x7FFF7FFF)), 0)


@triton.jit
def column_scales(w0, w1, w2, w3, POWER_OF_TWO: tl.constexpr):
    """Scales of the even columns and of the odd ones."""
    low, high = amax_columns(w0, w1, w2, w3)
    return scale_from_bits(low, POWER_OF_TWO), scale_from_bits(high, POWER_OF_TWO)


@triton.jit
def row_scales(w0, w1, w2, w3, POWER_OF_TWO: tl.constexpr):
    """Scales of the rows of each."""
    s0, s1 = _row_scale(w0, POWER_OF_TWO), _row_scale(w1, POWER_OF_TWO)
    s2, s3 = _row_scale(w2, POWER_OF_TWO), _row_scale(w3, POWER_OF_TWO)
    return s0, s1, s2, s3


@triton.jit
def _row_scale(words, POWER_OF_TWO: tl.constexpr):
    return scale_from_bits(amax_rows(words), POWER_OF_TWO)


@triton.jit
def amax_rows(words):
    """Largest magnitudes of the rows, as bits."""
    if words.dtype == tl.int64:
        low, high = _magnitudes(words)
        return tl.max(tl.maximum(low, high), axis=1)
    else:
        low, high = _amax_bits(words, 1)
        return tl.maximum(low, high)


@triton.jit
def cast_tile(
    w0, w1, w2, w3, row_block, column_block, t, word, q_ptr, scale_ptr, q_t_ptr, scale_t_ptr,
    T_out, K_out, words, stride_q, stride_s, words_t, stride_t, stride_s_t,
    PLAIN: tl.constexpr, TRANSPOSED: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """The 1x128 cast of a tile (PLAIN), whose width is then 128, and the 128x1 cast of it (TRANSPOSED)."""
    if PLAIN:
        s0, s1, s2, s3 = row_scales(w0, w1, w2, w3, POWER_OF_TWO)
        store_row_scales(scale_ptr + column_block * stride_s, s0, s1, s2, s3, t, T_out)
    if TRANSPOSED:
        low, high = column_scales(w0, w1, w2, w3, POWER_OF_TWO)
        store_column_scales(scale_t_ptr + row_block * stride_s_t, low, high, word, K_out)
    if PLAIN:
        store_rows(q_ptr, w0, w1, w2, w3, s0, s1, s2, s3, t, word, T_out, words, stride_q, False)
    if TRANSPOSED:
        store_transposed(q_t_ptr, w0, w1, w2, w3, low, high, row_block, word, K_out, words_t, stride_t, False)


@triton.jit
def store_row_scales(scale_ptr, s0, s1, s2, s3, t, T):
    """Scales of the rows t, t + 1, t + 2, t + 3 below T."""
    tl.store(scale_ptr + t, s0, mask=t < T)
    tl.store(scale_ptr + t + 1, s1, mask=t + 1 < T)
    tl.store(scale_ptr + t + 2, s2, mask=t + 2 < T)
    tl.store(scale_ptr + t + 3, s3, mask=t + 3 < T)


@triton.jit
def store_column_scales(scale_ptr, low, high, word, K):
    """Scales of the columns below K."""
    tl.store(scale_ptr + 2 * word, low, mask=2 * word < K)
    tl.store(scale_ptr + 2 * word + 1, high, mask=2 * word + 1 < K)


@triton.jit
def store_rows(q_ptr, w0, w1, w2, w3, s0, s1, s2, s3, t, word, T, words, stride, SATURATE: tl.constexpr):
    """Casts by a scale per row, in the layout of X; row stride and width in words of two bytes."""
    at = q_ptr.to(tl.pointer_type(tl.int16)) + t[:, None] * stride + word[None, :]
    inside, row = word[None, :] < words, t[:, None]
    tl.store(at, _cast_words(w0, s0, SATURATE), mask=inside & (row < T))
    tl.store(at + stride, _cast_words(w1, s1, SATURATE), mask=inside & (row + 1 < T))
    tl.store(at + 2 * stride, _cast_words(w2, s2, SATURATE), mask=inside & (row + 2 < T))
    tl.store(at + 3 * stride, _cast_words(w3, s3, SATURATE), mask=inside & (row + 3 < T))


@triton.jit
def _cast_words(words, scale, SATURATE: tl.constexpr):
    low, high = values_of(words)
    inverse = inverse_of(scale)
    return pack2(
        _minus_quotient(low, scale[:, None], inverse[:, None], SATURATE),
        _minus_quotient(high, scale[:, None], inverse[:, None], SATURATE),
    )


@triton.jit
def store_transposed(q_t_ptr, w0, w1, w2, w3, low, high, row_block, word, K, words_t, stride_t, SATURATE: tl.constexpr):
    """Casts by a scale per column, transposed; row stride and width of the transpose in words of four bytes."""
    low0, high0 = values_of(w0)
    low1, high1 = values_of(w1)
    low2, high2 = values_of(w2)
    low3, high3 = values_of(w3)
    even = _cast_columns(low0, low1, low2, low3, low, SATURATE)
    odd = _cast_columns(high0, high1, high2, high3, high, SATURATE)
    word_t = row_block * 32 + tl.arange(0, 32)[None, :]
    column = 2 * word[:, None].to(tl.int64)
    at = q_t_ptr.to(tl.pointer_type(tl.int32)) + column * stride_t + word_t
    tl.store(at, tl.trans(even), mask=(column < K) & (word_t < words_t))
    tl.store(at + stride_t, tl.trans(odd), mask=(column + 1 < K) & (word_t < words_t))


@triton.jit
def _cast_columns(x0, x1, x2, x3, scale, SATURATE: tl.constexpr):
    scale, inverse = scale[None, :], inverse_of(scale)[None, :]
    return pack4(
        _minus_quotient(x0, scale, inverse, SATURATE),
        _minus_quotient(x1, scale, inverse, SATURATE),
        _minus_quotient(x2, scale, inverse, SATURATE),
        _minus_quotient(x3, scale, inverse, SATURATE),
    )


@triton.jit
def _minus_quotient(x, scale, inverse, SATURATE: tl.constexpr):
    if SATURATE:
        return minus_saturating_quotient(x, scale, inverse)
    else:
        return minus_quotient(x, scale, inverse)
