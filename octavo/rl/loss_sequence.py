"""Losses of a sequence's ratio: all tokens of a completion are clipped together, or none.

Which completions keep a gradient is the table of `loss_clipped`, with s, the geometric mean of the tokens' ratios,
for r. Where advantages are constant along a completion both forms have the same gradient; they differ where a KL
penalty in the reward gives each token its own.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octavo.rl.losses import ClipBounds, ClipConfig


def sequence_mean(values: Tensor, loss_mask: Tensor, sequence_index: Tensor) -> Tensor:
    """Mean over the loss tokens of each token's sequence, summed in float64; 0 where loss_mask is 0.

    Each sequence is summed on its own, so its bits do not depend on what it is packed with.

    Args:
        values: [T] fp32, carries gradient if wanted.
        loss_mask: [T] bool or 0/1, 1 where a token enters the loss.
        sequence_index: [T] int64, ascending over the loss tokens.

    Returns:
        [T] of values' dtype.
    """
    mask = loss_mask.bool()
    index = sequence_index[mask]
    if len(index) == 0:
        return torch.zeros_like(values)
    counts = torch.bincount(index)
    sums = torch.segment_reduce(values[mask].double(), "sum", lengths=counts, initial=0.0)
    return torch.zeros_like(values).masked_scatter(mask, (sums[index] / counts[index]).to(values.dtype))


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor, loss_mask: Tensor, sequence_index: Tensor) -> Tensor:
    """[T] s = exp(mean of logprobs - old_logprobs over the sequence's loss tokens); 1 where loss_mask is 0."""
    return torch.exp(sequence_mean(logprobs - old_logprobs, loss_mask, sequence_index))


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    bounds: ClipBounds,
    weights: Tensor,
    loss_mask: Tensor,
    sequence_index: Tensor,
) -> Tensor:
    """Group sequence policy optimisation (Zheng et al. 2025, arXiv:2507.18071).

        loss = -w min(s A, clamp(s, L, H) A),   s = exp(mean over the sequence of logprobs - old_logprobs)

    The gradient reaches each token through the mean. The paper averages over sequences (`sequence_mean`).

    Args:
        logprobs: [T] fp32, policy in training; the only input with a gradient.
        old_logprobs: [T] fp32, same numerics, weights before this step.
        advantages: [T] fp32, in units of the advantage estimator.
        bounds: ClipBounds, absolute bounds L and H on s.
        weights: [T] fp32, w of `corrections.correction_weights`; ones when the rollout is exact.
        loss_mask: [T] bool or 0/1, 1 where a token enters the loss.
        sequence_index: [T] int64, whole sequences, ascending.

    Returns:
        [T] fp32 loss to minimise, in advantage units, neither masked nor reduced.
    """
    ratio = sequence_ratio(logprobs, old_logprobs, loss_mask, sequence_index)
    return _clipped(ratio, advantages, bounds, weights)


def gspo_token(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    bounds: ClipBounds,
    weights: Tensor,
    loss_mask: Tensor,
    sequence_index: Tensor,
) -> Tensor:
    """GSPO-token (arXiv:2507.18071): the value of s, the gradient of the token alone.

        loss = -w min(s' A, clamp(s', L, H) A),   s' = sg(s) exp(logprobs - sg(logprobs))

    Arguments and result as of `gspo`; sg stops the gradient.
    """
    ratio = sequence_ratio(logprobs.detach(), old_logprobs, loss_mask, sequence_index)
    return _clipped(ratio * torch.exp(logprobs - logprobs.detach()), advantages, bounds, weights)


def _clipped(ratio: Tensor, advantages: Tensor, bounds: ClipBounds, weights: Tensor) -> Tensor:
    clipped = ratio.clamp(bounds.low, bounds.high)
    return -weights * torch.minimum(ratio * advantages, clipped * advantages)


@dataclass(frozen=True, kw_only=True)
class GSPO(ClipConfig):
    """Clipped surrogate of the sequence's ratio. Its offsets are far smaller than a token's."""

    type_name: ClassVar[str] = "gspo"
    clip_low: float = 3e-4
    """The sequence's ratio earns nothing below 1 - clip_low. In [0, 1)."""
    clip_high: float = 4e-4
    """The sequence's ratio earns nothing above 1 + clip_high. At least 0."""


@dataclass(frozen=True, kw_only=True)
class GSPOToken(GSPO):
    """As gspo, with the gradient of each token weighted by its own advantage."""

    type_name: ClassVar[str] = "gspo_token"
