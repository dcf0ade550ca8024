"""The last kernel of `kernels.spread_attention` in Gluon, with the bits of the one there in Triton.

A block's values, weights and what it moves the sums by are copied several blocks ahead, those few numbers too, which
Triton reads when it needs them: a sum waits for nothing but the product before it.
"""

from __future__ import annotations

from octavo.kernels.attention_kernels import KV_BLOCK
from octavo.kernels.decode_attention import slots_of, value_operands
from octavo.kernels.triton_shim import ampere, constexpr, copy_async, gdc, gl, gluon, thread_barrier

_KV_BLOCK, _ROWS = constexpr(KV_BLOCK), constexpr(16)
_LN_2 = constexpr(0.6931471805599453)
_UNIT = constexpr(2.0**-23)


@gluon.jit(do_not_specialize=["stride_table", "num_blocks"])
def values_kernel(
    v_ptr, weights_ptr, largest_ptr, moved_ptr, shifted_ptr, counted_ptr, unit_ptr, tiles_ptr, table_ptr, stride_table,
    num_blocks, out_ptr, logsumexp_ptr, H: gl.constexpr, HKV: gl.constexpr, DH: gl.constexpr, WIDTH: gl.constexpr,
    PAGE: gl.constexpr, FP8: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """WIDTH widths of the sum of a KV head and a query, by one warp."""
    GROUP: gl.constexpr = H // HKV
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], warps_per_cta=[1, 1], instr_shape=[16, 8])
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    VECTOR: gl.constexpr = 128 // v_ptr.dtype.element_ty.primitive_bitwidth  # numbers in 16 bytes
    CHUNKS: gl.constexpr = WIDTH // VECTOR  # of 16 bytes in a key
    phases: gl.constexpr = 8 // CHUNKS  # keys of 128 bytes
    copied: gl.constexpr = gl.BlockedLayout([1, VECTOR], [32 // CHUNKS, CHUNKS], [1, 1], [1, 0])
    copied_weights: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    copied_numbers: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    in_shared: gl.constexpr = gl.SwizzledSharedLayout(VECTOR, phases, CHUNKS, [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    if EARLY:  # `early_launch.begin`
        gdc.gdc_wait()
        gdc.gdc_launch_dependents()
    kv_head = gl.program_id(0) % HKV
    tiles_ptr += gl.program_id(0) // HKV * 4
    query, position, sequence = gl.load(tiles_ptr), gl.load(tiles_ptr + 2), gl.load(tiles_ptr + 3)
    table_ptr += sequence.to(gl.int64) * stride_table
    first_width = gl.program_id(1) * WIDTH
    head = query.to(gl.int64) * H + kv_head * GROUP
    blocks = position // _KV_BLOCK + 1

    v_tiles = gl.allocate_shared_memory(v_ptr.dtype.element_ty, [STAGES, _KV_BLOCK, WIDTH], in_shared)
    w_tiles = gl.allocate_shared_memory(
        weights_ptr.dtype.element_ty, [STAGES, _ROWS, _KV_BLOCK], gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    )
    numbers = gl.allocate_shared_memory(gl.float32, [3 * STAGES, _ROWS], flat)
    v_ptr += kv_head * DH + first_width + gl.arange(0, WIDTH, gl.SliceLayout(0, copied)).expand_dims(0)
    row = gl.minimum(gl.arange(0, _ROWS, gl.SliceLayout(1, copied_weights)), GROUP - 1)  # more are not kept
    key = gl.arange(0, _KV_BLOCK, gl.SliceLayout(0, copied_weights))
    weights_ptr += ((head + row) * (num_blocks * _KV_BLOCK)).expand_dims(1) + key.expand_dims(0)
    of_row = (head + gl.minimum(gl.arange(0, _ROWS, copied_numbers), GROUP - 1)) * num_blocks
    moved_ptr, shifted_ptr, counted_ptr = moved_ptr + of_row, shifted_ptr + of_row, counted_ptr + of_row

    slots = slots_of(table_ptr, 0, position, PAGE, gl.SliceLayout(1, copied))
    for stage in gl.static_range(STAGES - 1):
        if stage < blocks:
            _copy(v_ptr, weights_ptr, moved_ptr, shifted_ptr, counted_ptr, slots, stage, stage, v_tiles, w_tiles,
                  numbers, HKV, DH)  # fmt: skip
        ampere.async_copy.commit_group()
        slots = slots_of(table_ptr, stage + 1, position, PAGE, gl.SliceLayout(1, copied))
    total = gl.zeros([_ROWS], gl.float32, by_row)
    even = gl.zeros([_ROWS, WIDTH // 2 if FP8 else WIDTH], gl.float32, mma)  # FP8: even widths, else all
    odd = gl.zeros_like(even)
    for block in range(0, blocks):
        ampere.async_copy.wait_group(STAGES - 2)
        thread_barrier()
        ahead = block + STAGES - 1
        if ahead < blocks:
            _copy(v_ptr, weights_ptr, moved_ptr, shifted_ptr, counted_ptr, slots, ahead, ahead % STAGES, v_tiles,
                  w_tiles, numbers, HKV, DH)  # fmt: skip
        ampere.async_copy.commit_group()
        slots = slots_of(table_ptr, ahead + 1, position, PAGE, gl.SliceLayout(1, copied))
        now_at = block % STAGES
        weights = w_tiles.index(now_at).load(left)
        total = total * numbers.index(3 * now_at).load(by_row) + numbers.index(3 * now_at + 2).load(by_row)
        shifted = numbers.index(3 * now_at + 1).load(by_row).expand_dims(1)
        if FP8:
            pairs: gl.constexpr = gl.SwizzledSharedLayout(8, phases, CHUNKS, [1, 0])
            v_even, v_odd = value_operands(v_tiles.index(now_at), WIDTH, mma, pairs)
            even = ampere.mma_v2(weights, v_even, even * shifted)
            odd = ampere.mma_v2(weights, v_odd, odd * shifted)
        else:
            even = ampere.mma_v2(weights, v_tiles.index(now_at).load(gl.DotOperandLayout(1, mma, 2)), even * shifted)

    total *= _UNIT
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
def _copy(
    v_ptr, weights_ptr, moved_ptr, shifted_ptr, counted_ptr, slots, block, stage, v_tiles, w_tiles, numbers,
    HKV: gl.constexpr, DH: gl.constexpr,
):  # fmt: skip
    """Start the copies of a block."""
    copy_async(v_tiles.index(stage), v_ptr + slots.to(gl.int64).expand_dims(1) * (HKV * DH))
    copy_async(w_tiles.index(stage), weights_ptr + block * _KV_BLOCK)
    copy_async(numbers.index(3 * stage), moved_ptr + block)
    copy_async(numbers.index(3 * stage + 1), shifted_ptr + block)
    copy_async(numbers.index(3 * stage + 2), counted_ptr + block)
