"""What a step runs with which weights, in which order; where weights, seeds, temperature and statistics go."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from octavo.models.checkpoint import load_decoder
from octavo.numerics.recipe import get_recipe
from octavo.rl.losses import KLConfig
from octavo.trainer import loop
from octavo.trainer import shadow as shadow_of
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import from_dict
from octavo.trainer.divergence import StepRecord
from octavo.trainer.metrics import Display
from octavo.trainer.policy import packed_logprobs
from octavo.trainer.progress import Progress
from octavo.trainer.rollout import pack, sample
from octavo.trainer.run import Run, load_reference, load_run, make_optimizer

TINY_MODEL = Path(__file__).resolve().parents[2] / "examples/tiny/model"
TEMPERATURE = 0.7


def make_run(tmp_path, **model) -> Run:
    data = {
        "output_dir": str(tmp_path / "run"),
        "model": {"path": str(TINY_MODEL), **model},
        "task": {"type": "arithmetic", "num_train": 64, "num_test": 8},
        "rollout": {
            "prompts_per_step": 4,
            "group_size": 4,
            "max_prompt_tokens": 16,
            "max_completion_tokens": 16,
            "sampling": {"temperature": TEMPERATURE},
            "engine": {"kv_cache_tokens": 2048},
        },
        "calibration": {"interval": 2, "pooled_steps": 2, "min_tokens": 1, "min_clipped": 0},
        "optimizer": {"lr": 1e-3},
        "trainer": {"num_steps": 4, "num_mini_batches": 2, "shadow_interval": 0},
    }
    return load_run(from_dict(TrainConfig, data, "test"), Display())


@pytest.fixture
def spied_step(tmp_path, monkeypatch):
    """One step with every packed forward recorded: (shadow, optimiser steps so far, temperature, logprobs)."""
    run = make_run(tmp_path)
    optimizer = make_optimizer(run)
    calls = []

    def spy(decoder, microbatch, temperature, *, shadow=False):
        logprobs, entropy = packed_logprobs(decoder, microbatch, temperature, shadow=shadow)
        calls.append((shadow, optimizer.update, temperature, microbatch, logprobs.detach()))
        return logprobs, entropy

    for user in (loop, shadow_of):
        monkeypatch.setattr(user, "packed_logprobs", spy)
    progress = Progress(bounds=run.config.start_bounds())
    metrics = loop.train_step(run, optimizer, None, progress, StepRecord(step=0))
    return run, optimizer, calls, metrics, progress.pool


def test_forwards_run_in_order_with_the_weights_they_should(spied_step):
    _, optimizer, calls, _, _ = spied_step
    assert [(shadow, update) for shadow, update, *_ in calls] == [
        (False, 0),  # old logprobs of the first mini-batch
        (False, 0),  # and of the last
        (True, 0),  # BF16 shadow of the last, before any update
        (False, 0),  # the first mini-batch, then its update
        (False, 1),  # the last mini-batch
        (True, 1),  # its shadow, before its update
    ]
    assert optimizer.update == 2
    assert all(temperature == TEMPERATURE for _, _, temperature, *_ in calls)
    last = calls[1][3].tokens
    assert all(torch.equal(calls[i][3].tokens, last) for i in (2, 4, 5)) and not torch.equal(calls[0][3].tokens, last)


def test_shadow_is_the_model_in_bf16(spied_step):
    _, _, calls, metrics, _ = spied_step
    shadow_old = calls[2]
    bf16 = load_decoder(TINY_MODEL, get_recipe("bf16"))
    with torch.no_grad():
        expected, _ = packed_logprobs(bf16, shadow_old[3], TEMPERATURE)
    assert torch.equal(shadow_old[4], expected)
    assert not torch.equal(shadow_old[4], calls[1][4]) and metrics["noise/nmae_probability"] > 0.0


def test_ratios_that_are_measured_are_those_of_the_last_mini_batch(spied_step):
    _, _, calls, metrics, pool = spied_step
    mask = calls[4][3].loss_mask
    advantages = calls[4][3].advantages[mask]
    ratio = torch.exp(calls[4][4] - calls[1][4])[mask].double()
    shadow_ratio = torch.exp(calls[5][4] - calls[2][4])[mask].double()
    assert metrics["policy/ratio_std"] == pytest.approx(ratio.std(correction=0).item(), rel=1e-5)
    (statistics,) = pool
    punished = advantages < 0
    assert statistics.num_negative == punished.sum() > 0
    assert statistics.shadow_clipped_low == (shadow_ratio[punished] <= 0.8).sum()
    kept = (advantages > 0) & (shadow_ratio <= 1.28)
    assert statistics.shadow_positive == pytest.approx((shadow_ratio * advantages)[kept].sum().item(), rel=1e-5)


def test_pool_is_emptied_by_a_calibration(tmp_path):
    run = make_run(tmp_path)
    optimizer, progress = make_optimizer(run), Progress(bounds=run.config.start_bounds())
    first = loop.train_step(run, optimizer, None, progress, StepRecord(step=0))
    assert len(progress.pool) == 1 and "calibration/low" not in first
    second = loop.train_step(run, optimizer, None, progress, StepRecord(step=1))
    assert progress.pool == [] and "calibration/low" in second


def test_importance_weights_scale_loss_and_statistics(tmp_path):
    run = make_run(tmp_path)
    problems = run.problems(0, 4)
    advantages = torch.linspace(-1.0, 1.0, 16).view(4, 4)
    (batch,) = pack(sample(run, problems, 0), advantages, num_mini_batches=1, microbatch_tokens=8192)
    progress = Progress(bounds=run.config.start_bounds())
    batch = shadow_of.annotate_shadow(run, progress, loop.annotate(run, None, batch), 0)
    (microbatch,) = batch.microbatches
    with torch.no_grad():  # ratios that are not all 1
        for parameter in run.policy.parameters():
            parameter += 0.01 * torch.randn_like(parameter)
    run.policy.requantize_()
    losses, sums = [], []
    for weight in (1.0, 1.5):
        shifted = replace(microbatch, rollout_logprobs=microbatch.old_logprobs - torch.tensor(weight).log())
        weighted = replace(batch, microbatches=[shifted])
        progress = Progress(bounds=run.config.start_bounds())
        logprobs, metrics = loop.accumulate(run, weighted, progress.bounds, lambda count: None)
        shadow_of.measure_shadow(run, weighted, logprobs, progress, 0)
        pool = progress.pool
        losses.append(metrics["loss/policy"])
        sums.append([pool[0].shadow_positive, pool[0].shadow_negative, *pool[0].positive_contributions])
    assert abs(losses[0]) > 1e-4 and losses[1] == pytest.approx(1.5 * losses[0], rel=1e-4)
    assert min(sums[0]) > 0.0 and sums[1] == pytest.approx([1.5 * x for x in sums[0]], rel=1e-4)


def test_each_step_samples_with_its_own_seed(tmp_path):
    run = make_run(tmp_path)
    problems = run.problems(0, 4)
    first, again, other = (sample(run, problems, step) for step in (0, 0, 1))
    assert first == again and first != other


def test_reference_is_the_policy_before_its_first_update(tmp_path):
    run = make_run(tmp_path, dither_masters=True)
    config = replace(run.config, algorithm=replace(run.config.algorithm, kl=KLConfig(coefficient=0.1)))
    reference = load_reference(config)
    assert reference is not None and not any(parameter.requires_grad for parameter in reference.parameters())
    for (name, mine), (_, theirs) in zip(run.policy.named_buffers(), reference.named_buffers(), strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), name
