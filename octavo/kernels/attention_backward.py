"""Attention's backward pass on a GPU, from the output and the logsumexp of the forward pass, by named back ends.

    gluon    our kernels for Hopper and heads of width 64 and 128: deterministic
    triton   our kernels for any width: deterministic
    flash    torch's FlashAttention 2 over packed sequences: deterministic under torch.use_deterministic_algorithms
    cudnn    torch's cuDNN attention, one sequence at a time: each length is planned anew, so for long sequences only

All take the BF16 operands Q, K^ and V^ and pass the gradient straight through the quantiser.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from octavo.kernels.attention_gradients import WIDTHS, attention_gradients
from octavo.kernels.backward_kernels import delta_kernel, grad_kv_kernel, grad_q_kernel
from octavo.kernels.triton_attention import PackedTiles, block_width, has_gradients
from octavo.kernels.triton_shim import triton

BackwardName = Literal["gluon", "triton", "flash", "cudnn"]
Gradients = tuple[Tensor, Tensor, Tensor]
DELTA_ROWS = 32
"""Rows of a program that adds up d_out * out."""


def attention_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cu_seqlens: Tensor,
    tiles: PackedTiles,
    softmax_scale: float,
    back_end: BackwardName | None = None,
) -> Gradients:
    """Gradients of causal attention within packed sequences.

    Args:
        grad_out, q, out: [T, H, Dh] bf16.
        k, v: [T, Hkv, Dh] bf16, K^ and V^.
        logsumexp: [T, H] fp32, of each row of scores.
        cu_seqlens: [N + 1] int64 sequence boundaries, from 0 to T.
        tiles: of `packed_tiles`, for our own back ends.
        softmax_scale: multiplies the scores.
        back_end: who computes it; None for `gluon` where it runs, else `triton`.

    Returns:
        Gradients of q, k and v, bf16, contiguous.

    Raises:
        ValueError: another back end, or one that does not run here.
    """
    grad_out = grad_out.contiguous()
    back_end = back_end or ("gluon" if has_gradients(q.shape[2]) else "triton")
    if back_end not in get_args(BackwardName):
        raise ValueError(f"attention_backward must be one of {', '.join(get_args(BackwardName))}; got {back_end!r}")
    if not len(q):
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    if back_end == "gluon":
        if not has_gradients(q.shape[2]):
            raise ValueError(
                f"attention_backward 'gluon' wants a Hopper GPU with triton's Gluon and heads of width "
                f"{' or '.join(map(str, WIDTHS))}; got width {q.shape[2]}. Use 'triton'"
            )
        return attention_gradients(grad_out, q, k, v, out, logsumexp, tiles.gradients, softmax_scale)
    if back_end == "triton":
        return _triton(grad_out, q, k, v, out, logsumexp, cu_seqlens, tiles, softmax_scale)
    run = _flash if back_end == "flash" else _cudnn
    return run(grad_out, q, k, v, out, logsumexp, cu_seqlens, softmax_scale)


def _triton(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cu_seqlens: Tensor,
    tiles: PackedTiles,
    softmax_scale: float,
) -> Gradients:
    (T, H, Dh), Hkv = q.shape, k.shape[1]
    width = {"DH": Dh, "BLOCK_D": block_width(Dh)}
    shape = {"H": H, "HKV": Hkv, **width}
    delta = torch.empty_like(logsumexp)
    delta_kernel[(triton.cdiv(T * H, DELTA_ROWS),)](out, grad_out, delta, T * H, R=DELTA_ROWS, **width)
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    operands = (q, k, v, grad_out, logsumexp, delta)
    queries, keys = tiles.queries, tiles.keys.table
    grad_q_kernel[(Hkv * len(queries.table),)](
        *operands, grad_q, queries.table, softmax_scale, ROWS=queries.rows, **shape, **launch_options("grad_q", Dh)
    )
    grad_kv_kernel[(Hkv * len(keys),)](
        *operands, grad_k, grad_v, keys, cu_seqlens, softmax_scale, **shape, **launch_options("grad_kv", Dh)
    )
    return grad_q, grad_k, grad_v


def launch_options(kernel: str, head_dim: int) -> dict[str, int]:
    """Warps and pipeline stages with which no register is spilled."""
    return {"num_warps": 8 if kernel == "grad_kv" and head_dim > 64 else 4, "num_stages": 2}


def _flash(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cu_seqlens: Tensor,
    softmax_scale: float,
) -> Gradients:
    boundaries = cu_seqlens.int()
    longest = int(cu_seqlens.diff().max())
    no_dropout = torch.empty(0, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._flash_attention_backward(
        grad_out,
        q,
        k,
        v,
        out,
        logsumexp.T.contiguous(),  # [H, T]
        boundaries,
        boundaries,
        longest,
        longest,
        0.0,
        True,
        no_dropout,
        no_dropout,
        scale=softmax_scale,
    )


def _cudnn(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cu_seqlens: Tensor,
    softmax_scale: float,
) -> Gradients:
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    no_dropout = torch.zeros(1, dtype=torch.int64, device=q.device)
    boundaries = cu_seqlens.tolist()
    for start, stop in zip(boundaries[:-1], boundaries[1:], strict=True):
        if start == stop:
            continue
        one = [x[None, start:stop].transpose(1, 2) for x in (grad_out, q, k, v, out)]  # [1, heads, L, Dh]
        found = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *one,
            logsumexp[None, start:stop].transpose(1, 2).contiguous()[..., None],  # [1, H, L, 1]
            no_dropout,
            no_dropout,
            None,
            None,
            None,
            stop - start,
            stop - start,
            0.0,
            True,
            scale=softmax_scale,
        )
        for whole, part in zip(gradients, found, strict=True):
            whole[start:stop] = part[0].transpose(0, 1)
    return gradients
