"""The Gluon kernels of attention's backward pass on Hopper: no atomics, the same bits every time.

    p = exp2(scores * log2(e) - log2sum)      d_scores = p * (d_out . V^ - delta)
    dV = p^T . d_out     dK = softmax_scale * d_scores^T . Q     dQ = softmax_scale * d_scores . K^

A program adds up dK and dV of 128 keys along the queries of all heads that share them, and leaves d_scores in memory as
BF16; dQ is then a product of matrices, along the keys. Five products in all, where `kernels.backward_kernels` computes
the scores and d_out . V^ twice and needs seven. In the first kernel keys are the rows of the tensor cores' results, so
that p^T and d_scores^T come in the registers that the next product reads. Two groups of four warps have 64 keys each; a
warp brings what they read by TMA. The scores of the next queries are computed beside this one's dK and dV. Blocks of
which not every query sees every key come last.
"""

from __future__ import annotations

from octavo.kernels.attention_kernels import LOG2_E, load_rows
from octavo.kernels.triton_shim import (
    ampere,
    constexpr,
    copy_async,
    gl,
    gluon,
    hopper,
    thread_barrier,
    tl,
    tma_load,
    triton,
)

KEYS = 128
"""Of a tile, for both groups; and queries of a tile of dQ."""
ROWS = 64
"""Queries of a block of d_scores, which has KEYS keys and one head."""
_KEYS = constexpr(KEYS)
_HALF = constexpr(KEYS // 2)
_ROWS = constexpr(ROWS)
_LOG2_E = constexpr(LOG2_E)


@triton.jit(do_not_specialize=["T"])
def rows_kernel(
    out_ptr, d_out_ptr, logsumexp_ptr, delta_ptr, log2sum_ptr, T, R: tl.constexpr, H: tl.constexpr, DH: tl.constexpr
):
    """What each row of scores needs, [H, T]: sum(d_out * out), and the logsumexp in powers of two."""
    head = tl.program_id(0) % H
    token = tl.program_id(0) // H * R + tl.arange(0, R)
    here, row = token < T, token.to(tl.int64) * H + head
    out = load_rows(out_ptr, row, here, DH, DH, True).to(tl.float32)
    d_out = load_rows(d_out_ptr, row, here, DH, DH, True).to(tl.float32)
    at = head.to(tl.int64) * T + token
    tl.store(delta_ptr + at, tl.sum(out * d_out, axis=1), mask=here)
    tl.store(log2sum_ptr + at, tl.load(logsumexp_ptr + row, mask=here) * _LOG2_E, mask=here)


@gluon.jit(do_not_specialize=["first_head", "num_heads", "num_blocks", "T"])
def grad_kv_kernel(
    q_desc, d_out_desc, k_desc, v_desc, log2sum_ptr, delta_ptr, grad_k_ptr, grad_v_ptr, blocks_ptr, tiles_ptr,
    first_head, num_heads, num_blocks, T, softmax_scale, GROUP: gl.constexpr, HKV: gl.constexpr, DH: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program for a KV head and a tile of keys.

    Args:
        log2sum_ptr, delta_ptr: [H, T] of `rows_kernel`.
        blocks_ptr: [num_heads, num_blocks, KEYS, ROWS] bf16, gets d_scores^T; queries in the order of `_query`.
        tiles_ptr: of `GradientTiles`.
        first_head, num_heads: KV heads of this launch.
    """
    head = gl.program_id(0) % num_heads
    tiles_ptr += gl.program_id(0) // num_heads * 4
    first_key, num_queries = gl.load(tiles_ptr), gl.load(tiles_ptr + 1)
    position, block = gl.load(tiles_ptr + 2), gl.load(tiles_ptr + 3)
    block = _first_block(block, position, position + num_queries, GROUP)
    blocks_ptr += (head.to(gl.int64) * num_blocks + block) * (_KEYS * _ROWS)
    kv_head = first_head + head

    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, _HALF, DH], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, _HALF, DH], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _ROWS, DH], q_desc.layout)
    d_out_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _ROWS, DH], d_out_desc.layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    log2sums = gl.allocate_shared_memory(gl.float32, [STAGES, _ROWS], flat)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, _ROWS], flat)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], hopper.mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    hopper.mbarrier.init(kv_full, count=1)
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=1)
        hopper.mbarrier.init(empty.index(stage), count=2)
    # fmt: off
    pointers = grad_k_ptr, grad_v_ptr, blocks_ptr
    where = first_key, num_queries, kv_head, softmax_scale
    shared = k_tiles, v_tiles, q_tiles, d_out_tiles, log2sums, deltas, kv_full, full, empty
    gl.warp_specialize([
        (_add_queries, (pointers, where, shared, GROUP, HKV, DH, STAGES, 0)),
        (_add_queries, (pointers, where, shared, GROUP, HKV, DH, STAGES, 1)),
        (_fetch_queries, (q_desc, d_out_desc, k_desc, v_desc, log2sum_ptr, delta_ptr, where, shared, T, GROUP, DH,
                          STAGES)),
    ], [4, 1], [REGISTERS, 24])
    # fmt: on


@gluon.jit
def _first_block(blocks_before, position, length, GROUP: gl.constexpr):
    """Of the tile of keys from `position` on, in a sequence with so many blocks of each head in those before it."""
    tile = position // _KEYS
    return GROUP * (blocks_before + gl.cdiv(length, _ROWS) * tile - tile * (tile - 1))


@gluon.jit
def _num_full(num_queries):
    """Blocks of a tile of keys in which every query is there and sees every key."""
    return gl.maximum(num_queries // _ROWS - _KEYS // _ROWS, 0)


@gluon.jit
def _taken(step, num_queries, GROUP: gl.constexpr):
    """Head and block of queries that a tile of keys takes in this step: first, for all heads, those seen whole."""
    num_full = _num_full(num_queries)
    num_all = gl.cdiv(num_queries, _ROWS)
    if step < GROUP * num_full:
        group, tile = step // num_full, _KEYS // _ROWS + step % num_full
    else:
        step -= GROUP * num_full
        num_last = num_all - num_full
        group, tile = step // num_last, step % num_last
        tile = gl.where(tile < _KEYS // _ROWS, tile, num_all - 1)
    return group, tile


@gluon.jit
def _step(group, tile, num_queries, GROUP: gl.constexpr):
    """In which a tile of keys takes a block of queries of a head, if there is one."""
    num_full = _num_full(num_queries)
    num_last = gl.cdiv(num_queries, _ROWS) - num_full
    whole = (tile >= _KEYS // _ROWS) & (tile < num_queries // _ROWS)
    last = GROUP * num_full + group * num_last + gl.minimum(tile, _KEYS // _ROWS)
    return gl.where(whole, group * num_full + tile - _KEYS // _ROWS, last)


@gluon.jit
def _fetch_queries(
    q_desc, d_out_desc, k_desc, v_desc, log2sum_ptr, delta_ptr, where, shared, T, GROUP: gl.constexpr,
    DH: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: keys and values, then stages in order, each when both groups have done with what was there."""
    first_key, num_queries, kv_head, softmax_scale = where
    k_tiles, v_tiles, q_tiles, d_out_tiles, log2sums, deltas, kv_full, full, empty = shared
    two: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    num_all = gl.cdiv(num_queries, _ROWS)
    if num_all > 0:
        hopper.mbarrier.expect(kv_full, 4 * k_desc.block_type.nbytes)
        for part in gl.static_range(2):
            tma_load(k_desc, [first_key + part * _HALF, kv_head * DH], kv_full, k_tiles.index(part))
            tma_load(v_desc, [first_key + part * _HALF, kv_head * DH], kv_full, v_tiles.index(part))
    for step in range(0, GROUP * num_all):
        stage, turn = step % STAGES, step // STAGES & 1
        group, tile = _taken(step, num_queries, GROUP)
        query, head = first_key + tile * _ROWS, kv_head * GROUP + group
        hopper.mbarrier.wait(empty.index(stage), turn ^ 1)
        at = head.to(gl.int64) * T + gl.minimum(query + gl.arange(0, _ROWS, two), T - 1)
        copy_async(log2sums.index(stage), log2sum_ptr + at)
        copy_async(deltas.index(stage), delta_ptr + at)
        ampere.async_copy.mbarrier_arrive(full.index(stage))
        hopper.mbarrier.expect(full.index(stage), 2 * q_desc.block_type.nbytes)
        tma_load(q_desc, [query, head * DH], full.index(stage), q_tiles.index(stage))
        tma_load(d_out_desc, [query, head * DH], full.index(stage), d_out_tiles.index(stage))


@gluon.jit
def _add_queries(
    pointers, where, shared, GROUP: gl.constexpr, HKV: gl.constexpr, DH: gl.constexpr, STAGES: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """Four warps: 64 keys of the tile from start to end."""
    grad_k_ptr, grad_v_ptr, blocks_ptr = pointers
    first_key, num_queries, kv_head, softmax_scale = where
    k_tiles, v_tiles, q_tiles, d_out_tiles, log2sums, deltas, kv_full, full, empty = shared
    k_tile, v_tile = k_tiles.index(PART), v_tiles.index(PART)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, _ROWS, 16])
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, DH, 16])
    factor = softmax_scale * _LOG2_E
    num_all = GROUP * gl.cdiv(num_queries, _ROWS)
    num_full = GROUP * _num_full(num_queries)
    grad_k = gl.zeros([_HALF, DH], gl.float32, wide)
    grad_v = gl.zeros([_HALF, DH], gl.float32, wide)
    blocks_ptr += PART * (_HALF * _ROWS)
    scores = gl.zeros([_HALF, _ROWS], gl.float32, layout)
    if num_all > 0:
        hopper.mbarrier.wait(kv_full, 0)
        scores = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[_scores(k_tile, 0, shared, STAGES, layout)])
    for step in range(0, num_full):
        stage = step % STAGES
        weights, d_scores = _weights(scores, v_tile, stage, shared, factor, 0, 0, False)
        grad_k, grad_v = _add(weights, d_scores, grad_k, grad_v, stage, shared, wide)
        coming = _scores(k_tile, step + 1, shared, STAGES, layout)
        _keep(blocks_ptr, step, d_scores)
        scores, grad_k, grad_v = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[coming, grad_k, grad_v])
        hopper.mbarrier.arrive(empty.index(stage), count=1)
    for step in range(num_full, num_all):
        stage = step % STAGES
        group, tile = _taken(step, num_queries, GROUP)
        num_inside = num_queries - tile * _ROWS
        if num_inside < _ROWS:
            _clean(q_tiles.index(stage), num_inside, DH)
            _clean(d_out_tiles.index(stage), num_inside, DH)
            hopper.fence_async_shared()
            thread_barrier()
        behind = tile * _ROWS - PART * _HALF
        weights, d_scores = _weights(scores, v_tile, stage, shared, factor, behind, num_inside, True)
        grad_k, grad_v = _add(weights, d_scores, grad_k, grad_v, stage, shared, wide)
        _keep(blocks_ptr, step, d_scores)
        grad_k, grad_v = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[grad_k, grad_v])
        hopper.mbarrier.arrive(empty.index(stage), count=1)
        if step + 1 < num_all:
            coming = _scores(k_tile, step + 1, shared, STAGES, layout)
            scores = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[coming])

    key = PART * _HALF + gl.arange(0, _HALF, gl.SliceLayout(1, wide))
    at = ((first_key + key).to(gl.int64) * HKV + kv_head).expand_dims(1) * DH
    at += gl.arange(0, DH, gl.SliceLayout(0, wide)).expand_dims(0)
    here = (key < num_queries).expand_dims(1).broadcast_to([_HALF, DH])
    gl.store(grad_k_ptr + at, (grad_k * softmax_scale).to(gl.bfloat16), mask=here)
    gl.store(grad_v_ptr + at, grad_v.to(gl.bfloat16), mask=here)


