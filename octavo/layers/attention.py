"""Where a forward pass keeps its keys and values: a packed training batch here, the paged cache in the engine."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.kernels.attention import packed_attention
from octavo.kernels.attention_backward import BackwardName, attention_backward
from octavo.kernels.cast_outputs import Cast
from octavo.kernels.heads import HeadTransform, empty_kv, heads_backward, transformed, write_heads
from octavo.kernels.triton_attention import PackedTiles, attention_forward, has_kernel, packed_tiles
from octavo.numerics.fp8 import ScaleRounding
from octavo.numerics.recipe import StorageFormat


class AttentionContext(Protocol):
    """What the decoder asks of its caller in each layer."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, transform: HeadTransform, softmax_scale: float
    ) -> Tensor:
        """q [T, H, Dh], new k and v [T, Hkv, Dh] as projected, transform of q and k -> [T, H, Dh]."""
        ...

    def attend_cast(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        transform: HeadTransform,
        softmax_scale: float,
        rounding: ScaleRounding,
    ) -> Cast | None:
        """As `attend`, cast by blocks of 1x128: q [T, H * Dh] e4m3, scale [T, H * Dh / 128] fp32.

        Or None, and nothing is done.
        """
        ...


@dataclass(frozen=True, eq=False)
class PackedAttention:
    """Sequences laid end to end, each attending to itself. Differentiable; keeps no keys between layers."""

    cu_seqlens: Tensor
    """[N + 1] int64 boundaries, from 0 to T."""
    kv_format: StorageFormat
    """Of the keys and values that the queries see."""
    backward: BackwardName | None = None
    """Who computes the gradient on a GPU; None for the faster of our own."""
    _tiles: dict[tuple[int, int, int], PackedTiles] = field(default_factory=dict, repr=False)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, transform: HeadTransform, softmax_scale: float
    ) -> Tensor:
        if has_kernel(q):
            return _PackedKernels.apply(q, k, v, transform.q_gain, transform.k_gain, transform, self, softmax_scale)
        q, k = transformed(q, k, transform, self.kv_format)
        return packed_attention(q, k, v, self.cu_seqlens, softmax_scale, self.kv_format)

    def attend_cast(self, *arguments: Any) -> None:
        """None: its kernels cast nothing."""

    def tiles(self, q: Tensor, k: Tensor) -> PackedTiles:
        """What the kernels' programs take; made once for all layers."""
        key = len(q), q.shape[1] // k.shape[1], q.shape[2]
        if key not in self._tiles:
            self._tiles[key] = packed_tiles(self.cu_seqlens, *key)
        return self._tiles[key]


class _PackedKernels(torch.autograd.Function):
    """The kernels of a packed batch. Keeps what was projected; the backward pass transforms and stores it again."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_gain: Tensor | None,
        k_gain: Tensor | None,
        transform: HeadTransform,
        context: PackedAttention,
        softmax_scale: float,
    ) -> Tensor:
        keys, values = (empty_kv(k.shape, context.kv_format, k.device, torch.float16) for _ in "kv")
        turned, _ = write_heads(q, k, v, transform, keys, values, None)
        tiles = context.tiles(q, k).forward
        out, logsumexp = attention_forward(
            turned, keys.values, values.values, keys.scale, values.scale, tiles, softmax_scale
        )
        ctx.save_for_backward(q, k, v, q_gain, k_gain, out, logsumexp)
        ctx.transform, ctx.context, ctx.softmax_scale = transform, context, softmax_scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, q_gain, k_gain, out, logsumexp = ctx.saved_tensors
        context, counted = ctx.context, torch.zeros_like(ctx.transform.num_saturated)
        transform = replace(ctx.transform, q_gain=q_gain, k_gain=k_gain, num_saturated=counted)
        keys, values = (empty_kv(k.shape, context.kv_format, k.device, torch.bfloat16) for _ in "kv")  # K^, V^
        turned, inverse_rms = write_heads(q, k, v, transform, keys, values, None)
        grad_q, grad_k, grad_v = attention_backward(
            grads[0],
            turned,
            keys.values,
            values.values,
            out,
            logsumexp,
            context.cu_seqlens,
            context.tiles(q, k),
            ctx.softmax_scale,
            context.backward,
        )
        grad_q, grad_k, *gains = heads_backward(q, k, transform, inverse_rms, grad_q, grad_k)
        return grad_q, grad_k, grad_v, *gains, None, None, None
