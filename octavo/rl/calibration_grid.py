"""The grid form of calibration: counts and sums at every candidate, and the candidate that fits best."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from octavo.rl.calibration_config import GRID_DECIMALS, GridCalibration, Scale
from octavo.rl.calibration_statistics import CalibrationStatistics
from octavo.rl.losses import ClipBounds


@dataclass(frozen=True, kw_only=True)
class GridStatistics(CalibrationStatistics):
    """Adds what FP8 clips and keeps at each candidate."""

    clipped_low_counts: tuple[int, ...]
    """For each L of the low grid: tokens with A < 0 and r_fp8 <= L."""
    negative_contributions: tuple[float, ...]
    """For each L of the low grid: sum of w r_fp8 |A| over A < 0, r_fp8 >= L, in advantage units."""
    positive_contributions: tuple[float, ...]
    """For each H of the high grid: sum of w r_fp8 A over A > 0, r_fp8 <= H, in advantage units."""

    def __add__(self, other: "GridStatistics") -> "GridStatistics":
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
                    f"{len(theirs)} values. Measure both with the same GridCalibration."
                )
        return GridStatistics(**total)

    def sums(self) -> dict[str, tuple[float, ...]]:
        """Every sum that must be finite, by name."""
        return super().sums() | {
            "negative_contributions": self.negative_contributions,
            "positive_contributions": self.positive_contributions,
        }


def measure_grid(
    low_ratio: Tensor,
    low_size: Tensor,
    high_ratio: Tensor,
    high_size: Tensor,
    hidden_nan: float,
    shadow: CalibrationStatistics,
    config: GridCalibration,
    scale: Scale,
) -> GridStatistics:
    """Counts and sums of FP8 ratios at every candidate.

    Args:
        low_ratio, low_size: [N] float64, r_fp8 and w |A| of the tokens with A < 0.
        high_ratio, high_size: [M] float64, the same of those with A > 0.
        hidden_nan: NaN where a loss token has one, else 0; added to every sum.
        shadow: the shadow's side.
        config, scale: which say where the candidates are.
    """

    def total(contributions: Tensor, kept: Tensor) -> Tensor:
        return torch.where(kept, contributions, 0.0).sum() + hidden_nan

    # One pass per candidate holds memory at [T], and a plain sum has the same order on every run.
    low_grid, high_grid = config.low_grid(scale), config.high_grid(scale)
    clipped_low_counts = torch.stack([(low_ratio <= low).sum() for low in low_grid])
    negative_contributions = torch.stack([total(low_size * low_ratio, low_ratio >= low) for low in low_grid])
    positive_contributions = torch.stack([total(high_size * high_ratio, high_ratio <= high) for high in high_grid])
    return GridStatistics(
        **vars(shadow),
        clipped_low_counts=tuple(clipped_low_counts.tolist()),
        negative_contributions=tuple(negative_contributions.tolist()),
        positive_contributions=tuple(positive_contributions.tolist()),
    )


def check_grids(statistics: GridStatistics, config: GridCalibration) -> None:
    """ValueError where the statistics were measured on other grids."""
    low_grid, high_grid = config.low_grid(), config.high_grid()
    lengths = (len(statistics.clipped_low_counts), len(statistics.negative_contributions))
    if lengths != (len(low_grid),) * 2 or len(statistics.positive_contributions) != len(high_grid):
        raise ValueError(
            f"statistics must be measured on the grids of config, {len(low_grid)} low and {len(high_grid)} high "
            f"candidates; got {lengths} and {len(statistics.positive_contributions)}. Use the config of `measure`."
        )


def grid_targets(
    bounds: ClipBounds, statistics: GridStatistics, config: GridCalibration, scale: Scale
) -> tuple[float, float] | str:
    """(L*, H*), or why there are none.

    Of equally good candidates the one nearest the present bound wins, and of two equally near ones the one nearer 1,
    the tighter bound.
    """
    low_grid, high_grid = config.low_grid(scale), config.high_grid(scale)
    # Both shares have the denominator num_negative, so counts compare the same, without rounding.
    low_errors = [abs(count - statistics.shadow_clipped_low) for count in statistics.clipped_low_counts]
    low_index = _best(low_errors, low_grid, bounds.low)
    negative = statistics.negative_contributions[low_index]
    if negative == 0.0:
        return (
            f"contribution_ratio has a denominator of 0: no negative-advantage token contributes at "
            f"r_fp8 >= {low_grid[low_index]}, of {statistics.num_negative}"
        )
    wanted = statistics.shadow_positive / statistics.shadow_negative
    high_errors = [abs(positive / negative - wanted) for positive in statistics.positive_contributions]
    return low_grid[low_index], high_grid[_best(high_errors, high_grid, bounds.high)]


def grid_low_quantile(count: float, statistics: GridStatistics, config: GridCalibration, scale: Scale) -> float:
    """The smallest candidate L at or below which so many punished tokens lie; the largest where none has as many."""
    low_grid = config.low_grid(scale)
    reached = [low for low, below in zip(low_grid, statistics.clipped_low_counts, strict=True) if below >= count]
    return reached[0] if reached else low_grid[-1]


def _best(errors: list[float], grid: tuple[float, ...], present: float) -> int:
    """Index of the smallest error; ties go to the candidate nearest `present`, then to the one nearest 1."""
    return min(
        range(len(grid)),
        # Distances are rounded because 0.7 - 0.68 and 0.72 - 0.7 differ in the last bits.
        key=lambda index: (errors[index], round(abs(grid[index] - present), GRID_DECIMALS), abs(grid[index] - 1.0)),
    )
