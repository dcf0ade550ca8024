"""Runs that break: weights are damaged from outside after a step, once, and never again after a rollback."""

import torch
from training_runs import tiny_config

from octavo.trainer import train


def watched_run(folder, action, **changes):
    """A run of 14 short steps whose detector is ready after 8."""
    settings = {
        "rollout__prompts_per_step": 2,
        "rollout__group_size": 4,
        "calibration": None,
        "optimizer__lr": 2e-4,
        "trainer": {"num_steps": 14, "num_mini_batches": 2, "shadow_interval": 0},
        "evaluation": {"interval": 7, "num_problems": 8},
        "checkpoint": {"interval": 2, "keep_last": 1, "keep_best": False},
        "watch": {"action": action, "window": 8, "warmup": 8, "margin_steps": 2},
    }
    return tiny_config(folder, **(settings | changes))


def damage_after(monkeypatch, num_steps, size=3.0, rollbacks=(0,)):
    """Add noise of `size` standard deviations to every matrix once `num_steps` are done, after these rollbacks."""
    one_step = train.one_step

    def damaged(session):
        pending = one_step(session)
        progress = session.progress
        if progress.next_step + 1 == num_steps and progress.rollbacks in rollbacks:
            generator = torch.Generator().manual_seed(num_steps)
            with torch.no_grad():
                for parameter in session.run.policy.parameters():
                    if parameter.ndim > 1:
                        noise = torch.randn(parameter.shape, generator=generator)
                        parameter += size * parameter.std() * noise
            for decoder in session.active_run.decoders:
                decoder.requantize_()
        return pending

    monkeypatch.setattr(train, "one_step", damaged)
