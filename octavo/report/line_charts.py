"""Figures of metrics over the steps: which there are, and what each of them says."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.report.figures import (
    COLOURS,
    DASHES,
    Chart,
    LegendEntry,
    draw_line,
    drawing,
    line_style,
    step_axis,
    value_axis,
)
from octavo.report.runs import RunRecord, Series

SHADOW_OFF = "the BF16 shadow did not run, which trainer.shadow_interval and calibration decide"
MISSING = "its lines do not hold them"
NOT_FINITE = "its values are NaN or infinite"
OLDER = "the run was made before octavo wrote them"
SMOOTHED = {
    True: " Bold: mean over a tenth of the steps; faint: every step.",
    False: " Drawn is the mean over a tenth of the steps.",
}
"""Whether the steps themselves are drawn too -> what the caption says."""


@dataclass(frozen=True, kw_only=True)
class Lines:
    """A chart of metrics over the steps."""

    title: str
    caption: str
    unit: str
    """Of y; `share` is drawn in per cent."""
    keys: dict[str, str]
    """What each line is -> its metric."""
    absent: str = MISSING
    """Why a run with steps may have none of the metrics."""
    smooth: bool = True


REWARD = Lines(
    title="Reward",
    caption="Mean reward of a step's completions, in reward units.",
    unit="reward",
    keys={"mean reward": "reward/mean"},
)
INFORMATIVE = Lines(
    title="Informative groups",
    caption="Share of prompts whose completions do not all have the same reward, and so teach something.",
    unit="share",
    keys={"informative": "reward/informative_groups_share"},
)
EQUAL_GROUPS = Lines(
    title="Groups of equal rewards",
    caption="Share of prompts whose completions are all right, or all wrong.",
    unit="share",
    keys={"all right": "reward/all_right_groups_share", "all wrong": "reward/all_wrong_groups_share"},
    absent=OLDER,
)
ENTROPY = Lines(
    title="Entropy",
    caption="Entropy of the next-token distribution on the last mini-batch, in nats: mean and percentiles over tokens.",
    unit="nats",
    keys={
        "mean": "policy/entropy",
        "p50": "policy/entropy_p50",
        "p90": "policy/entropy_p90",
        "p99": "policy/entropy_p99",
    },
)
UNCERTAIN = Lines(
    title="Uncertain tokens",
    caption="Share of tokens whose entropy is above 1 nat; a surge here comes before a collapse.",
    unit="share",
    keys={"above 1 nat": "policy/entropy_above_1_share"},
    absent=OLDER,
)
LENGTH = Lines(
    title="Completion length",
    caption="Tokens in a completion, EOS included: mean, 90th percentile and longest of the step.",
    unit="tokens",
    keys={"mean": "completion/length_mean", "p90": "completion/length_p90", "longest": "completion/length_max"},
)
TRUNCATED = Lines(
    title="Truncated completions",
    caption="Share of completions cut off at rollout.max_completion_tokens.",
    unit="share",
    keys={"truncated": "completion/truncated_share"},
)
OVERCLIP_LOW = Lines(
    title="Over-clipping, low side",
    caption="Of tokens with a negative advantage, the share at or below the plain bound 1 - clip_low: "
    "by the FP8 ratio, by the BF16 shadow's, by FP8 alone (over-clipped), and by FP8 after a null change.",
    unit="share",
    keys={
        "over-clipped": "overclip/low_share",
        "FP8 clipped": "overclip/clip_low_share_fp8",
        "BF16 clipped": "overclip/clip_low_share_bf16",
        "FP8 clipped, null": "null/clip_low_share_fp8",
    },
    absent=SHADOW_OFF,
)
OVERCLIP_HIGH = Lines(
    title="Over-clipping, high side",
    caption="Of tokens with a positive advantage, the share at or above the plain bound 1 + clip_high: "
    "by the FP8 ratio, by the BF16 shadow's, by FP8 alone (over-clipped), and by FP8 after a null change.",
    unit="share",
    keys={
        "over-clipped": "overclip/high_share",
        "FP8 clipped": "overclip/clip_high_share_fp8",
        "BF16 clipped": "overclip/clip_high_share_bf16",
        "FP8 clipped, null": "null/clip_high_share_fp8",
    },
    absent=SHADOW_OFF,
)
CLIPPED = Lines(
    title="Clipped by the loss",
    caption="Share of the last mini-batch's tokens that the loss drops or caps: low over tokens with a negative "
    "advantage, high over those with a positive one.",
    unit="share",
    keys={"low": "loss/clip_fraction_low", "high": "loss/clip_fraction_high"},
)
RATIO_STD = Lines(
    title="Spread of the ratio",
    caption="Standard deviation of exp(logprobs - old_logprobs) over the last mini-batch's tokens, without unit.",
    unit="ratio",
    keys={"ratio std": "policy/ratio_std"},
)
GRAD_NORM = Lines(
    title="Gradient norm",
    caption="Norm of the gradient at the step's last optimiser step, before it is clipped, in loss units.",
    unit="norm",
    keys={"gradient norm": "optimizer/grad_norm"},
)
WATCH = Lines(
    title="Early warning",
    caption="Largest sum of the detector's signals over the threshold; an alarm at 1.",
    unit="sum",
    keys={"sum": "watch/sum"},
    absent="watch is null, or the run was made before octavo had it",
    smooth=False,
)
LR = Lines(
    title="Learning rate",
    caption="Learning rate of the step's last optimiser step.",
    unit="lr",
    keys={"learning rate": "optimizer/lr"},
    smooth=False,
)
LOSS = Lines(
    title="Loss",
    caption="Policy loss of the last mini-batch, KL penalty included, in reward units.",
    unit="loss",
    keys={"loss": "loss/policy"},
)
KL = Lines(
    title="Distance to the reference",
    caption="KL divergence of the policy from the model that training started from, in nats per token.",
    unit="nats",
    keys={"KL": "loss/kl"},
    absent="algorithm.kl.coefficient is 0, which loads no reference",
)


def draw_lines(spec: Lines, runs: Sequence[RunRecord]) -> Chart:
    """Metrics over the steps: a colour a run and a dash a metric, or a colour a metric where there is one run."""
    chart = Chart(title=spec.title, caption=spec.caption)
    present = series_of(runs, spec.keys)
    note_missing(chart, runs, list(spec.keys.values()), spec.absent, [index for index, _ in present])
    if not present:
        return chart
    style, chart.legend = legend_of(runs, drawn_labels(spec.keys, present))
    faint = len(runs) == 1 or len(spec.keys) == 1
    with drawing(chart) as axes:
        for (index, label), series in present.items():
            draw_line(axes, series.steps, series.values, style(index, label), smooth=spec.smooth, faint=faint)
        for index in dict.fromkeys(index for index, _ in present):
            for step in runs[index].rescues:
                axes.axvline(step - 0.5, color=COLOURS[index], linewidth=0.8, alpha=0.6)
        step_axis(axes)
        value_axis(axes, spec.unit)
    for run in runs:
        if run.rescues:
            whose = f"{run.name}: " if len(runs) > 1 else ""
            chart.notes.append(f"{whose}rescued before step {', '.join(map(str, run.rescues))} (upright lines).")
    if spec.smooth and any(len(series.steps) >= 20 for series in present.values()):
        chart.caption += SMOOTHED[faint]
    return chart


def series_of(runs: Sequence[RunRecord], keys: Mapping[str, str]) -> dict[tuple[int, str], Series]:
    """The metrics that there are, by the run's place and the label of the key."""
    return {
        (index, label): series
        for index, run in enumerate(runs)
        for label, key in keys.items()
        if (series := run.series(key)).steps
    }


