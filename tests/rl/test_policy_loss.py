"""Every loss of the config: who keeps a gradient, finite differences, and no dependence on packing."""

import math

import pytest
import torch
from packed_losses import LOSSES, Completions, bounds_for, loss_and_gradients, loss_id, packed

from octavo.rl.loss_clipped import BAPO, M2PO, PPOClip, ppo_clip
from octavo.rl.loss_likelihood import CISPO, DPPOKL, DPPOTV, Reinforce
from octavo.rl.loss_sequence import GSPO, GSPOToken, sequence_ratio
from octavo.rl.losses import ClipBounds
from octavo.rl.policy_loss import chosen_bounds, dropped_tokens, fixed_bounds, policy_losses

LENGTHS = [7, 1, 12, 3, 9]
ALL_IN_ONE = [[0, 1, 2, 3, 4]]


def one_token(log_ratio: float, advantage: float) -> Completions:
    """A completion of one token with probability 0.4 under old."""
    old = torch.tensor([math.log(0.4)], dtype=torch.float64)
    values = torch.tensor([advantage], dtype=torch.float64)
    return Completions([old + log_ratio], [old], [values], [torch.ones(1, dtype=torch.float64)])


# For ratios below, inside and above: whether a token with A > 0, then one with A < 0, keeps its gradient.
CLIPPED = ((True, True, False), (False, True, True))
KEPT = ((True, True, True), (True, True, True))
TRUTH = [
    (PPOClip(), CLIPPED),
    (PPOClip(dual_clip=1.3), ((True, True, False), (False, True, False))),
    (GSPO(clip_low=0.2, clip_high=0.28), CLIPPED),
    (GSPOToken(clip_low=0.2, clip_high=0.28), CLIPPED),
    (BAPO(low_start=0.8, low_max=0.8, high_start=1.28, high_max=1.28), CLIPPED),
    (M2PO(), CLIPPED),
    (DPPOTV(max_decrease=0.05, max_increase=0.05), CLIPPED),
    (DPPOKL(max_decrease=0.005, max_increase=0.005), CLIPPED),
    (CISPO(ratio_cap=1.28), KEPT),
    (Reinforce(), KEPT),
]


@pytest.mark.parametrize("config, table", TRUTH, ids=[loss_id(config) for config, _ in TRUTH])
def test_who_keeps_a_gradient(config, table):
    for advantage, row in zip((1.0, -1.0), table, strict=True):
        for log_ratio, kept in zip((-0.4, 0.05, 0.4), row, strict=True):
            _, (gradient,) = loss_and_gradients(config, one_token(log_ratio, advantage), [[0]])
            assert bool(gradient) == kept, (advantage, log_ratio)
            assert gradient.item() * advantage <= 0.0, "an update goes the way of the advantage"
            batch, logprobs, _ = packed(one_token(log_ratio, advantage), [0], num_prompt=0)
            dropped = dropped_tokens(config, logprobs, batch, bounds_for(config, one_token(log_ratio, advantage)))
            capped = isinstance(config, CISPO) and log_ratio == 0.4
            assert dropped.item() == (not kept or capped)


def objective(config, logprobs, base, batch, bounds, weights):
    """What a loss's gradient at base is that of: itself, or where a factor is fixed its integral over logprobs."""
    if isinstance(config, GSPOToken):  # s is fixed at base, a token moves by itself
        ratio = sequence_ratio(base, batch.old_logprobs, batch.loss_mask, batch.sequence_index)
        return ppo_clip(logprobs, base - ratio.log(), batch.advantages, bounds, weights)
    if not isinstance(config, CISPO | DPPOTV | DPPOKL):
        return policy_losses(config, logprobs, batch, bounds, weights)
    log_ratio, cap = logprobs - batch.old_logprobs, config.ratio_cap
    integral = torch.where(log_ratio < math.log(cap), log_ratio.exp(), cap * (1 + log_ratio - math.log(cap)))
    kept = 1.0 if isinstance(config, CISPO) else ~dropped_tokens(config, base, batch, bounds)
    return -weights * batch.advantages * integral * kept


