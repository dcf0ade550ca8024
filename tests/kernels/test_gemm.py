"""Matrix products of quantised and BF16 operands against loops over float64, and against the noise of their inputs."""

from itertools import pairwise

import pytest
import torch

from octavo.kernels.gemm import gemm
from octavo.kernels.operands import QuantizedMatrix, grid_operand, quantize_matrix, split_edges
from octavo.numerics.error import relative_error
from octavo.numerics.fp8 import (
    BLOCK_1X128,
    BLOCK_128X1,
    BLOCK_128X128,
    PER_COLUMN,
    PER_ROW,
    PER_TENSOR,
    dequantize,
    expand_scale,
    quantize,
)

# Left and right blocks of a product over K, as FProp, DGrad (right transposed) and WGrad (both transposed) use them.
FPROP = {
    "block128": (BLOCK_1X128, BLOCK_128X128),
    "rowwise": (PER_ROW, PER_ROW),
    "tensorwise": (PER_TENSOR, PER_TENSOR),
}
every_fprop = pytest.mark.parametrize("left, right", FPROP.values(), ids=FPROP)
# One projection; ragged fused ones; fused widths of SmolLM2 (9 query heads, 3 KV heads of 64).
SPLITS = [[200], [192, 64, 64], [576, 192, 192], [1, 129]]


def quantize_pieces(x, quant_block, splits, dim):
    """Each projection on its own: codes [M, K] float64 and one scale per element, [M, K] fp32."""
    codes, scales = [], []
    for piece in x.split(splits, dim=dim):
        q, scale = quantize(piece, quant_block)
        codes.append(q.double())
        scales.append(expand_scale(scale, piece.shape, quant_block))
    return torch.cat(codes, dim), torch.cat(scales, dim)


def slow_product(a, a_scale, b, b_scale, edges):
    """a [M, K] @ b [N, K]^T, one element at a time: codes and scales per element -> [M, N] float64."""
    out = torch.zeros(len(a), len(b), dtype=torch.float64)
    for m in range(len(a)):
        for n in range(len(b)):
            for start, stop in pairwise(edges):
                exact = (a[m, start:stop] * b[n, start:stop]).sum()  # multiples of 2**-18 below 2**25
                out[m, n] += exact * (a_scale[m, start] * b_scale[n, start]).double()  # scales multiplied in FP32
    return out


def blocks_of(edges, width=128):
    """Boundaries of 128-wide blocks that restart at each of the given boundaries."""
    return sorted({edge for start, stop in pairwise(edges) for edge in [*range(start, stop, width), stop]})


@pytest.mark.parametrize("K", [576, 128, 129, 1])
@every_fprop
def test_fprop_equals_loops(left, right, K):
    x, w = torch.randn(5, K), torch.randn(130, K) * torch.rand(130, 1)
    edges = blocks_of([0, K]) if left == BLOCK_1X128 else [0, K]
    expected = slow_product(*quantize_pieces(x, left, [5], 0), *quantize_pieces(w, right, [130], 0), edges)
    got = gemm(quantize_matrix(x, left).operand(), quantize_matrix(w, right).operand())
    assert expected.abs().min() > 0.0
    assert torch.equal(got, expected)


@pytest.mark.parametrize("splits", SPLITS)
@every_fprop
def test_fused_fprop_equals_each_projection(left, right, splits):
    x, w = torch.randn(3, 300), torch.randn(sum(splits), 300) * torch.rand(sum(splits), 1) * 4
    activation = quantize_matrix(x, left).operand()
    fused = gemm(activation, quantize_matrix(w, right, row_splits=splits).operand())
    alone = [gemm(activation, quantize_matrix(piece, right).operand()) for piece in w.split(splits)]
    assert fused.abs().min() > 0.0
    assert torch.equal(fused, torch.cat(alone, dim=1))


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize(
    "left, right", [(BLOCK_1X128, BLOCK_128X128), (PER_ROW, PER_COLUMN), (PER_TENSOR, PER_TENSOR)], ids=FPROP
)
def test_fused_dgrad_equals_loops(left, right, splits):
    # dY [T, N] @ W [N, K]: N is reduced, and its blocks restart at each projection.
    N = sum(splits)
    grad_y, w = torch.randn(3, N) * torch.rand(N), torch.randn(N, 7) * torch.rand(N, 1)
    edges = [0, *torch.tensor(splits).cumsum(0).tolist()]
    edges = blocks_of(edges) if left == BLOCK_1X128 else edges
    codes, scale = quantize_pieces(w, right, splits, 0)
    expected = slow_product(*quantize_pieces(grad_y, left, splits, 1), codes.T, scale.T, edges)
    w_hat = quantize_matrix(w, right, row_splits=splits)
    got = gemm(quantize_matrix(grad_y, left, column_splits=splits).operand(), w_hat.T.operand())
    assert expected.abs().min() > 0.0
    assert torch.equal(got, expected)


