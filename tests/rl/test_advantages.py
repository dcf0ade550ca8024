"""Advantages against values worked out by hand."""

import math

import pytest
import torch

from octavo.rl.advantages import (
    GRPOConfig,
    ReinforcePlusPlusConfig,
    RLOOConfig,
    estimate_advantages,
    group_relative,
    subtract_kl,
)


def test_rewards_of_a_group_are_centred_and_scaled():
    # mean = (1 + 0 + 0 + 1) / 4 = 0.5; squared distances 4 x 0.25 = 1; N-1 variance 1/3; std 1/sqrt(3).
    # (1 - 0.5) / (1/sqrt(3) + 1e-6) = 0.5 / 0.57735126919 = 0.866023904.
    # Second group: mean 2, squared distances 1 + 1 + 4 + 4 = 10, variance 10/3, std 1.8257418584.
    # -2 / 1.8257428584 = -1.09544451; -1 / 1.8257428584 = -0.54772226.
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 3.0, 0.0, 4.0]])
    advantages = group_relative(rewards, GRPOConfig())
    wanted = torch.tensor(
        [[0.866023904, -0.866023904, -0.866023904, 0.866023904], [-0.54772226, 0.54772226, -1.09544451, 1.09544451]]
    )
    torch.testing.assert_close(advantages, wanted, rtol=0, atol=1e-7)
    assert advantages.dtype == torch.float32


def test_std_eps_is_added_to_the_standard_deviation():
    # mean 1, std = sqrt((1 + 1) / 1) = sqrt(2); with std_eps = 1: 1 / (1 + sqrt(2)) = sqrt(2) - 1.
    advantages = group_relative(torch.tensor([[0.0, 2.0]]), GRPOConfig(std_eps=1.0))
    torch.testing.assert_close(advantages, torch.tensor([[1.0 - math.sqrt(2.0), math.sqrt(2.0) - 1.0]]))


def test_without_scaling_only_the_mean_is_subtracted():
    # mean of 1, 3, 0, 4 is 2.
    advantages = group_relative(torch.tensor([[1.0, 3.0, 0.0, 4.0]]), GRPOConfig(scale_by_std=False))
    assert advantages.tolist() == [[-1.0, 1.0, -2.0, 2.0]]


@pytest.mark.parametrize("scale_by_std", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("group_size", [2, 3, 7, 11])
def test_equal_rewards_give_exactly_zero(group_size, dtype, scale_by_std):
    # 0.1 is no binary fraction, so sums of it round in float64; a mean that is off by a rounding shows here.
    rewards = torch.full((2, group_size), 0.1, dtype=dtype)
    rewards[1, 0] = 1.0
    advantages = group_relative(rewards, GRPOConfig(scale_by_std=scale_by_std, std_eps=1e-30))
    assert advantages[0].tolist() == [0.0] * group_size
    assert advantages[1, 0] > 0.3


def test_small_differences_on_a_large_reward_survive():
    # 1000 and its successor 1000 + 2^-14: fp32 cannot hold their mean. Exactly, the distance from it
    # is 2^-15, std is 2^-14 / sqrt(2), so the advantage is 2^-15 / (2^-14 / sqrt(2) + 1e-6).
    advantages = group_relative(torch.tensor([[1000.0, 1000.0 + 2**-14]]), GRPOConfig())
    wanted = 2**-15 / (2**-14 / math.sqrt(2.0) + 1e-6)
    torch.testing.assert_close(advantages, torch.tensor([[-wanted, wanted]]), rtol=1e-6, atol=0)


def test_a_group_of_one_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match=r"group_size >= 2, or scale_by_std: false"):
        group_relative(torch.tensor([[1.0], [0.0]]), GRPOConfig())
    assert group_relative(torch.tensor([[1.0], [0.0]]), GRPOConfig(scale_by_std=False)).tolist() == [[0.0], [0.0]]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused_with_its_place(bad):
    rewards = torch.tensor([[1.0, 0.0, 1.0], [0.0, 1.0, bad]])
    with pytest.raises(ValueError, match=f"1 of 6 .* the first {bad} at prompt 1, completion 2"):
        group_relative(rewards, GRPOConfig())


def test_rewards_without_groups_are_refused():
    with pytest.raises(ValueError, match=r"rewards \[P, G\].*got shape \(3,\)"):
        group_relative(torch.ones(3), GRPOConfig())


