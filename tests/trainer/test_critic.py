"""PPO with a critic: what it sees, what it learns from, its warm-up, and a resume to the bit."""

import json
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from training_runs import TINY_MODEL, read_lines, same_run, signal_at, tiny_config, train_quietly

from octavo.rl.gae import GAEConfig, generalised_advantages, whitened
from octavo.trainer import loop
from octavo.trainer.checkpoint import list_checkpoints
from octavo.trainer.critic import judge_tokens, learn_values, load_critic, packed_values
from octavo.trainer.interrupt import Interrupted
from octavo.trainer.metrics import Display
from octavo.trainer.rollout import pack, sample
from octavo.trainer.run import in_bf16, load_reference, load_run


def ppo(folder, **changes):
    settings = {
        "calibration": None,
        "rollout__group_size": 2,
        "algorithm__advantage": {"type": "gae", "gae_lambda": 0.9},
        "critic": {"optimizer": {"lr": 1e-3}},
        "trainer": {"num_steps": 3, "num_mini_batches": 2, "shadow_interval": 0},
        "evaluation__interval": 0,
        "checkpoint": {"interval": 1, "keep_last": 9},
    }
    return tiny_config(folder, **(settings | changes))


def annotated(config):
    """A run, its critic and reference, and two mini-batches of random rewards with old logprobs."""
    run = load_run(config, Display())
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.5, 1.0]])
    completions = sample(run, run.problems(0, 4), 0)
    batches = pack(completions, rewards, num_mini_batches=2, microbatch_tokens=30)
    assert len(batches[0].microbatches) > 1
    reference = load_reference(config)
    return run, load_critic(run), [loop.annotate(run, reference, batch) for batch in batches]


def parts(batches):
    return [part for batch in batches for part in batch.microbatches]


def test_every_decoder_that_trains_computes_its_layers_again_where_that_is_asked(tmp_path):
    run = load_run(ppo(tmp_path, trainer__recompute_layers=True), Display())
    assert run.policy.recompute_layers and in_bf16(run).policy.recompute_layers
    assert load_critic(run).critic.decoder.recompute_layers


def test_the_critic_is_0_at_first_and_sees_what_comes_before_a_token(tmp_path):
    run, learner, batches = annotated(ppo(tmp_path))
    part = batches[0].microbatches[0]
    assert packed_values(learner.critic, part).abs().max() == 0.0
    with torch.no_grad():
        learner.critic.head.normal_()
        learner.critic.head_bias.fill_(3.0)
        values = packed_values(learner.critic, part)
        last = int(part.loss_mask.nonzero()[-1])
        other = part.tokens.clone()
        other[last] = (other[last] + 1) % run.policy.config.vocab_size
        assert torch.equal(packed_values(learner.critic, replace(part, tokens=other)), values), (
            "its own token is unseen"
        )
        other[last - 1] = (other[last - 1] + 1) % run.policy.config.vocab_size
        moved = packed_values(learner.critic, replace(part, tokens=other))
    assert moved[last] != values[last] and torch.equal(moved[: last - 1], values[: last - 1])
    assert (values[~part.loss_mask] == 0.0).all() and values[part.loss_mask].std() > 0.1
    masters = dict(learner.critic.named_parameters())
    for name, parameter in run.policy.named_parameters():
        assert torch.equal(masters[f"decoder.{name}"], parameter) and masters[f"decoder.{name}"] is not parameter


def test_advantages_are_whitened_over_the_step_and_hold_the_penalty_of_each_token(tmp_path):
    kl = {"coefficient": 0.5, "estimator": "k1", "placement": "reward"}
    run, learner, batches = annotated(ppo(tmp_path, algorithm__kl=kl, precision={"recipe": "bf16"}))
    with torch.no_grad():
        learner.critic.head.normal_(std=0.1)
    moved = [
        replace(b, microbatches=[replace(p, ref_logprobs=p.ref_logprobs - 0.1 * p.positions) for p in b.microbatches])
        for b in batches
    ]
    judged = parts(judge_tokens(run, learner, moved))
    raw = []
    for before, after in zip(parts(moved), judged, strict=True):
        mask = before.loss_mask
        rewards = -0.5 * (before.old_logprobs - before.ref_logprobs) * mask
        for last in (before.cu_seqlens[1:] - 1).tolist():
            rewards[last] += before.advantages[last]
        values = packed_values(learner.critic, before).detach()
        advantages, returns = generalised_advantages(rewards, values, mask, GAEConfig(gae_lambda=0.9))
        torch.testing.assert_close(after.returns, returns)
        assert torch.equal(after.values, values)
        raw.append(advantages)
    mask = torch.cat([part.loss_mask for part in judged])
    wanted = whitened(torch.cat(raw), mask)
    torch.testing.assert_close(torch.cat([part.advantages for part in judged]), wanted)
    assert wanted[mask].std() == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("recipe", ["fp32", "block128"])
