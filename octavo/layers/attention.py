"""Where a forward pass keeps its keys and values: a packed training batch here, the paged cache in the engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from octavo.kernels.attention import packed_attention
from octavo.numerics.recipe import StorageFormat


class AttentionContext(Protocol):
    """What the decoder asks of its caller in each layer."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> Tensor:
        """q [T, H, Dh], new k and v [T, Hkv, Dh] after qk-norm and rotary -> [T, H, Dh]."""
        ...


@dataclass(frozen=True, eq=False)
class PackedAttention:
    """Sequences laid end to end, each attending to itself. Differentiable; keeps nothing between layers."""

    cu_seqlens: Tensor
    """[N + 1] int64 boundaries, from 0 to T."""
    kv_format: StorageFormat
    """Of the keys and values that the queries see."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float) -> Tensor:
        return packed_attention(q, k, v, self.cu_seqlens, softmax_scale, self.kv_format)
