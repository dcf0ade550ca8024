"""The forms of calibration without a grid: every ratio inside a bound's range on one of 4,096 rungs.

A ratio is on the lowest rung at or above it, so at a rung the count of ratios at or below it is exact, and a bound is
found to within 1/4096 of its range. Only rungs that hold a token are kept: of a small batch, its sorted values; of a
large one, at most 4,096 a side. On rung 0 lies all that is at or below the range, on 4,097 all that is above.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from octavo.rl.calibration_config import CalibrationConfig, ExactCalibration, Scale
from octavo.rl.calibration_statistics import CalibrationStatistics

NUM_RUNGS = 4096
"""Parts of a bound's range."""


@dataclass(frozen=True, kw_only=True)
class LadderStatistics(CalibrationStatistics):
    """Adds the shadow's high side, and FP8's ratios by rung, ascending."""

    shadow_clipped_high: float
    """Tokens with A > 0 and r_bf16 > 1 + clip_high. Whole, unless carried."""
    low_rungs: tuple[int, ...]
    """Rungs of the low range that hold tokens with A < 0."""
    low_counts: tuple[int, ...]
    """How many."""
    low_contributions: tuple[float, ...]
    """Sum of w r_fp8 |A| over them, in advantage units."""
    high_rungs: tuple[int, ...]
    """Rungs of the high range that hold tokens with A > 0."""
    high_counts: tuple[int, ...]
    """How many."""
    high_contributions: tuple[float, ...]
    """Sum of w r_fp8 A over them, in advantage units."""

    def __add__(self, other: "LadderStatistics") -> "LadderStatistics":
        """Statistics of both sets of tokens together, measured with one config."""
        low_rungs, low_counts, low_contributions = _merged(self._ladder("low"), other._ladder("low"))
        high_rungs, high_counts, high_contributions = _merged(self._ladder("high"), other._ladder("high"))
        return LadderStatistics(
            num_positive=self.num_positive + other.num_positive,
            num_negative=self.num_negative + other.num_negative,
            shadow_clipped_low=self.shadow_clipped_low + other.shadow_clipped_low,
            shadow_clipped_high=self.shadow_clipped_high + other.shadow_clipped_high,
            shadow_positive=self.shadow_positive + other.shadow_positive,
            shadow_negative=self.shadow_negative + other.shadow_negative,
            low_rungs=low_rungs,
            low_counts=low_counts,
            low_contributions=low_contributions,
            high_rungs=high_rungs,
            high_counts=high_counts,
            high_contributions=high_contributions,
        )

    def _ladder(self, side: str) -> "Ladder":
        rungs, counts, contributions = (
            getattr(self, f"{side}_{name}") for name in ("rungs", "counts", "contributions")
        )
        return rungs, counts, contributions

    def sums(self) -> dict[str, tuple[float, ...]]:
        """Every sum that must be finite, by name. Above the high range nothing is ever kept."""
        kept = tuple(x for rung, x in zip(self.high_rungs, self.high_contributions, strict=True) if rung <= NUM_RUNGS)
        return super().sums() | {"low_contributions": self.low_contributions, "high_contributions": kept}


Ladder = tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]
"""Rungs, counts and contributions of one side."""


def measure_ladder(
    low_ratio: Tensor,
    low_size: Tensor,
    high_ratio: Tensor,
    high_size: Tensor,
    hidden_nan: float,
    shadow: CalibrationStatistics,
    shadow_clipped_high: int,
    config: CalibrationConfig,
    scale: Scale,
) -> LadderStatistics:
    """FP8 ratios by rung. Arguments as of `measure_grid`; shadow_clipped_high counts tokens beyond 1 + clip_high."""
    low_rungs, low_counts, low_contributions = _ladder(low_ratio, low_size, low_range(config, scale))
    high_rungs, high_counts, high_contributions = _ladder(high_ratio, high_size, high_range(config, scale))
    return LadderStatistics(
        **vars(shadow),
        shadow_clipped_high=shadow_clipped_high,
        low_rungs=low_rungs,
        low_counts=low_counts,
        low_contributions=tuple(x + hidden_nan for x in low_contributions),
        high_rungs=high_rungs,
        high_counts=high_counts,
        high_contributions=tuple(x + hidden_nan for x in high_contributions),
    )


