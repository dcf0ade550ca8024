"""Early warning: each signal of a collapse against the run's own healthy history, by a CUSUM of robust distances.

Of every signal y the median m and the spread s of its last healthy values are known. A step adds to its sum

    S <- max(0, S + min(z, LARGEST_Z) - slack),   z = (y - m) / s,   s = max(1.4826 median |y - m|, floor)

and S at `threshold` is an alarm, which ends when S is back at 0. Values wait until S is at 0 again and then count as
healthy, but for those of an alarm: a collapse must not become its own measure. A level that lasts for a whole window is
the new one. The step at which S left 0 is the alarm's onset: what was before it is taken for sound. docs/rescue.md says
how often noise alone gives an alarm.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

LARGEST_Z = 8.0
"""What one step adds at most, less the slack: one outlier alone is no alarm."""
MAD_TO_STD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""

Action = Literal["warn", "recalibrate", "bf16_forward", "rollback"]


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Early warning of a collapse, from signals that cost a step next to nothing, and what it leads to."""

    action: Action = "warn"
    """warn: say so. recalibrate: BF16 shadow and calibration in the next step. bf16_forward: rollout and training in
    BF16 for some steps. rollback: go on from a checkpoint of before the alarm, with other random numbers."""
    window: int = 32
    """Healthy values of each signal that a new one is compared with. At least 8."""
    warmup: int = 16
    """Values of a signal before it can give an alarm. In [8, window]."""
    slack: float = 2.0
    """Standard deviations by which a value may be off without adding to the sum. Above 0."""
    threshold: float = 10.0
    """Sum of standard deviations beyond the slack that gives an alarm. At least 6, which no single step reaches."""
    bf16_steps: int = 10
    """Steps that bf16_forward lasts. At least 1."""
    max_rollbacks: int = 3
    """Rollbacks of a run; one more is an error. At least 1."""
    margin_steps: int = 5
    """Steps before the onset of an alarm that a rollback undoes too. At least 1."""

    def __post_init__(self) -> None:
        if self.window < 8:
            raise ValueError(f"window is a number of values, at least 8; got {self.window}")
        if not 8 <= self.warmup <= self.window:
            raise ValueError(f"warmup lies in [8, window] = [8, {self.window}]; got {self.warmup}")
        if not 0.0 < self.slack < LARGEST_Z:
            raise ValueError(f"slack lies between 0 and {LARGEST_Z:g}, the largest distance; got {self.slack}")
        if not self.threshold >= LARGEST_Z - self.slack:
            raise ValueError(
                f"threshold is at least {LARGEST_Z:g} - slack = {LARGEST_Z - self.slack:g}, or one outlier would be an "
                f"alarm; got {self.threshold}"
            )
        for name in ("bf16_steps", "max_rollbacks", "margin_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")

    def refusal(self, calibrates: bool, quantizes: bool) -> str:
        """Why the action can do nothing in a run; empty where it can."""
        if self.action == "recalibrate" and not calibrates:
            return "watch.action=recalibrate wants a calibration. Use another action, or calibration: {}"
        if self.action == "bf16_forward" and not quantizes:
            return "watch.action=bf16_forward changes nothing where no layer is FP8. Use another action"
        return ""


@dataclass(kw_only=True)
class SignalState:
    """What is known of one signal. Plain numbers and lists, which a checkpoint holds."""

    healthy: list[float] = field(default_factory=list)
    """Its last `window` values, as compared."""
    waiting: list[float] = field(default_factory=list)
    """Values since the sum left 0."""
    total: float = 0.0
    """S."""
    onset: int | None = None
    """Step at which the sum left 0; None while it is at 0."""
    alarmed: bool = False
    """From the step that the sum reached the threshold to the one that it is back at 0."""

    def observe(self, value: float, floor: float, step: int, config: WatchConfig) -> bool:
        """Take in one value, large when bad.

        Args:
            value: NaN and infinity are as bad as can be.
            floor: least spread, above 0.
            step: from 0.
            config: the detector.

        Returns:
            Whether it gives an alarm that was not there before.
        """
        if len(self.healthy) < config.warmup:
            if math.isfinite(value):
                self.healthy.append(value)
            return False
        middle = statistics.median(self.healthy)
        spread = max(MAD_TO_STD * statistics.median(abs(y - middle) for y in self.healthy), floor)
        z = (value - middle) / spread
        z = LARGEST_Z if not z < LARGEST_Z else z  # NaN too
        self.total = min(max(0.0, self.total + z - config.slack), 2.0 * config.threshold)
        self.waiting.append(value if math.isfinite(value) else middle)
        lasts = self.total > 0.0 and len(self.waiting) >= config.window
        if self.total == 0.0 or lasts:
            if lasts or not self.alarmed:
                self.healthy = (self.healthy + self.waiting)[-config.window :]
            self.forget()
            return False
        self.onset = step if self.onset is None else self.onset
        risen = self.total >= config.threshold and not self.alarmed
        self.alarmed = self.alarmed or risen
        return risen

    def forget(self) -> None:
        """Drop the waiting values; the sum begins anew."""
        self.waiting, self.total, self.onset, self.alarmed = [], 0.0, None, False


