"""Operands of matrix products: what is quantised how, and made ready once for any number of products.

A matrix on a CUDA device is made ready for kernels, which read whole blocks of 128 along the reduced dimension and
along the rows of a 128 x 128 weight: what ends within a block is filled up with zeros, which change no sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from octavo.kernels.cast import (
    cast_1x128,
    cast_128x1,
    cast_128x128,
    cast_both,
    cast_rows,
)
from octavo.kernels.cast_outputs import GIVEN, UNPADDED, outputs, padded
from octavo.kernels.cast_whole import cast_columns, cast_rows_columns, cast_tensor
from octavo.kernels.device import runs_kernels
from octavo.numerics.exact import K_BLOCK, block_edges, product_bits, to_grid
from octavo.numerics.fp8 import (
    BLOCK_1X128,
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

ROW_MULTIPLE = 16
"""Kernels want the widths of their operands in multiples of this."""
TOKEN_BLOCK = 128
"""Token counts are padded with zeros to a multiple of this for WGrad."""
FILLED = (1, K_BLOCK)
"""Padding of a cast that is reduced over whole blocks."""
BOTH = ((BLOCK_1X128, BLOCK_128X1), (PER_ROW, PER_COLUMN), (PER_TENSOR, PER_TENSOR))
"""Blocks of X for a product over its columns and for one over its rows that one cast makes."""


@dataclass(frozen=True, eq=False)
class Operand:
    """One side of a GEMM, ready to be multiplied: rows that are not reduced, columns that are."""

    values: Tensor
    """[rows, K]: float64 on a grid whose block sums are exact for the reference; e4m3 or bf16 with K contiguous for
    kernels, zeros filling up each block of 128."""
    scale: Tensor | None
    """[rows, B] fp32, one per row and K block, or per block of rows (`rows_per_scale`); None for operands that are not
    FP8."""
    k_edges: Sequence[int]
    """[B + 1] boundaries of the K blocks, without what fills them up."""
    by_blocks: bool = False
    """Of a kernel's FP8 operand: whether its scales are per block of 128 along K, or one per row (and projection)."""
    rows_per_scale: int = 1
    """128 for the weight of a kernel that takes blocks of 128 x 128."""
    rows: Tensor | None = None
    """Which rows are the matrix's; None for all. The others fill up blocks that end at a fused projection."""

    def decode(self) -> Tensor:
        """[rows, K] the numbers that are multiplied, without what fills them up: fp32 where they are FP8, float64 or
        bf16 where they are not."""
        K = self.k_edges[-1]
        values = self.values if self.rows is None else self.values[self.rows]
        if self.scale is None:
            return values[:, :K]
        if values.dtype == torch.float64:
            return values.float() * spread(self.scale, self.k_edges, dim=1)
        multiple = K_BLOCK if self.by_blocks else ROW_MULTIPLE
        if not _is_full(self.k_edges, multiple):
            values = values[:, _places(tuple(self.k_edges), multiple, values.device)]
        scale = self.scale
        if self.rows_per_scale > 1:
            scale = scale.repeat_interleave(self.rows_per_scale, dim=0)
            scale = scale[: len(values)] if self.rows is None else scale[self.rows]
        return values.float() * spread(scale, self.k_edges, dim=1)

    def written_to(self, other: Operand) -> Operand:
        """This operand, of the same layout as the other, in the other's memory."""
        mine, places = (self.values, self.scale), (other.values, other.scale)
        for new, place in zip(mine, places, strict=True):
            if new is not None and place is not None and new.data_ptr() != place.data_ptr():
                place.copy_(new)
                torch.zeros((), device=place.device)  # `decode_gemm` may read before the kernel just ahead has ended
        return replace(self, values=other.values, scale=other.scale)


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """An FP8 matrix and its block scales: x ~= q * scale. Blocks restart at each fused projection."""

    q: Tensor
    """[M, K] e4m3."""
    scale: Tensor
    """[row blocks, column blocks] fp32."""
    row_edges: Sequence[int]
    """Boundaries of the row blocks, from 0 to M."""
    column_edges: Sequence[int]
    """Boundaries of the column blocks, from 0 to K."""
    quant_block: QuantBlock
    """Rows and columns that share a scale."""

    @property
    def T(self) -> QuantizedMatrix:
        """The transpose: the same bytes and scales."""
        return QuantizedMatrix(self.q.T, self.scale.T, self.column_edges, self.row_edges, self.quant_block[::-1])

    def operand(self) -> Operand:
        """Ready for a product reduced over the columns, by kernels or by the reference."""
        return kernel_operand(self) if runs_kernels(self.q) else self.reference_operand()

    def reference_operand(self) -> Operand:
        """Ready for the reference's product reduced over the columns."""
        return Operand(self.q.double(), spread(self.scale, self.row_edges, dim=0), self.column_edges)

    def dequantize(self) -> Tensor:
        """[M, K] fp32, q * scale."""
        return self.q.float() * spread(spread(self.scale, self.row_edges, dim=0), self.column_edges, dim=1)