def test_the_critic_learns_the_returns_of_a_batch(recipe, tmp_path):
    config = ppo(tmp_path, critic={"recipe": recipe, "num_epochs": 6, "value_clip": None, "optimizer": {"lr": 1e-3}})
    run, learner, batches = annotated(config)
    judged = judge_tokens(run, learner, batches)
    first = learn_values(config, learner, judged)
    assert first["critic/explained_variance"] == 0.0 and learner.optimizer.update == 12
    returns, mask = (torch.cat([getattr(p, name) for p in parts(judged)]) for name in ("returns", "loss_mask"))
    values = torch.cat([packed_values(learner.critic, part).detach() for part in parts(judged)])
    before, after = returns[mask].square().mean(), (values - returns)[mask].square().mean()
    assert after < 0.2 * before, f"{before} -> {after}"
    assert first["critic/return_mean"] == pytest.approx(returns[mask].mean().item())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppo") / "run"
    train_quietly(
        ppo(folder, critic={"warmup_steps": 1, "optimizer": {"lr": 1e-3, "lr_schedule": "linear"}}),
        folder.parent / "log",
    )
    return folder


def test_a_run_warms_up_its_critic_and_then_both_learn(whole):
    lines = read_lines(whole / "metrics.jsonl")
    assert [line["policy_version"] for line in lines] == [0, 0, 2]
    assert [line["optimizer/lr"] for line in lines] == [0.0, 1e-3, 1e-3]
    assert [line["critic/lr"] for line in lines] == pytest.approx([1e-3 * (1 - n / 6) for n in (1, 3, 5)])
    assert lines[0]["critic/explained_variance"] == 0.0 != lines[2]["critic/explained_variance"]
    assert all(line["mismatch/max_abs_logprob_diff"] == 0.0 and line["time/critic_s"] > 0.0 for line in lines)
    assert all(json.loads(row)["advantage"] is None for row in (whole / "samples.jsonl").read_text().splitlines())
    newest, middle, first = list_checkpoints(whole)
    for group, changes in (("policy", [False, True]), ("critic", [True, True])):
        states = [load_file(path / f"{group}-00000.safetensors") for path in (first, middle, newest)]
        start = load_file(TINY_MODEL / "model.safetensors")["model.norm.weight"].float()
        name = "norm.weight" if group == "policy" else "decoder.norm.weight"
        assert torch.equal(states[0][name], start) == (group == "policy")
        assert (not torch.equal(states[1][name], states[0][name])) == changes[1]


def test_a_critic_resumes_to_the_bit(whole, tmp_path, monkeypatch):
    config = ppo(tmp_path / "run", critic={"warmup_steps": 1, "optimizer": {"lr": 1e-3, "lr_schedule": "linear"}})
    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="step_000002"):
        signal_at(patch, loop, "learn_values", 2, signal.SIGTERM)  # its updates begin: the step is ended first
        train_quietly(config, tmp_path / "log")
    train_quietly(config, tmp_path / "log", resume=True)
    same_run(tmp_path / "run", whole)
    assert (list_checkpoints(tmp_path / "run")[0] / "critic_optimizer-00000.safetensors").is_file()


def test_a_critic_of_another_vocabulary_is_refused(tmp_path):
    shutil.copytree(TINY_MODEL, tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    path = str(tmp_path / "model")
    run = load_run(ppo(tmp_path / "run", critic={"path": path}), Display())
    run.policy.config = replace(run.policy.config, vocab_size=config["vocab_size"] + 1)
    with pytest.raises(ValueError, match=f"critic.path='{path}' has {config['vocab_size']} tokens, and the policy's"):
        load_critic(run)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"algorithm__advantage": {"type": "grpo"}}, "critic is set, and algorithm.advantage.type=grpo has none"),
        ({"critic": {"warmup_steps": 3}}, "critic.warmup_steps=3 are all of trainer.num_steps=3"),
        ({"critic": {"value_clip": 0.0}}, "value_clip is a distance above 0, or null; got 0.0"),
        ({"critic": {"recipe": "tensorwise_static"}}, "recipe: wants one of .*block128"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        ppo(tmp_path, **changes)
