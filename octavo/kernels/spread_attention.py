"""Decode attention of few sequences, spread over the whole GPU: the bits of `kernels.attention_kernels`.

A row's sum over its values is a chain of blocks of keys, and one program that walks it serves a KV head of a sequence:
few long sequences leave most of a GPU idle, each program waiting for the next block's scores, their exponentials, their
sum. But of all that only the sum itself has an order. So there are three kernels:

    scores    of blocks of keys, each by itself, and the largest of each block
    weights   of blocks of keys, by the largest score up to the end of each, which is a maximum and so has no order;
              and what each block moves the sums by
    values    the sum, in the order of the blocks: a program for SLICE widths of a KV head, with nothing to do between
              two products but to move its sum

Scores pass through memory once, 6 bytes for each head and key beside 512 of a BF16 key and value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.kernels import decode_attention, spread_kernels
from octavo.kernels.attention_kernels import (
    KV_BLOCK,
    half,
    inverse_power,
    larger,
    load_rows,
    product,
    row_max,
)
from octavo.kernels.e4m3 import round_bf16
from octavo.kernels.early_launch import begin, early_launch
from octavo.kernels.triton_shim import HAS_GLUON, INTERPRETED, constexpr, tl, triton

MAX_PROGRAMS = 96
"""KV heads times sequences, at most: with more, a program for each keeps an H200 as busy."""
MIN_KEYS = 1024
"""That a page table has room for, at least: three launches take longer than a program that walks few keys."""
ROWS = 16
SLICE = 32
"""Widths of a head that a program sums."""
SPREAD = 1024
"""Programs of the first two kernels, about."""
PREFIX = 64
"""Blocks whose largest scores a program reads at once."""
LAUNCH = {"scores": (2, 3), "weights": (2, 3), "values": (2, 4)}
"""Warps and pipeline stages of each kernel."""
CODES_SPREAD, CODES_STAGES = 2048, 3
"""Of the kernel for scores of E4M3 keys, of a warp each."""
_GLUON_RUNS = HAS_GLUON and not INTERPRETED
_KV_BLOCK, _ROWS, _PREFIX = constexpr(KV_BLOCK), constexpr(ROWS), constexpr(PREFIX)
_FP16_MAX = constexpr(65504.0)
_LN_2 = constexpr(0.6931471805599453)
_ONE_BITS = constexpr(0x3F800000)
_UNIT = constexpr(2.0**-23)


def spread_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    tiles: Tensor,
    factor: float,
    page_table: Tensor,
    page_size: int,
) -> tuple[Tensor, Tensor]:
    """Attention of one query of each sequence over its pages.

    Args:
        q: [T, H, Dh] bf16, contiguous; H / Hkv at most 16.
        k, v: [slots, Hkv, Dh] bf16 or e4m3, contiguous.
        k_scale, v_scale: [slots, Hkv] fp32 powers of two; None where k and v are bf16.
        tiles: [T, 4] int32 as `attention_kernel` takes them, a query each. Read while the kernel ahead may still
            run, so an earlier one wrote them: in a decode step the one ahead writes keys and values.
        factor: softmax_scale * log2(e).
        page_table: [N, pages] int, pages of each sequence in order.
        page_size: tokens in a page.

    Returns:
        [T, H, Dh] bf16, and the logsumexp of each row of scores, [T, H] fp32.
    """
    (T, H, Dh), Hkv, fp8 = q.shape, k.shape[1], k_scale is not None
    num_blocks = 2 * triton.cdiv(page_table.shape[1] * page_size, 2 * KV_BLOCK)
    scores = torch.empty(T, H, num_blocks * KV_BLOCK, device=q.device)
    weights = torch.empty_like(scores, dtype=torch.float16 if fp8 else torch.bfloat16)
    largest = torch.empty(T, H, num_blocks, device=q.device)  # score of each block
    # What each block moves the sum of weights and that of values by, and its weights in 2**-23.
    moves = torch.empty(T, H, num_blocks, 4, device=q.device)
    units = torch.empty(T, Hkv, num_blocks, device=q.device)  # largest scale of its values
    out, logsumexp = torch.empty_like(q), torch.empty(T, H, device=q.device)
    stored = k, v, k_scale if k_scale is not None else q, v_scale if v_scale is not None else q
    between = scores, weights, largest, moves, units
    where = tiles, page_table, page_table.stride(0), num_blocks
    programs = T * Hkv
    shape = {"H": H, "HKV": Hkv, "PAGE": page_size}
    block_d = max(16, triton.next_power_of_2(Dh))
    whole = {**shape, "DH": Dh, "BLOCK_D": block_d, "FP8": fp8}
    if fp8 and _GLUON_RUNS and Dh in decode_attention.WIDTHS:
        outputs = scores, largest, units
        spread_kernels.scores_kernel[programs, _spread(num_blocks, programs, CODES_SPREAD)](
            q, k, k_scale, v_scale, *outputs, *where, factor, **shape, DH=Dh, STAGES=CODES_STAGES,
            num_warps=1, enable_fp_fusion=False, **early_launch(q),
        )  # fmt: skip
    else:
        _scores_kernel[programs, _spread(num_blocks, programs, SPREAD)](
            q, *stored, *between, *where, factor, **whole, **_options(q, "scores")
        )
    _weights_kernel[programs, _spread(num_blocks, programs, SPREAD)](
        *stored, *between, *where, **whole, **_options(q, "weights")
    )
    width = min(SLICE, block_d)
    if _GLUON_RUNS and Dh % SLICE == 0:
        num_warps, num_stages = LAUNCH["values"]
        spread_kernels.values_kernel[programs, Dh // width](
            v, weights, largest, moves, units, *where, out, logsumexp, **shape, DH=Dh, FP8=fp8, WIDTH=width,
            STAGES=num_stages, WARPS=num_warps, num_warps=num_warps, enable_fp_fusion=False, **early_launch(q),
        )  # fmt: skip
    else:
        _values_kernel[programs, triton.cdiv(Dh, width)](
            *stored, *between, *where, out, logsumexp, **whole, WIDTH=width, **_options(q, "values")
        )
    return out, logsumexp


def workspace_bytes(num_sequences: int, num_heads: int, num_kv_heads: int, num_keys: int) -> int:
    """Of what the kernels leave for each other, for page tables with room for so many keys."""
    num_blocks = 2 * -(-num_keys // (2 * KV_BLOCK))
    of_head = num_blocks * (KV_BLOCK * (4 + 2) + 4 + 16)  # scores, weights, largest, moves
    return num_sequences * (num_heads * of_head + num_kv_heads * num_blocks * 4)


def _spread(num_blocks: int, programs: int, wanted: int) -> int:
    """Programs that share the blocks of each of so many."""
    return max(1, min(num_blocks, wanted // programs))


def _options(q: Tensor, name: str) -> dict[str, Any]:
    """Of the launch of a kernel."""
    num_warps, num_stages = LAUNCH[name]
    return {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": False, **early_launch(q)}


@triton.jit
def _place(tiles_ptr, table_ptr, stride_table, HKV: tl.constexpr):
    """KV head, query, position and pages of a program.

    Comes before `begin`: tiles are made at the start of a decode step, so the kernel ahead of this one waited for them.
    """
    kv_head = tl.program_id(0) % HKV
    tiles_ptr += tl.program_id(0) // HKV * 4
    query, position, sequence = tl.load(tiles_ptr), tl.load(tiles_ptr + 2), tl.load(tiles_ptr + 3)
    return kv_head, query.to(tl.int64), position, table_ptr + sequence.to(tl.int64) * stride_table


@triton.jit
def _share(position):
    """The blocks of a program, one of those that share a KV head of a sequence: first, and the one after the last."""
    num_blocks = position // _KV_BLOCK + 1
    each = tl.cdiv(num_blocks, tl.num_programs(1))
    first = tl.minimum(tl.program_id(1) * each, num_blocks)
    return first, tl.minimum(first + each, num_blocks)


@triton.jit
def _slots(table_ptr, block, position, PAGE: tl.constexpr):
    """Keys of a block, which of them are visible, and where they lie."""
    key = block * _KV_BLOCK + tl.arange(0, _KV_BLOCK)
    visible = key <= position
    page = tl.load(table_ptr + key // PAGE, mask=visible, other=0)
    return key, visible, page.to(tl.int64) * PAGE + key % PAGE


@triton.jit(do_not_specialize=["stride_table", "num_blocks"])
def _scores_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, scores_ptr, weights_ptr, largest_ptr, moves_ptr,
    unit_ptr, tiles_ptr, table_ptr, stride_table, num_blocks, factor, H: tl.constexpr,
    HKV: tl.constexpr, DH: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Scores of some blocks, their largest, and the largest scale of their values."""
    GROUP: tl.constexpr = H // HKV
    kv_head, query, position, table_ptr = _place(tiles_ptr, table_ptr, stride_table, HKV)
    begin(EARLY)
    row, d = tl.arange(0, _ROWS), tl.arange(0, BLOCK_D)
    here = row < GROUP
    head_at = query * H + kv_head * GROUP + row
    q = tl.load(q_ptr + head_at[:, None] * DH + d[None, :], mask=here[:, None] & (d < DH)[None, :], other=0.0)
    if FP8:
        q = tl.clamp(q.to(tl.float32), -_FP16_MAX, _FP16_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    first, last = _share(position)
    for block in range(first, last):
        key, visible, slot = _slots(table_ptr, block, position, PAGE)
        k = load_rows(k_ptr, slot * HKV + kv_head, visible, DH, BLOCK_D, True)
        scaled = factor
        if FP8:
            k = half(k)
            scaled *= tl.load(k_scale_ptr + slot * HKV + kv_head, mask=visible, other=1.0)[None, :]
        scores = product(q, tl.trans(k), tl.zeros([_ROWS, _KV_BLOCK], tl.float32)) * scaled
        scores = tl.where(visible[None, :], scores, float("-inf"))
        at = scores_ptr + head_at[:, None] * (num_blocks * _KV_BLOCK) + key[None, :]
        tl.store(at, scores, mask=here[:, None])
        tl.store(largest_ptr + head_at * num_blocks + block, row_max(scores), mask=here)
        if FP8:
            v_scale = tl.load(v_scale_ptr + slot * HKV + kv_head, mask=visible, other=0.0)
            tl.store(unit_ptr + (query * HKV + kv_head) * num_blocks + block, tl.max(v_scale, axis=0))  # drops NaN


@triton.jit(do_not_specialize=["stride_table", "num_blocks"])
def _weights_kernel(
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, scores_ptr, weights_ptr, largest_ptr, moves_ptr,
    unit_ptr, tiles_ptr, table_ptr, stride_table, num_blocks, H: tl.constexpr, HKV: tl.constexpr,
    DH: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, FP8: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Weights of some blocks, and what each of them moves the sums by."""
    GROUP: tl.constexpr = H // HKV
    kv_head, query, position, table_ptr = _place(tiles_ptr, table_ptr, stride_table, HKV)
    begin(EARLY)
    row = tl.arange(0, _ROWS)
    here = row < GROUP
    head_at = query * H + kv_head * GROUP + row
    of_blocks, of_head = head_at * num_blocks, (query * HKV + kv_head) * num_blocks
    first, last = _share(position)
    largest, unit = tl.full([_ROWS], float("-inf"), tl.float32), 0.0
    for start in range(0, first, _PREFIX):
        before = start + tl.arange(0, _PREFIX)
        mask = here[:, None] & (before < first)[None, :]
        scores = tl.load(largest_ptr + of_blocks[:, None] + before[None, :], mask=mask, other=float("-inf"))
        largest = larger(largest, row_max(scores))
        if FP8:
            unit = tl.maximum(
                unit, tl.max(tl.load(unit_ptr + of_head + before, mask=before < first, other=0.0), axis=0)
            )
    for block in range(first, last):
        key, visible, slot = _slots(table_ptr, block, position, PAGE)
        scores_at = head_at[:, None] * (num_blocks * _KV_BLOCK) + key[None, :]
        scores = tl.load(scores_ptr + scores_at, mask=here[:, None], other=0.0)
        now = larger(largest, tl.load(largest_ptr + of_blocks + block, mask=here, other=0.0))
        moved = tl.exp2(largest - now)
        largest = now
        p = tl.exp2(scores - now[:, None])
        counted = tl.sum((p + 1.0).to(tl.int32, bitcast=True) - _ONE_BITS, axis=1).to(tl.float32)
        moves_at = moves_ptr + 4 * (of_blocks + block)
        tl.store(moves_at, moved, mask=here)
        tl.store(moves_at + 2, counted, mask=here)
        if FP8:
            grown = tl.maximum(unit, tl.load(unit_ptr + of_head + block))
            v_scale = tl.load(v_scale_ptr + slot * HKV + kv_head, mask=visible, other=0.0)
            p *= (v_scale * inverse_power(grown))[None, :]
            moved *= unit * inverse_power(grown)
            unit = grown
        elif (block + 1) * _KV_BLOCK > position + 1:  # in a block with keys to come a bad value spoils all widths
            v = load_rows(v_ptr, slot * HKV + kv_head, visible, DH, BLOCK_D, True)
            broken = tl.max(v.to(tl.int16, bitcast=True) & 0x7FFF, axis=1) >= 0x7F80
            p = tl.where(broken[None, :], float("nan"), p)
        tl.store(moves_at + 1, moved, mask=here)
        tl.store(weights_ptr + scores_at, _rounded(p, weights_ptr.dtype.element_ty), mask=here[:, None])
    if (first < last) & (last == position // _KV_BLOCK + 1):  # of the last block no one reads what it had alone
        tl.store(largest_ptr + of_blocks + last - 1, largest, mask=here)
        if FP8:
            tl.store(unit_ptr + of_head + last - 1, unit)


@triton.jit(do_not_specialize=["stride_table", "num_blocks"])
def _values_kernel(
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, scores_ptr, weights_ptr, largest_ptr, moves_ptr,
    unit_ptr, tiles_ptr, table_ptr, stride_table, num_blocks, out_ptr, logsumexp_ptr, H: tl.constexpr,
    HKV: tl.constexpr, DH: tl.constexpr, BLOCK_D: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
    FP8: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """WIDTH widths of the sum."""
    GROUP: tl.constexpr = H // HKV
    kv_head, query, position, table_ptr = _place(tiles_ptr, table_ptr, stride_table, HKV)
    begin(EARLY)
    row, d = tl.arange(0, _ROWS), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    here = row < GROUP
    head_at = query * H + kv_head * GROUP + row
    of_blocks, weights_ptr = head_at * num_blocks, weights_ptr + (head_at * (num_blocks * _KV_BLOCK))[:, None]
    total, acc = tl.zeros([_ROWS], tl.float32), tl.zeros([_ROWS, WIDTH], tl.float32)
    last = position // _KV_BLOCK
    for block in range(0, last + 1):
        key = block * _KV_BLOCK + tl.arange(0, _KV_BLOCK)
        seen = tl.minimum(key, position)  # beyond it weights are 0
        slot = tl.load(table_ptr + seen // PAGE).to(tl.int64) * PAGE + seen % PAGE
        v = tl.load(v_ptr + (slot * HKV + kv_head)[:, None] * DH + d[None, :], mask=(d < DH)[None, :], other=0.0)
        if FP8:
            v = half(v)
        weights = tl.load(weights_ptr + key[None, :], mask=here[:, None], other=0.0)
        moves_at = moves_ptr + 4 * (of_blocks + block)
        total = total * tl.load(moves_at, mask=here, other=0.0) + tl.load(moves_at + 2, mask=here, other=0.0)
        shifted = tl.load(moves_at + 1, mask=here, other=0.0)
        acc = product(weights, v, acc * shifted[:, None])
    total *= _UNIT
    unit = tl.load(unit_ptr + (query * HKV + kv_head) * num_blocks + last) if FP8 else 1.0
    out = acc * (unit / total)[:, None]
    tl.store(out_ptr + head_at[:, None] * DH + d[None, :], round_bf16(out), mask=here[:, None] & (d < DH)[None, :])
    if tl.program_id(1) == 0:
        largest = tl.load(largest_ptr + of_blocks + last, mask=here, other=0.0)
        tl.store(logsumexp_ptr + head_at, (largest + tl.log2(total)) * _LN_2, mask=here)


@triton.jit
def _rounded(p, dtype: tl.constexpr):
    if dtype == tl.bfloat16:
        return round_bf16(p).to(tl.bfloat16)
    else:
        return p.to(tl.float16)
