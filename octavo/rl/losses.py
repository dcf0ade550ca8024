"""What all token losses share: bounds on the ratio, the KL penalty, and the one function that masks and reduces.

A token loss returns [T], neither masked nor reduced; `loss_clipped`, `loss_sequence` and `loss_likelihood` hold them.
`reduce_loss` turns it into the scalar that is differentiated; its normalisers describe the whole mini-batch, so the
losses of microbatches add up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

KLEstimator = Literal["k1", "k2", "k3"]
"""Which per-token estimate of the KL divergence `kl_estimate` returns."""

KLPlacement = Literal["loss", "reward"]
"""Where the penalty on the distance to the reference goes."""

Reduction = Literal["token_mean", "sequence_mean", "constant"]
"""How `reduce_loss` weighs tokens: DAPO, GRPO, Dr.GRPO."""


@dataclass(frozen=True)
class ClipBounds:
    """The interval of ratios inside which a token is rewarded for moving. Absolute, not offsets."""

    low: float
    """The ratio earns nothing below. In [0, 1]."""
    high: float
    """The ratio earns nothing above. At least 1."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.low <= 1.0 <= self.high:
            raise ValueError(
                f"ClipBounds are absolute bounds on the ratio, 0 <= low <= 1 <= high; got low={self.low}, "
                f"high={self.high}. Offsets such as 0.2 and 0.28 belong in ClipConfig."
            )


@dataclass(frozen=True, kw_only=True)
class ClipConfig:
    """The trust region of PPO as offsets from a ratio of 1. The defaults are DAPO's (arXiv:2503.14476)."""

    clip_low: float = 0.2
    """The ratio earns nothing below 1 - clip_low. In [0, 1)."""
    clip_high: float = 0.28
    """The ratio earns nothing above 1 + clip_high. At least 0."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip_low < 1.0:
            raise ValueError(f"clip_low is an offset below 1, in [0, 1); got {self.clip_low}")
        if not self.clip_high >= 0.0:
            raise ValueError(f"clip_high is an offset above 1, at least 0; got {self.clip_high}")

    def bounds(self) -> ClipBounds:
        """The same trust region as absolute bounds, [1 - clip_low, 1 + clip_high]."""
        return ClipBounds(low=1.0 - self.clip_low, high=1.0 + self.clip_high)


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """The penalty that holds the policy near the frozen reference model."""

    coefficient: float = 0.0
    """Factor on the estimate, in loss units per nat. At least 0; 0 means no penalty and no reference pass."""
    estimator: KLEstimator = "k3"
    """Which estimate is differentiated. For tokens the policy itself sampled, k2 has the expected gradient
    of KL(policy || reference), k3 that of KL(reference || policy), k1 none. In the reward k1."""
    placement: KLPlacement = "loss"
    """loss: the estimate is added to each token's loss. reward: coefficient x k1 of each token, before the step's
    updates, is a cost, and a token's advantage is less the costs from it to the end of its completion."""

    def __post_init__(self) -> None:
        if self.estimator not in get_args(KLEstimator):
            raise ValueError(f"estimator is one of {get_args(KLEstimator)}; got {self.estimator!r}")
        if self.placement not in get_args(KLPlacement):
            raise ValueError(f"placement is one of {get_args(KLPlacement)}; got {self.placement!r}")
        if not 0.0 <= self.coefficient < math.inf:
            raise ValueError(f"coefficient is a finite factor on the KL penalty, at least 0; got {self.coefficient}")
        if self.placement == "reward":
            if self.estimator != "k1":
                raise ValueError(
                    f"placement 'reward' subtracts the estimate k1, whose expectation is the divergence; got estimator "
                    f"{self.estimator!r}. Use estimator 'k1', or placement 'loss'."
                )
        elif self.coefficient > 0.0 and self.estimator == "k1":
            raise ValueError(
                f"estimator 'k1' cannot be a loss term (coefficient={self.coefficient}): its gradient is that of "
                "logprobs, whose expectation under the policy is zero, so it would add noise and no penalty. "
                "Use estimator 'k2' or 'k3', or placement 'reward'."
            )


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, estimator: KLEstimator) -> Tensor:
    """KL(policy || reference) estimated from each sampled token, with d = logprobs - ref_logprobs.

        k1 = d        k2 = d^2 / 2        k3 = exp(-d) - 1 + d

    John Schulman, "Approximating KL Divergence" (2020, joschu.net/blog/kl-approx.html). k1 and k3 are
    unbiased for tokens sampled from the policy, k2 is biased; k2 and k3 are never negative.

    Args:
        logprobs: [T] fp32, policy in training, carries gradient.
        ref_logprobs: [T] fp32, frozen reference model.
        estimator: "k1", "k2" or "k3".

    Returns:
        [T] fp32, in nats, neither masked nor reduced.

    Raises:
        ValueError: another estimator is asked for.
    """
    d = logprobs - ref_logprobs
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        # expm1 keeps the digits that exp(-d) - 1 loses for small d; k3 is of the order d^2.
        return torch.expm1(-d) + d
    raise ValueError(f"kl_estimate wants estimator in {get_args(KLEstimator)}; got {estimator!r}")


