"""Golden losses on a CPU: forward, backward, optimiser and re-quantisation of 20 steps."""

import copy

import golden_losses
import pytest
import torch
from golden_losses import CASES, NUM_STEPS, TOLERANCE, curves, difference, environment, golden
from tiny_models import disturb_, tiny_decoder


@pytest.mark.parametrize("case", CASES)
def test_losses_are_the_golden_ones(case):
    found = curves(case, "cpu")
    assert found["losses"][0] - found["losses"][-1] > 5.0, "the decoder did not learn its tokens by heart"
    assert not (reason := difference(case, "cpu", found, golden(), environment("cpu"))), reason


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_difference_is_told(device, case):
    kept = {f"{device}/{case}": {"environment": {"device": "X", "torch": "1"}, **CURVES}}
    here = {"device": "X", "torch": "1", "triton": "2"}
    assert difference(case, device, CURVES, kept, here) == ""
    last_bit = changed("grad_norms", 2**-52)
    reason = difference(case, device, last_bit, kept, here)
    assert "grad_norms differs by more than 0.0 from step 7 on (1 of 20 steps)" in reason
    elsewhere = here | {"torch": "2"}
    assert difference(case, device, last_bit, kept, elsewhere) == ""
    assert difference(case, device, changed("losses", 0.9 * TOLERANCE[case]), kept, elsewhere) == ""
    for amount in (1.1 * TOLERANCE[case], float("nan")):
        reason = difference(case, device, changed("losses", amount), kept, elsewhere)
        assert "from step 7 on" in reason and "torch 1 -> 2" in reason and reason.endswith(f"golden_losses.py {device}")
    assert reason.count("\n") == 0
    assert f"has no {device}/{case}. Write it" in difference(case, device, CURVES, {}, here)


@pytest.mark.parametrize("case", CASES)
def test_noise_stays_within_half_the_tolerance(case, monkeypatch):
    def noisy(*arguments):
        decoder = tiny_decoder(*arguments)
        disturb_(decoder, seed=1, amount=1e-4)
        return decoder

    monkeypatch.setattr(golden_losses, "tiny_decoder", noisy)
    pairs = zip(curves(case, "cpu")["losses"], golden()[f"cpu/{case}"]["losses"], strict=True)
    assert 0.0 < max(abs(found - wanted) for found, wanted in pairs) < 0.5 * TOLERANCE[case]


def test_the_tolerance_tells_the_cases_apart():
    losses = [golden()[f"cpu/{case}"]["losses"] for case in CASES]
    assert max(abs(x - y) for x, y in zip(*losses, strict=True)) > 2.0 * max(TOLERANCE.values())


CURVES = {name: [1.0 + 0.1 * step for step in range(NUM_STEPS)] for name in ("losses", "grad_norms")}


def changed(curve, amount):
    """CURVES with one step of one curve moved."""
    other = copy.deepcopy(CURVES)
    other[curve][7] += amount
    assert other[curve][7] != CURVES[curve][7]
    return other


def test_a_changed_sum_moves_the_losses_beyond_the_tolerance(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "rsqrt", lambda x: 1.02 * x.sqrt().reciprocal())
    here = {"device": "another", "torch": "another", "triton": "another"}
    assert "losses differs" in difference("bf16", "cpu", curves("bf16", "cpu"), golden(), here)
