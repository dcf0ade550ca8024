"""Token losses, their gradients and their reduction against values worked out by hand."""

import math

import pytest
import torch

from octavo.rl.loss_clipped import beyond
from octavo.rl.losses import (
    ClipBounds,
    ClipConfig,
    KLConfig,
    clip_metrics,
    kl_estimate,
    loss_tokens,
    reduce_loss,
    share,
)

BOUNDS = ClipBounds(low=0.8, high=1.28)
COUNTS = {"num_loss_tokens": 10, "num_sequences": 3, "max_completion_tokens": 8}


def test_clip_config_gives_absolute_bounds():
    assert ClipConfig(clip_low=0.25, clip_high=0.5).bounds() == ClipBounds(low=0.75, high=1.5)
    assert ClipConfig().bounds() == ClipBounds(low=0.8, high=1.28)


@pytest.mark.parametrize("low, high", [(-0.1, 1.2), (1.1, 1.2), (0.8, 0.9), (math.nan, 1.2), (0.2, 0.28)])
def test_clip_bounds_are_checked(low, high):
    with pytest.raises(ValueError, match="0 <= low <= 1 <= high"):
        ClipBounds(low=low, high=high)


@pytest.mark.parametrize("field, value", [("clip_low", 1.0), ("clip_low", -0.1), ("clip_high", -0.1)])
def test_clip_config_is_checked(field, value):
    with pytest.raises(ValueError, match=f"{field} is an offset.*got {value}"):
        ClipConfig(**{field: value})


def metrics_of(ratio, advantages, loss_mask, bounds=BOUNDS):
    """clip_metrics of what `ppo_clip` drops at these bounds."""
    return clip_metrics(beyond(ratio, advantages, bounds), ratio, advantages, loss_mask)


def test_clip_metrics_count_by_sign():
    # Loss tokens, as (r, A): (0.7, -1) low, (0.9, -1), (1.5, -1) unclipped, (1.5, 1) high, (0.7, 1) unclipped,
    # (0.7, 0) no advantage. The last token is clipped but masked out.
    ratio = torch.tensor([0.7, 0.9, 1.5, 1.5, 0.7, 0.7, 0.7])
    advantages = torch.tensor([-1.0, -1.0, -1.0, 1.0, 1.0, 0.0, -1.0])
    metrics = metrics_of(ratio, advantages, torch.tensor([1, 1, 1, 1, 1, 1, 0]))
    assert metrics == {
        "loss/clip_fraction": 2 / 6,
        "loss/clip_fraction_low": 1 / 3,
        "loss/clip_fraction_high": 1 / 2,
    }


def test_a_ratio_on_a_bound_is_not_clipped():
    ratio = torch.tensor([0.75, 1.5])
    metrics = metrics_of(ratio, torch.tensor([-1.0, 1.0]), torch.ones(2), ClipBounds(low=0.75, high=1.5))
    assert set(metrics.values()) == {0.0}


def test_clip_metrics_are_zero_without_tokens_and_nan_with_a_nan():
    ratio, advantages = torch.tensor([0.5, math.nan]), torch.tensor([-1.0, -1.0])
    assert set(metrics_of(ratio, advantages, torch.tensor([0, 0])).values()) == {0.0}
    assert all(math.isnan(value) for value in metrics_of(ratio, advantages, torch.ones(2)).values())
    assert metrics_of(ratio, advantages, torch.tensor([1, 0]))["loss/clip_fraction_low"] == 1.0


def test_kl_estimates():
    # d = 0.5: k1 = 0.5, k2 = 0.125, k3 = e^-0.5 - 1 + 0.5 = 0.1065306597.
    # d = -1: k1 = -1, k2 = 0.5, k3 = e - 1 - 1 = 0.7182818285.
    logprobs, ref_logprobs = torch.tensor([-1.0, -3.0]), torch.tensor([-1.5, -2.0])
    wanted = {"k1": [0.5, -1.0], "k2": [0.125, 0.5], "k3": [0.1065306597, 0.7182818285]}
    for estimator, values in wanted.items():
        torch.testing.assert_close(kl_estimate(logprobs, ref_logprobs, estimator), torch.tensor(values))