def quantize_matrix(
    x: Tensor,
    quant_block: QuantBlock,
    rounding: ScaleRounding = "none",
    *,
    row_splits: Sequence[int] | None = None,
    column_splits: Sequence[int] | None = None,
    scale: Tensor | None = None,
    activation: bool = False,
) -> QuantizedMatrix:
    """Quantise [M, K], each fused projection on its own.

    Args:
        x: [M, K] float.
        quant_block: rows and columns that share a scale.
        rounding: of the scales.
        row_splits, column_splits: widths of the fused projections along one dimension, or None.
        scale: [1, 1] fp32, a frozen scale for the whole matrix instead of one from its amax.
        activation: no weight, see `kernels.cast`.
    """
    if scale is not None:
        kernel = runs_kernels(x) and quant_block == PER_TENSOR and x.stride(1) == 1
        if kernel:
            q, _, _ = cast_tensor(x, scale=scale, activation=activation)
        else:
            q = quantize_with_scale(x, scale, quant_block)
        return QuantizedMatrix(q, scale, [0, x.shape[0]], [0, x.shape[1]], quant_block)
    dim, splits = (1, column_splits) if column_splits is not None else (0, row_splits or [x.shape[0]])
    block = quant_block[dim]
    if block is not None and all(size % block == 0 for size in splits):  # no block straddles two of them
        splits = [x.shape[dim]]
    pieces = [_quantize(piece, quant_block, rounding, activation) for piece in x.split(list(splits), dim=dim)]
    return QuantizedMatrix(
        q=torch.cat([q for q, _ in pieces], dim=dim) if len(pieces) > 1 else pieces[0][0],
        scale=torch.cat([scale for _, scale in pieces], dim=dim) if len(pieces) > 1 else pieces[0][1],
        row_edges=split_edges(row_splits or [x.shape[0]], quant_block[0]),
        column_edges=split_edges(column_splits or [x.shape[1]], quant_block[1]),
        quant_block=quant_block,
    )


def quantize_both(
    x: Tensor,
    quant_block: QuantBlock,
    rounding: ScaleRounding,
    splits: Sequence[int],
    amax_bits: Tensor | None = None,
) -> tuple[Operand, QuantizedMatrix]:
    """X [T, K] ready for a product reduced over K, and as it is saved for one over T, from one cast; for kernels.

    Args:
        x: [T, K] bf16, T a multiple of 128, K of 16; see `can_quantize_both`.
        quant_block: of the first, one of BOTH with that of the second.
        rounding: of the scales.
        splits: widths of the fused projections along K, multiples of 128 where there are several.
        amax_bits: per tensor only, see `cast_tensor`.
    """
    T, K = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()  # a gradient may be expanded
    if quant_block == BLOCK_1X128:
        plain = outputs("quantize_both", x.shape, BLOCK_1X128, x.device, FILLED, None)
        transposed = outputs("quantize_both", x.T.shape, BLOCK_1X128, x.device, UNPADDED, None)
        (q, scale), (q_t, scale_t) = cast_both(x, rounding, out=(plain, transposed))
        left = Operand(q, scale, block_edges(K), by_blocks=True)
        return left, QuantizedMatrix(q_t.T, scale_t.T, block_edges(T), range(K + 1), BLOCK_128X1)
    edges = split_edges(splits, None)
    if quant_block == PER_TENSOR:
        q, shared, scale = cast_tensor(x, rounding, transposed=True, column_splits=splits, amax_bits=amax_bits)
        assert shared is not None
        along = QuantizedMatrix(q, scale, [0, T], edges, PER_TENSOR)
        return along.operand(), replace(along, q=shared.T)
    assert quant_block == PER_ROW, quant_block
    (q, scale), (q_t, scale_t) = cast_rows_columns(x, rounding, column_splits=splits)
    along = QuantizedMatrix(q, scale, range(T + 1), edges, PER_ROW)
    return along.operand(), QuantizedMatrix(q_t.T, scale_t.T, [0, T], range(K + 1), PER_COLUMN)


