"""The Triton kernels of attention's backward pass over packed sequences: no atomics, the same bits every time.

    p = exp(scores - logsumexp)        delta = sum(d_out * out)        d_scores = p * (d_out . V^ - delta)
    dQ = softmax_scale * d_scores . K^     dK = softmax_scale * d_scores^T . Q     dV = p^T . d_out

One kernel adds up dQ along the keys, another dK and dV along the queries; both compute the scores anew. Operands are
BF16, sums FP32 (Dao 2023).
"""

from __future__ import annotations

from octavo.kernels.attention_kernels import KV_BLOCK, LOG2_E, load_rows, product
from octavo.kernels.e4m3 import round_bf16
from octavo.kernels.triton_shim import constexpr, tl, triton

_BLOCK = constexpr(KV_BLOCK)
_LOG2_E = constexpr(LOG2_E)


@triton.jit
def delta_kernel(out_ptr, d_out_ptr, delta_ptr, num_rows, R: tl.constexpr, DH: tl.constexpr, BLOCK_D: tl.constexpr):
    """sum(d_out * out) of each of R rows."""
    row = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    here = row < num_rows
    out = load_rows(out_ptr, row, here, DH, BLOCK_D, True).to(tl.float32)
    d_out = load_rows(d_out_ptr, row, here, DH, BLOCK_D, True).to(tl.float32)
    tl.store(delta_ptr + row, tl.sum(out * d_out, axis=1), mask=here)


