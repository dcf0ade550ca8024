"""The figures of the observatory: the ratio's noise beside its null line, who clips what, and where numerics part."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.report.charts import ENTROPY_EDGES, entropy_heat_map, said_of
from octavo.report.figures import COLOURS, Chart, draw_line, drawing, value_axis
from octavo.report.line_charts import Lines, draw_lines, legend_of, note_missing
from octavo.report.runs import RunRecord

OFF = "the observatory did not run, which observatory.interval decides"
UNMEASURED = "the observatory did not run, or had nothing to take a share of"
CELLS = {"both": "both", "fp8_only": "FP8 alone", "bf16_only": "BF16 alone", "neither": "neither"}
"""Column of the clip matrix -> its label."""
SIDES = {"low": "A < 0, at 1 - clip_low", "high": "A > 0, at 1 + clip_high"}
"""Side of the clip matrix -> what is counted there."""
NULL_LINE = " Null: the same after a null change, a few norm gains moved by one BF16 step."

SPREAD = Lines(
    title="Spread of log r",
    caption="Standard deviation of log r over the last mini-batch's tokens in each numerics, in nats." + NULL_LINE,
    unit="nats",
    keys={
        "FP8": "observed/log_ratio_std_fp8",
        "BF16": "observed/log_ratio_std_bf16",
        "FP32": "observed/log_ratio_std_fp32",
        "FP8, null": "null/log_ratio_std_fp8",
        "BF16, null": "null/log_ratio_std_bf16",
        "FP32, null": "null/log_ratio_std_fp32",
    },
    absent=OFF,
    smooth=False,
)
ERROR = Lines(
    title="Relative error",
    caption="Mean |x_fp8 - x_bf16| / mean |x_bf16| of the probability and of the ratio, without unit." + NULL_LINE,
    unit="error",
    keys={
        "ratio": "observed/nmae_ratio",
        "probability": "observed/nmae_probability",
        "ratio, null": "null/nmae_ratio",
        "probability, null": "null/nmae_probability",
    },
    absent=OFF,
    smooth=False,
)
AMPLIFICATION = Lines(
    title="Amplification",
    caption="Relative error of the ratio over that of the probability, without unit." + NULL_LINE,
    unit="times",
    keys={"step": "observed/amplification", "null": "null/amplification"},
    absent=OFF,
    smooth=False,
)
FACTOR = Lines(
    title="Over-clipping factor",
    caption="Tokens that FP8 clips over tokens that BF16 clips, at the plain bounds." + NULL_LINE,
    unit="times",
    keys={"step": "observed/factor", "null": "null/factor"},
    absent=UNMEASURED,
    smooth=False,
)
AGREEMENT = Lines(
    title="Agreement on clipped tokens",
    caption="Of the tokens that BF16 clips, the share that FP8 clips too, and the other way round." + NULL_LINE,
    unit="share",
    keys={
        "of BF16's": "observed/agreement_of_bf16",
        "of FP8's": "observed/agreement_of_fp8",
        "of BF16's, null": "null/agreement_of_bf16",
        "of FP8's, null": "null/agreement_of_fp8",
    },
    absent=UNMEASURED,
    smooth=False,
)
SURPLUS = Lines(
    title="Where the surplus lies",
    caption="Of the tokens that FP8 alone clips, the share at the low bound; of these, the share in answers whose mean "
    "entropy is above 1 nat." + NULL_LINE,
    unit="share",
    keys={
        "low bound": "observed/low_side_share",
        "uncertain answers": "observed/high_entropy_answer_share",
        "low bound, null": "null/low_side_share",
        "uncertain answers, null": "null/high_entropy_answer_share",
    },
    absent=UNMEASURED,
    smooth=False,
)
ANSWERS = Lines(
    title="Uncertain answers",
    caption="Completions whose mean token entropy is above 1 nat, and of these the share with a positive advantage.",
    unit="share",
    keys={"uncertain": "answers/high_entropy_share", "rewarded of these": "answers/high_entropy_positive_share"},
    absent=OFF,
    smooth=False,
)


def observatory_charts(runs: Sequence[RunRecord]) -> list[Chart]:
    """All figures of the section, in order."""
    return [
        draw_lines(SPREAD, runs),
        draw_lines(ERROR, runs),
        draw_lines(AMPLIFICATION, runs),
        draw_lines(FACTOR, runs),
        draw_lines(AGREEMENT, runs),
        draw_lines(SURPLUS, runs),
        clip_matrix(runs),
        draw_lines(ANSWERS, runs),
        entropy_heat_map(runs, key="answers/entropy_histogram", title="Entropy of answers", absent=OFF),
        error_by_layer(runs),
    ]


def clip_matrix(runs: Sequence[RunRecord]) -> Chart:
    """Who clips which tokens, by their entropy, over all observed steps of a run."""
    chart = Chart(
        title="Clip matrix",
        caption="Tokens of all observed steps by who clips them, a row per range of entropy (nats): counts, the "
        "stronger the colour, the larger the share of its row. A punished token is clipped low or not at all, a "
        "rewarded one high or not at all.",
    )
    found = {index: table for index, run in enumerate(runs) if (table := matrix_of(run, "observed"))}
    note_missing(chart, runs, ["observed/matrix_..."], OFF, list(found))
    for index, matrix in found.items():
        for side, meaning in SIDES.items():
            label = f"{said_of(runs, index)}{meaning}"
            _draw_matrix(chart, label, matrix[side], COLOURS[index])
        null = matrix_of(runs[index], "null")
        alone = [f"{matrix[side][:, 1].sum():.0f} {side}" for side in SIDES]
        noise = [f"{null[side][:, 1].sum():.0f} {side}" for side in SIDES] if null else []
        said = f"{said_of(runs, index)}FP8 alone clips {' and '.join(alone)}"
        chart.notes.append(f"{said}; after a null change {' and '.join(noise)}." if noise else f"{said}.")
    return chart


def matrix_of(run: RunRecord, area: str) -> dict[str, np.ndarray]:
    """Side -> [8, 4] counts by entropy and by CELLS, summed over the steps; {} where no step has all of them."""
    total: dict[str, np.ndarray] = {}
    for line in run.lines:
        columns = {side: [line.get(f"{area}/matrix_{side}_{cell}") for cell in CELLS] for side in SIDES}
        if all(_counts(column) for side in columns.values() for column in side):
            for side, counts in columns.items():
                total[side] = total.get(side, 0.0) + np.asarray(counts, dtype=np.float64).T
    return total


def error_by_layer(runs: Sequence[RunRecord]) -> Chart:
    """How the recipe's difference from BF16 grows with depth, at the last observation."""
    key = "modules/error_by_layer"
    chart = Chart(
        title="Difference from BF16 by layer",
        caption="Of each decoder layer's output on one sequence, root of sum (recipe - bf16)^2 / sum bf16^2; the last "
        "observation.",
    )
    lists = {index: run.lists(key) for index, run in enumerate(runs)}
    curves = {
        index: values for index, found in lists.items() if found and None not in (values := found[-1][1]) and values
    }
    note_missing(chart, runs, [key], "observatory.modules is off, or the observatory did not run", list(curves))
    if not curves:
        return chart
    style, chart.legend = legend_of(runs, ["error"])
    with drawing(chart) as axes:
        for index, values in curves.items():
            draw_line(axes, range(len(values)), [v for v in values if v is not None], style(index, "error"))
        axes.set_xlabel("layer")
        value_axis(axes, "error")
    for index in curves:
        names = [line.get("modules/first_differing") for line in runs[index].lines]
        named = [name for name in names if isinstance(name, str)]
        if named:
            chart.notes.append(f"{said_of(runs, index)}first operation that differs: {named[-1] or 'none'}.")
    return chart


def _counts(column: object) -> bool:
    """Whether it is a list of counts, one a bucket."""
    return (
        isinstance(column, list)
        and len(column) == len(ENTROPY_EDGES) - 1
        and all(type(count) is int and 0 <= count < 2**53 for count in column)
    )


def _draw_matrix(chart: Chart, label: str, counts: np.ndarray, colour: str) -> None:
    """[8, 4] counts as a heat map with its numbers."""
    from matplotlib.colors import to_rgba

    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.zeros_like(counts), where=totals > 0.0)
    cells = [[to_rgba(colour, 0.75 * share**0.5) for share in row] for row in shares]
    with drawing(chart, label) as axes:
        axes.pcolormesh(range(len(CELLS) + 1), range(len(counts) + 1), np.asarray(cells), snap=True)
        for row, values in enumerate(counts):
            for column, count in enumerate(values):
                axes.text(column + 0.5, row + 0.5, f"{count:,.0f}", ha="center", va="center", fontsize=7.5)
        axes.set_xticks([column + 0.5 for column in range(len(CELLS))], labels=list(CELLS.values()))
        axes.set_yticks(range(len(ENTROPY_EDGES)), labels=ENTROPY_EDGES)
        axes.set_ylabel("nats")
        axes.grid(visible=False)