def can_quantize_both(x: Tensor, splits: Sequence[int], along: QuantBlock | None, across: QuantBlock | None) -> bool:
    """Whether `quantize_both` makes operands in these two blocks of X [T, K]."""
    if not len(x) or len(x) % TOKEN_BLOCK or (along, across) not in BOTH:
        return False
    return all(size % K_BLOCK == 0 for size in splits) or (len(splits) == 1 and splits[0] % ROW_MULTIPLE == 0)


def quantized_operand(
    x: Tensor,
    quant_block: QuantBlock,
    rounding: ScaleRounding,
    *,
    splits: Sequence[int] | None = None,
    scale: Tensor | None = None,
    for_kernels: bool,
) -> Operand:
    """`quantize_matrix(x, ...).operand()`; for kernels, blocks that end early are cast along with what fills them up.

    Args:
        x: [T, K] float.
        quant_block, rounding, scale: as for `quantize_matrix`.
        splits: widths of the fused projections along K, or None.
        for_kernels: whether kernels read it.
    """
    T, K = x.shape
    splits = splits or [K]
    early = quant_block == BLOCK_1X128 and any(size % K_BLOCK for size in splits)
    if not (for_kernels and early) or any(size % GIVEN for size in splits):
        return quantize_matrix(x, quant_block, rounding, column_splits=splits, scale=scale, activation=True).operand()
    x = x if x.stride(1) == 1 else x.contiguous()
    width = sum(padded(size, K_BLOCK) for size in splits)
    q, scales = outputs("quantized_operand", torch.Size((T, width)), BLOCK_1X128, x.device, UNPADDED, None)
    start = 0
    for piece in x.split(list(splits), dim=1):
        stop = start + padded(piece.shape[1], K_BLOCK)
        out = (q[:, start:stop], scales[:, start // K_BLOCK : stop // K_BLOCK])
        cast_1x128(piece, rounding, out=out, activation=True)
        start = stop
    return Operand(q, scales, split_edges(splits, K_BLOCK), by_blocks=True)


def _quantize(x: Tensor, quant_block: QuantBlock, rounding: ScaleRounding, activation: bool) -> tuple[Tensor, Tensor]:
    """`quantize`, on a GPU by the kernel of the block shape; the bytes are the same."""
    if not runs_kernels(x):
        return quantize(x, quant_block, rounding)
    if x.stride(1) != 1:
        x = x.contiguous()
    if quant_block == BLOCK_128X128:
        q, _, scale = cast_128x128(x, rounding, transposed=False)
        return q, scale
    if quant_block == PER_TENSOR:
        q, _, scale = cast_tensor(x, rounding, activation=activation)
        return q, scale
    if quant_block in (BLOCK_128X1, PER_COLUMN):
        q, scale = (cast_128x1 if quant_block == BLOCK_128X1 else cast_columns)(x, rounding)
        return q.T, scale.T
    return (cast_rows if quant_block == PER_ROW else cast_1x128)(x, rounding, activation=activation)


def split_edges(splits: Sequence[int], block: int | None) -> Sequence[int]:
    """Block boundaries of fused projections; blocks restart at each: [192, 192] by 128 -> 0, 128, 192, 320, 384."""
    if block == 1:
        return range(sum(splits) + 1)
    starts = [0, *accumulate(splits)]
    pairs = zip(starts[:-1], splits, strict=True)
    return [*(start + edge for start, size in pairs for edge in block_edges(size, block)[:-1]), starts[-1]]


def grid_operand(x: Tensor, block: int = K_BLOCK) -> Operand:
    """A matrix [rows, K] that is not quantised.

    BF16 as it is for kernels; otherwise each row on an exact grid within each block of K.
    """
    edges = block_edges(x.shape[1], block)
    if runs_kernels(x) and x.dtype == torch.bfloat16:
        return Operand(_filled(x, [0, x.shape[1]], 8), None, edges)
    bits = product_bits(block)
    return Operand(torch.cat([to_grid(piece, bits) for piece in x.split(block, dim=1)], dim=1), None, edges)


def kernel_operand(matrix: QuantizedMatrix) -> Operand:
    """An FP8 matrix on a CUDA device as kernels read it.

    Scales per block of 128 along K stay that ([rows, B] with strides (1, any), or [row blocks, B]); others become one
    per row and piece of K.
    """
    by_blocks = matrix.quant_block[1] == K_BLOCK
    q = _filled(matrix.q, matrix.column_edges, K_BLOCK if by_blocks else ROW_MULTIPLE)
    if matrix.quant_block == BLOCK_128X128:
        rows, edges = None, matrix.row_edges
        if not _is_full(edges[:-1], K_BLOCK):  # one that ends within the last block alone disturbs no other
            q, rows = _filled(q.T, edges, K_BLOCK).T.contiguous(), _places(tuple(edges), K_BLOCK, q.device)
        if q is not matrix.q:  # `decode_gemm` reads a weight before the kernel just ahead of it is sure to have ended
            torch.zeros((), device=q.device)
        return Operand(q, matrix.scale.contiguous(), matrix.column_edges, True, K_BLOCK, rows)
    return Operand(q, spread(matrix.scale, matrix.row_edges, dim=0), matrix.column_edges, by_blocks)


def _is_full(edges: Sequence[int], multiple: int) -> bool:
    return all((stop - start) % multiple == 0 for start, stop in pairwise(edges))


def _filled(q: Tensor, edges: Sequence[int], multiple: int) -> Tensor:
    """[rows, K] with zeros after each block of K that is no multiple wide, packed and aligned as bulk copies want."""
    if _is_full(edges, multiple):
        packed = q.stride() == (q.shape[1], 1) and q.data_ptr() % 16 == 0
        return q if packed else q.clone(memory_format=torch.contiguous_format)
    width = sum(-(-(stop - start) // multiple) * multiple for start, stop in pairwise(edges))
    rows = q.shape[0]
    out = torch.zeros(rows, width, dtype=q.dtype, device=q.device)
    for start, stop, place in _runs(tuple(edges), multiple):
        out[:, place : place + stop - start].copy_(q[:, start:stop])
    return out


@lru_cache(maxsize=256)
def _runs(edges: tuple[int, ...], multiple: int) -> list[tuple[int, int, int]]:
    """Stretches that stay together once every block is filled up to the multiple: start, stop, where they then lie."""
    runs: list[tuple[int, int, int]] = []
    place = 0
    for low, high in pairwise(edges):
        if runs and runs[-1][1] - runs[-1][0] == place - runs[-1][2]:  # nothing fills up what comes before
            runs[-1] = (runs[-1][0], high, runs[-1][2])
        else:
            runs.append((low, high, place))
        place += -(-(high - low) // multiple) * multiple
    return runs


@lru_cache(maxsize=256)
def _places(edges: tuple[int, ...], multiple: int, device: torch.device) -> Tensor:
    """Where each index lies once every block is filled up to the multiple, int64."""
    runs = _runs(edges, multiple)
    return torch.tensor([at for low, high, place in runs for at in range(place, place + high - low)], device=device)


def values_of(matrix: QuantizedMatrix | Tensor) -> Tensor:
    """fp32."""
    return matrix.float() if isinstance(matrix, Tensor) else matrix.dequantize()


def pad_tokens(x: Tensor) -> Tensor:
    """[T, K] -> [ceil(T / 128) * 128, K], at least one block of 128, zeros at the end; X itself if it is that long."""
    missing = max(1, -(-len(x) // TOKEN_BLOCK)) * TOKEN_BLOCK - len(x)
    return torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x


def spread(scale: Tensor, edges: Sequence[int], dim: int) -> Tensor:
    """One scale per block -> one per row (or column)."""
    if len(edges) - 1 == edges[-1]:  # blocks of one
        return scale
    if len(edges) == 2:
        return scale.repeat_interleave(edges[-1], dim=dim)
    return scale.repeat_interleave(_sizes(tuple(edges), scale.device), dim=dim, output_size=edges[-1])


@lru_cache(maxsize=256)
def _sizes(edges: tuple[int, ...], device: torch.device) -> Tensor:
    """Of each block, int64. Kept: to put it on a GPU waits for everything before it."""
    return torch.tensor([stop - start for start, stop in pairwise(edges)], device=device)
