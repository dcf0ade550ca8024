"""A diagnosis as the console's tables and as one HTML page that needs nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table as ConsoleTable
from rich.text import Text

from octavo import __version__
from octavo.diagnose.diagnosis import Diagnosis, Finding
from octavo.report.charts import entropy_heat_map, mismatch_by_position
from octavo.report.figures import COLOURS, Chart, LegendEntry, LogAxis, draw_line, drawing, line_style
from octavo.report.line_charts import draw_lines
from octavo.report.observatory_charts import ANSWERS, SPREAD, clip_matrix
from octavo.report.page import NOTHING, Section, Table, template
from octavo.report.runs import RunRecord, visible
from octavo.rl.observatory_modules import ModuleDifference, first_difference

FIGURES = (
    ("loss tokens", "num_tokens", "count"),
    ("mismatch: std, nats", "mismatch/std_logprob_diff", "number"),
    ("mismatch: ratios outside [0.8, 1.2]", "mismatch/outside_share", "share"),
    ("std of log r, nats", "observed/log_ratio_std_fp8", "number"),
    ("… in BF16", "observed/log_ratio_std_bf16", "number"),
    ("… in FP32", "observed/log_ratio_std_fp32", "number"),
    ("… after a null change", "null/log_ratio_std_fp8", "number"),
    ("… after a null change, in BF16", "null/log_ratio_std_bf16", "number"),
    ("… after a null change, in FP32", "null/log_ratio_std_fp32", "number"),
    ("tokens clipped", "observed/num_clipped_fp8", "count"),
    ("… in BF16", "observed/num_clipped_bf16", "count"),
    ("… in both", "observed/num_clipped_both", "count"),
    ("… after a null change", "null/num_clipped_fp8", "count"),
    ("… after a null change, in BF16", "null/num_clipped_bf16", "count"),
    ("of BF16's clipped, FP8 clips", "observed/agreement_of_bf16", "share"),
    ("of FP8's clipped, BF16 clips", "observed/agreement_of_fp8", "share"),
    ("punished tokens clipped by FP8 alone", "observed/low_share", "share"),
    ("… after a null change", "null/low_share", "share"),
    ("rewarded tokens clipped by FP8 alone", "observed/high_share", "share"),
    ("… after a null change", "null/high_share", "share"),
    ("clipped by FP8 alone: at the low bound", "observed/low_side_share", "share"),
    ("… of these, in high-entropy answers", "observed/high_entropy_answer_share", "share"),
    ("relative error of the probability", "observed/nmae_probability", "number"),
    ("relative error of the ratio", "observed/nmae_ratio", "number"),
    ("amplification", "observed/amplification", "number"),
    ("… after a null change", "null/amplification", "number"),
    ("entropy, nats", "policy/entropy", "number"),
    ("tokens above 1 nat", "policy/entropy_above_1_share", "share"),
    ("high-entropy answers", "answers/high_entropy_share", "share"),
    ("… of these, rewarded", "answers/high_entropy_positive_share", "share"),
    ("clipped by the loss, of punished", "loss/clip_fraction_low", "share"),
    ("clipped by the loss, of rewarded", "loss/clip_fraction_high", "share"),
    ("groups all right", "reward/all_right_groups_share", "share"),
    ("groups all wrong", "reward/all_wrong_groups_share", "share"),
)
"""Label, metric and how it is written, in the order of the table."""
SHOWN_COLUMNS = 8
"""Of the console's table and the page's; the figures file has all."""
LABEL_WIDTH, COLUMN_WIDTH = 42, 20
"""Characters of the console's table, which is not squeezed into a narrower terminal."""


@dataclass(frozen=True, kw_only=True)
class ModuleTable(Table):
    """Two forwards, operation by operation."""

    title: str
    summary: str


def show(diagnosis: Diagnosis) -> None:
    """Print findings and figures."""
    width = LABEL_WIDTH + COLUMN_WIDTH * min(len(diagnosis.columns), SHOWN_COLUMNS)
    console = Console(highlight=False, soft_wrap=True)
    console.width = max(console.width, width)
    table = ConsoleTable(box=None, padding=(0, 2, 0, 0), header_style="bold underline")
    figures = figures_table(diagnosis)
    for place, heading in enumerate(figures.head):
        table.add_column(Text(heading), justify="right" if place else "left", no_wrap=True)
    for row in figures.rows:
        table.add_row(*map(Text, row))
    for label, value in diagnosis.facts.items():
        console.print(f"{label}: {visible(value)}", markup=False)
    console.print()
    console.print(table)
    console.print()
    for name, differences in diagnosis.modules.items():
        console.print(f"{name}: {modules_summary(differences)}", markup=False)
    for finding in diagnosis.findings:
        console.print(f"{'! ' if finding.do else ''}{visible(finding.says)}", markup=False)
        if finding.do:
            console.print(f"  -> {finding.do}", markup=False)
    for sentence in diagnosis.missing:
        console.print(f"not diagnosed: {visible(sentence)}", markup=False)


