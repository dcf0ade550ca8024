"""Attention of many queries over packed keys: the bits of `kernels.attention_kernels`, in Gluon.

Triton waits for each product of scores before it goes on, and has every thread fetch the scales of its own keys. Here a
warp brings keys, values (TMA) and their scales to shared memory for two groups of four warps with 64 rows each; a group
works out the weights of a block while the tensor cores add up the block before and score the one after. Keys come a
block ahead of values. Blocks of keys that not every row sees come last, one step after another.

Codes come as FP16: a group's products would else convert them again for each 128 rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.attention_kernels import KV_BLOCK
from octavo.kernels.gluon_numbers import half, inverse_power, larger
from octavo.kernels.triton_shim import (
    ampere,
    constexpr,
    copy_async,
    gl,
    gluon,
    hopper,
    thread_barrier,
    tma_load,
    triton_module,
)

WIDTHS = (64, 128)
"""Head widths that the kernel takes."""
ROWS = 128
"""Of a tile, for both groups."""
STAGES = 3
"""Blocks of keys and of values in shared memory, 3 at least; of width 128 at most 5."""
REGISTERS = 240
"""Of a thread of the second group; the first gets what is left, as many."""
_KV_BLOCK = constexpr(KV_BLOCK)
_LN_2 = constexpr(0.6931471805599453)
_ONE_BITS = constexpr(0x3F800000)
_UNIT = constexpr(2.0**-23)
_INFINITY_BITS = constexpr(0x7F80)


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    tiles: Tensor,
    factor: float,
    key_starts: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of each query over its sequence's packed keys up to its own position.

    Args:
        q: [T, H, Dh] bf16, contiguous; H / Hkv at most 128, Dh in WIDTHS.
        k, v: [S, Hkv, Dh], contiguous: bf16, or e4m3 codes as fp16.
        k_scale, v_scale: [S, Hkv] fp32 powers of two, of codes.
        tiles: [tiles, 4] int32 as `attention_kernel` takes them, of ROWS rows.
        factor: softmax_scale * log2(e).
        key_starts: [N] int64, the first key of each sequence; None where keys lie beside their queries.

    Returns:
        [T, H, Dh] bf16, and the logsumexp of each row of scores, [T, H] fp32.
    """
    (T, H, Dh), Hkv = q.shape, k.shape[1]
    out, logsumexp = torch.empty_like(q), torch.empty(T, H, device=q.device)
    keys = (descriptor(x.view(len(x), -1), [KV_BLOCK, Dh]) for x in (k, v))
    prefill_attention_kernel[(Hkv * len(tiles),)](
        q,
        *keys,
        q if k_scale is None else k_scale * factor,
        q if v_scale is None else v_scale,
        out,
        logsumexp,
        tiles,
        tiles if key_starts is None else key_starts,
        factor,
        H=H,
        HKV=Hkv,
        DH=Dh,
        STARTS=key_starts is not None,
        SCALED=k_scale is not None,
        STAGES=STAGES,
        REGISTERS=REGISTERS,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out, logsumexp


def descriptor(matrix: Tensor, box: list[int]) -> object:
    """For bulk copies of boxes of a row-major matrix to swizzled shared memory."""
    layout = gl.NVMMASharedLayout(128, matrix.element_size() * 8, rank=2)
    return triton_module("experimental.gluon.nvidia.hopper").TensorDescriptor.from_tensor(matrix, box, layout)


@gluon.jit
def prefill_attention_kernel(
    q_ptr, k_desc, v_desc, k_scale_ptr, v_scale_ptr, out_ptr, logsumexp_ptr, tiles_ptr, starts_ptr, factor,
    H: gl.constexpr, HKV: gl.constexpr, DH: gl.constexpr, STARTS: gl.constexpr, SCALED: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program for a KV head and a tile of queries; arguments as of `attention_kernel`."""
    kv_head = gl.program_id(0) % HKV
    tiles_ptr += gl.program_id(0) // HKV * 4
    first_query, num_queries, first_position = gl.load(tiles_ptr), gl.load(tiles_ptr + 1), gl.load(tiles_ptr + 2)
    if STARTS:
        origin = gl.load(starts_ptr + gl.load(tiles_ptr + 3)).to(gl.int32)
    else:
        origin = first_query - first_position
    num_blocks = gl.maximum(gl.cdiv(first_position + num_queries, _KV_BLOCK), 1)  # a tile may have no queries

    tile: gl.constexpr = [STAGES, _KV_BLOCK, DH]
    clean = gl.allocate_shared_memory(k_desc.dtype, [2, _KV_BLOCK, DH], v_desc.layout)
    if SCALED:
        q_tiles = gl.allocate_shared_memory(k_desc.dtype, [2, 64, DH], k_desc.layout)
    else:
        q_tiles = clean  # on their way to registers, of which those with scales have none left
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, tile, k_desc.layout)
    v_tiles = gl.allocate_shared_memory(k_desc.dtype, tile, v_desc.layout)
    if SCALED:
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        k_scales = gl.allocate_shared_memory(gl.float32, [STAGES, _KV_BLOCK], flat)
        v_scales = gl.allocate_shared_memory(gl.float32, [STAGES, _KV_BLOCK], flat)
    else:
        k_scales = k_tiles
        v_scales = v_tiles
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(k_full.index(stage), count=1)
        hopper.mbarrier.init(v_full.index(stage), count=1)
        hopper.mbarrier.init(empty.index(stage), count=2)
    # fmt: off
    pointers = q_ptr, out_ptr, logsumexp_ptr
    where = first_query, num_queries, first_position, kv_head, num_blocks, factor
    shared = k_tiles, v_tiles, k_scales, v_scales, k_full, v_full, empty
    gl.warp_specialize([
        (_attend, (pointers, where, q_tiles.index(0), clean.index(0), shared, H // HKV, H, DH, SCALED, STAGES, 0)),
        (_attend, (pointers, where, q_tiles.index(1), clean.index(1), shared, H // HKV, H, DH, SCALED, STAGES, 1)),
        (_fetch, (k_desc, v_desc, k_scale_ptr, v_scale_ptr, origin, first_position + num_queries, kv_head, num_blocks,
                  shared, HKV, DH, SCALED, STAGES)),
    ], [4, 1], [REGISTERS, 24])
    # fmt: on


@gluon.jit
def _fetch(
    k_desc, v_desc, k_scale_ptr, v_scale_ptr, origin, num_keys, kv_head, num_blocks, shared, HKV: gl.constexpr,
    DH: gl.constexpr, SCALED: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: fills stages in order, keys (with the scales of both) a block ahead of values. Both groups say when
    they have done with a block's keys and scales and the values before them: what comes STAGES later may come."""
    v_tiles, v_full, empty = shared[1], shared[5], shared[6]
    where = origin, num_keys, kv_head
    _fetch_keys(k_desc, k_scale_ptr, v_scale_ptr, where, 0, shared, HKV, DH, SCALED, STAGES)
    for block in range(0, num_blocks):
        stage, turn = _place(block + 1, STAGES)
        hopper.mbarrier.wait(empty.index(stage), turn ^ 1)
        if block + 1 < num_blocks:
            _fetch_keys(k_desc, k_scale_ptr, v_scale_ptr, where, block + 1, shared, HKV, DH, SCALED, STAGES)
        stage, turn = _place(block, STAGES)
        hopper.mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        tma_load(v_desc, [origin + block * _KV_BLOCK, kv_head * DH], v_full.index(stage), v_tiles.index(stage))


@gluon.jit
def _fetch_keys(
    k_desc, k_scale_ptr, v_scale_ptr, where, block, shared, HKV: gl.constexpr, DH: gl.constexpr, SCALED: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    k_tiles, v_tiles, k_scales, v_scales, k_full, v_full, empty = shared
    origin, num_keys, kv_head = where
    stage, turn = _place(block, STAGES)
    if SCALED:
        key = block * _KV_BLOCK + gl.arange(0, _KV_BLOCK, gl.BlockedLayout([2], [32], [1], [0]))
        at = (origin + gl.minimum(key, gl.maximum(num_keys - 1, 0))).to(gl.int64) * HKV + kv_head
        copy_async(k_scales.index(stage), k_scale_ptr + at)
        copy_async(v_scales.index(stage), v_scale_ptr + at)
        ampere.async_copy.mbarrier_arrive(k_full.index(stage))
    hopper.mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
    tma_load(k_desc, [origin + block * _KV_BLOCK, kv_head * DH], k_full.index(stage), k_tiles.index(stage))


@gluon.jit
def _place(block, STAGES: gl.constexpr):
    """Stage of a block, and which of the two phases of the stage's barriers is its own."""
    block = gl.to_tensor(block).to(gl.uint32)  # the division of a number without sign is shorter
    return (block % STAGES).to(gl.int32), (block // STAGES & 1).to(gl.int32)


@gluon.jit
def _attend(
    pointers, where, q_tile, clean, shared, GROUP: gl.constexpr, H: gl.constexpr, DH: gl.constexpr,
    SCALED: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Four warps: 64 rows of the tile from start to end."""
    q_ptr, out_ptr, logsumexp_ptr = pointers
    first_query, num_queries, first_position, kv_head, num_blocks, factor = where
    k_tiles, v_tiles, k_scales, v_scales, k_full, v_full, empty = shared
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, DH, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DH, DH // 8], [4, 1], [1, 0])
    row = PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, copied))
    query = row // GROUP
    at = ((first_query + query).to(gl.int64) * H + kv_head * GROUP + row % GROUP).expand_dims(1) * DH
    at += gl.arange(0, DH, gl.SliceLayout(0, copied)).expand_dims(0)
    q = gl.load(q_ptr + at, mask=(query < num_queries).expand_dims(1).broadcast_to([64, DH]), other=0.0)
    if SCALED:
        q = half(q.to(gl.float32))
    q_tile.store(q)
    if SCALED:
        hopper.fence_async_shared()
        thread_barrier()
        queries = q_tile
    else:
        queries = q_tile.load(gl.DotOperandLayout(0, layout, 2))

    row = PART * 64 + gl.arange(0, 64, by_row)
    query = row // GROUP
    here = query < num_queries
    position = first_position + gl.where(here, query, 0)
    largest = gl.full([64], float("-inf"), gl.float32, by_row)
    total = gl.zeros([64], gl.float32, by_row)
    unit = 0.0 if SCALED else 1.0
    acc = gl.zeros([64, DH], gl.float32, wide)
    num_full = gl.minimum((first_position + 1) // _KV_BLOCK, num_blocks - 1)  # that every row sees whole
    scores = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[_start_scores(queries, 0, shared, STAGES, layout)])
    if num_full > 0:  # weights of a block and scores of the next, while the last are added and the ones after scored
        coming = _start_scores(queries, 1, shared, STAGES, layout)
        largest, total, moved, unit, weights = _weights(
            scores, largest, total, unit, factor, 0, shared, SCALED, STAGES, wide
        )
        hopper.mbarrier.wait(v_full.index(0), 0)
        scores = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[coming])
        hopper.mbarrier.arrive(empty.index(0), count=1)
        state = scores, weights, acc, moved, largest, total, unit
        for pair in range(0, (num_full - 1) // 2):  # two blocks, whose scores take turns in the registers
            state = _step(state, queries, factor, 2 * pair, shared, SCALED, STAGES, layout, wide)
            state = _step(state, queries, factor, 2 * pair + 1, shared, SCALED, STAGES, layout, wide)
        if num_full % 2 == 0:
            state = _step(state, queries, factor, num_full - 2, shared, SCALED, STAGES, layout, wide)
        scores, weights, acc, moved, largest, total, unit = state
        acc = _start_sum(weights, acc, num_full - 1, shared, STAGES)
        acc = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[acc])

    unit = gl.zeros([64], gl.float32, by_row) + unit
    for block in range(num_full, num_blocks):
        stage, turn = _place(block, STAGES)
        hopper.mbarrier.wait(v_full.index(stage), turn)
        factors = _factors(factor, k_scales, stage, layout, SCALED)
        key = block * _KV_BLOCK + gl.arange(0, _KV_BLOCK, gl.SliceLayout(0, layout))
        visible = key.expand_dims(0) <= position.expand_dims(1)
        broken = _clean(
            v_tiles.index(stage), v_scales, stage, clean, first_position + num_queries - block * _KV_BLOCK,
            DH, SCALED, layout, copied,
        )  # fmt: skip
        largest, total, moved, p = _exponentials(gl.where(visible, scores * factors, float("-inf")), largest, total)
        if SCALED:
            v_scale = v_scales.index(stage).load(gl.SliceLayout(0, layout))
            seen = gl.where(visible, v_scale.expand_dims(0).broadcast_to([64, _KV_BLOCK]), 0.0)
            grown = gl.maximum(unit, gl.max(seen, 1))
            p = p * (seen * inverse_power(grown).expand_dims(1))
            moved *= unit * inverse_power(grown)
            unit = grown
        else:
            p = gl.where(visible & broken.expand_dims(0).broadcast_to([64, _KV_BLOCK]), float("nan"), p)
        weights = gl.convert_layout(p.to(k_tiles.dtype), gl.DotOperandLayout(0, wide, 2))
        moved = gl.convert_layout(moved, gl.SliceLayout(1, wide))
        acc = hopper.warpgroup_mma(weights, clean, acc * moved.expand_dims(1), is_async=True)
        acc = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[acc])
        hopper.mbarrier.arrive(empty.index(stage), count=1)
        if block + 1 < num_blocks:
            coming = _start_scores(queries, block + 1, shared, STAGES, layout)
            scores = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[coming])

    total *= _UNIT
    head = kv_head * GROUP + row % GROUP
    row_at = (first_query + query).to(gl.int64) * H + head
    gl.store(logsumexp_ptr + row_at, (largest + gl.log2(total)) * _LN_2, mask=here)
    result = acc * gl.convert_layout(unit / total, gl.SliceLayout(1, wide)).expand_dims(1)
    row_at = gl.convert_layout(row_at, gl.SliceLayout(1, wide)).expand_dims(1) * DH
    at = out_ptr + row_at + gl.arange(0, DH, gl.SliceLayout(0, wide)).expand_dims(0)
    mask = gl.convert_layout(here, gl.SliceLayout(1, wide)).expand_dims(1).broadcast_to([64, DH])
    gl.store(at, result.to(gl.bfloat16), mask=mask)


@gluon.jit
def _step(
    state, q, factor, block, shared, SCALED: gl.constexpr, STAGES: gl.constexpr, layout: gl.constexpr,
    wide: gl.constexpr,
):  # fmt: skip
    """The sum with a block's values and the scores of the block after next, while the next one's weights are found."""
    v_full, empty = shared[5], shared[6]
    scores, weights, acc, moved, largest, total, unit = state
    acc = _start_sum(weights, acc, block, shared, STAGES)
    coming = _start_scores(q, block + 2, shared, STAGES, layout)
    largest, total, moved, unit, weights = _weights(
        scores, largest, total, unit, factor, block + 1, shared, SCALED, STAGES, wide
    )
    stage, turn = _place(block + 1, STAGES)
    hopper.mbarrier.wait(v_full.index(stage), turn)  # here, lest weights be worked out after the products
    scores, acc, weights = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[coming, acc, weights])
    hopper.mbarrier.arrive(empty.index(stage), count=1)
    return scores, weights, acc * moved.expand_dims(1), moved, largest, total, unit


@gluon.jit
def _factors(factor, k_scales, stage, layout: gl.constexpr, SCALED: gl.constexpr):
    """What scores are multiplied by, [1, 64] or a number. With scales the factor is in them, which changes no bit."""
    if SCALED:
        return k_scales.index(stage).load(gl.SliceLayout(0, layout)).expand_dims(0)
    else:
        return factor


@gluon.jit
def _start_scores(q, block, shared, STAGES: gl.constexpr, layout: gl.constexpr):
    """Have the scores of a block run, q . K^T of 64 rows."""
    k_tiles, k_full = shared[0], shared[4]
    stage, turn = _place(block, STAGES)
    zeros = gl.zeros([64, _KV_BLOCK], gl.float32, layout)
    hopper.mbarrier.wait(k_full.index(stage), turn)
    return hopper.warpgroup_mma(q, k_tiles.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_sum(weights, acc, block, shared, STAGES: gl.constexpr):
    """Have the sum with a block's values run, which are there."""
    stage, turn = _place(block, STAGES)
    return hopper.warpgroup_mma(weights, shared[1].index(stage), acc, is_async=True)


@gluon.jit
def _weights(
    scores, largest, total, unit, factor, block, shared, SCALED: gl.constexpr, STAGES: gl.constexpr, wide: gl.constexpr
):
    """The weights of a block that every row sees whole, what they move the sum by, and the new state of the rows."""
    k_tiles, v_tiles, k_scales, v_scales, k_full, v_full, empty = shared
    layout: gl.constexpr = scores.type.layout
    stage, turn = _place(block, STAGES)
    factors = _factors(factor, k_scales, stage, layout, SCALED)
    largest, total, moved, p = _exponentials(scores * factors, largest, total)
    if SCALED:
        v_scale = v_scales.index(stage).load(gl.SliceLayout(0, layout))
        grown = gl.maximum(unit, gl.max(v_scale, 0))  # which drops NaN
        p = p * (v_scale * inverse_power(grown)).expand_dims(0)
        moved *= unit * inverse_power(grown)
        unit = grown
    weights = gl.convert_layout(p.to(k_tiles.dtype), gl.DotOperandLayout(0, wide, 2))
    return largest, total, gl.convert_layout(moved, gl.SliceLayout(1, wide)), unit, weights


@gluon.jit
def _exponentials(scores, largest, total):
    """The new largest score and sum of weights, by what the old sums move, and the weights."""
    now = larger(largest, gl.reduce(scores, 1, larger))
    moved = gl.exp2(largest - now)
    p = gl.exp2(scores - now.expand_dims(1))
    counted = (p + 1.0).to(gl.int32, bitcast=True) - _ONE_BITS
    return now, total * moved + gl.sum(counted, 1).to(gl.float32), moved, p


@gluon.jit
def _clean(
    v_tile, v_scales, stage, clean, num_inside, DH: gl.constexpr, SCALED: gl.constexpr, layout: gl.constexpr,
    copied: gl.constexpr,
):  # fmt: skip
    """Copy a block of values with zeros for those beyond the sequence and those not finite; [64] which these are."""
    rows: gl.constexpr = gl.SliceLayout(1, copied)
    v = v_tile.load(copied)
    if SCALED:
        v_scale = v_scales.index(stage).load(rows)
        broken = v_scale != v_scale
    else:
        broken = gl.max((v.to(gl.int16, bitcast=True) & 0x7FFF).to(gl.int32), 1) >= _INFINITY_BITS
    kept = (gl.arange(0, _KV_BLOCK, rows) < num_inside) & (broken == 0)
    clean.store(gl.where(kept.expand_dims(1).broadcast_to([_KV_BLOCK, DH]), v, gl.zeros_like(v)))
    hopper.fence_async_shared()
    thread_barrier()
    return gl.convert_layout(broken, gl.SliceLayout(0, layout))
