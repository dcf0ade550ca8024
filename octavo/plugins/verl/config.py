"""octavo's sections in a verl configuration, which Hydra makes through `_target_`.

    actor_rollout_ref.actor.fsdp_config._target_=octavo.plugins.verl.EngineConfig
    +actor_rollout_ref.actor.fsdp_config.octavo.recipe=block128
    actor_rollout_ref.actor.policy_loss._target_=octavo.plugins.verl.PolicyLossConfig
    +actor_rollout_ref.actor.policy_loss.octavo.budget=0.02

Below `octavo` stand the fields of `EngineOptions`, and of the loss that `loss_mode` names.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from verl.workers.config import FSDPEngineConfig
from verl.workers.config import PolicyLossConfig as VerlPolicyLossConfig

from octavo.numerics.fp8 import ScaleRounding
from octavo.numerics.recipe import Recipe, RecipeName, get_recipe
from octavo.rl.calibration import Config as Calibration
from octavo.rl.calibration_config import IntervalTrigger, MastersReference
from octavo.trainer.config_file import from_dict

OptionsT = TypeVar("OptionsT")


@dataclass
class EngineConfig(FSDPEngineConfig):
    """verl's FSDP section with octavo's options."""

    octavo: dict[str, Any] = field(default_factory=dict)
    """`EngineOptions`."""


@dataclass
class PolicyLossConfig(VerlPolicyLossConfig):
    """verl's section on the policy loss with the options of octavo's."""

    octavo: dict[str, Any] = field(default_factory=dict)
    """The fields of the loss: `BAPO`, `M2PO`, `GSPOToken`."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What `actor.strategy=octavo` adds to FSDP2."""

    recipe: RecipeName = "block128"
    """The precision of the linear layers; attention, norms and lm_head stay in BF16. One with dynamic scales."""
    keep_bf16: tuple[str, ...] = ("lm_head", "embed_tokens")
    """Modules that are not quantised, patterns on whole dotted names or whole trailing parts of them."""
    scale_rounding: ScaleRounding = "none"
    """Rounding of the scales of weights, activations and gradients."""
    calibration: Calibration | None = None
    """Moves the bounds of the policy loss `calibrated`: at an interval, by the masters; null for other losses."""
    rollout_weights: Literal["fp8", "bf16"] = "fp8"
    """What crosses to the rollout engine: the bytes and scales that training multiplies, which
    `octavo.plugins.verl.worker.WorkerExtension` loads; or BF16, which verl quantises again where it was told to."""

    def __post_init__(self) -> None:
        recipe = self.flow()
        if not recipe.quantizes or recipe.forward_only or recipe.static_activation_scale:
            raise ValueError(
                f"recipe is one that trains in FP8 with dynamic scales: block128, w8a16, rowwise or tensorwise; got "
                f"{self.recipe!r}. For BF16 use actor.strategy=fsdp2"
            )
        if self.rollout_weights == "fp8" and recipe.fprop.right != (128, 128):
            raise ValueError(
                f"rollout_weights='fp8' sends weights in blocks of 128x128, and recipe {self.recipe!r} has none. Use "
                f"block128 or w8a16, or rollout_weights='bf16'"
            )
        calibration = self.calibration
        if calibration is not None and not (
            isinstance(calibration.trigger, IntervalTrigger)
            and isinstance(calibration.reference, MastersReference)
            and calibration.shadow_share == 1.0
            and calibration.max_shadow_noise is None
        ):
            raise ValueError(
                "inside verl, calibration is called at an interval and held against the masters on all tokens: leave "
                "trigger, reference, shadow_share and max_shadow_noise at their defaults"
            )

    def flow(self) -> Recipe:
        """The complete recipe."""
        return get_recipe(self.recipe, kv_cache="bf16", keep_bf16=self.keep_bf16, scale_rounding=self.scale_rounding)


def options_of(cls: type[OptionsT], section: Any, path: str) -> OptionsT:
    """The options below `octavo` in a section of verl's; defaults where it is verl's own.

    Raises:
        ValueError: an unknown key, or a value of another type.
    """
    given = section.get("octavo", None) or {}
    return from_dict(cls, _plain(given), f"{path}.octavo")


def _plain(value: Any) -> Any:
    """Hydra's nodes as dicts and lists."""
    if hasattr(value, "items"):
        return {key: _plain(item) for key, item in value.items()}
    return value if isinstance(value, str) or not hasattr(value, "__iter__") else [_plain(item) for item in value]