@pytest.mark.parametrize("splits", [[200], [96, 33], [1, 129]])
@pytest.mark.parametrize("quant_block", [BLOCK_128X1, PER_COLUMN, PER_TENSOR], ids=FPROP)
def test_fused_wgrad_equals_loops(quant_block, splits):
    # dY^T X over 300 tokens, blocks of 128 tokens.
    grad_y, x = torch.randn(300, sum(splits)) * torch.rand(300, 1), torch.randn(300, 5)
    edges = [0, 128, 256, 300] if quant_block == BLOCK_128X1 else [0, 300]
    (a, a_scale), (b, b_scale) = (
        quantize_pieces(grad_y, quant_block, splits, 1),
        quantize_pieces(x, quant_block, [5], 1),
    )
    expected = slow_product(a.T, a_scale.T, b.T, b_scale.T, edges)
    left = quantize_matrix(grad_y, quant_block, column_splits=splits)
    got = gemm(left.T.operand(), quantize_matrix(x, quant_block).T.operand())
    assert expected.abs().min() > 0.0
    assert torch.equal(got, expected)


def test_splits_restart_blocks():
    # The second projection is far quieter. On its own it keeps its precision; a block that straddled would lose it.
    w = torch.cat([torch.randn(192, 128) * 1e6, torch.randn(64, 128)])
    matrix = quantize_matrix(w, BLOCK_128X128, row_splits=[192, 64])
    assert matrix.scale.shape == (3, 1) and matrix.row_edges == [0, 128, 192, 256]
    expected = torch.stack([part.abs().amax() / 448.0 for part in (w[:128], w[128:192], w[192:])])
    assert torch.equal(matrix.scale[:, 0], expected)
    straddling = quantize_matrix(w, BLOCK_128X128).dequantize()[192:]
    assert relative_error(matrix.dequantize()[192:], w[192:]) < 2.0**-4 < relative_error(straddling, w[192:])


@pytest.mark.parametrize(
    "splits, block, edges",
    [
        ([192, 192], 128, [0, 128, 192, 320, 384]),
        ([128, 128], 128, [0, 128, 256]),
        ([192, 64, 64], 128, [0, 128, 192, 256, 320]),
        ([5, 2], 1, [0, 1, 2, 3, 4, 5, 6, 7]),
        ([5, 2], None, [0, 5, 7]),
        ([300], 128, [0, 128, 256, 300]),
    ],
)
def test_split_edges(splits, block, edges):
    assert list(split_edges(splits, block)) == edges


@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("quant_block", [BLOCK_1X128, BLOCK_128X1, BLOCK_128X128, PER_ROW, PER_COLUMN, PER_TENSOR])
def test_dequantize_and_transpose(quant_block, splits):
    w = torch.randn(sum(splits), 150) * torch.rand(sum(splits), 1)
    matrix = quantize_matrix(w, quant_block, row_splits=splits)
    pieces = [dequantize(*quantize(piece, quant_block), quant_block) for piece in w.split(splits)]
    assert torch.equal(matrix.dequantize(), torch.cat(pieces))
    assert relative_error(matrix.dequantize(), w) < 2.0**-4  # half a step of three mantissa bits
    assert torch.equal(matrix.T.dequantize(), matrix.dequantize().T)
    assert matrix.T.q.data_ptr() == matrix.q.data_ptr()
    sideways = quantize_matrix(w.T, quant_block[::-1], column_splits=splits)
    assert torch.equal(sideways.dequantize(), matrix.dequantize().T)


def test_a_given_scale_is_used_as_it_is():
    x = torch.tensor([[1.0, -3.0, 1000.0]])
    matrix = quantize_matrix(x, PER_TENSOR, scale=torch.tensor([[0.5]]))
    assert matrix.q.float().tolist() == [[2.0, -6.0, 448.0]]
    assert matrix.dequantize().tolist() == [[1.0, -3.0, 224.0]]
    w = quantize_matrix(torch.tensor([[448.0, 1.0, 2.0]]), PER_TENSOR)
    assert gemm(matrix.operand(), w.operand()).item() == 448.0 - 3.0 + 448.0


def test_power_of_two_rounding_reaches_every_projection():
    matrix = quantize_matrix(torch.randn(100, 200), BLOCK_128X128, "power_of_two", row_splits=[50, 50])
    assert matrix.scale.shape == (2, 2) and (torch.frexp(matrix.scale).mantissa == 0.5).all()