@triton.jit
def grad_q_kernel(
    q_ptr, k_ptr, v_ptr, d_out_ptr, logsumexp_ptr, delta_ptr, grad_q_ptr, tiles_ptr, softmax_scale,
    H: tl.constexpr, HKV: tl.constexpr, DH: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dQ of a KV head and a tile of queries, as in `attention_kernel`."""
    GROUP: tl.constexpr = H // HKV
    kv_head = tl.program_id(0) % HKV
    tiles_ptr += tl.program_id(0) // HKV * 4
    first_query, num_queries, first_position = tl.load(tiles_ptr), tl.load(tiles_ptr + 1), tl.load(tiles_ptr + 2)
    row = tl.arange(0, ROWS)
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    here = query < num_queries
    position = first_position + tl.where(here, query, 0)
    at = (first_query + query).to(tl.int64) * H + head
    q = load_rows(q_ptr, at, here, DH, BLOCK_D, True)
    d_out = load_rows(d_out_ptr, at, here, DH, BLOCK_D, True)
    logsumexp = tl.load(logsumexp_ptr + at, mask=here, other=0.0) * _LOG2_E
    delta = tl.load(delta_ptr + at, mask=here, other=0.0)
    grad_q = tl.zeros([ROWS, BLOCK_D], tl.float32)
    origin = (first_query - first_position).to(tl.int64)
    num_keys = first_position + num_queries
    num_full = (first_position + 1) // _BLOCK
    for block in range(0, num_full):
        grad_q = _add_keys(
            grad_q, q, d_out, logsumexp, delta, position, block, num_keys, origin, kv_head, k_ptr, v_ptr,
            softmax_scale, HKV, DH, BLOCK_D, False,
        )  # fmt: skip
    for block in tl.range(num_full, tl.cdiv(num_keys, _BLOCK), num_stages=1):
        grad_q = _add_keys(
            grad_q, q, d_out, logsumexp, delta, position, block, num_keys, origin, kv_head, k_ptr, v_ptr,
            softmax_scale, HKV, DH, BLOCK_D, True,
        )  # fmt: skip
    _store_rows(grad_q_ptr, grad_q * softmax_scale, at, here, DH, BLOCK_D)


@triton.jit
def _add_keys(
    grad_q, q, d_out, logsumexp, delta, position, block, num_keys, origin, kv_head, k_ptr, v_ptr, softmax_scale,
    HKV: tl.constexpr, DH: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    key = block * _BLOCK + tl.arange(0, _BLOCK)
    at = (origin + key) * HKV + kv_head
    k = load_rows(k_ptr, at, key < num_keys, DH, BLOCK_D, MASKED)
    v = load_rows(v_ptr, at, key < num_keys, DH, BLOCK_D, MASKED)
    zeros = tl.zeros([q.shape[0], _BLOCK], tl.float32)
    p = tl.exp2(product(q, tl.trans(k), zeros) * (softmax_scale * _LOG2_E) - logsumexp[:, None])
    if MASKED:
        p = tl.where(key[None, :] <= position[:, None], p, 0.0)
    d_scores = p * (product(d_out, tl.trans(v), zeros) - delta[:, None])
    return product(round_bf16(d_scores).to(tl.bfloat16), k, grad_q)


@triton.jit
def grad_kv_kernel(
    q_ptr, k_ptr, v_ptr, d_out_ptr, logsumexp_ptr, delta_ptr, grad_k_ptr, grad_v_ptr, tiles_ptr, boundaries_ptr,
    softmax_scale, H: tl.constexpr, HKV: tl.constexpr, DH: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dK and dV of a KV head and a tile of 64 keys; a row is a query and one of the heads that share the KV head."""
    GROUP: tl.constexpr = H // HKV
    kv_head = tl.program_id(0) % HKV
    tiles_ptr += tl.program_id(0) // HKV * 4
    first_key, num_keys = tl.load(tiles_ptr), tl.load(tiles_ptr + 1)
    key = tl.arange(0, _BLOCK)
    here = key < num_keys
    at = (first_key + key).to(tl.int64) * HKV + kv_head
    k = load_rows(k_ptr, at, here, DH, BLOCK_D, True)
    v = load_rows(v_ptr, at, here, DH, BLOCK_D, True)
    grad_k = tl.zeros([_BLOCK, BLOCK_D], tl.float32)
    grad_v = tl.zeros([_BLOCK, BLOCK_D], tl.float32)
    num_rows = 0
    if num_keys > 0:
        num_rows = (tl.load(boundaries_ptr + tl.load(tiles_ptr + 3) + 1).to(tl.int32) - first_key) * GROUP
    for block in range(0, tl.cdiv(num_rows, _BLOCK)):
        row = block * _BLOCK + tl.arange(0, _BLOCK)
        query, inside = row // GROUP, row < num_rows
        row_at = (first_key + query).to(tl.int64) * H + kv_head * GROUP + row % GROUP
        q = load_rows(q_ptr, row_at, inside, DH, BLOCK_D, True)
        d_out = load_rows(d_out_ptr, row_at, inside, DH, BLOCK_D, True)
        logsumexp = tl.load(logsumexp_ptr + row_at, mask=inside, other=float("inf")) * _LOG2_E
        delta = tl.load(delta_ptr + row_at, mask=inside, other=0.0)
        zeros = tl.zeros([_BLOCK, _BLOCK], tl.float32)
        p = tl.exp2(product(k, tl.trans(q), zeros) * (softmax_scale * _LOG2_E) - logsumexp[None, :])
        p = tl.where(key[:, None] <= query[None, :], p, 0.0)
        grad_v = product(round_bf16(p).to(tl.bfloat16), d_out, grad_v)
        d_scores = p * (product(v, tl.trans(d_out), zeros) - delta[None, :])
        grad_k = product(round_bf16(d_scores).to(tl.bfloat16), q, grad_k)
    _store_rows(grad_k_ptr, grad_k * softmax_scale, at, here, DH, BLOCK_D)
    _store_rows(grad_v_ptr, grad_v, at, here, DH, BLOCK_D)


@triton.jit
def _store_rows(ptr, values, row, here, DH: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    tl.store(ptr + row[:, None] * DH + d[None, :], round_bf16(values), mask=here[:, None] & (d < DH)[None, :])
