"""Causal grouped-query attention over quantised keys and values, the same numbers in decode and in training.

Every query, its own token included, sees K^ and V^: in FP8, E4M3 codes times one power-of-two scale per token and KV
head, so K^ and V^ are exact in BF16. A packed training batch and a page table of the engine are gathered into the same
padded layout, and one function, `attend`, computes both.

    scores = q . K^ * softmax_scale        summed exactly, rounded to FP32
    p = exp(scores - largest score)        FP32; the denominator sums exactly
    out = sum_j p_j V^_j / sum_j p_j       p rounded to BF16 (FP16 with FP8 KV, as the GPU does); keys in blocks of 64

The backward runs on K^ and V^ and passes the gradient straight through the quantiser to K and V.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.numerics.exact import power_of_two, product_bits, to_grid, unit_sum
from octavo.numerics.fp8 import PER_ROW, quantize
from octavo.numerics.recipe import StorageFormat

KV_BLOCK = 64
MAX_SCORES_PER_CHUNK = 2**24
FP16_MAX = 65504.0


@dataclass(frozen=True, eq=False)
class StoredKV:
    """Keys or values as a cache holds them."""

    values: Tensor
    """[..., Hkv, Dh], e4m3 or the high-precision dtype."""
    scale: Tensor | None
    """[..., Hkv] fp32 power of two per token and head; None where values are not FP8."""

    def decode(self) -> Tensor:
        """K^ or V^, [..., Hkv, Dh]: exact in BF16 for E4M3, unchanged otherwise."""
        if self.scale is None:
            return self.values
        return (self.values.float() * self.scale[..., None]).bfloat16()


def store_kv(x: Tensor, kv_format: StorageFormat) -> StoredKV:
    """Quantise new keys or values, [T, Hkv, Dh], as the cache stores them."""
    if kv_format != "fp8":
        return StoredKV(x, None)
    q, scale = quantize(x.reshape(-1, x.shape[-1]), PER_ROW, "power_of_two")
    return StoredKV(q.view(x.shape), scale.view(x.shape[:-1]))


def attend(
    q: Tensor, k: Tensor, v: Tensor, query_positions: Tensor, softmax_scale: float, p_dtype: torch.dtype
) -> Tensor:
    """Attention of each sequence's queries over its own keys 0 .. query position.

    Args:
        q: [N, R, H, Dh] bf16 or fp32, R queries of N sequences; rows beyond a sequence's queries are ignored.
        k, v: [N, S, Hkv, Dh], K^ and V^ by position; what lies beyond a query's position does not matter.
        query_positions: [N, R] int64, position of each query in its sequence.
        softmax_scale: multiplies the scores.
        p_dtype: that p is rounded to before it multiplies V^.

    Returns:
        [N, R, H, Dh], dtype of q.
    """
    N, R, H, Dh = q.shape
    S, Hkv = k.shape[1], k.shape[2]
    out_dtype = q.dtype
    visible = torch.arange(S, device=q.device) <= query_positions[..., None]  # [N, R, S]
    broken = ~torch.isfinite(v).all(dim=-1)  # [N, S, Hkv]; p = 0 does not hide a NaN: the scores carry it instead
    v = v.masked_fill(broken[..., None], 0.0)
    if p_dtype == torch.float16:
        q = q.float().clamp(-FP16_MAX, FP16_MAX).half()  # in BF16 the bound itself would round up to 65536
    bits = product_bits(Dh)
    q_grid = _heads_first(to_grid(q, bits), Hkv)  # [N, Hkv, R * group, Dh]
    k_grid = to_grid(k, bits).permute(0, 2, 3, 1)  # [N, Hkv, Dh, S]
    scores = (q_grid @ k_grid).float().view(N, Hkv, R, H // Hkv, S) * softmax_scale
    scores = scores.masked_fill(broken.transpose(1, 2)[:, :, None, None], torch.nan)
    scores = scores.masked_fill(~visible[:, None, :, None], -torch.inf)
    p = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
    out = _weighted_values(p.to(p_dtype).view(N, Hkv, -1, S), v)
    out = out.view(N, Hkv, R, H // Hkv, Dh) / unit_sum(p)[..., None]
    return out.permute(0, 2, 1, 3, 4).reshape(N, R, H, Dh).float().to(out_dtype)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, softmax_scale: float, kv_format: StorageFormat
) -> Tensor:
    """Causal attention within each sequence of a packed batch; differentiable in q, k and v.

    Args:
        q: [T, H, Dh]; k, v: [T, Hkv, Dh], bf16 or fp32, before they are stored.
        cu_seqlens: [N + 1] int64 sequence boundaries, from 0 to T.
        softmax_scale: multiplies the scores.
        kv_format: of the keys and values that the queries see.

    Returns:
        [T, H, Dh], dtype of q.
    """
    return _PackedAttention.apply(q, k, v, cu_seqlens, softmax_scale, kv_format)


def probability_dtype(kv_format: StorageFormat) -> torch.dtype:
    """What q and p are multiplied in: FP16 beside E4M3 (one instruction converts it), else the cache's own dtype."""
    return {"fp8": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[kv_format]


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, softmax_scale: float, kv_format: StorageFormat
    ) -> Tensor:
        k_hat, v_hat = store_kv(k, kv_format).decode(), store_kv(v, kv_format).decode()
        out = torch.empty_like(q)
        for index, inside in _chunks(cu_seqlens, q.shape[1]):
            positions = torch.arange(index.shape[1], device=q.device).expand(index.shape)
            padded = attend(
                q[index], k_hat[index], v_hat[index], positions, softmax_scale, probability_dtype(kv_format)
            )
            out[index[inside]] = padded[inside]
        ctx.save_for_backward(q, k_hat, v_hat, out, cu_seqlens)
        ctx.softmax_scale = softmax_scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        q, k, v, out, cu_seqlens = ctx.saved_tensors
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        for index, inside in _chunks(cu_seqlens, q.shape[1]):
            d_out = torch.where(inside[..., None, None], grads[0][index], 0.0)
            padded = _attention_backward(q[index], k[index], v[index], out[index], d_out, ctx.softmax_scale)
            for grad, piece in zip((grad_q, grad_k, grad_v), padded, strict=True):
                grad[index[inside]] = piece[inside].to(grad.dtype)
        return grad_q, grad_k, grad_v, None, None, None