def drawn_labels(keys: Mapping[str, str], present: Iterable[tuple[int, str]]) -> list[str]:
    """The labels that any run has, in the order of the keys."""
    drawn = {label for _, label in present}
    return [label for label in keys if label in drawn]


def legend_of(
    runs: Sequence[RunRecord], labels: Sequence[str]
) -> tuple[Callable[[int, str], dict[str, Any]], list[LegendEntry]]:
    """style(run's place, label) of each line, and the legend; one run with one label needs none."""
    if len(runs) == 1:
        colours = dict(zip(labels, COLOURS, strict=False))
        entries = [LegendEntry(label=label, colour=colour) for label, colour in colours.items()]
        return (lambda index, label: line_style(colours[label], "")), entries if len(labels) > 1 else []
    dashes = dict(zip(labels, DASHES, strict=False))
    entries = [LegendEntry(label=run.name, colour=COLOURS[index]) for index, run in enumerate(runs)]
    if len(labels) > 1:
        entries += [LegendEntry(label=label, colour="currentColor", dash=dash) for label, dash in dashes.items()]
    return (lambda index, label: line_style(COLOURS[index], dashes[label])), entries


def note_missing(chart: Chart, runs: Sequence[RunRecord], keys: Sequence[str], why: str, present: list[int]) -> None:
    """Say which runs lack all of the metrics, and why; where every run does, the chart is absent."""
    lacking = {}
    for index, run in enumerate(runs):
        if index not in present:
            broken = any(run.num_broken(key) for key in keys)
            lacking[run.name] = "no step has ended" if not run.lines else NOT_FINITE if broken else why
    if len(lacking) == len(runs):
        whose = "the run has no" if len(runs) == 1 else "no run has"
        chart.absent = f"Left out, as {whose} {' or '.join(keys)}: {'; '.join(dict.fromkeys(lacking.values()))}."
    elif lacking:
        chart.notes.append(f"Without {' or '.join(keys)}: {', '.join(f'{k} ({v})' for k, v in lacking.items())}.")
