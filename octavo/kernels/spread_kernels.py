"""Two kernels of `kernels.spread_attention` in Gluon, with the bits of those there in Triton.

Scores of E4M3 keys, which are read from shared memory once, as in `kernels.decode_attention`; and the sum. Whatever a
block needs is copied several blocks ahead, few numbers too, which Triton reads when it needs them, and the pages of the
next blocks: a load into registers would come back no earlier than the copies that were started before it.
"""

from __future__ import annotations

from octavo.kernels.attention_kernels import KV_BLOCK
from octavo.kernels.decode_attention import key_operand, page_of, slots_of, value_operands
from octavo.kernels.gluon_numbers import half, larger
from octavo.kernels.triton_shim import ampere, constexpr, copy_async, gdc, gl, gluon, thread_barrier

_KV_BLOCK, _KEYS, _ROWS = constexpr(KV_BLOCK), constexpr(2 * KV_BLOCK), constexpr(16)
_LN_2 = constexpr(0.6931471805599453)
_UNIT = constexpr(2.0**-23)


@gluon.jit(do_not_specialize=["stride_table", "num_blocks"])
def scores_kernel(
    q_ptr, k_ptr, k_scale_ptr, v_scale_ptr, scores_ptr, largest_ptr, unit_ptr, tiles_ptr, table_ptr, stride_table,
    num_blocks, factor, H: gl.constexpr, HKV: gl.constexpr, DH: gl.constexpr, PAGE: gl.constexpr,
    STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Scores of some blocks of E4M3 keys, their largest, and the largest scale of their values, by one warp."""
    GROUP: gl.constexpr = H // HKV
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    by_key: gl.constexpr = gl.SliceLayout(0, mma)
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    CHUNKS: gl.constexpr = DH // 16  # of 16 bytes in a key
    copied: gl.constexpr = gl.BlockedLayout([1, 16], [32 // CHUNKS, CHUNKS], [1, 1], [1, 0])
    copied_rows: gl.constexpr = gl.SliceLayout(1, copied)
    scales: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    kv_head = gl.program_id(0) % HKV
    tiles_ptr += gl.program_id(0) // HKV * 4
    query, position, sequence = gl.load(tiles_ptr), gl.load(tiles_ptr + 2), gl.load(tiles_ptr + 3)
    table_ptr += sequence.to(gl.int64) * stride_table
    blocks = position // _KV_BLOCK + 1
    share = gl.cdiv(blocks, gl.num_programs(1))
    first = gl.minimum(gl.program_id(1) * share, blocks)
    last = gl.minimum(first + share, blocks)
    head = query.to(gl.int64) * H + kv_head * GROUP
    if (
        EARLY
    ):  # `early_launch.begin`; the kernel ahead waited for tiles and page tables, and they are written once a step
        gdc.gdc_wait()
        gdc.gdc_launch_dependents()

    row = gl.arange(0, _ROWS, gl.SliceLayout(1, left))
    place = gl.arange(0, DH, gl.SliceLayout(0, left))
    width = place // 16 * 16 + place // 2 % 4 * 4 + place // 8 % 2 * 2 + place % 2  # as K's codes come
    at = (head + row).expand_dims(1) * DH + width.expand_dims(0)
    mask = (row < GROUP).expand_dims(1) & (width < DH).expand_dims(0)
    q = half(gl.load(q_ptr + at, mask=mask, other=0.0).to(gl.float32))

    k_tiles = gl.allocate_shared_memory(
        gl.float8e4nv, [STAGES, _KV_BLOCK, DH], gl.SwizzledSharedLayout(16, 8 // CHUNKS, CHUNKS, [1, 0])
    )
    k_scales = gl.allocate_shared_memory(gl.float32, [STAGES, _KV_BLOCK], flat)
    v_scales = gl.allocate_shared_memory(gl.float32, [STAGES, _KV_BLOCK], flat)
    pages = gl.allocate_shared_memory(table_ptr.dtype.element_ty, [STAGES, _KV_BLOCK], flat)
    k_ptr += kv_head * DH + gl.arange(0, DH, gl.SliceLayout(0, copied)).expand_dims(0)
    k_scale_ptr += kv_head
    v_scale_ptr += kv_head
    for stage in gl.static_range(STAGES - 1):
        rows = slots_of(
            gl.load(table_ptr + page_of(first + stage, position, PAGE, copied_rows)), first + stage, position, PAGE
        )
        few = slots_of(
            gl.load(table_ptr + page_of(first + stage, position, PAGE, scales)), first + stage, position, PAGE
        )
        if first + stage < last:
            _copy_keys(k_ptr, k_scale_ptr, v_scale_ptr, rows, few, stage, k_tiles, k_scales, v_scales, HKV, DH)
        after = stage + STAGES - 1
        copy_async(pages.index(after % STAGES), table_ptr + page_of(first + after, position, PAGE, scales))
        ampere.async_copy.commit_group()
    row, key = gl.arange(0, _ROWS, by_row), gl.arange(0, _KV_BLOCK, by_key)
    scores_ptr += ((head + row) * (num_blocks * _KV_BLOCK)).expand_dims(1) + key.expand_dims(0)
    largest_ptr += (head + row) * num_blocks
    unit_ptr += (query.to(gl.int64) * HKV + kv_head) * num_blocks
    here = (row < GROUP).expand_dims(1).broadcast_to([_ROWS, _KV_BLOCK])
    for block in range(first, last):
        ampere.async_copy.wait_group(STAGES - 2)
        thread_barrier()
        ahead, now = block + STAGES - 1, (block - first) % STAGES
        free = (ahead - first) % STAGES
        if ahead < last:
            rows = slots_of(pages.index(free).load(copied_rows), ahead, position, PAGE)
            few = slots_of(pages.index(free).load(scales), ahead, position, PAGE)
            _copy_keys(k_ptr, k_scale_ptr, v_scale_ptr, rows, few, free, k_tiles, k_scales, v_scales, HKV, DH)
            then = ahead + STAGES - 1
            copy_async(pages.index((then - first) % STAGES), table_ptr + page_of(then, position, PAGE, scales))
        ampere.async_copy.commit_group()
        k = key_operand(k_tiles.index(now), DH, mma)
        key_factor = factor * k_scales.index(now).load(by_key)
        scores = ampere.mma_v2(q, k, gl.zeros([_ROWS, _KV_BLOCK], gl.float32, mma)) * key_factor.expand_dims(0)
        visible = block * _KV_BLOCK + key <= position
        scores = gl.where(visible.expand_dims(0), scores, float("-inf"))
        gl.store(scores_ptr + block * _KV_BLOCK, scores, mask=here)
        gl.store(largest_ptr + block, gl.reduce(scores, 1, larger), mask=row < GROUP)
        gl.store(unit_ptr + block, gl.max(v_scales.index(now).load(scales), 0))  # drops NaN
    ampere.async_copy.wait_group(0)  # pages of blocks that did not come


@gluon.jit
def _copy_keys(
    k_ptr, k_scale_ptr, v_scale_ptr, rows, few, stage, k_tiles, k_scales, v_scales, HKV: gl.constexpr, DH: gl.constexpr
):
    """Start the copies of a block of keys, their scales and their values' scales."""
    copy_async(k_tiles.index(stage), k_ptr + rows.to(gl.int64).expand_dims(1) * (HKV * DH))
    copy_async(k_scales.index(stage), k_scale_ptr + few.to(gl.int64) * HKV)
    copy_async(v_scales.index(stage), v_scale_ptr + few.to(gl.int64) * HKV)


@gluon.jit(do_not_specialize=["stride_table", "num_blocks"])
def values_kernel(
    v_ptr, weights_ptr, largest_ptr, moves_ptr, unit_ptr, tiles_ptr, table_ptr, stride_table, num_blocks, out_ptr,
    logsumexp_ptr, H: gl.constexpr, HKV: gl.constexpr, DH: gl.constexpr, WIDTH: gl.constexpr, PAGE: gl.constexpr,
    FP8: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """WIDTH widths of the sum of a KV head and a query. Warps share widths."""
    GROUP: gl.constexpr = H // HKV
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], warps_per_cta=[1, WARPS], instr_shape=[16, 8])
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    VECTOR: gl.constexpr = 128 // v_ptr.dtype.element_ty.primitive_bitwidth  # numbers in 16 bytes
    CHUNKS: gl.constexpr = WIDTH // VECTOR  # of 16 bytes in a key
    phases: gl.constexpr = 8 // CHUNKS  # keys of 128 bytes
    copied: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // CHUNKS, CHUNKS], [WARPS, 1], [1, 0])
    by_key: gl.constexpr = gl.SliceLayout(1, copied)
    copied_pages: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    copied_weights: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    copied_moves: gl.constexpr = gl.BlockedLayout([1, 4], [16, 2], [WARPS, 1], [1, 0])

    kv_head = gl.program_id(0) % HKV
    tiles_ptr += gl.program_id(0) // HKV * 4
    query, position, sequence = gl.load(tiles_ptr), gl.load(tiles_ptr + 2), gl.load(tiles_ptr + 3)
    table_ptr += sequence.to(gl.int64) * stride_table
    first_width = gl.program_id(1) * WIDTH
    head = query.to(gl.int64) * H + kv_head * GROUP
    blocks = position // _KV_BLOCK + 1
    pairs = gl.cdiv(blocks, 2)

    v_tiles = gl.allocate_shared_memory(
        v_ptr.dtype.element_ty, [STAGES, _KEYS, WIDTH], gl.SwizzledSharedLayout(VECTOR, phases, CHUNKS, [1, 0])
    )
    w_tiles = gl.allocate_shared_memory(
        weights_ptr.dtype.element_ty, [STAGES, _ROWS, _KEYS], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    )
    pages = gl.allocate_shared_memory(
        table_ptr.dtype.element_ty, [STAGES, _KEYS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    moves = gl.allocate_shared_memory(gl.float32, [STAGES, _ROWS, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    v_ptr += kv_head * DH + first_width + gl.arange(0, WIDTH, gl.SliceLayout(0, copied)).expand_dims(0)
    row = gl.minimum(gl.arange(0, _ROWS, gl.SliceLayout(1, copied_weights)), GROUP - 1)  # more are not kept
    key = gl.arange(0, _KEYS, gl.SliceLayout(0, copied_weights))
    weights_ptr += ((head + row) * (num_blocks * _KV_BLOCK)).expand_dims(1) + key.expand_dims(0)
    row = gl.minimum(gl.arange(0, _ROWS, gl.SliceLayout(1, copied_moves)), GROUP - 1)
    number = gl.arange(0, 8, gl.SliceLayout(0, copied_moves))
    moves_ptr += ((head + row) * (num_blocks * 4)).expand_dims(1) + number.expand_dims(0)

    for stage in gl.static_range(STAGES - 1):
        slots = slots_of(gl.load(table_ptr + page_of(stage, position, PAGE, by_key, _KEYS)), stage, position, PAGE)
        if stage < pairs:
            copy_async(v_tiles.index(stage), v_ptr + slots.to(gl.int64).expand_dims(1) * (HKV * DH))
        after = stage + STAGES - 1
        copy_async(pages.index(after % STAGES), table_ptr + page_of(after, position, PAGE, copied_pages, _KEYS))
    if EARLY:  # `early_launch.begin`; the kernel ahead waited for tiles, pages and values
        gdc.gdc_wait()
        gdc.gdc_launch_dependents()
    for stage in gl.static_range(STAGES - 1):
        if stage < pairs:
            _copy_weights(weights_ptr, moves_ptr, stage, stage, w_tiles, moves)
        ampere.async_copy.commit_group()
    total = gl.zeros([_ROWS, 1], gl.float32, mma)
    even = gl.zeros([_ROWS, WIDTH // 2 if FP8 else WIDTH], gl.float32, mma)  # FP8: even widths, else all
    odd = gl.zeros_like(even)
    for pair in range(0, pairs):
        ampere.async_copy.wait_group(STAGES - 2)
        thread_barrier()
        ahead, now = pair + STAGES - 1, pair % STAGES
        if ahead < pairs:
            slots = slots_of(pages.index(ahead % STAGES).load(by_key), ahead, position, PAGE)
            copy_async(v_tiles.index(ahead % STAGES), v_ptr + slots.to(gl.int64).expand_dims(1) * (HKV * DH))
            _copy_weights(weights_ptr, moves_ptr, ahead, ahead % STAGES, w_tiles, moves)
            after = ahead + STAGES - 1
            copy_async(pages.index(after % STAGES), table_ptr + page_of(after, position, PAGE, copied_pages, _KEYS))
        ampere.async_copy.commit_group()
        first = _operands(v_tiles.index(now), w_tiles.index(now), moves.index(now), 0, WIDTH, VECTOR, mma, FP8)
        if 2 * pair + 1 < blocks:
            second = _operands(v_tiles.index(now), w_tiles.index(now), moves.index(now), 1, WIDTH, VECTOR, mma, FP8)
            total, even, odd = _add(first, total, even, odd, FP8)
            total, even, odd = _add(second, total, even, odd, FP8)
        else:
            total, even, odd = _add(first, total, even, odd, FP8)
    ampere.async_copy.wait_group(0)  # pages of blocks that did not come

    total = gl.sum(total, 1) * _UNIT
    row = gl.arange(0, _ROWS, by_row)
    here = row < GROUP
    unit = gl.load(unit_ptr + (query.to(gl.int64) * HKV + kv_head) * num_blocks + blocks - 1) if FP8 else 1.0
    scale = (unit / total).expand_dims(1)
    width = gl.arange(0, WIDTH // 2 if FP8 else WIDTH, gl.SliceLayout(0, mma))
    mask = here.expand_dims(1) & (width < WIDTH).expand_dims(0)
    out_ptr += (head + row).expand_dims(1) * DH + first_width
    if FP8:
        gl.store(out_ptr + 2 * width.expand_dims(0), (even * scale).to(gl.bfloat16), mask=mask)
        gl.store(out_ptr + 2 * width.expand_dims(0) + 1, (odd * scale).to(gl.bfloat16), mask=mask)
    else:
        gl.store(out_ptr + width.expand_dims(0), (even * scale).to(gl.bfloat16), mask=mask)
    if gl.program_id(1) == 0:
        largest = gl.load(largest_ptr + (head + row) * num_blocks + blocks - 1, mask=here, other=0.0)
        gl.store(logsumexp_ptr + head + row, (largest + gl.log2(total)) * _LN_2, mask=here)


@gluon.jit
def _copy_weights(weights_ptr, moves_ptr, pair, stage, w_tiles, moves):
    """Start the copies of two blocks' weights and of what these move the sums by."""
    copy_async(w_tiles.index(stage), weights_ptr + pair * _KEYS)
    copy_async(moves.index(stage), moves_ptr + pair * 8)


@gluon.jit
def _operands(
    v, weights, numbers, BLOCK: gl.constexpr, WIDTH: gl.constexpr, VECTOR: gl.constexpr, mma: gl.constexpr,
    FP8: gl.constexpr,
):  # fmt: skip
    """Of one of the two blocks: its weights, its values, which FP8 are of even and of odd widths, and what it moves."""
    left = weights.slice(BLOCK * _KV_BLOCK, _KV_BLOCK, 1).load(gl.DotOperandLayout(0, mma, 2))
    v = v.slice(BLOCK * _KV_BLOCK, _KV_BLOCK, 0)
    if FP8:
        codes: gl.constexpr = gl.SwizzledSharedLayout(8, 8 * VECTOR // WIDTH, WIDTH // VECTOR, [1, 0])
        v_even, v_odd = value_operands(v, WIDTH, mma, codes)
    else:
        v_even = v.load(gl.DotOperandLayout(1, mma, 2))
        v_odd = v_even
    moved, shifted = numbers.slice(4 * BLOCK, 1, 1).load(mma), numbers.slice(4 * BLOCK + 1, 1, 1).load(mma)
    return left, v_even, v_odd, moved, shifted, numbers.slice(4 * BLOCK + 2, 1, 1).load(mma)


@gluon.jit
def _add(operands, total, even, odd, FP8: gl.constexpr):
    """Add a block to the sums."""
    left, v_even, v_odd, moved, shifted, counted = operands
    even = ampere.mma_v2(left, v_even, even * shifted)
    if FP8:
        odd = ampere.mma_v2(left, v_odd, odd * shifted)
    return total * moved + counted, even, odd
