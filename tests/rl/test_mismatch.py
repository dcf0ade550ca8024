"""Mismatch and over-clipping metrics against values worked out by hand."""

import math

import pytest
import torch

from octavo.rl.losses import ClipConfig
from octavo.rl.mismatch import amplification, mismatch_by_position, mismatch_metrics, overclip_metrics, tis_weights


def logs(*values):
    """Natural logarithms of values, [T] float64."""
    return torch.tensor(values, dtype=torch.float64).log()


def test_tis_weights_are_capped_ratios_without_gradient():
    # 0.2 / 0.4 = 0.5; 0.3 / 0.2 = 1.5; 0.6 / 0.2 = 3, capped at 2; equal gives exactly 1.
    old = logs(0.2, 0.3, 0.6, 0.7).requires_grad_()
    weights = tis_weights(old, logs(0.4, 0.2, 0.2, 0.7))
    assert weights.tolist() == pytest.approx([0.5, 1.5, 2.0, 1.0], rel=1e-12)
    assert weights[3].item() == 1.0 and not weights.requires_grad
    assert tis_weights(old, logs(0.4, 0.2, 0.2, 0.7), cap=1.25).tolist() == pytest.approx([0.5, 1.25, 1.25, 1.0])


def test_tis_weights_show_a_nan_and_cap_an_overflow():
    weights = tis_weights(torch.tensor([math.nan, 0.0]), torch.tensor([0.0, -1000.0]))
    assert math.isnan(weights[0].item()) and weights[1].item() == 2.0


@pytest.mark.parametrize("cap", [0.9, -1.0, math.nan])
def test_cap_is_checked(cap):
    with pytest.raises(ValueError, match=f"at least 1.*got {cap}"):
        tis_weights(torch.zeros(1), torch.zeros(1), cap)
    with pytest.raises(ValueError, match=f"at least 1.*got {cap}"):
        mismatch_metrics(torch.zeros(1), torch.zeros(1), torch.ones(1), cap)


def test_mismatch_metrics():
    # Rollout ratios 2, 1/2, 4, 1 (a fifth token is masked out); d = log 2 times (1, -1, 2, 0).
    # max |d| = 2 log 2; mean |d| = log 2; mean d = log 2 / 2;
    # variance / log^2 2 = ((1/2)^2 + (3/2)^2 + (3/2)^2 + (1/2)^2) / 4 = 5 / 4.
    # k1 = -mean d; k3 = mean ratio - 1 - mean d = 7.5 / 4 - 1 - log 2 / 2.
    # Weights with cap 2: 2, 1/2, 2, 1: mean 5.5 / 4; only the ratio of 4 is above the cap.
    old = logs(0.8, 0.2, 0.8, 0.3, 0.9)
    rollout = logs(0.4, 0.4, 0.2, 0.3, 0.001)
    metrics = mismatch_metrics(old, rollout, torch.tensor([1, 1, 1, 1, 0]), cap=2.0 + 1e-9)
    log2 = math.log(2.0)
    assert metrics == pytest.approx(
        {
            "mismatch/max_abs_logprob_diff": 2 * log2,
            "mismatch/mean_abs_logprob_diff": log2,
            "mismatch/std_logprob_diff": log2 * math.sqrt(5) / 2,
            "mismatch/kl_k1": -log2 / 2,
            "mismatch/kl_k3": 0.875 - log2 / 2,
            "mismatch/outside_share": 3 / 4,
            "mismatch/tis_weight_mean": 5.5 / 4,
            "mismatch/tis_capped_share": 1 / 4,
            "mismatch/num_tokens": 4.0,
        },
        rel=1e-8,
    )


def test_both_kl_estimates_are_the_kl_from_sampler_to_old():
    # Tokens in the proportions of the sampler s = (1/4, 3/4), old o = (1/2, 1/2):
    # KL(s || o) = 1/4 log(1/2) + 3/4 log(3/2); the other direction is another number.
    old, rollout = logs(0.5, 0.5, 0.5, 0.5), logs(0.25, 0.75, 0.75, 0.75)
    metrics = mismatch_metrics(old, rollout, torch.ones(4), 2.0)
    wanted = 0.25 * math.log(0.5) + 0.75 * math.log(1.5)
    assert wanted != pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3), rel=0.05)
    assert metrics["mismatch/kl_k1"] == pytest.approx(wanted, rel=1e-12)
    assert metrics["mismatch/kl_k3"] == pytest.approx(wanted, rel=1e-12)


def test_the_band_of_rollout_ratios():
    old, rollout = logs(0.79, 0.81, 1.19, 1.21), logs(1.0, 1.0, 1.0, 1.0)
    assert mismatch_metrics(old, rollout, torch.ones(4), 2.0)["mismatch/outside_share"] == 0.5


def test_an_exact_rollout_and_no_tokens_have_no_mismatch():
    values = torch.tensor([-0.3, -7.1, -0.01])
    for mask, num_tokens in ((torch.ones(3), 3.0), (torch.zeros(3), 0.0)):
        metrics = mismatch_metrics(values, values, mask, 2.0)
        assert metrics.pop("mismatch/num_tokens") == num_tokens
        assert metrics.pop("mismatch/tis_weight_mean") == 1.0
        assert set(metrics.values()) == {0.0} and len(metrics) == 7


