"""A run that is killed with SIGKILL, again and again, ends as if nothing had happened."""

import os
import random
import signal
import threading
from pathlib import Path

from training_runs import in_a_child, read_lines, same_run, tiny_config, train_quietly

from octavo.rollout.decode import DecodeSteps
from octavo.trainer import checkpoint, loop
from octavo.trainer.optimizer import Optimizer
from octavo.trainer.output import JsonLines

NUM_STEPS = 24
MOMENTS = {  # owner, function, most calls before the kill: less than two steps have
    "rollout": [(DecodeSteps, "start", 25)],
    "update": [(loop, "accumulate", 3), (Optimizer, "step", 3), (loop, "measure_shadow", 2)],
    "checkpoint write": [
        (checkpoint, "_save_tensors", 4),
        (checkpoint, "_sync", 9),
        (checkpoint, "_sha256", 6),
        (checkpoint, "_remove", 2),
        (Path, "rename", 4),
        (JsonLines, "_write", 6),
    ],
    "any": [],
}


def small_run(folder, **changes):
    return tiny_config(
        folder,
        rollout__prompts_per_step=2,
        rollout__group_size=2,
        trainer__num_steps=NUM_STEPS,
        optimizer__lr=2e-4,
        evaluation={"interval": 5, "num_problems": 8},
        checkpoint={"interval": 1, "keep_last": 2},
        **changes,
    )


def killed_at(config, log, owner, name, calls, after):
    """Train in this process and kill it at a call of owner.name, before or after it ran."""
    original = getattr(owner, name)
    left = [calls]

    def counted(*arguments, **keywords):
        left[0] -= 1
        if left[0] == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = original(*arguments, **keywords)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, counted)
    train_quietly(config, log, resume=True)


def killed_after(config, log, seconds):
    """Train in this process and kill it from another thread."""
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
    train_quietly(config, log, resume=True)


def test_twenty_kills_at_random_moments_change_no_bit(tmp_path):
    config, log, rng = small_run(tmp_path / "killed"), tmp_path / "log", random.Random(3)
    for kill in range(20):
        phase = list(MOMENTS)[kill % len(MOMENTS)]
        if phase == "any":
            code = in_a_child(killed_after, config, log, rng.uniform(0.1, 2.0))
        else:
            owner, name, most = rng.choice(MOMENTS[phase])
            code = in_a_child(killed_at, config, log, owner, name, rng.randint(1, most), rng.random() < 0.5)
        assert code == -signal.SIGKILL, f"kill {kill}, {phase}, did not come: {log.read_text()[-2000:]}"
    assert in_a_child(lambda: train_quietly(config, log, resume=True)) == 0, log.read_text()[-2000:]
    assert in_a_child(lambda: train_quietly(small_run(tmp_path / "whole"), log)) == 0
    same_run(tmp_path / "killed", tmp_path / "whole")
    assert len(read_lines(tmp_path / "killed/resumes.jsonl")) >= 10, "the kills came before any checkpoint"
