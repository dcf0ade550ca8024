"""Queries, keys and values on their way from the projection to attention, on a GPU in one kernel.

    q = rotate(norm(q))     k = stored(rotate(norm(k)))     v = stored(v)

The norm is the qk-norm of Qwen3, where there is one. Keys and values are stored as `store_kv` says, in a packed batch
or in the pages of a cache. The kernel does on each head what `rms_norm`, `rotate` and `store_kv` do one after another,
and rounds where they round: the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.attention import FP16_MAX, StoredKV
from octavo.kernels.early_launch import early_launch
from octavo.kernels.heads_kernels import gather_kernel, heads_kernel, rotate_back_kernel
from octavo.kernels.norm import norm_constants, rms_norm, rms_norm_backward
from octavo.kernels.triton_attention import UNFUSED, block_width
from octavo.kernels.triton_shim import triton
from octavo.numerics.fp8 import E4M3
from octavo.numerics.recipe import StorageFormat

GATHERED_ROWS = 4
"""Slots of a program that lays keys end to end."""
TOKENS = 16
"""Of a program, for one head."""


@dataclass(frozen=True, eq=False)
class HeadTransform:
    """What happens to queries and keys between the projection and attention."""

    cos: Tensor
    """[T, Dh / 2] fp32, of each token's position."""
    sin: Tensor
    """Likewise."""
    q_gain: Tensor | None
    """[Dh] fp32, of the qk-norm; None where the model has none."""
    k_gain: Tensor | None
    """Likewise."""
    norm_eps: float
    """Of the qk-norm."""
    num_saturated: Tensor
    """[1] int64: beside FP8 keys, the count of numbers in queries beyond what FP16 holds is added to it."""


