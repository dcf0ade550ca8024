"""Where a cast goes: FP8 matrices with aligned rows and their scales, allocated or given, and the reference's casts."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.numerics.fp8 import BLOCK_1X128, BLOCK_128X128, E4M3, PER_ROW, QuantBlock, ScaleRounding, quantize

BLOCK = 128
ALLOCATED, GIVEN = 16, 8
"""Bytes that rows of an FP8 matrix start at multiples of: of those made here, and at least of those that are given."""

Padding = tuple[int, int]
"""Multiples that rows and columns of a cast are rounded up to."""
UNPADDED: Padding = (1, 1)

TILE, COLUMN_TILE = (64, 8), (32, 4)
"""Pairs of columns and warps of a program that casts a tile of 128 rows: along its rows, or only along its columns."""

Cast = tuple[Tensor, Tensor]
"""q e4m3 and scale fp32."""


def padded(size: int, pad_to: int) -> int:
    """The multiple of pad_to that is at least size."""
    return -(-size // pad_to) * pad_to


def outputs(
    name: str,
    size: torch.Size,
    quant_block: QuantBlock,
    device: torch.device,
    pad_to: Padding,
    out: Cast | None,
    groups: tuple[int, int] = (1, 1),
) -> Cast:
    """q and scale for a cast of that size, new or `out`, which must fit.

    Raises:
        ValueError: `out` does not fit.
    """
    given_q, given_scale = out or (None, None)
    q = matrix(name, size, device, pad_to, given_q)
    return q, scales(name, q.shape, quant_block, device, given_scale, groups)


def matrix(name: str, size: torch.Size, device: torch.device, pad_to: Padding, given: Tensor | None) -> Tensor:
    """[M, K] e4m3 with aligned rows, rows and columns rounded up to multiples of pad_to; or the given one."""
    if given is None:
        M, K = padded(size[0], pad_to[0]), padded(size[1], pad_to[1])
        return torch.empty(M, padded(K, ALLOCATED), dtype=E4M3, device=device)[:, :K]
    fits = given.ndim == 2 and given.shape[0] >= size[0] and given.shape[1] >= size[1] and given.stride(1) == 1
    aligned = fits and all(n % GIVEN == 0 for n in (given.data_ptr(), given.stride(0), given.shape[1]))
    if not aligned or given.dtype != E4M3 or given.device != device:
        raise ValueError(
            f"{name} writes into an e4m3 matrix of at least {tuple(size)} on {device}, whose address, row stride and "
            f"width are multiples of {GIVEN} bytes; got shape {tuple(given.shape)}, stride {given.stride()}, dtype "
            f"{given.dtype}, device {given.device}"
        )
    return given


def scales(
    name: str,
    size: torch.Size,
    quant_block: QuantBlock,
    device: torch.device,
    given: Tensor | None,
    groups: tuple[int, int] = (1, 1),
) -> Tensor:
    """One scale per block, fp32: rows contiguous for 128x128, columns otherwise; or the given ones.

    Columns of new ones begin at multiples of 16 bytes, as bulk copies want them. `groups` is how many projections along
    each dimension have blocks of their own where a block is the whole dimension.
    """
    rows, columns = (max(1, block or whole) for block, whole in zip(quant_block, size, strict=True))
    shape = (-(-size[0] // rows) * groups[0], -(-size[1] // columns) * groups[1])
    dim = 1 if quant_block == BLOCK_128X128 else 0
    if given is None:
        if dim:
            return torch.empty(shape, device=device)
        return torch.empty(shape[1], padded(shape[0], 4), device=device)[:, : shape[0]].T
    if given.shape != shape or given.dtype != torch.float32 or (shape[dim] > 1 and given.stride(dim) != 1):
        raise ValueError(
            f"{name} writes scales fp32 {shape} with unit stride along dimension {dim}; got shape "
            f"{tuple(given.shape)}, stride {given.stride()}, dtype {given.dtype}"
        )
    return given


def check_pair(name: str, q: Tensor, q_t: Tensor | None) -> None:
    """ValueError unless a cast and its transpose have the same blocks of 128 x 128."""
    if q_t is not None and [padded(n, BLOCK) for n in q.shape] != [padded(n, BLOCK) for n in q_t.T.shape]:
        raise ValueError(
            f"{name} writes a cast and its transpose of the same number of blocks of 128 x 128; got {tuple(q.shape)} "
            f"and {tuple(q_t.shape)}"
        )


def check_fused(name: str, quant_block: QuantBlock, transposed: bool) -> None:
    """ValueError unless an operation that casts its result has such a cast."""
    if quant_block not in (BLOCK_1X128, PER_ROW) or (transposed and quant_block == PER_ROW):
        raise ValueError(
            f"{name} casts per 1x128 block, with or without the transpose, or per row (1, None) without it; got "
            f"quant_block={quant_block}, transposed={transposed}. Use cast_columns on the result for a scale per column"
        )


def tile_grid(q: Tensor, words: int = TILE[0]) -> tuple[int, int]:
    """Programs for the columns and for the rows of q, each a tile of 128 rows and that many pairs of columns."""
    return -(-q.shape[1] // (2 * words)), -(-q.shape[0] // BLOCK)


def tile_sizes(q: Tensor, scale: Tensor, q_t: Tensor, scale_t: Tensor) -> tuple[int, ...]:
    """How a kernel that casts a tile writes its outputs: T_out, K_out, words, stride_q, stride_s, words_t, ..."""
    plain = (-(-q.shape[1] // 2), q.stride(0) // 2, scale.stride(1))
    return q.shape[0], q_t.shape[0], *plain, -(-q_t.shape[1] // 4), q_t.stride(0) // 4, scale_t.stride(1)


def max_registers(x: Tensor) -> int | None:
    """Registers of a thread with which two programs of 8 warps run side by side; for BF16, whose tiles fit."""
    return 128 if x.element_size() == 2 else None


def check_matrix(x: Tensor, name: str) -> None:
    """ValueError unless a cast takes it."""
    if x.ndim != 2 or not x.is_floating_point() or x.stride(1) != 1:
        raise ValueError(
            f"{name} wants a floating-point matrix [M, K] with unit stride along K; got shape {tuple(x.shape)}, stride "
            f"{x.stride()}, dtype {x.dtype}"
        )


def reference(x: Tensor, quant_block: QuantBlock, rounding: ScaleRounding, q: Tensor, scale: Tensor) -> Cast:
    """The cast that defines the right answer, of X with zeros around it where q is larger."""
    new_q, new_scale = quantize(zeros_around(x, q.shape), quant_block, rounding)
    return q.copy_(new_q), scale.copy_(new_scale)


def zeros_around(x: Tensor, size: torch.Size) -> Tensor:
    """X, and zeros after its rows and columns."""
    return torch.nn.functional.pad(x, (0, size[1] - x.shape[1], 0, size[0] - x.shape[0]))


def cover(q: Tensor, q_t: Tensor | None) -> torch.Size:
    """Rows and columns of a matrix that has those of a cast and of its transpose."""
    sizes = [q.shape] if q_t is None else [q.shape, q_t.T.shape]
    return torch.Size(max(lengths) for lengths in zip(*sizes, strict=True))


def copy_both_ways(whole: Tensor, q: Tensor, q_t: Tensor | None) -> None:
    """What q covers of a cast, and its transpose what that does."""
    q.copy_(whole[: q.shape[0], : q.shape[1]])
    if q_t is not None:
        q_t.copy_(whole.T[: q_t.shape[0], : q_t.shape[1]])
