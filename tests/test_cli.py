"""The command line as a user meets it: what it prints, what it leaves, and one clear line for each mistake."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from training_runs import SMALL, TINY_MODEL

from octavo import cli

REPO = Path(__file__).resolve().parents[1]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(SMALL.format(here=tmp_path, model=TINY_MODEL))
    return file


def run(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["octavo", *map(str, arguments)])
    monkeypatch.delenv("OCTAVO_TRACEBACK", raising=False)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code or 0


def test_train_prints_a_line_a_step_and_says_where_things_are(config, monkeypatch, capsys):
    assert run(monkeypatch, "train", config) == 0
    out = capsys.readouterr().out
    assert "step    1/1" in out and "mismatch 0 " in out and "metrics.jsonl" in out
    (line,) = (config.parent / "run/metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["policy_version"] == 0
    assert run(monkeypatch, "train", config) == 2
    assert "holds an earlier run" in capsys.readouterr().err
    assert run(monkeypatch, "train", config, "overwrite=true") == 0


def test_evaluate_prints_json_and_writes_every_completion(config, monkeypatch, capsys, tmp_path):
    output = tmp_path / "samples.jsonl"
    assert run(monkeypatch, "evaluate", config, "--output", output) == 0
    metrics = json.loads(capsys.readouterr().out.splitlines()[-1])
    samples = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(samples) == 8
    assert metrics["eval/accuracy"] == sum(sample["reward"] for sample in samples) / 8


def test_generate_prints_what_the_model_says(monkeypatch, capsys):
    arguments = ("generate", TINY_MODEL, "17+48-20=", "--max-tokens", 16, "--temperature", 0, "--group-size", 2)
    assert run(monkeypatch, *arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[0] == lines[2] and lines[0].startswith("17+48-20=")
    assert "tokens" in lines[1] and "mean logprob" in lines[1]


def test_report_writes_a_page_on_a_run(config, monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "train", config) == 0
    assert run(monkeypatch, "report", tmp_path / "run") == 0
    assert capsys.readouterr().out.endswith(f"done: {tmp_path}/run/report.html\n")
    page = (tmp_path / "run/report.html").read_text()
    assert "<td>finished</td>" in page and "exactly 0 on all 1 steps." in page and "<td>1 of 1</td>" in page


def test_report_of_what_is_no_run_is_one_line(monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "report", tmp_path) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"octavo: {tmp_path} is no run") and error.count("\n") == 1
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    for output in (tmp_path, tmp_path / "no/folder/x.html"):
        assert run(monkeypatch, "report", tmp_path, "--output", output) == 2
        assert str(output) in capsys.readouterr().err


def test_a_folder_that_no_run_left_is_not_touched(config, monkeypatch, capsys, tmp_path):
    precious = tmp_path / "mine/model/thesis.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("three years")
    for overwrite in ("false", "true"):
        assert run(monkeypatch, "train", config, f"output_dir={tmp_path / 'mine'}", f"overwrite={overwrite}") == 2
        assert "was not left by a run" in capsys.readouterr().err
    assert precious.read_text() == "three years"


def test_a_model_inside_the_output_folder_is_not_trained_over(config, monkeypatch, capsys, tmp_path):
    assert run(monkeypatch, "train", config) == 0
    assert run(monkeypatch, "train", config, f"model.path={tmp_path}/run/model", "overwrite=true") == 2
    assert "lies inside output_dir" in capsys.readouterr().err
    assert (tmp_path / "run/model/config.json").is_file()


def test_too_small_a_disk_is_said_before_the_first_step(config, monkeypatch, capsys):
    monkeypatch.setattr("octavo.trainer.output.shutil.disk_usage", lambda path: type("Usage", (), {"free": 10**6}))
    assert run(monkeypatch, "train", config) == 2
    error = capsys.readouterr().err
    assert "1 MB free; the trained model takes 4 MB and each of 4 checkpoints 22 MB" in error
    assert not (config.parent / "run").exists()


def test_samples_go_to_a_plain_file_only(config, monkeypatch, capsys, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for output in (tmp_path / "link", tmp_path, "/dev/null", tmp_path / "no/folder/x.jsonl"):
        assert run(monkeypatch, "evaluate", config, "--output", output) == 2
        assert str(output) in capsys.readouterr().err


@pytest.mark.parametrize("command", ["train", "evaluate"])
def test_a_missing_config_file_is_named(command, monkeypatch, capsys):
    assert run(monkeypatch, command, "no/such.yaml") == 2
    assert "no/such.yaml" in capsys.readouterr().err


def test_bad_arguments_of_generate_are_named(monkeypatch, capsys):
    assert run(monkeypatch, "generate", TINY_MODEL, "1+1=", "--top-p", 2) == 2
    assert "top_p is in (0, 1]; got 2.0" in capsys.readouterr().err
    assert run(monkeypatch, "generate", TINY_MODEL, "1+1=", "--recipe", "int8") == 2
    assert "'int8'" in capsys.readouterr().err


def test_interrupt_says_so_and_keeps_what_was_logged(config, monkeypatch, capsys):
    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("octavo.trainer.train.train_step", interrupted)
    assert run(monkeypatch, "train", config) == 130
    assert "interrupted" in capsys.readouterr().err
    assert (config.parent / "run/metrics.jsonl").exists()


def test_describe_needs_no_weights_and_no_task(config, monkeypatch, capsys, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(TINY_MODEL / "config.json", bare)
    task = "task={type: gsm8k, path: ./no-data}"
    assert run(monkeypatch, "describe", config, f"model.path={bare}", task, "precision.train=bf16") == 0
    out = capsys.readouterr().out
    assert "self_attn.q_proj, k_proj, v_proj" in out and "Rollout / training differ, which octavo train refuses" in out
    assert "train: recipe 'bf16' quantises nothing: layers 0-2: self_attn.q_proj, k_proj, v_proj, " in out


def test_describe_writes_what_a_run_leaves_and_compares(config, monkeypatch, capsys, tmp_path):
    flow, picture = tmp_path / "flow.json", tmp_path / "flow.svg"
    assert run(monkeypatch, "train", config) == 0
    left = tmp_path / "run/precision.json"
    arguments = ("describe", config, "--json", flow, "--picture", picture, "--against", left)
    assert run(monkeypatch, *arguments) == 0
    assert "0 groups of modules differ from" in capsys.readouterr().out
    assert flow.read_text() == left.read_text() and "<svg" in picture.read_text()
    assert run(monkeypatch, "describe", config, "precision.kv_cache=bf16", "--json", "-", "--against", config) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["graphs"][0]["role"] == "rollout"
    assert "precision.kv_cache: 'bf16' / null" in captured.err
    assert "fprop K bf16 / e4m3 row (2^n scale) (rollout, old, train)" in captured.err


@pytest.mark.parametrize(
    "option, file, wanted",
    [
        ("--picture", "flow.pdf", "neither .svg nor .png"),
        ("--picture", "no/folder/flow.png", "--picture no/folder/flow.png lies in a folder that does not exist"),
        ("--json", "no/folder/flow.json", "--json no/folder/flow.json lies in"),
        ("--against", "missing.yaml", "missing.yaml: cannot be read"),
        ("--against", "missing.json", "missing.json"),
    ],
)
def test_bad_arguments_of_describe_are_named(option, file, wanted, config, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "describe", config, option, file) == 2
    error = capsys.readouterr().err
    assert wanted in error and error.count("\n") == 1


@pytest.mark.parametrize("seconds", [0.0, 0.5, 1.0])
def test_ctrl_c_while_libraries_load_ends_at_once(seconds, config, tmp_path):
    command = [sys.executable, "-m", "octavo.cli", "train", config, "trainer.num_steps=1000"]
    process = subprocess.Popen(command, cwd=REPO, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():  # until torch begins to load
        assert process.poll() is None
        time.sleep(0.01)
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in error, error
    assert error.strip().splitlines()[-1].startswith("octavo: "), error


def octavo(*arguments, **settings):
    command = [sys.executable, "-m", "octavo.cli", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", **settings.pop("environment", {})}
    return subprocess.run(command, env=environment, capture_output="stdout" not in settings, **settings)


def test_evaluate_prints_nothing_but_json(config):
    result = octavo("evaluate", config)
    assert result.returncode == 0 and json.loads(result.stdout)["eval/num_problems"] == 8
    assert b"task: arithmetic" in result.stderr


def test_a_locale_without_a_letter_stops_nothing():
    result = octavo("generate", TINY_MODEL, "\u00fc1+1=", environment={"PYTHONIOENCODING": "ascii"})
    assert result.returncode == 0 and result.stdout.startswith(b"\\xfc1+1="), result.stderr


def test_a_closed_output_stops_nothing(config):
    script = f'exec {sys.executable} -m octavo.cli describe "$1" >&-'
    result = subprocess.run(
        ["sh", "-c", script, "sh", config], env={**os.environ, "PYTHONPATH": str(REPO)}, stderr=subprocess.PIPE
    )
    assert (result.returncode, result.stderr) == (0, b"")


def test_a_full_disk_under_the_output_stops_no_training(config):
    with open("/dev/full", "w") as full:
        octavo("train", config, stdout=full, stderr=subprocess.PIPE)
    assert len((config.parent / "run/metrics.jsonl").read_text().splitlines()) == 1
    assert (config.parent / "run/model/config.json").is_file()


def test_octavo_alone_lists_its_commands(monkeypatch, capsys):
    run(monkeypatch)
    captured = capsys.readouterr()
    for name in ("train", "evaluate", "generate", "check", "describe", "report"):
        assert name in captured.out + captured.err
