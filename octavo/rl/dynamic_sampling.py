"""Dynamic sampling of DAPO (Yu et al. 2025, arXiv:2503.14476, section 3.2): train on groups that teach something.

A group whose completions all have the same reward gives no advantage. Such groups are dropped, and more prompts are
drawn, until a step has as many informative groups as it wants or has tried often enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class DynamicSamplingConfig:
    """Groups of equal rewards are dropped and replaced by others."""

    max_tries: int = 10
    """Rollouts of a step, the first one included. After the last one the step trains on the informative groups that
    there are; none at all is an error. At least 1, which only drops."""

    def __post_init__(self) -> None:
        if self.max_tries < 1:
            raise ValueError(f"max_tries must be at least 1; got {self.max_tries}")


def informative(rewards: Tensor) -> Tensor:
    """[P] bool: groups of rewards [P, G] that are not all equal."""
    return (rewards != rewards[:, :1]).any(dim=1)


def num_to_draw(num_wanted: int, num_informative: int, num_drawn: int) -> int:
    """Prompts of the next try: as many as should give what is missing, by the share seen so far; at most a step's.

    Args:
        num_wanted: P, informative groups that the step wants.
        num_informative: groups found, fewer than that.
        num_drawn: groups seen.
    """
    if num_informative == 0:
        return num_wanted
    return min(num_wanted, math.ceil((num_wanted - num_informative) * num_drawn / num_informative))


def sampling_metrics(rewards: Tensor, kept: Tensor, num_trained: int, num_tries: int) -> dict[str, float]:
    """Metrics of a step.

        sampling/tries            rollouts, 1 when the first was enough
        sampling/prompts_drawn    groups of all tries
        sampling/groups_trained   of them, those that the step trains on; the prompts it wants, or fewer
        sampling/dropped_share    groups of equal rewards, over those drawn
        sampling/all_right_share  groups without a reward below 1, over those drawn
        sampling/all_wrong_share  groups without a reward above 0, over those drawn

    Args:
        rewards: [N, G] fp32, the task's, of all groups drawn.
        kept: [N] bool, informative.
        num_trained: groups of the step.
        num_tries: rollouts.
    """
    return {
        "sampling/tries": float(num_tries),
        "sampling/prompts_drawn": float(len(rewards)),
        "sampling/groups_trained": float(num_trained),
        "sampling/dropped_share": 1.0 - kept.float().mean().item(),
        "sampling/all_right_share": (rewards >= 1.0).all(dim=1).float().mean().item(),
        "sampling/all_wrong_share": (rewards <= 0.0).all(dim=1).float().mean().item(),
    }
