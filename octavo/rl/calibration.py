"""Calibrated clipping: bounds at which FP8 clips what plain bounds would clip in BF16.

Quantisation noise widens the distribution of the FP8 ratio, so fixed bounds clip too often, and mostly
the punishments of bad answers. A BF16 shadow pass says what the plain bounds 1 - clip_low and
1 + clip_high would do without that noise. With A the advantage, w the truncated importance weight and

    alpha_low = share of the tokens with A < 0 that have r_bf16 <= 1 - clip_low
    contribution_ratio(r, L, H) = sum of w r A over A > 0, r <= H  /  sum of w r |A| over A < 0, r >= L

the targets are taken from two grids,

    L* minimises |share of the tokens with A < 0 that have r_fp8 <= L  -  alpha_low|
    H* minimises |contribution_ratio(r_fp8, L*, H) - contribution_ratio(r_bf16, 1 - clip_low, 1 + clip_high)|

and each bound b moves half of the way, but at most d: b <- b + clip((b* - b) / 2, -d, d).

The order of use: `measure` on the steps that `measured` names, add the statistics up, `calibrate` on
the step that is `due`. [L, H] then replace the plain bounds in the loss.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from octavo.rl.losses import ClipBounds, ClipConfig, loss_tokens

GRID_DECIMALS = 10
"""Grid values are rounded to this many decimals, so that equal configs give equal floats."""


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """When bounds are calibrated, where they may lie and how fast they move. Bounds are absolute ratios."""

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
    grid_step: float = 0.02
    """Distance of neighbouring candidates; divides both ranges. At least 1e-8."""
    max_move_low: float = 0.05
    """The most that the low bound moves in one calibration. Above 0."""
    max_move_high: float = 0.1
    """The most that the high bound moves in one calibration. Above 0."""
    min_tokens: int = 1000
    """Fewest loss tokens with A > 0, and with A < 0, to calibrate from. At least 1."""
    min_clipped: int = 10
    """Fewest tokens with A < 0 that BF16 clips, to calibrate from. At least 0."""
    pooled_steps: int = 1
    """Steps whose statistics are added up, ending at the calibration. In [1, interval]."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.low_min <= self.low_max <= 1.0:
            raise ValueError(f"wanted 0 <= low_min <= low_max <= 1; got low_min={self.low_min}, low_max={self.low_max}")
        if not 1.0 <= self.high_min <= self.high_max < math.inf:
            raise ValueError(
                f"wanted 1 <= high_min <= high_max, finite; got high_min={self.high_min}, high_max={self.high_max}"
            )
        if not self.grid_step >= 1e-8:
            raise ValueError(f"grid_step is the distance of candidates, at least 1e-8; got {self.grid_step}")
        for side in ("low", "high"):
            smallest, largest, start, max_move = (
                getattr(self, name) for name in (f"{side}_min", f"{side}_max", f"start_{side}", f"max_move_{side}")
            )
            if not smallest <= start <= largest:
                raise ValueError(f"start_{side} lies in [{smallest}, {largest}], the {side} range; got {start}")
            if not max_move > 0.0:
                raise ValueError(f"max_move_{side} is a distance above 0; got {max_move}")
            num_steps = round((largest - smallest) / self.grid_step)
            if abs(smallest + num_steps * self.grid_step - largest) > 1e-9:
                raise ValueError(
                    f"grid_step must divide {side}_max - {side}_min = {largest - smallest:.10g}; got {self.grid_step}. "
                    f"The nearest {side}_max that fits is {smallest + num_steps * self.grid_step:.10g}."
                )
        if self.interval < 1:
            raise ValueError(f"interval is a number of steps, at least 1; got {self.interval}")
        if self.min_tokens < 1:
            raise ValueError(f"min_tokens is at least 1, as shares need a token; got {self.min_tokens}")
        if self.min_clipped < 0:
            raise ValueError(f"min_clipped is a number of tokens, at least 0; got {self.min_clipped}")
        if not 1 <= self.pooled_steps <= self.interval:
            raise ValueError(f"pooled_steps lies in [1, interval] = [1, {self.interval}]; got {self.pooled_steps}")

    def start_bounds(self) -> ClipBounds:
        """The bounds before the first calibration."""
        return ClipBounds(low=self.start_low, high=self.start_high)

    def low_grid(self) -> tuple[float, ...]:
        """Candidates L for the low bound, ascending: 21 by default."""
        return _grid(self.low_min, self.low_max, self.grid_step)

    def high_grid(self) -> tuple[float, ...]:
        """Candidates H for the high bound, ascending: 41 by default."""
        return _grid(self.high_min, self.high_max, self.grid_step)


