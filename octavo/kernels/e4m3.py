"""E4M3 and BF16 inside a Triton kernel, bit for bit as `numerics.fp8.quantize` and torch have them.

bits = magnitude_bits(x)                                     maxima of these are maxima of |x| that keep a NaN
scale = scale_from_bits(tl.max(bits, axis=1), False)
q = to_e4m3(quotient(x, scale[:, None], inverse_of(scale)[:, None]))
"""

from __future__ import annotations

from octavo.kernels.triton_shim import INTERPRETED, constexpr, tl, triton
from octavo.numerics.fp8 import E4M3_MAX, MIN_AMAX

_MAX = constexpr(E4M3_MAX)
_MIN_AMAX = constexpr(MIN_AMAX)
_CURE = constexpr(INTERPRETED)
"""Triton's interpreter rounds casts and fma wrongly: there divide by division, and round in FP32 before the cast."""


@triton.jit
def magnitude_bits(x):
    """Bits of |x| as int32. They order as the magnitudes do, infinity above all numbers and NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def raise_amax(bits_ptr, x):
    """Raises the bits of the largest magnitude so far to those of the matrix x. Maxima do not depend on an order."""
    tl.atomic_max(bits_ptr, tl.max(tl.max(magnitude_bits(x), axis=1), axis=0), sem="relaxed")


@triton.jit
def scale_from_bits(amax_bits, POWER_OF_TWO: tl.constexpr):
    """max(amax, MIN_AMAX) / 448, rounded up to a power of two if asked; NaN where amax is not finite."""
    amax = tl.maximum(amax_bits.to(tl.float32, bitcast=True), _MIN_AMAX)
    if _CURE:
        scale = tl.div_rn(amax, tl.full(amax.shape, _MAX, tl.float32))
    else:  # by the correctly rounded 1 / 448, as in quotient
        scale = amax * (1.0 / _MAX)
        scale = tl.fma(tl.fma(scale, -1.0 * _MAX, amax), 1.0 / _MAX, scale)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)  # scales are normal numbers
    return tl.where(amax_bits < 0x7F800000, scale, float("nan"))


@triton.jit
def quotient(x, scale, inverse):
    """x / scale, rounded correctly; NaN where x or the scale is."""
    return minus_quotient(x, scale, inverse) * -1.0


@triton.jit
def minus_quotient(x, scale, inverse):
    """-x / scale, rounded correctly; NaN where x or the scale is.

    Without a division per value: `inverse` is the correctly rounded 1 / scale, and a step of Newton's method with an
    exact residual mends the last bit (Markstein 1990). |x| <= 448 * scale keeps it from overflow. Of the negative
    quotient, since a zero keeps its sign in that one: in x / scale the step would make +0 of -0.
    """
    if _CURE:
        return tl.div_rn(x, scale) * -1.0  # the interpreter's fma rounds twice
    else:
        minus = -inverse
        y = x * minus
        return tl.fma(tl.fma(y, scale, x), minus, y)


@triton.jit
def to_e4m3(y):
    """Nearest E4M3, ties to even. The cast saturates, so 448 that was rounded up is 448."""
    if _CURE:  # round in FP32 to values that the interpreter's cast gets right
        y = tl.clamp(y, -_MAX, _MAX, propagate_nan=tl.PropagateNan.ALL)
        sign = y.to(tl.int32, bitcast=True) & -0x80000000
        bits = magnitude_bits(y)
        normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
        tiny = ((tl.abs(y) + 24576.0) - 24576.0).to(tl.int32, bitcast=True)
        y = (tl.where(tl.abs(y) < 0.015625, tiny, normal) | sign).to(tl.float32, bitcast=True)
    return y.to(tl.float8e4nv)


@triton.jit
def minus_saturating_quotient(x, scale, inverse):
    """`minus_quotient` where |x| may be far beyond 448 * scale: such values, infinity too, stay large enough."""
    y = x * -inverse
    return tl.where(tl.abs(y) < 1024.0, minus_quotient(x, scale, inverse), y)


@triton.jit
def inverse_of(scale):
    """1 / scale, rounded correctly, of scales that are normal numbers and whose inverse is one.

    The hardware's approximation is off by one bit at most, and a step of Newton's method mends it (Markstein 1990).
    """
    if _CURE:
        return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
    else:
        guess = rough_inverse(scale)
        return tl.fma(guess, tl.fma(guess, -scale, 1.0), guess)


@triton.jit
def rough_inverse(x):
    """1 / x to one bit, 0 of infinity."""
    if _CURE:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def pack2(y0, y1):
    """The casts of -y0 and -y1 as the bytes of an int16, the first lowest."""
    if _CURE:
        word = (_byte(y0) | (_byte(y1) << 8)).to(tl.int16)
    else:
        word = tl.inline_asm_elementwise(
            "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;", "=h,f,f", [y0, y1], dtype=tl.int16, is_pure=True, pack=1
        )
    return word ^ -0x7F80


@triton.jit
def pack4(y0, y1, y2, y3):
    """The casts of -y0 to -y3 as the bytes of a word, the first lowest."""
    if _CURE:
        word = _byte(y0) | (_byte(y1) << 8) | (_byte(y2) << 16) | (_byte(y3) << 24)
    else:
        word = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
            "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f",
            [y0, y1, y2, y3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    return word ^ -0x7F7F7F80


@triton.jit
def _byte(y):
    return to_e4m3(y).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def round_bf16(x):
    """x rounded to BF16, as FP32."""
    if _CURE:  # the interpreter truncates
        bits = x.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        return tl.where(x == x, rounded, x)
    else:
        return x.to(tl.bfloat16).to(tl.float32)
