"""Operands as kernels read them, and how `product` hands them over to back ends: here float64 with their layouts."""

import kernel_products
import pytest
import torch

from octavo.kernels import agreement, gemm
from octavo.kernels.gemm import product
from octavo.kernels.operands import Operand, _filled, kernel_operand, quantize_matrix
from octavo.numerics.error import relative_error
from octavo.numerics.fp8 import BLOCK_1X128, BLOCK_128X1, BLOCK_128X128, PER_COLUMN, PER_ROW, PER_TENSOR

SPLITS = [(256, 128), (96, 48), (40, 32), (130,), (1,)]
every_split = pytest.mark.parametrize("splits", SPLITS)
BLOCKS = [BLOCK_1X128, BLOCK_128X1, BLOCK_128X128, PER_COLUMN, PER_ROW, PER_TENSOR]


@every_split
@pytest.mark.parametrize("quant_block", BLOCKS)
@pytest.mark.parametrize("width", [128, 200, 72])
def test_a_prepared_matrix_decodes_to_itself(quant_block, splits, width):
    x = torch.randn(sum(splits), width) * torch.exp(torch.randn(sum(splits), 1))
    for matrix in (
        quantize_matrix(x, quant_block, row_splits=list(splits)),
        quantize_matrix(x.T, quant_block, column_splits=list(splits)),
    ):
        for side in (matrix, matrix.T):
            if side.quant_block[1] == 1:  # a scale a column: no product reduces over these
                continue
            operand = kernel_operand(side)
            assert torch.equal(operand.decode(), side.dequantize())
            columns = operand.values.shape[1]
            assert operand.values.stride(1) == 1 and columns % (128 if operand.by_blocks else 16) == 0
            assert operand.by_blocks == (side.quant_block[1] == 128)
            if operand.rows_per_scale > 1:
                assert len(operand.scale) == -(-len(operand.values) // 128)
            else:
                assert len(operand.scale) == len(operand.values)
            filled = operand.values.double().abs().sum() - side.q.double().abs().sum()
            assert filled == 0.0, "what fills up blocks is zeros"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_operands_are_packed_and_aligned_as_bulk_copies_want(dtype):
    wide = torch.randn(5, 300).to(dtype)
    odd = torch.zeros(128 * 5 + 1, dtype=dtype)[1:].view(5, 128).copy_(wide[:, :128])
    for x in (wide[:, :128], wide[:1, 7:135], wide[:, 7:135], odd, wide[:, :128].T.contiguous().T):
        assert x.stride() != (128, 1) or x.data_ptr() % 16 != 0
        filled = _filled(x, [0, 128], 16)
        assert filled.stride() == (128, 1) and filled.data_ptr() % 16 == 0
        assert torch.equal(filled.float(), x.float()) and filled.float().abs().sum() > 0
    packed = wide[:, :128].contiguous()
    assert _filled(packed, [0, 128], 16) is packed


@pytest.fixture
def kernels(monkeypatch):
    """The names of the back ends that are called."""
    return kernel_products.install(monkeypatch)


@every_split
@pytest.mark.parametrize("M", [1, 128, 300])
@pytest.mark.parametrize(
    "left, right", [(BLOCK_1X128, BLOCK_128X128), (PER_ROW, PER_ROW), (PER_TENSOR, PER_TENSOR), (None, BLOCK_128X128)]
)
def test_fprop_reaches_a_back_end_in_its_layout(kernels, left, right, M, splits):
    x, w, bias = torch.randn(M, 200).bfloat16(), torch.randn(sum(splits), 200), torch.randn(sum(splits)).bfloat16()
    w_hat = quantize_matrix(w, right, row_splits=list(splits))
    if left is None:
        exact = x.double() @ w_hat.dequantize().bfloat16().double().T
        x_operand = Operand(x, None, w_hat.column_edges)
    else:
        x_hat = quantize_matrix(x, left)
        exact = x_hat.dequantize().double() @ w_hat.dequantize().double().T
        x_operand = kernel_operand(x_hat)
    got = product(x_operand, kernel_operand(w_hat), bias, torch.float32)
    assert got.shape == exact.shape and relative_error(got, exact + bias.double()) < 1e-6
    assert kernels == ["triton" if M <= 128 or left is None else "scaled_mm"]


def test_many_bf16_rows_go_to_cublas_by_4096_and_the_rest_to_triton(kernels, monkeypatch):
    asked, mm = [], torch.mm

    def count(x, w, *, out=None, out_dtype=None):
        asked.append(len(x))
        y = mm(x.double(), w.double()).to(out_dtype or torch.bfloat16)
        return y if out is None else out.copy_(y)

    monkeypatch.setattr(torch, "mm", count)
    x, w = torch.randn(9000, 200).bfloat16(), quantize_matrix(torch.randn(130, 200), BLOCK_128X128)
    exact = x.double() @ w.dequantize().bfloat16().double().T
    for bias, dtype in ((None, torch.bfloat16), (torch.randn(130).bfloat16(), torch.float32)):
        asked.clear(), kernels.clear()
        got = product(Operand(x, None, w.column_edges), kernel_operand(w), bias, dtype)
        wanted = exact if bias is None else exact + bias.double()
        assert asked == [4096, 4096] and kernels == ["decode", "triton"]
        assert relative_error(got, wanted) < (2.0**-8 if dtype == torch.bfloat16 else 1e-6)


@every_split
@pytest.mark.parametrize("T", [1, 128, 300])
@pytest.mark.parametrize(
    "left, weight", [(BLOCK_1X128, BLOCK_128X128), (PER_ROW, PER_COLUMN), (PER_TENSOR, PER_TENSOR)]
)
def test_dgrad_adds_what_each_projection_gives(kernels, left, weight, T, splits):
    grad_y, w = torch.randn(T, sum(splits)).bfloat16(), torch.randn(sum(splits), 200)
    sizes = torch.repeat_interleave(torch.tensor([1.0, 100.0][: len(splits)]), torch.tensor(splits))
    dy_hat = quantize_matrix(grad_y * sizes, left, column_splits=list(splits))
    w_hat = quantize_matrix(w / sizes[:, None], weight, row_splits=list(splits))
    exact = dy_hat.dequantize().double() @ w_hat.dequantize().double()
    got = product(kernel_operand(dy_hat), kernel_operand(w_hat.T), dtype=torch.float32)
    at_once = left == BLOCK_1X128 or all(size % 128 == 0 for size in splits)
    assert relative_error(got, exact) < 1e-6 and len(kernels) == (1 if at_once else len(splits))


@every_split
@pytest.mark.parametrize("block", [BLOCK_128X1, PER_COLUMN, PER_TENSOR])
def test_wgrad_reduces_over_tokens(kernels, block, splits):
    grad_y, x = torch.randn(256, sum(splits)).bfloat16(), torch.randn(256, 72).bfloat16()
    dy_hat, x_hat = quantize_matrix(grad_y, block, column_splits=list(splits)), quantize_matrix(x, block)
    exact = dy_hat.dequantize().double().T @ x_hat.dequantize().double()
    got = product(kernel_operand(dy_hat.T), kernel_operand(x_hat.T), dtype=torch.float32)
    assert got.shape == exact.shape and relative_error(got, exact) < 1e-6 and len(kernels) == 1


def test_wide_weights_with_many_rows_go_to_cublaslt(kernels):
    x = kernel_operand(quantize_matrix(torch.randn(100, 128), BLOCK_1X128))
    wide = kernel_operand(quantize_matrix(torch.randn(gemm.WIDE, 128), BLOCK_128X128))
    product(x, wide)
    product(x, kernel_operand(quantize_matrix(torch.randn(1024, 128), BLOCK_128X128)))
    assert kernels == ["scaled_mm", "triton"]


def test_where_back_ends_do_not_agree_triton_does_it_all(kernels, monkeypatch):
    x = kernel_operand(quantize_matrix(torch.randn(1000, 128), BLOCK_1X128))
    w = kernel_operand(quantize_matrix(torch.randn(256, 128), BLOCK_128X128))
    product(x, w)
    monkeypatch.setattr(agreement, "blocks_agree", lambda *_: False)
    product(x, w)
    assert kernels == ["scaled_mm", "triton"]


def test_named_back_ends_refuse_what_they_do_not_take(kernels, monkeypatch):
    x, w = torch.randn(300, 128), torch.randn(64, 128)
    rows = [kernel_operand(quantize_matrix(t, PER_ROW)) for t in (x, w)]
    blocks = [kernel_operand(quantize_matrix(x, BLOCK_1X128)), kernel_operand(quantize_matrix(w, BLOCK_128X128))]
    for pair, backend, message in (
        (rows, "triton", r"backend 'triton' does not multiply FP8 by rows; these do: scaled_mm, triton \(up to 128"),
        (rows, "cublas", "backend 'cublas' does not multiply FP8 by rows"),
        (blocks, "cublas", "backend 'cublas' does not multiply FP8 by blocks"),
        (blocks, "reference", "backend 'reference' does not take operands of torch.float8_e4m3fn"),
        (blocks, "deep_gemm", "the package deep_gemm is not installed; use scaled_mm"),
    ):
        with pytest.raises(ValueError, match=message):
            product(*pair, backend=backend)
    monkeypatch.setattr(gemm, "HAS_GLUON", False)
    with pytest.raises(ValueError, match="'triton' does not multiply FP8 by rows"):
        product(kernel_operand(quantize_matrix(x[:8], PER_ROW)), rows[1], backend="triton")
    reference = [quantize_matrix(x, BLOCK_1X128).operand(), quantize_matrix(w, BLOCK_128X128).operand()]
    with pytest.raises(ValueError, match="backend 'triton' does not take operands of torch.float64"):
        product(*reference, backend="triton")