@gluon.jit
def _product(tile, rows, layout: gl.constexpr):
    """64 keys or values . 64 rows^T, left to run."""
    zeros = gl.zeros([_HALF, _ROWS], gl.float32, layout)
    return hopper.warpgroup_mma(tile, rows.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _scores(k_tile, step, shared, STAGES: gl.constexpr, layout: gl.constexpr):
    """K^ . Q^T of a step, left to run."""
    k_tiles, v_tiles, q_tiles, d_out_tiles, log2sums, deltas, kv_full, full, empty = shared
    hopper.mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
    return _product(k_tile, q_tiles.index(step % STAGES), layout)


@gluon.jit
def _weights(scores, v_tile, stage, shared, factor, behind, num_inside, MASKED: gl.constexpr):
    """p^T and d_scores^T of a block, bf16; MASKED where not all of it is seen.

    Args:
        behind: by which the block's first query comes after the group's first key.
        num_inside: queries of the block that are this sequence's.
    """
    k_tiles, v_tiles, q_tiles, d_out_tiles, log2sums, deltas, kv_full, full, empty = shared
    layout: gl.constexpr = scores.type.layout
    coming = _product(v_tile, d_out_tiles.index(stage), layout)
    p = gl.exp2(scores * factor - log2sums.index(stage).load(gl.SliceLayout(0, layout)).expand_dims(0))
    if MASKED:
        key = gl.arange(0, _HALF, gl.SliceLayout(1, layout))
        query = gl.arange(0, _ROWS, gl.SliceLayout(0, layout))
        query = gl.where(query < num_inside, behind + query, -1)
        seen = key.expand_dims(1) <= query.expand_dims(0)
        p = gl.where(seen, p, 0.0)
    d_weights = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[coming])
    d_scores = p * (d_weights - deltas.index(stage).load(gl.SliceLayout(0, layout)).expand_dims(0))
    if MASKED:
        d_scores = gl.where(seen, d_scores, 0.0)
    return p.to(gl.bfloat16), d_scores.to(gl.bfloat16)


