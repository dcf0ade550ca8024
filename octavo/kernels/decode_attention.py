"""Decode attention over FP8 pages near the memory's speed: the bits of `kernels.attention_kernels`, in Gluon.

Triton brings E4M3 codes to the tensor cores by way of FP16 in shared memory, six times the traffic of the codes, and
that is what its kernel waits for. Here codes are read from shared memory once, straight into a product's operand:

    K   a thread gets four neighbouring widths of a key. Of 16 widths a product takes 4t, 4t+1 and 4t+2, 4t+3 where its
        thread t wants 2t, 2t+1 and 2t+8, 2t+9: queries are loaded in that order, too.
    V   codes are taken in pairs of widths, which are transposed as 16-bit numbers are; a byte permutation makes pairs
        of keys of them, for two sums: of even widths and of odd ones.

So each product adds the same 16 numbers as in a tile of any other height, in blocks of ascending order. The warps of a
program, which serves the query heads of one KV head of a sequence, share the keys of a block in its scores and the
widths in its sum; the next block is copied while they multiply. So are the pages of the block after it: a load of them
into registers would come back no earlier than the copies that were started before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.attention_kernels import KV_BLOCK
from octavo.kernels.cast_outputs import BLOCK, UNPADDED, outputs
from octavo.kernels.early_launch import early_launch
from octavo.kernels.gluon_numbers import cast_pairs, half, inverse_power, larger
from octavo.kernels.triton_shim import (
    HAS_REINTERPRET,
    ampere,
    constexpr,
    copy_async,
    gdc,
    gl,
    gluon,
    thread_barrier,
)
from octavo.numerics.fp8 import BLOCK_1X128, ScaleRounding

WIDTHS = (64, 128)
"""Head widths that the kernel takes."""
ROWS = 16
STAGES = 2
"""Blocks of keys in shared memory; with more, fewer programs share a multiprocessor."""
WARPS = 4
"""Of a program: most for a few long sequences."""
_KV_BLOCK = constexpr(KV_BLOCK)
_ROWS = constexpr(ROWS)
_LN_2 = constexpr(0.6931471805599453)
_ONE_BITS = constexpr(0x3F800000)
_UNIT = constexpr(2.0**-23)


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    tiles: Tensor,
    factor: float,
    page_table: Tensor,
    page_size: int,
    rounding: ScaleRounding | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one query of each sequence over its pages.

    Args:
        q: [T, H, Dh] bf16, contiguous; H / Hkv at most 16, Dh in WIDTHS.
        k, v: [slots, Hkv, Dh] e4m3, contiguous.
        k_scale, v_scale: [slots, Hkv] fp32 powers of two.
        tiles: [T, 4] int32 as `attention_kernel` takes them, a query each.
        factor: softmax_scale * log2(e).
        page_table: [N, pages] int, pages of each sequence in order.
        page_size: tokens in a page.
        rounding: of scales, to have the result cast by blocks of 1x128; for Dh = 128, where such a block is a head.

    Returns:
        [T, H, Dh] bf16, and the logsumexp of each row of scores, [T, H] fp32; or the cast of the former, q [T, H * Dh]
        e4m3 and scale [T, H] fp32.
    """
    (T, H, Dh), Hkv = q.shape, k.shape[1]
    if rounding is None:
        out, second = torch.empty_like(q), torch.empty(T, H, device=q.device)
    else:
        assert Dh == BLOCK, f"a block of 128 is no head of {Dh}"
        out, second = outputs("decode_attention", torch.Size((T, H * Dh)), BLOCK_1X128, q.device, UNPADDED, None)
    decode_attention_kernel[(Hkv * len(tiles),)](
        q,
        k,
        v,
        k_scale,
        v_scale,
        out if rounding is None else out.view(torch.int16),
        second,
        tiles,
        page_table,
        factor,
        page_table.stride(0),
        out.stride(0) // 2,
        second.stride(1),
        H=H,
        HKV=Hkv,
        DH=Dh,
        PAGE=page_size,
        STAGES=STAGES,
        WARPS=WARPS,
        CAST=rounding is not None,
        POWER_OF_TWO=rounding == "power_of_two",
        num_warps=WARPS,
        enable_fp_fusion=False,
        **early_launch(q),
    )
    return out, second