@pytest.mark.parametrize("per_token", [False, True], ids=["constant", "per token"])
@pytest.mark.parametrize("config", LOSSES, ids=loss_id)
def test_gradients_are_those_of_finite_differences(config, per_token):
    completions = Completions.random(LENGTHS, seed=1, per_token=per_token)
    batch, logprobs, weights = packed(completions, ALL_IN_ONE[0])
    bounds, mask = bounds_for(config, completions), batch.loss_mask
    if isinstance(config, M2PO):  # its bounds are ratios of tokens, where the loss has a kink
        bounds = ClipBounds(low=bounds.low * 0.999, high=bounds.high * 1.001)
    policy_losses(config, logprobs, batch, bounds, weights)[mask].sum().backward()
    base, step, largest = logprobs.detach(), 1e-6, 0.0
    for t in mask.nonzero().squeeze(1).tolist():
        sides = []
        for sign in (step, -step):
            moved = base.clone()
            moved[t] += sign
            sides.append(objective(config, moved, base, batch, bounds, weights)[mask].sum().item())
        difference = (sides[0] - sides[1]) / (2 * step)
        assert logprobs.grad[t].item() == pytest.approx(difference, rel=1e-6, abs=1e-7)
        largest = max(largest, abs(difference))
    assert largest > 0.1


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("config", LOSSES, ids=loss_id)
def test_packing_padding_and_microbatches_change_nothing(config, reduction):
    completions = Completions.random(LENGTHS, seed=2, per_token=True)
    whole, gradients = loss_and_gradients(config, completions, ALL_IN_ONE, reduction, num_prompt=0)
    assert abs(whole) > 1e-4 and sum(g.abs().sum() for g in gradients) > 0.1
    for parts, num_prompt in [([[0], [1], [2], [3], [4]], 0), ([[4, 1], [3, 2, 0]], 1), (ALL_IN_ONE, 5)]:
        other, other_gradients = loss_and_gradients(config, completions, parts, reduction, num_prompt)
        assert other == pytest.approx(whole, rel=1e-12)
        for mine, theirs in zip(gradients, other_gradients, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)


@pytest.mark.parametrize("config", LOSSES, ids=loss_id)
def test_weights_scale_each_token(config):
    completions = Completions.random(LENGTHS, seed=3)
    batch, logprobs, weights = packed(completions, ALL_IN_ONE[0])
    bounds, mask = bounds_for(config, completions), batch.loss_mask
    plain = policy_losses(config, logprobs, batch, bounds, torch.ones_like(weights))[mask]
    weighted = policy_losses(config, logprobs, batch, bounds, weights)[mask]
    torch.testing.assert_close(weighted, weights[mask] * plain, rtol=1e-12, atol=0)


def test_bounds_are_calibrated_fixed_chosen_or_none():
    other = ClipBounds(low=0.5, high=2.0)
    assert fixed_bounds(PPOClip(), other) == other
    assert fixed_bounds(GSPO(), other) == fixed_bounds(CISPO(), other) == other
    assert all(fixed_bounds(config, other) is None for config in (BAPO(), M2PO(), DPPOTV(), DPPOKL(), Reinforce()))
    ratio, advantages = torch.tensor([1.5, 0.4]), torch.tensor([1.0, -1.0])
    assert chosen_bounds(BAPO(), ratio, advantages, torch.ones(2), torch.ones(2)) == ClipBounds(low=0.6, high=1.2)
    assert chosen_bounds(M2PO(), ratio, advantages, torch.ones(2), torch.ones(2)) == ClipBounds(low=1.0, high=1.0)


def test_on_policy_every_loss_is_the_policy_gradient():
    # -w A for each token.
    completions = Completions.random(LENGTHS, seed=4)
    on_policy = Completions(
        completions.old_logprobs, completions.old_logprobs, completions.advantages, completions.weights
    )
    wanted = [-w * a / sum(LENGTHS) for w, a in zip(completions.weights, completions.advantages, strict=True)]
    for config in LOSSES:
        _, gradients = loss_and_gradients(config, on_policy, ALL_IN_ONE)
        for sequence, (mine, theirs) in enumerate(zip(gradients, wanted, strict=True)):
            if type(config) is GSPO:  # through the mean
                theirs = theirs.mean().expand_as(theirs)
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-15, msg=f"{loss_id(config)}, {sequence}")
