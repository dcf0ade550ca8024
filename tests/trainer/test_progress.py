"""Fingerprints: other weights have another, whatever changed."""

import pytest
import torch

from octavo.trainer.progress import weights_fingerprint


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