@dataclass(frozen=True, kw_only=True)
class CalibrationStatistics:
    """What a calibration is computed from; statistics of several microbatches, ranks or steps add up."""

    num_positive: int
    """Loss tokens with A > 0."""
    num_negative: int
    """Loss tokens with A < 0."""
    shadow_clipped_low: int
    """Tokens with A < 0 and r_bf16 <= 1 - clip_low; alpha_low is this over num_negative."""
    shadow_positive: float
    """Sum of w r_bf16 A over A > 0, r_bf16 <= 1 + clip_high, in advantage units."""
    shadow_negative: float
    """Sum of w r_bf16 |A| over A < 0, r_bf16 >= 1 - clip_low, in advantage units."""
    clipped_low_counts: tuple[int, ...]
    """For each L of the low grid: tokens with A < 0 and r_fp8 <= L."""
    negative_contributions: tuple[float, ...]
    """For each L of the low grid: sum of w r_fp8 |A| over A < 0, r_fp8 >= L, in advantage units."""
    positive_contributions: tuple[float, ...]
    """For each H of the high grid: sum of w r_fp8 A over A > 0, r_fp8 <= H, in advantage units."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "CalibrationStatistics":
        """From its fields by name, tuples or the lists that JSON makes of them."""
        given = {field.name: data[field.name] for field in fields(cls)}
        plain: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}
        return cls(**plain)

    def __add__(self, other: "CalibrationStatistics") -> "CalibrationStatistics":
        """Statistics of both sets of tokens together. ValueError when their grids have different lengths."""
        total: dict[str, Any] = {}
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if not isinstance(mine, tuple):
                total[field.name] = mine + theirs
            elif len(mine) == len(theirs):
                total[field.name] = tuple(a + b for a, b in zip(mine, theirs, strict=True))
            else:
                raise ValueError(
                    f"{field.name} of added statistics must be measured on one grid; got {len(mine)} and "
                    f"{len(theirs)} values. Measure both with the same CalibrationConfig."
                )
        return CalibrationStatistics(**total)


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The outcome of one calibration."""

    bounds: ClipBounds
    """The bounds from now on; the ones before when skipped."""
    target: tuple[float, float] | None
    """(L*, H*), towards which the bounds moved; None when skipped."""
    skipped: str
    """Why the bounds were left alone; empty when they were calibrated."""


def due(step: int, config: CalibrationConfig) -> bool:
    """Whether the bounds are calibrated at the end of `step`, counted from 0: at 19, 39, ... by default."""
    return (step + 1) % config.interval == 0


def measured(step: int, config: CalibrationConfig) -> bool:
    """Whether `step`, counted from 0, is one of the pooled_steps steps that end at a step that is due."""
    return step % config.interval >= config.interval - config.pooled_steps


