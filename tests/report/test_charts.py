"""Every figure shows the numbers of the runs, and says so where there are none."""

import random

import numpy as np
import pytest
from report_runs import metrics_line, run_config, write_rows, write_run

from octavo.report import charts, line_charts
from octavo.report.figures import COLOURS
from octavo.report.line_charts import draw_lines
from octavo.report.page import summary_of
from octavo.report.runs import RunRecord, read_run, read_runs


def run_of(folder, rows: list[dict], config: dict | None = None) -> RunRecord:
    """A run of these lines."""
    write_run(folder, config=config)
    write_rows(folder / "metrics.jsonl", rows)
    return read_run(folder, folder.name)


def steps_of(key: str, values: list) -> list[dict]:
    return [{"step": step} if value is None else {"step": step, key: value} for step, value in enumerate(values)]


def test_a_metric_is_drawn_as_it_is(tmp_path, drawn):
    run = run_of(tmp_path / "a", steps_of("optimizer/lr", [1e-6, None, 3e-6]))
    chart = draw_lines(line_charts.LR, [run])
    (line,) = drawn[0].lines
    assert line.get_xdata().tolist() == [0, 2] and line.get_ydata().tolist() == [1e-6, 3e-6]
    assert chart.legend == [] and chart.absent == "" and chart.notes == [] and len(chart.pictures) == 1


def test_each_run_has_its_colour_and_each_measure_its_dash(tmp_path, drawn):
    runs = read_runs([write_run(tmp_path / name, num_steps=5, seed=seed) for seed, name in enumerate("ab")])
    chart = draw_lines(line_charts.LENGTH, runs)
    lines = drawn[0].lines
    assert [line.get_color() for line in lines] == [COLOURS[0]] * 3 + [COLOURS[1]] * 3
    assert lines[4].get_ydata().tolist() == runs[1].series("completion/length_p90").values
    assert len({line._dash_pattern[1] and tuple(line._dash_pattern[1]) for line in lines[:3]}) == 3
    assert [(entry.label, entry.colour) for entry in chart.legend] == [
        ("a", COLOURS[0]),
        ("b", COLOURS[1]),
        *((label, "currentColor") for label in ("mean", "p90", "longest")),
    ]


def test_one_run_has_a_colour_a_measure_and_only_those_it_has(tmp_path, drawn):
    rows = [{"step": s, "policy/entropy": 1.0, "policy/entropy_p99": 2.0} for s in range(3)]
    chart = draw_lines(line_charts.ENTROPY, [run_of(tmp_path / "a", rows)])
    assert [(entry.label, entry.colour) for entry in chart.legend] == [("mean", COLOURS[0]), ("p99", COLOURS[1])]
    assert [line.get_color() for line in drawn[0].lines] == list(COLOURS[:2])


def test_rescues_are_marked_and_said(tmp_path, drawn):
    rows = steps_of("reward/mean", [0.5] * 9)
    rows[2]["rescue/action"], rows[3]["rescue/action"] = "warn", "bf16_forward"
    for row in rows[6:]:
        row["rescue/rollbacks"] = 1.0
    chart = draw_lines(line_charts.REWARD, [run_of(tmp_path / "a", rows)])
    upright = [line.get_xdata()[0] for line in drawn[0].lines if list(line.get_ydata()) == [0, 1]]
    assert upright == [3.5, 5.5] and chart.notes == ["rescued before step 4, 6 (upright lines)."]


def test_the_caption_says_when_lines_are_smoothed(tmp_path):
    long, short = (read_run(write_run(tmp_path / str(n), num_steps=n), "a") for n in (20, 19))
    assert draw_lines(line_charts.REWARD, [long]).caption.endswith("faint: every step.")
    assert "faint" not in draw_lines(line_charts.REWARD, [short]).caption


ALL_CHARTS = [
    *(
        lambda runs, spec=spec: draw_lines(spec, runs)
        for spec in vars(line_charts).values()
        if isinstance(spec, line_charts.Lines)
    ),
    charts.accuracy,
    charts.entropy_heat_map,
    charts.mismatch_by_step,
    charts.mismatch_by_position,
    charts.bounds,
    charts.time_by_phase,
]


