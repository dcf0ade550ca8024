"""Losses, advantages and corrections equal verl's and TRL's where both compute the same.

The pinned numbers are verl 0.9.1's and TRL 1.16.0's on the small inputs here; with their sources at hand
(`peer_functions`) they are computed again, and compared on random inputs too. What differs is in docs/losses.md.
"""

import math
from collections import defaultdict

import numpy as np
import pytest
import torch
from peer_functions import (
    CORE_ALGOS,
    ROLLOUT_CORRECTION,
    TORCH_FUNCTIONAL,
    VerlConfig,
    functions_of,
    verl_losses,
)

from octavo.rl.advantages import GRPOConfig, ReinforcePlusPlusConfig, RLOOConfig, estimate_advantages
from octavo.rl.batch import Microbatch
from octavo.rl.calibration_losses import plain_bounds
from octavo.rl.corrections import IcePop, SequenceMask, SequenceTIS, correction_weights
from octavo.rl.loss_clipped import PPOClip
from octavo.rl.loss_likelihood import CISPO, DPPOKL, DPPOTV
from octavo.rl.loss_sequence import GSPOToken
from octavo.rl.losses import ClipConfig, reduce_loss
from octavo.rl.overlong import OverlongConfig, overlong_penalty
from octavo.rl.policy_loss import fixed_bounds, policy_losses

OLD = torch.tensor([[-0.1, -1.0, -2.0], [-0.5, -1.5, -0.2]])
LOGPROBS = OLD + torch.tensor([[-0.4, -0.3, 0.1], [-0.5, 0.5, 0.0]])
ADVANTAGES = torch.tensor([[1.0], [-2.0]]).expand(2, 3)
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])

CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5}
LOSSES = {  # octavo's config, verl's function and config, its loss and gradient on the inputs above
    "ppo_clip": (
        PPOClip(dual_clip=1.5),
        "vanilla",
        CLIP,
        (0.4167381, [[-0.134064, -0.1481637, -0.2210342], [0.0, 0.0, 0.0]]),
    ),
    "gspo": (
        GSPOToken(clip_low=0.02, clip_high=0.03),
        "gspo",
        {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03},
        (0.3087615, [[-0.1637462, -0.1637462, -0.1637462], [0.4, 0.4, 0.0]]),
    ),
    "cispo": (
        CISPO(ratio_cap=1.5),
        "cispo",
        {"clip_ratio_low": 1.0, "clip_ratio_high": 0.5},
        (-0.1630025, [[-0.134064, -0.1481637, -0.2210342], [0.2426123, 0.6, 0.0]]),
    ),
    "dppo_tv": (
        DPPOTV(max_decrease=0.2, max_increase=0.28, ratio_cap=1.5),
        "dppo_tv",
        CLIP,
        (0.0796097, [[-0.134064, -0.1481637, -0.2210342], [0.0, 0.6, 0.0]]),
    ),
    "dppo_kl": (
        DPPOKL(max_decrease=0.1, max_increase=0.02, ratio_cap=1.5),
        "dppo_kl",
        {"clip_ratio_low": 0.1, "clip_ratio_high": 0.02, "clip_ratio_c": 1.5},
        (0.0796097, [[-0.134064, -0.1481637, -0.2210342], [0.0, 0.6, 0.0]]),
    ),
}


def ours(config, logprobs, old, advantages, mask):
    """Loss (token_mean) and gradient of padded [N, L] inputs, packed end to end."""
    index = torch.arange(len(mask))[:, None].expand_as(mask).flatten()
    batch = Microbatch(
        tokens=torch.zeros_like(index),
        positions=index,
        cu_seqlens=torch.arange(len(mask) + 1) * mask.shape[1],
        sequence_index=index,
        loss_mask=mask.flatten().bool(),
        advantages=advantages.flatten(),
        rollout_logprobs=old.flatten(),
        old_logprobs=old.flatten(),
    )
    leaf = logprobs.detach().clone().requires_grad_()
    bounds = fixed_bounds(config, plain_bounds(config, ClipConfig()))
    losses = policy_losses(config, leaf.flatten(), batch, bounds, torch.ones(mask.numel()))
    counts = {"num_loss_tokens": int(mask.sum()), "num_sequences": len(mask), "max_completion_tokens": 1}
    loss = reduce_loss(losses, batch.loss_mask, index, "token_mean", **counts)
    loss.backward()
    return loss.item(), leaf.grad


