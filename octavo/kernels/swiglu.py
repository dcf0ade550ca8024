"""SwiGLU: silu(gate) * up in FP32, rounded once (Shazeer 2020); alone, or with the casts to FP8 after it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from octavo.kernels.cast import cast_1x128, cast_both, cast_rows
from octavo.kernels.cast_outputs import (
    BLOCK,
    GIVEN,
    TILE,
    UNPADDED,
    Cast,
    Padding,
    check_fused,
    matrix,
    max_registers,
    outputs,
    padded,
    tile_grid,
    tile_sizes,
)
from octavo.kernels.cast_whole import raise_amax_bits_
from octavo.kernels.device import on_gpu
from octavo.kernels.early_launch import early_launch
from octavo.kernels.swiglu_kernels import (
    backward_cast_kernel,
    backward_kernel,
    cast_both_kernel,
    cast_rows_kernel,
    swiglu_kernel,
)
from octavo.kernels.tile import in_words
from octavo.kernels.triton_shim import triton
from octavo.numerics.fp8 import BLOCK_1X128, PER_ROW, QuantBlock, ScaleRounding

ROWS, COLUMNS = 4, 1024
"""Of a program that casts nothing."""
ROWS_1X128 = 32
"""Rows of a program that casts per 1x128 block."""


class SwiGLUCast(NamedTuple):
    """What `swiglu_cast` returns."""

    q: Tensor
    """[T, F] e4m3."""
    scale: Tensor
    """[T, ceil(F / 128)] or [T, 1] fp32."""
    q_t: Tensor | None
    """[F, T] e4m3, the 128x1 cast, transposed."""
    scale_t: Tensor | None
    """[F, ceil(T / 128)] fp32."""


def swiglu(gate_up: Tensor) -> Tensor:
    """[T, 2F] bf16 or fp32, gate first -> silu(gate) * up, [T, F], same dtype. Differentiable."""
    return _SwiGLU.apply(gate_up)


def swiglu_forward(gate_up: Tensor, amax_bits: Tensor | None = None) -> Tensor:
    """`swiglu` without a gradient; raises `amax_bits`, of `new_amax_bits`, to those of the result."""
    if not _has_kernel(gate_up):
        gate, up = _halves(gate_up)
        y = (gate * _sigmoid(gate) * up).to(gate_up.dtype)
        raise_amax_bits_(amax_bits, y)
        return y
    rows, F = _as_rows(gate_up), gate_up.shape[-1] // 2
    y = torch.empty(*gate_up.shape[:-1], F, dtype=gate_up.dtype, device=gate_up.device)
    if y.numel():
        swiglu_kernel[_grid(len(rows), F)](
            rows,
            rows[:, F:],
            y,
            y if amax_bits is None else amax_bits,
            len(rows),
            F,
            rows.stride(0),
            R=ROWS,
            BLOCK_F=COLUMNS,
            AMAX=amax_bits is not None,
            num_warps=4,
            **early_launch(rows),
        )
    return y


def swiglu_backward(gate_up: Tensor, grad_y: Tensor, amax_bits: Tensor | None = None) -> Tensor:
    """Gradient of gate_up, [T, 2F] in its dtype, from that of y [T, F]; `amax_bits` are those of gate's and of up's."""
    if not _has_kernel(gate_up):
        grad_y = grad_y.float()
        gate, up = _halves(gate_up)
        sigmoid = _sigmoid(gate)
        grad_up = grad_y * gate * sigmoid
        grad_gate = grad_y * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        grad = torch.cat([grad_gate, grad_up], dim=-1).to(gate_up.dtype)
        raise_amax_bits_(amax_bits, *grad.chunk(2, dim=-1))
        return grad
    rows, grad_rows, F = _as_rows(gate_up), _as_rows(grad_y), gate_up.shape[-1] // 2
    grad = torch.empty_like(gate_up, memory_format=torch.contiguous_format)
    halves = grad.view(-1, 2 * F)
    if grad.numel():
        backward_kernel[_grid(len(rows), F)](
            rows,
            rows[:, F:],
            grad_rows,
            halves,
            halves[:, F:],
            halves if amax_bits is None else amax_bits,
            len(rows),
            F,
            rows.stride(0),
            grad_rows.stride(0),
            R=ROWS,
            BLOCK_F=COLUMNS,
            AMAX=amax_bits is not None,
            num_warps=4,
        )
    return grad


def swiglu_cast(
    gate_up: Tensor,
    *,
    quant_block: QuantBlock = BLOCK_1X128,
    transposed: bool = False,
    rounding: ScaleRounding = "none",
    pad_to: Padding = UNPADDED,
) -> SwiGLUCast:
    """The casts of `swiglu(gate_up)`, to the bit.

    Args:
        gate_up: [T, 2F] bf16 (fp32 where there is no kernel), gate first.
        quant_block: BLOCK_1X128 or PER_ROW.
        transposed: the 128x1 cast for WGrad, too.
        rounding: of the scales.
        pad_to: multiples that rows and columns of each cast are rounded up to.

    Raises:
        ValueError: another quant_block, or both PER_ROW and transposed.
    """
    check_fused("swiglu_cast", quant_block, transposed)
    if not _has_kernel(gate_up):
        y = swiglu_forward(gate_up)
        if transposed:
            plain, columns = cast_both(y, rounding, pad_to=pad_to)
            return SwiGLUCast(*plain, *columns)
        cast = cast_rows if quant_block == PER_ROW else cast_1x128
        return SwiGLUCast(*cast(y, rounding, pad_to=pad_to), None, None)
    gate_up = _as_rows(gate_up)
    T, F = len(gate_up), gate_up.shape[1] // 2
    q, scale = outputs("swiglu_cast", torch.Size((T, F)), quant_block, gate_up.device, pad_to, None)
    power_of_two = rounding == "power_of_two"
    if transposed:
        q_t, scale_t = outputs("swiglu_cast", torch.Size((F, T)), BLOCK_1X128, gate_up.device, pad_to, None)
        aligned, *source = in_words(gate_up[:, :F], gate_up[:, F:])
        if q.numel():
            cast_both_kernel[tile_grid(q)](
                gate_up,
                gate_up[:, F:],
                q,
                scale,
                q_t,
                scale_t,
                T,
                *source,
                *tile_sizes(q, scale, q_t, scale_t),
                ALIGNED=aligned,
                POWER_OF_TWO=power_of_two,
                num_warps=TILE[1],
            )
        return SwiGLUCast(q, scale, q_t, scale_t)
    R, block = (1, triton.next_power_of_2(q.shape[1])) if quant_block == PER_ROW else (ROWS_1X128, BLOCK)
    if q.numel():
        cast_rows_kernel[-(-q.shape[0] // R), -(-q.shape[1] // block)](
            gate_up,
            gate_up[:, F:],
            q,
            scale,
            T,
            F,
            gate_up.stride(0),
            *q.shape,
            q.stride(0),
            scale.stride(1),
            R=R,
            BLOCK_F=block,
            POWER_OF_TWO=power_of_two,
            num_warps=max(4, block // 1024),
            **early_launch(gate_up),
        )
    return SwiGLUCast(q, scale, None, None)


def swiglu_backward_cast(
    gate_up: Tensor,
    grad_y: Tensor,
    rounding: ScaleRounding = "none",
    *,
    pad_to: Padding = UNPADDED,
) -> tuple[Cast, Cast]:
    """`cast_both` of the gradients of gate and up, each on its own, side by side.

    Args:
        gate_up: [T, 2F] bf16 (fp32 where there is no kernel), gate first.
        grad_y: [T, F], gradient of the result.
        rounding: of the scales.
        pad_to: multiples that rows and columns of each of the four casts are rounded up to.

    Returns:
        (q [T, 2F], scale [T, 2 ceil(F / 128)]), (q^T [2F, T], scale [2F, ceil(T / 128)]).

    Raises:
        ValueError: the width of a half is no multiple of 8 after padding.
    """
    T, F = gate_up.shape[0], gate_up.shape[1] // 2
    plain, transposed = _gradient_outputs(T, F, gate_up.device, pad_to)
    halves = [
        ((q, scale), (q_t, scale_t))
        for q, scale, q_t, scale_t in zip(
            *(x.chunk(2, dim=1) for x in plain), *(x.chunk(2, dim=0) for x in transposed), strict=True
        )
    ]
    if not _has_kernel(gate_up):
        for grad, (columns, rows) in zip(swiglu_backward(gate_up, grad_y).chunk(2, dim=1), halves, strict=True):
            new_columns, new_rows = cast_both(grad, rounding, pad_to=pad_to)
            for target, new in zip(columns + rows, new_columns + new_rows, strict=True):
                target.copy_(new)
        return plain, transposed
    gate_up, grad_y = _as_rows(gate_up), _as_rows(grad_y)
    aligned, *source = in_words(gate_up[:, :F], gate_up[:, F:], grad_y)
    if grad_y.numel():
        gate_cast, up_cast = (columns + rows for columns, rows in halves)
        backward_cast_kernel[tile_grid(gate_cast[0])](
            gate_up,
            gate_up[:, F:],
            grad_y,
            *gate_cast,
            *up_cast,
            T,
            *source,
            grad_y.stride(0) // (2 if aligned else 1),
            *tile_sizes(*gate_cast),
            ALIGNED=aligned,
            POWER_OF_TWO=rounding == "power_of_two",
            num_warps=TILE[1],
            maxnreg=max_registers(gate_up),
        )
    return plain, transposed


def _gradient_outputs(T: int, F: int, device: torch.device, pad_to: Padding) -> tuple[Cast, Cast]:
    """Both casts of [T, 2F], where each half begins with blocks of its own."""
    rows, columns = (padded(F, multiple) for multiple in pad_to)
    if columns % GIVEN:
        raise ValueError(
            f"swiglu_backward_cast puts the casts of gate and up side by side, each of a width that is a multiple of "
            f"{GIVEN}; got {columns}. Pass pad_to=(1, 128)"
        )
    tokens, blocks = padded(T, pad_to[0]), -(-columns // BLOCK)
    q = matrix("swiglu_backward_cast", torch.Size((tokens, 2 * columns)), device, UNPADDED, None)
    q_t = matrix("swiglu_backward_cast", torch.Size((2 * rows, padded(T, pad_to[1]))), device, UNPADDED, None)
    scale = torch.empty(2 * blocks, tokens, device=device).T
    return (q, scale), (q_t, torch.empty(-(-q_t.shape[1] // BLOCK), 2 * rows, device=device).T)


def _has_kernel(x: Tensor) -> bool:
    return on_gpu(x, "SwiGLU") and x.dtype == torch.bfloat16


def _as_rows(x: Tensor) -> Tensor:
    """[..., N] -> [T, N] with unit stride along N."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(1) == 1 else x.contiguous()


def _grid(T: int, F: int) -> tuple[int, int]:
    return -(-T // ROWS), -(-F // COLUMNS)


def _halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up in FP32, contiguous."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate.float().contiguous(), up.float().contiguous()


def _sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)). `torch.sigmoid` gives another last bit at the end of a tensor than inside it, so a token's
    value would depend on its place in the batch; `exp` and division do not."""
    return 1.0 / (1.0 + torch.exp(-x))


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return swiglu_forward(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        return swiglu_backward(gate_up, grads[0])
