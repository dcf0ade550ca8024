"""Calibrated clipping as a user sets it: which form, when, how far bounds may move, and what BF16 is."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

from octavo.rl.losses import ClipBounds

GRID_DECIMALS = 10
"""Grid values are rounded to this many decimals, so that equal configs give equal floats."""
TOKEN_OFFSET = 0.2
"""The offset of a token's plain bounds that the intervals below are made for."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """By what the distances from 1 in a CalibrationConfig are multiplied: 1 for ratios of tokens."""

    low: float | None = 1.0
    """Of the low bound; None where the loss has none."""
    high: float = 1.0
    """Of the high bound."""

    def low_bound(self, value: float) -> float:
        """A low bound of the config in the loss's own ratios; 0 where the loss has none."""
        return 0.0 if self.low is None else _scaled(value, self.low)

    def high_bound(self, value: float) -> float:
        """A high bound of the config in the loss's own ratios."""
        return _scaled(value, self.high)


TOKENS = Scale()
"""Ratios of tokens: the config's numbers as they are."""


@dataclass(frozen=True, kw_only=True)
class IntervalTrigger:
    """Calibrates every `interval` steps."""

    type_name: ClassVar[str] = "interval"
    shorthand: ClassVar[str] = "type"


@dataclass(frozen=True, kw_only=True)
class EventTrigger:
    """Calibrates when FP8's own ratios have left what the last calibration found, and after `interval` steps at the
    latest. Needs no shadow pass to see that."""

    type_name: ClassVar[str] = "event"
    shorthand: ClassVar[str] = "type"
    overclip_band: float = 0.02
    """A calibration is called when the share of the tokens with A < 0 that FP8 has at or below the low bound differs by
    more from what BF16 clipped at the last calibration. In (0, 1]."""
    drift_band: float = 0.05
    """A calibration is called when a bound lies farther from where the last calibration's shares would put it today. An
    absolute distance. Above 0."""
    min_interval: int = 2
    """Fewest steps from one calibration to the next. At least 1, at most `interval`."""

    def __post_init__(self) -> None:
        if not 0.0 < self.overclip_band <= 1.0:
            raise ValueError(f"overclip_band is a difference of shares, in (0, 1]; got {self.overclip_band}")
        if not self.drift_band > 0.0:
            raise ValueError(f"drift_band is a distance above 0; got {self.drift_band}")
        if self.min_interval < 1:
            raise ValueError(f"min_interval is a number of steps, at least 1; got {self.min_interval}")


@dataclass(frozen=True, kw_only=True)
class MastersReference:
    """BF16 is a forward on the masters, before the step's first update and now."""

    type_name: ClassVar[str] = "masters"
    shorthand: ClassVar[str] = "type"


@dataclass(frozen=True, kw_only=True)
class EMAReference:
    """BF16 is a forward on a running average of the masters: a single bad update moves it by 1 - decay."""

    type_name: ClassVar[str] = "ema"
    shorthand: ClassVar[str] = "type"
    decay: float = 0.9
    """Of the average, which after each update becomes decay x average + (1 - decay) x masters. In [0, 1)."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay < 1.0:
            raise ValueError(f"decay lies in [0, 1), 0 for the masters themselves; got {self.decay}")


@dataclass(frozen=True, kw_only=True)
class SnapshotReference:
    """BF16 is a forward on the masters now against one on an earlier copy; the log-ratio is scaled by the updates in
    this step over those since the copy."""

    type_name: ClassVar[str] = "snapshot"
    shorthand: ClassVar[str] = "type"
    every: int = 5
    """Steps from one copy to the next. At least 1; at 1 it is the masters before the step."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every is a number of steps, at least 1; got {self.every}")


