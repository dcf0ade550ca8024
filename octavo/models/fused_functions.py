"""Autograd functions of the halves of a decoder layer under blocks of 128: what makes X, or its gradient, casts it.

    NormLinear     h + delta, norm, qkv_proj
    NormMLP        h + delta, norm, gate_up_proj, SwiGLU, down_proj

X is cast in the layout of FProp and in that of WGrad, which is saved, and is itself never written; nor is the gradient
of gate and up. The bits of results and gradients are those of one operation after another: each value that is not
written is rounded to BF16 all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from octavo.kernels.norm import add_rms_norm_cast, rms_norm_backward
from octavo.kernels.operands import FILLED, Operand, QuantizedMatrix, split_edges
from octavo.kernels.swiglu import swiglu_backward_cast, swiglu_cast
from octavo.numerics.exact import block_edges
from octavo.numerics.fp8 import BLOCK_1X128, BLOCK_128X1, QuantBlock

if TYPE_CHECKING:
    from octavo.layers.linear import FP8Linear


class NormLinear(torch.autograd.Function):
    """h + delta [T, D], and a layer of its norm [T, N]."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        delta: Tensor | None,
        gain: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_eps: float,
        layer: FP8Linear,
    ) -> tuple[Tensor, Tensor]:
        h, y, norm = _norm_linear(h, delta, gain, norm_eps, layer)
        ctx.layer, ctx.adds = layer, delta is not None
        ctx.save_for_backward(h, gain, *norm, layer.stored_weight())
        return h, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_h, grad_y = grads
        h, gain, inverse_rms, x_t, x_scale, _ = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # what was read last goes first, as it would between functions
        grad_x, grad_weight = ctx.layer.gradients(grad_y, _across(x_t, x_scale), True)
        grad_bias = grad_y.float().sum(dim=0) if ctx.needs_input_grad[4] else None
        del x_t, x_scale
        grad_h, grad_gain = rms_norm_backward(h, gain, inverse_rms, grad_x, grad_h)
        return grad_h, grad_h if ctx.adds else None, grad_gain, grad_weight, grad_bias, None, None


class NormMLP(torch.autograd.Function):
    """h + delta [T, D], and down_proj(swiglu(gate_up_proj(norm(h + delta)))) [T, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        h: Tensor,
        delta: Tensor,
        gain: Tensor,
        gate_up_weight: Tensor,
        down_weight: Tensor,
        norm_eps: float,
        gate_up: FP8Linear,
        down: FP8Linear,
    ) -> tuple[Tensor, Tensor]:
        h, halves, norm = _norm_linear(h, delta, gain, norm_eps, gate_up)
        made = swiglu_cast(halves, transposed=True, rounding=down.recipe.scale_rounding, pad_to=FILLED)
        y = down.multiply(cast_operand(made.q, made.scale, [down.in_features]))
        ctx.layers = gate_up, down
        weights = gate_up.stored_weight(), down.stored_weight()
        ctx.save_for_backward(h, gain, *norm, halves, made.q_t, made.scale_t, *weights)
        return h, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_h, grad_y = grads
        gate_up, down = ctx.layers
        h, gain, inverse_rms, x_t, x_scale, halves, s_t, s_scale, _, _ = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # what was read last goes first, as it would between functions
        grad_s, grad_down = down.gradients(grad_y, _across(s_t, s_scale), True)
        del s_t, s_scale
        along, across = swiglu_backward_cast(halves, grad_s, gate_up.recipe.scale_rounding, pad_to=FILLED)
        del halves, grad_s
        left, right = cast_operand(*along, gate_up.splits), _across(*across)
        grad_x, grad_gate_up = gate_up.gradients_of_casts(left, right, _across(x_t, x_scale))
        del along, across, left, right, x_t, x_scale
        grad_h, grad_gain = rms_norm_backward(h, gain, inverse_rms, grad_x, grad_h)
        return grad_h, grad_h, grad_gain, grad_gate_up, grad_down, None, None, None


class _Norm(NamedTuple):
    """What the backward of a norm and the layer after it reads, beside h."""

    inverse_rms: Tensor
    x_t: Tensor
    x_scale: Tensor


def _norm_linear(
    h: Tensor, delta: Tensor | None, gain: Tensor, norm_eps: float, layer: FP8Linear
) -> tuple[Tensor, Tensor, _Norm]:
    made = add_rms_norm_cast(
        h, delta, gain, norm_eps, transposed=True, rounding=layer.recipe.scale_rounding, pad_to=FILLED
    )
    assert made.q_t is not None and made.scale_t is not None
    y = layer.multiply(cast_operand(made.q, made.scale, [layer.in_features]))
    return made.h, y, _Norm(made.inverse_rms, made.q_t, made.scale_t)


def cast_operand(q: Tensor, scale: Tensor, splits: Sequence[int], quant_block: QuantBlock = BLOCK_1X128) -> Operand:
    """A cast of X [T, sum of splits], 1x128 with each block filled up or per row, ready for a product over columns."""
    return Operand(q, scale, split_edges(splits, quant_block[1]), by_blocks=quant_block == BLOCK_1X128)


def _across(q_t: Tensor, scale_t: Tensor) -> QuantizedMatrix:
    """The matrix of whose transpose this is a cast by blocks of 1x128, for a product over tokens."""
    N, T = q_t.shape
    return QuantizedMatrix(q_t.T, scale_t.T, block_edges(T), range(N + 1), BLOCK_128X1)
