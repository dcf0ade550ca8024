"""Runs under every loss, estimator and correction: exact where the recipe is, learning, and with its metrics."""

import math
from dataclasses import replace

import pytest
import torch
from packed_losses import LOSSES, loss_id
from training_runs import read_lines, tiny_config

from octavo.rl.advantages import subtract_kl
from octavo.rl.loss_clipped import PPOClip
from octavo.rl.loss_sequence import GSPO
from octavo.trainer import loop
from octavo.trainer.config_file import to_dict
from octavo.trainer.metrics import Display
from octavo.trainer.rollout import Groups, batches, judge, rollout_metrics, sample
from octavo.trainer.run import load_reference, load_run
from octavo.trainer.train import train


def run_lines(folder, **changes):
    config = tiny_config(
        folder / "run",
        **{"calibration": None, "trainer__num_steps": 2, "evaluation__interval": 0, "trainer__shadow_interval": 0}
        | changes,
    )
    return read_lines(train(config, Display()) / "metrics.jsonl")


def learned(lines):
    return all(line["policy/ratio_std"] > 0.0 and line["optimizer/grad_norm"] > 0.0 for line in lines)


@pytest.mark.parametrize("config", LOSSES, ids=loss_id)
def test_every_loss_trains_and_stays_exact(config, tmp_path):
    lines = run_lines(tmp_path, algorithm__loss=to_dict(config))
    assert len(lines) == 2 and learned(lines)
    for line in lines:
        assert line["mismatch/max_abs_logprob_diff"] == 0.0
        assert math.isfinite(line["loss/policy"]) and 0.0 <= line["loss/clip_fraction"] <= 1.0
        bounded = config.type_name not in ("dppo_tv", "dppo_kl", "reinforce")
        assert ("clip/low" in line) == ("clip/high" in line) == bounded
        if bounded:
            assert 0.0 <= line["clip/low"] <= 1.0 <= line["clip/high"]
        assert "correction/weight_mean" not in line


@pytest.mark.parametrize("advantage", [{"type": "rloo"}, {"type": "reinforce_plus_plus_baseline"}])
def test_every_estimator_trains(advantage, tmp_path):
    (line,) = run_lines(tmp_path, algorithm__advantage=advantage, trainer__num_steps=1)
    assert learned([line]) and 0.0 < line["reward/informative_groups_share"] <= 1.0


@pytest.mark.parametrize("name", ["rloo", "reinforce_plus_plus_baseline"])
def test_a_group_of_one_has_nothing_to_compare_with(name, tmp_path):
    with pytest.raises(ValueError, match=f"rollout.group_size=1 leaves algorithm.advantage.type={name} .*>= 2"):
        tiny_config(tmp_path, rollout__group_size=1, algorithm__advantage={"type": name})


@pytest.mark.parametrize(
    "correction",
    [
        {"type": "sequence_tis"},
        {"type": "icepop", "low": 0.99, "high": 1.01},
        {"type": "sequence_mask", "low": 0.9999, "high": 1.0001},
    ],
    ids=lambda correction: correction["type"],
)
def test_corrections_weigh_what_another_numerics_sampled(correction, tmp_path):
    changes = {"precision__recipe": "tensorwise", "trainer__num_steps": 1}
    (line,) = run_lines(tmp_path, algorithm__correction=correction, **changes)
    assert line["mismatch/max_abs_logprob_diff"] > 0.0 and line["correction/weight_mean"] != 1.0
    assert (line["correction/dropped_share"] > 0.0) == (correction["type"] != "sequence_tis")


def test_calibration_is_for_losses_with_fixed_bounds(tmp_path):
    served = 0
    for config in LOSSES:
        loss = to_dict(config)
        assert tiny_config(tmp_path, calibration=None, algorithm__loss=loss).calibration is None
        if isinstance(config, GSPO) or config == PPOClip():
            assert tiny_config(tmp_path, algorithm__loss=loss).calibration is not None
            served += 1
        else:
            with pytest.raises(ValueError, match=r"algorithm\.loss\.(type|dual_clip)=.*calibration: null"):
                tiny_config(tmp_path, algorithm__loss=loss)
    assert served == 3


