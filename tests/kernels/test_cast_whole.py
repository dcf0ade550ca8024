"""Casts by scales of whole rows, columns and projections: bytes and scales of `numerics.fp8.quantize`, both ways."""

from itertools import pairwise

import pytest
import torch
from kernel_checks import interpreted, needs_triton, same
from test_cast import random_matrix

from octavo.kernels.cast_whole import cast_rows_columns, cast_tensor
from octavo.numerics.fp8 import E4M3, PER_COLUMN, PER_ROW, PER_TENSOR, quantize

SHAPES = [((1, 16), [1]), ((7, 129), [7]), ((300, 200), [256, 44]), ((400, 136), [128, 128, 144]), ((3, 1), [3])]
"""Sizes, and projections along the first dimension."""


def pieces(x, splits, dim):
    edges = torch.tensor([0, *splits]).cumsum(0).tolist()
    return [x.narrow(dim, start, stop - start) for start, stop in pairwise(edges)]


def quantized(x, quant_block, rounding, splits, dim):
    """Each projection on its own, bytes and scales."""
    casts = [quantize(piece, quant_block, rounding) for piece in pieces(x, splits, dim)]
    return [torch.cat(parts, dim=dim) for parts in zip(*casts, strict=True)]


def wrong_casts(x, splits, dim, rounding):
    """Which casts of x, whose projections lie along dim, are not the reference's."""
    given = {("row_splits", "column_splits")[dim]: splits}
    rows = quantize(x, PER_ROW, rounding) if dim == 0 else quantized(x, PER_ROW, rounding, splits, 1)
    columns = quantize(x, PER_COLUMN, rounding) if dim == 1 else quantized(x, PER_COLUMN, rounding, splits, 0)
    tensor = quantized(x, PER_TENSOR, rounding, splits, dim)
    (q, scale), (q_t, scale_t) = cast_rows_columns(x, rounding, **given)
    one, one_t, one_scale = cast_tensor(x, rounding, transposed=True, **given)
    alone, nothing, alone_scale = cast_tensor(x, rounding, **given)
    assert nothing is None and scale.stride(0) == scale_t.stride(0) == 1
    found = {
        "rows": ((q, scale), rows),
        "columns": ((q_t.T, scale_t.T), columns),
        "tensor": ((one, one_scale), tensor),
        "tensor, transposed": ((one_t.T, one_scale), tensor),
        "tensor, alone": ((alone, alone_scale), tensor),
    }
    return [name for name, (mine, wanted) in found.items() if not all(map(same, mine, wanted))]


def check_casts(x, splits, dim, rounding):
    assert x.abs().nan_to_num(0.0, 0.0).sum() > 0.0
    wrong = wrong_casts(x, splits, dim, rounding)
    assert not wrong, f"{tuple(x.shape)} {x.dtype} {splits} along {dim}, {rounding}: {wrong}"


def check_in_place(x, splits):
    """Written into the second halves of larger tensors, bytes are those of new ones, and the first halves stay."""
    M, K = x.shape

    def place(rows, columns, blocks):
        q, scale = torch.full((2 * rows, columns), 3.0).to(E4M3).to(x.device), torch.full((blocks, 2 * rows), 7.0)
        return (q[rows:], scale.to(x.device).T[rows:]), q[:rows]

    (plain, rest), (transposed, rest_t) = place(M, K, 1), place(K, M, len(splits))
    got = cast_rows_columns(x, row_splits=splits, out=(plain, transposed))
    assert got[0][0] is plain[0] and got[1][1] is transposed[1]
    for mine, wanted in zip(got, cast_rows_columns(x, row_splits=splits), strict=True):
        assert all(map(same, mine, wanted))
    one_scale = torch.empty(len(splits), 1, device=x.device)
    one, one_t, _ = cast_tensor(x, row_splits=splits, transposed=True, out=(plain[0], transposed[0], one_scale))
    wanted = cast_tensor(x, row_splits=splits, transposed=True)
    assert same(one, wanted[0]) and same(one_t, wanted[1]) and same(one_scale, wanted[2])
    assert (rest.float() == 3.0).all() and (rest_t.float() == 3.0).all()


