"""Reading the folder of a run, whole, running or broken."""

import json

import pytest
from report_runs import sample_rows, write_rows, write_run

from octavo.report.runs import number, read_run, read_runs, setting, visible


def lines_of(folder, text: str | bytes):
    """The run of that metrics.jsonl."""
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_bytes(text.encode() if isinstance(text, str) else text)
    return read_run(folder, "a")


def test_a_finished_run_is_read_whole(tmp_path):
    run = read_run(write_run(tmp_path / "a", num_steps=12), "a")
    assert run.finished and run.steps_done == run.num_steps == 12 and run.notes == []
    assert run.series("policy/entropy_p90").steps == list(range(12))
    assert run.series("eval/initial_accuracy").values == [0.31]
    assert setting(run.config, "precision.recipe") == "block128" and "recipe: block128" in run.config_text
    assert len(run.samples) == 96 and run.resumes[0]["changes"] == ["device: cpu"]


def test_a_run_without_its_model_or_its_last_step_is_not_finished(tmp_path):
    folder = write_run(tmp_path / "a", num_steps=3)
    (folder / "model").rmdir()
    assert not read_run(folder, "a").finished
    (folder / "model").mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    assert not read_run(folder, "a").finished


@pytest.mark.parametrize(
    "text, steps, note",
    [
        ('{"step": 0}\n{"step": 1, "rew', [0], "the last line is half written and left out"),
        ('{"step": 0}\n{"step": 1}', [0, 1], None),
        ('{"step": 0}\nnonsense\n[1]\n{"step": 3}\n', [0, 3], "metrics.jsonl: 2 lines left out, no JSON object."),
        (b'{"step": 0}\n\0\0\0\0\n{"step": 2}\n', [0, 2], "metrics.jsonl: 1 line left out, no JSON object."),
        (b'{"step": 0}\n{"a": "\xff"}\n', [0], "1 line left out, no JSON object."),
        ('{"step": 0}\n' + "[" * 100_000 + "\n", [0], "1 line left out, no JSON object."),
        (
            '{"step": 0}\n{"a": 1}\n{"step": true}\n{"step": -1}\n{"step": 1e9}\n',
            [0],
            "4 lines left out, without a step.",
        ),
        ("", [], "metrics.jsonl holds no step."),
        ("\n\n", [], "metrics.jsonl holds no step."),
    ],
)
def test_damaged_lines_are_left_out_counted_and_said(tmp_path, text, steps, note):
    run = lines_of(tmp_path / "a", text)
    assert [line["step"] for line in run.lines] == steps
    said = [text for text in run.notes if "config.yaml" not in text]
    assert len(said) == (note is not None) and all(note in text for text in said), said


def test_a_missing_metrics_file_is_said(tmp_path):
    folder = write_run(tmp_path / "a")
    (folder / "metrics.jsonl").unlink()
    run = read_run(folder, "a")
    assert run.lines == [] and run.notes == ["metrics.jsonl is missing."] and run.last_written_s is None


def test_numbers_that_are_not_finite_are_left_out_of_a_series_and_said(tmp_path):
    rows = [{"step": s, "loss/policy": value} for s, value in enumerate([1.0, float("nan"), float("inf"), 4.0])]
    run = lines_of(tmp_path / "a", "".join(json.dumps(row) + "\n" for row in rows))
    assert run.series("loss/policy").steps == [0, 3] and run.series("loss/policy").values == [1.0, 4.0]
    assert "NaN or infinite, left out of the figures: loss/policy (2 steps)." in run.notes


def test_what_is_no_number_is_no_point():
    assert number(3) == 3.0 and number(-0.5) == -0.5
    assert [number(value) for value in (True, "1", None, [1], float("nan"), 10**400, 1e101)] == [None] * 7


def test_lists_keep_their_places(tmp_path):
    run = lines_of(tmp_path / "a", '{"step": 0, "k": [1, null, NaN, 2]}\n{"step": 1}\n{"step": 2, "k": 5}\n')
    assert run.lists("k") == [(0, [1.0, None, None, 2.0])]


def test_of_a_step_that_was_run_again_the_last_line_counts(tmp_path):
    steps = [0, 1, 2, 3, 2, 3, 4]
    run = lines_of(tmp_path / "a", "".join(f'{{"step": {s}, "place": {i}}}\n' for i, s in enumerate(steps)))
    assert [(line["step"], line["place"]) for line in run.lines] == [(0, 0), (1, 1), (2, 4), (3, 5), (4, 6)]
    assert "metrics.jsonl: 2 lines replaced by steps that were run again." in run.notes


def test_steps_after_the_point_of_resume_are_gone_until_they_are_run_again(tmp_path):
    run = lines_of(tmp_path / "a", "".join(f'{{"step": {s}}}\n' for s in (0, 1, 2, 3, 4, 2)))
    assert run.steps_done == 3


def test_samples_of_a_resumed_run_are_those_of_the_steps_run_again(tmp_path):
    folder = write_run(tmp_path / "a")
    rows = [row for step in (0, 1, 2) for row in sample_rows(step, "before")] + sample_rows(1, "after")
    write_rows(folder / "samples.jsonl", rows)
    samples = read_run(folder, "a").samples
    assert [(row["step"], row["completion"].split()[0]) for row in samples] == [(0, "before")] * 8 + [(1, "after")] * 8


@pytest.mark.parametrize(
    "content, note",
    [
        (b"a: [1", "config.yaml is damaged: while parsing"),
        (b"- 1\n", "config.yaml is damaged: it holds no keys."),
        (b"", "config.yaml is damaged: it holds no keys."),
        (b"\x00\xff\xfe", "config.yaml is damaged:"),
    ],
)
def test_a_damaged_config_is_said_and_the_rest_is_read(tmp_path, content, note):
    folder = write_run(tmp_path / "a")
    (folder / "config.yaml").write_bytes(content)
    run = read_run(folder, "a")
    assert run.config == {} and len(run.lines) == 12
    assert len(run.notes) == 1 and run.notes[0].startswith(note) and "\n" not in run.notes[0]


def test_what_is_no_run_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name, came in (("empty", "a folder without them"), ("file", "a file"), ("nowhere", "nothing there")):
        with pytest.raises(ValueError, match=f"{name} is no run: .*got {came}. Give the output_dir"):
            read_runs([tmp_path / name])


def test_runs_are_told_apart_by_their_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = [write_run(tmp_path / name).relative_to(tmp_path) for name in ("x/a", "y/a", "x/b")]
    assert [run.name for run in read_runs(folders)] == ["x/a", "y/a", "b"]
    with pytest.raises(ValueError, match="is given twice"):
        read_runs([folders[0], tmp_path / "x/../x/a"])


def test_text_for_a_page_hides_nothing():
    assert visible("a\nb\tc") == "a\nb\tc"
    assert visible("\x00\x1b[31m\x7f") == "␀␛[31m␡"
    assert visible("\u202eabc\u2066") == "<U+202E>abc<U+2066>"
    assert visible("\ud83d") == "\ufffd" and visible("\U0001f980") == "\U0001f980"
