"""RMSNorm in FP32: y = x / sqrt(mean(x^2) + norm_eps) * gain (Zhang & Sennrich 2019)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.numerics.exact import mean_square


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


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, norm_eps: float) -> Tensor:
        inverse_rms = (mean_square(x) + norm_eps).rsqrt().float()
        ctx.save_for_backward(x, gain, inverse_rms)
        return (x.float() * inverse_rms * gain).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gain, inverse_rms = ctx.saved_tensors
        grad_y = grads[0].float()
        normalized = x.float() * inverse_rms
        grad_gain = (grad_y * normalized).reshape(-1, len(gain)).sum(dim=0)
        grad_normalized = grad_y * gain
        projection = (grad_normalized * normalized).mean(dim=-1, keepdim=True)
        grad_x = (grad_normalized - normalized * projection) * inverse_rms
        return grad_x.to(x.dtype), grad_gain, None
