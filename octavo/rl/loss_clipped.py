"""Clipped surrogates: a token is rewarded for moving only while its ratio is inside an interval.

`ppo_clip` is the loss; PPOClip holds its interval fixed (or leaves it to calibration), BAPO and M2PO choose one for
each mini-batch, from the ratios of all its tokens. Which tokens keep a gradient, with r the ratio:

             r < low   low <= r <= high   r > high
    A > 0    kept      kept               none
    A < 0    none      kept               kept, with dual_clip none above it
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from octavo.rl.losses import ClipBounds, loss_tokens

GRID_DECIMALS = 10
"""Candidates for a bound are rounded to this many decimals, so that steps of 0.05 do not drift."""


def beyond(ratio: Tensor, advantages: Tensor, bounds: ClipBounds, dual_clip: float | None = None) -> Tensor:
    """[T] bool, True where `ppo_clip` gives no gradient. A ratio equal to a bound still has its gradient."""
    dropped = ((ratio < bounds.low) & (advantages < 0)) | ((ratio > bounds.high) & (advantages > 0))
    return dropped if dual_clip is None else dropped | ((ratio > dual_clip) & (advantages < 0))


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    bounds: ClipBounds,
    weights: Tensor,
    dual_clip: float | None = None,
) -> Tensor:
    """Clipped surrogate of PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7), weighted against mismatch.

        loss = -w min(r A, clamp(r, L, H) A),   r = exp(logprobs - old_logprobs)

    With dual_clip c (Ye et al. 2020, arXiv:1912.09729) the minimum is at least c A where A < 0: a token that is
    punished although it became much likelier costs no more than at a ratio of c.

    Args:
        logprobs: [T] fp32, policy in training; the only input with a gradient.
        old_logprobs: [T] fp32, same numerics, weights before this step.
        advantages: [T] fp32, in units of the advantage estimator.
        bounds: ClipBounds, absolute bounds L and H on the ratio.
        weights: [T] fp32, w of `corrections.correction_weights`; ones when the rollout is exact.
        dual_clip: absolute bound c on the ratio of punished tokens, above 1; None for none.

    Returns:
        [T] fp32 loss to minimise, in advantage units, neither masked nor reduced.
    """
    ratio = torch.exp(logprobs - old_logprobs)
    clipped = ratio.clamp(bounds.low, bounds.high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, dual_clip * advantages), surrogate)
    return -weights * surrogate


@dataclass(frozen=True, kw_only=True)
class PPOClip:
    """Clipped surrogate (PPO, GRPO, DAPO). Bounds are those of algorithm.clip, or calibrated."""

    type_name: ClassVar[str] = "ppo_clip"
    dual_clip: float | None = None
    """Tokens with A < 0 have no gradient at a ratio above it (dual-clip PPO). Above 1; null for none."""

    def __post_init__(self) -> None:
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            raise ValueError(f"dual_clip is an absolute bound on the ratio, above 1, as 3.0; got {self.dual_clip}")


@dataclass(frozen=True, kw_only=True)
class BAPO:
    """Clipped surrogate whose bounds move, in each mini-batch, until rewarded tokens contribute their share."""

    type_name: ClassVar[str] = "bapo"
    positive_share: float = 0.5
    """Of the update, what tokens with A > 0 should contribute at least. In (0, 1)."""
    low_start: float = 0.6
    """Low bound to begin with, an absolute ratio. In [0, low_max]."""
    low_max: float = 0.9
    """The low bound rises up to here. At most 1."""
    high_start: float = 1.2
    """High bound to begin with, an absolute ratio. At least 1."""
    high_max: float = 3.0
    """Then the high bound rises up to here. In [high_start, 100]."""
    bound_step: float = 0.05
    """By how much a bound rises at a time. At least 0.001."""

    def __post_init__(self) -> None:
        if not 0.0 < self.positive_share < 1.0:
            raise ValueError(f"positive_share lies between 0 and 1; got {self.positive_share}")
        if not 0.0 <= self.low_start <= self.low_max <= 1.0:
            raise ValueError(
                f"wanted 0 <= low_start <= low_max <= 1; got low_start={self.low_start}, low_max={self.low_max}"
            )
        if not 1.0 <= self.high_start <= self.high_max <= 100.0:
            raise ValueError(
                f"wanted 1 <= high_start <= high_max <= 100; got high_start={self.high_start}, high_max={self.high_max}"
            )
        if not self.bound_step >= 1e-3:
            raise ValueError(f"bound_step is at least 0.001; got {self.bound_step}")


@dataclass(frozen=True, kw_only=True)
class M2PO:
    """Clipped surrogate whose bounds hold, in each mini-batch, the second moment of the log-ratio within a budget."""

    type_name: ClassVar[str] = "m2po"
    budget: float = 0.04
    """Most that the mean of log(r)^2 may be over kept tokens that an update would move on, in nats squared. Above 0."""

    def __post_init__(self) -> None:
        if not self.budget > 0.0:
            raise ValueError(f"budget bounds a mean of squares and must be above 0; got {self.budget}")


def bapo_bounds(ratio: Tensor, advantages: Tensor, weights: Tensor, loss_mask: Tensor, config: BAPO) -> ClipBounds:
    """Bounds of BAPO (Xi et al. 2025, arXiv:2510.18927) for one mini-batch.

        share(L, H) = P / (P + N),   P = sum of w r A over A > 0, r <= H,   N = sum of w r |A| over A < 0, r >= L

    L rises from low_start in steps of bound_step until the share reaches positive_share, at most to low_max; then H
    from high_start to high_max. Where nothing reaches it, both end at their maximum. Without punished tokens, or
    without any, the bounds stay where they start.

    Args:
        ratio: [T] fp32 of the whole mini-batch.
        advantages, weights: [T] fp32, A and w.
        loss_mask: [T] bool or 0/1, 1 where a token enters the loss.
        config: BAPO.

    Returns:
        ClipBounds L and H.
    """
    ratio, advantages, weights = loss_tokens(loss_mask, ratio, advantages, weights)
    size = weights * ratio * advantages.abs()
    lows, highs = (
        _rising(start, end, config.bound_step)
        for start, end in ((config.low_start, config.low_max), (config.high_start, config.high_max))
    )
    candidates = [(low, highs[0]) for low in lows] + [(lows[-1], high) for high in highs[1:]]
    for low, high in candidates:
        positive = size[(advantages > 0) & (ratio <= high)].sum().item()
        negative = size[(advantages < 0) & (ratio >= low)].sum().item()
        if positive >= config.positive_share * (positive + negative):
            break
    return ClipBounds(low=low, high=high)


def m2po_bounds(ratio: Tensor, advantages: Tensor, loss_mask: Tensor, config: M2PO) -> ClipBounds:
    """Bounds of M2PO (Zheng et al. 2025, arXiv:2510.01161) for one mini-batch.

    Tokens that an update would move further from old, those with A > 0, r > 1 and with A < 0, r < 1, lose their
    gradient in the order of log(r)^2, the largest first, until its mean over those that keep it is at most the budget;
    equal ones go together. The bounds are the outermost ratios that are kept, 1 where a side keeps none.

    Args:
        ratio: [T] fp32 of the whole mini-batch.
        advantages: [T] fp32.
        loss_mask: [T] bool or 0/1, 1 where a token enters the loss.
        config: M2PO.

    Returns:
        ClipBounds, such that `beyond` is True for the tokens that lose their gradient.
    """
    ratio, advantages = loss_tokens(loss_mask, ratio, advantages)
    up, down = (advantages > 0) & (ratio > 1), (advantages < 0) & (ratio < 1)
    squares = torch.log(ratio).square()
    ordered = squares[up | down].sort().values.cpu()  # a GPU's running sums come in no fixed order
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1)
    over = ordered[means > config.budget]  # means of an ascending order ascend
    if len(over):
        up, down = up & (squares < over[0]), down & (squares < over[0])
    return ClipBounds(
        low=ratio[down].min().item() if down.any() else 1.0, high=ratio[up].max().item() if up.any() else 1.0
    )


def _rising(start: float, end: float, step: float) -> list[float]:
    """start, start + step, ... below end, then end."""
    count = int((end - start) / step + 1e-9)
    values = [round(start + index * step, GRID_DECIMALS) for index in range(count + 1)]
    return values if values[-1] >= end else [*values, end]
