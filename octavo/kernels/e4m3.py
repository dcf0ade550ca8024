"""E4M3 inside a Triton kernel, bit for bit as `numerics.fp8.quantize` has it: scales, quotients, casts.

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
def scale_from_bits(amax_bits, POWER_OF_TWO: tl.constexpr):
    """max(amax, MIN_AMAX) / 448, rounded up to a power of two if asked; NaN where amax is not finite."""
    amax = tl.maximum(amax_bits.to(tl.float32, bitcast=True), _MIN_AMAX)
    if _CURE:
        scale = tl.div_rn(amax, tl.full(amax.shape, _MAX, tl.float32))
    else:  # by the correctly rounded 1 / 448, as in quotient
        scale = amax * (1.0 / _MAX)
        scale = tl.fma(tl.fma(-scale, _MAX, amax), 1.0 / _MAX, scale)
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        scale = ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)  # scales are normal numbers
    return tl.where(amax_bits < 0x7F800000, scale, float("nan"))


@triton.jit
def quotient(x, scale, inverse):
    """x / scale, rounded correctly; NaN where x or the scale is.

    Without a division per value: `inverse` is the correctly rounded 1 / scale, and a step of Newton's method with an
    exact residual mends the last bit (Markstein 1990). |x| <= 448 * scale keeps it from overflow.
    """
    if _CURE:
        return tl.div_rn(x, scale)  # the interpreter's fma rounds twice
    else:
        y = x * inverse
        return tl.fma(tl.fma(-y, scale, x), inverse, y)


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
def inverse_of(scale):
    """1 / scale, rounded correctly."""
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def pack4(x0, x1, x2, x3, scale, inverse):
    """The casts of four values as the bytes of a word, the first lowest."""
    y0, y1 = quotient(x0, scale, inverse), quotient(x1, scale, inverse)
    y2, y3 = quotient(x2, scale, inverse), quotient(x3, scale, inverse)
    if _CURE:
        return _byte(y0) | (_byte(y1) << 8) | (_byte(y2) << 16) | (_byte(y3) << 24)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
            "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f",
            [y0, y1, y2, y3],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _byte(y):
    return to_e4m3(y).to(tl.uint8, bitcast=True).to(tl.int32)
