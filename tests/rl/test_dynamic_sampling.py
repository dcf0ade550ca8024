"""Which groups are informative, how many more are drawn, and the metrics of the choice, by hand."""

import pytest
import torch

from octavo.rl.dynamic_sampling import DynamicSamplingConfig, informative, num_to_draw, sampling_metrics


def test_a_group_is_informative_when_two_rewards_differ():
    rewards = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1e-7], [1.0, 0.5, 1.0]])
    assert informative(rewards).tolist() == [False, False, True, True]
    assert informative(torch.tensor([[0.5]])).tolist() == [False]


@pytest.mark.parametrize(
    "wanted, found, drawn, count",
    [
        (16, 8, 16, 16),  # half of them: 8 are missing, 16 should give them
        (16, 15, 16, 2),
        (16, 12, 16, 6),
        (16, 1, 16, 16),  # at most a whole step's
        (16, 0, 16, 16),
        (4, 3, 400, 4),
    ],
)
def test_the_next_try_draws_what_should_be_enough(wanted, found, drawn, count):
    assert num_to_draw(wanted, found, drawn) == count


def test_metrics_by_hand():
    rewards = torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.5, 0.5], [0.0, 1.0], [1.0, 0.0]])
    assert sampling_metrics(rewards, informative(rewards), 1, 2) == {
        "sampling/tries": 2.0,
        "sampling/prompts_drawn": 5.0,
        "sampling/groups_trained": 1.0,
        "sampling/dropped_share": pytest.approx(0.6),
        "sampling/all_right_share": pytest.approx(0.2),
        "sampling/all_wrong_share": pytest.approx(0.2),
    }


def test_no_try_at_all_is_refused():
    with pytest.raises(ValueError, match="max_tries must be at least 1; got 0"):
        DynamicSamplingConfig(max_tries=0)
