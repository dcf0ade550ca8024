"""Calibrated clipping: bounds at which FP8 clips what plain bounds would clip in BF16.

Quantisation noise widens the distribution of the FP8 ratio, so fixed bounds clip too often, and mostly
the punishments of bad answers. A BF16 shadow pass says what the plain bounds 1 - clip_low and
1 + clip_high would do without that noise. With A the advantage, w the truncated importance weight and

    alpha_low = share of the tokens with A < 0 that have r_bf16 <= 1 - clip_low
    contribution_ratio(r, L, H) = sum of w r A over A > 0, r <= H  /  sum of w r |A| over A < 0, r >= L

the targets (L*, H*) are, by the form of the config,

    grid       L* minimises |share of the tokens with A < 0 that have r_fp8 <= L  -  alpha_low|, H* then
               |contribution_ratio(r_fp8, L*, H) - contribution_ratio(r_bf16, 1 - clip_low, 1 + clip_high)|, on grids
    exact      L* is the alpha_low quantile of r_fp8 over A < 0, H* the crossing of the same contribution ratios
    symmetric  L(k) and H(k) clip k more tokens with A < 0, and k fewer with A > 0, than BF16; k at the crossing

and each bound b moves half of the way, but at most d: b <- b + clip((b* - b) / 2, -d, d).

The order of use: `measure` on the steps that `measured` names, add the statistics up, `calibrate` on
the step that is `due`. [L, H] then replace the plain bounds in the loss.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from octavo.rl.calibration_config import (
    TOKENS,
    CalibrationConfig,
    ExactCalibration,
    GridCalibration,
    Scale,
    SymmetricCalibration,
)
from octavo.rl.calibration_grid import GridStatistics, check_grids, grid_low_quantile, grid_targets, measure_grid
from octavo.rl.calibration_ladder import LadderStatistics, ladder_low_quantile, ladder_targets, measure_ladder
from octavo.rl.calibration_statistics import CalibrationStatistics, wilson_interval
from octavo.rl.losses import ClipBounds, ClipConfig, loss_tokens

Config = GridCalibration | ExactCalibration | SymmetricCalibration
"""A form of calibration."""
Statistics = GridStatistics | LadderStatistics
"""What it is computed from."""


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


def statistics_class(config: CalibrationConfig) -> type[GridStatistics] | type[LadderStatistics]:
    """What a form is computed from."""
    return GridStatistics if isinstance(config, GridCalibration) else LadderStatistics


def read_statistics(data: Mapping[str, Any]) -> Statistics:
    """Statistics from their fields by name, as JSON gives them."""
    return (GridStatistics if "clipped_low_counts" in data else LadderStatistics).from_json(data)


def measure(
    ratio: Tensor,
    shadow_ratio: Tensor,
    tis_weights: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    clip: ClipConfig,
    config: CalibrationConfig,
    scale: Scale = TOKENS,
) -> Any:
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
        config: CalibrationConfig, one of its forms.
        scale: Scale of the loss.

    Returns:
        `statistics_class(config)`, of plain Python numbers.
    """
    values = loss_tokens(loss_mask, ratio, shadow_ratio, tis_weights, advantages)
    hidden_nan = math.nan if any(bool(torch.isnan(value).any()) for value in values) else 0.0
    ratio, shadow_ratio, tis_weights, advantages = values
    positive, negative = advantages > 0, advantages < 0
    plain = clip.bounds()
    size = tis_weights * advantages.abs()
    low, high = (ratio[negative], size[negative]), (ratio[positive], size[positive])
    shadow_low, shadow_high = shadow_ratio[negative], shadow_ratio[positive]

    def total(contributions: Tensor, kept: Tensor) -> float:
        return (torch.where(kept, contributions, 0.0).sum() + hidden_nan).item()

    shadow = CalibrationStatistics(
        num_positive=int(positive.sum()),
        num_negative=int(negative.sum()),
        shadow_clipped_low=int((shadow_low <= plain.low).sum()),
        shadow_positive=total(high[1] * shadow_high, shadow_high <= plain.high),
        shadow_negative=total(low[1] * shadow_low, shadow_low >= plain.low),
    )
    if isinstance(config, GridCalibration):
        return measure_grid(*low, *high, hidden_nan, shadow, config, scale)
    clipped_high = int((shadow_high > plain.high).sum())
    return measure_ladder(*low, *high, hidden_nan, shadow, clipped_high, config, scale)


