"""Advantages of PPO by hand, against a plain double loop and against verl; the value loss and its gradient."""

import math

import pytest
import torch
from peer_functions import CORE_ALGOS, TORCH_FUNCTIONAL, functions_of

from octavo.rl.gae import (
    GAEConfig,
    explained_variance,
    generalised_advantages,
    token_rewards,
    value_losses,
    whitened,
)

MASK = torch.tensor([0, 0, 1, 1, 1, 0, 1]).bool()
"""A prompt of 2 with 3 sampled tokens, a prompt of 1 with 1."""


def test_rewards_stand_at_the_last_token_less_the_penalty_of_each():
    rewards = torch.tensor([9.0, 9.0, 2.0, 2.0, 2.0, 9.0, -1.0])
    old, ref = torch.zeros(7), torch.tensor([5.0, 5.0, 1.0, -2.0, 0.0, 5.0, 4.0])
    assert token_rewards(rewards, old, None, MASK, 0.5).tolist() == [0, 0, 0, 0, 2, 0, -1]
    assert token_rewards(rewards, old, ref, MASK, 0.5).tolist() == [0, 0, 0.5, -1.0, 2.0, 0, 1.0]


def test_advantages_by_hand():
    rewards = torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0])
    values = torch.tensor([0.0, 0.0, 0.5, 0.2, 0.4, 0.0, 0.3])
    config = GAEConfig(gamma=0.5, gae_lambda=0.5)
    # deltas from the end: 1 - 0.4 = 0.6;  0.5 * 0.4 - 0.2 = 0;  0.5 * 0.2 - 0.5 = -0.4
    # advantages: 0.6;  0 + 0.25 * 0.6 = 0.15;  -0.4 + 0.25 * 0.15 = -0.3625
    advantages, returns = generalised_advantages(rewards, values, MASK, config)
    assert advantages.tolist() == pytest.approx([0, 0, -0.3625, 0.15, 0.6, 0, 0.7])
    assert returns.tolist() == pytest.approx([0, 0, 0.1375, 0.35, 1.0, 0, 1.0])


def test_without_discount_an_advantage_is_the_reward_to_come_less_the_value():
    rewards = torch.tensor([0.0, 0.0, -0.5, 0.0, 1.0, 0.0, 1.0])
    values = torch.tensor([7.0, 7.0, 0.5, 0.2, 0.4, 7.0, 0.3])
    advantages, returns = generalised_advantages(rewards, values, MASK, GAEConfig())
    assert returns.tolist() == pytest.approx([0, 0, 0.5, 1.0, 1.0, 0, 1.0])
    assert advantages.tolist() == pytest.approx([0, 0, 0.0, 0.8, 0.6, 0, 0.7])


def test_packing_changes_no_bit():
    torch.manual_seed(1)
    parts = [(torch.randn(n), torch.randn(n), torch.arange(n) >= prompt) for n, prompt in ((5, 1), (9, 3), (4, 2))]
    config = GAEConfig(gamma=0.9, gae_lambda=0.8)
    alone = [generalised_advantages(*part, config) for part in parts]
    packed = generalised_advantages(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)), config)
    for index in range(2):
        assert torch.equal(packed[index], torch.cat([result[index] for result in alone]))


def padded(seed):
    """Random rewards, values and mask of completions of 1 to 6 tokens, [4, 6]; and the same packed."""
    torch.manual_seed(seed)
    mask = torch.arange(6)[None] < torch.tensor([6, 1, 3, 4])[:, None]
    rewards, values = torch.randn(4, 6) * mask, torch.randn(4, 6) * mask

    def packed(x):
        return torch.cat([torch.cat([x.new_zeros(1), row[kept]]) for row, kept in zip(x, mask, strict=True)])

    return rewards, values, mask, [packed(rewards), packed(values), packed(mask)]