@pytest.mark.parametrize(
    "left, right, transpose_left, transpose_right",
    [
        (BLOCK_1X128, BLOCK_128X128, False, False),
        (BLOCK_1X128, BLOCK_128X128, False, True),
        (BLOCK_128X1, BLOCK_128X1, True, True),
        (PER_ROW, PER_ROW, False, False),
        (PER_ROW, PER_COLUMN, False, True),
        (PER_COLUMN, PER_COLUMN, True, True),
        (PER_TENSOR, PER_TENSOR, False, False),
    ],
)
def test_error_is_that_of_the_inputs(left, right, transpose_left, transpose_right):
    # The product may be off by 1.5 times what quantising its inputs alone does to an exact product.
    a, b = torch.randn(90, 576).bfloat16(), torch.randn(70, 576)
    a_hat = quantize_matrix(a.T if transpose_left else a, left)
    b_hat = quantize_matrix(b.T if transpose_right else b, right)
    a_hat, b_hat = a_hat.T if transpose_left else a_hat, b_hat.T if transpose_right else b_hat
    truth = a.double() @ b.double().T
    floor = relative_error(a_hat.dequantize().double() @ b_hat.dequantize().double().T, truth)
    error = relative_error(gemm(a_hat.operand(), b_hat.operand()).float().bfloat16(), truth)
    assert 0.01 < floor and error <= 1.5 * floor, f"error {error:.4f}, floor {floor:.4f}"


def test_bf16_product_is_exact_but_for_block_sums():
    # Values within 2**15 of each other: each block is exact, so only the additions of 5 blocks round, by 2**-53 each.
    a, b = (torch.randn(n, 576).sign().mul(torch.rand(n, 576) + 0.01).bfloat16() for n in (7, 9))
    got, truth = gemm(grid_operand(a), grid_operand(b)), a.double() @ b.double().T
    bound = 2 * 576 * 2.0**-53 * (a.double().abs() @ b.double().abs().T)  # of the reference's own order
    assert truth.abs().min() > 0.0
    assert ((got - truth).abs() <= bound).all(), (got - truth).abs().max()
    blocks = [gemm(grid_operand(u), grid_operand(v)) for u, v in zip(a.split(128, 1), b.split(128, 1), strict=True)]
    total = blocks[0]
    for block in blocks[1:]:
        total = total + block
    assert torch.equal(got, total)  # blocks restart every 128, added in ascending order


def test_fp32_product_is_as_exact_as_fp32():
    # A grid of 23 bits below the amax of each block; bound as in the tests of numerics.exact.
    a, b = torch.randn(7, 300), torch.randn(9, 300)
    truth = a.double() @ b.double().T
    bound = 300 * 2.0**-53 * (a.double().abs() @ b.double().abs().T)
    for u, v in zip(a.double().abs().split(128, 1), b.double().abs().split(128, 1), strict=True):
        u_max, v_max = u.amax(1, keepdim=True), v.amax(1, keepdim=True)
        bound += 2.0**-23 * (u.sum(1, keepdim=True) * v_max.T + u_max * v.sum(1)) + 128 * 2.0**-46 * u_max * v_max.T
    error = (gemm(grid_operand(a), grid_operand(b)) - truth).abs()
    assert (error <= bound).all(), (error / bound).max()


def left_operands(x):
    """X [M, K] as each batch-invariant recipe multiplies it, and the right block that goes with it."""
    static = torch.tensor([[0.01]])
    return {
        "bf16": (grid_operand(x), None),
        "fp32": (grid_operand(x.float() * 1.1), None),
        "block128": (quantize_matrix(x, BLOCK_1X128).operand(), BLOCK_128X128),
        "rowwise": (quantize_matrix(x, PER_ROW).operand(), PER_ROW),
        "tensorwise_static": (quantize_matrix(x, PER_TENSOR, scale=static).operand(), PER_TENSOR),
    }


@pytest.mark.parametrize("K", [576, 64])
def test_a_row_does_not_depend_on_its_batch(K):
    x, w = torch.randn(70, K).bfloat16(), torch.randn(96, K)
    whole = {}
    for name, (left, right) in left_operands(x).items():
        weight = grid_operand(w.bfloat16()) if right is None else quantize_matrix(w, right).operand()
        whole[name] = weight, gemm(left, weight)
        assert whole[name][1].abs().max() > 1.0
    for M in range(1, 71):
        rows = slice(70 - M, 70)  # so that a row's place in the batch changes too
        for name, (left, _) in left_operands(x[rows]).items():
            weight, expected = whole[name]
            assert torch.equal(gemm(left, weight), expected[rows]), f"{name}, M = {M}"


def test_products_in_any_order():
    # FP32 over 40 binary orders of magnitude: in float64 without the grid, sums depend on the order of K.
    x, w = (torch.randn(rows, 300) * 2.0 ** torch.randint(-20, 20, (rows, 300)) for rows in (9, 11))
    whole = gemm(grid_operand(x), grid_operand(w))
    for _ in range(20):
        order = torch.cat([start + torch.randperm(stop - start) for start, stop in pairwise([0, 128, 256, 300])])
        assert torch.equal(gemm(grid_operand(x[:, order]), grid_operand(w[:, order])), whole)
    x, w = x[:, :128].double(), w[:, :128].double()
    order = torch.randperm(128)
    assert not torch.equal(x[:, order] @ w[:, order].T, x @ w.T)