def test_bounds_are_chosen_for_the_mini_batch_however_it_is_split(tmp_path):
    found = []
    for microbatch_tokens in (8192, 60):
        config = tiny_config(
            tmp_path / str(microbatch_tokens),
            calibration=None,
            trainer__microbatch_tokens=microbatch_tokens,
            algorithm__loss={"type": "m2po", "budget": 0.002},
        )
        run = load_run(config, Display())
        completions = sample(run, run.problems(0, 4), 0)
        advantages = torch.linspace(1.0, -1.0, 16).view(4, 4).T
        first, _ = [loop.annotate(run, None, batch) for batch in batches(config, completions, advantages)]
        assert (len(first.microbatches) > 1) == (microbatch_tokens == 60)
        with torch.no_grad():
            for parameter in run.policy.parameters():
                parameter += 0.003 * parameter.sign()
        run.policy.requantize_()
        _, metrics = loop.accumulate(run, first, config.start_bounds(), lambda count: None)
        found.append([metrics[key] for key in ("clip/low", "clip/high", "loss/clip_fraction")])
        gradient = run.policy.lm_head.grad if run.policy.embed_tokens.grad is None else run.policy.embed_tokens.grad
        found[-1].append(gradient.norm().item())
    low, high, share, _ = found[0]
    assert found[1][:3] == [low, high, share] and low < 1.0 < high and 0.0 < share < 1.0
    assert found[0][3] == pytest.approx(found[1][3], rel=1e-4)


def test_kl_in_the_reward_changes_advantages_and_no_loss(tmp_path):
    kl = {"coefficient": 0.5, "estimator": "k1", "placement": "reward"}
    config = tiny_config(tmp_path / "run", calibration=None, algorithm__kl=kl)
    run = load_run(config, Display())
    reference = load_reference(config)
    with torch.no_grad():
        for parameter in run.policy.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    run.policy.requantize_()
    completions = sample(run, run.problems(0, 4), 0)
    (batch, _) = batches(config, completions, torch.linspace(-1.0, 1.0, 16).view(4, 4))
    annotated = loop.annotate(run, reference, batch)
    for before, after in zip(batch.microbatches, annotated.microbatches, strict=True):
        old, ref = after.old_logprobs, after.ref_logprobs
        wanted = subtract_kl(before.advantages, old, ref, before.loss_mask, before.cu_seqlens, 0.5)
        assert torch.equal(after.advantages, wanted) and not torch.equal(after.advantages, before.advantages)
    # At ratios of 1 the loss is the mean of -A: nothing of the penalty is added to it.
    _, metrics = loop.accumulate(run, annotated, config.start_bounds(), lambda count: None)
    advantages = annotated.gather("advantages")[annotated.gather("loss_mask")]
    k1 = (annotated.gather("old_logprobs") - annotated.gather("ref_logprobs"))[annotated.gather("loss_mask")]
    assert metrics["loss/policy"] == pytest.approx(-advantages.mean().item(), rel=1e-4)
    assert metrics["loss/kl"] == pytest.approx(k1.mean().item(), rel=1e-4) and abs(metrics["loss/kl"]) > 1e-4


def test_long_completions_are_penalised_and_truncated_ones_leave_the_loss(tmp_path):
    overlong = {"buffer_tokens": 8, "penalty": 0.5, "filter_truncated": True}
    config = tiny_config(tmp_path / "run", calibration=None, algorithm__overlong=overlong)
    run = load_run(config, Display())
    completions = sample(run, run.problems(0, 4), 0)
    lengths = torch.tensor([[len(c.tokens) for c in group] for group in completions])
    completions[0] = [replace(c, finish_reason="length") for c in completions[0]]
    rewards = torch.ones(4, 4)
    groups = Groups(problems=[], completions=completions, scored=[], rewards=rewards)
    advantages, metrics = judge(config, groups), rollout_metrics(config, groups)
    penalty = 0.5 * ((lengths - 8) / 8).clamp(0, 1)  # the limit is 16
    shaped = rewards - penalty
    wanted = (shaped - shaped.mean(dim=1, keepdim=True)) / (shaped.std(dim=1, keepdim=True) + 1e-6)
    torch.testing.assert_close(advantages, wanted, rtol=1e-4, atol=1e-4)
    assert metrics["reward/overlong_penalty_mean"] == pytest.approx(penalty.mean().item()) and penalty.any()
    truncated = sum(c.finish_reason == "length" for group in completions for c in group)
    mini_batches = batches(config, completions, advantages)
    assert truncated >= 4 and sum(batch.num_sequences for batch in mini_batches) == 16 - truncated


def test_a_step_of_nothing_but_truncated_completions_stops_with_the_way_out(tmp_path):
    changes = {"rollout__max_completion_tokens": 1, "algorithm__overlong": {"filter_truncated": True}}
    with pytest.raises(ValueError, match="max_completion_tokens=1, .*filter_truncated=true leaves none.* Raise"):
        run_lines(tmp_path, **changes)


def test_runs_without_truncated_completions_in_the_loss_train(tmp_path):
    changes = {"rollout__max_completion_tokens": 7, "algorithm__overlong": {"filter_truncated": True}}
    (line,) = run_lines(tmp_path, trainer__num_steps=1, **changes)
    assert line["completion/truncated_share"] > 0.0
    assert 0.0 < line["mismatch/num_tokens"] < line["rollout/num_tokens"]
    assert line["mismatch/max_abs_logprob_diff"] == 0.0