def reduce_loss(
    token_losses: Tensor,
    loss_mask: Tensor,
    sequence_index: Tensor,
    reduction: Reduction,
    *,
    num_loss_tokens: int,
    num_sequences: int,
    max_completion_tokens: int,
) -> Tensor:
    """Masks and reduces a token loss to the scalar whose gradient is taken.

        token_mean     sum of the losses / num_loss_tokens                                       (DAPO)
        sequence_mean  sum over sequences of the mean over their loss tokens / num_sequences     (GRPO)
        constant       sum of the losses / (num_sequences * max_completion_tokens)               (Dr.GRPO)

    The three normalisers count the whole mini-batch, over all its microbatches and ranks, so that the
    losses of microbatches add up to the loss of the mini-batch. For sequence_mean the loss tokens of a
    sequence must lie in one microbatch; a sequence without any adds 0.

    Args:
        token_losses: [T] fp32, carries gradient. Values where loss_mask is 0 are never read.
        loss_mask: [T] bool or 0/1, 1 where a token enters the loss.
        sequence_index: [T] int64, which sequence of the microbatch a token belongs to, at least 0 where
            loss_mask is 1; any value elsewhere. Read by sequence_mean only.
        reduction: "token_mean", "sequence_mean" or "constant".
        num_loss_tokens: loss tokens of the mini-batch, at least 1.
        num_sequences: completions of the mini-batch, at least 1.
        max_completion_tokens: the longest completion that sampling allows, in tokens, at least 1.

    Returns:
        fp32 scalar, 0 with a zero gradient when the microbatch has no loss token.

    Raises:
        ValueError: a normaliser is below 1, or another reduction is asked for.
    """
    normalisers = {
        "num_loss_tokens": num_loss_tokens,
        "num_sequences": num_sequences,
        "max_completion_tokens": max_completion_tokens,
    }
    for name, value in normalisers.items():
        if value < 1:
            raise ValueError(
                f"reduce_loss wants {name} of the whole mini-batch, at least 1; got {value}. "
                "Skip a mini-batch that has nothing to learn from."
            )
    mask = loss_mask.bool()
    losses = token_losses[mask]
    if reduction == "token_mean":
        return losses.sum() / num_loss_tokens
    if reduction == "constant":
        return losses.sum() / (num_sequences * max_completion_tokens)
    if reduction == "sequence_mean":
        # Integer counts, then a plain sum: unlike a scatter of losses it has one order on every device.
        index = sequence_index[mask]
        lengths = torch.bincount(index)[index]
        return (losses / lengths).sum() / num_sequences
    raise ValueError(f"reduce_loss wants reduction in {get_args(Reduction)}; got {reduction!r}")


def loss_tokens(loss_mask: Tensor, *values: Tensor) -> list[Tensor]:
    """The loss tokens of each value, detached and in float64: what every metric is computed from.

    Args:
        loss_mask: [T] bool or 0/1, 1 where a token enters the loss.
        values: [T] float each.

    Returns:
        One [N] float64 tensor per value, N the number of loss tokens.
    """
    mask = loss_mask.bool()
    return [value.detach()[mask].double() for value in values]


def share(event: Tensor, population: Tensor, sources: Sequence[Tensor], *, empty: float = 0.0) -> float:
    """Share of a population in which an event holds.

    Args:
        event: [N] bool.
        population: [N] bool.
        sources: [N] float each, what event and population were computed from. A NaN among them makes the
            share NaN, because a comparison with NaN is false and would hide it.
        empty: the value for an empty population.

    Returns:
        A share in [0, 1], `empty`, or NaN.
    """
    if any(bool(torch.isnan(source).any()) for source in sources):
        return math.nan
    num_population = int(population.sum())
    return int((event & population).sum()) / num_population if num_population else empty


def clip_metrics(dropped: Tensor, ratio: Tensor, advantages: Tensor, loss_mask: Tensor) -> dict[str, float]:
    """How many tokens a loss deprives of their gradient, or of a part of it.

        loss/clip_fraction       dropped tokens, over all loss tokens
        loss/clip_fraction_low   those with a negative advantage, over loss tokens with a negative advantage
        loss/clip_fraction_high  those with a positive advantage, over loss tokens with a positive advantage

    Each is a share in [0, 1], 0.0 when its denominator is empty, NaN when a loss token has a NaN.

    Args:
        dropped: [T] bool, `policy_loss.dropped_tokens`.
        ratio: [T] fp32, exp(logprobs - old_logprobs).
        advantages: [T] fp32.
        loss_mask: [T] bool or 0/1, 1 where a token enters the loss.

    Returns:
        The three metrics above.
    """
    ratio, advantages = loss_tokens(loss_mask, ratio, advantages)
    dropped = dropped[loss_mask.bool()]
    populations = {"": torch.ones_like(dropped), "_low": advantages < 0, "_high": advantages > 0}
    return {
        f"loss/clip_fraction{side}": share(dropped & (advantages != 0), population, (ratio, advantages))
        for side, population in populations.items()
    }
