"""When a calibration is called: at its interval, or when FP8's own ratios have left what the last one found."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.rl.calibration import Statistics, calibrate, due, measured
from octavo.rl.calibration_config import CalibrationConfig, CarriedReference, EventTrigger, Scale
from octavo.rl.calibration_statistics import ShadowShares
from octavo.rl.losses import ClipBounds


@dataclass(kw_only=True)
class Watch:
    """What the calls for a calibration depend on, from step to step."""

    since: int = 0
    """Steps since the last calibration, or the last that was skipped."""
    event: str = ""
    """Why one is called now; stays until it is made. Anything may set it."""
    shares: ShadowShares | None = None
    """What the last shadow pass found that a calibration was made from."""
    num_carried: int = 0
    """Calibrations since that pass."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Watch":
        """From its fields by name, as `asdict` and JSON give them."""
        shares = data["shares"]
        return cls(**{**data, "shares": None if shares is None else ShadowShares(**shares)})

    def measures(self, step: int, config: CalibrationConfig) -> bool:
        """Whether statistics are gathered in this step, counted from 0."""
        if self.event:
            return True
        if isinstance(config.trigger, EventTrigger):
            return self.since >= config.interval - config.pooled_steps
        return measured(step, config)

    def finishes(self, step: int, config: CalibrationConfig, num_pooled: int) -> bool:
        """Whether the bounds are calibrated at the end of this step, from so many gathered ones, its own included."""
        if self.event:
            return num_pooled >= config.pooled_steps
        if isinstance(config.trigger, EventTrigger):
            return self.since + 1 >= config.interval
        return due(step, config)

    def carries(self, config: CalibrationConfig) -> bool:
        """Whether the next calibration takes the last shadow's shares instead of a pass."""
        reference = config.reference
        return (
            isinstance(reference, CarriedReference)
            and self.shares is not None
            and self.num_carried + 1 < reference.refresh_every
        )

    def calibrated(self, shares: ShadowShares | None) -> None:
        """Note a calibration: the shares of its shadow pass, None where it was skipped or carried them."""
        if shares is not None:
            self.shares, self.num_carried = shares, 0
        elif self.shares is not None:
            self.num_carried += 1
        self.since, self.event = 0, ""


def first_watch(config: CalibrationConfig | None) -> Watch:
    """Of a new run: a trigger by events has nothing to compare with, and calls a calibration at once."""
    by_event = config is not None and isinstance(config.trigger, EventTrigger)
    return Watch(event="no calibration yet" if by_event else "")


def look_out(
    watch: Watch,
    bounds: ClipBounds,
    statistics: Statistics,
    clipped_low_share: float,
    config: CalibrationConfig,
    scale: Scale,
) -> dict[str, float | str]:
    """See whether the last calibration still holds on today's ratios, and call another one where it does not.

        trigger/overclip_share        share of A < 0 at or below the low bound, less the last alpha_low
        trigger/drift_low, drift_high distance of a bound from its target under the last shares, an absolute ratio
        trigger/event                 why a calibration is called, empty where none is

    Args:
        watch: its shares are those of the last calibration.
        bounds: the present ones.
        statistics: of this step's FP8 ratios; their shadow side is not read.
        clipped_low_share: share of the tokens with A < 0 that r_fp8 puts at or below the low bound.
        config: with an EventTrigger.
        scale: Scale of the loss.

    Returns:
        The metrics above; none where there is too little to go by.
    """
    trigger = config.trigger
    assert isinstance(trigger, EventTrigger)
    if watch.shares is None:
        return {}
    target = calibrate(bounds, watch.shares.carried_to(statistics), config, scale).target
    if target is None:
        return {}
    excess = clipped_low_share - watch.shares.clipped_low if scale.low is not None else 0.0
    drift = {"low": target[0] - bounds.low, "high": target[1] - bounds.high}
    band = {"low": trigger.drift_band * (scale.low or 0.0), "high": trigger.drift_band * scale.high}
    reasons = [f"{side} bound off by {drift[side]:.3g}" for side in drift if abs(drift[side]) > band[side]]
    if abs(excess) > trigger.overclip_band:
        reasons.insert(0, f"clip share off by {excess:.3g}")
    if watch.since >= trigger.min_interval:
        watch.event = ", ".join(reasons)
    return {
        "trigger/overclip_share": excess,
        "trigger/drift_low": drift["low"],
        "trigger/drift_high": drift["high"],
        "trigger/event": watch.event,
    }
