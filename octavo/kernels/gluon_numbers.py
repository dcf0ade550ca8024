"""Numbers inside the Gluon kernels of attention: what Triton's kernel of attention does, in Gluon."""

from __future__ import annotations

from octavo.kernels.triton_shim import constexpr, gl, gluon, tl

_FP16_MAX = constexpr(65504.0)


@gluon.jit
def larger(a, b):
    """NaN if one is."""
    return gl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@gluon.jit
def inverse_power(power_of_two):
    """1 / x of a power of two, fp32."""
    return (0x7F000000 - power_of_two.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit
def half(x):
    """FP32 as FP16, cut off at its largest number; a NaN stays."""
    return gl.where(x > _FP16_MAX, _FP16_MAX, gl.where(x < -_FP16_MAX, -_FP16_MAX, x)).to(gl.float16)
