"""E4M3 quantisation: x ~= q * scale, one FP32 scale per quantisation block.

`quant_block` is the shape that shares one scale, over the last two dimensions of a matrix [M, K];
`None` stands for the whole dimension. A ragged edge (576 columns are 4.5 blocks of 128) is a smaller block.

    per tensor (None, None)   per row (1, None)   1x128 (1, 128)   128x1 (128, 1)   128x128 (128, 128)
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from octavo.numerics.exact import power_of_two

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
MIN_AMAX = 2.0**-54
"""Blocks quieter than this are quantised as if this were their amax. Small enough for gradients, large
enough that the FP32 product of the two smallest scales is still a normal number."""

QuantBlock = tuple[int | None, int | None]
ScaleRounding = Literal["none", "power_of_two"]

PER_TENSOR: QuantBlock = (None, None)
PER_ROW: QuantBlock = (1, None)
PER_COLUMN: QuantBlock = (None, 1)
BLOCK_1X128: QuantBlock = (1, 128)
BLOCK_128X1: QuantBlock = (128, 1)
BLOCK_128X128: QuantBlock = (128, 128)


def block_amax(x: Tensor, quant_block: QuantBlock) -> Tensor:
    """Largest absolute value of each quantisation block; NaN where a block holds a NaN.

    Args:
        x: [M, K] float.
        quant_block: rows and columns that share a scale; None is the whole dimension.

    Returns:
        [ceil(M / rows), ceil(K / columns)] fp32.
    """
    blocks = _as_blocks(x, quant_block)
    return blocks.abs().amax(dim=(1, 3)).float()


def scale_from_amax(amax: Tensor, rounding: ScaleRounding = "none") -> Tensor:
    """fp32 scale of the same shape: max(amax, MIN_AMAX) / 448, NaN where amax is not finite.

    `power_of_two` rounds the scale up to the next power of two, so that q * scale is exact in BF16.
    """
    # By a tensor: CUDA multiplies by the reciprocal of a Python number, which is another last bit.
    scale = amax.clamp(min=MIN_AMAX) / torch.full_like(amax, E4M3_MAX)
    if rounding == "power_of_two":
        mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2**exponent, mantissa in [0.5, 1)
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        scale = power_of_two(exponent).float()
    return torch.where(torch.isfinite(amax), scale, torch.nan)


def quantize(x: Tensor, quant_block: QuantBlock, rounding: ScaleRounding = "none") -> tuple[Tensor, Tensor]:
    """Quantise a matrix to E4M3, round to nearest even, saturating.

    A block that holds a NaN or an infinity gets scale NaN and decodes to NaN everywhere.

    Args:
        x: [M, K] float, any strides.
        quant_block: rows and columns that share a scale; None is the whole dimension.
        rounding: of the scale.

    Returns:
        q [M, K] e4m3 and scale [ceil(M / rows), ceil(K / columns)] fp32.

    Raises:
        ValueError: x is not a floating-point matrix.
    """
    if x.ndim != 2 or not x.is_floating_point():
        raise ValueError(f"quantize wants a floating-point matrix [M, K]; got shape {tuple(x.shape)}, dtype {x.dtype}")
    scale = scale_from_amax(block_amax(x, quant_block), rounding)
    return quantize_with_scale(x, scale, quant_block), scale


def quantize_with_scale(x: Tensor, scale: Tensor, quant_block: QuantBlock) -> Tensor:
    """Quantise [M, K] with given fp32 scales of its blocks -> q [M, K] e4m3; values beyond 448 * scale saturate."""
    M, K = x.shape
    blocks = _as_blocks(x.float(), quant_block) / scale[:, None, :, None]
    q = blocks.clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3)
    padded_M, padded_K = q.shape[0] * q.shape[1], q.shape[2] * q.shape[3]
    return q.view(padded_M, padded_K)[:M, :K].contiguous()


def dequantize(q: Tensor, scale: Tensor, quant_block: QuantBlock) -> Tensor:
    """[M, K] e4m3 and its block scales -> [M, K] fp32."""
    M, K = q.shape
    return q.float() * expand_scale(scale, (M, K), quant_block)


def expand_scale(scale: Tensor, shape: tuple[int, int], quant_block: QuantBlock) -> Tensor:
    """Block scales -> one scale per element, [M, K] fp32 (a view where a dimension has one block)."""
    for dim in (0, 1):
        size, block = shape[dim], quant_block[dim]
        if block is not None and block != 1:
            scale = scale.repeat_interleave(block, dim=dim).narrow(dim, 0, size)
    return scale.expand(shape)


def _as_blocks(x: Tensor, quant_block: QuantBlock) -> Tensor:
    """[M, K] -> [row blocks, rows, column blocks, columns], ragged edges filled with zeros."""
    M, K = x.shape
    rows, columns = quant_block[0] or max(M, 1), quant_block[1] or max(K, 1)
    pad_M, pad_K = -M % rows, -K % columns
    if pad_M or pad_K:
        x = torch.nn.functional.pad(x, (0, pad_K, 0, pad_M))
    return x.reshape((M + pad_M) // rows, rows, (K + pad_K) // columns, columns)