@gluon.jit
def _add(weights, d_scores, grad_k, grad_v, stage, shared, wide: gl.constexpr):
    """dK and dV with the share of a block, left to run."""
    k_tiles, v_tiles, q_tiles, d_out_tiles, log2sums, deltas, kv_full, full, empty = shared
    weights = gl.convert_layout(weights, gl.DotOperandLayout(0, wide, 2))
    d_scores = gl.convert_layout(d_scores, gl.DotOperandLayout(0, wide, 2))
    grad_v = hopper.warpgroup_mma(weights, d_out_tiles.index(stage), grad_v, is_async=True)
    return hopper.warpgroup_mma(d_scores, q_tiles.index(stage), grad_k, is_async=True), grad_v


@gluon.jit
def _keep(blocks_ptr, step, rounded):
    """Write d_scores^T of a block, the queries so ordered that those of a thread are neighbours."""
    parts = rounded.reshape([_HALF, 2, 4, 4, 2]).permute([0, 1, 3, 2, 4])
    together: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 32], [8, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [],
        [_HALF, _ROWS],
    )  # fmt: skip
    block = gl.convert_layout(parts.reshape([_HALF, _ROWS]), together)
    key = gl.arange(0, _HALF, gl.SliceLayout(1, together)).expand_dims(1)
    column = gl.arange(0, _ROWS, gl.SliceLayout(0, together)).expand_dims(0)
    gl.store(blocks_ptr + step.to(gl.int64) * (_KEYS * _ROWS) + (key * _ROWS + column), block)


