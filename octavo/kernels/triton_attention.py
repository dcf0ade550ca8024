"""Attention on a GPU: which queries share a tile, and the launch of the forward kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels import attention_gradients, decode_attention, prefill_attention, spread_attention
from octavo.kernels.attention_gradients import GradientTiles, blocks_of
from octavo.kernels.attention_kernels import KV_BLOCK, LOG2_E, attention_kernel
from octavo.kernels.device import on_gpu
from octavo.kernels.triton_shim import HAS_GLUON, INTERPRETED, triton

DECODE_ROWS = 16
"""Of a tile, where a query's heads fit and each sequence has one query."""
PREFILL_ROWS = 64
FEW_PROGRAMS = 512
"""Fewer programs of DECODE_ROWS than this get two warps each."""
_GLUON_RUNS = HAS_GLUON and not INTERPRETED
UNFUSED = {"enable_fp_fusion": False}
"""A product and a sum are two roundings everywhere: blocks that all rows see and others are compiled apart."""


@dataclass(frozen=True, eq=False)
class Tiles:
    """Which queries a program of the forward kernel takes."""

    table: Tensor
    """[tiles, 4] int32: first packed query, number of queries, position of the first, sequence."""
    rows: int
    """Of a tile: queries times the query heads of a KV head, 16, 64 or 128."""
    one_query: bool = False
    """Whether each tile has one query, the only one of its sequence."""


class PackedTiles(NamedTuple):
    """Tiles of packed sequences."""

    forward: Tiles
    """For the forward pass."""
    queries: Tiles
    """For dQ."""
    keys: Tiles
    """Of KV_BLOCK keys, those with most queries first, for dK and dV."""
    gradients: GradientTiles
    """For all of them on Hopper."""


def packed_tiles(cu_seqlens: Tensor, num_tokens: int, heads_per_kv_head: int, head_dim: int) -> PackedTiles:
    """Tiles of sequences laid end to end."""
    keys = tiles_of(cu_seqlens, None, num_tokens, 1, KV_BLOCK)
    forward, queries = (
        tiles_of(cu_seqlens, None, num_tokens, heads_per_kv_head, rows)
        for rows in (packed_rows(head_dim), PREFILL_ROWS)
    )
    gradients = gradient_tiles(cu_seqlens, num_tokens, heads_per_kv_head)
    return PackedTiles(forward, queries, Tiles(keys.table.flip(0), KV_BLOCK), gradients)


def gradient_tiles(cu_seqlens: Tensor, num_tokens: int, heads_per_kv_head: int) -> GradientTiles:
    """Tiles of sequences laid end to end, for `attention_gradients`."""
    queries = tiles_of(cu_seqlens, None, num_tokens, 1, attention_gradients.KEYS).table.long()
    first, size, position, sequence = queries.unbind(1)
    before = torch.nn.functional.pad(blocks_of(cu_seqlens.diff()).cumsum(0), (1, 0))
    left = torch.where(size > 0, cu_seqlens[sequence + 1] - first, 0) if len(queries) else first
    table = torch.stack([first, left, position, before[sequence]], dim=1).int()
    return GradientTiles(table, table[left.argsort(descending=True)], before[-1] * heads_per_kv_head)


def has_gradients(head_dim: int) -> bool:
    """Whether `attention_gradients` runs for this width."""
    return _GLUON_RUNS and head_dim in attention_gradients.WIDTHS


def packed_rows(head_dim: int) -> int:
    """Of a tile of many queries whose keys are packed."""
    return prefill_attention.ROWS if _GLUON_RUNS and head_dim in prefill_attention.WIDTHS else PREFILL_ROWS


def decode_tiles(positions: Tensor, heads_per_kv_head: int) -> Tiles:
    """A tile for the query of each sequence, [B] int64 positions, those with most keys first."""
    index = torch.arange(len(positions), device=positions.device)
    table = torch.stack([index, torch.ones_like(index), positions, index], dim=1)
    return Tiles(table[positions.argsort(descending=True)].int(), decode_rows(heads_per_kv_head), one_query=True)


def decode_rows(heads_per_kv_head: int) -> int:
    """Of a tile of one query."""
    return DECODE_ROWS if heads_per_kv_head <= DECODE_ROWS else PREFILL_ROWS


