"""Clipped surrogates and the bounds that BAPO and M2PO choose, against values worked out by hand."""

import math

import pytest
import torch

from octavo.rl.loss_clipped import BAPO, M2PO, PPOClip, bapo_bounds, beyond, m2po_bounds, ppo_clip
from octavo.rl.losses import ClipBounds

BOUNDS = ClipBounds(low=0.8, high=1.28)


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    "ratio, advantage, weight, loss, gradient",
    [
        # d/dlogprobs of -w r A is -w r A where the unclipped term is the smaller one, else 0.
        (1.1, 2.0, 1.0, -2.2, -2.2),  # A > 0 inside: -1.1 * 2
        (1.5, 2.0, 1.0, -2.56, 0.0),  # A > 0 above: -1.28 * 2, no gradient
        (0.5, 2.0, 1.0, -1.0, -1.0),  # A > 0 below: min(1.0, 1.6) is unclipped
        (0.9, -2.0, 1.0, 1.8, 1.8),  # A < 0 inside: 0.9 * 2
        (0.5, -2.0, 1.0, 1.6, 0.0),  # A < 0 below: 0.8 * 2, no gradient
        (1.5, -2.0, 1.0, 3.0, 3.0),  # A < 0 above: min(-3.0, -2.56) is unclipped
        (1.1, 2.0, 0.5, -1.1, -1.1),  # the weight halves loss and gradient
        (1.1, 0.0, 1.0, 0.0, 0.0),
    ],
)
def test_ppo_clip_and_its_gradient(ratio, advantage, weight, loss, gradient):
    logprobs = torch.tensor([math.log(ratio) - 3.0], dtype=torch.float64, requires_grad=True)
    old_logprobs = torch.tensor([-3.0], dtype=torch.float64)
    advantages, weights = (torch.tensor([x], dtype=torch.float64) for x in (advantage, weight))
    losses = ppo_clip(logprobs, old_logprobs, advantages, BOUNDS, weights)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([loss], rel=1e-12)
    assert logprobs.grad.tolist() == pytest.approx([gradient], rel=1e-12)


def test_ppo_clip_keeps_tokens_apart():
    # Ratios 1 and e^0.5 = 1.6487; A = 1 and 3; the second is clipped to 1.28 * 3 = 3.84.
    losses = ppo_clip(
        torch.tensor([-1.0, -1.5]), torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 3.0]), BOUNDS, torch.ones(2)
    )
    torch.testing.assert_close(losses, torch.tensor([-1.0, -3.84]))


def test_ppo_clip_shows_a_nan():
    losses = ppo_clip(torch.tensor([math.nan]), torch.zeros(1), torch.ones(1), BOUNDS, torch.ones(1))
    assert losses.isnan().all()


@pytest.mark.parametrize(
    "ratio, advantage, loss, gradient",
    [
        (2.0, -2.0, 4.0, 4.0),  # below the bound of 3: as without it
        (4.0, -2.0, 6.0, 0.0),  # above: costs 3 * 2, no gradient
        (0.5, -2.0, 1.6, 0.0),  # the low bound holds as before
        (4.0, 2.0, -2.56, 0.0),  # A > 0 is not concerned
    ],
)
def test_dual_clip_and_its_gradient(ratio, advantage, loss, gradient):
    logprobs = float64(math.log(ratio) - 3.0).requires_grad_()
    advantages = float64(advantage)
    losses = ppo_clip(logprobs, float64(-3.0), advantages, BOUNDS, torch.ones(1), dual_clip=3.0)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([loss], rel=1e-12)
    assert logprobs.grad.tolist() == pytest.approx([gradient], rel=1e-12)
    assert beyond(float64(ratio), advantages, BOUNDS, 3.0).item() == (gradient == 0.0)


def test_dual_clip_concerns_punished_tokens_alone():
    ratio, advantages = float64(1.2, 1.2), float64(1.0, -1.0)
    assert beyond(ratio, advantages, BOUNDS, 1.1).tolist() == [False, True]


@pytest.mark.parametrize("dual_clip", [1.0, 0.5, math.nan])
def test_dual_clip_is_checked(dual_clip):
    with pytest.raises(ValueError, match=f"dual_clip .* above 1.* got {dual_clip}"):
        PPOClip(dual_clip=dual_clip)


# Rewarded tokens: ratio 1.1 and 1.5, A = 2: contributions 2.2 and 3.0. Punished: ratios 0.62, 0.82, 1.0, A = -3:
# 1.86, 2.46, 3.0. The last token is masked out. Weights are 1.
RATIO = torch.tensor([1.1, 1.5, 0.62, 0.82, 1.0, 9.0])
ADVANTAGES = torch.tensor([2.0, 2.0, -3.0, -3.0, -3.0, -50.0])
MASK = torch.tensor([1, 1, 1, 1, 1, 0])


@pytest.mark.parametrize(
    "positive_share, wanted",
    [
        (0.2, (0.6, 1.2)),  # 2.2 / (2.2 + 7.32) = 0.231 at the start
        (0.28, (0.65, 1.2)),  # above 0.62: 2.2 / (2.2 + 5.46) = 0.287
        (0.4, (0.85, 1.2)),  # 0.82 goes at 0.85: 2.2 / (2.2 + 3.0) = 0.423
        (0.6, (0.9, 1.5)),  # no low bound is enough; with 1.5 5.2 / (5.2 + 3.0) = 0.634
        (0.9, (0.9, 3.0)),  # out of reach
    ],
)
def test_bapo_raises_the_low_bound_and_then_the_high(positive_share, wanted):
    bounds = bapo_bounds(RATIO, ADVANTAGES, torch.ones(6), MASK, BAPO(positive_share=positive_share))
    assert (bounds.low, bounds.high) == wanted


