"""The section `precision` of the configuration, and the recipes that it stands for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from octavo.numerics.fp8 import ScaleRounding
from octavo.numerics.recipe import FORWARD_ONLY, Recipe, RecipeName, StorageFormat, get_recipe


@dataclass(frozen=True, kw_only=True)
class SidePrecision:
    """What one side of the flow does otherwise; null is as `precision` says. A recipe's name stands for the section."""

    shorthand: ClassVar[str] = "recipe"
    recipe: RecipeName | None = None
    """One of precision.recipe's, and for the rollout also fp8_channel or fp8_tensor, as serving engines run them."""
    kv_cache: StorageFormat | None = None
    """fp8 or bf16."""
    saved_activations: StorageFormat | None = None
    """fp8 or bf16, for training only: the rollout saves nothing."""
    keep_bf16: tuple[str, ...] | None = None
    """Replaces the list of `precision`."""
    scale_rounding: ScaleRounding | None = None
    """none or power_of_two."""
    amax_margin: float | None = None
    """tensorwise_static only."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """One precision flow for rollout, old logprobs and training. What is null is as the recipe says."""

    recipe: RecipeName = "block128"
    """bf16, block128, rowwise, tensorwise, w8a16, tensorwise_static or fp32."""
    kv_cache: StorageFormat | None = None
    """fp8 or bf16: keys and values as every query sees them."""
    saved_activations: StorageFormat | None = None
    """fp8 or bf16: what linear layers keep for the backward pass."""
    keep_bf16: tuple[str, ...] | None = None
    """Modules that are not quantised, matched on whole names; lm_head and embed_tokens are always among them."""
    scale_rounding: ScaleRounding = "none"
    """power_of_two rounds all scales up."""
    amax_margin: float = 1.25
    """tensorwise_static only: room above the last step's amax."""
    rollout: SidePrecision = field(default_factory=SidePrecision)
    """What the engine does otherwise than training. Any difference needs allow_mismatch."""
    train: SidePrecision = field(default_factory=SidePrecision)
    """What training, old and reference logprobs do otherwise than the rollout."""
    allow_mismatch: bool = False
    """Let the rollout run another forward than training, from the same masters; importance weights correct for it."""

    def __post_init__(self) -> None:
        for key, recipe in (("recipe", self.recipe), ("train.recipe", self.train.recipe)):
            if recipe in FORWARD_ONLY:
                raise ValueError(
                    f"{key}={recipe!r} runs forward only and cannot train. Use {key}={FORWARD_ONLY[recipe]}, or "
                    f"rollout.recipe={recipe} for the rollout alone"
                )
        if self.rollout.saved_activations is not None:
            raise ValueError("rollout.saved_activations is set, but a rollout saves none. Use train.saved_activations")
        self.rollout_recipe()
        self.train_recipe()

    def rollout_recipe(self) -> Recipe:
        """The complete recipe of the engine, which saves no activations whatever training saves."""
        return self._expand("rollout", self.rollout, saved_activations=None)

    def train_recipe(self) -> Recipe:
        """The complete recipe of training, of old and of reference logprobs."""
        return self._expand("train", self.train)

    def _expand(self, name: str, side: SidePrecision, **left_out: None) -> Recipe:
        own = {key: value for key, value in vars(side).items() if value is not None}
        chosen = {key: getattr(self, key) for key in vars(side)} | own | left_out
        changes = {key: value for key, value in chosen.items() if value is not None}
        if "keep_bf16" in changes:
            changes["keep_bf16"] = tuple(dict.fromkeys(("lm_head", "embed_tokens", *changes["keep_bf16"])))
        try:
            return get_recipe(changes.pop("recipe"), **changes)
        except ValueError as error:
            raise ValueError(f"{name}: {error}" if own else str(error)) from error
