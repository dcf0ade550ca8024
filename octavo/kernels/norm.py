"""RMSNorm in FP32: y = x / sqrt(mean(x^2) + norm_eps) * gain (Zhang & Sennrich 2019).

`rms_norm` alone, and with what stands around it in a decoder: the residual sum before it (`add_rms_norm`) and the cast
to FP8 after it (`add_rms_norm_cast`). The mean of squares is summed exactly, in whole numbers on the grid of
`numerics.exact.mean_square`: a row's bits do not depend on its batch, nor on which kernel, layout or device it ran in.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.kernels.cast import cast_1x128, cast_128x1, cast_rows
from octavo.kernels.cast_outputs import BLOCK, COLUMN_TILE, UNPADDED, Padding, check_fused, outputs, tile_grid
from octavo.kernels.cast_whole import raise_amax_bits_
from octavo.kernels.device import on_gpu
from octavo.kernels.early_launch import early_launch
from octavo.kernels.norm_kernels import (
    backward_kernel,
    norm_cast_kernel,
    norm_kernel,
    norm_transposed_kernel,
    sum_norm_kernel,
)
from octavo.kernels.tile import in_words
from octavo.kernels.triton_shim import triton
from octavo.numerics.exact import mean_square, product_bits
from octavo.numerics.fp8 import BLOCK_1X128, PER_ROW, QuantBlock, ScaleRounding

TILE_ELEMENTS = 4096
"""Elements of a program's tile: one wide row or several short ones."""
FEW_ROWS = 256
"""Of a decode step, where a program works for its row alone and the memory idles."""
BACKWARD_PROGRAMS = 1024
"""Partial sums of the gain's gradient, which are then added in order."""


class NormCast(NamedTuple):
    """What `add_rms_norm_cast` returns."""

    h: Tensor
    """[T, D], residual + delta: the next residual."""
    inverse_rms: Tensor
    """[T] fp32, for `rms_norm_backward`."""
    q: Tensor
    """[T, D] e4m3 of the normalised h."""
    scale: Tensor
    """[T, ceil(D / 128)] or [T, 1] fp32."""
    q_t: Tensor | None
    """[D, T] e4m3, the 128x1 cast, transposed."""
    scale_t: Tensor | None
    """[D, ceil(T / 128)] fp32."""


def rms_norm(x: Tensor, gain: Tensor, norm_eps: float) -> Tensor:
    """Normalise the last dimension and multiply by the gain; one rounding, at the end.

    Args:
        x: [..., D] bf16 or fp32.
        gain: [D] fp32.
        norm_eps: added to the mean square.

    Returns:
        [..., D], dtype of x. Differentiable in x and gain.
    """
    return _RMSNorm.apply(x, gain, norm_eps)