@dataclass(frozen=True, kw_only=True)
class CarriedReference:
    """BF16 is what the last shadow pass on the masters found, most of the time: its share and its balance, no pass."""

    type_name: ClassVar[str] = "carried"
    shorthand: ClassVar[str] = "type"
    refresh_every: int = 4
    """One in so many calibrations makes the shadow pass. At least 1."""

    def __post_init__(self) -> None:
        if self.refresh_every < 1:
            raise ValueError(f"refresh_every is a number of calibrations, at least 1; got {self.refresh_every}")


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """When bounds are calibrated, where they may lie and how fast they move. Bounds are absolute ratios of a token; for
    gspo and cispo their distances from 1 are scaled with the loss's own offsets."""

    interval: int = 20
    """Steps from one calibration to the next. At least 1."""
    start_low: float = 0.6
    """Low bound before the first calibration. In [low_min, low_max]."""
    start_high: float = 1.8
    """High bound before the first calibration. In [high_min, high_max]."""
    low_min: float = 0.5
    """Smallest low bound. In [0, low_max]."""
    low_max: float = 0.9
    """Largest low bound. In [low_min, 1]."""
    high_min: float = 1.2
    """Smallest high bound. In [1, high_max]."""
    high_max: float = 2.0
    """Largest high bound. Finite, at least high_min."""
    max_move_low: float = 0.05
    """The most that the low bound moves in one calibration. Above 0."""
    max_move_high: float = 0.1
    """The most that the high bound moves in one calibration. Above 0."""
    min_tokens: int = 1000
    """Fewest loss tokens (under gspo completions) with A > 0, and with A < 0, to calibrate from. At least 1."""
    min_clipped: int = 10
    """Fewest tokens (completions) with A < 0 that BF16 clips, to calibrate from. At least 0."""
    pooled_steps: int = 1
    """Steps whose statistics are added up, ending at the calibration. In [1, interval]."""
    trigger: IntervalTrigger | EventTrigger = field(default_factory=IntervalTrigger)
    """What calls a calibration."""
    reference: MastersReference | EMAReference | SnapshotReference | CarriedReference = field(
        default_factory=MastersReference
    )
    """What stands for BF16."""
    shadow_share: float = 1.0
    """Share of the last mini-batch's completions that calibrations look at, drawn anew each step. In (0, 1]."""
    confidence: float = 0.95
    """Level of the intervals of alpha_low and L*. With shadow_share < 1 a calibration is skipped where the latter is
    wider than max_move_low. In (0, 1)."""
    max_shadow_clipped: float = 0.4
    """Skipped where BF16 itself clips more of the tokens with A < 0: it has left the trust region. In (0, 1]."""
    max_shadow_noise: float | None = None
    """Skipped where std(log r) of BF16 is more than so many times that of the null line, the same tokens after one BF16
    step of a norm gain, which takes one more shadow pass. Above 1; null for no such pass."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.low_min <= self.low_max <= 1.0:
            raise ValueError(f"wanted 0 <= low_min <= low_max <= 1; got low_min={self.low_min}, low_max={self.low_max}")
        if not 1.0 <= self.high_min <= self.high_max < math.inf:
            raise ValueError(
                f"wanted 1 <= high_min <= high_max, finite; got high_min={self.high_min}, high_max={self.high_max}"
            )
        for side in ("low", "high"):
            smallest, largest, start, max_move = (
                getattr(self, name) for name in (f"{side}_min", f"{side}_max", f"start_{side}", f"max_move_{side}")
            )
            if not smallest <= start <= largest:
                raise ValueError(f"start_{side} lies in [{smallest}, {largest}], the {side} range; got {start}")
            if not max_move > 0.0:
                raise ValueError(f"max_move_{side} is a distance above 0; got {max_move}")
        if self.interval < 1:
            raise ValueError(f"interval is a number of steps, at least 1; got {self.interval}")
        if self.min_tokens < 1:
            raise ValueError(f"min_tokens is at least 1, as shares need a token; got {self.min_tokens}")
        if self.min_clipped < 0:
            raise ValueError(f"min_clipped is a number of tokens, at least 0; got {self.min_clipped}")
        if not 1 <= self.pooled_steps <= self.interval:
            raise ValueError(f"pooled_steps lies in [1, interval] = [1, {self.interval}]; got {self.pooled_steps}")
        if isinstance(self.trigger, EventTrigger) and self.trigger.min_interval > self.interval:
            raise ValueError(
                f"trigger.min_interval is at most interval={self.interval}, after which a calibration is made anyway; "
                f"got {self.trigger.min_interval}"
            )
        for name in ("shadow_share", "max_shadow_clipped"):
            if not 0.0 < getattr(self, name) <= 1.0:
                raise ValueError(f"{name} is a share, in (0, 1]; got {getattr(self, name)}")
        if not 0.0 < self.confidence < 1.0:
            raise ValueError(f"confidence is a probability, in (0, 1), as 0.95; got {self.confidence}")
        if self.max_shadow_noise is not None and not self.max_shadow_noise > 1.0:
            raise ValueError(f"max_shadow_noise is a factor on the null line, above 1; got {self.max_shadow_noise}")

    def start_bounds(self, scale: Scale = TOKENS) -> ClipBounds:
        """The bounds before the first calibration."""
        return ClipBounds(low=scale.low_bound(self.start_low), high=scale.high_bound(self.start_high))


@dataclass(frozen=True, kw_only=True)
class GridCalibration(CalibrationConfig):
    """The published form: targets from two grids, the upper one by the balance of what keeps its gradient."""

    type_name: ClassVar[str] = "grid"
    grid_step: float = 0.02
    """Distance of neighbouring candidates; divides both ranges. At least 1e-4."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.grid_step >= 1e-4:
            raise ValueError(f"grid_step is the distance of candidates, at least 1e-4; got {self.grid_step}")
        for side in ("low", "high"):
            smallest, largest = getattr(self, f"{side}_min"), getattr(self, f"{side}_max")
            num_steps = round((largest - smallest) / self.grid_step)
            if abs(smallest + num_steps * self.grid_step - largest) > 1e-9:
                raise ValueError(
                    f"grid_step must divide {side}_max - {side}_min = {largest - smallest:.10g}; got {self.grid_step}. "
                    f"The nearest {side}_max that fits is {smallest + num_steps * self.grid_step:.10g}."
                )

    def low_grid(self, scale: Scale = TOKENS) -> tuple[float, ...]:
        """Candidates L for the low bound, ascending: 21 by default."""
        return tuple(scale.low_bound(value) for value in _grid(self.low_min, self.low_max, self.grid_step))

    def high_grid(self, scale: Scale = TOKENS) -> tuple[float, ...]:
        """Candidates H for the high bound, ascending: 41 by default."""
        return tuple(scale.high_bound(value) for value in _grid(self.high_min, self.high_max, self.grid_step))


@dataclass(frozen=True, kw_only=True)
class ExactCalibration(CalibrationConfig):
    """The published targets without grids: the quantile itself, and the crossing of the contribution ratio."""

    type_name: ClassVar[str] = "exact"


@dataclass(frozen=True, kw_only=True)
class SymmetricCalibration(CalibrationConfig):
    """Both bounds by their own quantile; then balanced, as many more clipped on one side as fewer on the other."""

    type_name: ClassVar[str] = "symmetric"


def _scaled(value: float, scale: float) -> float:
    return value if scale == 1.0 else 1.0 + (value - 1.0) * scale


def _grid(smallest: float, largest: float, step: float) -> tuple[float, ...]:
    """Multiples of step from smallest to largest, each rounded on its own so that errors do not add up."""
    num_steps = round((largest - smallest) / step)
    return tuple(round(smallest + index * step, GRID_DECIMALS) for index in range(num_steps + 1))
