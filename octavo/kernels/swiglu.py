"""SwiGLU: silu(gate) * up in FP32, rounded once (Shazeer 2020)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def swiglu(gate_up: Tensor) -> Tensor:
    """[T, 2F] bf16 or fp32, gate first -> silu(gate) * up, [T, F], same dtype. Differentiable."""
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = _halves(gate_up)
        return (gate * _sigmoid(gate) * up).to(gate_up.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        grad_y = grads[0].float()
        gate, up = _halves(gate_up)
        sigmoid = _sigmoid(gate)
        grad_up = grad_y * gate * sigmoid
        grad_gate = grad_y * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
        return torch.cat([grad_gate, grad_up], dim=-1).to(gate_up.dtype)


def _halves(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up in FP32, contiguous."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate.float().contiguous(), up.float().contiguous()


def _sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)). `torch.sigmoid` gives another last bit at the end of a tensor than inside it, so a token's
    value would depend on its place in the batch; `exp` and division do not."""
    return 1.0 / (1.0 + torch.exp(-x))
