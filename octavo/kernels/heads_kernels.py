"""The Triton kernel of `kernels.heads`."""

from __future__ import annotations

from octavo.kernels.e4m3 import inverse_of, magnitude_bits, quotient, round_bf16, scale_from_bits, to_e4m3
from octavo.kernels.early_launch import begin
from octavo.kernels.norm_kernels import inverse_rms_of
from octavo.kernels.triton_shim import constexpr, tl, triton

_FP16_MAX_BITS = constexpr(0x477FE000)
"""65504 as FP32."""


@triton.jit(do_not_specialize=["T"])
def heads_kernel(
    q_ptr, k_ptr, v_ptr, stride_q, stride_k, stride_v, q_gain_ptr, k_gain_ptr, cos_ptr, sin_ptr, slots_ptr,
    q_out_ptr, k_out_ptr, v_out_ptr, k_scale_ptr, v_scale_ptr, inverse_ptr, saturated_ptr, T,
    H: tl.constexpr, HKV: tl.constexpr, DH: tl.constexpr, BLOCK_D: tl.constexpr, R: tl.constexpr, BITS: tl.constexpr,
    NORM_EPS: tl.constexpr, NORM: tl.constexpr, SLOTS: tl.constexpr, FP8: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program for R tokens and one head, of the queries, then of the keys, then of the values."""
    begin(EARLY)
    t = tl.program_id(0) * R + tl.arange(0, R)
    head = tl.program_id(1)
    here = t < T
    row = t.to(tl.int64)
    if head < H:
        low, high, inverse = _turned(
            q_ptr + head * DH, stride_q, q_gain_ptr, cos_ptr, sin_ptr, row, here, DH, BLOCK_D, BITS, NORM_EPS, NORM
        )
        if NORM:
            tl.store(inverse_ptr + row * H + head, inverse, mask=here)
        if FP8:
            above = tl.sum((magnitude_bits(low) > _FP16_MAX_BITS).to(tl.int32), axis=1)
            above = tl.sum(above + tl.sum((magnitude_bits(high) > _FP16_MAX_BITS).to(tl.int32), axis=1), axis=0)
            if above > 0:
                tl.atomic_add(saturated_ptr, above.to(tl.int64))
        _store_halves(q_out_ptr, low, high, row * H + head, here, DH, BLOCK_D)
    else:
        slot = row
        if SLOTS:
            slot = tl.load(slots_ptr + t, mask=here, other=0).to(tl.int64)
        kv_head = (head - H) % HKV
        if head < H + HKV:
            low, high, inverse = _turned(
                k_ptr + kv_head * DH, stride_k, k_gain_ptr, cos_ptr, sin_ptr, row, here, DH, BLOCK_D, BITS, NORM_EPS,
                NORM,
            )  # fmt: skip
            if NORM:
                tl.store(inverse_ptr + T.to(tl.int64) * H + row * HKV + kv_head, inverse, mask=here)
            _store_kv(k_out_ptr, k_scale_ptr, low, high, slot * HKV + kv_head, here, DH, BLOCK_D, FP8)
        else:
            low, high = _halves(v_ptr + kv_head * DH, stride_v, row, here, DH, BLOCK_D)
            _store_kv(v_out_ptr, v_scale_ptr, low, high, slot * HKV + kv_head, here, DH, BLOCK_D, FP8)


@triton.jit(do_not_specialize=["T"])
def rotate_back_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, T,
    H: tl.constexpr, HKV: tl.constexpr, DH: tl.constexpr, BLOCK_D: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """One program for R tokens and one head, of the queries, then of the keys: rotated by minus the angle."""
    t = tl.program_id(0) * R + tl.arange(0, R)
    head = tl.program_id(1)
    here = t < T
    row = t.to(tl.int64)
    if head < H:
        low, high = _halves(q_ptr + head * DH, H * DH, row, here, DH, BLOCK_D)
    else:
        low, high = _halves(k_ptr + (head - H) * DH, HKV * DH, row, here, DH, BLOCK_D)
    cos, sin = _angles(cos_ptr, sin_ptr, row, here, DH, BLOCK_D)
    new_low, new_high = round_bf16(low * cos + high * sin), round_bf16(high * cos - low * sin)
    if head < H:
        _store_halves(q_out_ptr, new_low, new_high, row * H + head, here, DH, BLOCK_D)
    else:
        _store_halves(k_out_ptr, new_low, new_high, row * HKV + head - H, here, DH, BLOCK_D)


@triton.jit
def _angles(cos_ptr, sin_ptr, row, here, DH: tl.constexpr, BLOCK_D: tl.constexpr):
    """Cosines and sines of each row."""
    d = tl.arange(0, BLOCK_D // 2)
    at, inside = row[:, None] * (DH // 2) + d[None, :], here[:, None] & (d < DH // 2)[None, :]
    return tl.load(cos_ptr + at, mask=inside, other=0.0), tl.load(sin_ptr + at, mask=inside, other=0.0)


@triton.jit
def _halves(ptr, stride, row, here, DH: tl.constexpr, BLOCK_D: tl.constexpr):
    """The first Dh / 2 numbers of a head and the others, fp32, of each row."""
    d = tl.arange(0, BLOCK_D // 2)
    at, inside = ptr + row[:, None] * stride + d[None, :], here[:, None] & (d < DH // 2)[None, :]
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    return low, tl.load(at + DH // 2, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _turned(
    ptr, stride, gain_ptr, cos_ptr, sin_ptr, row, here, DH: tl.constexpr, BLOCK_D: tl.constexpr, BITS: tl.constexpr,
    NORM_EPS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The halves of a head after qk-norm and rotary, and the inverse root mean square of each row."""
    low, high = _halves(ptr, stride, row, here, DH, BLOCK_D)
    d = tl.arange(0, BLOCK_D // 2)
    inverse = tl.zeros([row.shape[0]], tl.float32)
    if NORM:
        inverse = inverse_rms_of(tl.reshape(tl.join(low, high), [row.shape[0], BLOCK_D]), DH, BITS, NORM_EPS)
        gain_low = tl.load(gain_ptr + d, mask=d < DH // 2, other=0.0)
        gain_high = tl.load(gain_ptr + DH // 2 + d, mask=d < DH // 2, other=0.0)
        low = round_bf16(low * inverse[:, None] * gain_low[None, :])
        high = round_bf16(high * inverse[:, None] * gain_high[None, :])
    cos, sin = _angles(cos_ptr, sin_ptr, row, here, DH, BLOCK_D)
    return round_bf16(low * cos - high * sin), round_bf16(high * cos + low * sin), inverse


@triton.jit
def _store_kv(ptr, scale_ptr, low, high, row, here, DH: tl.constexpr, BLOCK_D: tl.constexpr, FP8: tl.constexpr):
    if FP8:
        amax = tl.maximum(tl.max(magnitude_bits(low), axis=1), tl.max(magnitude_bits(high), axis=1))
        scale = scale_from_bits(amax, True)
        tl.store(scale_ptr + row, scale, mask=here)
        inverse = inverse_of(scale)[:, None]
        low, high = to_e4m3(quotient(low, scale[:, None], inverse)), to_e4m3(quotient(high, scale[:, None], inverse))
        if ptr.dtype.element_ty == tl.bfloat16:  # what the codes stand for
            low = round_bf16(low.to(tl.float32) * scale[:, None])
            high = round_bf16(high.to(tl.float32) * scale[:, None])
    _store_halves(ptr, low, high, row, here, DH, BLOCK_D)


@triton.jit
def _store_halves(ptr, low, high, row, here, DH: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D // 2)
    at, inside = ptr + row[:, None] * DH + d[None, :], here[:, None] & (d < DH // 2)[None, :]
    tl.store(at, low, mask=inside)
    tl.store(at + DH // 2, high, mask=inside)


@triton.jit(do_not_specialize=["S"])
def gather_kernel(
    values_ptr, scale_ptr, slots_ptr, out_ptr, out_scale_ptr, S,
    HKV: tl.constexpr, WIDTH: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_WIDTH: tl.constexpr, R: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """One program for R slots: what they hold side by side, codes as FP16."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    slot = tl.load(slots_ptr + row, mask=row < S, other=0).to(tl.int64)
    row, slot, column = row[:, None], slot[:, None], tl.arange(0, BLOCK_WIDTH)[None, :]
    inside = (row < S) & (column < WIDTH)
    x = tl.load(values_ptr + slot * WIDTH + column, mask=inside, other=0.0)
    tl.store(out_ptr + row * WIDTH + column, x.to(out_ptr.dtype.element_ty), mask=inside)
    if FP8:
        head = tl.arange(0, BLOCK_HEADS)[None, :]
        inside = (row < S) & (head < HKV)
        scale = tl.load(scale_ptr + slot * HKV + head, mask=inside, other=1.0)
        tl.store(out_scale_ptr + row * HKV + head, scale, mask=inside)
