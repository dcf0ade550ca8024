"""The autograd function of a linear layer: what it saves, and how that comes back.

Everything goes through `save_for_backward`: autograd frees it as soon as the backward has read it, whoever still holds
Y, and refuses a backward after X, what was saved of it, or W was written to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from octavo.kernels.operands import QuantizedMatrix

if TYPE_CHECKING:
    from octavo.layers.linear import FP8Linear


class LinearFunction(torch.autograd.Function):
    """Y = X W^T + bias of a layer, and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: FP8Linear) -> Tensor:
        ctx.layer, ctx.layout = layer, None
        saturated = layer.saturated(x) if ctx.needs_input_grad[0] else None
        y, saved_x = layer.fprop_and_save(x) if ctx.needs_input_grad[1] else (layer.fprop(x), None)
        scale = None
        if isinstance(saved_x, QuantizedMatrix):
            ctx.layout = (saved_x.row_edges, saved_x.column_edges, saved_x.quant_block)
            scale, saved_x = saved_x.scale, saved_x.q
        ctx.save_for_backward(layer.stored_weight(), saturated, saved_x, scale)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        grad_y, layer = grads[0], ctx.layer
        needs_x, _, needs_bias = ctx.needs_input_grad[:3]
        _, saturated, saved_x, scale = ctx.saved_tensors
        if ctx.layout is not None:
            saved_x = QuantizedMatrix(saved_x, scale, *ctx.layout)
        grad_x, grad_weight = layer.gradients(grad_y, saved_x, needs_x)
        if grad_x is not None and saturated is not None:
            grad_x = grad_x.masked_fill(saturated, 0.0)
        grad_bias = grad_y.float().sum(dim=0) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None