def rms_norm_forward(x: Tensor, gain: Tensor, norm_eps: float) -> tuple[Tensor, Tensor]:
    """`rms_norm` without a gradient, and the inverse root mean squares [...] fp32."""
    if not _has_kernel(x):
        inverse_rms = (mean_square(x) + norm_eps).rsqrt().float()
        return (x.float() * inverse_rms * gain).to(x.dtype), inverse_rms.squeeze(-1)
    y, inverse_rms = torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(x.shape[:-1]).float()
    rows = _as_rows(x)
    if x.numel():
        R, block, num_warps = _tile(x.shape[-1])
        num_rows = inverse_rms.numel()
        norm_kernel[(-(-num_rows // R),)](
            rows,
            gain,
            y,
            inverse_rms,
            num_rows,
            rows.shape[1],
            *rows.stride()[:2],
            R=R,
            BLOCK_D=block,
            num_warps=num_warps,
            **norm_constants(x.shape[-1], norm_eps),
            **early_launch(x),
        )
    return y, inverse_rms


def rms_norm_backward(
    x: Tensor, gain: Tensor, inverse_rms: Tensor, grad_y: Tensor, added: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Gradients of x, [..., D] in its dtype, and of the gain, [D] fp32.

    Args:
        x: [..., D], what was normalised.
        gain: [D] fp32.
        inverse_rms: [...] fp32, of `rms_norm_forward` or `add_rms_norm_cast`.
        grad_y: [..., D], gradient of the result.
        added: [..., D] in the dtype of x, a gradient that reaches x past the norm: to the bit as if added afterwards.
    """
    if not _has_kernel(x):
        grad_y = grad_y.float()
        inverse_rms = inverse_rms.unsqueeze(-1)
        normalized = x.float() * inverse_rms
        grad_gain = (grad_y * normalized).reshape(-1, len(gain)).sum(dim=0)
        grad_normalized = grad_y * gain
        projection = (grad_normalized * normalized).mean(dim=-1, keepdim=True)
        grad_x = (grad_normalized - normalized * projection) * inverse_rms
        grad_x = grad_x.to(x.dtype)
        return grad_x if added is None else grad_x + added, grad_gain
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not x.numel():
        return grad_x, torch.zeros_like(gain)
    R, block, num_warps = _tile(x.shape[-1], per_warp=512)
    num_rows = inverse_rms.numel()
    steps = -(-num_rows // (R * BACKWARD_PROGRAMS))
    programs = -(-num_rows // (R * steps))
    partial = torch.empty(programs, len(gain), device=x.device)
    rows, grad_rows = _as_rows(x), _as_rows(grad_y)
    backward_kernel[(programs,)](
        rows,
        gain,
        inverse_rms,
        grad_rows,
        grad_x if added is None else added.contiguous(),
        grad_x,
        partial,
        num_rows,
        steps,
        rows.shape[1],
        *rows.stride()[:2],
        grad_rows.shape[1],
        *grad_rows.stride()[:2],
        R=R,
        D=len(gain),
        BLOCK_D=block,
        ADD=added is not None,
        num_warps=num_warps,
    )
    return grad_x, partial.sum(dim=0)


def add_rms_norm(
    residual: Tensor, delta: Tensor | None, gain: Tensor, norm_eps: float, amax_bits: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """h = residual + delta [T, D], its `rms_norm` [T, D] and the inverse root mean squares [T] fp32.

    Args:
        residual, delta, gain, norm_eps: as for `add_rms_norm_cast`.
        amax_bits: of `new_amax_bits`, raised to those of the norm.
    """
    if not _has_kernel(residual):
        h = residual if delta is None else residual + delta
        y, inverse_rms = rms_norm_forward(h, gain, norm_eps)
        raise_amax_bits_(amax_bits, y)
        return h, y, inverse_rms
    residual = residual.contiguous()
    T, D = residual.shape
    h = residual if delta is None else torch.empty_like(residual)
    y, inverse_rms = torch.empty_like(residual), torch.empty(T, device=h.device)
    R, block, num_warps = _tile(D)
    if y.numel():
        sum_norm_kernel[(-(-T // R),)](
            residual,
            residual if delta is None else delta.contiguous(),
            gain,
            h,
            inverse_rms,
            y,
            inverse_rms if amax_bits is None else amax_bits,
            T,
            R=R,
            BLOCK_D=block,
            ADD=delta is not None,
            AMAX=amax_bits is not None,
            num_warps=num_warps,
            **norm_constants(D, norm_eps),
            **early_launch(residual),
        )
    return h, y, inverse_rms


def add_rms_norm_cast(
    residual: Tensor,
    delta: Tensor | None,
    gain: Tensor,
    norm_eps: float,
    *,
    quant_block: QuantBlock = BLOCK_1X128,
    transposed: bool = False,
    rounding: ScaleRounding = "none",
    pad_to: Padding = UNPADDED,
) -> NormCast:
    """h = residual + delta, and the casts of its norm: the bits of the sum, `rms_norm` and the casts one by one.

    Args:
        residual: [T, D] bf16 (fp32 where there is no kernel).
        delta: [T, D], what a projection adds to it; None in the first layer, where h is the residual itself.
        gain: [D] fp32.
        norm_eps: added to the mean square.
        quant_block: BLOCK_1X128 or PER_ROW.
        transposed: the 128x1 cast for WGrad, too.
        rounding: of the scales.
        pad_to: multiples that rows and columns of each cast are rounded up to.

    Raises:
        ValueError: another quant_block, or both PER_ROW and transposed.
    """
    check_fused("add_rms_norm_cast", quant_block, transposed)
    if not _has_kernel(residual):
        h = residual if delta is None else residual + delta
        y, inverse_rms = rms_norm_forward(h, gain, norm_eps)
        cast = cast_rows if quant_block == PER_ROW else cast_1x128
        q_t, scale_t = cast_128x1(y, rounding, pad_to=pad_to) if transposed else (None, None)
        return NormCast(h, inverse_rms, *cast(y, rounding, pad_to=pad_to), q_t, scale_t)
    residual = residual.contiguous()
    T, D = residual.shape
    h = residual if delta is None else torch.empty_like(residual)
    inverse_rms = torch.empty(T, device=h.device)
    q, scale = outputs("add_rms_norm_cast", h.shape, quant_block, h.device, pad_to, None)
    R, block, num_warps = _tile(max(q.shape[1], BLOCK), per_warp=256 if T <= FEW_ROWS else 1024)
    if q.numel():
        norm_cast_kernel[(-(-q.shape[0] // R),)](
            residual,
            residual if delta is None else delta.contiguous(),
            gain,
            h,
            inverse_rms,
            q,
            scale,
            T,
            *q.shape,
            q.stride(0),
            scale.stride(1),
            R=R,
            BLOCK_D=block,
            ADD=delta is not None,
            PER_ROW=quant_block == PER_ROW,
            POWER_OF_TWO=rounding == "power_of_two",
            num_warps=num_warps,
            **norm_constants(D, norm_eps),
            **early_launch(residual),
        )
    q_t, scale_t = _norm_transposed(h, gain, inverse_rms, rounding, pad_to) if transposed else (None, None)
    return NormCast(h, inverse_rms, q, scale, q_t, scale_t)


def _norm_transposed(
    h: Tensor, gain: Tensor, inverse_rms: Tensor, rounding: ScaleRounding, pad_to: Padding
) -> tuple[Tensor, Tensor]:
    """The 128x1 cast of the norm, from h and its inverse root mean squares."""
    q_t, scale_t = outputs("add_rms_norm_cast", h.T.shape, BLOCK_1X128, h.device, pad_to, None)
    if q_t.numel():
        words, num_warps = COLUMN_TILE
        aligned, *source = in_words(h)
        norm_transposed_kernel[tile_grid(q_t.T, words)](
            h,
            gain,
            inverse_rms,
            q_t,
            scale_t,
            *h.shape,
            *source,
            q_t.shape[0],
            -(-q_t.shape[1] // 4),
            q_t.stride(0) // 4,
            scale_t.stride(1),
            WORDS=words,
            ALIGNED=aligned,
            POWER_OF_TWO=rounding == "power_of_two",
            num_warps=num_warps,
            maxnreg=80,  # six programs side by side instead of five
        )
    return q_t, scale_t


def _has_kernel(x: Tensor) -> bool:
    return on_gpu(x, "a norm") and x.dtype == torch.bfloat16


def _as_rows(x: Tensor) -> Tensor:
    """[..., D] -> [A, B, D] with unit stride along D; heads that are slices of wider rows are not copied."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.reshape(-1, *x.shape[-2:]) if x.ndim > 2 else x.reshape(-1, 1, x.shape[-1])


def _tile(width: int, per_warp: int = 1024) -> tuple[int, int, int]:
    """Rows, columns and warps of a program."""
    block = triton.next_power_of_2(width)
    return max(1, min(32, TILE_ELEMENTS // block)), block, min(16, max(4, block // per_warp))


def norm_constants(D: int, norm_eps: float) -> dict[str, Any]:
    """What `inverse_rms_of` takes for rows of D numbers."""
    # With more bits the magnitudes were no FP32 integers. Fewer than 64 values could have them, which lose nothing
    # unless they are 2**15 times smaller than the largest.
    return {"D": D, "BITS": min(product_bits(D), 23), "NORM_EPS": norm_eps}


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, norm_eps: float) -> Tensor:
        y, inverse_rms = rms_norm_forward(x, gain, norm_eps)
        ctx.save_for_backward(x, gain, inverse_rms)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gain, inverse_rms = ctx.saved_tensors
        return *rms_norm_backward(x, gain, inverse_rms, grads[0]), None
