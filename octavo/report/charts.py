"""The figures that are more than metrics over the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from octavo.report.figures import (
    COLOURS,
    Chart,
    LegendEntry,
    LogAxis,
    binned,
    draw_line,
    drawing,
    step_axis,
    value_axis,
)
from octavo.report.line_charts import MISSING, OLDER, drawn_labels, legend_of, note_missing, series_of
from octavo.report.runs import RunRecord, number, setting

ENTROPY_EDGES = ("0", "0.01", "0.03", "0.1", "0.3", "1", "2", "4", "∞")
"""Nats; of the histograms of entropy."""
SHOWN_REASONS = 20
"""Skipped calibrations whose reasons are listed, the last ones of a run."""
PHASES = ("rollout", "old_logprobs", "critic", "shadow", "observatory", "update", "evaluate", "checkpoint")
"""Of time/<phase>_s; what is left of time/step_s is `other`."""


def accuracy(runs: Sequence[RunRecord]) -> Chart:
    """Held-out accuracy with its standard error."""
    chart = Chart(
        title="Held-out accuracy",
        caption="Share of the held-out problems solved, after so many steps, with its standard error over problems; "
        "at 0 before any training.",
    )
    curves = {index: curve for index, run in enumerate(runs) if (curve := accuracy_curve(run))}
    absent = "evaluation.interval is 0, or no evaluation was due yet"
    note_missing(chart, runs, ["eval/accuracy"], absent, list(curves))
    if not curves:
        return chart
    style, chart.legend = legend_of(runs, ["accuracy"])
    with drawing(chart) as axes:
        for index, curve in curves.items():
            done, values, errors = zip(*curve, strict=True)
            axes.errorbar(done, values, yerr=errors, marker="o", capsize=2, elinewidth=0.8, **style(index, "accuracy"))
        step_axis(axes, "steps done")
        value_axis(axes, "share")
    return chart


def accuracy_curve(run: RunRecord) -> list[tuple[int, float, float]]:
    """(steps done, accuracy, standard error) of each evaluation; an error that is not there is 0."""
    curve: list[tuple[int, float, float]] = []
    for prefix, later in (("eval/initial_", 0), ("eval/", 1)):
        errors = run.series(f"{prefix}accuracy_stderr")
        error_of = dict(zip(errors.steps, errors.values, strict=True))
        values = run.series(f"{prefix}accuracy")
        curve += [
            (s + later, v, max(error_of.get(s, 0.0), 0.0)) for s, v in zip(values.steps, values.values, strict=True)
        ]
    return curve


def entropy_heat_map(
    runs: Sequence[RunRecord],
    *,
    key: str = "policy/entropy_histogram",
    title: str = "Entropy histogram",
    absent: str = OLDER,
) -> Chart:
    """How the entropies of tokens, or of answers, are distributed over the steps."""
    from matplotlib.colors import to_rgba

    num_bins, of = len(ENTROPY_EDGES) - 1, key.partition("/")[0].replace("policy", "tokens")
    chart = Chart(
        title=title,
        caption=f"Share of {of} in each range of entropy (nats) over the steps; the stronger the colour, the larger.",
    )
    tables = {}
    for index, run in enumerate(runs):
        rows = {step: [c for c in counts if c is not None] for step, counts in run.lists(key)}
        rows = {s: counts for s, counts in rows.items() if len(counts) == num_bins and min(counts) >= 0 < sum(counts)}
        if rows:
            table = np.asarray(list(rows.values()))
            tables[index] = binned(list(rows), table / table.sum(axis=1, keepdims=True))
    note_missing(chart, runs, [key], absent, list(tables))
    for index, (edges, shares) in tables.items():
        colour = COLOURS[index]
        with drawing(chart, runs[index].name if len(runs) > 1 else "") as axes:
            opacity = np.sqrt(np.nan_to_num(shares))
            cells = [[to_rgba(colour, cell) for cell in row] for row in opacity.T]
            axes.pcolormesh(edges, range(num_bins + 1), np.asarray(cells), snap=True)
            axes.set_yticks(range(num_bins + 1), labels=ENTROPY_EDGES)
            axes.set_ylabel("nats")
            axes.grid(visible=False)
            step_axis(axes)
    if len(tables) == 1:
        (index,) = tables
        chart.legend = [
            LegendEntry(label=label, colour=f"{COLOURS[index]}{round(255 * share**0.5):02x}", sign="■")
            for label, share in (("1 %", 0.01), ("10 %", 0.1), ("100 %", 1.0))
        ]
    return chart


def mismatch_by_step(runs: Sequence[RunRecord]) -> Chart:
    """Distance of rollout and training; exact zeros are said, not drawn at the edge of a logarithm."""
    keys = {"largest": "mismatch/max_abs_logprob_diff", "mean": "mismatch/mean_abs_logprob_diff"}
    chart = Chart(
        title="Mismatch by step",
        caption="|old_logprobs - rollout_logprobs| over all loss tokens of the step, in nats: largest and mean. "
        "octavo's own engine gives exactly 0 where rollout and training are one forward.",
    )
    present = series_of(runs, keys)
    note_missing(chart, runs, list(keys.values()), MISSING, [index for index, _ in present])
    for (index, label), largest in present.items():
        if label != "largest":
            continue
        num_exact, num_broken = largest.values.count(0.0), runs[index].num_broken(keys[label])
        total, worst = len(largest.values) + num_broken, max(largest.values)
        said = [f"exactly 0 on {'all' if num_exact == total else f'{num_exact} of'} {total} steps"]
        if num_broken:
            said.append(f"NaN or infinite on {num_broken}")
        if worst > 0.0:
            said.append(f"largest {worst:.3g} nats, at step {largest.steps[largest.values.index(worst)]}")
        chart.notes.append(f"{said_of(runs, index)}{'; '.join(said)}.")
    values = [value for series in present.values() for value in series.values]
    if max(values, default=0.0) <= 0.0:
        return chart
    style, chart.legend = legend_of(runs, drawn_labels(keys, present))
    log_axis = LogAxis(values)
    with drawing(chart) as axes:
        for (index, label), series in present.items():
            draw_line(axes, series.steps, log_axis.place(series.values), style(index, label))
        log_axis.apply(axes)
        axes.set_ylabel("nats")
        step_axis(axes)
    return chart


def mismatch_by_position(runs: Sequence[RunRecord]) -> Chart:
    """Whether the mismatch grows along a completion."""
    keys = {"largest": "mismatch/max_abs_by_position", "mean": "mismatch/mean_abs_by_position"}
    chart = Chart(
        title="Mismatch by position",
        caption="The same by place in the completion (a bucket holds twice the positions of the one before), in nats: "
        "largest over all steps, and mean of the steps' means.",
    )
    reduce: dict[str, Callable[[list[float]], float]] = {"largest": max, "mean": lambda v: sum(v) / len(v)}
    present: dict[tuple[int, str], dict[int, float]] = {}
    for index, run in enumerate(runs):
        for label, key in keys.items():
            buckets: dict[int, list[float]] = {}
            for _, by_bucket in run.lists(key):
                for bucket, value in enumerate(by_bucket):
                    if value is not None:
                        buckets.setdefault(bucket, []).append(value)
            if buckets:
                present[index, label] = {bucket: reduce[label](buckets[bucket]) for bucket in sorted(buckets)}
    note_missing(chart, runs, list(keys.values()), OLDER, [index for index, _ in present])
    values = [value for curve in present.values() for value in curve.values()]
    for index in dict.fromkeys(index for index, _ in present):
        broken = any(runs[index].num_broken(key) for key in keys.values())
        if not broken and not any(any(curve.values()) for (owner, _), curve in present.items() if owner == index):
            chart.notes.append(f"{said_of(runs, index)}exactly 0 at every position.")
    if max(values, default=0.0) <= 0.0:
        return chart
    style, chart.legend = legend_of(runs, drawn_labels(keys, present))
    log_axis = LogAxis(values)
    with drawing(chart) as axes:
        for (index, label), curve in present.items():
            draw_line(axes, list(curve), log_axis.place(curve.values()), style(index, label))
        log_axis.apply(axes)
        last = max(max(curve) for curve in present.values())
        every = last // 10 + 1
        axes.set_xticks(range(0, last + 1, every), labels=[str(2**b - 1) for b in range(0, last + 1, every)])
        axes.set_xlabel("first position of the bucket, tokens")
        axes.set_ylabel("nats")
    return chart


def bounds(runs: Sequence[RunRecord]) -> Chart:
    """The trust region and the calibrations that moved it."""
    chart = Chart(
        title="Bounds on the ratio",
        caption="The low and high bound that each step's loss used, absolute ratios without unit; dotted: the plain "
        "bounds 1 - clip_low and 1 + clip_high.",
    )
    ends = ("low", "high")
    present = [index for index, run in enumerate(runs) if any(run.series(f"clip/{end}").steps for end in ends)]
    note_missing(chart, runs, ["clip/low", "clip/high"], MISSING, present)
    if not present:
        return chart
    style, legend = legend_of(runs, ["bounds"])
    chart.legend = legend if len(runs) > 1 else []
    signs = set()
    with drawing(chart) as axes:
        for index in present:
            run, colour = runs[index], style(index, "bounds")["color"]
            for plain in plain_bounds(run):
                axes.axhline(plain, color=colour, linewidth=0.8, linestyle=(0, (1, 2)))
            skipped = {
                line["step"]: reason
                for line in run.lines
                if isinstance(reason := line.get("calibration/skipped"), str) and reason
            }
            for end in ends:
                bound, target = run.series(f"clip/{end}"), run.series(f"calibration/target_{end}")
                axes.step(
                    bound.steps, bound.values, where="mid", color=colour, marker="." if len(bound.steps) == 1 else ""
                )
                if target.steps:
                    signs.add("target of a calibration")
                    axes.plot(target.steps, target.values, "o", markerfacecolor="none", color=colour)
                at = [(s, b) for s, b in zip(bound.steps, bound.values, strict=True) if s in skipped]
                if at:
                    signs.add("skipped calibration")
                    axes.plot(*zip(*at, strict=True), "x", color=colour, markersize=5)
            name = said_of(runs, index)
            num_due = sum("calibration/skipped" in line for line in run.lines)
            if num_due:
                chart.notes.append(f"{name}{len(skipped)} of {num_due} calibrations skipped.")
            elif run.config and setting(run.config, "algorithm.loss.type") in ("bapo", "m2po"):
                chart.notes.append(f"{name}the loss chooses its bounds for each mini-batch; these are the last's.")
            elif run.config and setting(run.config, "calibration") is None:
                chart.notes.append(f"{name}calibration is off, so the bounds stay.")
            else:
                chart.notes.append(f"{name}no calibration was due yet.")
            reasons = [f"{name}step {step} skipped: {reason}." for step, reason in skipped.items()]
            chart.details += reasons[-SHOWN_REASONS:]
        value_axis(axes, "ratio", from_zero=False)
        step_axis(axes)
    for label, sign in (("target of a calibration", "○"), ("skipped calibration", "×")):
        if label in signs:
            colour = COLOURS[0] if len(runs) == 1 else "currentColor"
            chart.legend.append(LegendEntry(label=label, colour=colour, sign=sign))
    return chart


def plain_bounds(run: RunRecord) -> list[float]:
    """The bounds of algorithm.clip, which calibration aims at; [] where the loss has others or no config is there."""
    offsets = [number(setting(run.config, f"algorithm.clip.clip_{end}")) for end in ("low", "high")]
    if setting(run.config, "algorithm.loss.type") != "ppo_clip" or offsets[0] is None or offsets[1] is None:
        return []
    return [1.0 - offsets[0], 1.0 + offsets[1]]


def time_by_phase(runs: Sequence[RunRecord]) -> Chart:
    """Where the time of a step goes."""
    chart = Chart(
        title="Time by phase",
        caption="Seconds of wall time in a step, by phase; a bar is the mean over its steps.",
    )
    tables = {}
    for index, run in enumerate(runs):
        total = run.series("time/step_s")
        table = np.zeros((len(total.steps), len(PHASES) + 1))
        for column, phase in enumerate(PHASES):
            series = run.series(f"time/{phase}_s")
            spent = dict(zip(series.steps, series.values, strict=True))
            table[:, column] = [max(spent.get(step, 0.0), 0.0) for step in total.steps]
        table[:, -1] = np.maximum(np.asarray(total.values) - table.sum(axis=1), 0.0)
        if table.any():
            tables[index] = binned(total.steps, table)
    note_missing(chart, runs, ["time/step_s"], MISSING, list(tables))
    names = (*PHASES, "other")
    used = [c for c in range(len(names)) if any(np.nansum(means[:, c]) > 0.0 for _, means in tables.values())]
    for index, (edges, means) in tables.items():
        with drawing(chart, runs[index].name if len(runs) > 1 else "") as axes:
            bottom = np.zeros(len(means))
            for column in used:
                heights = np.nan_to_num(means[:, column])
                colour = COLOURS[column]
                axes.bar(edges[:-1], heights, np.diff(edges) * 0.92, bottom, align="edge", color=colour, linewidth=0)
                bottom += heights
            value_axis(axes, "s")
            step_axis(axes)
    chart.legend = [LegendEntry(label=names[c].replace("_", " "), colour=COLOURS[c], sign="■") for c in used]
    return chart


def said_of(runs: Sequence[RunRecord], index: int) -> str:
    """How a sentence on one of several runs begins."""
    return f"{runs[index].name}: " if len(runs) > 1 else ""