@pytest.mark.parametrize("place", range(len(ALL_CHARTS)))
def test_no_chart_is_an_empty_frame(tmp_path, place):
    empty = run_of(tmp_path / "empty", [])
    bare = run_of(tmp_path / "bare", [{"step": 0, "future/key": 1.0}, {"step": 1, "reward/mean": "much"}])
    for run, why in ((empty, "no step has ended."), (bare, "")):
        chart = ALL_CHARTS[place]([run])
        assert chart.pictures == [] and chart.absent.startswith("Left out, as the run has no "), chart
        assert chart.absent.endswith(why) and "/" in chart.absent
    full = read_run(write_run(tmp_path / "full", num_steps=1, exact=False), "full")
    beside = ALL_CHARTS[place]([empty, full])
    if beside.pictures:
        assert any(note.startswith("Without ") and "empty (no step has ended)" in note for note in beside.notes)


def test_accuracy_starts_before_training_and_has_its_error(tmp_path, drawn):
    rows = [
        {"step": 0, "eval/initial_accuracy": 0.25, "eval/initial_accuracy_stderr": 0.05},
        {"step": 1, "eval/accuracy": 0.5, "eval/accuracy_stderr": 0.1},
        {"step": 3, "eval/accuracy": 0.75},
    ]
    charts.accuracy([run_of(tmp_path / "a", rows)])
    (container,) = drawn[0].containers
    line, _, (bars,) = container.lines
    assert line.get_xydata().tolist() == [[0, 0.25], [2, 0.5], [4, 0.75]]
    assert np.allclose([segment[:, 1] for segment in bars.get_segments()], [[0.2, 0.3], [0.4, 0.6], [0.75, 0.75]])


def test_the_heat_map_shades_shares(tmp_path, drawn):
    key = "policy/entropy_histogram"
    rows = [
        {"step": 0, key: [3, 0, 1, 0, 0, 0, 0, 0]},
        {"step": 1, key: [0, 0, 0, 0, 0, 0, 0, 2]},
        {"step": 2, key: [1]},
    ]
    chart = charts.entropy_heat_map([run_of(tmp_path / "a", rows)])
    (mesh,) = drawn[0].collections
    opacity = mesh.get_array()[..., 3]
    assert opacity.shape == (8, 2)
    assert np.allclose(opacity[:, 0] ** 2, [0.75, 0, 0.25, 0, 0, 0, 0, 0]) and np.allclose(opacity[:, 1], [0] * 7 + [1])
    assert [entry.label for entry in chart.legend] == ["1 %", "10 %", "100 %"]


def test_an_exact_run_is_said_to_be_exact_without_a_figure(tmp_path, drawn):
    run = read_run(write_run(tmp_path / "a", num_steps=12), "a")
    chart = charts.mismatch_by_step([run])
    assert chart.notes == ["exactly 0 on all 12 steps."] and chart.pictures == [] and chart.absent == ""
    assert charts.mismatch_by_position([run]).notes == ["exactly 0 at every position."]


def test_zeros_among_mismatches_are_drawn_and_counted(tmp_path, drawn):
    key = "mismatch/max_abs_logprob_diff"
    exact = run_of(tmp_path / "exact", steps_of(key, [0.0, 0.0]))
    noisy = run_of(tmp_path / "noisy", steps_of(key, [0.02, 0.0, 0.5]))
    chart = charts.mismatch_by_step([exact, noisy])
    assert chart.notes == [
        "exact: exactly 0 on all 2 steps.",
        "noisy: exactly 0 on 1 of 3 steps; largest 0.5 nats, at step 2.",
    ]
    axes = drawn[0]
    zero = axes.get_yticks()[0]
    assert axes.get_yticklabels()[0].get_text() == "0" and axes.get_yscale() == "log" and zero < 0.02
    assert axes.lines[0].get_ydata().tolist() == [zero, zero]
    assert axes.lines[1].get_ydata().tolist() == [0.02, zero, 0.5]


