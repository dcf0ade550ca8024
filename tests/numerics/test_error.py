import math

import pytest
import torch

from octavo.numerics.error import relative_error, sqnr_db
from octavo.numerics.fp8 import BLOCK_1X128, dequantize, quantize


def test_sqnr_by_hand():
    # Signal 9 + 16 = 25, noise 0.25: a factor of 100.
    reference = torch.tensor([3.0, 4.0])
    assert sqnr_db(torch.tensor([3.0, 4.5]), reference) == pytest.approx(20.0, abs=1e-12)
    assert sqnr_db(torch.tensor([[0.0], [0.0]]), reference[:, None]) == pytest.approx(0.0, abs=1e-12)
    assert sqnr_db(reference, reference) == math.inf


def test_sqnr_of_bad_values():
    ones = torch.ones(2)
    assert sqnr_db(torch.tensor([1.0, torch.inf]), ones) == -math.inf
    assert math.isnan(sqnr_db(torch.tensor([1.0, torch.nan]), ones))
    assert math.isnan(sqnr_db(ones, torch.tensor([1.0, torch.nan])))
    assert math.isnan(sqnr_db(ones, torch.tensor([1.0, torch.inf])))


def test_sqnr_wants_a_signal_of_the_same_shape():
    with pytest.raises(ValueError, match=r"equal shapes; got \(2,\) and \(2, 1\)"):
        sqnr_db(torch.ones(2), torch.ones(2, 1))
    with pytest.raises(ValueError, match="the reference is all zeros"):
        sqnr_db(torch.ones(2), torch.zeros(2))


def test_errors_are_taken_in_float64():
    # In BF16 the difference of 1 and 1 + 2**-7, squared and summed 4096 times, would not come out even.
    x, reference = torch.full((4096,), 1 + 2.0**-7, dtype=torch.bfloat16), torch.ones(4096, dtype=torch.bfloat16)
    assert relative_error(x, reference) == 2.0**-7
    assert sqnr_db(x, reference) == pytest.approx(140 * math.log10(2), abs=1e-12)


def test_relative_error_by_hand():
    reference = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.5]), reference) == pytest.approx(0.1, abs=1e-15)
    assert relative_error(reference, reference) == 0.0
    assert relative_error(2 * reference, reference) == 1.0
    assert relative_error(torch.ones(2), torch.zeros(2)) == math.inf


@pytest.mark.parametrize(
    "x, reference", [([torch.nan, 1.0], [1.0, 1.0]), ([1.0, 1.0], [torch.nan, 1.0]), ([0.0], [0.0])]
)
def test_a_relative_error_without_meaning_passes_no_bound(x, reference):
    assert not relative_error(torch.tensor(x), torch.tensor(reference)) <= math.inf


def test_e4m3_gives_the_noise_it_is_said_to():
    # A code's relative error is uniform in +-2**-4 / mantissa, mantissa in [1, 2): about 31.5 dB before subnormals.
    x = torch.randn(256, 128)
    q, scale = quantize(x, BLOCK_1X128)
    assert sqnr_db(dequantize(q, scale, BLOCK_1X128), x) == pytest.approx(31.5, abs=0.5)