def test_bapo_counts_weights_and_stays_at_its_start_without_punished_tokens():
    # With weight 4 on the rewarded 1.1: 8.8 / (8.8 + 7.32) = 0.546.
    weights = torch.tensor([4.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    start = ClipBounds(low=0.6, high=1.2)
    assert bapo_bounds(RATIO, ADVANTAGES, weights, MASK, BAPO()) == start
    assert bapo_bounds(RATIO, ADVANTAGES.abs(), torch.ones(6), MASK, BAPO()) == start
    assert bapo_bounds(RATIO, ADVANTAGES, torch.ones(6), torch.zeros(6), BAPO()) == start


def test_bapo_ends_on_its_maxima_though_steps_do_not_divide_them():
    config = BAPO(positive_share=0.99, low_start=0.6, low_max=0.87, high_start=1.2, high_max=1.33, bound_step=0.1)
    assert bapo_bounds(RATIO, ADVANTAGES, torch.ones(6), MASK, config) == ClipBounds(low=0.87, high=1.33)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"positive_share": 1.0}, "positive_share"),
        ({"low_start": 0.95}, "low_start=0.95, low_max=0.9"),
        ({"high_start": 0.9}, "high_start=0.9"),
        ({"high_max": 1e9}, "high_max <= 100"),
        ({"bound_step": 0.0}, "bound_step"),
    ],
)
def test_bapo_is_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        BAPO(**fields)


def m2po_case():
    # Tokens that an update moves on: A > 0 with r = e^0.1, e^0.3, e^0.5; A < 0 with r = e^-0.2, e^-0.6: squares
    # 0.01, 0.04, 0.09, 0.25, 0.36, whose running means are 0.01, 0.025, 0.0467, 0.0975, 0.15.
    # Tokens that it brings back, A > 0 with r = e^-2 and A < 0 with r = e^2, are not concerned; nor is the masked.
    logs = float64(0.1, 0.3, 0.5, -0.2, -0.6, -2.0, 2.0, 5.0)
    advantages = float64(1.0, 1.0, 1.0, -1.0, -1.0, 1.0, -1.0, 1.0)
    return logs.exp(), advantages, torch.tensor([1, 1, 1, 1, 1, 1, 1, 0])


@pytest.mark.parametrize(
    "budget, dropped, bounds",
    [
        (0.2, [], (-0.6, 0.5)),
        (0.1, [4], (-0.2, 0.5)),
        (0.05, [2, 4], (-0.2, 0.3)),
        (0.04, [1, 2, 4], (-0.2, 0.1)),
        (0.02, [1, 2, 3, 4], (0.0, 0.1)),
        (0.005, [0, 1, 2, 3, 4], (0.0, 0.0)),
    ],
)
def test_m2po_drops_the_furthest_until_the_second_moment_fits(budget, dropped, bounds):
    ratio, advantages, mask = m2po_case()
    chosen = m2po_bounds(ratio, advantages, mask, M2PO(budget=budget))
    assert (chosen.low, chosen.high) == pytest.approx(tuple(math.exp(x) for x in bounds), rel=1e-12)
    assert beyond(ratio, advantages, chosen)[mask.bool()].nonzero().squeeze(1).tolist() == dropped


def test_m2po_drops_equal_ratios_together_and_keeps_what_is_exact():
    # Squares 0.01 and three times 0.09 with running means 0.01, 0.05, 0.063, 0.07: a budget of 0.05 would keep one.
    ratio = torch.tensor([0.1, 0.3, 0.3, 0.3], dtype=torch.float64).exp()
    chosen = m2po_bounds(ratio, torch.ones(4), torch.ones(4), M2PO(budget=0.055))
    assert beyond(ratio, torch.ones(4), chosen).tolist() == [False, True, True, True]
    assert m2po_bounds(torch.ones(4), torch.ones(4), torch.ones(4), M2PO()) == ClipBounds(low=1.0, high=1.0)


def test_m2po_drops_an_overflow_and_checks_its_budget():
    ratio = torch.tensor([1.1, math.inf, 0.0])
    chosen = m2po_bounds(ratio, torch.tensor([1.0, 1.0, -1.0]), torch.ones(3), M2PO())
    assert beyond(ratio, torch.tensor([1.0, 1.0, -1.0]), chosen).tolist() == [False, True, True]
    with pytest.raises(ValueError, match="budget .* above 0; got 0.0"):
        M2PO(budget=0.0)


def test_bounds_of_fp32_ratios_keep_the_outermost_kept_token():
    generator = torch.Generator().manual_seed(0)
    ratio = torch.exp(0.4 * torch.randn(2000, generator=generator))
    advantages = torch.randn(2000, generator=generator)
    chosen = m2po_bounds(ratio, advantages, torch.ones(2000), M2PO())
    moved = ((advantages > 0) & (ratio > 1)) | ((advantages < 0) & (ratio < 1))
    kept = moved & ~beyond(ratio, advantages, chosen)
    squares = ratio.double().log().square()
    assert 0 < kept.sum() < moved.sum()
    assert squares[kept].mean() <= 0.04 < torch.cat([squares[kept], squares[moved & ~kept].min()[None]]).mean()