def no_transform(num_tokens: int, head_dim: int, device: torch.device | str = "cpu") -> HeadTransform:
    """Leaves queries and keys as they are: no qk-norm, a rotation by nothing."""
    angles = torch.zeros(num_tokens, head_dim // 2, device=device)
    return HeadTransform(angles.cos(), angles, None, None, 0.0, torch.zeros(1, dtype=torch.int64, device=device))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + Dh / 2) of each head; FP32, rounded once. Differentiable.

    Args:
        x: [T, H, Dh] bf16 or fp32.
        cos, sin: [T, Dh / 2] fp32 of each token's position.
    """
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def transformed(q: Tensor, k: Tensor, transform: HeadTransform, kv_format: StorageFormat) -> tuple[Tensor, Tensor]:
    """q [T, H, Dh] and k [T, Hkv, Dh] after qk-norm and rotary. Differentiable; defines the right answer."""
    if transform.q_gain is not None and transform.k_gain is not None:
        q, k = rms_norm(q, transform.q_gain, transform.norm_eps), rms_norm(k, transform.k_gain, transform.norm_eps)
    q, k = (rotate(x, transform.cos, transform.sin) for x in (q, k))
    if kv_format == "fp8":
        transform.num_saturated.add_((q.detach().float().abs() > FP16_MAX).sum())  # to BF16, 65504 is 65536
    return q, k


def write_heads(
    q: Tensor, k: Tensor, v: Tensor, transform: HeadTransform, keys: StoredKV, values: StoredKV, slots: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`transformed` and `store_kv` by the kernel: keys and values go to `slots` of what holds them.

    Args:
        q: [T, H, Dh] bf16; k, v: [T, Hkv, Dh] bf16; heads may lie in wider rows.
        transform: of q and k.
        keys, values: [slots, Hkv, Dh], written in place; codes may be held as fp16, and as bf16 times their scale.
        slots: [T] int64; None for the first T.

    Returns:
        q [T, H, Dh], and the inverse root mean squares of the qk-norm, [T * H + T * Hkv] fp32 (of no meaning without).
    """
    (T, H, Dh), Hkv = q.shape, k.shape[1]
    q, k, v = (_with_dense_heads(x) for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    inverse_rms = torch.empty(T * (H + Hkv), device=q.device)
    norm = transform.q_gain is not None and transform.k_gain is not None
    if T:
        heads_kernel[(triton.cdiv(T, TOKENS), H + 2 * Hkv)](
            q,
            k,
            v,
            *(x.stride(0) for x in (q, k, v)),
            transform.q_gain if norm else q,
            transform.k_gain if norm else k,
            transform.cos,
            transform.sin,
            out if slots is None else slots,
            out,
            keys.values,
            values.values,
            out if keys.scale is None else keys.scale,
            out if values.scale is None else values.scale,
            inverse_rms,
            transform.num_saturated,
            T,
            H=H,
            HKV=Hkv,
            BLOCK_D=block_width(Dh),
            R=TOKENS,
            NORM=norm,
            SLOTS=slots is not None,
            FP8=keys.scale is not None,
            num_warps=4,
            **{"DH" if name == "D" else name: value for name, value in norm_constants(Dh, transform.norm_eps).items()},
            **UNFUSED,
            **early_launch(q),
        )
    return out, inverse_rms


def empty_kv(
    shape: tuple[int, ...], kv_format: StorageFormat, device: torch.device, codes: torch.dtype = E4M3
) -> StoredKV:
    """Room for keys or values [..., Hkv, Dh], in FP8 for codes of a dtype that holds them; in bf16 for K^ or V^."""
    values = torch.empty(shape, dtype=codes if kv_format == "fp8" else torch.bfloat16, device=device)
    return StoredKV(values, torch.empty(shape[:-1], device=device) if kv_format == "fp8" else None)


def gathered(stored: StoredKV, slots: Tensor) -> StoredKV:
    """Keys or values at slots [S] side by side, codes as FP16, which products of many queries take; by the kernel."""
    Hkv, Dh = stored.values.shape[1:]
    kv_format: StorageFormat = "bf16" if stored.scale is None else "fp8"
    kept = empty_kv((len(slots), Hkv, Dh), kv_format, slots.device, torch.float16)
    if len(slots):
        gather_kernel[(triton.cdiv(len(slots), GATHERED_ROWS),)](
            stored.values,
            stored.values if stored.scale is None else stored.scale,
            slots,
            kept.values,
            kept.values if kept.scale is None else kept.scale,
            len(slots),
            HKV=Hkv,
            WIDTH=Hkv * Dh,
            BLOCK_HEADS=triton.next_power_of_2(Hkv),
            BLOCK_WIDTH=triton.next_power_of_2(Hkv * Dh),
            R=GATHERED_ROWS,
            FP8=kept.scale is not None,
            num_warps=4,
        )
    return kept


def heads_backward(
    q: Tensor, k: Tensor, transform: HeadTransform, inverse_rms: Tensor, grad_q: Tensor, grad_k: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of q, k and the gains from those of what `write_heads` made of them, which returned inverse_rms."""
    grad_q, grad_k = rotate_back(grad_q, grad_k, transform)
    if transform.q_gain is None or transform.k_gain is None:
        return grad_q, grad_k, None, None
    inverse_q, inverse_k = inverse_rms.split([q.shape[0] * q.shape[1], k.shape[0] * k.shape[1]])
    grad_q, grad_q_gain = rms_norm_backward(q, transform.q_gain, inverse_q.view(q.shape[:2]), grad_q)
    grad_k, grad_k_gain = rms_norm_backward(k, transform.k_gain, inverse_k.view(k.shape[:2]), grad_k)
    return grad_q, grad_k, grad_q_gain, grad_k_gain


def rotate_back(grad_q: Tensor, grad_k: Tensor, transform: HeadTransform) -> tuple[Tensor, Tensor]:
    """Both rotated by minus the angles, [T, H, Dh] and [T, Hkv, Dh] bf16: the gradient of `rotate`, by the kernel."""
    (T, H, Dh), Hkv = grad_q.shape, grad_k.shape[1]
    grad_q, grad_k = grad_q.contiguous(), grad_k.contiguous()
    out_q, out_k = torch.empty_like(grad_q), torch.empty_like(grad_k)
    if T:
        rotate_back_kernel[(triton.cdiv(T, TOKENS), H + Hkv)](
            grad_q,
            grad_k,
            transform.cos,
            transform.sin,
            out_q,
            out_k,
            T,
            H=H,
            HKV=Hkv,
            DH=Dh,
            BLOCK_D=block_width(Dh),
            R=TOKENS,
            num_warps=4,
            **UNFUSED,
        )
    return out_q, out_k


def _with_dense_heads(x: Tensor) -> Tensor:
    """[T, heads, Dh] whose rows hold their heads side by side."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
