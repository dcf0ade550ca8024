"""The Triton kernel of attention's forward pass: decode, prefill, a chunk of one, packed training.

A program serves the query heads of one KV head for some neighbouring queries of one sequence, a row for each pair. It
walks the keys in blocks of 64, in ascending order. Of a block, a row takes its largest score, which is exact; the sum
of its weights, which are whole numbers of 2**-23 and add exactly; and two products, each a chain over keys or widths in
the tensor cores. So a row's bits depend on its query and the keys it sees, not on the tile, its warps or its batch.

With FP8 keys and values, codes are multiplied in FP16, and may come as such: tiles of many queries would else convert
them again and again. A key's scale multiplies its scores. A value's scale multiplies its weight, relative to the
largest scale that the row has seen up to the end of the block: the weights stay at most 1, and the sum is moved by a
power of two when that largest scale grows, which changes no bit.
"""

from __future__ import annotations

from octavo.kernels.e4m3 import round_bf16
from octavo.kernels.triton_shim import INTERPRETED, constexpr, tl, triton

KV_BLOCK = 64
"""Keys between two moves of the running maximum: part of the definition of a row's bits."""
LOG2_E = 1.4426950408889634
_KV_BLOCK = constexpr(KV_BLOCK)
_LN_2 = constexpr(0.6931471805599453)
_FP16_MAX = constexpr(65504.0)
_ONE_BITS = constexpr(0x3F800000)
"""1.0 in FP32."""
_UNIT = constexpr(2.0**-23)
"""Of a row's sum: numbers in [1, 2] are multiples of it."""
_CURE = constexpr(INTERPRETED)
"""Triton's interpreter multiplies the raw bits of BF16, and sums in an order of its own for each tile height."""


