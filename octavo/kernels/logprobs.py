"""Chosen-token log-probabilities and entropy from hidden states; the logits of a batch are never all held.

    logits = hidden . W^T / temperature        FP32
    logprob = logits[chosen] - logsumexp(logits)

The weights of a softmax are put on a grid of 2**-35 below the largest one, so their sum is exact and the same for
any batch and any vocabulary tiling; `sampling_weights` gives the same integers to the sampler. On a GPU BF16 runs in
`kernels.lm_head`, and a logsumexp is summed there, in both roles and from the same FP32 logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from octavo.kernels import lm_head
from octavo.kernels.device import on_gpu
from octavo.kernels.gemm import gemm
from octavo.kernels.lm_head_gradients import gradients, kept_bytes
from octavo.kernels.operands import Operand, grid_operand
from octavo.numerics.exact import UNIT_BITS, unit_grid

MAX_LOGITS_PER_CHUNK = 2**24


def token_logprobs(
    hidden: Tensor, weight: Tensor, operand: Operand, tokens: Tensor, temperature: float, recompute: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probability of each chosen token, and the entropy of its distribution.

    Args:
        hidden: [T, D] bf16 or fp32, the state that predicts each token. Receives a gradient, in its dtype.
        weight: [V, D] fp32 master of lm_head. Receives a gradient; its values are not read.
        operand: lm_head prepared by `grid_operand`, in the precision that is multiplied.
        tokens: [T] int64, the chosen tokens.
        temperature: divides the logits; above 0.
        recompute: the backward multiplies again, whatever memory there is; the same bits.

    Returns:
        logprobs [T] fp32, differentiable, and entropy [T] fp32 in nats, without a gradient.
    """
    if not _is_tiled(operand):
        return _TokenLogprobs.apply(hidden, weight, operand, tokens, temperature)
    wants_grad = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    keep = wants_grad and not recompute and kept_bytes(len(tokens), len(operand.values)) > 0
    return _TiledLogprobs.apply(hidden, weight, operand, tokens, temperature, keep)


def logits_from_hidden(hidden: Tensor, operand: Operand, temperature: float = 1.0) -> Tensor:
    """[T, D] -> logits [T, V] fp32, divided by the temperature."""
    if _is_tiled(operand):
        return lm_head.logits_of(hidden, operand.values, temperature)
    logits = gemm(grid_operand(hidden), operand).float()
    return logits if temperature == 1.0 else logits / temperature


def sampling_weights(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax weights relative to the largest, as float64 integers on a grid of 2**-35.

    Args:
        logits: [T, V] fp32.

    Returns:
        weights [T, V] float64 whole numbers, 2**35 for the largest; logsumexp [T, 1] float64 in nats.
    """
    largest = logits.amax(dim=-1, keepdim=True)
    weights = unit_grid(torch.exp(logits - largest))
    if on_gpu(logits, "sampling"):
        return weights, lm_head.logsumexp_of(logits)
    return weights, largest.double() + torch.log(weights.sum(dim=-1, keepdim=True) * 2.0**-UNIT_BITS)


def chosen_logprobs(logits: Tensor, logsumexp: Tensor, tokens: Tensor) -> Tensor:
    """logits [T, V] fp32, logsumexp [T, 1] float64, tokens [T] int64 -> [T] fp32, rounded once."""
    return (logits.gather(1, tokens[:, None]).double() - logsumexp).squeeze(1).float()


def _is_tiled(operand: Operand) -> bool:
    """`grid_operand` leaves BF16 as it is for kernels, and only for them."""
    return operand.values.dtype == torch.bfloat16


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, operand: Operand, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        logprobs = torch.empty(len(tokens), dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs)
        for rows in _chunks(len(tokens), len(operand.values)):
            logits = logits_from_hidden(hidden[rows], operand, temperature)
            weights, logsumexp = sampling_weights(logits)
            logprobs[rows] = chosen_logprobs(logits, logsumexp, tokens[rows])
            mean_logit = (weights * logits).sum(dim=-1) / weights.sum(dim=-1)
            entropy[rows] = (logsumexp.squeeze(1) - mean_logit).float()
        ctx.save_for_backward(hidden, tokens)
        ctx.operand, ctx.temperature = operand, temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, tokens = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        weight = ctx.operand.values.float()
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        for rows in _chunks(len(tokens), len(weight)):
            logits = logits_from_hidden(hidden[rows], ctx.operand, ctx.temperature)
            grad_logits = -torch.softmax(logits, dim=-1)
            grad_logits.scatter_add_(1, tokens[rows, None], grad_logits.new_ones(len(logits), 1))
            grad_logits *= grads[0][rows, None] / ctx.temperature
            grad_hidden[rows] = (grad_logits @ weight).to(hidden.dtype)
            if needs_weight:
                grad_weight.addmm_(grad_logits.T, hidden[rows].float())
        return grad_hidden if needs_hidden else None, grad_weight if needs_weight else None, None, None, None


class _TiledLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, operand: Operand, tokens: Tensor, temperature: float, keep: bool
    ) -> tuple[Tensor, Tensor]:
        chosen, logsumexp, entropy, kept = lm_head.softmax_sums(hidden, operand.values, tokens, temperature, keep)
        ctx.save_for_backward(hidden, operand.values, tokens, logsumexp)  # torch refuses a weight rewritten meanwhile
        ctx.temperature, ctx.kept = temperature, kept
        ctx.mark_non_differentiable(entropy)
        return (chosen.double() - logsumexp).float(), entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, tokens, logsumexp = ctx.saved_tensors
        temperature, needs = ctx.temperature, ctx.needs_input_grad[:2]
        kept, ctx.kept = ctx.kept, None  # is overwritten: the backward of a graph that is retained multiplies again
        found = gradients(hidden, weight, tokens, logsumexp, grads[0] / temperature, temperature, needs, kept)
        return *found, None, None, None, None


def _chunks(num_rows: int, vocabulary: int) -> Iterator[slice]:
    """Row slices whose logits fit in MAX_LOGITS_PER_CHUNK."""
    size = max(1, MAX_LOGITS_PER_CHUNK // vocabulary)
    return (slice(start, min(start + size, num_rows)) for start in range(0, num_rows, size))
