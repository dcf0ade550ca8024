"""Numbers inside the Gluon kernels of attention: what `kernels.e4m3` and Triton's kernel of attention do, in Gluon."""

from __future__ import annotations

from octavo.kernels.triton_shim import constexpr, gl, gluon, tl
from octavo.numerics.fp8 import E4M3_MAX, MIN_AMAX

_MAX = constexpr(E4M3_MAX)
_MIN_AMAX = constexpr(MIN_AMAX)
_FP16_MAX = constexpr(65504.0)


@gluon.jit
def larger(a, b):
    """NaN if one is."""
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def inverse_power(power_of_two):
    """1 / x of a power of two."""
    return (0x7F000000 - power_of_two.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit
def half(x):
    """FP32 as FP16, cut off at its largest number; a NaN stays."""
    return gl.where(x > _FP16_MAX, _FP16_MAX, gl.where(x < -_FP16_MAX, -_FP16_MAX, x)).to(gl.float16)


@gluon.jit
def cast_pairs(even, odd, DH: gl.constexpr, POWER_OF_TWO: gl.constexpr):
    """The cast of rows: even and odd columns -> int16 pairs of codes, and the scale of each row."""
    bits = gl.maximum(even.to(gl.int32, bitcast=True) & 0x7FFFFFFF, odd.to(gl.int32, bitcast=True) & 0x7FFFFFFF)
    amax_bits = gl.max(bits, 1)
    amax = gl.maximum(amax_bits.to(gl.float32, bitcast=True), _MIN_AMAX)
    scale = amax * (1.0 / _MAX)
    scale = gl.fma(gl.fma(scale, -1.0 * _MAX, amax), 1.0 / _MAX, scale)
    if POWER_OF_TWO:
        scale = ((scale.to(gl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(gl.float32, bitcast=True)
    scale = gl.where(amax_bits < 0x7F800000, scale, float("nan"))
    guess = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], dtype=gl.float32, is_pure=True, pack=1
    )
    minus = -gl.fma(guess, gl.fma(guess, -scale, 1.0), guess)
    codes = gl.inline_asm_elementwise(
        "cvt.rn.satfinite.e4m3x2.f32 $0, $2, $1;",
        "=h,f,f",
        [_minus_quotient(even, scale, minus), _minus_quotient(odd, scale, minus)],
        dtype=gl.int16,
        is_pure=True,
        pack=1,
    )
    return codes ^ -0x7F80, scale


@gluon.jit
def _minus_quotient(x, scale, minus_inverse):
    scale = scale.expand_dims(1).broadcast_to(x.shape)
    minus_inverse = minus_inverse.expand_dims(1).broadcast_to(x.shape)
    y = x * minus_inverse
    return gl.fma(gl.fma(y, scale, x), minus_inverse, y)
