"""A slow attention to compare with, and the inputs of its tests."""

import pytest
import torch

from octavo.kernels.attention import store_kv

H, HKV, DH = 6, 2, 32
SOFTMAX_SCALE = 0.3  # not 1 / sqrt(DH): the argument must be used
LENGTHS = [70, 1, 130, 33, 64]  # one, odd, exactly a block of 64 keys, more than two of them
UNIT_ROUNDOFF = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 2.0**-24}
FORMATS = {"fp8": torch.bfloat16, "bf16": torch.bfloat16, "fp32": torch.float32}  # KV format: dtype of q, k, v
every_format = pytest.mark.parametrize("kv_format", FORMATS)


def boundaries(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def qkv(kv_format, T, num_heads=H, num_kv_heads=HKV, head_dim=DH):
    """Random q [T, H, Dh], k and v [T, Hkv, Dh]."""
    shapes = [(T, heads, head_dim) for heads in (num_heads, num_kv_heads, num_kv_heads)]
    return [torch.randn(shape).to(FORMATS[kv_format]) for shape in shapes]


def slow_attention(q, k, v, lengths, p_dtype=None, sum_dtype=None, row_weights=None):
    """One sequence and one head at a time, in the dtype of the inputs.

    Args:
        p_dtype, sum_dtype: what p is rounded to above and below the fraction line, if given.
        row_weights: [T, H]; then the sum of them times the logsumexp of each row of scores is returned too.
    """
    group, out, weighted = q.shape[1] // k.shape[1], [], 0.0
    rows = torch.arange(len(q)).split(lengths)
    for row, q_n, k_n, v_n in zip(rows, *(x.split(lengths) for x in (q, k, v)), strict=True):
        future, heads = torch.ones(len(q_n), len(q_n), dtype=torch.bool).triu(1), []
        for head in range(q.shape[1]):
            scores = (q_n[:, head] @ k_n[:, head // group].T * SOFTMAX_SCALE).masked_fill(future, -torch.inf)
            p = torch.exp(scores - scores.amax(dim=1, keepdim=True))
            above, below = (p if dtype is None else p.to(dtype).to(p.dtype) for dtype in (p_dtype, sum_dtype))
            heads.append(above @ v_n[:, head // group] / below.sum(dim=1, keepdim=True))
            if row_weights is not None:
                weighted = weighted + (row_weights[row, head] * torch.logsumexp(scores, dim=1)).sum()
        out.append(torch.stack(heads, dim=1))
    return torch.cat(out) if row_weights is None else (torch.cat(out), weighted)


def decoded(k, v, kv_format):
    """K^ and V^ as float64."""
    return (store_kv(x, kv_format).decode().double() for x in (k, v))


def run(function, q, k, v, grad_out):
    """Output and gradients of q, k and v."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out = function(q, k, v)
    out.backward(grad_out)
    return out.detach(), q.grad, k.grad, v.grad