@pytest.mark.parametrize("std_eps", [0.0, -1e-6, math.nan])
def test_std_eps_is_checked(std_eps):
    with pytest.raises(ValueError, match="std_eps"):
        GRPOConfig(std_eps=std_eps)


def test_leave_one_out_by_hand():
    # Others' means: of 1: (3 + 0 + 4) / 3 = 7/3; of 3: 5/3; of 0: 8/3; of 4: 4/3.
    advantages = estimate_advantages(torch.tensor([[1.0, 3.0, 0.0, 4.0]]), torch.ones(1, 4), RLOOConfig())
    torch.testing.assert_close(advantages, torch.tensor([[-4 / 3, 4 / 3, -8 / 3, 8 / 3]]))
    assert estimate_advantages(torch.full((1, 3), 0.1), torch.ones(1, 3), RLOOConfig()).tolist() == [[0.0] * 3]


def test_leave_one_out_refuses_a_group_of_one():
    with pytest.raises(ValueError, match="no others. Set group_size >= 2"):
        estimate_advantages(torch.ones(2, 1), torch.ones(2, 1), RLOOConfig())


def test_batch_normalised_by_hand():
    # Less the group's mean: 1, -1 and 0, 0. Over tokens 1 1 1 -1 0 0 (lengths 3, 1, 1, 1): mean 1/3; squared distances
    # 3 (4/9) + 16/9 + 2 (1/9) = 30/9; variance over 5: 2/3. Dividing by sqrt(2/3): (2/3, -4/3, -1/3) / 0.8164966.
    rewards, num_tokens = torch.tensor([[3.0, 1.0], [2.0, 2.0]]), torch.tensor([[3, 1], [1, 1]])
    advantages = estimate_advantages(rewards, num_tokens, ReinforcePlusPlusConfig(std_eps=1e-12))
    std = math.sqrt(2 / 3)
    wanted = torch.tensor([[2 / 3 / std, -4 / 3 / std], [-1 / 3 / std, -1 / 3 / std]])
    torch.testing.assert_close(advantages, wanted)
    larger = estimate_advantages(rewards, num_tokens, ReinforcePlusPlusConfig(std_eps=std))
    torch.testing.assert_close(larger, wanted / 2)


def test_a_batch_of_equal_groups_has_no_advantage():
    rewards = torch.tensor([[0.1, 0.1, 0.1], [1.0, 1.0, 1.0]])
    assert not estimate_advantages(rewards, torch.ones(2, 3), ReinforcePlusPlusConfig()).any()


def test_std_eps_of_the_batch_is_checked():
    with pytest.raises(ValueError, match="std_eps"):
        ReinforcePlusPlusConfig(std_eps=0.0)


def test_kl_in_the_reward_costs_a_token_what_is_to_come():
    # Two sequences of prompts 2 and 1: k1 of the completions 0.1, 0.2, 0.3 and 0.4, -1.0; coefficient 0.5.
    # To come: 0.6, 0.5, 0.3 and -0.6, -1.0. Prompt tokens keep their 0.
    mask = torch.tensor([0, 0, 1, 1, 1, 0, 1, 1])
    ref = torch.linspace(-4.0, -1.0, 8)
    old = ref + torch.tensor([7.0, 7.0, 0.1, 0.2, 0.3, math.nan, 0.4, -1.0])
    advantages = torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 0.0, -1.0, -1.0])
    found = subtract_kl(advantages, old, ref, mask, torch.tensor([0, 5, 8]), 0.5)
    wanted = torch.tensor([0.0, 0.0, 0.7, 0.75, 0.85, 0.0, -0.7, -0.5])
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    assert found.dtype == torch.float32


def test_kl_in_the_reward_does_not_depend_on_packing():
    generator = torch.Generator().manual_seed(0)
    advantages, old, ref = torch.randn(3, 60, generator=generator)
    mask = torch.rand(60, generator=generator) < 0.8
    whole = subtract_kl(advantages, old, ref, mask, torch.tensor([0, 25, 60]), 0.1)
    for part in (slice(0, 25), slice(25, 60)):
        edges = torch.tensor([0, part.stop - part.start])
        assert torch.equal(subtract_kl(advantages[part], old[part], ref[part], mask[part], edges, 0.1), whole[part])
