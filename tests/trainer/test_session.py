"""What a session puts back beside weights: the global generators, and a folder without the rests of a kill."""

import random
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from training_runs import read_lines, signal_at, tiny_config, train_quietly

from octavo.trainer import loop, rollout
from octavo.trainer.interrupt import Interrupted


def test_a_reward_that_draws_random_numbers_resumes_to_the_bit(tmp_path, monkeypatch):
    score = rollout.score

    def noisy(scored):
        return score(scored) + random.random() + np.random.rand() + torch.rand(())

    def reseed(number):
        random.seed(number)
        np.random.seed(number)
        torch.manual_seed(number)

    def rewards(folder):
        return [line["reward/mean"] for line in read_lines(folder / "metrics.jsonl")]

    monkeypatch.setattr(rollout, "score", noisy)
    config, log = tiny_config(tmp_path / "run", evaluation__interval=0, trainer__num_steps=3), tmp_path / "log"
    reseed(1)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        signal_at(patch, loop, "annotate", 4, signal.SIGTERM)  # the second step has drawn, and will again
        train_quietly(config, log)
    (tmp_path / "run/checkpoints/step_000002.partial").mkdir()
    (tmp_path / "run/checkpoints/step_000000.removed").mkdir()
    reseed(2)
    train_quietly(config, log, resume=True)
    assert sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir()) == ["step_000001", "step_000003"]
    reseed(1)
    train_quietly(tiny_config(tmp_path / "whole", evaluation__interval=0, trainer__num_steps=3), log)
    assert rewards(tmp_path / "run") == rewards(tmp_path / "whole") and len(set(rewards(tmp_path / "run"))) == 3


def test_a_rollout_is_sampled_from_bytes_that_know_their_version_after_a_resume_too(tmp_path, monkeypatch):
    sample, versions = rollout.sample, []

    def seen(run, *arguments):
        versions.append(run.engine.decoder.policy_version)
        return sample(run, *arguments)

    monkeypatch.setattr(rollout, "sample", seen)
    config, log = tiny_config(tmp_path / "run", evaluation__interval=0, trainer__num_steps=2), tmp_path / "log"
    train_quietly(config, log)
    longer = replace(config, trainer=replace(config.trainer, num_steps=3))
    train_quietly(longer, log, resume=True, allow_changes=True)
    assert versions == [0, 2, 4]
