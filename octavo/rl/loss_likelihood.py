"""Losses that weigh the log-likelihood: the factor before logprobs is fixed, and only logprobs has a gradient.

                A > 0                            A < 0
    reinforce   all tokens, factor 1             all tokens, factor 1
    cispo       all tokens, factor min(r, C)     all tokens, factor min(r, C)
    dppo        those whose divergence by having become likelier (A > 0) or less likely (A < 0) is within a bound;
                all that moved the other way; factor min(r, C)

Their values are in advantage units x nats and say nothing by themselves; their gradients are what an update sees.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

PROBABILITY_FLOOR = 1e-8
"""Added to both sides of a quotient of probabilities of all other tokens, which rounding may make 0."""


def reinforce(logprobs: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
    """Policy gradient (Williams 1992, "Simple statistical gradient-following algorithms"), no ratio, no clipping.

        loss = -w A logprobs

    Args:
        logprobs: [T] fp32, policy in training; the only input with a gradient.
        advantages: [T] fp32, in units of the advantage estimator.
        weights: [T] fp32, w of `corrections.correction_weights`; ones when the rollout is exact.

    Returns:
        [T] fp32 loss to minimise, in advantage units x nats, neither masked nor reduced.
    """
    return -weights * advantages * logprobs


def cispo(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, ratio_cap: float, weights: Tensor) -> Tensor:
    """Clipped importance weights (MiniMax 2025, arXiv:2506.13585): no token loses its gradient.

        loss = -w sg(min(r, C)) A logprobs,   r = exp(logprobs - old_logprobs)

    sg stops the gradient. The paper's lower bound is left out, as its experiments leave it.

    Args:
        logprobs: [T] fp32, policy in training; the only input with a gradient.
        old_logprobs: [T] fp32, same numerics, weights before this step.
        advantages: [T] fp32, in units of the advantage estimator.
        ratio_cap: C, at least 1.
        weights: [T] fp32, w of `corrections.correction_weights`; ones when the rollout is exact.

    Returns:
        [T] fp32 loss to minimise, in advantage units x nats, neither masked nor reduced.
    """
    factor = torch.exp(logprobs.detach() - old_logprobs).clamp(max=ratio_cap)
    return reinforce(logprobs, factor * advantages, weights)


def dppo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, dropped: Tensor, ratio_cap: float, weights: Tensor
) -> Tensor:
    """Divergence PPO (arXiv:2602.04879): `cispo` over the tokens that a divergence does not drop.

        loss = -w sg(min(r, C)) A logprobs  where not dropped, else 0

    Arguments and result as of `cispo`; dropped is [T] bool, of `tv_dropped` or `kl_dropped`.
    """
    return cispo(logprobs, old_logprobs, advantages, ratio_cap, weights) * (~dropped)


def tv_dropped(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, max_decrease: float, max_increase: float
) -> Tensor:
    """Tokens beyond the binary total variation |p - p_old| of "this token or another" (DPPO-Binary-TV).

    Args:
        logprobs, old_logprobs: [T] fp32, log p and log p_old.
        advantages: [T] fp32.
        max_decrease: a token with A < 0 is dropped where p < p_old - max_decrease.
        max_increase: a token with A > 0 is dropped where p > p_old + max_increase.

    Returns:
        [T] bool.
    """
    moved = torch.exp(logprobs.detach().double()) - torch.exp(old_logprobs.double())
    return ((advantages > 0) & (moved > max_increase)) | ((advantages < 0) & (moved < -max_decrease))


def kl_dropped(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, max_decrease: float, max_increase: float
) -> Tensor:
    """Tokens beyond a binary KL divergence of "this token or another" (DPPO-Binary-KL).

        KL = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p))

    Args:
        logprobs, old_logprobs: [T] fp32, log p and log p_old.
        advantages: [T] fp32.
        max_decrease: a token with A < 0 is dropped where p < p_old and KL > max_decrease, in nats.
        max_increase: a token with A > 0 is dropped where p > p_old and KL > max_increase, in nats.

    Returns:
        [T] bool.
    """
    new, old = logprobs.detach().double(), old_logprobs.double()
    p_other, p_old_other = -torch.expm1(new), -torch.expm1(old)
    others = torch.log((p_old_other + PROBABILITY_FLOOR) / (p_other + PROBABILITY_FLOOR))
    kl = torch.exp(old) * (old - new) + p_old_other * others
    return ((advantages > 0) & (new > old) & (kl > max_increase)) | (
        (advantages < 0) & (new < old) & (kl > max_decrease)
    )


def _check_cap(ratio_cap: float) -> None:
    if not ratio_cap >= 1.0:
        raise ValueError(f"ratio_cap is the largest factor on a token's gradient, at least 1; got {ratio_cap}")


@dataclass(frozen=True, kw_only=True)
class Reinforce:
    """Plain policy gradient: no ratio, no clipping. Made for one update per rollout."""

    type_name: ClassVar[str] = "reinforce"


@dataclass(frozen=True, kw_only=True)
class CISPO:
    """The ratio, capped, weighs each token's gradient; no token loses it."""

    type_name: ClassVar[str] = "cispo"
    ratio_cap: float = 5.0
    """C, the largest weight. At least 1."""

    def __post_init__(self) -> None:
        _check_cap(self.ratio_cap)


@dataclass(frozen=True, kw_only=True)
class DPPOTV:
    """Drops tokens whose probability moved too far, whatever the ratio (DPPO-Binary-TV)."""

    type_name: ClassVar[str] = "dppo_tv"
    max_decrease: float = 0.15
    """A token with A < 0 has no gradient once its probability fell by more. In [0, 1]."""
    max_increase: float = 0.15
    """A token with A > 0 has no gradient once its probability rose by more. In [0, 1]."""
    ratio_cap: float = 20.0
    """Largest ratio that weighs a token's gradient. At least 1."""

    def __post_init__(self) -> None:
        _check_cap(self.ratio_cap)
        for name in ("max_decrease", "max_increase"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is a difference of probabilities, in [0, 1]; got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class DPPOKL:
    """Drops tokens whose binary KL divergence from the old policy is too large (DPPO-Binary-KL)."""

    type_name: ClassVar[str] = "dppo_kl"
    max_decrease: float = 0.05
    """A token with A < 0 that became less likely has no gradient above this divergence, in nats. At least 0."""
    max_increase: float = 0.05
    """A token with A > 0 that became likelier has no gradient above this divergence, in nats. At least 0."""
    ratio_cap: float = 20.0
    """Largest ratio that weighs a token's gradient. At least 1."""

    def __post_init__(self) -> None:
        _check_cap(self.ratio_cap)
        for name in ("max_decrease", "max_increase"):
            if not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} is a divergence in nats, at least 0; got {getattr(self, name)}")
