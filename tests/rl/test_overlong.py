"""The soft overlong penalty against DAPO's equation 13."""

import pytest
import torch

from octavo.rl.overlong import OverlongConfig, overlong_penalty

LENGTHS = torch.tensor([[1, 80, 85], [90, 99, 100]])


def test_the_penalty_grows_over_the_buffer():
    # Limit 100, buffer 20: nothing up to 80, then (length - 80) / 20.
    penalty = overlong_penalty(LENGTHS, 100, OverlongConfig(buffer_tokens=20))
    torch.testing.assert_close(penalty, torch.tensor([[0.0, 0.0, 0.25], [0.5, 0.95, 1.0]]))
    half = overlong_penalty(LENGTHS, 100, OverlongConfig(buffer_tokens=20, penalty=0.5))
    torch.testing.assert_close(half, penalty / 2)


def test_no_buffer_no_penalty():
    assert overlong_penalty(LENGTHS, 100, OverlongConfig()).tolist() == [[0.0] * 3] * 2


def test_a_penalty_without_a_buffer_is_refused():
    with pytest.raises(ValueError, match="penalty=0.5 grows over .* Give buffer_tokens"):
        OverlongConfig(penalty=0.5)


@pytest.mark.parametrize("fields", [{"buffer_tokens": -1}, {"penalty": -0.5}])
def test_config_is_checked(fields):
    (name,) = fields
    with pytest.raises(ValueError, match=f"{name} .* at least 0; got"):
        OverlongConfig(**fields)