def test_k3_keeps_its_digits_for_small_differences():
    # k3 = d^2/2 - d^3/6 + ...; with d = 2^-12 that is 2^-25 (1 - 2^-12 / 3), where exp(-d) - 1 + d in fp32 is noise.
    k3 = kl_estimate(torch.tensor([2.0**-12]), torch.zeros(1), "k3")
    torch.testing.assert_close(k3, torch.tensor([2.0**-25 * (1 - 2**-12 / 3)]), rtol=1e-3, atol=0)


def test_expected_gradient_of_each_kl_estimate():
    # Averaged over tokens drawn from the policy p: k1 gives sum p dlog p = d(sum p) = 0, k2 the gradient of
    # KL(p || q), k3 that of KL(q || p).
    logits = torch.tensor([0.3, -0.4, 1.1], dtype=torch.float64, requires_grad=True)
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)

    def gradient(value):
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    logprobs = logits.log_softmax(dim=0)
    p = logprobs.exp()
    expected = {e: gradient((p.detach() * kl_estimate(logprobs, q.log(), e)).sum()) for e in ("k1", "k2", "k3")}
    policy_ref, ref_policy = gradient((p * (logprobs - q.log())).sum()), gradient(-(q * logprobs).sum())
    assert policy_ref.abs().max() > 0.05 and (policy_ref - ref_policy).abs().max() > 0.05
    torch.testing.assert_close(expected["k1"], torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(expected["k2"], policy_ref, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(expected["k3"], ref_policy, rtol=1e-12, atol=1e-15)


def test_kl_config_refuses_k1_as_a_loss():
    with pytest.raises(ValueError, match="expectation under the policy is zero.*Use estimator 'k2' or 'k3'"):
        KLConfig(coefficient=0.01, estimator="k1")
    assert KLConfig(estimator="k1").coefficient == 0.0


def test_kl_in_the_reward_wants_k1():
    assert KLConfig(coefficient=0.01, estimator="k1", placement="reward").placement == "reward"
    with pytest.raises(ValueError, match="placement 'reward' .* got estimator 'k3'. Use estimator 'k1'"):
        KLConfig(coefficient=0.01, placement="reward")
    with pytest.raises(ValueError, match="placement is one of .* got 'prompt'"):
        KLConfig(placement="prompt")


@pytest.mark.parametrize("fields", [{"coefficient": -0.1}, {"coefficient": math.nan}, {"estimator": "k4"}])
def test_kl_config_is_checked(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        KLConfig(**fields)


def test_kl_estimate_refuses_an_unknown_estimator():
    with pytest.raises(ValueError, match="got 'k4'"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


@pytest.mark.parametrize(
    "reduction, wanted",
    [
        # Loss tokens: sequence 0 has 1, 2, 6 (mean 3), sequence 1 has 5 (mean 5).
        ("token_mean", 14 / 10),
        ("sequence_mean", (3 + 5) / 3),
        ("constant", 14 / (3 * 8)),
    ],
)
def test_reduce_loss_and_its_gradient(reduction, wanted):
    # Masked tokens hold what padding may hold: a NaN, and an index that no sequence has.
    losses = torch.tensor([100.0, 1.0, 2.0, 6.0, math.nan, 5.0, math.inf], requires_grad=True)
    mask = torch.tensor([0, 1, 1, 1, 0, 1, 0])
    index = torch.tensor([0, 0, 0, 0, 1, 1, -1])
    loss = reduce_loss(losses, mask, index, reduction, **COUNTS)
    loss.backward()
    assert loss.item() == pytest.approx(wanted, rel=1e-6)
    each = {"token_mean": [1 / 10] * 2, "sequence_mean": [1 / 9, 1 / 3], "constant": [1 / 24] * 2}[reduction]
    gradient = [0.0, each[0], each[0], each[0], 0.0, each[1], 0.0]
    assert losses.grad.tolist() == pytest.approx(gradient, rel=1e-6)


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
def test_losses_of_microbatches_add_up_to_that_of_the_mini_batch(reduction):
    generator = torch.Generator().manual_seed(0)
    lengths = [5, 1, 17, 8, 30, 3, 12]
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    losses = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    mask = torch.rand(sum(lengths), generator=generator) < 0.7
    mask[index == 1] = False  # a sequence without loss tokens: adds 0, and is counted in num_sequences
    counts = {"num_loss_tokens": int(mask.sum()), "num_sequences": len(lengths), "max_completion_tokens": 32}
    whole = reduce_loss(losses, mask, index, reduction, **counts)

    parts = 0.0
    for first, last in [(0, 2), (2, 3), (3, 7)]:  # microbatches of 2, 1 and 4 sequences, numbered from 0 in each
        inside = (index >= first) & (index < last)
        parts += reduce_loss(losses[inside], mask[inside], index[inside] - first, reduction, **counts).item()
    assert abs(whole.item()) > 1e-3
    assert parts == pytest.approx(whole.item(), rel=1e-12)


def test_reductions_differ_as_their_papers_do():
    # One long sequence of loss 1 and one short of loss 0: DAPO weighs tokens, GRPO sequences.
    losses, index = torch.tensor([1.0] * 9 + [0.0]), torch.tensor([0] * 9 + [1])
    counts = {"num_loss_tokens": 10, "num_sequences": 2, "max_completion_tokens": 9}
    found = {
        name: reduce_loss(losses, torch.ones(10), index, name, **counts).item()
        for name in ("token_mean", "sequence_mean", "constant")
    }
    assert found == pytest.approx({"token_mean": 0.9, "sequence_mean": 0.5, "constant": 0.5})


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean", "constant"])
def test_a_microbatch_without_loss_tokens_adds_nothing(reduction):
    losses = torch.tensor([1.0, math.nan], requires_grad=True)
    loss = reduce_loss(losses, torch.zeros(2), torch.tensor([0, 1]), reduction, **COUNTS)
    loss.backward()
    assert loss.item() == 0.0
    assert losses.grad.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("name", list(COUNTS))
def test_reduce_loss_has_no_default_normaliser_and_refuses_zero(name):
    arguments = (torch.ones(1), torch.ones(1), torch.zeros(1, dtype=torch.int64), "token_mean")
    with pytest.raises(TypeError, match=name):
        reduce_loss(*arguments, **{key: value for key, value in COUNTS.items() if key != name})
    with pytest.raises(ValueError, match=f"{name} of the whole mini-batch, at least 1; got 0"):
        reduce_loss(*arguments, **COUNTS | {name: 0})


def test_reduce_loss_refuses_an_unknown_reduction():
    with pytest.raises(ValueError, match="got 'mean'"):
        reduce_loss(torch.ones(1), torch.ones(1), torch.zeros(1, dtype=torch.int64), "mean", **COUNTS)


def test_loss_tokens_are_selected_detached_and_wide():
    values = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    (selected,) = loss_tokens(torch.tensor([1, 0, 1]), values)
    assert selected.tolist() == [1.0, 3.0]
    assert selected.dtype == torch.float64 and not selected.requires_grad


def test_share_of_nothing_and_of_nan():
    event, population = torch.tensor([True, True, False]), torch.tensor([True, False, True])
    assert share(event, population, (torch.zeros(3),)) == 0.5
    assert share(event, torch.zeros(3, dtype=torch.bool), (torch.zeros(3),), empty=1.0) == 1.0
    assert math.isnan(share(event, population, (torch.zeros(3), torch.tensor([0.0, math.nan, 0.0]))))