def _attention_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, d_out: Tensor, softmax_scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of causal attention over padded sequences, in FP32 (Dao et al. 2022, section B.4).

    Args:
        q, out, d_out: [N, L, H, Dh]; k, v: [N, L, Hkv, Dh]. d_out is 0 in padding rows.
    """
    N, L, H, Dh = q.shape
    Hkv = k.shape[2]
    q, out, d_out = (_heads_first(x.float(), Hkv) for x in (q, out, d_out))  # [N, Hkv, L * group, Dh]
    k, v = k.float().transpose(1, 2), v.float().transpose(1, 2)  # [N, Hkv, L, Dh]
    scores = (q @ k.mT).view(N, Hkv, L, -1, L) * softmax_scale
    future = torch.ones(L, L, dtype=torch.bool, device=q.device).triu(1)
    p = torch.softmax(scores.masked_fill(future[:, None, :], -torch.inf), dim=-1).view(N, Hkv, -1, L)
    d_scores = p * (d_out @ v.mT - (d_out * out).sum(dim=-1, keepdim=True)) * softmax_scale
    grad_q = (d_scores @ k).view(N, Hkv, L, H // Hkv, Dh).permute(0, 2, 1, 3, 4).reshape(N, L, H, Dh)
    grad_k, grad_v = d_scores.mT @ q, p.mT @ d_out
    return grad_q, grad_k.transpose(1, 2), grad_v.transpose(1, 2)


def _weighted_values(p: Tensor, v: Tensor) -> Tensor:
    """p [N, Hkv, rows, S] @ V^ [N, S, Hkv, Dh] -> [N, Hkv, rows, Dh] float64, exact within blocks of 64 keys.

    Each V^ row is moved to its own grid and its power of two to p, so that the grids of a row of p depend on the keys
    it sees and on nothing else: a later key in the same block cannot change an earlier query's bits.
    """
    bits = product_bits(KV_BLOCK)
    v = v.double().transpose(1, 2)  # [N, Hkv, S, Dh]
    exponent = torch.frexp(v.abs().amax(dim=-1)).exponent  # [N, Hkv, S]
    p = p.double() * power_of_two(exponent)[:, :, None, :]
    v = to_grid(v * power_of_two(-exponent)[..., None], bits)
    out = p.new_zeros(*p.shape[:3], v.shape[-1])
    for start in range(0, v.shape[2], KV_BLOCK):
        keys = slice(start, start + KV_BLOCK)
        out += to_grid(p[..., keys], bits) @ v[:, :, keys]
    return out


def _heads_first(x: Tensor, num_kv_heads: int) -> Tensor:
    """[N, R, H, Dh] -> [N, Hkv, R * group, Dh]: the queries that share a KV head side by side."""
    N, R, H, Dh = x.shape
    return x.view(N, R, num_kv_heads, H // num_kv_heads, Dh).transpose(1, 2).reshape(N, num_kv_heads, -1, Dh)


def _chunks(cu_seqlens: Tensor, num_heads: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Sequences of a packed batch in padded groups of bounded size.

    Yields:
        index [n, L] int64, packed position of each padded slot (clamped to the sequence), and inside [n, L] bool.
    """
    starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    sizes = lengths.tolist()
    first = 0
    while first < len(sizes):
        longest, stop = sizes[first], first + 1
        while stop < len(sizes):
            grown = max(longest, sizes[stop])
            if (stop + 1 - first) * num_heads * grown * grown > MAX_SCORES_PER_CHUNK:
                break
            longest, stop = grown, stop + 1
        slots = torch.arange(longest, device=cu_seqlens.device)
        inside = slots < lengths[first:stop, None]
        index = starts[first:stop, None] + torch.minimum(slots, lengths[first:stop, None] - 1)
        if longest > 0:
            yield index, inside
        first = stop