@pytest.mark.parametrize("gamma, gae_lambda", [(1.0, 1.0), (0.99, 0.95), (0.5, 0.0)])
def test_advantages_and_returns_are_verls(gamma, gae_lambda):
    norm = functions_of(TORCH_FUNCTIONAL, ["masked_sum", "masked_mean", "masked_var", "masked_whiten"])
    verl = functions_of(CORE_ALGOS, ["compute_gae_advantage_return"], verl_F=norm).compute_gae_advantage_return
    for seed in range(3):
        rewards, values, mask, (r, v, m) = padded(seed)
        theirs, their_returns = verl(rewards, values, mask.float(), gamma, gae_lambda)
        advantages, returns = generalised_advantages(r, v, m, GAEConfig(gamma=gamma, gae_lambda=gae_lambda))
        torch.testing.assert_close(whitened(advantages, m)[m], theirs[mask], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(returns[m], their_returns[mask], rtol=1e-5, atol=1e-6)


def test_the_value_loss_is_verls():
    norm = functions_of(TORCH_FUNCTIONAL, ["masked_sum", "masked_mean", "masked_var", "masked_whiten", "clip_by_value"])
    agg_loss = functions_of(CORE_ALGOS, ["agg_loss"], verl_F=norm).agg_loss
    verl = functions_of(CORE_ALGOS, ["compute_value_loss"], verl_F=norm, agg_loss=agg_loss).compute_value_loss
    torch.manual_seed(0)
    values, old, returns = (torch.randn(3, 5) for _ in range(3))
    mask = torch.rand(3, 5) < 0.7
    mine = torch.where(mask, value_losses(values, old, returns, 0.5), 0.0).sum() / mask.sum()
    theirs, _ = verl(values, returns, old, mask.float(), 0.5)
    assert mine.item() == pytest.approx(theirs.item(), rel=1e-5)


def test_whitening_by_hand():
    advantages, mask = torch.tensor([9.0, 1.0, 2.0, 3.0]), torch.tensor([0, 1, 1, 1]).bool()
    assert whitened(advantages, mask).tolist() == pytest.approx([0.0, -1.0, 0.0, 1.0])
    assert whitened(torch.tensor([4.0]), torch.ones(1).bool()).tolist() == [0.0]
    assert whitened(torch.tensor([4.0, 4.0]), torch.ones(2).bool()).tolist() == [0.0, 0.0]


def test_value_loss_by_hand_and_where_it_has_a_gradient():
    values = torch.tensor([0.0, 1.0, 3.0, -3.0], requires_grad=True)
    old, returns = torch.tensor([0.0, 0.0, 0.0, 0.0]), torch.tensor([1.0, 1.0, 1.0, 1.0])
    losses = value_losses(values, old, returns, 0.5)
    # clamped to 0, 0.5, 0.5, -0.5: the larger of both errors, halved
    assert losses.tolist() == [0.5, 0.125, 2.0, 8.0]
    losses.sum().backward()
    assert values.grad.tolist() == [-1.0, 0.0, 2.0, -4.0], "none where the clamp holds the larger error"
    assert value_losses(values, old, returns, None).tolist() == [0.5, 0.0, 2.0, 8.0]


def test_the_gradient_of_the_value_loss_is_the_finite_difference():
    torch.manual_seed(2)
    values, old, returns = (torch.randn(20, dtype=torch.float64) for _ in range(3))
    values.requires_grad_()
    assert torch.autograd.gradcheck(lambda v: value_losses(v, old, returns, 0.3), values)


def test_explained_variance_by_hand():
    returns = torch.tensor([0.0, 1.0, 2.0])
    assert explained_variance(returns + 5.0, returns) == 1.0
    assert explained_variance(torch.zeros(3), returns) == 0.0
    assert explained_variance(-returns, returns) == pytest.approx(-3.0)
    assert explained_variance(returns, torch.ones(3)) == 0.0


@pytest.mark.parametrize("keys", [{"gamma": 1.1}, {"gae_lambda": -0.1}, {"gamma": math.nan}])
def test_discounts_outside_their_range_are_refused(keys):
    with pytest.raises(ValueError, match=rf"{next(iter(keys))} lies in \[0, 1\]"):
        GAEConfig(**keys)