def test_a_tensorwise_row_does_depend_on_its_batch():
    x, w = torch.randn(70, 576), quantize_matrix(torch.randn(96, 576), PER_TENSOR).operand()
    alone, together = (gemm(quantize_matrix(y, PER_TENSOR).operand(), w)[0] for y in (x[:1], x))
    assert not torch.equal(alone, together)


@pytest.mark.parametrize("num_threads", [2, 4])
def test_threads_change_nothing(num_threads):
    before = torch.get_num_threads()
    x, w = torch.randn(300, 576).bfloat16(), torch.randn(200, 576)
    operands = [(quantize_matrix(x, BLOCK_1X128).operand(), quantize_matrix(w, BLOCK_128X128).operand())]
    operands.append((grid_operand(x), grid_operand(w)))
    try:
        torch.set_num_threads(1)
        single = [gemm(*pair) for pair in operands]
        torch.set_num_threads(num_threads)
        for pair, one in zip(operands, single, strict=True):
            assert torch.equal(gemm(*pair), one)
    finally:
        torch.set_num_threads(before)


def test_strided_inputs():
    x, w = torch.randn(576, 20).bfloat16().T, torch.randn(40, 1152)[:, ::2]
    assert torch.equal(
        gemm(grid_operand(x), grid_operand(w)), gemm(grid_operand(x.contiguous()), grid_operand(w.contiguous()))
    )
    got = gemm(quantize_matrix(x, BLOCK_1X128).operand(), quantize_matrix(w, BLOCK_128X128).operand())
    x, w = x.contiguous(), w.contiguous()
    same = gemm(quantize_matrix(x, BLOCK_1X128).operand(), quantize_matrix(w, BLOCK_128X128).operand())
    assert got.abs().max() > 1.0 and torch.equal(got, same)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_row_spoils_itself_only(bad):
    x, w = torch.randn(6, 300).bfloat16(), torch.randn(10, 300)
    clean = left_operands(x)
    x[2, 290] = bad
    for name, (left, right) in left_operands(x).items():
        weight = grid_operand(w) if right is None else quantize_matrix(w, right).operand()
        got, expected = gemm(left, weight), gemm(clean[name][0], weight)
        assert got[2].isnan().all() or (name == "tensorwise_static" and bad == torch.inf)  # a static scale saturates
        others = [0, 1, 3, 4, 5]
        assert torch.equal(got[others], expected[others]), name


@every_fprop
def test_zero_huge_and_empty(left, right):
    w = quantize_matrix(torch.randn(30, 200), right).operand()
    zeros = gemm(quantize_matrix(torch.zeros(4, 200), left).operand(), w)
    assert torch.equal(zeros, torch.zeros_like(zeros))
    x = torch.randn(4, 200)
    huge = gemm(quantize_matrix(x * 2.0**120, left).operand(), w)  # a power of two moves every scale exactly
    assert torch.equal(huge, gemm(quantize_matrix(x, left).operand(), w) * 2.0**120)
    assert gemm(quantize_matrix(torch.zeros(0, 200), left).operand(), w).shape == (0, 30)
    assert gemm(grid_operand(torch.zeros(0, 200)), grid_operand(x)).shape == (0, 4)


def test_operands_that_do_not_fit_are_refused():
    x, w = torch.randn(4, 256), torch.randn(5, 256)
    with pytest.raises(AssertionError, match=r"K blocks differ: \[0, 128, 256\] and \[0, 256\]"):
        gemm(quantize_matrix(x, BLOCK_1X128).operand(), quantize_matrix(w, PER_ROW).operand())
    with pytest.raises(AssertionError, match="one operand is FP8 and the other is not"):
        gemm(grid_operand(x), quantize_matrix(w, BLOCK_128X128).operand())


def test_operand_of_a_hand_made_matrix():
    # Two row blocks, two column blocks: 2x2 scales over a 3x3 matrix of ones.
    ones = torch.ones(3, 3).to(torch.float8_e4m3fn)
    matrix = QuantizedMatrix(ones, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [0, 2, 3], [0, 1, 3], (2, 2))
    assert matrix.dequantize().tolist() == [[1.0, 2.0, 2.0], [1.0, 2.0, 2.0], [3.0, 4.0, 4.0]]
    assert matrix.operand().scale.tolist() == [[1.0, 2.0], [1.0, 2.0], [3.0, 4.0]]
    assert matrix.T.operand().scale.tolist() == [[1.0, 3.0], [2.0, 4.0], [2.0, 4.0]]