def add_up(parts: Sequence[Any]) -> Any:
    """Statistics of all parts together, of which there is at least one."""
    return sum(parts[1:], parts[0])


def calibrate(
    bounds: ClipBounds, statistics: Statistics, config: CalibrationConfig, scale: Scale = TOKENS
) -> Calibration:
    """Moves the bounds towards those at which FP8 clips as plain bounds would in BF16.

    Nothing moves, and the reason is returned, when there is too little to go by.

    Args:
        bounds: ClipBounds, the present ones.
        statistics: measured with the same config and scale.
        config: CalibrationConfig, one of its forms.
        scale: Scale of the loss.

    Returns:
        Calibration with the new bounds.

    Raises:
        ValueError: the statistics were measured on other grids, or for another form.
    """
    if not isinstance(statistics, statistics_class(config)):
        raise ValueError(
            f"statistics must be those of {type(config).__name__}, {statistics_class(config).__name__}; got "
            f"{type(statistics).__name__}. Use the config of `measure`."
        )
    if isinstance(statistics, GridStatistics):
        assert isinstance(config, GridCalibration)
        check_grids(statistics, config)
    outcome: str | tuple[float, float] = _skip_reason(statistics, config, scale)
    if not outcome:
        outcome = _targets(bounds, statistics, config, scale)
    if isinstance(outcome, str):
        return Calibration(bounds=bounds, target=None, skipped=outcome)
    moved = ClipBounds(
        low=_move(bounds.low, outcome[0], config.max_move_low * (scale.low or 0.0)),
        high=_move(bounds.high, outcome[1], config.max_move_high * scale.high),
    )
    return Calibration(bounds=moved, target=outcome, skipped="")


