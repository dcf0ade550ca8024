"""Advantages from rewards: how much better a completion is than the others of its prompt.

`group_relative` is the estimator of GRPO (Shao et al. 2024, arXiv:2402.03300, section 4.1.2) and,
without the division by the standard deviation, that of Dr.GRPO (Liu et al. 2025, arXiv:2503.20783).
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """How rewards of one group become advantages."""

    scale_by_std: bool = True
    """Divide by the group's standard deviation (GRPO); False only subtracts the mean (Dr.GRPO)."""
    std_eps: float = 1e-6
    """Added to the standard deviation, in reward units. Above 0. Unused when scale_by_std is False."""

    def __post_init__(self) -> None:
        if not self.std_eps > 0.0:
            raise ValueError(f"std_eps is added to a standard deviation and must be above 0; got {self.std_eps}")


def group_relative(rewards: Tensor, config: GRPOConfig) -> Tensor:
    """Rewards relative to their group: (R - mean) / (std + std_eps), or R - mean for Dr.GRPO.

    The standard deviation divides by G - 1, as in TRL and verl. Everything is computed in float64 and
    rounded once, and a group of equal rewards gives exactly 0, so that it can be recognised and dropped.

    Args:
        rewards: [P, G] fp32, one row per prompt, in reward units.
        config: GRPOConfig.

    Returns:
        [P, G] fp32 advantages, in standard deviations, or in reward units when scale_by_std is False.

    Raises:
        ValueError: rewards are not [P, G], are not finite, or G is 1 and a standard deviation is wanted.
    """
    if rewards.ndim != 2:
        raise ValueError(f"group_relative wants rewards [P, G], one row per prompt; got shape {tuple(rewards.shape)}")
    num_prompts, group_size = rewards.shape
    if config.scale_by_std and group_size == 1:
        raise ValueError(
            "group_relative got group_size=1, and one reward has no standard deviation. "
            "Set group_size >= 2, or scale_by_std: false."
        )
    finite = torch.isfinite(rewards)
    if not finite.all():
        prompt, completion = (~finite).nonzero()[0].tolist()
        raise ValueError(
            f"group_relative wants finite rewards; got {int((~finite).sum())} of {num_prompts * group_size} "
            f"that are not, the first {rewards[prompt, completion].item()} at prompt {prompt}, completion "
            f"{completion}. Make the reward function return a number for every completion."
        )
    if rewards.numel() == 0:
        return rewards.to(torch.float32)

    exact = rewards.double()
    advantages = exact - exact.mean(dim=1, keepdim=True)
    if config.scale_by_std:
        advantages = advantages / (exact.std(dim=1, keepdim=True, correction=1) + config.std_eps)
    # The mean of G equal float64 values may be off by a rounding, which a tiny std_eps would blow up.
    equal = exact.amax(dim=1, keepdim=True) == exact.amin(dim=1, keepdim=True)
    return torch.where(equal, 0.0, advantages).to(torch.float32)
