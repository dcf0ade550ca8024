"""The back ends of matrix products in float64, with the very layouts that they take, for machines without a GPU."""

import torch

from octavo.kernels import agreement, gemm
from octavo.kernels.operands import Operand, QuantizedMatrix, kernel_operand
from octavo.layers import linear
from octavo.models import observed
from octavo.numerics.exact import block_edges


def install(monkeypatch):
    """Put them in place of the kernels; returns a list that the names of those called are added to."""
    called = []

    def multiply(name, by_blocks):
        def run(x, w, x_scale, w_scale, bias, dtype):
            called.append(name)
            x, w = x.double(), w.double()
            if by_blocks:
                assert x.shape[1] % 128 == 0
                x = x * x_scale.double().repeat_interleave(128, 1)
                w_scale = w_scale if len(w_scale) == len(w) else w_scale.repeat_interleave(128, 0)[: len(w)]
                w = w * w_scale.double().repeat_interleave(128, 1)
            else:
                assert x_scale.shape == (len(x), 1) and w_scale.shape == (len(w), 1)
                x, w = x * x_scale.double(), w * w_scale.double()
            y = x @ w.T + (0.0 if bias is None else bias.double())
            return y.to(dtype)

        return run

    def triton(kind, x, w, x_scale, w_scale, bias, dtype):
        if x_scale is None:
            called.append("triton")
            scale = w_scale.repeat_interleave(128, 0)[: len(w)].repeat_interleave(128, 1)
            w = (w.float() * scale).bfloat16().double()[:, : x.shape[1]]
            return (x.double() @ w.T + (0.0 if bias is None else bias.double())).to(dtype)
        return multiply("triton", kind == "block")(x, w, x_scale, w_scale, bias, dtype)

    def decode(q, scale, width):
        called.append("decode")
        scale = scale.repeat_interleave(128, 0)[: len(q)].repeat_interleave(128, 1)
        return (q.float() * scale).bfloat16()[:, :width]

    monkeypatch.setattr(gemm, "HAS_GLUON", True)
    monkeypatch.setattr(gemm, "block_product", multiply("scaled_mm", True))
    monkeypatch.setattr(gemm, "row_product", multiply("scaled_mm", False))
    monkeypatch.setattr(gemm, "triton_product", triton)
    monkeypatch.setattr(gemm, "decode_weight", decode)
    for name in ("blocks_agree", "rows_agree", "bf16_agrees", "few_bf16_agree", "w8a16_agrees"):
        monkeypatch.setattr(agreement, name, lambda *_: True)
    return called


def as_on_gpu(monkeypatch):
    """FP8Linear as on a CUDA device, with these products; returns what `install` does."""
    mm = torch.mm

    def wide(x, w, *, out=None, out_dtype=None):
        y = mm(x.double(), w.double()).to(out_dtype or x.dtype)
        return y if out is None else out.copy_(y)

    def plain(x):
        return Operand(x, None, block_edges(x.shape[1]))

    monkeypatch.setattr(torch, "mm", wide)
    monkeypatch.setattr(linear.FP8Linear, "uses_kernels", True)
    monkeypatch.setattr(QuantizedMatrix, "operand", kernel_operand)
    for module in (linear, observed):
        monkeypatch.setattr(module, "grid_operand", plain)
    called = install(monkeypatch)
    triton = gemm.triton_product

    def bf16_too(kind, x, w, x_scale, w_scale, bias, dtype):
        if w_scale is None:
            return (x.double() @ w.double().T + (0.0 if bias is None else bias.double())).to(dtype)
        return triton(kind, x, w, x_scale, w_scale, bias, dtype)

    monkeypatch.setattr(gemm, "triton_product", bf16_too)
    return called
