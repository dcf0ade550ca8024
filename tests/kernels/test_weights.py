"""Weights written in place: the bytes, scales and transpose that `quantize_matrix` makes of the master."""

import pytest
import torch
from kernel_checks import interpreted, needs_triton, same
from test_cast import random_matrix

from octavo.kernels.operands import QuantizedMatrix, quantize_matrix, split_edges
from octavo.kernels.weights import (
    can_write,
    room_for_transpose,
    transpose_weight,
    transposed_operand,
    write_rows_columns,
    write_weight,
)
from octavo.numerics.fp8 import BLOCK_128X128, E4M3, PER_COLUMN, PER_ROW, PER_TENSOR

SHAPES = [(16, [8]), (208, [192, 72, 72]), (16, [128, 200]), (144, [136])]
"""Input width, and widths of the fused projections."""
FULL = [(256, [256, 128, 128]), (4096, [4096, 1024, 1024]), (576, [576, 192, 192])]


def masters(K, splits, dtype, device="cpu"):
    """Rows of very different magnitude, zeros, and on a GPU what is not finite."""
    w = random_matrix((sum(splits), K), dtype)
    w[-3:] = 0.0
    return (torch.nan_to_num(w, posinf=1.0) if device == "cpu" else w).to(device)


def places(w, splits, quant_block, transposed=False):
    """Buffers as a layer has them, full of something else."""
    layout = quantize_matrix(torch.zeros(w.shape), quant_block, row_splits=splits)
    size = w.shape[::-1] if transposed else w.shape
    q, scale = torch.full(size, 3.0).to(E4M3).to(w.device), torch.full(layout.scale.shape, 7.0, device=w.device)
    return (q.T if transposed else q), scale


def check_weight(K, splits, dtype, rounding, device="cpu"):
    """Every way of writing a weight."""
    w = masters(K, splits, dtype, device)
    assert can_write(K, splits) and w.abs().nan_to_num(0.0, 0.0).sum() > 0.0
    for quant_block in (BLOCK_128X128, PER_TENSOR, PER_ROW):
        wanted = quantize_matrix(w.cpu(), quant_block, rounding, row_splits=splits)
        for transposed in (False, True)[: 1 + (quant_block != PER_ROW)]:
            q, scale = places(w, splits, quant_block)
            edges = (split_edges(n, block) for n, block in zip((splits, [K]), quant_block, strict=True))
            weight = QuantizedMatrix(q, scale, *edges, quant_block)
            q_t = room_for_transpose(weight, splits) if transposed else None
            write_weight(w, splits, quant_block, rounding, (q, scale), q_t)
            assert same(q.cpu(), wanted.q) and same(scale.cpu(), wanted.scale), (K, splits, quant_block)
            if transposed:
                copied, onto_zeros = q_t.clone(), torch.full_like(q_t, 0.0)
                transpose_weight(weight, splits, copied)
                transpose_weight(weight, splits, onto_zeros)
                assert same(q_t, copied) and same(transposed_operand(weight, q_t).decode().cpu(), wanted.dequantize().T)
                filled = [x.float().nan_to_num(0.0) for x in (q_t, onto_zeros)]  # 0, but NaN in a block whose scale is
                assert torch.equal(*filled), (K, splits, quant_block)
    both = places(w, splits, PER_ROW), places(w, splits, PER_COLUMN, transposed=True)
    write_rows_columns(w, splits, rounding, *both)
    for quant_block, (q, scale) in zip((PER_ROW, PER_COLUMN), both, strict=True):
        wanted = quantize_matrix(w.cpu(), quant_block, rounding, row_splits=splits)
        assert same(q.cpu(), wanted.q) and same(scale.cpu(), wanted.scale), (K, splits, quant_block)


@pytest.mark.parametrize("rounding", ["none", "power_of_two"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("K, splits", [*SHAPES, FULL[0]])
def test_weights_on_a_cpu(K, splits, dtype, rounding):
    check_weight(K, splits, dtype, rounding)


def test_a_row_that_is_not_finite_spoils_its_projection_only():
    w = torch.randn(256, 32)
    w[130, 3], w[7] = torch.inf, 0.0
    q, scale = places(w, [128, 128], PER_TENSOR)
    write_weight(w, [128, 128], PER_TENSOR, "none", (q, scale))
    assert scale[1].isnan() and scale[0] > 0.0 and q[128:].float().isnan().all() and (q[7].float() == 0.0).all()


@pytest.mark.parametrize("K, splits", [(51, [33, 7, 7]), (72, [24, 24, 8]), (16, [1]), (128, [128, 4])])
def test_widths_that_kernels_do_not_write(K, splits):
    assert not can_write(K, splits)


@needs_triton
def test_weights_in_the_interpreter():
    interpreted("from test_weights import *\ncheck_weight(*SHAPES[1], torch.float32, 'none')\n")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("K, splits", [*SHAPES, *FULL])
def test_weights_on_a_gpu(K, splits, dtype):
    check_weight(K, splits, dtype, "none", "cuda")
    check_weight(K, splits, dtype, "power_of_two", "cuda")
