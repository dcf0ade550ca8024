"""The command line as a user meets it: what it prints, what it leaves, and one clear line for each mistake."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from octavo import cli

REPO = Path(__file__).resolve().parents[1]
TINY_MODEL = REPO / "examples/tiny/model"

SMALL = """
output_dir: {folder}/run
model: {{path: {model}}}
task: {{type: arithmetic, num_train: 32, num_test: 32}}
rollout: {{prompts_per_step: 2, group_size: 2, max_prompt_tokens: 16, max_completion_tokens: 16,
          engine: {{kv_cache_tokens: 1024}}}}
trainer: {{num_steps: 1}}
evaluation: {{interval: 1, num_problems: 8}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(SMALL.format(folder=tmp_path, model=TINY_MODEL))
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


MISTAKES = {
    "unknown key": ("rollout.top_pp=0.9", ["rollout.top_pp", "0.9", "sampling"]),
    "unknown key, near miss": ("optimizer.lrr=1e-6", ["optimizer.lrr", "Did you mean lr?"]),
    "wrong type": ("trainer.num_steps=2.0", ["trainer.num_steps", "integer", "2.0"]),
    "wrong type, text": ("optimizer.lr=fast", ["optimizer.lr", "number", "fast"]),
    "no equals sign": ("trainer.num_steps", ["trainer.num_steps", "="]),
    "unknown recipe": ("precision.recipe=fp4", ["precision.recipe", "fp4", "block128"]),
    "kv_cache of another recipe": ("precision.kv_cache=fp32", ["kv_cache", "fp32", "bf16"]),
    "keep_bf16 names nothing": (
        "precision.keep_bf16=[gate]",
        ["keep_bf16", "'gate'", "names no module"],
    ),
    "top_p in training": ("rollout.sampling.top_p=0.9", ["top_p", "0.9", "biases", "top_p: 1.0"]),
    "top_k in training": ("rollout.sampling.top_k=50", ["top_k", "50", "top_k: 0"]),
    "greedy training": ("rollout.sampling.temperature=0", ["temperature", "greedy"]),
    "calibration with one update": ("trainer.num_mini_batches=1", ["num_mini_batches=1", "calibration: null"]),
    "group of one with std": ("rollout.group_size=1", ["rollout.group_size=1", "scale_by_std", ">= 2"]),
    "mini-batches that do not divide": ("rollout.prompts_per_step=3", ["prompts_per_step=3", "num_mini_batches=2"]),
    "k1 as a penalty": ("algorithm.kl={coefficient: 0.1, estimator: k1}", ["algorithm.kl", "k1", "k3"]),
    "clip out of range": ("algorithm.clip.clip_low=1.2", ["clip_low", "1.2"]),
    "model folder missing": ("model.path=./nowhere", ["model.path", "./nowhere", "Hugging Face"]),
    "model folder without a model": ("model.path={empty}", ["model.path", "config.json"]),
    "sequences beyond the model": ("rollout.max_completion_tokens=500", ["256 positions", "max_completion_tokens"]),
    "cache too small": ("rollout.engine.kv_cache_tokens=16", ["kv_cache_tokens=16", "32", "Raise"]),
    "no chat template": ("model.chat_template=always", ["chat template", "auto"]),
    "no prompt fits": ("rollout.max_prompt_tokens=2", ["2", "prompt"]),
    "data missing": ("task={type: gsm8k, path: ./no-data}", ["./no-data", "train.jsonl"]),
    "unknown task": ("task={type: chess}", ["task", "chess", "arithmetic", "gsm8k"]),
    "too many problems": ("task.num_test=10000000", ["num_test=10000000", "fewer"]),
    "cache that no machine has": ("rollout.engine.kv_cache_tokens=999999999999999", ["GB", "kv_cache_tokens"]),
    "no such device": ("device=foo", ["device='foo'", "cpu"]),
    "a device without numbers": ("device=meta", ["device='meta'", "cpu"]),
    "no output folder": ("output_dir=", ["output_dir is empty"]),
    "broken generation config": ("model.path={broken}", ["generation_config.json", "stop tokens"]),
    "wandb is not installed": ("tracking.wandb_project=mine", ["tracking.wandb_project='mine'", "octavo[wandb]"]),
    "wandb run without project": ("tracking.wandb_name=x", ["tracking", "wandb_name='x'", "wandb_project"]),
    "output is a file": ("output_dir={file}/run", ["output_dir", "cannot be written"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_that_names_it_and_exit_code_2(mistake, config, monkeypatch, capsys, tmp_path):
    (tmp_path / "empty").mkdir()
    monkeypatch.setitem(sys.modules, "wandb", None)  # as where it is not installed
    override, wanted = MISTAKES[mistake]
    override = override.replace("{empty}", str(tmp_path / "empty")).replace("{file}", str(config))
    if "{broken}" in override:
        shutil.copytree(TINY_MODEL, tmp_path / "broken")
        (tmp_path / "broken/generation_config.json").write_text("{broken")
        override = override.replace("{broken}", str(tmp_path / "broken"))
    assert run(monkeypatch, "train", config, override) == 2
    error = capsys.readouterr().err
    assert error.startswith("octavo: ") and error.count("\n") == 1, error
    for text in wanted:
        assert text in error, f"{text!r} is not in {error!r}"
    assert not (tmp_path / "run").exists()


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
    monkeypatch.setattr("octavo.trainer.run.shutil.disk_usage", lambda path: type("Usage", (), {"free": 10**6}))
    assert run(monkeypatch, "train", config) == 2
    assert "1 MB free; the trained model alone takes 4 MB" in capsys.readouterr().err


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

    monkeypatch.setattr("octavo.trainer.loop.train_step", interrupted)
    assert run(monkeypatch, "train", config) == 130
    assert "interrupted" in capsys.readouterr().err
    assert (config.parent / "run/metrics.jsonl").exists()
