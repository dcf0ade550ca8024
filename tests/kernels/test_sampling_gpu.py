"""The sampler's kernel on a GPU."""

import pytest
import torch
from sampling_checks import check_draws, check_edges, check_frequencies, check_greedy

pytestmark = pytest.mark.gpu


def test_draws_are_where_whole_numbers_put_them():
    torch.manual_seed(0)
    check_draws("cuda", 128, 151_936)
    check_draws("cuda", 5, 49_152)


def test_frequencies_match_the_softmax():
    torch.manual_seed(0)
    for vocabulary in (300, 4000):
        check_frequencies("cuda", 200_000, vocabulary)


def test_edges_and_greedy():
    check_edges("cuda")
    check_greedy("cuda")
