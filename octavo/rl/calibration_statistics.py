"""What a calibration is computed from: what every form needs of the shadow, and the intervals of its shares."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from statistics import NormalDist
from typing import Any, TypeVar

StatisticsT = TypeVar("StatisticsT", bound="CalibrationStatistics")


@dataclass(frozen=True, kw_only=True)
class CalibrationStatistics:
    """The shadow's side; forms add that of FP8. Statistics of several microbatches, ranks or steps add up."""

    num_positive: int
    """Loss tokens with A > 0."""
    num_negative: int
    """Loss tokens with A < 0."""
    shadow_clipped_low: float
    """Tokens with A < 0 and r_bf16 <= 1 - clip_low; alpha_low is this over num_negative. Whole, unless carried."""
    shadow_positive: float
    """Sum of w r_bf16 A over A > 0, r_bf16 <= 1 + clip_high, in advantage units."""
    shadow_negative: float
    """Sum of w r_bf16 |A| over A < 0, r_bf16 >= 1 - clip_low, in advantage units."""

    @classmethod
    def from_json(cls: type[StatisticsT], data: Mapping[str, Any]) -> StatisticsT:
        """From its fields by name, tuples or the lists that JSON makes of them."""
        given = {field.name: data[field.name] for field in fields(cls)}
        plain: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in given.items()}
        return cls(**plain)

    def sums(self) -> dict[str, tuple[float, ...]]:
        """Every sum that must be finite, by name."""
        return {"shadow_positive": (self.shadow_positive,), "shadow_negative": (self.shadow_negative,)}


@dataclass(frozen=True, kw_only=True)
class ShadowShares:
    """What a shadow pass found, to be held against ratios of a later step."""

    clipped_low: float
    """alpha_low, share of the tokens with A < 0."""
    clipped_high: float
    """Share of the tokens with A > 0 that BF16 clips; 0 where the form does not ask."""
    positive: float
    """`shadow_positive`, of which only the quotient with the next counts."""
    negative: float
    """`shadow_negative`."""

    @classmethod
    def of(cls, statistics: CalibrationStatistics) -> "ShadowShares":
        """Those of statistics that a calibration was not skipped with."""
        return cls(
            clipped_low=statistics.shadow_clipped_low / max(statistics.num_negative, 1),
            clipped_high=getattr(statistics, "shadow_clipped_high", 0) / statistics.num_positive,
            positive=statistics.shadow_positive,
            negative=statistics.shadow_negative,
        )

    def carried_to(self, statistics: StatisticsT) -> StatisticsT:
        """Statistics of FP8 ratios, with these shares for a shadow's."""
        changes: dict[str, Any] = {
            "shadow_clipped_low": self.clipped_low * statistics.num_negative,
            "shadow_positive": self.positive,
            "shadow_negative": self.negative,
        }
        if hasattr(statistics, "shadow_clipped_high"):
            changes["shadow_clipped_high"] = self.clipped_high * statistics.num_positive
        return replace(statistics, **changes)


def wilson_interval(count: float, total: float, confidence: float) -> tuple[float, float]:
    """Interval of a share of which `count` in `total` independent draws were seen (Wilson 1927), in [0, 1].

    Args:
        count: draws in which the event was seen, in [0, total].
        total: draws, above 0.
        confidence: probability that the interval holds the share, in (0, 1).
    """
    z = NormalDist().inv_cdf((1.0 + confidence) / 2.0)
    share = count / total
    centre = share + z * z / (2.0 * total)
    half = z * math.sqrt(share * (1.0 - share) / total + z * z / (4.0 * total * total))
    weight = 1.0 + z * z / total
    return max(0.0, (centre - half) / weight), min(1.0, (centre + half) / weight)
