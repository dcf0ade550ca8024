"""Attention's backward pass over packed sequences on Hopper: what its programs take, memory, launches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from octavo.kernels.gradient_kernels import KEYS, ROWS, grad_kv_kernel, grad_q_kernel, rows_kernel
from octavo.kernels.prefill_attention import descriptor
from octavo.kernels.triton_shim import triton

WIDTHS = (64, 128)
"""Head widths that the kernels take."""
STAGES = 4
"""Blocks of queries in shared memory."""
KEY_STAGES = {1: 6, 2: 4}
"""Half tiles of keys in shared memory, for dQ of one head or two."""
REGISTERS = 240
"""Of a thread of the second group; of the first, what is left."""
TOKENS = 64
"""Of a program that prepares rows."""
BLOCK_BYTES = 2 * KEYS * ROWS
"""Of d_scores."""
MAX_BLOCK_BYTES = 3 * 2**30
"""Where the KV heads need more, some go after others; one gets what it needs."""
Count = TypeVar("Count", int, Tensor)


@dataclass(frozen=True, eq=False)
class GradientTiles:
    """Which tokens a program takes, as queries or keys.

    Tables are [tiles, 4] int32: first token, tokens from it to the sequence's end (0 where the tile is not needed), its
    position, blocks of one head in the sequences before.
    """

    queries: Tensor
    """Those with most keys first."""
    keys: Tensor
    """Those with most queries first."""
    counted: Tensor
    """[] int64."""

    @cached_property
    def num_blocks(self) -> int:
        """Of the query heads of a KV head in all sequences. The host waits for them, once."""
        return int(self.counted)


def blocks_of(length: Count) -> Count:
    """Of one head of a sequence of so many tokens: of each tile of keys, those with queries that may see it."""
    tiles, rows = (length + KEYS - 1) // KEYS, (length + ROWS - 1) // ROWS
    return rows * tiles - tiles * (tiles - 1)


def heads_at_once(num_blocks: int, num_kv_heads: int) -> int:
    """KV heads whose blocks are in memory together."""
    most = max(1, MAX_BLOCK_BYTES // (num_blocks * BLOCK_BYTES))
    return -(-num_kv_heads // -(-num_kv_heads // most))


def attention_gradients(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    tiles: GradientTiles,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of causal attention within packed sequences.

    Args:
        grad_out, q, out: [T, H, Dh] bf16, contiguous; Dh in WIDTHS.
        k, v: [T, Hkv, Dh] bf16, contiguous.
        logsumexp: [T, H] fp32, of each row of scores.
        tiles: of these sequences.
        softmax_scale: multiplies the scores.

    Returns:
        Gradients of q, k and v, bf16.
    """
    (T, H, Dh), Hkv = q.shape, k.shape[1]
    group, pair = H // Hkv, 1 + (H // Hkv % 2 == 0)
    shape = {"GROUP": group, "HKV": Hkv, "DH": Dh, "REGISTERS": REGISTERS, "num_warps": 4}
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta, log2sum = torch.empty(2, H, T, device=q.device)
    rows_kernel[(H * triton.cdiv(T, TOKENS),)](out, grad_out, logsumexp, delta, log2sum, T, R=TOKENS, H=H, DH=Dh)
    num_blocks, at_once = tiles.num_blocks, heads_at_once(tiles.num_blocks, Hkv)
    blocks = torch.empty(at_once * num_blocks * KEYS, ROWS, dtype=torch.bfloat16, device=q.device)
    boxes = [descriptor(x.view(T, -1), [ROWS, Dh]) for x in (q, grad_out, k, v)]  # ROWS keys are half a tile
    halves = descriptor(blocks, [KEYS // 2, ROWS]), boxes[2]
    for first in range(0, Hkv, at_once):
        heads = min(at_once, Hkv - first)
        where = first, heads, num_blocks
        grad_kv_kernel[(heads * len(tiles.keys),)](
            *boxes, log2sum, delta, grad_k, grad_v, blocks, tiles.keys, *where, T, softmax_scale, STAGES=STAGES, **shape
        )
        grad_q_kernel[(heads * (group // pair) * len(tiles.queries),)](
            *halves, grad_q, tiles.queries, *where, softmax_scale, HEADS=pair, STAGES=KEY_STAGES[pair], **shape
        )
    return grad_q, grad_k, grad_v