def render(diagnosis: Diagnosis) -> str:
    """The page as HTML."""
    return template("diagnosis.html", Path(__file__).parent).render(
        title=f"octavo diagnose: {visible(diagnosis.title)}",
        findings=[Finding(says=visible(finding.says), do=finding.do) for finding in diagnosis.findings],
        missing=[visible(sentence) for sentence in diagnosis.missing],
        facts=Table(head=["", ""], rows=[[label, visible(value)] for label, value in diagnosis.facts.items()]),
        figures=figures_table(diagnosis),
        sections=sections(diagnosis),
        modules=[
            ModuleTable(
                title=name,
                summary=modules_summary(differences),
                head=["operation", "relative difference", "largest", "elements that differ"],
                rows=[
                    [d.module, f"{d.relative:.3g}", f"{d.max_abs:.3g}", f"{d.differing_share:.2%}"] for d in differences
                ],
            )
            for name, differences in diagnosis.modules.items()
        ],
        written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        version=__version__,
    )


def figures_table(diagnosis: Diagnosis) -> Table:
    """The figures that any column has; of many columns the first ones."""
    names = list(diagnosis.columns)[:SHOWN_COLUMNS]
    columns = [diagnosis.columns[name] for name in names]
    rows = [
        [label, *(written(column.get(key), kind) for column in columns)]
        for label, key, kind in FIGURES
        if any(key in column for column in columns)
    ]
    more = len(diagnosis.columns) - len(names)
    return Table(head=[f"({more} more in the figures file)" if more else "", *map(visible, names)], rows=rows)


def written(value: object, kind: str) -> str:
    """A figure as a person writes it."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return NOTHING
    if kind == "share":
        return f"{value:.2%}"
    return f"{value:,.0f}" if kind == "count" and math.isfinite(value) else f"{value:.3g}"


def modules_summary(differences: Sequence[ModuleDifference]) -> str:
    """Where two forwards part."""
    first = first_difference(list(differences))
    if first is None:
        return f"equal to the bit in all {len(differences)} operations."
    worst = max(differences, key=lambda difference: difference.relative)
    return (
        f"{first.module} is the first of {len(differences)} operations that differs (relative {first.relative:.2g}); "
        f"the largest difference is at {worst.module} ({worst.relative:.2g})."
    )


def sections(diagnosis: Diagnosis) -> list[Section]:
    """Charts: recipes or steps side by side."""
    steps = {int(name.removeprefix("step ")): m for name, m in diagnosis.columns.items() if name.startswith("step ")}
    if diagnosis.modules or not steps:
        runs = [record(name, [{"step": 0, **metrics}]) for name, metrics in diagnosis.columns.items()]
        charts = [clip_matrix(runs), mismatch_by_position(runs)]
        if diagnosis.modules:
            charts.append(operations(diagnosis.modules))
    else:
        runs = [record("dump", [{"step": step, **metrics} for step, metrics in steps.items()])]
        charts = [draw_lines(SPREAD, runs), clip_matrix(runs), mismatch_by_position(runs), draw_lines(ANSWERS, runs)]
        charts += [entropy_heat_map(runs, absent="the dump has no entropy")]
    return [Section(title="Pictures", charts=charts)]


def operations(modules: dict[str, list[ModuleDifference]]) -> Chart:
    """The difference of every operation, in order."""
    chart = Chart(
        title="Difference by operation",
        caption="Of each operation's output, root of sum (left - right)^2 / sum right^2, in the order they run in.",
    )
    curves = {name: [d.relative for d in found] for name, found in modules.items()}
    chart.notes += [f"{name}: exactly 0 in every operation." for name, values in curves.items() if not any(values)]
    drawn = {name: values for name, values in curves.items() if any(values) and all(map(math.isfinite, values))}
    if not drawn:
        return chart
    axis = LogAxis([value for values in drawn.values() for value in values])
    with drawing(chart) as axes:
        for colour, (name, values) in zip(COLOURS, drawn.items(), strict=False):
            draw_line(axes, range(len(values)), axis.place(values), line_style(colour, ""))
            chart.legend.append(LegendEntry(label=name, colour=colour))
        axis.apply(axes)
        axes.set_xlabel("operation")
    return chart


def record(name: str, lines: list[dict[str, object]]) -> RunRecord:
    """Metrics as figures take them."""
    return RunRecord(
        folder=Path(),
        name=visible(name),
        config={},
        config_text="",
        lines=lines,
        samples=[],
        resumes=[],
        has_model=False,
        last_written_s=None,
        notes=[],
    )