@triton.jit(do_not_specialize=["stride_table", "num_slots"])
def attention_kernel(
    q_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr, out_ptr, logsumexp_ptr, tiles_ptr, table_ptr, factor, stride_table,
    num_slots, H: tl.constexpr, HKV: tl.constexpr, DH: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    PAGE: tl.constexpr, STARTS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    """One program for a KV head and a tile of queries.

    Args:
        tiles_ptr: [tiles, 4] int32: first packed query, queries, position of the first, sequence.
        table_ptr: [sequences, stride_table] pages; where PAGE is 0, [sequences] int64 of each one's first key among
            packed ones if STARTS, else unread, as keys lie beside their queries.
        factor: softmax_scale * log2(e).
        num_slots: where PAGE is 0, scales are [Hkv, num_slots]: a thread that needs many has one address to work out.
    """
    GROUP: tl.constexpr = H // HKV
    kv_head = tl.program_id(0) % HKV
    tiles_ptr += tl.program_id(0) // HKV * 4
    first_query, num_queries = tl.load(tiles_ptr), tl.load(tiles_ptr + 1)
    first_position, sequence = tl.load(tiles_ptr + 2), tl.load(tiles_ptr + 3)
    row, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    here = query < num_queries
    position = first_position + tl.where(here, query, 0)
    row_at = (first_query + query).to(tl.int64) * H + head
    at = row_at[:, None] * DH + d[None, :]
    inside = here[:, None] & (d < DH)[None, :]
    q = tl.load(q_ptr + at, mask=inside, other=0.0)
    if FP8:
        q = tl.clamp(q.to(tl.float32), -_FP16_MAX, _FP16_MAX, propagate_nan=tl.PropagateNan.ALL).to(tl.float16)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    unit = 0.0
    if STARTS:
        origin = tl.load(table_ptr + sequence)
    else:
        origin = (first_query - first_position).to(tl.int64)
    table_ptr += sequence.to(tl.int64) * stride_table
    if PAGE == 0:
        k_scale_ptr += kv_head.to(tl.int64) * num_slots + origin
        v_scale_ptr += kv_head.to(tl.int64) * num_slots + origin
    num_keys = first_position + num_queries
    num_full = (first_position + 1) // _KV_BLOCK  # blocks that every row sees whole
    for block in range(0, num_full):
        acc, total, largest, unit = _attend_block(
            q, acc, total, largest, unit, position, block, num_keys, origin, kv_head, k_ptr, v_ptr, k_scale_ptr,
            v_scale_ptr, table_ptr, factor, HKV, DH, BLOCK_D, PAGE, FP8, False,
        )  # fmt: skip
    unit = tl.zeros([ROWS], tl.float32) + unit
    for block in tl.range(num_full, tl.cdiv(num_keys, _KV_BLOCK), num_stages=1):
        acc, total, largest, unit = _attend_block(
            q, acc, total, largest, unit, position, block, num_keys, origin, kv_head, k_ptr, v_ptr, k_scale_ptr,
            v_scale_ptr, table_ptr, factor, HKV, DH, BLOCK_D, PAGE, FP8, True,
        )  # fmt: skip
    total *= _UNIT
    out = acc * ((unit if FP8 else 1.0) / total)[:, None]
    tl.store(out_ptr + at, round_bf16(out), mask=inside)
    tl.store(logsumexp_ptr + row_at, (largest + tl.log2(total)) * _LN_2, mask=here)


@triton.jit
def _attend_block(
    q, acc, total, largest, unit, position, block, num_keys, origin, kv_head, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
    table_ptr, factor, HKV: tl.constexpr, DH: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
    FP8: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add 64 keys to the rows' sums; MASKED where some row does not see all of them. The bits are the same either way.

    Args:
        acc, total, largest: sum of weight * value, of weights in 2**-23, and largest score in powers of two so far.
        unit: FP8: scale that acc is relative to; [ROWS] where MASKED, else the same for every row.
    """
    key = block * _KV_BLOCK + tl.arange(0, _KV_BLOCK)
    inside = key < num_keys
    if PAGE > 0:
        page = _load(table_ptr + key // PAGE, inside, 0, MASKED)
        slot = page.to(tl.int64) * PAGE + key % PAGE
    else:
        slot = origin + key
    k = load_rows(k_ptr, slot * HKV + kv_head, inside, DH, BLOCK_D, MASKED)
    if FP8:
        k = half(k)
        scale_at = key
        if PAGE > 0:
            scale_at = slot * HKV + kv_head
        factor *= _load(k_scale_ptr + scale_at, inside, 1.0, MASKED)[None, :]
    scores = product(q, tl.trans(k), tl.zeros([q.shape[0], _KV_BLOCK], tl.float32)) * factor
    visible = key[None, :] <= position[:, None]
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    now = tl.maximum(largest, row_max(scores), propagate_nan=tl.PropagateNan.ALL)
    moved = tl.exp2(largest - now)
    p = tl.exp2(scores - now[:, None])
    total = total * moved + tl.sum((p + 1.0).to(tl.int32, bitcast=True) - _ONE_BITS, axis=1).to(tl.float32)
    v = load_rows(v_ptr, slot * HKV + kv_head, inside, DH, BLOCK_D, MASKED)
    if FP8:
        v_scale = _load(v_scale_ptr + scale_at, inside, 0.0, MASKED)
        v, broken = half(v), v_scale != v_scale
        if MASKED:
            seen = tl.where(visible, v_scale[None, :], 0.0)
            grown = tl.maximum(unit, tl.max(seen, axis=1))  # which drops NaN
            weights = (p * (seen * inverse_power(grown)[:, None])).to(tl.float16)
        else:
            grown = tl.maximum(unit, tl.max(v_scale, axis=0))
            weights = (p * (v_scale * inverse_power(grown))[None, :]).to(tl.float16)
        moved *= unit * inverse_power(grown)
        unit = grown
    else:
        broken = key < 0
        if MASKED:
            broken = tl.max(v.to(tl.int16, bitcast=True) & 0x7FFF, axis=1) >= 0x7F80
            p = tl.where(visible & broken[None, :], float("nan"), p)
        weights = round_bf16(p).to(tl.bfloat16)
    if MASKED:  # a weight of 0 would not hide a value that is not finite from earlier queries
        v = tl.where(broken[:, None], 0.0, v)
    return product(weights, v, acc * moved[:, None]), total, now, unit


@triton.jit
def _load(ptr, inside, other, MASKED: tl.constexpr):
    """Those inside, if not all are."""
    if MASKED:
        return tl.load(ptr, mask=inside, other=other)
    else:
        return tl.load(ptr)


@triton.jit
def product(a, b, acc):
    """acc + a . b, summed in FP32 along ascending columns of a; the interpreter rounds the sum once."""
    if _CURE:
        return acc + tl.dot(a.to(tl.float32).to(tl.float64), b.to(tl.float32).to(tl.float64)).to(tl.float32)
    else:
        return tl.dot(a, b, acc)


@triton.jit
def half(codes):
    """E4M3 codes as FP16, if they are not yet.

    Not by `codes.to(tl.float16)`: Triton then knows that they were bytes, and has the products of small tiles take keys
    in another order than those of large ones.
    """
    if codes.dtype == tl.float16 or _CURE:
        return codes.to(tl.float16)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
            "cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }",
            "=r,=r,r",
            [codes],
            dtype=tl.float16,
            is_pure=False,
            pack=4,
        )


@triton.jit
def load_rows(ptr, row, inside, DH: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr):
    """Rows of a matrix of DH columns as [rows, BLOCK_D], zeros beyond it; MASKED where some are not inside."""
    d = tl.arange(0, BLOCK_D)
    at = ptr + row[:, None] * DH + d[None, :]
    if MASKED:
        return tl.load(at, mask=inside[:, None] & (d < DH)[None, :], other=0.0)
    elif DH < BLOCK_D:
        return tl.load(at, mask=(d < DH)[None, :], other=0.0)
    else:
        return tl.load(at)


@triton.jit
def row_max(scores):
    """Largest of each row, NaN where one is."""
    if _CURE:  # which takes a step of Python for each column otherwise
        return tl.max(scores, axis=1)
    else:
        return tl.reduce(scores, 1, larger)


@triton.jit
def larger(a, b):
    """The larger one, NaN where one is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def inverse_power(power_of_two):
    """1 / x of a power of two."""
    return (0x7F000000 - power_of_two.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
