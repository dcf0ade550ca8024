"""Advantages from rewards: how much better a completion is than the others of its prompt.

Every estimator subtracts a baseline of the prompt's own completions:

    grpo                          (R - mean) / (std + std_eps)                        arXiv:2402.03300, section 4.1.2
    grpo, scale_by_std false      R - mean                                            Dr.GRPO, arXiv:2503.20783
    rloo                          R - mean of the others                              arXiv:2402.14740
    reinforce_plus_plus_baseline  (R - mean), then normalised over the batch's tokens arXiv:2501.03262
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """Relative to the group, in its standard deviations (GRPO) or in reward units (Dr.GRPO)."""

    type_name: ClassVar[str] = "grpo"
    scale_by_std: bool = True
    """Divide by the group's standard deviation (GRPO); False only subtracts the mean (Dr.GRPO)."""
    std_eps: float = 1e-6
    """Added to the standard deviation, in reward units. Above 0. Unused when scale_by_std is False."""

    def __post_init__(self) -> None:
        _check_std_eps(self.std_eps)


@dataclass(frozen=True, kw_only=True)
class RLOOConfig:
    """The reward less the mean of the group's other rewards, in reward units (leave one out)."""

    type_name: ClassVar[str] = "rloo"


@dataclass(frozen=True, kw_only=True)
class ReinforcePlusPlusConfig:
    """The group's mean is subtracted, then all tokens of the step are normalised together."""

    type_name: ClassVar[str] = "reinforce_plus_plus_baseline"
    std_eps: float = 1e-6
    """Added to the standard deviation over the step's tokens, in reward units. Above 0."""

    def __post_init__(self) -> None:
        _check_std_eps(self.std_eps)


AdvantageConfig = GRPOConfig | RLOOConfig | ReinforcePlusPlusConfig


def _check_std_eps(std_eps: float) -> None:
    if not std_eps > 0.0:
        raise ValueError(f"std_eps is added to a standard deviation and must be above 0; got {std_eps}")


def estimate_advantages(rewards: Tensor, num_tokens: Tensor, config: AdvantageConfig) -> Tensor:
    """Advantages by the estimator of the config.

    Args:
        rewards: [P, G] fp32, one row per prompt, in reward units.
        num_tokens: [P, G], tokens of each completion; read by reinforce_plus_plus_baseline only.
        config: GRPOConfig, RLOOConfig or ReinforcePlusPlusConfig.

    Returns:
        [P, G] fp32.

    Raises:
        ValueError: rewards are not [P, G], are not finite, or G is too small for the estimator.
    """
    if isinstance(config, GRPOConfig):
        return group_relative(rewards, config)
    if isinstance(config, RLOOConfig):
        return leave_one_out(rewards)
    return batch_normalised(rewards, num_tokens, config)


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


def leave_one_out(rewards: Tensor) -> Tensor:
    """RLOO: R - mean of the other G - 1 rewards of the group = (R - mean) G / (G - 1).

    Args:
        rewards: [P, G] fp32, G at least 2, in reward units.

    Returns:
        [P, G] fp32 advantages in reward units; exactly 0 in a group of equal rewards.

    Raises:
        ValueError: as `group_relative`, or G is 1 and there is no other.
    """
    centred = group_relative(rewards, GRPOConfig(scale_by_std=False))
    group_size = rewards.shape[1]
    if group_size == 1:
        raise ValueError("leave_one_out got group_size=1, and one reward has no others. Set group_size >= 2.")
    return centred * (group_size / (group_size - 1))


def batch_normalised(rewards: Tensor, num_tokens: Tensor, config: ReinforcePlusPlusConfig) -> Tensor:
    """REINFORCE++ with the group's mean as baseline: (A' - M) / (S + std_eps), A' = R - mean of the group.

    M and S are mean and standard deviation of A' over all tokens of the step, so a completion counts as often as it
    has tokens; S divides by their number less 1, as in verl.

    Args:
        rewards: [P, G] fp32, in reward units.
        num_tokens: [P, G], tokens of each completion, at least 1.
        config: ReinforcePlusPlusConfig.

    Returns:
        [P, G] fp32 advantages in standard deviations; all 0 where every group has equal rewards.

    Raises:
        ValueError: as `group_relative`.
    """
    centred = group_relative(rewards, GRPOConfig(scale_by_std=False)).double()
    if not centred.any():
        return centred.to(torch.float32)
    counts = num_tokens.double()
    distance = centred - (counts * centred).sum() / counts.sum()
    std = ((counts * distance.square()).sum() / (counts.sum() - 1)).sqrt()
    return (distance / (std + config.std_eps)).to(torch.float32)


def subtract_kl(
    advantages: Tensor,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    loss_mask: Tensor,
    cu_seqlens: Tensor,
    coefficient: float,
) -> Tensor:
    """The KL penalty in the reward, of PPO and REINFORCE++ (arXiv:2501.03262) without discount.

        A_t <- A_t - coefficient * sum over i >= t of k1_i,   k1_i = old_logprobs_i - ref_logprobs_i

    Each sampled token costs coefficient x k1, and a token's advantage is less what it and all after it cost.

    Args:
        advantages: [T] fp32.
        old_logprobs: [T] fp32, weights before this step.
        ref_logprobs: [T] fp32, frozen reference model.
        loss_mask: [T] bool or 0/1, 1 where a token enters the loss.
        cu_seqlens: [N + 1] int64 sequence boundaries.
        coefficient: in advantage units per nat.

    Returns:
        [T] fp32, unchanged where loss_mask is 0.
    """
    mask = loss_mask.bool()
    costs = torch.where(mask, old_logprobs.double() - ref_logprobs.double(), 0.0)
    parts = costs.cpu().split(cu_seqlens.diff().tolist())  # a GPU's running sums come in no fixed order
    to_come = torch.cat([part.flip(0).cumsum(0).flip(0) for part in parts]).to(costs.device)
    return torch.where(mask, advantages - coefficient * to_come, advantages).to(torch.float32)
