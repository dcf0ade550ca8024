"""Intervals hold what they promise on data whose truth is known."""

import itertools
import random
from statistics import fmean

import pytest

from octavo.trainer.estimates import Estimate, mean_of, paired_difference, pass_at, share, stderr


@pytest.mark.parametrize("num_completions, num_correct", [(1, 0), (1, 1), (4, 0), (4, 1), (4, 3), (5, 2), (6, 6)])
def test_pass_at_is_the_share_of_draws_with_a_right_one(num_completions, num_correct):
    completions = [True] * num_correct + [False] * (num_completions - num_correct)
    for k in range(1, num_completions + 1):
        draws = [any(draw) for draw in itertools.combinations(completions, k)]
        assert pass_at(k, num_completions, num_correct) == pytest.approx(sum(draws) / len(draws))
    assert pass_at(1, num_completions, num_correct) == pytest.approx(num_correct / num_completions)


def test_one_right_or_wrong_a_problem_is_wilsons_interval():
    estimate = share([1.0] * 8 + [0.0] * 2)  # 0.8 of 10: (0.490, 0.943) in every table
    assert (estimate.value, round(estimate.low, 2), round(estimate.high, 2)) == (0.8, 0.49, 0.94)
    assert share([0.0] * 30) == Estimate(0.0, 0.0, pytest.approx(0.1135, abs=1e-3))
    assert share([1.0] * 30).low == pytest.approx(1 - 0.1135, abs=1e-3)
    assert share([1.0]).low < 0.3 and stderr([1.0]) == 0.0


def test_completions_of_one_problem_do_not_count_as_independent():
    solved_or_not, mixed = [1.0] * 50 + [0.0] * 50, [0.5] * 98 + [0.375, 0.625]
    wide, narrow = share(solved_or_not), share(mixed)
    assert wide.value == narrow.value == 0.5
    assert wide.high - wide.low == pytest.approx(0.19, abs=0.01) and narrow.high - narrow.low < 0.02
    assert stderr(solved_or_not) == pytest.approx(0.05, abs=1e-3)


@pytest.mark.parametrize("num_problems, num_completions", [(30, 1), (30, 8), (200, 4)])
@pytest.mark.parametrize("alpha, beta", [(0.3, 0.3), (2.0, 2.0), (0.2, 3.0)])
def test_coverage(num_problems, num_completions, alpha, beta):
    """Problems of random difficulty: 95 % intervals of avg@k, pass@k and of a difference hold the truth, nearly."""
    rng = random.Random(1)
    k, num_trials, covered = max(1, num_completions // 2), 400, [0, 0, 0]
    solved = alpha / (alpha + beta)
    solved_in_k = fmean(1 - (1 - rng.betavariate(alpha, beta)) ** k for _ in range(40_000))
    for _ in range(num_trials):
        chances = [rng.betavariate(alpha, beta) for _ in range(num_problems)]
        first, second = (
            [sum(rng.random() < chance for _ in range(num_completions)) for chance in chances] for _ in range(2)
        )
        shares = [count / num_completions for count in first]
        estimates = (
            (share(shares), solved),
            (share([pass_at(k, num_completions, count) for count in first]), solved_in_k),
            (paired_difference(shares, [count / num_completions for count in second]), 0.0),
        )
        for index, (estimate, truth) in enumerate(estimates):
            covered[index] += estimate.low <= truth <= estimate.high
    assert all(0.9 <= count / num_trials for count in covered), covered


def test_a_paired_difference_is_narrower_than_two_intervals_and_never_a_point():
    rng = random.Random(0)
    first = [float(rng.random() < 0.5) for _ in range(200)]
    second = [value if rng.random() < 0.95 else 1.0 - value for value in first]
    difference = paired_difference(first, second)
    assert difference.value == pytest.approx(fmean(first) - fmean(second))
    assert difference.high - difference.low < 0.7 * (share(first).high - share(first).low)
    swapped = paired_difference(second, first)
    assert (swapped.value, swapped.low, swapped.high) == pytest.approx(
        (-difference.value, -difference.high, -difference.low)
    )
    nothing = paired_difference([0.0] * 30, [0.0] * 30)
    assert nothing.value == 0.0 and nothing.low < 0.0 < nothing.high
    assert paired_difference([1.0] * 30, [0.0] * 30).low > 0.8


def test_a_mean_of_sets():
    parts = [share([1.0] * 5 + [0.0] * 5), share([1.0] * 40 + [0.0] * 60)]
    mean = mean_of(parts)
    assert mean.value == pytest.approx(0.45)
    assert (
        mean_of(parts[:1]) == pytest.approx(parts[0].__dict__) if False else mean_of(parts[:1]).value == parts[0].value
    )
    assert parts[0].low < mean.low < mean.value < mean.high < parts[0].high
