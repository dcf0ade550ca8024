"""A weight's FP8 bytes and scales, written in place from its master by as few readings as there can be.

    128 x 128             W and W^T         one reading
    per tensor            W and W^T         two; a scale for each fused projection
    per row               W                 one
    per row, per column   W, and W again    two; column scales for each fused projection, the second lies transposed

W^T [K, N] is what DGrad's kernels read. Each projection's columns in it are filled up to whole blocks:
with zeros, or NaN beside a scale that is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from octavo.kernels.cast import cast_128x128, cast_rows
from octavo.kernels.cast_outputs import GIVEN, Cast, padded
from octavo.kernels.cast_whole import cast_rows_columns, cast_tensor
from octavo.kernels.operands import ROW_MULTIPLE, Operand, QuantizedMatrix, spread
from octavo.numerics.exact import K_BLOCK
from octavo.numerics.fp8 import BLOCK_128X128, PER_ROW, PER_TENSOR, QuantBlock, ScaleRounding

TRANSPOSED = (BLOCK_128X128, PER_TENSOR)
"""Blocks whose bytes are those of W^T, too."""


def can_write(in_features: int, splits: Sequence[int]) -> bool:
    """Whether kernels write a weight of these widths."""
    return not (in_features % ROW_MULTIPLE or any(size % GIVEN for size in splits))


def write_weight(
    w: Tensor,
    splits: Sequence[int],
    quant_block: QuantBlock,
    rounding: ScaleRounding,
    out: Cast,
    transposed: Tensor | None = None,
) -> None:
    """W [N, K] into the bytes [N, K] and scales that `quantize_matrix` makes of it.

    Args:
        w: the master, fp32 or bf16.
        splits: widths of the fused projections along N; see `can_write`.
        quant_block: 128x128, per tensor or per row.
        rounding: of the scales.
        out: e4m3 [N, K]; fp32.
        transposed: W^T as `room_for_transpose` makes it, or None; not per row.
    """
    q, scale = out
    if quant_block == PER_ROW:
        cast_rows(w, rounding, out=out)
        return
    assert quant_block in TRANSPOSED, quant_block
    done = 0
    for inside, rows, columns in _pieces(splits, quant_block):
        q_t = None if transposed is None else transposed[:, columns]
        if quant_block == BLOCK_128X128:
            blocks = slice(columns.start // K_BLOCK, columns.stop // K_BLOCK)
            cast_128x128(w[rows], rounding, transposed=q_t is not None, out=(q[rows], q_t, scale[blocks]))
        else:
            scales = scale[done : done + len(inside)]
            cast_tensor(w[rows], rounding, transposed=q_t is not None, row_splits=inside, out=(q[rows], q_t, scales))
        done += len(inside)


def write_rows_columns(
    w: Tensor, splits: Sequence[int], rounding: ScaleRounding, by_row: Cast, by_column: Cast
) -> None:
    """W [N, K] into two casts of it: per row, and per column of each projection, which lies transposed.

    Args:
        w, splits, rounding: as for `write_weight`.
        by_row: e4m3 [N, K], fp32 [N, 1].
        by_column: e4m3 [N, K] with strides (1, N), fp32 [projections, K].
    """
    (q, scale), (q_t, scale_t) = by_row, (tensor.T for tensor in by_column)
    done = 0
    for inside, rows, _ in _pieces(splits, PER_ROW):
        places = (q[rows], scale[rows]), (q_t[:, rows], scale_t[:, done : done + len(inside)])
        cast_rows_columns(w[rows], rounding, row_splits=inside, out=places)
        done += len(inside)


def room_for_transpose(weight: QuantizedMatrix, splits: Sequence[int]) -> Tensor:
    """[K, N] e4m3 zeros for W^T, N filled up."""
    *_, (_, _, columns) = _pieces(splits, weight.quant_block)
    return weight.q.new_zeros(weight.q.shape[1], columns.stop)


def transpose_weight(weight: QuantizedMatrix, splits: Sequence[int], transposed: Tensor) -> None:
    """The bytes of W into W^T."""
    for _, rows, columns in _pieces(splits, weight.quant_block):
        q_t = weight.q[rows].T
        transposed[:, columns][:, : q_t.shape[1]].copy_(q_t)


def transposed_operand(weight: QuantizedMatrix, transposed: Tensor) -> Operand:
    """W^T, of the bytes of W, ready for kernels."""
    if weight.quant_block == BLOCK_128X128:
        scale = weight.scale.T.contiguous()
        return Operand(transposed, scale, weight.row_edges, by_blocks=True, rows_per_scale=K_BLOCK)
    return Operand(transposed, spread(weight.scale.T, weight.column_edges, dim=0), weight.row_edges)


def _pieces(splits: Sequence[int], quant_block: QuantBlock) -> Iterator[tuple[Sequence[int], slice, slice]]:
    """What a cast takes at a time, so that no block of 128 straddles two projections: their widths, its rows of W, its
    columns of W^T."""
    multiple = K_BLOCK if quant_block == BLOCK_128X128 else ROW_MULTIPLE
    together = all(size % K_BLOCK == 0 for size in splits[:-1])
    start = place = 0
    for inside in [splits] if together else [[size] for size in splits]:
        size = sum(inside)
        columns = slice(place, place + padded(size, multiple))
        yield inside, slice(start, start + size), columns
        start, place = start + size, columns.stop