def low_intervals(
    statistics: Statistics, config: CalibrationConfig, scale: Scale = TOKENS
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Intervals of alpha_low and of L* at the level of the config, in the range of the low bound.

    Binomial, tokens taken as independent. For L*, the quantiles of r_fp8 at the ends of an interval of alpha_low from
    half as many tokens: the quantile's own error comes on top, and is independent at worst. On grids to within a step.

    Args:
        statistics: of at least one token with A < 0.
        config, scale: those they were measured with.
    """
    count, total = statistics.shadow_clipped_low, statistics.num_negative
    ends = wilson_interval(count / 2.0, total / 2.0, config.confidence)
    quantiles = [_low_quantile(end * total, statistics, config, scale) for end in ends]
    return wilson_interval(count, total, config.confidence), (quantiles[0], quantiles[1])


def to_metrics(bounds_before: ClipBounds, statistics: Statistics, calibration: Calibration) -> dict[str, Any]:
    """Everything but the config that is needed to compute a calibration again, ready for JSON.

        calibration/low_before, high_before  bounds before the calibration, absolute ratios
        calibration/low, high                bounds after it
        calibration/target_low, target_high  L* and H*, null when skipped
        calibration/skipped                  reason, empty when calibrated
        calibration/<field>                  each field of the statistics, tuples as lists

    Args:
        bounds_before: ClipBounds given to `calibrate`.
        statistics: those given to `calibrate`.
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


def statistics_from_metrics(metrics: dict[str, Any], config: CalibrationConfig) -> tuple[ClipBounds, Any]:
    """The inverse of `to_metrics`: the bounds before and the statistics, to pass to `calibrate` again.

    Args:
        metrics: dict with the keys of `to_metrics`, and any others.
        config: that of the run.

    Returns:
        (ClipBounds before, `statistics_class(config)`), equal to what was logged.

    Raises:
        ValueError: keys are missing.
    """
    names = [field.name for field in fields(statistics_class(config))]
    missing = [name for name in ("low_before", "high_before", *names) if f"calibration/{name}" not in metrics]
    if missing:
        raise ValueError(
            f"metrics of a calibration must hold calibration/{{{', '.join(missing)}}}; got {sorted(metrics)}. "
            "Pass the record of a step on which the bounds were calibrated or skipped."
        )
    before = ClipBounds(low=metrics["calibration/low_before"], high=metrics["calibration/high_before"])
    return before, statistics_class(config).from_json({name: metrics[f"calibration/{name}"] for name in names})


def _targets(
    bounds: ClipBounds, statistics: Statistics, config: CalibrationConfig, scale: Scale
) -> tuple[float, float] | str:
    if isinstance(statistics, GridStatistics):
        assert isinstance(config, GridCalibration)
        return grid_targets(bounds, statistics, config, scale)
    return ladder_targets(statistics, config, scale)


def _low_quantile(count: float, statistics: Statistics, config: CalibrationConfig, scale: Scale) -> float:
    if isinstance(statistics, GridStatistics):
        assert isinstance(config, GridCalibration)
        return grid_low_quantile(count, statistics, config, scale)
    return ladder_low_quantile(count, statistics, config, scale)


def _skip_reason(statistics: Statistics, config: CalibrationConfig, scale: Scale) -> str:
    """Why the statistics cannot be calibrated from, with the numbers; empty when they can."""
    for name, values in statistics.sums().items():
        broken = [value for value in values if not math.isfinite(value)]
        if broken:
            return f"{name} has {len(broken)} of {len(values)} sums that are not finite, the first {broken[0]}"
    sides = [("positive", statistics.num_positive)]
    if scale.low is not None:
        sides.append(("negative", statistics.num_negative))
    for sign, num_tokens in sides:
        if num_tokens < config.min_tokens:
            return f"{num_tokens} {sign}-advantage tokens, min_tokens is {config.min_tokens}"
    clipped = [("negative", statistics.shadow_clipped_low, statistics.num_negative)] if scale.low is not None else []
    if isinstance(config, SymmetricCalibration):
        assert isinstance(statistics, LadderStatistics)
        clipped.append(("positive", statistics.shadow_clipped_high, statistics.num_positive))
    for sign, count, num_tokens in clipped:
        if count < config.min_clipped:
            return f"BF16 clips {count:g} of {num_tokens} {sign}-advantage tokens, min_clipped is {config.min_clipped}"
        if count > config.max_shadow_clipped * num_tokens:
            return (
                f"BF16 itself clips {count:g} of {num_tokens} {sign}-advantage tokens, max_shadow_clipped is "
                f"{config.max_shadow_clipped}: it is no reference"
            )
    if scale.low is not None and statistics.shadow_negative == 0.0:
        return (
            "contribution_ratio has a denominator of 0: no negative-advantage token contributes at "
            f"r_bf16 >= 1 - clip_low, of {statistics.num_negative}"
        )
    if scale.low is not None and config.shadow_share < 1.0:
        smallest, largest = low_intervals(statistics, config, scale)[1]
        if largest - smallest > (step := config.max_move_low * scale.low):
            return (
                f"L* lies in [{smallest:.4g}, {largest:.4g}] at confidence {config.confidence:g}, wider than a move of "
                f"{step:.3g}: shadow_share={config.shadow_share} leaves {statistics.num_negative} tokens with A < 0"
            )
    return ""


def _move(bound: float, target: float, max_move: float) -> float:
    """Half of the way from bound to target, at most max_move."""
    return bound + max(-max_move, min(max_move, (target - bound) / 2))
