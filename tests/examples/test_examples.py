"""Every example trains: its own settings for a step, on a model and a task that a CPU can do."""

from pathlib import Path

import pytest
from rich.console import Console
from training_runs import TINY_MODEL, read_lines

from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import load_config
from octavo.trainer.metrics import Display
from octavo.trainer.train import train

EXAMPLES = sorted((Path(__file__).resolve().parents[2] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_makes_a_step(path, tmp_path):
    config = load_config(TrainConfig, path)
    mini_batches = config.trainer.num_mini_batches
    overrides = [
        f"output_dir={tmp_path / 'run'}",
        f"model.path={TINY_MODEL}",
        "model.enable_thinking=null",
        "device=cpu",
        "task={type: arithmetic, num_train: 32, num_test: 8}",
        f"rollout.prompts_per_step={mini_batches}",
        "rollout.group_size=2",
        "rollout.max_prompt_tokens=16",
        "rollout.max_completion_tokens=16",
        "rollout.engine={page_size: 4, kv_cache_tokens: 1024}",
        f"algorithm.overlong.buffer_tokens={min(8, config.algorithm.overlong.buffer_tokens)}",
        "critic.warmup_steps=0",
        "evaluation.sets=[]",
        "trainer.num_steps=1",
    ]
    train(load_config(TrainConfig, path, overrides), Display(Console(quiet=True)))
    (line,) = read_lines(tmp_path / "run/metrics.jsonl")
    assert line["policy_version"] == 0 and line["mismatch/max_abs_logprob_diff"] == 0.0
    assert ("eval/accuracy" in line) == (config.evaluation.interval > 0) and (
        tmp_path / "run/model/config.json"
    ).is_file()
