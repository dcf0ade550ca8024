"""Matrix products of quantised and BF16 operands, blocks of K in ascending order.

Each operand is prepared once (`QuantizedMatrix.operand`, `grid_operand`) and then multiplied any number of times;
a weight is prepared once per optimiser step. The reference sums every block of K exactly (`numerics.exact`), so a
row of the result does not depend on how many other rows were computed with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from octavo.kernels.cast import cast_1x128, cast_128x1, cast_128x128, cast_rows
from octavo.numerics.exact import K_BLOCK, block_edges, block_matmul, product_bits, to_grid
from octavo.numerics.fp8 import (
    BLOCK_128X1,
    BLOCK_128X128,
    PER_COLUMN,
    PER_ROW,
    PER_TENSOR,
    QuantBlock,
    ScaleRounding,
    quantize,
    quantize_with_scale,
)


@dataclass(frozen=True, eq=False)
class Operand:
    """One side of a GEMM, ready to be multiplied: rows that are not reduced, columns that are."""

    values: Tensor
    """[rows, K] float64 on a grid whose block sums are exact."""
    scale: Tensor | None
    """[rows, B] fp32, one per row and K block; None for operands that are not FP8."""
    k_edges: list[int]
    """[B + 1] boundaries of the K blocks."""


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """An FP8 matrix and its block scales: x ~= q * scale. Blocks restart at each fused projection."""

    q: Tensor
    """[M, K] e4m3."""
    scale: Tensor
    """[row blocks, column blocks] fp32."""
    row_edges: list[int]
    """Boundaries of the row blocks, from 0 to M."""
    column_edges: list[int]
    """Boundaries of the column blocks, from 0 to K."""

    @property
    def T(self) -> QuantizedMatrix:
        """The transpose: the same bytes and scales."""
        return QuantizedMatrix(self.q.T, self.scale.T, self.column_edges, self.row_edges)

    def operand(self) -> Operand:
        """Ready for a product reduced over the columns."""
        return Operand(self.q.double(), _spread(self.scale, self.row_edges, dim=0), self.column_edges)

    def dequantize(self) -> Tensor:
        """[M, K] fp32, q * scale."""
        return self.q.float() * _spread(_spread(self.scale, self.row_edges, dim=0), self.column_edges, dim=1)


def quantize_matrix(
    x: Tensor,
    quant_block: QuantBlock,
    rounding: ScaleRounding = "none",
    *,
    row_splits: Sequence[int] | None = None,
    column_splits: Sequence[int] | None = None,
    scale: Tensor | None = None,
) -> QuantizedMatrix:
    """Quantise [M, K], each fused projection on its own.

    Args:
        x: [M, K] float.
        quant_block: rows and columns that share a scale.
        rounding: of the scales.
        row_splits, column_splits: widths of the fused projections along one dimension, or None.
        scale: [1, 1] fp32, a frozen scale for the whole matrix instead of one from its amax.
    """
    if scale is not None:
        q = quantize_with_scale(x, scale, quant_block)
        return QuantizedMatrix(q, scale, [0, x.shape[0]], [0, x.shape[1]])
    dim, splits = (1, column_splits) if column_splits is not None else (0, row_splits or [x.shape[0]])
    pieces = [_quantize(piece, quant_block, rounding) for piece in x.split(list(splits), dim=dim)]
    return QuantizedMatrix(
        q=torch.cat([q for q, _ in pieces], dim=dim) if len(pieces) > 1 else pieces[0][0],
        scale=torch.cat([scale for _, scale in pieces], dim=dim) if len(pieces) > 1 else pieces[0][1],
        row_edges=split_edges(row_splits or [x.shape[0]], quant_block[0]),
        column_edges=split_edges(column_splits or [x.shape[1]], quant_block[1]),
    )


def _quantize(x: Tensor, quant_block: QuantBlock, rounding: ScaleRounding) -> tuple[Tensor, Tensor]:
    """`quantize`, on a GPU by the kernel of the block shape where there is one; the bytes are the same."""
    if not x.is_cuda or x.stride(1) != 1 or quant_block in (PER_COLUMN, PER_TENSOR):
        return quantize(x, quant_block, rounding)
    if quant_block == BLOCK_128X128:
        q, _, scale = cast_128x128(x, rounding)
        return q, scale
    if quant_block == BLOCK_128X1:
        q, scale = cast_128x1(x, rounding)
        return q.T, scale.T
    return (cast_rows if quant_block == PER_ROW else cast_1x128)(x, rounding)


def split_edges(splits: Sequence[int], block: int | None) -> list[int]:
    """Block boundaries of fused projections; blocks restart at each: [192, 192] by 128 -> 0, 128, 192, 320, 384."""
    starts = [0, *accumulate(splits)]
    pairs = zip(starts[:-1], splits, strict=True)
    return [*(start + edge for start, size in pairs for edge in block_edges(size, block)[:-1]), starts[-1]]


def grid_operand(x: Tensor, block: int = K_BLOCK) -> Operand:
    """A BF16 or FP32 matrix [rows, K], each row on an exact grid within each block of K; BF16 as it is on a GPU."""
    edges = block_edges(x.shape[1], block)
    if x.is_cuda and x.dtype == torch.bfloat16:
        return Operand(x, None, edges)
    bits = product_bits(block)
    return Operand(torch.cat([to_grid(piece, bits) for piece in x.split(block, dim=1)], dim=1), None, edges)


def gemm(left: Operand, right: Operand) -> Tensor:
    """left [M, K] @ right [N, K]^T -> [M, N] float64, not yet rounded: the caller adds a bias and rounds once."""
    assert left.k_edges == right.k_edges, f"K blocks differ: {left.k_edges} and {right.k_edges}"
    assert (left.scale is None) == (right.scale is None), "one operand is FP8 and the other is not"
    return block_matmul(left.values, right.values, left.scale, right.scale, left.k_edges)


def _spread(scale: Tensor, edges: list[int], dim: int) -> Tensor:
    """One scale per block -> one per row (or column)."""
    sizes = torch.tensor([stop - start for start, stop in zip(edges[:-1], edges[1:], strict=True)], device=scale.device)
    if len(sizes) == edges[-1]:  # blocks of one
        return scale
    return scale.repeat_interleave(sizes, dim=dim)
