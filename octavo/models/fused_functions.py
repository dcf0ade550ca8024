"""Autograd functions of the halves of a decoder layer: what makes X, or its gradient, goes with its casts.

    NormLinear     h + delta, norm, qkv_proj
    NormMLP        h + delta, norm, gate_up_proj, SwiGLU, down_proj

X is cast in the layout of FProp and in that of WGrad, which is saved. Under blocks of 128 what makes X casts it, and X
is itself never written; nor is the gradient of gate and up. Per tensor it finds the largest magnitude, so that the
casts read X once. The bits of results and gradients are those of one operation after another: each value that is not
written is rounded to BF16 all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.kernels.cast_whole import new_amax_bits
from octavo.kernels.norm import add_rms_norm, add_rms_norm_cast, rms_norm_backward
from octavo.kernels.operands import FILLED, Operand, QuantizedMatrix, quantize_both, split_edges
from octavo.kernels.swiglu import swiglu_backward, swiglu_backward_cast, swiglu_cast, swiglu_forward
from octavo.numerics.exact import block_edges
from octavo.numerics.fp8 import BLOCK_1X128, BLOCK_128X1, PER_TENSOR, QuantBlock

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
        h, y, inverse_rms, x = _norm_linear(h, delta, gain, norm_eps, layer)
        ctx.layer, ctx.adds, ctx.layout = layer, delta is not None, _layout(x)
        ctx.save_for_backward(h, gain, inverse_rms, x.q, x.scale, layer.stored_weight())
        return h, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_h, grad_y = grads
        h, gain, inverse_rms, q, scale, _ = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # what was read last goes first, as it would between functions
        grad_x, grad_weight = ctx.layer.gradients(grad_y, QuantizedMatrix(q, scale, *ctx.layout), True)
        grad_bias = grad_y.float().sum(dim=0) if ctx.needs_input_grad[4] else None
        del q, scale
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
        h, halves, inverse_rms, x = _norm_linear(h, delta, gain, norm_eps, gate_up)
        left, s = _cast_swiglu(halves, down)
        y = down.multiply(left)
        ctx.layers, ctx.layouts = (gate_up, down), (_layout(x), _layout(s))
        weights = gate_up.stored_weight(), down.stored_weight()
        ctx.save_for_backward(h, gain, inverse_rms, x.q, x.scale, halves, s.q, s.scale, *weights)
        return h, y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_h, grad_y = grads
        (gate_up, down), (x_layout, s_layout) = ctx.layers, ctx.layouts
        h, gain, inverse_rms, q, scale, halves, s_q, s_scale, _, _ = ctx.saved_tensors
        ctx.maybe_clear_saved_tensors()  # what was read last goes first, as it would between functions
        grad_s, grad_down = down.gradients(grad_y, QuantizedMatrix(s_q, s_scale, *s_layout), True)
        del s_q, s_scale
        recipe, splits = gate_up.recipe, gate_up.splits
        assert recipe.dgrad is not None and recipe.dgrad.left is not None
        if recipe.dgrad.left == BLOCK_1X128:
            along, across = swiglu_backward_cast(halves, grad_s, recipe.scale_rounding, pad_to=FILLED)
            del halves, grad_s
            left, right = cast_operand(*along, splits), _across(*across)
            del along, across
        else:
            amax_bits = _amax_bits(recipe.dgrad.left, halves, len(splits))
            grad = swiglu_backward(halves, grad_s, amax_bits)
            del halves, grad_s
            left, right = quantize_both(grad, recipe.dgrad.left, recipe.scale_rounding, splits, amax_bits)
            del grad
        grad_x, grad_gate_up = gate_up.gradients_of_casts(left, right, QuantizedMatrix(q, scale, *x_layout))
        del left, right, q, scale
        grad_h, grad_gain = rms_norm_backward(h, gain, inverse_rms, grad_x, grad_h)
        return grad_h, grad_h, grad_gain, grad_gate_up, grad_down, None, None, None


def _norm_linear(
    h: Tensor, delta: Tensor | None, gain: Tensor, norm_eps: float, layer: FP8Linear
) -> tuple[Tensor, Tensor, Tensor, QuantizedMatrix]:
    """h + delta, the layer of its norm, the norm's inverse root mean squares, and X as WGrad multiplies it."""
    block, rounding = layer.recipe.fprop.left, layer.recipe.scale_rounding
    assert block is not None
    if block == BLOCK_1X128:
        made = add_rms_norm_cast(h, delta, gain, norm_eps, transposed=True, rounding=rounding, pad_to=FILLED)
        assert made.q_t is not None and made.scale_t is not None
        left = cast_operand(made.q, made.scale, [layer.in_features])
        return made.h, layer.multiply(left), made.inverse_rms, _across(made.q_t, made.scale_t)
    amax_bits = _amax_bits(block, h)
    h, x, inverse_rms = add_rms_norm(h, delta, gain, norm_eps, amax_bits)
    left, across = quantize_both(x, block, rounding, [layer.in_features], amax_bits)
    del x
    return h, layer.multiply(left), inverse_rms, across


def _cast_swiglu(gate_up: Tensor, layer: FP8Linear) -> tuple[Operand, QuantizedMatrix]:
    """SwiGLU as FProp of the layer multiplies it, and as its WGrad does."""
    block, rounding = layer.recipe.fprop.left, layer.recipe.scale_rounding
    assert block is not None
    if block == BLOCK_1X128:
        made = swiglu_cast(gate_up, transposed=True, rounding=rounding, pad_to=FILLED)
        assert made.q_t is not None and made.scale_t is not None
        return cast_operand(made.q, made.scale, [layer.in_features]), _across(made.q_t, made.scale_t)
    amax_bits = _amax_bits(block, gate_up)
    return quantize_both(swiglu_forward(gate_up, amax_bits), block, rounding, [layer.in_features], amax_bits)


def _amax_bits(quant_block: QuantBlock, x: Tensor, num_projections: int = 1) -> Tensor | None:
    """For what makes a matrix beside X to fill, where one scale is wanted of all of it."""
    return new_amax_bits(x, num_projections) if quant_block == PER_TENSOR else None


def _layout(x: QuantizedMatrix) -> tuple[Sequence[int], Sequence[int], QuantBlock]:
    """What is to be known of a matrix beside its bytes and scales."""
    return x.row_edges, x.column_edges, x.quant_block


def cast_operand(q: Tensor, scale: Tensor, splits: Sequence[int], quant_block: QuantBlock = BLOCK_1X128) -> Operand:
    """A cast of X [T, sum of splits], 1x128 with each block filled up or per row, ready for a product over columns."""
    return Operand(q, scale, split_edges(splits, quant_block[1]), by_blocks=quant_block == BLOCK_1X128)


def _across(q_t: Tensor, scale_t: Tensor) -> QuantizedMatrix:
    """The matrix of whose transpose this is a cast by blocks of 1x128, for a product over tokens."""
    N, T = q_t.shape
    return QuantizedMatrix(q_t.T, scale_t.T, block_edges(T), range(N + 1), BLOCK_128X1)