def tiles_of(
    boundaries: Tensor, first_positions: Tensor | None, num_queries: int, heads_per_kv_head: int, rows: int
) -> Tiles:
    """Tiles of a ragged batch, those with most keys first. Made on the device of the batch, without waiting for it.

    Args:
        boundaries: [N + 1] int64, where each sequence's queries lie packed, from 0 to `num_queries`.
        first_positions: [N] int64, position of each sequence's first query; None for all 0.
        num_queries: packed queries.
        heads_per_kv_head: rows that a query takes.
        rows: of a tile.
    """
    if heads_per_kv_head > rows:
        raise ValueError(
            f"attention on a GPU takes at most {rows} query heads for each KV head in a tile of {rows} rows; "
            f"got {heads_per_kv_head}"
        )
    queries = rows // heads_per_kv_head
    num_sequences = max(len(boundaries) - 1, 0)
    counts = boundaries.diff()
    last = ((counts + queries - 1) // queries).cumsum(0)  # one past the last tile of each sequence
    index = torch.arange(num_queries // queries + num_sequences, device=boundaries.device)
    sequence = torch.searchsorted(last, index, right=True).clamp(max=max(num_sequences - 1, 0))
    if num_sequences == 0:
        return Tiles(torch.empty(0, 4, dtype=torch.int32, device=boundaries.device), rows)
    tiles_before = torch.nn.functional.pad(last, (1, 0))[sequence]
    start = (index - tiles_before) * queries
    size = (counts[sequence] - start).clamp(0, queries)
    position = start if first_positions is None else first_positions[sequence] + start
    table = torch.stack([boundaries[sequence] + start, size, position, sequence], dim=1)
    table *= (size > 0)[:, None]  # a tile that is not needed has no queries and sees no keys
    return Tiles(table[torch.argsort(table[:, 2], descending=True)].int(), rows)


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    tiles: Tiles,
    softmax_scale: float,
    page_table: Tensor | None = None,
    page_size: int = 0,
    key_starts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of each query over the keys of its sequence up to its own position.

    Args:
        q: [T, H, Dh] bf16, contiguous.
        k, v: [slots, Hkv, Dh] bf16 or codes, e4m3 or as fp16, contiguous; packed where there is no page table.
        k_scale, v_scale: [slots, Hkv] fp32 powers of two, of codes; None where k and v are bf16.
        tiles: of `tiles_of`.
        softmax_scale: multiplies the scores.
        page_table: [N, pages] int, pages of each sequence in order.
        page_size: tokens in a page.
        key_starts: [N] int64, slot of the first key of each sequence where keys are packed, but not beside queries.

    Returns:
        [T, H, Dh] bf16, and the logsumexp of each row of scores, [T, H] fp32.
    """
    (T, H, Dh), Hkv = q.shape, k.shape[1]
    num_programs, factor = Hkv * len(tiles.table), softmax_scale * LOG2_E
    if T and page_table is not None and spreads(tiles, Hkv, page_table, page_size):
        stored = k, v, k_scale, v_scale
        return spread_attention.spread_attention(q, *stored, tiles.table, factor, page_table, page_size)
    if T and page_table is not None and k_scale is not None and v_scale is not None and decodes_fp8(tiles, Dh):
        return decode_attention.decode_attention(q, k, v, k_scale, v_scale, tiles.table, factor, page_table, page_size)
    if T and page_table is None and _prefills(tiles, Dh, k):
        return prefill_attention.prefill_attention(q, k, v, k_scale, v_scale, tiles.table, factor, key_starts)
    out, logsumexp = torch.empty_like(q), torch.empty(T, H, device=q.device)
    if T:
        where = next((x for x in (page_table, key_starts) if x is not None), tiles.table)
        if page_table is None and k_scale is not None and v_scale is not None:
            k_scale, v_scale = k_scale.T.contiguous(), v_scale.T.contiguous()
        attention_kernel[(num_programs,)](
            q,
            k,
            v,
            k_scale if k_scale is not None else q,
            v_scale if v_scale is not None else q,
            out,
            logsumexp,
            tiles.table,
            where,
            factor,
            0 if page_table is None else page_table.stride(0),
            len(k),
            H=H,
            HKV=Hkv,
            DH=Dh,
            BLOCK_D=block_width(Dh),
            ROWS=tiles.rows,
            PAGE=page_size,
            STARTS=key_starts is not None,
            FP8=k_scale is not None,
            num_warps=num_warps(tiles.rows, num_programs),
            num_stages=3,
            **UNFUSED,
        )
    return out, logsumexp


def decodes_fp8(tiles: Tiles, head_dim: int) -> bool:
    """Whether the faster kernel takes these tiles over FP8 pages; it gives the same bits."""
    return _GLUON_RUNS and tiles.one_query and tiles.rows == DECODE_ROWS and head_dim in decode_attention.WIDTHS


def spreads(tiles: Tiles, num_kv_heads: int, page_table: Tensor, page_size: int) -> bool:
    """Whether the kernels for few long sequences take these tiles over pages; they give the same bits."""
    few = len(tiles.table) * num_kv_heads <= spread_attention.MAX_PROGRAMS
    long = page_table.shape[1] * page_size >= spread_attention.MIN_KEYS
    return few and long and tiles.one_query and tiles.rows == DECODE_ROWS


def _prefills(tiles: Tiles, head_dim: int, k: Tensor) -> bool:
    """Whether the faster kernel takes these tiles over packed keys; it gives the same bits."""
    takes = head_dim in prefill_attention.WIDTHS and k.itemsize == 2
    return _GLUON_RUNS and takes and tiles.rows == prefill_attention.ROWS


def has_kernel(x: Tensor) -> bool:
    """Whether attention over queries or a cache like x runs as a kernel: on a GPU, except in FP32."""
    return on_gpu(x, "attention") and x.dtype != torch.float32


def num_warps(rows: int, num_programs: int) -> int:
    """Warps that share a tile. The bits are the same for any."""
    return max(1, rows // 16) if rows > DECODE_ROWS or num_programs >= FEW_PROGRAMS else 2


def block_width(head_dim: int) -> int:
    """Columns that a kernel holds of a head: those beyond it are zeros, which add nothing to a product."""
    return max(16, triton.next_power_of_2(head_dim))
