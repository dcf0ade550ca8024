"""What a diagnosis holds, and what its figures mean for the reader: findings, each with something to do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from octavo.rl.mismatch import ROLLOUT_RATIO_BAND
from octavo.rl.observatory_modules import ModuleDifference

FEW_TOKENS = 1000
"""Fewer loss tokens than this, and shares of rare events are rough."""
LOUD = 2.0
"""A recipe whose null change spreads the ratio so much more than BF16's has noise of its own."""
MUCH_OVERCLIP = 0.01
"""Share of punished or of rewarded tokens that FP8 alone clips, above which it is said."""
MUCH_MISMATCH = 0.01
"""Share of tokens outside ROLLOUT_RATIO_BAND above which a rollout is off-policy enough to say so."""
HALF = 0.5
"""Of the tokens that FP8 clips; fewer of them clipped by BF16 too, and noise chooses which."""

Metrics = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A sentence on the figures, and what to do about it."""

    says: str
    """With the figures."""
    do: str
    """Empty where there is nothing to do."""


@dataclass(kw_only=True)
class Diagnosis:
    """Everything that `octavo diagnose` found."""

    title: str
    """What was diagnosed."""
    facts: dict[str, str]
    """Label -> value: where it came from and how it was measured."""
    columns: dict[str, Metrics]
    """Name of a recipe or a step -> its metrics, keys as in docs/metrics.md."""
    findings: list[Finding] = field(default_factory=list)
    """The most telling first."""
    missing: list[str] = field(default_factory=list)
    """What could not be diagnosed, and for want of what."""
    modules: dict[str, list[ModuleDifference]] = field(default_factory=dict)
    """Two forwards -> every operation, in order."""

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers."""
        return asdict(self)


def findings_of(columns: Mapping[str, Metrics], sides: str) -> list[Finding]:
    """What the metrics of recipes, or of a run, say; a figure that is not there is not judged.

    Args:
        columns: name of the recipe or the run -> its metrics, keys as in docs/metrics.md, and num_tokens.
        sides: what the mismatch metrics compare, {name} where the name belongs.
    """
    found = []
    for name, metrics in columns.items():
        found += [*_mismatch(sides.format(name=name), metrics), *_noise(name, columns)]
        found += [*_ties(name, metrics), *_overclip(name, metrics)]
    counts = [metrics["num_tokens"] for metrics in columns.values() if metrics["num_tokens"] < FEW_TOKENS]
    if counts:
        found.append(Finding(says=f"{counts[0]} loss tokens make rough shares of rare events.", do="Give more tokens."))
    return found


def _mismatch(name: str, metrics: Mapping[str, Any]) -> list[Finding]:
    outside, largest = metrics.get("mismatch/outside_share"), metrics.get("mismatch/max_abs_logprob_diff")
    if outside is None or largest is None:
        return []
    low, high = ROLLOUT_RATIO_BAND
    if largest == 0.0:
        return [Finding(says=f"{name}: the same log-probabilities, to the bit.", do="")]
    says = (
        f"{name}: log-probabilities differ by up to {largest:.3g} nats (standard deviation "
        f"{metrics['mismatch/std_logprob_diff']:.3g}); {outside:.2%} of the rollout ratios leave [{low}, {high}]."
    )
    if outside <= MUCH_MISMATCH:
        return [Finding(says=says, do="Truncated importance weights (algorithm.tis_cap) are enough for so little.")]
    return [
        Finding(
            says=says,
            do="Sample and train with one forward: octavo train does, and under a batch-invariant recipe both are "
            "equal to the bit. Where that cannot be, correct for it: algorithm.correction icepop or sequence_tis.",
        )
    ]


def _noise(name: str, columns: Mapping[str, Metrics]) -> list[Finding]:
    key = "null/log_ratio_std_fp8"
    if key not in columns[name]:
        return []
    spread = {other: float(metrics[key]) for other, metrics in columns.items() if key in metrics}
    fp8, bf16 = spread[name], columns[name]["null/log_ratio_std_bf16"]
    says = f"{name}: a null change spreads log r by {fp8:.3g} nats, in BF16 by {bf16:.3g}"
    if fp8 <= LOUD * bf16:
        return [Finding(says=f"{says}: its ratio is no noisier than BF16's.", do="")]
    quietest = min(spread, key=lambda other: spread[other])
    if spread[quietest] * LOUD <= fp8:
        do = f"Take the noise out at its source: precision.recipe={quietest} spreads it by {spread[quietest]:.3g}"
    elif len(columns) == 1:
        do = "Take the noise out at its source: octavo diagnose model says which recipe does, most often w8a16"
    else:
        do = "No recipe here is much quieter: keep more in BF16, as precision.kv_cache=bf16 or precision.keep_bf16"
    return [Finding(says=f"{says}: {_times(fp8, bf16)}, of noise that no update caused.", do=f"{do}.")]


def _ties(name: str, metrics: Mapping[str, Any]) -> list[Finding]:
    """A step that FP8 makes larger than it is, beyond what its noise explains."""
    fp8, bf16 = metrics.get("observed/log_ratio_std_fp8"), metrics.get("observed/log_ratio_std_bf16")
    null = metrics.get("null/log_ratio_std_fp8")
    if fp8 is None or bf16 is None or null is None or fp8 <= LOUD * max(null, bf16):
        return []
    says = f"{name}: the step spreads log r by {fp8:.3g} nats, in BF16 by {bf16:.3g}, and a null change by {null:.3g}"
    do = "Weights of a BF16 checkpoint sit on FP8 rounding ties and move together: model.dither_masters=true"
    return [Finding(says=f"{says}: FP8 makes the update larger than it is.", do=f"{do}.")]


def _overclip(name: str, metrics: Mapping[str, Any]) -> list[Finding]:
    low, high = metrics.get("observed/low_share"), metrics.get("observed/high_share")
    if low is None or high is None:
        return []
    num_fp8, num_bf16 = metrics["observed/num_clipped_fp8"], metrics["observed/num_clipped_bf16"]
    says = (
        f"{name}: FP8 alone clips {low:.2%} of the punished and {high:.2%} of the rewarded tokens; "
        f"{num_fp8:.0f} tokens against {num_bf16:.0f} in BF16"
    )
    if max(low, high) <= MUCH_OVERCLIP:
        return [Finding(says=f"{says}.", do="")]
    agreement = metrics["observed/agreement_of_fp8"]
    do = "Calibrate the bounds (calibration in the config)"
    if agreement is not None and agreement < HALF:
        says += f", and only {agreement:.0%} of FP8's are clipped by BF16 too: noise chooses them"
        do = (
            "Calibration restores how many tokens are clipped, not which; less noise (w8a16, keep_bf16) does both. "
            "Use it, and calibrate what is left"
        )
    return [Finding(says=f"{says}.", do=f"{do}.")]


def _times(value: float, other: float) -> str:
    return f"{value / other:.1f} times as much" if other else "all"
