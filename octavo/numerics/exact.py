"""Sums that are exact in float64, and therefore the same in any order.

A float64 sum of integers is exact while it stays below 2**53. So the reference puts the operands of every
reduction of the forward pass on a fixed-point grid, fine enough that nothing a BF16 value says is lost, coarse
enough that the sum is exact. What a BLAS does then (tiling, threads, vector width, batch size) cannot change a
bit: decode with one row and training with thousands agree by construction, on any machine.

E4M3 codes are such integers already (multiples of 2**-9, 18 bits), so an FP8 product sum is exact as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MANTISSA_BITS = 53
K_BLOCK = 128
"""Length of the blocks along K that are summed exactly; blocks are then added in ascending order."""
UNIT_BITS = 35
"""Grid of numbers in [0, 1]: 2**18 of them (a vocabulary, a context) sum exactly."""


def product_bits(num_terms: int) -> int:
    """Bits that each of two factors may have so that the sum of `num_terms` products is exact."""
    return (MANTISSA_BITS - max(num_terms - 1, 0).bit_length()) // 2


def power_of_two(exponent: Tensor) -> Tensor:
    """2**exponent, exact, float64; exponent is an integer tensor in [-1022, 1023] (`exp2` and `ldexp` may round)."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)


def to_grid(x: Tensor, bits: int, dim: int = -1) -> Tensor:
    """Round to multiples of 2**(e - bits), where 2**e is the power of two above the amax along `dim`.

    A BF16 value keeps all its bits unless it is 2**(bits - 8) times smaller than that amax.

    Args:
        x: float, any shape.
        bits: of the grid, below the amax.
        dim: the dimension that will be summed; one grid per remaining index.

    Returns:
        float64, the shape of x; NaN along `dim` wherever x holds a NaN or an infinity there.
    """
    x = x.double()
    if x.numel() == 0:
        return x
    amax = x.abs().amax(dim=dim, keepdim=True)
    exponent = torch.frexp(amax).exponent  # amax < 2**exponent
    # Adding 1.5 * 2**52 steps leaves no bit below one step; float64 addition rounds to nearest even.
    magic = 1.5 * power_of_two(exponent - bits + MANTISSA_BITS - 1)
    magic = torch.where(torch.isfinite(amax), magic, torch.nan)
    return (x + magic) - magic


def unit_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension of numbers in [0, 1], at most 2**18 of them: exact on a grid of 2**-35."""
    assert x.shape[-1] <= 2 ** (MANTISSA_BITS - UNIT_BITS), f"unit_sum of {x.shape[-1]} terms"
    return unit_grid(x).sum(dim=-1) * 2.0**-UNIT_BITS


def unit_grid(x: Tensor) -> Tensor:
    """Numbers in [0, 1] as whole multiples of 2**-35: float64 integers, the shape of x."""
    return torch.round(x.double() * 2.0**UNIT_BITS)


def mean_square(x: Tensor) -> Tensor:
    """Mean of squares over the last dimension, [..., D] float -> [..., 1] float64, the same in any order."""
    x = to_grid(x, product_bits(x.shape[-1]))
    return x.square().sum(dim=-1, keepdim=True) / x.shape[-1]


def block_matmul(
    a: Tensor, b: Tensor, a_scale: Tensor | None, b_scale: Tensor | None, k_edges: Sequence[int]
) -> Tensor:
    """a [M, K] @ b [N, K]^T: blocks of K summed exactly, scaled, and added in ascending K.

    Args:
        a, b: float64 on grids whose block sums are exact (E4M3 codes, or `to_grid` over each block).
        a_scale, b_scale: [M, B] and [N, B] fp32, a scale per row and K block, or both None.
        k_edges: [B + 1] block boundaries, from 0 to K.

    Returns:
        [M, N] float64.
    """
    out = None
    for block, (start, stop) in enumerate(zip(k_edges[:-1], k_edges[1:], strict=True)):
        part = a[:, start:stop] @ b[:, start:stop].T
        if a_scale is not None and b_scale is not None:
            part *= a_scale[:, block, None] * b_scale[None, :, block]  # one FP32 product of the two scales
        out = part if out is None else out.add_(part)
    assert out is not None, f"block_matmul over no K block: {k_edges}"
    return out


def block_edges(size: int, block: int | None = K_BLOCK) -> list[int]:
    """Boundaries of the blocks of a dimension: 576 -> [0, 128, 256, 384, 512, 576]; one block if None."""
    return [0, size] if block is None else [*range(0, size, block), size]