def test_a_nan_is_never_hidden_but_masked_tokens_may_hold_anything():
    old, rollout = torch.tensor([-1.0, math.nan, -2.0]), torch.tensor([-1.0, -1.0, -2.0])
    for pair in ((old, rollout), (rollout, old)):
        metrics = mismatch_metrics(*pair, torch.ones(3), 2.0)
        assert metrics.pop("mismatch/num_tokens") == 3.0
        assert all(math.isnan(value) for value in metrics.values()), metrics
        assert mismatch_metrics(*pair, torch.tensor([1, 0, 1]), 2.0)["mismatch/max_abs_logprob_diff"] == 0.0


def test_overclip_metrics():
    # Bounds 0.75 and 1.5. A < 0:            r_fp8   r_bf16   clipped by
    #                                        0.75    1.0      FP8 only (a ratio on the bound is clipped)
    #                                        0.5     0.75     both
    #                                        1.0     0.5      BF16 only
    #                                        2.0     2.0      neither: high does not clip A < 0
    # A > 0:                                 1.5     1.25     FP8 only
    #                                        0.5     0.5      neither
    # A = 0:                                 0.5     0.5      neither
    ratio = torch.tensor([0.75, 0.5, 1.0, 2.0, 1.5, 0.5, 0.5, 0.1])
    shadow = torch.tensor([1.0, 0.75, 0.5, 2.0, 1.25, 0.5, 0.5, 9.0])
    advantages = torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0, 1.0, 0.0, -1.0])
    mask = torch.tensor([1, 1, 1, 1, 1, 1, 1, 0])
    metrics = overclip_metrics(ratio, shadow, advantages, mask, ClipConfig(clip_low=0.25, clip_high=0.5))
    # |r_fp8 - r_bf16| = 0.25, 0.25, 0.5, 0, 0.25, 0, 0, sum 1.25; sum r_bf16 = 6.5.
    diffs = [math.log(0.75), math.log(2 / 3), math.log(2.0), 0.0, math.log(1.2), 0.0, 0.0]
    mean = sum(diffs) / 7
    assert metrics == pytest.approx(
        {
            "overclip/low_share": 1 / 4,
            "overclip/high_share": 1 / 2,
            "overclip/clip_low_share_fp8": 2 / 4,
            "overclip/clip_low_share_bf16": 2 / 4,
            "overclip/clip_high_share_fp8": 1 / 2,
            "overclip/clip_high_share_bf16": 0.0,
            "overclip/agreement": 1 / 4,
            "overclip/ratio_nmae": 1.25 / 6.5,
            "overclip/log_ratio_std_diff": math.sqrt(sum((diff - mean) ** 2 for diff in diffs) / 7),
        },
        rel=1e-12,
    )


def test_overclip_metrics_without_clipping_tokens_or_numbers():
    ones, advantages = torch.ones(2), torch.tensor([-1.0, 1.0])
    for mask in (torch.ones(2), torch.zeros(2)):
        metrics = overclip_metrics(ones, ones, advantages, mask, ClipConfig())
        assert metrics.pop("overclip/agreement") == 1.0
        assert set(metrics.values()) == {0.0} and len(metrics) == 8
    for bad in ((ones * math.nan, ones), (ones, ones * math.nan)):
        metrics = overclip_metrics(*bad, advantages, torch.ones(2), ClipConfig())
        assert all(math.isnan(value) for value in metrics.values()), metrics


def test_amplification():
    # p_fp8 = 0.5, 0.3; p_bf16 = 0.4, 0.4: errors 0.1 + 0.1 over 0.8 = 0.25.
    # old 0.5, 0.5 and shadow old 0.8, 0.4: r_fp8 = 1.0, 0.6, r_bf16 = 0.5, 1.0: errors 0.5 + 0.4 over 1.5 = 0.6.
    # amplification = 0.6 / 0.25 = 2.4.
    metrics = amplification(
        logs(0.5, 0.3, 0.9), logs(0.4, 0.4, 0.1), logs(0.5, 0.5, 0.9), logs(0.8, 0.4, 0.2), torch.tensor([1, 1, 0])
    )
    wanted = {"noise/nmae_probability": 0.25, "noise/nmae_ratio": 0.6, "noise/amplification": 2.4}
    assert metrics == pytest.approx(wanted, rel=1e-12)


def test_amplification_without_noise_or_numbers():
    values, other = logs(0.5, 0.25), logs(0.25, 0.25)
    none = amplification(values, values, values, values, torch.ones(2))
    assert set(none.values()) == {0.0}
    assert set(amplification(values, other, values, values, torch.zeros(2)).values()) == {0.0}
    # The probabilities agree and the ratios do not: no finite factor describes that.
    assert amplification(values, values, values, other, torch.ones(2))["noise/amplification"] == math.inf
    broken = amplification(values * math.nan, values, values, values, torch.ones(2))
    assert all(math.isnan(value) for value in broken.values())


def test_mismatch_by_position_by_hand():
    positions = torch.tensor([0, 1, 2, 3, 6, 7, 0, 40])
    diff = torch.tensor([0.5, 1.0, -3.0, 0.0, 0.25, 2.0, 0.0, 0.125])
    metrics = mismatch_by_position(diff, torch.zeros(8), positions)
    # buckets 0, 1-2, 3-6, 7-14, 15-30, 31-62
    assert metrics["mismatch/max_abs_by_position"] == [0.5, 3.0, 0.25, 2.0, None, 0.125]
    assert metrics["mismatch/mean_abs_by_position"] == [0.25, 2.0, 0.125, 2.0, None, 0.125]


def test_mismatch_by_position_of_no_tokens_is_empty():
    empty = torch.zeros(0)
    assert mismatch_by_position(empty, empty, empty.long())["mismatch/max_abs_by_position"] == []