def verls(name, config, logprobs, old, advantages, mask):
    function = f"compute_policy_loss_{name}"
    leaf = logprobs.detach().clone().requires_grad_()
    loss, _ = getattr(verl_losses(function), function)(
        old, leaf, advantages, mask, loss_agg_mode="token-mean", config=VerlConfig(config)
    )
    loss.backward()
    return loss.item(), leaf.grad


def same(found, wanted):
    assert found[0] == pytest.approx(wanted[0], rel=1e-5, abs=1e-6)
    torch.testing.assert_close(found[1], torch.as_tensor(wanted[1]), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_have_verls_pinned_numbers(name):
    config, _, _, pinned = LOSSES[name]
    same(ours(config, LOGPROBS, OLD, ADVANTAGES, MASK), pinned)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_equal_verls(name):
    config, verl_name, verl_config, pinned = LOSSES[name]
    same(verls(verl_name, verl_config, LOGPROBS, OLD, ADVANTAGES, MASK), pinned)
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(6, 40, generator=generator) * 3 - 0.01
    logprobs = (old + 0.3 * torch.randn(6, 40, generator=generator)).clamp(max=-1e-4)
    advantages = torch.randn(6, 1, generator=generator).expand(6, 40)
    mask = (torch.arange(40) < torch.tensor([[40], [1], [13], [27], [8], [39]])).long()
    found = ours(config, logprobs, old, advantages, mask)
    assert 0 < (found[1] == 0.0)[mask.bool()].sum() < mask.sum() or isinstance(config, CISPO)
    same(found, verls(verl_name, verl_config, logprobs, old, advantages, mask))


REWARDS = torch.tensor([[1.0, 0.0, 0.5], [0.0, 0.0, 1.0]])
NUM_TOKENS = torch.tensor([[1, 4, 2], [3, 3, 5]])
ESTIMATORS = {  # octavo's config, verl's function and keywords, its advantages of the rewards above
    "grpo": (
        GRPOConfig(),
        "compute_grpo_outcome_advantage",
        {},
        [[0.999998, -0.999998, 0.0], [-0.5773493, -0.5773493, 1.1546985]],
    ),
    "dr_grpo": (
        GRPOConfig(scale_by_std=False),
        "compute_grpo_outcome_advantage",
        {"norm_adv_by_std_in_grpo": False},
        [[0.5, -0.5, 0.0], [-0.3333333, -0.3333333, 0.6666666]],
    ),
    "rloo": (RLOOConfig(), "compute_rloo_outcome_advantage", {}, [[0.75, -0.75, 0.0], [-0.5, -0.5, 1.0]]),
    "reinforce_plus_plus_baseline": (
        ReinforcePlusPlusConfig(),
        "compute_reinforce_plus_plus_baseline_outcome_advantage",
        {},
        [[1.0322918, -0.9947538, 0.018769], [-0.6569129, -0.6569129, 1.3701326]],
    ),
}


def verls_advantages(function, keywords, rewards, num_tokens):
    known = functions_of(TORCH_FUNCTIONAL, ["masked_sum", "masked_mean", "masked_var", "masked_whiten"])
    estimator = getattr(functions_of(CORE_ALGOS, [function], verl_F=known, defaultdict=defaultdict), function)
    lengths = num_tokens.flatten()
    mask = (torch.arange(int(lengths.max())) < lengths[:, None]).float()
    token_rewards = torch.zeros_like(mask)
    token_rewards[torch.arange(len(lengths)), lengths - 1] = rewards.flatten()
    index = np.repeat(np.arange(len(rewards)), rewards.shape[1])
    advantages, _ = estimator(token_rewards, mask, index, **keywords)
    assert torch.equal(advantages, advantages[:, :1] * mask)
    return advantages[:, 0].view_as(rewards)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_have_verls_pinned_numbers(name):
    config, _, _, pinned = ESTIMATORS[name]
    torch.testing.assert_close(
        estimate_advantages(REWARDS, NUM_TOKENS, config), torch.tensor(pinned), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_advantages_equal_verls(name):
    config, function, keywords, pinned = ESTIMATORS[name]
    found = verls_advantages(function, keywords, REWARDS, NUM_TOKENS)
    torch.testing.assert_close(found, torch.tensor(pinned), rtol=1e-5, atol=1e-6)
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(5, 7, generator=generator)
    num_tokens = torch.randint(1, 30, (5, 7), generator=generator)
    found = estimate_advantages(rewards, num_tokens, config)
    torch.testing.assert_close(found, verls_advantages(function, keywords, rewards, num_tokens), rtol=1e-4, atol=1e-5)


ROLLOUT = OLD - torch.tensor([[0.5, -0.9, 0.1], [0.3, 1.2, 0.0]])
CORRECTIONS = {  # octavo's config, verl's level and threshold, its weights of the differences above
    "token": (None, "token", 2.0, [[1.6487212, 0.4065697, 1.1051708], [1.3498589, 2.0, 0.0]]),
    "icepop": (IcePop(low=0.5, high=3.0), "token", "0.5_3.0", [[1.6487212, 0.0, 1.1051708], [1.3498589, 0.0, 0.0]]),
    "sequence": (
        SequenceTIS(weight="product", cap=2.0),
        "sequence",
        2.0,
        [[0.7408181, 0.7408181, 0.7408181], [2.0, 2.0, 0.0]],
    ),
}


def our_weights(config, old, rollout, mask):
    index = torch.arange(len(mask))[:, None].expand_as(mask).flatten()
    weights = correction_weights(old.flatten(), rollout.flatten(), mask.flatten(), index, config, 2.0)
    return weights.view_as(old) * mask


def verls_weights(level, threshold, old, rollout, mask):
    masked = functions_of(TORCH_FUNCTIONAL, ["masked_sum", "masked_mean"])
    parse = functions_of(ROLLOUT_CORRECTION, ["_parse_rollout_is_threshold"])._parse_rollout_is_threshold
    known = {"_parse_rollout_is_threshold": parse, "compute_is_metrics": lambda **_: {}, "SAFETY_BOUND": 20.0}
    helper = functions_of(ROLLOUT_CORRECTION, ["compute_rollout_correction_weights"], verl_F=masked, **known)
    return helper.compute_rollout_correction_weights(old - rollout, mask, level, threshold)[0]


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_have_verls_pinned_numbers(name):
    config, _, _, pinned = CORRECTIONS[name]
    torch.testing.assert_close(our_weights(config, OLD, ROLLOUT, MASK), torch.tensor(pinned), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_equal_verls(name):
    config, level, threshold, pinned = CORRECTIONS[name]
    torch.testing.assert_close(
        verls_weights(level, threshold, OLD, ROLLOUT, MASK), torch.tensor(pinned), rtol=1e-5, atol=1e-6
    )
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(6, 40, generator=generator) * 3
    rollout = old - 0.3 * torch.randn(6, 40, generator=generator)
    mask = (torch.arange(40) < torch.tensor([[40], [1], [13], [27], [8], [39]])).long()
    found = our_weights(config, old, rollout, mask)
    torch.testing.assert_close(found, verls_weights(level, threshold, old, rollout, mask), rtol=1e-4, atol=1e-6)


def test_sequence_mask_equals_verls_seq_mean_k1():
    masked = functions_of(TORCH_FUNCTIONAL, ["masked_sum", "masked_mean"])
    source = ["compute_rollout_rejection_mask", "_parse_rollout_rs_thresholds"]
    options = {"seq_mean_k1"}
    known = {"SUPPORTED_ROLLOUT_RS_OPTIONS": options, "TOKEN_LEVEL_ROLLOUT_RS_OPTIONS": set(), "SAFETY_BOUND": 20.0}
    helper = functions_of(
        ROLLOUT_CORRECTION, source, verl_F=masked, math=math, compute_rs_metrics=lambda **_: {}, **known
    )
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(30, 40, generator=generator) * 3
    rollout = old - 0.3 * torch.randn(30, 40, generator=generator)
    mask = (torch.arange(40) < torch.randint(1, 41, (30, 1), generator=generator)).long()
    kept, _ = helper.compute_rollout_rejection_mask(old - rollout, mask, "seq_mean_k1", "0.95_1.05")
    found = our_weights(SequenceMask(low=0.95, high=1.05), old, rollout, mask)
    assert 0 < kept.sum() < mask.sum()
    assert torch.equal(found > 0.0, kept.bool())


def test_the_overlong_penalty_is_trls():
    lengths = torch.tensor([[1, 60, 61], [75, 99, 100]])
    pinned = [0.0, 0.0, -0.025, -0.375, -0.975, -1.0]
    found = -overlong_penalty(lengths, 100, OverlongConfig(buffer_tokens=40)).flatten()
    assert found.tolist() == pytest.approx(pinned)
    trl = functions_of("trl/trl/rewards/other_rewards.py", ["_SoftOverlongPunishment"])
    assert trl._SoftOverlongPunishment(100, 40)([[0] * n for n in lengths.flatten().tolist()]) == pinned
