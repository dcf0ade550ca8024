"""Small training runs, how to start them in a process of their own, and how to compare what they left."""

import json
import os
import sys
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import load_file

from octavo.trainer import rollout
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import from_dict
from octavo.trainer.metrics import Display
from octavo.trainer.train import train

TINY_MODEL = Path(__file__).resolve().parents[1] / "examples/tiny/model"

SMALL = """
output_dir: {here}/run
model: {{path: {model}}}
task: {{type: arithmetic, num_train: 32, num_test: 32}}
rollout: {{prompts_per_step: 2, group_size: 2, max_prompt_tokens: 16, max_completion_tokens: 16,
          engine: {{kv_cache_tokens: 1024}}}}
trainer: {{num_steps: 1}}
evaluation: {{interval: 1, num_problems: 8}}
"""
"""A config file that works."""


def tiny_config(folder: Path, **changes: object) -> TrainConfig:
    """A run of a few seconds; `changes` are dotted keys with `__` for the dot."""
    data = {
        "output_dir": str(folder),
        "model": {"path": str(TINY_MODEL)},
        "task": {"type": "arithmetic", "num_train": 64, "num_test": 32},
        "rollout": {
            "prompts_per_step": 4,
            "group_size": 4,
            "max_prompt_tokens": 16,
            "max_completion_tokens": 16,
            "engine": {"page_size": 4, "kv_cache_tokens": 2048},
        },
        "calibration": {"interval": 2, "pooled_steps": 2, "min_tokens": 5, "min_clipped": 0},
        "optimizer": {"lr": 1e-3},
        "trainer": {"num_steps": 4, "num_mini_batches": 2, "shadow_interval": 1},
        "evaluation": {"interval": 4, "num_problems": 16},
    }
    for key, value in changes.items():
        section = data
        *parents, name = key.split("__")
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = value
    return from_dict(TrainConfig, data, "test")


def read_lines(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def without_times(lines: list[dict]) -> list[dict]:
    return [{key: value for key, value in line.items() if not key.startswith(("time/", "memory/"))} for line in lines]


def same_run(folder: Path, other: Path) -> None:
    """Metrics but for times, samples, trained weights and the last checkpoint's tensors are equal to the bit."""
    lines = without_times(read_lines(folder / "metrics.jsonl"))
    others = without_times(read_lines(other / "metrics.jsonl"))
    assert [line["step"] for line in lines] == [line["step"] for line in others]
    for line, wanted in zip(lines, others, strict=True):
        assert line == wanted, {key: (line.get(key), wanted[key]) for key in wanted if line.get(key) != wanted[key]}
    assert (folder / "samples.jsonl").read_bytes() == (other / "samples.jsonl").read_bytes()
    files = sorted(path.relative_to(other) for path in other.rglob("*.safetensors"))
    newest = max(path.parts[1] for path in files if path.parts[0] == "checkpoints")
    compared = 0
    for file in files:
        if file.parts[0] == "model" or newest in file.parts:
            mine, theirs = load_file(folder / file), load_file(other / file)
            assert mine.keys() == theirs.keys()
            for name in theirs:
                assert torch.equal(mine[name], theirs[name]), f"{file}: {name}"
                compared += theirs[name].numel()
    assert compared > 5_000_000, "the weights were not compared"


def half_right(monkeypatch) -> None:
    """Score every second completion of a group as right, whatever it says: a group then always has both signs of A."""

    def alternating(scored):
        return torch.tensor([[float(index % 2) for index in range(len(group))] for group in scored])

    monkeypatch.setattr(rollout, "score", alternating)


def resumable(folder, **changes):
    """A run of four steps with a checkpoint after each."""
    settings = {"trainer__num_steps": 4, "optimizer__lr": 2e-4, "evaluation__interval": 2, "checkpoint__interval": 1}
    return tiny_config(folder, **(settings | changes))


def run(config, **options):
    """Train; what was printed."""
    with open(os.devnull, "w") as nowhere:
        console = Console(file=nowhere, record=True, width=300)
        train(config, Display(console), **options)
        return console.export_text()


def in_a_child(work, *arguments) -> int:
    """Runs work(*arguments) in a forked process; its exit code, or the negative number of the signal that killed it."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work(*arguments)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train_quietly(config: TrainConfig, log: Path, **options: bool) -> None:
    """`train`, its lines appended to a file."""
    with log.open("a") as file:
        train(config, Display(Console(file=file, width=200)), **options)


def signal_at(monkeypatch, owner, name, call, number):
    """Send this process a signal at a call of owner.name."""
    original, left = getattr(owner, name), [call]

    def signalling(*arguments, **keywords):
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), number)
        return original(*arguments, **keywords)

    monkeypatch.setattr(owner, name, signalling)
