"""Self-tests of the E4M3 cast and of the division by a scale, on each device, against values worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from octavo.check.rows import Row
from octavo.numerics.fp8 import E4M3, E4M3_MAX, PER_TENSOR, quantize_with_scale, scale_from_amax
from octavo.trainer.errors import reason

TINY = 2.0**-9
"""Smallest E4M3 number above 0."""
CASTS = {
    "saturation": [(448.0, 0x7E), (449.0, 0x7E), (1e6, 0x7E), (math.inf, 0x7E), (-1e6, 0xFE)],
    "ties to even": [(1.0625, 0x38), (1.1875, 0x3A), (-1.1875, 0xBA), (1.9375, 0x40), (432.0, 0x7E), (400.0, 0x7C)],
    "subnormals": [(0.5 * TINY, 0x00), (0.51 * TINY, 0x01), (1.5 * TINY, 0x02), (7 * TINY, 0x07), (7.5 * TINY, 0x08)],
    "plain values": [(0.0, 0x00), (1.0, 0x38), (-3.25, 0xC5), (240.0, 0x77)],
    "NaN": [(math.nan, 0x7F)],
}
"""(value, byte): sign, four bits of exponent (bias 7), three of mantissa; 0x7F is NaN, 0x7E is 448."""
DECODED = [(0x7E, 448.0), (0x01, TINY), (0x07, 7 * TINY), (0x08, 8 * TINY), (0x38, 1.0), (0xC5, -3.25)]


def number_rows(device: str) -> Iterator[Row]:
    """The cast and the division on one device."""
    for name, test in (("E4M3 cast", cast_error), ("scale division", division_error)):
        try:
            error, detail = test(device)
        except RuntimeError as broken:
            error, detail = reason(broken), ""
        if error:
            step = "do not train on this device: report it with the versions above, and try another torch build"
            yield Row(group=f"numbers on {device}", name=name, status="FAIL", detail=error, next_step=step)
        else:
            yield Row(group=f"numbers on {device}", name=name, status="OK", detail=detail)


def cast_error(device: str) -> tuple[str, str]:
    """What the cast gets wrong ("" if nothing), and what was tried."""
    for name, cases in CASTS.items():
        values = torch.tensor([[value for value, _ in cases]], device=device)
        cast = quantize_with_scale(values, torch.ones(1, 1, device=device), PER_TENSOR)
        for (value, wanted), code in zip(cases, cast.view(torch.uint8)[0].tolist(), strict=True):
            if code != wanted:
                return f"{name}: {value} gives byte 0x{code:02X}, not 0x{wanted:02X}", ""
    codes = torch.tensor([code for code, _ in DECODED], dtype=torch.uint8, device=device)
    for (byte, number), read in zip(DECODED, codes.view(E4M3).float().tolist(), strict=True):
        if read != number:
            return f"byte 0x{byte:02X} reads {read}, not {number}", ""
    num_casts = sum(map(len, CASTS.values()))
    return "", f"{num_casts} casts and {len(DECODED)} readings as worked out by hand ({', '.join(CASTS)})"


def division_error(device: str) -> tuple[str, str]:
    """Whether amax / 448 and x / scale are rounded once, as a multiplication by a reciprocal is not."""
    amax = torch.linspace(0.5, 2.0, 4096)
    # Twice the bits of FP32 and two more: a quotient rounded from float64 is the correctly rounded one.
    scale = (amax.double() / E4M3_MAX).float()
    x = torch.linspace(1.0, 3.0, 4096)
    quotient = (x.double() / scale.double()).float()
    telling = int((amax * (1.0 / E4M3_MAX) != scale).sum()), int((x * (1.0 / scale) != quotient).sum())
    assert min(telling) > 100, f"only {telling} quotients tell a division from a reciprocal"
    for name, found, wanted in (
        ("amax / 448", scale_from_amax(amax.to(device)), scale),
        ("x / scale", x.to(device) / scale.to(device), quotient),
    ):
        wrong = int((found.cpu() != wanted).sum())
        if wrong:
            return f"{name}: {wrong} of {len(wanted)} quotients differ from the correctly rounded ones", ""
    return "", f"a true division: {2 * len(amax)} quotients, of which {sum(telling)} tell it from a reciprocal"
