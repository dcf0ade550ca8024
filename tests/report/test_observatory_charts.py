"""The observatory's figures show the numbers of the runs, each with its null line, and say so where there are none."""

import random

import numpy as np
import pytest
from report_runs import metrics_line, run_config, write_rows, write_run

from octavo.report import charts, line_charts
from octavo.report.figures import COLOURS
from octavo.report.line_charts import draw_lines
from octavo.report.observatory_charts import (
    AGREEMENT,
    AMPLIFICATION,
    CELLS,
    ERROR,
    FACTOR,
    SPREAD,
    SURPLUS,
    clip_matrix,
    error_by_layer,
    matrix_of,
    observatory_charts,
)
from octavo.report.runs import RunRecord, read_run, read_runs


def run_of(folder, rows: list[dict]) -> RunRecord:
    write_run(folder)
    write_rows(folder / "metrics.jsonl", rows)
    return read_run(folder, folder.name)


def matrix_line(step: int, base: int, area: str = "observed") -> dict:
    """Counts that tell every cell from every other."""
    line: dict = {"step": step}
    for s, side in enumerate(("low", "high")):
        for c, cell in enumerate(CELLS):
            line[f"{area}/matrix_{side}_{cell}"] = [base * (100 * s + 10 * c + bucket) for bucket in range(8)]
    return line


@pytest.mark.parametrize("spec", [SPREAD, ERROR, AMPLIFICATION, FACTOR, AGREEMENT, SURPLUS], ids=lambda s: s.title)
def test_every_line_has_its_null_line(spec, tmp_path, drawn):
    assert spec.caption.endswith(" Null: the same after a null change, a few norm gains moved by one BF16 step.")
    nulls = [label for label, key in spec.keys.items() if key.startswith("null/")]
    assert len(nulls) == len(spec.keys) / 2 and all("null" in label for label in nulls)
    rows = [
        {"step": 3, **dict.fromkeys(spec.keys.values(), 0.25)},
        {"step": 5, **dict.fromkeys(spec.keys.values(), 0.5)},
    ]
    chart = draw_lines(spec, [run_of(tmp_path / "a", rows)])
    assert [entry.label for entry in chart.legend] == list(spec.keys)
    assert all(line.get_ydata().tolist() == [0.25, 0.5] for line in drawn[0].lines) and len(drawn[0].lines) == len(
        spec.keys
    )


def test_over_clipping_has_its_null_line_too(tmp_path, drawn):
    run = run_of(tmp_path / "a", [{"step": 0, "null/clip_low_share_fp8": 0.125, "null/clip_high_share_fp8": 0.25}])
    draw_lines(line_charts.OVERCLIP_LOW, [run])
    draw_lines(line_charts.OVERCLIP_HIGH, [run])
    assert [axes.lines[0].get_ydata().tolist() for axes in drawn] == [[0.125], [0.25]]


def test_several_runs_tell_all_six_lines_apart(tmp_path, drawn):
    runs = read_runs([write_run(tmp_path / name, num_steps=4, seed=seed) for seed, name in enumerate("ab")])
    chart = draw_lines(SPREAD, runs)
    assert [entry.label for entry in chart.legend] == ["a", "b", *SPREAD.keys]
    assert len({str(line._dash_pattern) for line in drawn[0].lines[:6]}) == 6


def test_the_clip_matrix_adds_up_the_steps(tmp_path, drawn):
    rows = [matrix_line(1, 1) | matrix_line(1, 2, "null"), {"step": 2}, matrix_line(3, 10)]
    chart = clip_matrix([run_of(tmp_path / "a", rows)])
    assert [picture.label for picture in chart.pictures] == ["A < 0, at 1 - clip_low", "A > 0, at 1 + clip_high"]
    for s, axes in enumerate(drawn):
        shown = {text.get_position(): text.get_text() for text in axes.texts}
        for c in range(4):
            for bucket in range(8):
                assert shown[c + 0.5, bucket + 0.5] == f"{11 * (100 * s + 10 * c + bucket):,}"
    low, high = 11 * (80 + 28), 11 * (800 + 80 + 28)
    assert chart.notes == [
        f"FP8 alone clips {low} low and {high} high; after a null change {2 * 108} low and {2 * 908} high."
    ]


def test_a_damaged_matrix_is_left_out(tmp_path):
    whole = matrix_line(0, 1)
    broken = [
        {**whole, "observed/matrix_low_both": None},
        {**whole, "observed/matrix_low_both": [1, 2]},
        {**whole, "observed/matrix_low_both": [0.5] * 8},
        {**whole, "observed/matrix_low_both": [-1] * 8},
        {**whole, "observed/matrix_low_both": [10**400] * 8},
        {key: value for key, value in whole.items() if key != "observed/matrix_high_neither"},
    ]
    run = run_of(tmp_path / "a", [{**line, "step": step} for step, line in enumerate([*broken, whole])])
    assert np.array_equal(matrix_of(run, "observed")["low"][:, 0], range(8))
    assert matrix_of(run, "null") == {}
    assert clip_matrix([run]).notes == ["FP8 alone clips 108 low and 908 high."]


def test_the_difference_by_layer_is_that_of_the_last_observation(tmp_path, drawn):
    rows = [
        {"step": 0, "modules/error_by_layer": [0.5, 0.5], "modules/first_differing": "early"},
        {"step": 1, "modules/error_by_layer": [0.1, 0.2], "modules/first_differing": "late"},
        {"step": 2},
    ]
    chart = error_by_layer([run_of(tmp_path / "a", rows)])
    assert drawn[0].lines[0].get_ydata().tolist() == [0.1, 0.2]
    assert chart.notes == ["first operation that differs: late."]
    broken = [{"step": 0, "modules/error_by_layer": [0.1, float("nan")]}]
    assert "NaN or infinite" in error_by_layer([run_of(tmp_path / "b", broken)]).absent


def test_a_run_without_observations_says_so(tmp_path):
    row = {"step": 0, "reward/mean": 0.5}
    found = observatory_charts([run_of(tmp_path / "a", [row])])
    assert len(found) == 10 and all(chart.absent and not chart.pictures for chart in found)
    assert "observatory.interval decides" in found[0].absent and "observatory.modules" in found[-1].absent


def test_one_run_with_and_one_without(tmp_path):
    runs = [write_run(tmp_path / "a", num_steps=4), write_run(tmp_path / "b", num_steps=1)]
    for chart in observatory_charts(read_runs(runs)):
        assert chart.pictures and any("b (" in note for note in chart.notes), chart.title


def test_plain_bounds_are_drawn_where_calibration_aims_at_them(tmp_path, drawn):
    rng = random.Random(0)
    config = run_config(tmp_path / "a", algorithm={"clip": {"clip_low": 0.1, "clip_high": 0.3}})
    write_run(tmp_path / "a", config=config)
    write_rows(tmp_path / "a" / "metrics.jsonl", [metrics_line(step, rng) for step in range(3)])
    charts.bounds([read_run(tmp_path / "a", "a")])
    plain = [line for line in drawn[0].lines if line.get_linestyle() == "--" or len(line.get_xdata()) == 2]
    assert sorted(line.get_ydata()[0] for line in plain) == [0.9, 1.3]
    assert {line.get_color() for line in plain} == {COLOURS[0]}
    other = run_config(tmp_path / "b", algorithm={"loss": {"type": "bapo"}}, calibration=None)
    assert charts.plain_bounds(read_run(write_run(tmp_path / "b", config=other), "b")) == []
    assert charts.plain_bounds(run_of(tmp_path / "c", [])) == [0.8, 1.28]
