"""Entropy metrics by hand."""

import pytest
import torch

from octavo.rl.entropy import ENTROPY_EDGES, entropy_metrics


def test_mean_tail_and_histogram_by_hand():
    values = [0.0, 0.005, 0.01, 0.02, 0.2, 0.5, 1.0, 1.5, 3.0, 9.0, 0.05]
    metrics = entropy_metrics(torch.tensor(values))
    assert metrics["policy/entropy"] == pytest.approx(sum(values) / 11)
    assert metrics["policy/entropy_p50"] == pytest.approx(0.2)
    assert metrics["policy/entropy_p90"] == pytest.approx(3.0) and metrics["policy/entropy_p99"] == pytest.approx(9.0)
    assert metrics["policy/entropy_above_1_share"] == pytest.approx(3 / 11)
    # [0, 0.01) [0.01, 0.03) [0.03, 0.1) [0.1, 0.3) [0.3, 1) [1, 2) [2, 4) [4, inf); 0.01 in FP32 is a little less
    assert metrics["policy/entropy_histogram"] == [3, 1, 1, 1, 1, 2, 1, 1]
    assert len(metrics["policy/entropy_histogram"]) == len(ENTROPY_EDGES)


def test_one_token_is_its_own_quantile():
    metrics = entropy_metrics(torch.tensor([0.7]))
    assert metrics["policy/entropy_p50"] == metrics["policy/entropy_p99"] == pytest.approx(0.7)
    assert sum(metrics["policy/entropy_histogram"]) == 1
