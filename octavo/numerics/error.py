"""Error measures of a quantised tensor against its reference."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sqnr_db(x: Tensor, reference: Tensor) -> float:
    """Signal to quantisation noise, 10 log10(sum ref^2 / sum (x - ref)^2), in dB.

    inf when equal, -inf where x alone is infinite, NaN on NaN.

    E4M3 with one scale per 128 normal values gives about 31 dB; each dB is a factor of 1.26 in noise power.

    Raises:
        ValueError: shapes differ, or the reference is all zeros (the measure has no meaning then).
    """
    if x.shape != reference.shape:
        raise ValueError(f"sqnr_db compares equal shapes; got {tuple(x.shape)} and {tuple(reference.shape)}")
    signal = reference.double().square().sum().item()
    noise = (x.double() - reference.double()).square().sum().item()
    if signal == 0.0:
        raise ValueError("sqnr_db: the reference is all zeros, so there is no signal to compare with")
    ratio = math.inf if noise == 0.0 else signal / noise
    return -math.inf if ratio == 0.0 else 10.0 * math.log10(ratio)


def relative_error(x: Tensor, reference: Tensor) -> float:
    """||x - ref|| / ||ref|| in float64, 0 when equal; NaN, which passes no bound, on NaN or if both are zeros."""
    return (torch.linalg.norm(x.double() - reference.double()) / torch.linalg.norm(reference.double())).item()
