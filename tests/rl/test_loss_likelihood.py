"""CISPO, DPPO and the plain policy gradient against values worked out by hand."""

import math

import pytest
import torch

from octavo.rl.loss_likelihood import (
    CISPO,
    DPPOKL,
    DPPOTV,
    cispo,
    dppo,
    kl_dropped,
    reinforce,
    tv_dropped,
)


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


def gradient_of(loss, logprobs):
    logprobs = logprobs.clone().requires_grad_()
    losses = loss(logprobs)
    losses.sum().backward()
    return losses.tolist(), logprobs.grad.tolist()


def test_reinforce_is_the_policy_gradient():
    losses, gradient = gradient_of(
        lambda logprobs: reinforce(logprobs, float64(2.0, -3.0), float64(1.0, 0.5)), float64(-1.0, -0.5)
    )
    assert losses == [2.0, -0.75] and gradient == [-2.0, 1.5]


@pytest.mark.parametrize("advantage", [2.0, -2.0])
@pytest.mark.parametrize("ratio, factor", [(0.1, 0.1), (1.0, 1.0), (3.0, 3.0), (8.0, 5.0)])
def test_cispo_keeps_every_gradient_and_caps_its_factor(ratio, factor, advantage):
    logprobs, weight = float64(math.log(ratio) - 4.0), 0.5
    losses, gradient = gradient_of(
        lambda x: cispo(x, float64(-4.0), float64(advantage), 5.0, float64(weight)), logprobs
    )
    assert gradient == pytest.approx([-weight * factor * advantage], rel=1e-12)
    assert losses == pytest.approx([gradient[0] * logprobs.item()], rel=1e-12)


TV = [  # p_old, p, A, dropped at 0.15 down and 0.1 up
    (0.50, 0.62, 1.0, True),
    (0.50, 0.59, 1.0, False),
    (0.50, 0.30, 1.0, False),  # moved against the reward: brought back
    (0.50, 0.34, -1.0, True),
    (0.50, 0.36, -1.0, False),
    (0.50, 0.90, -1.0, False),
    (0.001, 0.05, 1.0, False),  # a ratio of 50
    (0.001, 1e-5, -1.0, False),  # a ratio of 1/100
    (0.50, 0.95, 0.0, False),
]
KL = [  # p_old, p, A, dropped at 0.02 down and 0.03 up; KL by hand beside it
    (0.5, 0.62, 1.0, False),  # 0.5 log(0.5/0.62) + 0.5 log(0.5/0.38) = 0.0297
    (0.5, 0.63, 1.0, True),  # 0.0350
    (0.5, 0.38, -1.0, True),  # 0.0297
    (0.5, 0.41, -1.0, False),  # 0.0165
    (0.5, 0.1, 1.0, False),  # moved against the reward
    (0.5, 0.9, -1.0, False),
    (0.01, 0.03, 1.0, False),  # 0.01 log(1/3) + 0.99 log(0.99/0.97) = 0.0092, a ratio of 3
    (0.999, 0.99999999, 1.0, False),  # 0.001 log(0.001/1e-8) = 0.0115 less 0.001
]


@pytest.mark.parametrize("drop, bounds, cases", [(tv_dropped, (0.15, 0.1), TV), (kl_dropped, (0.02, 0.03), KL)])
def test_divergences_drop_by_sign_and_direction(drop, bounds, cases):
    old, new, advantages, wanted = zip(*cases, strict=True)
    dropped = drop(float64(*new).log(), float64(*old).log(), float64(*advantages), *bounds)
    assert dropped.tolist() == list(wanted)


def test_a_certain_token_has_a_finite_divergence():
    # p_old = p = 1: no divergence. From 1 to 0.9 under punishment: log(1 / 0.9) = 0.105.
    old, new = torch.tensor([0.0, 0.0, -0.1]), torch.tensor([0.0, math.log(0.9), 0.0])
    advantages = torch.tensor([1.0, -1.0, 1.0])
    assert kl_dropped(new, old, advantages, 0.1, 0.1).tolist() == [False, True, True]
    assert kl_dropped(new, old, advantages, 0.11, 3.0).tolist() == [False, False, False]


def test_dppo_is_cispo_without_the_dropped_tokens():
    old, logprobs, advantages = float64(-3.0, -3.0, -3.0), float64(-2.9, -2.5, 0.0), float64(1.0, -2.0, 1.0)
    dropped = torch.tensor([False, True, False])
    losses, gradient = gradient_of(lambda x: dppo(x, old, advantages, dropped, 20.0, float64(1, 1, 0.5)), logprobs)
    assert gradient == pytest.approx([-math.exp(0.1), 0.0, -0.5 * 20.0], rel=1e-12)
    assert losses == pytest.approx([2.9 * math.exp(0.1), 0.0, 0.0], rel=1e-12)


def test_a_nan_shows_although_its_token_is_dropped():
    dropped = torch.tensor([True])
    assert dppo(torch.tensor([math.nan]), torch.zeros(1), torch.ones(1), dropped, 20.0, torch.ones(1)).isnan().all()


@pytest.mark.parametrize(
    "config, fields, message",
    [
        (CISPO, {"ratio_cap": 0.5}, "ratio_cap .* got 0.5"),
        (DPPOTV, {"max_increase": 1.5}, "max_increase is a difference of probabilities.* got 1.5"),
        (DPPOTV, {"ratio_cap": math.nan}, "ratio_cap"),
        (DPPOKL, {"max_decrease": -0.1}, "max_decrease is a divergence.* got -0.1"),
    ],
)
def test_configs_are_checked(config, fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)
