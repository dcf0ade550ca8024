"""benchmarks/real_runs.py: what finished runs show, and what it refuses."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import yaml

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def real_runs(monkeypatch, tmp_path):
    """The script's module; results go to tmp_path, without pictures."""
    spec = importlib.util.spec_from_file_location("real_runs", REPO / "benchmarks/real_runs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(module, "draw", lambda *_: None)
    return module


def lines_of_a_run(num_steps):
    """Accuracy from 0.2 to 0.8 of 100 problems; a step of 2 s after five of 60."""
    lines = [
        {
            "step": step,
            "reward/mean": step / 10,
            "mismatch/max_abs_logprob_diff": 0.0,
            "overclip/low_share": 0.25,
            "clip/low": 0.6,
            "clip/high": 1.8,
            "rollout/num_tokens": 100,
            "time/rollout_s": 0.5,
            "time/step_s": 2.0 if step >= 5 else 60.0,
        }
        for step in range(num_steps)
    ]
    lines[0] |= {"eval/initial_accuracy": 0.2}
    lines[-1] |= {"eval/accuracy": 0.8, "eval/num_problems": 100}
    return lines


def write_run(folder, lines):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    settings = {"output_dir": str(folder), "model": {"path": str(REPO / "examples/tiny/model")}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings | {"task": {"type": "arithmetic"}}))
    return folder


def run_script(module, monkeypatch, *args):
    monkeypatch.setattr(sys, "argv", ["real_runs.py", *map(str, args)])
    module.main()


def test_figures_of_two_seeds(real_runs, monkeypatch, tmp_path):
    runs = [write_run(tmp_path / f"mine_{seed}", lines_of_a_run(8)) for seed in (0, 1)]
    run_script(real_runs, monkeypatch, "easy", *runs)
    rows = json.loads((tmp_path / "out/easy.json").read_text())["rows"]
    found = {row["metric"]: row["value"] for row in rows if row["case"] == "easy/mine"}
    assert (found["accuracy_start"], found["accuracy_end"], found["mismatch_max"]) == (0.2, 0.8, 0.0)
    assert found["gain_in_standard_errors"] == pytest.approx(0.6 / (2 * 0.16 / 100) ** 0.5)
    assert (found["step_s"], found["rollout_tok_s"], found["overclip/low_share"]) == (2.0, 200.0, 0.25)
    assert len((tmp_path / "out/curves/easy/mine_1.jsonl").read_text().splitlines()) == 8


def test_where_every_answer_was_right_there_is_no_error_to_gain_by(real_runs):
    lines = lines_of_a_run(8)
    lines[0]["eval/initial_accuracy"] = lines[-1]["eval/accuracy"] = 1.0
    assert "gain_in_standard_errors" not in real_runs.figures(lines)


@pytest.mark.parametrize(
    "lines, why",
    [
        (None, "has no metrics.jsonl"),
        ([], "has 0 steps, of which the first 5 are not timed"),
        (lines_of_a_run(5), "has 5 steps"),
        (lines_of_a_run(8)[1:], "was not evaluated before and after"),
        (lines_of_a_run(8)[:-1], "was not evaluated before and after"),
    ],
)
def test_a_folder_that_shows_nothing_is_refused_in_a_line(real_runs, monkeypatch, tmp_path, capsys, lines, why):
    folder = tmp_path / "run_0" if lines is None else write_run(tmp_path / "run_0", lines)
    with pytest.raises(SystemExit) as stop:
        run_script(real_runs, monkeypatch, "easy", folder)
    assert stop.value.code == 2 and why in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_without_runs_there_must_be_curves(real_runs, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run_script(real_runs, monkeypatch, "easy")
    assert "no curves lie in" in capsys.readouterr().err
