"""Weights against mismatch, worked out by hand."""

import math

import pytest
import torch

from octavo.rl.corrections import IcePop, SequenceMask, SequenceTIS, correction_metrics, correction_weights
from octavo.rl.mismatch import tis_weights

# Two completions behind prompts: rollout ratios 2, 1/2, 8 (product 8, geometric mean 2), and 4, 1/2 (2, sqrt 2).
MASK = torch.tensor([0, 1, 1, 1, 0, 0, 1, 1])
INDEX = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
RATIO = torch.tensor([9.0, 2.0, 0.5, 8.0, 9.0, 9.0, 4.0, 0.5], dtype=torch.float64)
OLD = torch.linspace(-3.0, -1.0, 8, dtype=torch.float64)
ROLLOUT = OLD - RATIO.log()


def weights_of(config, old=OLD, rollout=ROLLOUT, tis_cap=2.0):
    weights = correction_weights(old.requires_grad_(), rollout, MASK, INDEX, config, tis_cap)
    assert not weights.requires_grad
    return weights[MASK.bool()]


@pytest.mark.parametrize(
    "config, wanted",
    [
        (None, [2.0, 0.5, 2.0, 2.0, 0.5]),
        (SequenceTIS(cap=1.75), [1.75] * 3 + [math.sqrt(2)] * 2),
        (SequenceTIS(weight="product", cap=3.0), [3.0] * 3 + [2.0] * 2),
        (IcePop(low=0.49, high=5.0), [2.0, 0.5, 0.0, 4.0, 0.5]),
        (IcePop(low=0.6, high=2.0 + 1e-9), [2.0, 0.0, 0.0, 0.0, 0.0]),
        (SequenceMask(low=0.5, high=1.5, cap=3.0), [0.0, 0.0, 0.0, 3.0, 0.5]),
        (SequenceMask(low=0.5, high=2.0 + 1e-9), [2.0, 0.5, 2.0, 2.0, 0.5]),
    ],
)
def test_weights_of_each_correction(config, wanted):
    assert weights_of(config).tolist() == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(
    "config", [SequenceTIS(), SequenceTIS(weight="product"), IcePop(low=1.0, high=1.0), SequenceMask(low=1.0, high=1.0)]
)
def test_an_exact_rollout_has_weights_of_exactly_one(config):
    assert weights_of(config, rollout=OLD.detach().clone()).tolist() == [1.0] * 5


@pytest.mark.parametrize("config", [SequenceTIS(), SequenceTIS(weight="product"), IcePop(), SequenceMask()])
def test_a_nan_shows(config):
    rollout = ROLLOUT.detach().clone()
    rollout[2] = math.nan
    assert weights_of(config, rollout=rollout)[1].isnan()


def test_token_weights_are_those_of_tis():
    assert torch.equal(weights_of(None, tis_cap=1.25), tis_weights(OLD, ROLLOUT, 1.25)[MASK.bool()])


def test_metrics_count_loss_tokens_only():
    weights = torch.tensor([0.0, 2.0, 0.0, 1.0])
    metrics = correction_metrics(weights, torch.tensor([0, 1, 1, 1]))
    assert metrics == {"correction/weight_mean": 1.0, "correction/dropped_share": 1 / 3}
    assert correction_metrics(weights, torch.zeros(4))["correction/weight_mean"] == 1.0
    assert math.isnan(correction_metrics(torch.tensor([math.nan, 0.0]), torch.ones(2))["correction/dropped_share"])


@pytest.mark.parametrize(
    "config, fields, message",
    [
        (IcePop, {"low": 1.2}, "low=1.2"),
        (IcePop, {"high": 0.9}, "high=0.9"),
        (SequenceMask, {"low": -0.1}, "low=-0.1"),
        (SequenceMask, {"cap": 0.5}, "got 0.5"),
        (SequenceTIS, {"cap": 0.0}, "got 0.0"),
        (SequenceTIS, {"weight": "mean"}, "got 'mean'"),
    ],
)
def test_configs_are_checked(config, fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)