@gluon.jit
def _query(column):
    """Of a column that `_keep` wrote."""
    return (column & 33) + ((column >> 3) & 3) * 2 + ((column >> 1) & 3) * 8


@gluon.jit
def _clean(tile, num_inside, DH: gl.constexpr):
    """Zeros for rows of another sequence, as 0 * NaN is no 0. Both groups write the same and need not take turns."""
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DH, DH // 8], [4, 1], [1, 0])
    rows = tile.load(copied)
    kept = gl.arange(0, tile.shape[0], gl.SliceLayout(1, copied)) < num_inside
    tile.store(gl.where(kept.expand_dims(1).broadcast_to(tile.shape), rows, gl.zeros_like(rows)))


@gluon.jit(do_not_specialize=["first_head", "num_heads", "num_blocks"])
def grad_q_kernel(
    blocks_desc, k_desc, grad_q_ptr, tiles_ptr, first_head, num_heads, num_blocks, softmax_scale, GROUP: gl.constexpr,
    HKV: gl.constexpr, DH: gl.constexpr, HEADS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program for KEYS queries of one query head or two: d_scores . K^ from what `grad_kv_kernel` left."""
    programs = num_heads * (GROUP // HEADS)
    head = gl.program_id(0) % programs * HEADS
    tiles_ptr += gl.program_id(0) // programs * 4
    first_query, num_queries = gl.load(tiles_ptr), gl.load(tiles_ptr + 1)
    position, blocks_before = gl.load(tiles_ptr + 2), gl.load(tiles_ptr + 3)
    num_steps = gl.cdiv(position + gl.minimum(num_queries, _KEYS), _HALF)  # no tile without queries has a position
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [STAGES, _HALF, DH], k_desc.layout)
    blocks = gl.allocate_shared_memory(gl.bfloat16, [STAGES * HEADS * 2, _HALF, _ROWS], blocks_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=1)
        hopper.mbarrier.init(empty.index(stage), count=2)
    # fmt: off
    where = first_query, num_queries, position, first_head * GROUP + head, num_steps
    before = head // GROUP * num_blocks, blocks_before
    shared = k_tiles, blocks, full, empty
    gl.warp_specialize([
        (_add_keys, (grad_q_ptr, where, shared, softmax_scale, HKV * GROUP, DH, HEADS, STAGES, 0)),
        (_add_keys, (grad_q_ptr, where, shared, softmax_scale, HKV * GROUP, DH, HEADS, STAGES, 1)),
        (_fetch_blocks, (blocks_desc, k_desc, where, before, shared, GROUP, DH, HEADS, STAGES)),
    ], [4, 1], [REGISTERS, 24])
    # fmt: on


@gluon.jit
def _fetch_blocks(
    blocks_desc, k_desc, where, before, shared, GROUP: gl.constexpr, DH: gl.constexpr, HEADS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """One warp: stages in order, each when both groups have done with what was there."""
    first_query, num_queries, position, head, num_steps = where
    head_blocks, blocks_before = before
    k_tiles, blocks, full, empty = shared
    nbytes: gl.constexpr = k_desc.block_type.nbytes + 2 * HEADS * blocks_desc.block_type.nbytes
    for step in range(0, num_steps):
        stage, turn = step % STAGES, step // STAGES & 1
        first_key = step // 2 * _KEYS
        half, behind = step % 2 * _HALF, position - first_key
        block = head_blocks + _first_block(blocks_before, first_key, position + num_queries, GROUP)
        hopper.mbarrier.wait(empty.index(stage), turn ^ 1)
        hopper.mbarrier.expect(full.index(stage), nbytes)
        tma_load(k_desc, [first_query - behind + half, head // GROUP * DH], full.index(stage), k_tiles.index(stage))
        for part in gl.static_range(2 * HEADS):
            taken = _step(head % GROUP + part // 2, behind // _ROWS + part % 2, behind + num_queries, GROUP)
            place = blocks.index(stage * (2 * HEADS) + part)
            tma_load(blocks_desc, [(block + taken) * _KEYS + half, 0], full.index(stage), place)


@gluon.jit
def _add_keys(
    grad_q_ptr, where, shared, softmax_scale, H: gl.constexpr, DH: gl.constexpr, HEADS: gl.constexpr,
    STAGES: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Four warps: 64 of the queries from start to end."""
    first_query, num_queries, position, head, num_steps = where
    k_tiles, blocks, full, empty = shared
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, DH, 16])
    grad_q = gl.zeros([_ROWS, DH], gl.float32, wide)
    other = gl.zeros([_ROWS, DH], gl.float32, wide)
    for step in range(0, num_steps):
        stage, turn = step % STAGES, step // STAGES & 1
        hopper.mbarrier.wait(full.index(stage), turn)
        k_tile, part = k_tiles.index(stage), stage * (2 * HEADS) + PART
        num_inside = position + num_queries - step * _HALF
        if num_inside < _HALF:
            _clean(k_tile, num_inside, DH)
            hopper.fence_async_shared()
            thread_barrier()
        grad_q = hopper.warpgroup_mma(blocks.index(part).permute((1, 0)), k_tile, grad_q, is_async=True)
        if HEADS == 2:
            other = hopper.warpgroup_mma(blocks.index(part + 2).permute((1, 0)), k_tile, other, is_async=True)
            grad_q, other = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[grad_q, other])
        else:
            grad_q = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[grad_q])
        hopper.mbarrier.arrive(empty.index(stage), count=1)
    query = PART * _ROWS + _query(gl.arange(0, _ROWS, gl.SliceLayout(1, wide)))
    at = ((first_query + query).to(gl.int64) * H + head).expand_dims(1) * DH
    at += gl.arange(0, DH, gl.SliceLayout(0, wide)).expand_dims(0)
    here = (query < num_queries).expand_dims(1).broadcast_to([_ROWS, DH])
    gl.store(grad_q_ptr + at, (grad_q * softmax_scale).to(gl.bfloat16), mask=here)
    if HEADS == 2:
        gl.store(grad_q_ptr + at + DH, (other * softmax_scale).to(gl.bfloat16), mask=here)