def measure(
    ratio: Tensor,
    shadow_ratio: Tensor,
    tis_weights: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    clip: ClipConfig,
    config: CalibrationConfig,
) -> CalibrationStatistics:
    """Statistics of tokens of a step's last mini-batch, taken before its update; those of its parts add up.

    Comparisons and sums are in float64. A NaN in a loss token makes every sum NaN, so that `calibrate`
    skips instead of leaving the token out.

    Args:
        ratio: [T] fp32, r_fp8 = exp(logprobs - old_logprobs), training numerics.
        shadow_ratio: [T] fp32, r_bf16, from BF16 shadow logprobs of theta and of old.
        tis_weights: [T] fp32, truncated importance weights w, used with both ratios.
        advantages: [T] fp32, A.
        loss_mask: [T] bool or 0/1, 1 where a token enters the loss.
        clip: ClipConfig, offsets from a ratio of 1: the plain bounds that the shadow pass is clipped at.
        config: CalibrationConfig.

    Returns:
        CalibrationStatistics of plain Python numbers.
    """
    values = loss_tokens(loss_mask, ratio, shadow_ratio, tis_weights, advantages)
    hidden_nan = math.nan if any(bool(torch.isnan(value).any()) for value in values) else 0.0
    ratio, shadow_ratio, tis_weights, advantages = values
    positive, negative = advantages > 0, advantages < 0
    plain = clip.bounds()

    low_ratio, shadow_low_ratio = ratio[negative], shadow_ratio[negative]
    high_ratio, shadow_high_ratio = ratio[positive], shadow_ratio[positive]
    low_size = (tis_weights * advantages.abs())[negative]
    high_size = (tis_weights * advantages)[positive]

    def total(contributions: Tensor, kept: Tensor) -> Tensor:
        return torch.where(kept, contributions, 0.0).sum() + hidden_nan

    # One pass per candidate holds memory at [T], and a plain sum has the same order on every run.
    low_grid, high_grid = config.low_grid(), config.high_grid()
    clipped_low_counts = torch.stack([(low_ratio <= low).sum() for low in low_grid])
    negative_contributions = torch.stack([total(low_size * low_ratio, low_ratio >= low) for low in low_grid])
    positive_contributions = torch.stack([total(high_size * high_ratio, high_ratio <= high) for high in high_grid])
    return CalibrationStatistics(
        num_positive=int(positive.sum()),
        num_negative=int(negative.sum()),
        shadow_clipped_low=int((shadow_low_ratio <= plain.low).sum()),
        shadow_positive=total(high_size * shadow_high_ratio, shadow_high_ratio <= plain.high).item(),
        shadow_negative=total(low_size * shadow_low_ratio, shadow_low_ratio >= plain.low).item(),
        clipped_low_counts=tuple(clipped_low_counts.tolist()),
        negative_contributions=tuple(negative_contributions.tolist()),
        positive_contributions=tuple(positive_contributions.tolist()),
    )


def calibrate(bounds: ClipBounds, statistics: CalibrationStatistics, config: CalibrationConfig) -> Calibration:
    """Moves the bounds towards those at which FP8 clips as plain bounds would in BF16.

    Of equally good candidates the one nearest the present bound wins, and of two equally near ones the one
    nearer 1, the tighter bound. Nothing moves, and the reason is returned, when there is too little to go by.

    Args:
        bounds: ClipBounds, the present ones.
        statistics: CalibrationStatistics, measured with the same config.
        config: CalibrationConfig.

    Returns:
        Calibration with the new bounds.

    Raises:
        ValueError: the statistics were measured on other grids.
    """
    low_grid, high_grid = config.low_grid(), config.high_grid()
    lengths = (len(statistics.clipped_low_counts), len(statistics.negative_contributions))
    if lengths != (len(low_grid),) * 2 or len(statistics.positive_contributions) != len(high_grid):
        raise ValueError(
            f"statistics must be measured on the grids of config, {len(low_grid)} low and {len(high_grid)} high "
            f"candidates; got {lengths} and {len(statistics.positive_contributions)}. Use the config of `measure`."
        )
    reason = _skip_reason(statistics, config)
    if reason:
        return Calibration(bounds=bounds, target=None, skipped=reason)

    # Both shares have the denominator num_negative, so counts compare the same, without rounding.
    low_errors = [abs(count - statistics.shadow_clipped_low) for count in statistics.clipped_low_counts]
    low_index = _best(low_errors, low_grid, bounds.low)
    negative = statistics.negative_contributions[low_index]
    if negative == 0.0:
        reason = (
            f"contribution_ratio has a denominator of 0: no negative-advantage token contributes at "
            f"r_fp8 >= {low_grid[low_index]}, of {statistics.num_negative}"
        )
        return Calibration(bounds=bounds, target=None, skipped=reason)
    wanted = statistics.shadow_positive / statistics.shadow_negative
    high_errors = [abs(positive / negative - wanted) for positive in statistics.positive_contributions]
    high_index = _best(high_errors, high_grid, bounds.high)

    target = (low_grid[low_index], high_grid[high_index])
    moved = ClipBounds(
        low=_move(bounds.low, target[0], config.max_move_low),
        high=_move(bounds.high, target[1], config.max_move_high),
    )
    return Calibration(bounds=moved, target=target, skipped="")


