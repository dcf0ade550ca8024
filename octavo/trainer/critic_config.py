"""The configuration of PPO's critic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from octavo.trainer.optimizer import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The model that says how much reward is still to come, and how it learns. Read under algorithm.advantage gae."""

    path: str | None = None
    """Hugging Face folder or hub id that it starts from, of the policy's vocabulary; null is model.path."""
    recipe: Literal["bf16", "fp32", "block128", "rowwise", "tensorwise", "w8a16"] = "bf16"
    """Precision of its forward and backward. The policy's exactness does not depend on it."""
    value_clip: float | None = 0.5
    """A value that leaves its old one by more than this, in reward units, earns nothing. Above 0; null for no limit."""
    num_epochs: int = 1
    """Passes over a rollout, each of trainer.num_mini_batches optimiser steps."""
    warmup_steps: int = 0
    """First steps of the run, in rollouts, in which the critic learns and the policy does not."""
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-5))
    """Its own AdamW."""

    def __post_init__(self) -> None:
        if self.value_clip is not None and not self.value_clip > 0.0:
            raise ValueError(f"value_clip is a distance above 0, or null; got {self.value_clip}")
        for name, least in (("num_epochs", 1), ("warmup_steps", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")
