"""PPO's advantages and value loss, with a critic that says how much reward is still to come.

    delta_t = r_t + gamma V_{t+1} - V_t                         V beyond the last token is 0
    A_t     = delta_t + gamma lambda A_{t+1}                    arXiv:1506.02438, equation 16
    R_t     = A_t + V_t                                         what V_t is trained towards

r_t is the completion's reward at its last token and 0 before, less the KL penalty of each token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

WHITENING_EPS = 1e-8
"""Added to the variance, as in verl and TRL."""


@dataclass(frozen=True, kw_only=True)
class GAEConfig:
    """PPO: generalised advantage estimates of every token, by a critic (the section `critic`)."""

    type_name: ClassVar[str] = "gae"
    gamma: float = 1.0
    """Discount of a token. In [0, 1]."""
    gae_lambda: float = 1.0
    """0 trusts the critic's value of the next token, 1 the reward alone. In [0, 1]."""
    whiten: bool = True
    """Shift and scale the step's advantages to mean 0 and standard deviation 1 over all tokens."""

    def __post_init__(self) -> None:
        for name in ("gamma", "gae_lambda"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} lies in [0, 1]; got {getattr(self, name)}")


def token_rewards(
    rewards: Tensor, old_logprobs: Tensor, ref_logprobs: Tensor | None, loss_mask: Tensor, coefficient: float
) -> Tensor:
    """The reward at the last token of each completion, less coefficient x (old_logprobs - ref_logprobs) at every token.

    Args:
        rewards: [T] fp32, constant along a completion.
        old_logprobs: [T] fp32, weights before this step.
        ref_logprobs: [T] fp32, frozen reference model; None for no penalty.
        loss_mask: [T] bool, 1 where a token was sampled; completions end before a 0 or at the end.
        coefficient: of the penalty, in reward units per nat.

    Returns:
        [T] fp32, 0 where loss_mask is 0.
    """
    last = loss_mask & ~torch.cat([loss_mask[1:], loss_mask.new_zeros(1)])
    given = torch.where(last, rewards, 0.0)
    if ref_logprobs is not None:
        given = given - coefficient * (old_logprobs - ref_logprobs)
    return torch.where(loss_mask, given, 0.0)


def generalised_advantages(
    rewards: Tensor, values: Tensor, loss_mask: Tensor, config: GAEConfig
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of packed completions, in float64 and rounded once.

    Args:
        rewards: [T] fp32, of `token_rewards`.
        values: [T] fp32, the critic's before the step; of the state that a token was sampled in.
        loss_mask: [T] bool, 1 where a token was sampled. Every completion has a prompt before it, so runs of 1 are
            completions.
        config: discounts.

    Returns:
        Advantages and returns, [T] fp32 each, 0 where loss_mask is 0; not whitened.
    """
    r, v, mask = rewards.double().tolist(), values.double().tolist(), loss_mask.tolist()
    advantages = [0.0] * len(r)
    next_value = next_advantage = 0.0
    for t in reversed(range(len(r))):
        if mask[t]:
            delta = r[t] + config.gamma * next_value - v[t]
            next_advantage = advantages[t] = delta + config.gamma * config.gae_lambda * next_advantage
            next_value = v[t]
        else:
            next_value = next_advantage = 0.0
    result = torch.tensor(advantages, dtype=torch.float64, device=values.device)
    returns = torch.where(loss_mask, result + values.double(), 0.0)
    return result.float(), returns.float()


def whitened(advantages: Tensor, loss_mask: Tensor) -> Tensor:
    """Advantages [T] less their mean, over their standard deviation, both over the loss tokens; 0 elsewhere.

    The variance divides by N - 1; of a single token it is left out.
    """
    chosen = advantages[loss_mask].double()
    variance = chosen.var(correction=1) if len(chosen) > 1 else chosen.new_ones(())
    result = (advantages.double() - chosen.mean()) / (variance + WHITENING_EPS).sqrt()
    return torch.where(loss_mask, result, 0.0).float()


def value_losses(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float | None) -> Tensor:
    """Half the squared error of the values, one a token, neither masked nor reduced.

        max((V - R)^2, (clamp(V, V_old - c, V_old + c) - R)^2) / 2

    Args:
        values: [T] fp32, the critic in training; the only input with a gradient.
        old_values: [T] fp32, before the step.
        returns: [T] fp32.
        value_clip: c, in reward units; None is the plain squared error.
    """
    error = (values - returns).square()
    if value_clip is not None:
        clipped = torch.clamp(values, old_values - value_clip, old_values + value_clip)
        error = torch.maximum(error, (clipped - returns).square())
    return 0.5 * error


def explained_variance(values: Tensor, returns: Tensor) -> float:
    """1 - var(returns - values) / var(returns) of [N] tokens: 1 knows every return, 0 no more than their mean.

    0.0 where all returns are equal.
    """
    variance = returns.double().var(correction=0).item()
    if variance == 0.0:
        return 0.0
    return 1.0 - (returns.double() - values.double()).var(correction=0).item() / variance