@gluon.jit(do_not_specialize=["stride_table", "stride_out", "stride_scale"])
def decode_attention_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, out_ptr, second_ptr, tiles_ptr, table_ptr, factor, stride_table,
    stride_out, stride_scale, H: gl.constexpr, HKV: gl.constexpr, DH: gl.constexpr, PAGE: gl.constexpr,
    STAGES: gl.constexpr, WARPS: gl.constexpr, CAST: gl.constexpr, POWER_OF_TWO: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """A KV head and a query; arguments as of `attention_kernel`. Warps share keys, and then widths."""
    GROUP: gl.constexpr = H // HKV
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], warps_per_cta=[1, WARPS], instr_shape=[16, 8])
    by_row: gl.constexpr = gl.SliceLayout(1, mma)
    by_key: gl.constexpr = gl.SliceLayout(0, mma)
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    CHUNKS: gl.constexpr = DH // 16  # of 16 bytes in a key
    copied: gl.constexpr = gl.BlockedLayout([1, 16], [32 // CHUNKS, CHUNKS], [WARPS, 1], [1, 0])
    copied_rows: gl.constexpr = gl.SliceLayout(1, copied)
    scales: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    in_each_warp: gl.constexpr = gl.BlockedLayout([_KV_BLOCK // 32], [32], [WARPS], [0])
    phases: gl.constexpr = 8 // CHUNKS  # keys of 128 bytes
    codes: gl.constexpr = gl.SwizzledSharedLayout(16, phases, CHUNKS, [1, 0])
    pairs: gl.constexpr = gl.SwizzledSharedLayout(8, phases, CHUNKS, [1, 0])
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])

    if EARLY:  # `early_launch.begin`
        gdc.gdc_wait()
        gdc.gdc_launch_dependents()
    kv_head = gl.program_id(0) % HKV
    tiles_ptr += gl.program_id(0) // HKV * 4
    first_query, position, sequence = gl.load(tiles_ptr), gl.load(tiles_ptr + 2), gl.load(tiles_ptr + 3)
    table_ptr += sequence.to(gl.int64) * stride_table
    k_ptr += kv_head * DH
    v_ptr += kv_head * DH
    k_scale_ptr += kv_head
    v_scale_ptr += kv_head
    num_blocks = position // _KV_BLOCK + 1

    row = gl.arange(0, _ROWS, gl.SliceLayout(1, left))
    place = gl.arange(0, DH, gl.SliceLayout(0, left))
    width = place // 16 * 16 + place // 2 % 4 * 4 + place // 8 % 2 * 2 + place % 2  # as K's codes come
    at = (first_query.to(gl.int64) * H + kv_head * GROUP + row).expand_dims(1) * DH + width.expand_dims(0)
    q = half(
        gl.load(q_ptr + at, mask=(row < GROUP).expand_dims(1) & (width < DH).expand_dims(0), other=0.0).to(gl.float32)
    )

    k_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, _KV_BLOCK, DH], codes)
    v_tiles = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, _KV_BLOCK, DH], codes)
    k_scales = gl.allocate_shared_memory(gl.float32, [STAGES, _KV_BLOCK], flat)
    v_scales = gl.allocate_shared_memory(gl.float32, [STAGES, _KV_BLOCK], flat)
    # What warps tell each other of a block: largest score and sum of each row, and the weights.
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    maxima = gl.allocate_shared_memory(gl.float32, [_ROWS, WARPS], plain)
    sums = gl.allocate_shared_memory(gl.int32, [_ROWS, WARPS], plain)
    shares = gl.allocate_shared_memory(gl.float16, [_ROWS, _KV_BLOCK], gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
    pages = gl.allocate_shared_memory(table_ptr.dtype.element_ty, [STAGES, _KV_BLOCK], flat)
    column = gl.arange(0, DH, gl.SliceLayout(0, copied)).expand_dims(0)

    for stage in gl.static_range(STAGES - 1):
        rows = slots_of(gl.load(table_ptr + page_of(stage, position, PAGE, copied_rows)), stage, position, PAGE)
        few = slots_of(gl.load(table_ptr + page_of(stage, position, PAGE, scales)), stage, position, PAGE)
        if stage < num_blocks:
            _copy(k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, rows, few, column, k_tiles, v_tiles, k_scales,
                  v_scales, stage, HKV, DH)  # fmt: skip
        after = stage + STAGES - 1
        copy_async(pages.index(after % STAGES), table_ptr + page_of(after, position, PAGE, scales))
        ampere.async_copy.commit_group()

    USED: gl.constexpr = 8 if GROUP <= 8 else _ROWS
    largest = gl.full([_ROWS], float("-inf"), gl.float32, by_row)
    total = gl.zeros([_ROWS], gl.float32, by_row)
    even = gl.zeros([_ROWS, DH // 2], gl.float32, mma)
    odd = gl.zeros([_ROWS, DH // 2], gl.float32, mma)
    unit = 0.0
    for block in range(0, num_blocks):
        ampere.async_copy.wait_group(STAGES - 2)
        thread_barrier()
        ahead = block + STAGES - 1
        if ahead < num_blocks:
            rows = slots_of(pages.index(ahead % STAGES).load(copied_rows), ahead, position, PAGE)
            few = slots_of(pages.index(ahead % STAGES).load(scales), ahead, position, PAGE)
            _copy(k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, rows, few, column, k_tiles, v_tiles, k_scales,
                  v_scales, ahead % STAGES, HKV, DH)  # fmt: skip
            after = ahead + STAGES - 1
            copy_async(pages.index(after % STAGES), table_ptr + page_of(after, position, PAGE, scales))
        ampere.async_copy.commit_group()

        now_at = block % STAGES
        k = key_operand(k_tiles.index(now_at), DH, mma)
        key_factor = factor * k_scales.index(now_at).load(by_key)
        scores = ampere.mma_v2(q, k, gl.zeros([_ROWS, _KV_BLOCK], gl.float32, mma)) * key_factor.expand_dims(0)
        visible = block * _KV_BLOCK + gl.arange(0, _KV_BLOCK, by_key) <= position
        scores = gl.where(visible.expand_dims(0), scores, float("-inf"))
        apart = gl.reduce(gl.reduce(_by_warp(scores, WARPS), 1, larger), 2, larger)
        maxima.store(_first_rows(apart, USED))
        thread_barrier()
        now = larger(largest, gl.reduce(_first_rows(maxima.load(mma), USED), 1, larger))
        moved = gl.exp2(largest - now)
        largest = now
        p = _first_rows(gl.exp2(scores - now.expand_dims(1)), USED)
        counted = (p + 1.0).to(gl.int32, bitcast=True) - _ONE_BITS
        sums.store(_first_rows(gl.sum(gl.sum(_by_warp(counted, WARPS), 1), 2), USED))

        # Beyond the last key is its own scale again.
        grown = gl.maximum(unit, gl.max(v_scales.index(now_at).load(in_each_warp), 0))  # which drops NaN
        v_scale = gl.where(visible, v_scales.index(now_at).load(by_key), 0.0)
        shares.store((p * (v_scale * inverse_power(grown)).expand_dims(0)).to(gl.float16))
        shift = unit * inverse_power(grown)
        unit = grown
        v_even, v_odd = value_operands(v_tiles.index(now_at), DH, mma, pairs)
        thread_barrier()
        total = total * moved + gl.sum(_first_rows(sums.load(mma), USED), 1).to(gl.float32)
        moved *= shift
        weights = shares.load(left)
        even = ampere.mma_v2(weights, v_even, even * moved.expand_dims(1))
        odd = ampere.mma_v2(weights, v_odd, odd * moved.expand_dims(1))

    total *= _UNIT
    scale = (unit / total).expand_dims(1)
    row = gl.arange(0, _ROWS, by_row)
    here = row < GROUP
    even, odd = (even * scale).to(gl.bfloat16), (odd * scale).to(gl.bfloat16)
    head = kv_head * GROUP + row
    pair = gl.arange(0, DH // 2, gl.SliceLayout(0, mma))
    mask = here.expand_dims(1) & (pair < DH // 2).expand_dims(0)
    if CAST:
        codes, cast_scale = cast_pairs(even.to(gl.float32), odd.to(gl.float32), DH, POWER_OF_TWO)
        at = out_ptr + first_query.to(gl.int64) * stride_out
        gl.store(at + (head * (DH // 2)).expand_dims(1) + pair.expand_dims(0), codes, mask=mask)
        gl.store(second_ptr + head * stride_scale + first_query, cast_scale, mask=here)
    else:
        row_at = first_query.to(gl.int64) * H + head
        at = out_ptr + row_at.expand_dims(1) * DH + 2 * pair.expand_dims(0)
        gl.store(at, even, mask=mask)
        gl.store(at + 1, odd, mask=mask)
        gl.store(second_ptr + row_at, (largest + gl.log2(total)) * _LN_2, mask=here)


@gluon.jit
def _by_warp(x, WARPS: gl.constexpr):
    """[16, 64] of a product as [16, n, warps, 8]: who holds what."""
    return gl.reshape(x, (_ROWS, _KV_BLOCK // (8 * WARPS), WARPS, 8))


@gluon.jit
def _first_rows(x, USED: gl.constexpr):
    """x of the first rows and 0 of the others: where those are half of what a thread holds, no one works them out."""
    row = gl.arange(0, _ROWS, gl.SliceLayout(1, x.type.layout))
    return gl.where((row < USED).expand_dims(1), x, gl.zeros_like(x))


@gluon.jit
def _keys(block, position, KEYS: gl.constexpr, layout: gl.constexpr):
    """Keys of a block; beyond the last key that one again, whose weight there is 0."""
    key = (block * KEYS + gl.arange(0, KEYS, layout)).to(gl.uint32)  # whose division is a shift
    return gl.minimum(key, position.to(gl.uint32))


@gluon.jit
def page_of(block, position, PAGE: gl.constexpr, layout: gl.constexpr, KEYS: gl.constexpr = _KV_BLOCK):
    """Entry in the table of the page of each of a block's keys."""
    return _keys(block, position, KEYS, layout) // PAGE


@gluon.jit
def slots_of(page, block, position, PAGE: gl.constexpr):
    """Slots of a block's keys in their pages, below 2^31."""
    KEYS: gl.constexpr = page.shape[0]
    layout: gl.constexpr = page.type.layout
    key = _keys(block, position, KEYS, layout)
    return page.to(gl.int32) * PAGE + (key % PAGE).to(gl.int32)


@gluon.jit
def _copy(
    k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, rows, few, column, k_tiles, v_tiles, k_scales, v_scales, stage,
    HKV: gl.constexpr, DH: gl.constexpr,
):  # fmt: skip
    """Start the copies of a block of keys and values and their scales."""
    at = rows.to(gl.int64).expand_dims(1) * (HKV * DH)
    copy_async(k_tiles.index(stage), k_ptr + column + at)
    copy_async(v_tiles.index(stage), v_ptr + column + at)
    copy_async(k_scales.index(stage), k_scale_ptr + few.to(gl.int64) * HKV)
    copy_async(v_scales.index(stage), v_scale_ptr + few.to(gl.int64) * HKV)


@gluon.jit
def key_operand(tile, DH: gl.constexpr, mma: gl.constexpr):
    """K^T [DH, 64] in FP16, its widths in the order that queries are loaded in; no number changes its thread."""
    codes = tile.permute((1, 0)).load(gl.DotOperandLayout(1, mma, 4))
    half = gl.reshape(codes.to(gl.float16), (DH // 16, 4, 2, 2, _KV_BLOCK))
    half = gl.reshape(gl.permute(half, (0, 2, 1, 3, 4)), (DH, _KV_BLOCK))
    return gl.convert_layout(half, gl.DotOperandLayout(1, mma, 2), assert_trivial=True)


@gluon.jit
def value_operands(tile, DH: gl.constexpr, mma: gl.constexpr, pairs: gl.constexpr):
    """V [64, DH / 2] in FP16 of the even widths and of the odd ones."""
    if HAS_REINTERPRET:
        words = tile.reinterpret(gl.int16, [_KV_BLOCK, DH // 2], pairs)
    else:
        words = tile._reinterpret(gl.int16, [_KV_BLOCK, DH // 2], pairs)
    return gl.inline_asm_elementwise(
        "{ .reg .b32 bytes; .reg .b16 low, high; prmt.b32 bytes, $2, $2, 0x3120; mov.b32 {low, high}, bytes; "
        "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
        "=r,=r,r",
        [words.load(gl.DotOperandLayout(1, mma, 2))],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=2,
    )
