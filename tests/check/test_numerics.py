"""The self-tests pass here, and fail where a cast or a division is wrong."""

import pytest
import torch

from octavo.check import numerics
from octavo.check.numerics import CASTS, number_rows
from octavo.numerics.fp8 import E4M3, quantize_with_scale


def rows_by_name():
    return {row.name: row for row in number_rows("cpu")}


def test_this_device_is_right():
    rows = rows_by_name()
    assert {row.status for row in rows.values()} == {"OK"} and len(rows) == 2


def code(value):
    """The nearest E4M3 byte by definition: ties to the even byte, saturating."""
    if value != value:
        return 0x7F
    magnitudes = []
    for byte in range(0x7F):
        exponent, mantissa = byte >> 3, byte & 7
        magnitudes.append((1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6)
    distances = [(abs(min(abs(value), 448.0) - magnitude), byte & 1) for byte, magnitude in enumerate(magnitudes)]
    return min(range(0x7F), key=lambda byte: distances[byte]) | (0x80 if value < 0 else 0)


def test_the_table_agrees_with_the_definition_of_the_format():
    cases = [case for group in CASTS.values() for case in group]
    assert [code(value) for value, _ in cases] == [byte for _, byte in cases] and len(cases) > 20


def truncating(values, scale, block):
    nearest = quantize_with_scale(values, scale, block)
    too_large = nearest.float().abs() > values.abs()
    return (nearest.view(torch.uint8) - too_large.to(torch.uint8)).view(E4M3)


def wrapping(values, scale, block):
    return torch.where(values.abs() > 448, torch.tensor(float("nan")), values).to(E4M3)


def flushing(values, scale, block):
    return torch.where(values.abs() < 2.0**-6, 0.0, values).clamp(-448, 448).to(E4M3)


@pytest.mark.parametrize(
    "broken, named", [(truncating, "ties to even"), (wrapping, "saturation"), (flushing, "subnormals")]
)
def test_a_broken_cast_fails_with_the_next_step(broken, named, monkeypatch):
    monkeypatch.setattr(numerics, "quantize_with_scale", broken)
    row = rows_by_name()["E4M3 cast"]
    assert row.status == "FAIL" and named in row.detail and "not 0x" in row.detail and "torch build" in row.next_step


def test_a_multiplication_by_the_reciprocal_fails(monkeypatch):
    monkeypatch.setattr(numerics, "scale_from_amax", lambda amax: amax * (1.0 / 448.0))
    row = rows_by_name()["scale division"]
    assert row.status == "FAIL" and "amax / 448" in row.detail


def test_a_device_without_the_cast_fails(monkeypatch):
    def missing(*arguments):
        raise RuntimeError("not implemented for\n'Float8_e4m3fn'")

    monkeypatch.setattr(numerics, "quantize_with_scale", missing)
    row = rows_by_name()["E4M3 cast"]
    assert row.status == "FAIL" and row.detail == "not implemented for 'Float8_e4m3fn'"