@dataclass(frozen=True, kw_only=True)
class Signal:
    """A number that rises before or in a collapse."""

    read: Callable[[Mapping[str, Any]], float | None]
    """From a step's metrics; None where it was not measured."""
    floor: float
    """Least spread: differences of this size are nothing, however steady the signal was."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """Signals whose sums reached the threshold in one step."""

    step: int
    signals: tuple[str, ...]
    onset: int
    """First step at which one of them was off."""

    def __str__(self) -> str:
        return f"{', '.join(self.signals)} out of line since step {self.onset}"


def _log(*keys: str, offset: float) -> Callable[[Mapping[str, Any]], float | None]:
    """log(sum of metrics + offset): what counts is by how much they grow."""

    def read(metrics: Mapping[str, Any]) -> float | None:
        if any(metrics.get(key) is None for key in keys):
            return None
        total = sum(metrics[key] for key in keys)
        return math.log(total + offset) if math.isfinite(total) else math.nan

    return read


def _bound_move(metrics: Mapping[str, Any]) -> float | None:
    """How far a calibration moved both bounds."""
    if metrics.get("calibration/skipped", "not due") != "":
        return None
    ends = ("low", "high")
    return sum(abs(metrics[f"calibration/{end}"] - metrics[f"calibration/{end}_before"]) for end in ends)


SIGNALS: dict[str, Signal] = {
    "bound drift": Signal(read=_bound_move, floor=0.02),
    "over-clip share": Signal(read=_log("overclip/low_share", "overclip/high_share", offset=0.05), floor=0.25),
    "high-entropy share": Signal(read=_log("policy/entropy_above_1_share", offset=0.05), floor=0.25),
    "mismatch": Signal(read=_log("mismatch/mean_abs_logprob_diff", offset=1e-4), floor=0.25),
    "clip share": Signal(read=_log("loss/clip_fraction", offset=0.05), floor=0.25),
    "gradient norm": Signal(read=_log("optimizer/grad_norm", offset=1e-12), floor=0.25),
    "ratio std": Signal(read=_log("policy/ratio_std", offset=1e-3), floor=0.25),
    "weight norm": Signal(read=_log("watch/weight_change", offset=1e-5), floor=0.25),
    "reward": Signal(read=lambda metrics: -metrics["reward/mean"], floor=0.02),
}
"""Of shares, norms and spreads the logarithm: a quarter more is nothing, nor are a few hundredths of a share."""


def observe(states: dict[str, SignalState], metrics: Mapping[str, Any], step: int, config: WatchConfig) -> Alarm | None:
    """Take in a step's metrics.

    Args:
        states: of each signal by name; changed, and filled in where one is new.
        metrics: the step's.
        step: from 0.
        config: the detector.

    Returns:
        The alarm, if a signal raises one that it had not raised before.
    """
    risen = []
    for name, signal in SIGNALS.items():
        value = signal.read(metrics)
        if value is not None and states.setdefault(name, SignalState()).observe(value, signal.floor, step, config):
            risen.append(name)
    onsets = [onset for name in risen if (onset := states[name].onset) is not None]
    return Alarm(step=step, signals=tuple(risen), onset=min(onsets)) if risen else None


def watch_metrics(states: Mapping[str, SignalState], config: WatchConfig) -> dict[str, Any]:
    """Metrics of the detector.

    watch/sum     the largest sum over its threshold; an alarm at 1
    watch/signal  the signal that has it; empty where every sum is 0
    """
    name = max(states, key=lambda name: states[name].total, default="")
    total = states[name].total if name else 0.0
    return {"watch/sum": total / config.threshold, "watch/signal": name if total > 0.0 else ""}


def first_onset(states: Mapping[str, SignalState]) -> int | None:
    """The earliest step since which a signal is off; None while none is."""
    return min((state.onset for state in states.values() if state.onset is not None), default=None)
