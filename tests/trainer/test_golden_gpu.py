"""Golden losses on a GPU: the kernels' forward and backward over 20 steps."""

import pytest
from golden_losses import CASES, curves, difference, environment, golden

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", CASES)
def test_losses_are_the_golden_ones(case):
    found = curves(case, "cuda")
    assert found == curves(case, "cuda"), "two runs on this device differ"
    assert found["losses"][0] - found["losses"][-1] > 5.0, "the decoder did not learn its tokens by heart"
    assert not (reason := difference(case, "cuda", found, golden(), environment("cuda"))), reason


@pytest.mark.parametrize("case", CASES)
def test_losses_are_near_those_of_the_reference(case):
    kept = golden()
    near = {f"cuda/{case}": kept[f"cpu/{case}"]}
    assert not (reason := difference(case, "cuda", curves(case, "cuda"), near, environment("cuda"))), reason
