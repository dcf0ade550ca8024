"""Random states come back through JSON; other weights have another fingerprint, whatever changed."""

import json
import random

import numpy as np
import pytest
import torch

from octavo.trainer.progress import random_states_to_json, restore_random_states, weights_fingerprint


def test_random_states_come_back_through_json():
    def draw():
        return random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand(), torch.rand(()).item()

    draw()  # leaves half a pair of normal numbers in the states
    states = json.loads(json.dumps(random_states_to_json()))
    drawn = draw()
    assert draw() != drawn
    restore_random_states(states)
    assert draw() == drawn


@pytest.mark.parametrize(
    "change",
    [
        lambda matrix, vector: matrix.neg_(),
        lambda matrix, vector: matrix.copy_(matrix.flip(1)),
        lambda matrix, vector: vector.fill_(2.0),
        lambda matrix, vector: matrix[0, 0].copy_(torch.nextafter(matrix[0, 0], torch.tensor(9.0))),
    ],
    ids=["signs", "order", "all of a vector", "one bit"],
)
def test_other_weights_have_another_fingerprint(change):
    module = torch.nn.ParameterDict({"matrix": torch.randn(3, 4), "vector": torch.ones(4)})
    before = weights_fingerprint(module)
    assert weights_fingerprint(module) == before
    with torch.no_grad():
        change(module["matrix"], module["vector"])
    assert weights_fingerprint(module) != before