def finite(x):
    """What the interpreter vouches for; the rest is the GPU's to check."""
    return torch.nan_to_num(x, posinf=1.0)


@pytest.mark.parametrize("rounding", ["none", "power_of_two"])
@pytest.mark.parametrize("shape, splits", SHAPES)
def test_casts_on_a_cpu_are_the_reference(shape, splits, rounding):
    x = random_matrix(shape, torch.bfloat16)
    check_casts(x, splits, 0, rounding)
    check_casts(random_matrix(shape[::-1], torch.bfloat16), splits, 1, rounding)
    check_casts(random_matrix(shape, torch.float32), splits, 0, rounding)


def test_casts_go_where_they_are_told():
    check_in_place(finite(random_matrix((400, 136), torch.float32)), [128, 128, 144])


def test_a_projection_that_is_not_finite_spoils_no_other():
    x = torch.randn(300, 160)
    x[7, 5], x[290] = torch.nan, 0.0
    q, _, scale = cast_tensor(x, row_splits=[128, 172])
    assert scale[0].isnan() and scale[1] > 0.0 and q[:128].float().isnan().all() and (q[290].float() == 0.0).all()
    (_, by_row), (_, by_column) = cast_rows_columns(x, row_splits=[128, 172])
    assert by_row.isnan().nonzero().tolist() == [[7, 0]] and by_column.isnan().nonzero().tolist() == [[5, 0]]


@pytest.mark.parametrize("cast", [cast_rows_columns, cast_tensor])
def test_splits_that_do_not_fit_are_refused(cast):
    x = torch.zeros(300, 160)
    for row_splits, column_splits in (([128, 128], None), ([100, 200], None), (None, [160, 140]), ([300], [160])):
        with pytest.raises(ValueError, match=f"{cast.__name__} takes row_splits or column_splits that add up"):
            cast(x, row_splits=row_splits, column_splits=column_splits)


@pytest.mark.parametrize("shape", [(0, 16), (16, 0)])
def test_nothing_to_cast(shape):
    (q, _), (q_t, _) = cast_rows_columns(torch.zeros(shape))
    one, one_t, _ = cast_tensor(torch.zeros(shape), transposed=True)
    assert q.shape == one.shape == shape and q_t.shape == one_t.shape == shape[::-1]


@needs_triton
def test_kernels_in_the_interpreter_equal_the_reference():
    interpreted(
        "from test_cast_whole import *\n"
        "for shape, splits in SHAPES[1:3]:\n"
        "    dtype = torch.bfloat16 if shape[0] % 8 else torch.float32\n"
        "    check_casts(finite(random_matrix(shape, dtype)), splits, 0, 'none')\n"
        "    check_casts(finite(random_matrix(shape[::-1], dtype)), splits, 1, 'power_of_two')\n"
        "check_in_place(finite(random_matrix((400, 136), torch.float32)), [128, 128, 144])\n"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape, splits", [*SHAPES, ((1000, 576), [1000]), ((6144, 4096), [4096, 1024, 1024])])
def test_casts_on_a_gpu_equal_the_reference(shape, splits, dtype):
    x, wide = (random_matrix(size, dtype, "cuda") for size in (shape, shape[::-1]))
    for change in (finite, lambda x: x):
        check_casts(change(x), splits, 0, "none")
        check_casts(change(wide), splits, 1, "power_of_two")
        check_casts(change(torch.cat([x, x], dim=1))[:, : shape[1]], splits, 0, "none")  # rows lie further apart


@pytest.mark.gpu
def test_casts_on_a_gpu_go_where_they_are_told():
    check_in_place(finite(random_matrix((400, 136), torch.float32, "cuda")), [128, 128, 144])
