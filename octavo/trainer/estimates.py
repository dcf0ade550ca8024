"""Shares over problems with 95 % intervals, and the difference of two measured on the same problems.

Every interval is over problems: completions of one problem are alike, so they never count as independent. The interval
of a share is Wilson's, on as many independent problems as the spread of the values is worth; it has a width even where
every value is 0 or 1. Differences and means of shares combine the distances to the ends of such intervals (Newcombe
1998, method 10; Zou and Donner 2008).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, variance

Z = 1.959964
"""Two-sided 95 % of a normal distribution."""


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


def pass_at(k: int, num_completions: int, num_correct: int) -> float:
    """Chance that one of k completions is right, without bias (arXiv:2107.03374); k is at most num_completions."""
    return 1.0 - math.comb(num_completions - num_correct, k) / math.comb(num_completions, k)


def share(values: Sequence[float]) -> Estimate:
    """The mean of one value a problem, each in [0, 1]."""
    count, mean = len(values), fmean(values)
    spread = variance(values) / count if count > 1 else 0.0
    spread *= (1.0 + (Z**2 + 1.0) / (4.0 * count)) ** 2  # estimated from few: Student's quantile over the normal's
    worth = max(count, mean * (1.0 - mean) / spread) if spread > 0.0 else count
    centre = (mean + Z**2 / (2 * worth)) / (1 + Z**2 / worth)
    half = Z / (1 + Z**2 / worth) * math.sqrt(mean * (1.0 - mean) / worth + Z**2 / (4 * worth**2))
    return Estimate(mean, min(mean, max(0.0, centre - half)), max(mean, min(1.0, centre + half)))  # rounding aside


def stderr(values: Sequence[float]) -> float:
    """Standard error of their mean; 0 of a single one."""
    return math.sqrt(variance(values) / len(values)) if len(values) > 1 else 0.0


def mean_of(parts: Sequence[Estimate]) -> Estimate:
    """The mean of estimates from different problems, each counting alike."""
    below = math.hypot(*(part.value - part.low for part in parts)) / len(parts)
    above = math.hypot(*(part.high - part.value for part in parts)) / len(parts)
    mean = fmean(part.value for part in parts)
    return Estimate(mean, mean - below, mean + above)


def paired_difference(first: Sequence[float], second: Sequence[float]) -> Estimate:
    """Mean of `first` minus mean of `second`, whose values are of the same problems in the same order."""
    a, b = share(first), share(second)
    means = zip(first, second, strict=True)
    covariance = sum((x - a.value) * (y - b.value) for x, y in means)
    norm = math.sqrt(sum((x - a.value) ** 2 for x in first) * sum((y - b.value) ** 2 for y in second))
    correlation = covariance / norm if norm > 0.0 else 0.0

    def distance(x: float, y: float) -> float:
        return math.sqrt(max(0.0, x**2 - 2 * correlation * x * y + y**2))

    value = a.value - b.value
    below = distance(a.value - a.low, b.high - b.value)
    above = distance(a.high - a.value, b.value - b.low)
    return Estimate(value, max(-1.0, value - below), min(1.0, value + above))