def test_mismatch_by_position_takes_the_largest_and_the_mean_over_steps(tmp_path, drawn):
    rows = [
        {
            "step": 0,
            "mismatch/max_abs_by_position": [0.1, 0.4, None],
            "mismatch/mean_abs_by_position": [0.02, 0.04, None],
        },
        {"step": 1, "mismatch/max_abs_by_position": [0.3, 0.2, 0.9], "mismatch/mean_abs_by_position": [0.04, 0.0, 0.5]},
    ]
    charts.mismatch_by_position([run_of(tmp_path / "a", rows)])
    largest, mean = drawn[0].lines
    assert largest.get_xydata().tolist() == [[0, 0.3], [1, 0.4], [2, 0.9]]
    assert mean.get_ydata().tolist() == pytest.approx([0.03, 0.02, 0.5])
    assert [label.get_text() for label in drawn[0].get_xticklabels()] == ["0", "1", "3"]


def test_bounds_come_with_targets_and_skipped_calibrations(tmp_path, drawn):
    run = read_run(write_run(tmp_path / "a", num_steps=12), "a")  # due at 4, skipped, and at 9
    chart = charts.bounds([run])
    assert chart.notes == ["1 of 2 calibrations skipped."]
    assert chart.details == ["step 4 skipped: 37 negative-advantage tokens, min_tokens is 100."]
    assert [entry.label for entry in chart.legend] == ["target of a calibration", "skipped calibration"]
    points = [line.get_xydata().tolist() for line in drawn[0].lines if line.get_marker() in ("o", "x")]
    assert points == [[[9, 0.8]], [[4, 0.6]], [[9, 1.7]], [[4, 1.8]]]


def test_bounds_that_never_move_say_why(tmp_path):
    rows = [metrics_line(0, random.Random(0))]
    off = run_of(tmp_path / "off", rows, run_config(tmp_path, calibration=None))
    assert charts.bounds([off]).notes == ["calibration is off, so the bounds stay."]
    loss = {"loss": {"type": "m2po"}}
    chosen = run_of(tmp_path / "chosen", rows, run_config(tmp_path, calibration=None, algorithm=loss))
    assert charts.bounds([chosen]).notes == ["the loss chooses its bounds for each mini-batch; these are the last's."]
    assert charts.bounds([run_of(tmp_path / "on", rows)]).notes == ["no calibration was due yet."]


def test_phases_add_up_to_the_step(tmp_path, drawn):
    from matplotlib.colors import to_hex

    times = {"time/rollout_s": 3.0, "time/update_s": 2.0, "time/step_s": 6.5}
    rows = [{"step": 0, **times}, {"step": 1, **times, "time/checkpoint_s": 1.0}]
    chart = charts.time_by_phase([run_of(tmp_path / "a", rows)])
    heights = {}
    for patch in drawn[0].patches:
        heights.setdefault(to_hex(patch.get_facecolor()), []).append(patch.get_height())
    assert [(entry.label, heights[entry.colour]) for entry in chart.legend] == [
        ("rollout", [3.0, 3.0]),
        ("update", [2.0, 2.0]),
        ("checkpoint", [0.0, 1.0]),
        ("other", [1.5, 0.5]),
    ]


def test_a_mismatch_that_is_no_number_is_not_passed_over(tmp_path):
    keys = "mismatch/max_abs_logprob_diff", "mismatch/max_abs_by_position"
    nan = float("nan")
    rows = [{"step": step, keys[0]: value, keys[1]: [value]} for step, value in enumerate([0.0, nan, 0.0])]
    run = run_of(tmp_path / "a", rows)
    assert charts.mismatch_by_step([run]).notes == ["exactly 0 on 2 of 3 steps; NaN or infinite on 1."]
    assert charts.mismatch_by_position([run]).notes == []
    assert summary_of(run)["largest mismatch"] == "NaN or infinite on 1 of 3 steps"
    assert f"NaN or infinite, left out of the figures: {keys[0]} (1 step), {keys[1]} (1 step)." in run.notes
    broken = run_of(tmp_path / "b", steps_of("loss/policy", [nan, nan]))
    assert draw_lines(line_charts.LOSS, [broken]).absent.endswith("has no loss/policy: its values are NaN or infinite.")