def to_metrics(
    bounds_before: ClipBounds, statistics: CalibrationStatistics, calibration: Calibration
) -> dict[str, Any]:
    """Everything but the config that is needed to compute a calibration again, ready for JSON.

        calibration/low_before, high_before  bounds before the calibration, absolute ratios
        calibration/low, high                bounds after it
        calibration/target_low, target_high  L* and H*, null when skipped
        calibration/skipped                  reason, empty when calibrated
        calibration/<field>                  each field of CalibrationStatistics, tuples as lists

    Args:
        bounds_before: ClipBounds given to `calibrate`.
        statistics: CalibrationStatistics given to `calibrate`.
        calibration: what it returned.

    Returns:
        dict of numbers, strings, None and lists of numbers. A sum that was NaN or infinite stays so.
    """
    target_low, target_high = calibration.target or (None, None)
    outcome = {
        "low_before": bounds_before.low,
        "high_before": bounds_before.high,
        "low": calibration.bounds.low,
        "high": calibration.bounds.high,
        "target_low": target_low,
        "target_high": target_high,
        "skipped": calibration.skipped,
    }
    sums = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(statistics).items()}
    return {f"calibration/{name}": value for name, value in (outcome | sums).items()}


def statistics_from_metrics(metrics: dict[str, Any]) -> tuple[ClipBounds, CalibrationStatistics]:
    """The inverse of `to_metrics`: the bounds before and the statistics, to pass to `calibrate` again.

    Args:
        metrics: dict with the keys of `to_metrics`, and any others.

    Returns:
        (ClipBounds before, CalibrationStatistics), equal to what was logged.

    Raises:
        ValueError: keys are missing.
    """
    names = [field.name for field in fields(CalibrationStatistics)]
    missing = [name for name in ("low_before", "high_before", *names) if f"calibration/{name}" not in metrics]
    if missing:
        raise ValueError(
            f"metrics of a calibration must hold calibration/{{{', '.join(missing)}}}; got {sorted(metrics)}. "
            "Pass the record of a step on which the bounds were calibrated or skipped."
        )
    before = ClipBounds(low=metrics["calibration/low_before"], high=metrics["calibration/high_before"])
    return before, CalibrationStatistics.from_json({name: metrics[f"calibration/{name}"] for name in names})


def _grid(smallest: float, largest: float, step: float) -> tuple[float, ...]:
    """Multiples of step from smallest to largest, each rounded on its own so that errors do not add up."""
    num_steps = round((largest - smallest) / step)
    return tuple(round(smallest + index * step, GRID_DECIMALS) for index in range(num_steps + 1))


def _skip_reason(statistics: CalibrationStatistics, config: CalibrationConfig) -> str:
    """Why the statistics cannot be calibrated from, with the numbers; empty when they can."""
    sums = {
        "shadow_positive": (statistics.shadow_positive,),
        "shadow_negative": (statistics.shadow_negative,),
        "negative_contributions": statistics.negative_contributions,
        "positive_contributions": statistics.positive_contributions,
    }
    for name, values in sums.items():
        broken = [value for value in values if not math.isfinite(value)]
        if broken:
            return f"{name} has {len(broken)} of {len(values)} sums that are not finite, the first {broken[0]}"
    for sign, num_tokens in (("positive", statistics.num_positive), ("negative", statistics.num_negative)):
        if num_tokens < config.min_tokens:
            return f"{num_tokens} {sign}-advantage tokens, min_tokens is {config.min_tokens}"
    if statistics.shadow_clipped_low < config.min_clipped:
        return (
            f"BF16 clips {statistics.shadow_clipped_low} of {statistics.num_negative} negative-advantage tokens, "
            f"min_clipped is {config.min_clipped}"
        )
    if statistics.shadow_negative == 0.0:
        return (
            "contribution_ratio has a denominator of 0: no negative-advantage token contributes at "
            f"r_bf16 >= 1 - clip_low, of {statistics.num_negative}"
        )
    return ""


def _best(errors: list[int] | list[float], grid: tuple[float, ...], present: float) -> int:
    """Index of the smallest error; ties go to the candidate nearest `present`, then to the one nearest 1."""
    return min(
        range(len(grid)),
        # Distances are rounded because 0.7 - 0.68 and 0.72 - 0.7 differ in the last bits.
        key=lambda index: (errors[index], round(abs(grid[index] - present), GRID_DECIMALS), abs(grid[index] - 1.0)),
    )


def _move(bound: float, target: float, max_move: float) -> float:
    """Half of the way from bound to target, at most max_move."""
    return bound + max(-max_move, min(max_move, (target - bound) / 2))