def ladder_targets(statistics: LadderStatistics, config: CalibrationConfig, scale: Scale) -> tuple[float, float] | str:
    """(L*, H*) of the exact or the symmetric form, or why there are none."""
    low, high = low_range(config, scale), high_range(config, scale)
    clipped = list(accumulate(statistics.low_counts))
    kept_high = list(accumulate(statistics.high_counts))
    positive = list(accumulate(statistics.high_contributions))
    negative = list(accumulate(reversed(statistics.low_contributions)))[::-1]  # from each rung upwards

    def low_rung(num_clipped: float) -> int:
        return _first(statistics.low_rungs, clipped, num_clipped)

    def high_rung(num_clipped: float) -> int:
        return _first(statistics.high_rungs, kept_high, statistics.num_positive - num_clipped)

    if scale.low is None:
        return 0.0, _at(high_rung(statistics.shadow_clipped_high), high)
    wanted = statistics.shadow_positive / statistics.shadow_negative

    def punished(low_at: int) -> float:
        """Contributions that a low bound at a rung keeps."""
        num_below = bisect_right(statistics.low_rungs, low_at)
        return negative[num_below] if num_below < len(negative) else 0.0

    def missing(low_at: int, high_at: int) -> float:
        """Rewarded contributions beyond those that balance the punished ones; rises with both rungs."""
        num_below = bisect_right(statistics.high_rungs, high_at)
        return (positive[num_below - 1] if num_below else 0.0) - wanted * punished(low_at)

    low_at = low_rung(statistics.shadow_clipped_low)
    if punished(low_at) == 0.0:
        return (
            f"contribution_ratio has a denominator of 0: no negative-advantage token contributes at "
            f"r_fp8 > {_at(low_at, low)}, of {statistics.num_negative}"
        )
    if isinstance(config, ExactCalibration):
        high_at = _crossing(lambda rung: missing(low_at, rung), 0, NUM_RUNGS)
        return _at(low_at, low), _at(high_at, high)
    num_low, num_high = round(statistics.shadow_clipped_low), round(statistics.shadow_clipped_high)
    moved = _crossing(lambda k: missing(low_rung(num_low + k), high_rung(num_high - k)), -num_low, num_high)
    return _at(low_rung(num_low + moved), low), _at(high_rung(num_high - moved), high)


def ladder_low_quantile(count: float, statistics: LadderStatistics, config: CalibrationConfig, scale: Scale) -> float:
    """The lowest rung at or below which so many punished tokens lie; the top one where none has as many."""
    rung = _first(statistics.low_rungs, list(accumulate(statistics.low_counts)), count)
    return _at(rung, low_range(config, scale))


def low_range(config: CalibrationConfig, scale: Scale) -> tuple[float, float]:
    """Where the low bound may lie, in the loss's own ratios."""
    return scale.low_bound(config.low_min), scale.low_bound(config.low_max)


def high_range(config: CalibrationConfig, scale: Scale) -> tuple[float, float]:
    """Where the high bound may lie, in the loss's own ratios."""
    return scale.high_bound(config.high_min), scale.high_bound(config.high_max)


def _ladder(ratio: Tensor, size: Tensor, ends: tuple[float, float]) -> Ladder:
    smallest, largest = ends
    width = (largest - smallest) / NUM_RUNGS
    if width > 0.0:
        places = ((ratio - smallest) / width).ceil()
    else:
        places = torch.where(ratio <= smallest, 0.0, NUM_RUNGS + 1.0)
    rungs, order = places.nan_to_num(nan=0.0).clamp(0, NUM_RUNGS + 1).long().sort(stable=True)
    held, counts = rungs.unique_consecutive(return_counts=True)
    contributions = (size * ratio)[order]
    sums = torch.segment_reduce(contributions, "sum", lengths=counts, initial=0.0) if len(held) else contributions
    return tuple(held.tolist()), tuple(counts.tolist()), tuple(sums.tolist())


def _merged(mine: Ladder, theirs: Ladder) -> Ladder:
    held: dict[int, tuple[int, float]] = {}
    for rungs, counts, contributions in (mine, theirs):
        for rung, count, contribution in zip(rungs, counts, contributions, strict=True):
            before = held.get(rung, (0, 0.0))
            held[rung] = before[0] + count, before[1] + contribution
    rungs = tuple(sorted(held))
    return rungs, tuple(held[rung][0] for rung in rungs), tuple(held[rung][1] for rung in rungs)


def _at(rung: int, ends: tuple[float, float]) -> float:
    """The ratio of a rung from 0 to NUM_RUNGS."""
    smallest, largest = ends
    return largest if rung == NUM_RUNGS else smallest + rung * ((largest - smallest) / NUM_RUNGS)


def _first(rungs: Sequence[int], cumulative: Sequence[int], wanted: float) -> int:
    """The lowest rung up to which `wanted` tokens lie, within 0 and NUM_RUNGS."""
    place = bisect_left(cumulative, wanted)
    return 0 if wanted <= 0 else min(rungs[place], NUM_RUNGS) if place < len(rungs) else NUM_RUNGS


def _crossing(error: Callable[[int], float], first: int, last: int) -> int:
    """Where a rising error in [first, last] is nearest 0; of two equally near ones the one before it crosses."""
    low, high = first, last
    while low < high:
        middle = (low + high) // 2
        if error(middle) >= 0.0:
            high = middle
        else:
            low = middle + 1
    nearer_before = low > first and error(low) > 0.0 and -error(low - 1) <= error(low)
    return low - 1 if nearer_before else low
