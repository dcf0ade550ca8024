"""Checks of attention's gradients, which a GPU runs at real widths and the interpreter at small ones."""

import torch

from octavo.kernels.attention_backward import attention_backward
from octavo.kernels.triton_attention import attention_forward, packed_tiles
from octavo.numerics.error import relative_error

OURS = ("gluon", "triton")
"""Back ends that give the same bits every time."""


def check_backward(lengths, heads, back_end="triton", device="cpu"):
    """Gradients of float64, as far as rounding weights and scores' gradients to BF16 allows; ours, every time the same.

    Where torch's back ends share a KV head between query heads, they round each of their gradients to BF16 before
    these are added.
    """
    (H, Hkv, Dh), T = heads, sum(lengths)
    q, k, v, d_out = (torch.randn(T, n, Dh, device=device).bfloat16() for n in (H, Hkv, Hkv, H))
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0)
    tiles, scale = packed_tiles(cu_seqlens, T, H // Hkv, Dh), Dh**-0.5
    out, logsumexp = attention_forward(q, k, v, None, None, tiles.forward, scale)
    arguments = (d_out, q, k, v, out, logsumexp, cu_seqlens, tiles, scale, back_end)
    found = attention_backward(*arguments)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    pieces = zip(*(x.split(lengths) for x in leaves), strict=True)
    whole = []
    for piece in pieces:
        if len(piece[0]):
            q_n, k_n, v_n = (x.repeat_interleave(H // x.shape[1], dim=1).transpose(0, 1) for x in piece)
            whole.append(torch.nn.functional.scaled_dot_product_attention(q_n, k_n, v_n, is_causal=True, scale=scale))
    torch.cat(whole, dim=1).transpose(0, 1).backward(d_out.double())
    for name, x, leaf in zip("qkv", found, leaves, strict=True):
        if T == len(lengths) and name != "v":  # a lone key has all the weight, whatever its score
            # What is left is d_out . v, about 11, rounded twice in FP32, times the scale and a number of q or k.
            assert not leaf.grad.any() and x.abs().max() < 1e-4, name
            continue
        error, floor = relative_error(x, leaf.grad), relative_error(leaf.grad.bfloat16(), leaf.grad)
        # Beside the result, p or the gradients of scores are rounded to BF16, and delta is of a rounded output.
        margin = 2.0 if back_end in OURS else 3.0
        assert leaf.grad.abs().max() > 0.1 and error <= margin * floor, f"{name}: error {error:.3g}, floor {floor:.3g}"
    if back_end in OURS:
        assert all(torch.equal(a, b) for a, b in zip(found, attention_backward(*arguments), strict=True))


def check_backward_alone(lengths, heads, back_end, device="cpu"):
    """A sequence's gradients have the bits that they have alone, and among neighbours of NaN."""
    (H, Hkv, Dh), T = heads, sum(lengths)
    q, k, v, d_out = (torch.randn(T, n, Dh, device=device).bfloat16() for n in (H, Hkv, Hkv, H))
    boundaries = torch.tensor([0, *lengths], device=device).cumsum(0)
    tiles = packed_tiles(boundaries, T, H // Hkv, Dh)
    out, logsumexp = attention_forward(q, k, v, None, None, tiles.forward, Dh**-0.5)

    def gradients(operands, edges):
        tiles = packed_tiles(edges, len(operands[0]), H // Hkv, Dh)
        return attention_backward(*operands, edges, tiles, Dh**-0.5, back_end)

    operands = d_out, q, k, v, out, logsumexp
    wanted, starts = gradients(operands, boundaries), boundaries.tolist()
    assert all(x.isfinite().all() and x.abs().max() > 0.1 for x in wanted)
    for start, length in zip(starts, lengths, strict=False):
        rows = slice(start, start + length)
        damaged = [torch.full_like(x, torch.nan) for x in operands]
        for x, whole in zip(damaged, operands, strict=True):
            x[rows] = whole[rows]
        among = [x[rows] for x in gradients(damaged, boundaries)]
        edges = torch.tensor([0, length], device=device)
        alone = gradients([x[rows].contiguous() for x in operands], edges)
        for name, whole, *others in zip("qkv", wanted, among, alone, strict=True):
            assert all(torch.equal(x, whole[rows]) for x in others), f"{name} of the sequence of {length} at {start}"
