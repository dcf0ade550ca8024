"""Weights that correct the loss for tokens that another numerics sampled, from d = old_logprobs - rollout_logprobs.

Where rollout and training are exact every d is 0 and every weight exactly 1. A weight of 0 takes a token out of the
update; it still counts in the normalisers of `reduce_loss`, as every token that was sampled.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from octavo.rl.loss_sequence import sequence_mean
from octavo.rl.losses import loss_tokens, share
from octavo.rl.mismatch import check_cap, tis_weights

SequenceWeight = Literal["geometric", "product"]
"""How the rollout ratios of a completion become one: their geometric mean, or their product."""


def _check_band(low: float, high: float) -> None:
    if not 0.0 <= low <= 1.0 <= high:
        raise ValueError(f"a band of rollout ratios wants 0 <= low <= 1 <= high; got low={low}, high={high}")


@dataclass(frozen=True, kw_only=True)
class SequenceTIS:
    """One truncated importance weight for all tokens of a completion."""

    type_name: ClassVar[str] = "sequence_tis"
    weight: SequenceWeight = "geometric"
    """geometric: exp(mean of d), biased but bounded in length; product: exp(sum of d), the exact importance weight."""
    cap: float = 2.0
    """Largest weight. At least 1."""

    def __post_init__(self) -> None:
        check_cap(self.cap)
        if self.weight not in get_args(SequenceWeight):
            raise ValueError(f"weight is one of {get_args(SequenceWeight)}; got {self.weight!r}")


@dataclass(frozen=True, kw_only=True)
class IcePop:
    """Tokens whose rollout ratio leaves a band have weight 0, the others their ratio (masked importance sampling)."""

    type_name: ClassVar[str] = "icepop"
    low: float = 0.5
    """Smallest rollout ratio that is kept. In [0, 1]."""
    high: float = 5.0
    """Largest rollout ratio that is kept. At least 1."""

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class SequenceMask:
    """Completions whose geometric mean of rollout ratios leaves a band have weight 0, the others token weights."""

    type_name: ClassVar[str] = "sequence_mask"
    low: float = 0.95
    """Smallest geometric mean that is kept. In [0, 1]."""
    high: float = 1.05
    """Largest geometric mean that is kept. At least 1."""
    cap: float = 2.0
    """Largest weight of a token that is kept. At least 1."""

    def __post_init__(self) -> None:
        _check_band(self.low, self.high)
        check_cap(self.cap)


CorrectionConfig = SequenceTIS | IcePop | SequenceMask


def correction_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    loss_mask: Tensor,
    sequence_index: Tensor,
    config: CorrectionConfig | None,
    tis_cap: float,
) -> Tensor:
    """The weight w of each token.

        null           min(exp(d), tis_cap)                            Ionides 2008, `mismatch.tis_weights`
        sequence_tis   min(exp(mean of d), cap) or min(exp(sum of d), cap)    as verl's rollout_is: sequence
        icepop         exp(d) inside [low, high], else 0                      IcePop, arXiv:2510.18855
        sequence_mask  min(exp(d), cap), 0 where exp(mean of d) leaves [low, high]    as verl's seq_mean_k1

    Means and sums run over the loss tokens of a sequence.

    Args:
        old_logprobs: [T] fp32, training numerics, weights before this step's updates.
        rollout_logprobs: [T] fp32, reported by the engine that sampled.
        loss_mask: [T] bool or 0/1, 1 where a token enters the loss.
        sequence_index: [T] int64, whole sequences, ascending.
        config: the correction; None for token weights.
        tis_cap: largest token weight where config is None.

    Returns:
        [T] fp32, without gradient.
    """
    if config is None:
        return tis_weights(old_logprobs, rollout_logprobs, tis_cap)
    difference = old_logprobs.detach() - rollout_logprobs.detach()
    if isinstance(config, IcePop):
        ratio = torch.exp(difference)
        return _keep(ratio, ratio, config.low, config.high)
    mean = sequence_mean(difference, loss_mask, sequence_index)
    if isinstance(config, SequenceMask):
        return _keep(tis_weights(old_logprobs, rollout_logprobs, config.cap), torch.exp(mean), config.low, config.high)
    if config.weight == "product":
        lengths = torch.bincount(sequence_index[loss_mask.bool()], minlength=int(sequence_index.max()) + 1)
        mean = mean * lengths[sequence_index]
    return torch.exp(mean).clamp(max=config.cap)


def _keep(weights: Tensor, ratio: Tensor, low: float, high: float) -> Tensor:
    """weights where ratio is inside the closed band or NaN, else 0: a NaN must show."""
    return torch.where((ratio < low) | (ratio > high), 0.0, weights)


def correction_metrics(weights: Tensor, loss_mask: Tensor) -> dict[str, float]:
    """What a correction does to the loss tokens of a mini-batch.

        correction/weight_mean    mean weight, 1.0 without loss tokens
        correction/dropped_share  share of tokens with weight 0

    Args:
        weights: [T] fp32, of `correction_weights`.
        loss_mask: [T] bool or 0/1, 1 where a token enters the loss.
    """
    (weights,) = loss_tokens(loss_mask, weights)
    return {
        "correction/weight_mean": weights.mean().item() if weights.numel() else 1.0,
        "correction/dropped_share": share(weights == 0.0, torch.ones_like(weights, dtype=torch.bool), (weights,)),
    }
