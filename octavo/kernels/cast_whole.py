"""Casts to FP8 by scales of whole rows, columns or matrices, which read X twice: for the magnitudes, and for the cast.

    cast_columns        X [T, K]  ->  q [K, T], a scale per column                     rowwise: one of its operands
    cast_rows_columns   X [M, K]  ->  q [M, K], a scale per row, and `cast_columns`    rowwise: X, dY, W
    cast_tensor         X [M, K]  ->  q [M, K], its transpose, one scale               tensorwise

As in `kernels.cast`. Fused projections lie side by side along the rows of a weight (`row_splits`) or along the columns
of a gradient (`column_splits`), and each is cast on its own, all by one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from octavo.kernels.cast_kernels import amax_kernel, scaled_kernel
from octavo.kernels.cast_outputs import (
    BLOCK,
    COLUMN_TILE,
    TILE,
    UNPADDED,
    Cast,
    Padding,
    check_matrix,
    check_pair,
    copy_both_ways,
    cover,
    matrix,
    max_registers,
    outputs,
    reference,
    scales,
    tile_grid,
    tile_sizes,
    zeros_around,
)
from octavo.kernels.device import on_gpu
from octavo.kernels.early_launch import early_launch
from octavo.kernels.tile import in_words
from octavo.numerics.fp8 import (
    E4M3_MAX,
    PER_ROW,
    PER_TENSOR,
    ScaleRounding,
    block_amax,
    quantize,
    quantize_with_scale,
    scale_from_amax,
)


def cast_columns(
    x: Tensor, rounding: ScaleRounding = "none", *, pad_to: Padding = UNPADDED, out: Cast | None = None
) -> Cast:
    """X [T, K] bf16 or fp32 -> q [K, T] e4m3, scale [K, 1] fp32.

    Raises:
        ValueError: x is no floating-point matrix with unit stride along K, or `out` does not fit it.
    """
    check_matrix(x, "cast_columns")
    q_t, scale_t = outputs("cast_columns", x.T.shape, PER_ROW, x.device, pad_to, out)
    if not on_gpu(x, "a cast to FP8"):
        return reference(x.T, PER_ROW, rounding, q_t, scale_t)
    if q_t.numel():
        _launch(x, None, (q_t, scale_t), rounding, per_column=True)
    return q_t, scale_t


def cast_rows_columns(
    x: Tensor,
    rounding: ScaleRounding = "none",
    *,
    row_splits: Sequence[int] | None = None,
    column_splits: Sequence[int] | None = None,
    out: tuple[Cast, Cast] | None = None,
) -> tuple[Cast, Cast]:
    """`cast_rows` and `cast_columns` of X [M, K] from two readings.

    Args:
        x: bf16 or fp32.
        rounding: of the scales.
        row_splits, column_splits: widths of the fused projections along one dimension, all but the last multiples of
            128, or None.
        out: see `kernels.cast`.

    Returns:
        q [M, K] e4m3, scale [M, column splits] fp32; q^T [K, M] e4m3, scale [K, row splits] fp32.

    Raises:
        ValueError: x is no floating-point matrix with unit stride along K, or splits or `out` do not fit it.
    """
    name = "cast_rows_columns"
    check_matrix(x, name)
    dim, splits = _check_splits(name, x, row_splits, column_splits)
    plain, transposed = out or (None, None)
    rows, columns = ((1, 1), (1, len(splits))) if dim == 0 else ((1, len(splits)), (1, 1))
    q, scale = outputs(name, x.shape, PER_ROW, x.device, UNPADDED, plain, rows)
    q_t, scale_t = outputs(name, x.T.shape, PER_ROW, x.device, UNPADDED, transposed, columns)
    check_pair(name, q, q_t)
    if not on_gpu(x, "a cast to FP8"):
        whole = zeros_around(x, cover(q, q_t))
        pieces = _pieces(whole, splits, dim)
        _reference_rows([whole] if dim == 0 else pieces, rounding, q, scale)
        _reference_rows([piece.T for piece in (pieces if dim == 0 else [whole])], rounding, q_t, scale_t)
    elif q.numel():
        _launch(x, (q, scale), (q_t, scale_t), rounding, per_column=True, splits=(dim, splits))
    return (q, scale), (q_t, scale_t)


def cast_tensor(
    x: Tensor,
    rounding: ScaleRounding = "none",
    *,
    scale: Tensor | None = None,
    num_saturated: Tensor | None = None,
    transposed: bool = False,
    row_splits: Sequence[int] | None = None,
    column_splits: Sequence[int] | None = None,
    amax_bits: Tensor | None = None,
    pad_to: Padding = UNPADDED,
    out: tuple[Tensor, Tensor | None, Tensor] | None = None,
    activation: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """X [M, K] bf16 or fp32 -> q [M, K] e4m3, q^T [K, M] e4m3, scale [1, 1] fp32. Reads X once if given a scale.

    Args:
        x: the matrix.
        rounding: of the scale.
        scale: [1, 1] fp32, a frozen one instead of one from the amax; values beyond 448 * scale saturate.
        num_saturated: int64, one element: the number of values beyond 448 * scale is added to it.
        transposed: False leaves q^T out: None.
        row_splits, column_splits: as for `cast_rows_columns`; there is a scale for each, [splits, 1] or [1, splits].
        amax_bits: of `new_amax_bits`, raised by what made X, which is then read once.
        pad_to, out, activation: see `kernels.cast`. A given scale is the one that is returned.

    Raises:
        ValueError: x is no floating-point matrix with unit stride along K, or splits or `out` do not fit it.
    """
    check_matrix(x, "cast_tensor")
    dim, splits = _check_splits("cast_tensor", x, row_splits, column_splits)
    assert scale is None or len(splits) == 1, "a frozen scale is one for all projections"
    given_q, given_q_t, given_scale = out or (None, None, None)
    q = matrix("cast_tensor", x.shape, x.device, pad_to, given_q)
    q_t = matrix("cast_tensor", x.T.shape, x.device, pad_to, given_q_t) if transposed else None
    check_pair("cast_tensor", q, q_t)
    groups = (len(splits), 1) if dim == 0 else (1, len(splits))
    own_scale = scales("cast_tensor", q.shape, PER_TENSOR, x.device, given_scale, groups)
    target = own_scale if scale is None else scale
    if not on_gpu(x, "a cast to FP8"):
        pieces = _pieces(zeros_around(x, cover(q, q_t)), splits, dim)
        if scale is None:
            amax = torch.cat([block_amax(piece, PER_TENSOR) for piece in pieces], dim=dim)
            amax = amax if amax_bits is None else amax_bits.view(torch.float32).view_as(amax)
            target.copy_(scale_from_amax(amax, rounding))
        elif num_saturated is not None:
            num_saturated += (x.float().abs() > E4M3_MAX * scale).sum()
        each = zip(pieces, target.split(1, dim=dim), strict=True)
        copy_both_ways(torch.cat([quantize_with_scale(*both, PER_TENSOR) for both in each], dim=dim), q, q_t)
    elif q.numel():
        _launch(
            x,
            (q, target),
            None if q_t is None else (q_t, target),
            rounding,
            splits=(dim, splits),
            num_saturated=num_saturated,
            given=scale is not None,
            bits=amax_bits,
            activation=activation,
        )
    return q, q_t, target


def new_amax_bits(x: Tensor, num_projections: int = 1) -> Tensor:
    """int32 [projections] beside X, to be raised to the bits of the largest magnitudes of a matrix as it is made."""
    return torch.zeros(num_projections, dtype=torch.int32, device=x.device)


def raise_amax_bits_(amax_bits: Tensor | None, *projections: Tensor) -> None:
    """What a kernel does as it makes these, if there are bits to raise."""
    if amax_bits is not None and all(x.numel() for x in projections):
        amax = torch.stack([x.abs().amax() for x in projections]).float()
        amax_bits.copy_(torch.maximum(amax_bits, amax.view(torch.int32)))


def _check_splits(
    name: str, x: Tensor, row_splits: Sequence[int] | None, column_splits: Sequence[int] | None
) -> tuple[int, list[int]]:
    """Along which dimension the projections lie, and how wide they are."""
    dim, splits = (0, row_splits) if column_splits is None else (1, column_splits)
    splits = [x.shape[dim]] if splits is None else list(splits)
    both = row_splits is not None and column_splits is not None
    if both or sum(splits) != x.shape[dim] or any(size % BLOCK for size in splits[:-1]):
        raise ValueError(
            f"{name} takes row_splits or column_splits that add up to the matrix, all but the last multiples of "
            f"{BLOCK}; got {row_splits} and {column_splits} of {tuple(x.shape)}. Cast others one by one"
        )
    return dim, splits


def _pieces(x: Tensor, splits: Sequence[int], dim: int) -> Sequence[Tensor]:
    """The projections; zeros after the last belong to it."""
    return x.split([*splits[:-1], x.shape[dim] - sum(splits[:-1])], dim=dim)


def _reference_rows(pieces: Sequence[Tensor], rounding: ScaleRounding, q: Tensor, scale: Tensor) -> None:
    """Pieces side by side, each with scales of its own."""
    casts = [quantize(piece, PER_ROW, rounding) for piece in pieces]
    q.copy_(torch.cat([new for new, _ in casts], dim=1)[: q.shape[0], : q.shape[1]])
    scale.copy_(torch.cat([new for _, new in casts], dim=1)[: q.shape[0]])


def _launch(
    x: Tensor,
    plain: Cast | None,
    transposed: Cast | None,
    rounding: ScaleRounding,
    *,
    per_column: bool = False,
    splits: tuple[int, Sequence[int]] = (0, ()),
    num_saturated: Tensor | None = None,
    given: bool = False,
    bits: Tensor | None = None,
    activation: bool = False,
) -> None:
    """The magnitudes first, unless their bits or the scale are given, then the casts."""
    words, num_warps = COLUMN_TILE if plain is None else TILE
    aligned, *source = in_words(x)
    either = transposed if plain is None else plain
    assert either is not None
    (q, scale), (q_t, scale_t) = plain or either, transposed or either
    dim, several = splits[0], len(splits[1]) > 1
    per_row = per_column and plain is not None
    numbers = [len(splits[1]) if several and along == dim else 1 for along in (0, 1)]
    row_bits = numbers[0] * q_t.shape[0] if per_column else 0
    size = row_bits + numbers[1] * q.shape[0] * per_row if per_column else numbers[0] * numbers[1]
    looks = bits is None and not given
    bits = torch.zeros(size, dtype=torch.int32, device=x.device) if bits is None else bits
    grid = tile_grid(q_t.T if plain is None else q, words)
    groups = _groups(tuple(splits[1]), grid[1 - dim], x.device) if several else bits
    tile = {
        "WORDS": words,
        "ALIGNED": aligned,
        "PER_COLUMN": per_column,
        "PER_ROW": per_row,
        "SPLIT": ("rows", "columns")[dim] if several else "",
        "num_warps": num_warps,
    }
    tile |= early_launch(x, activation)
    if looks:
        amax_kernel[grid](x, bits, groups, x.shape[0], *source, q.shape[0], q_t.shape[0], row_bits, **tile)
    scaled_kernel[grid](
        x,
        bits,
        groups,
        bits if num_saturated is None else num_saturated,
        q,
        scale,
        q_t,
        scale_t,
        x.shape[0],
        *source,
        *tile_sizes(q, scale, q_t, scale_t),
        row_bits,
        **tile,
        PLAIN=plain is not None,
        TRANSPOSED=transposed is not None,
        GIVEN=given,
        COUNT=num_saturated is not None,
        POWER_OF_TWO=rounding == "power_of_two",
        maxnreg=max_registers(x),
    )


@lru_cache(maxsize=256)
def _groups(splits: tuple[int, ...], num_blocks: int, device: torch.device) -> Tensor:
    """Which projection each block of 128 is of, int32, after a -1. Kept: to put it on a GPU waits for all before it."""
    edges = list(accumulate(splits[:-1]))
    blocks = [sum(edge <= BLOCK * block for edge in edges) for block in range(num_blocks)]
    return torch.tensor([-1, *blocks], dtype=torch.int32, device=device)
