"""Sums in float64 that no order, batch size, thread count or stride can change; and how exact they are."""

import math
from fractions import Fraction
from itertools import pairwise

import pytest
import torch

from octavo.numerics.exact import (
    K_BLOCK,
    MANTISSA_BITS,
    UNIT_BITS,
    block_edges,
    block_matmul,
    mean_square,
    power_of_two,
    product_bits,
    to_grid,
    unit_grid,
    unit_sum,
)
from octavo.numerics.fp8 import BLOCK_1X128, expand_scale, quantize


@pytest.fixture
def threads():
    """Set the number of threads; the old number returns afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def wide(*shape):
    """FP32 values over 24 binary orders of magnitude: an ordinary float64 sum of their products is inexact."""
    return torch.randn(shape) * 2.0 ** torch.randint(-12, 12, shape)


def weights(*shape):
    """Softmax weights in [0, 1] over 40 binary orders of magnitude; an ordinary float64 sum of them is inexact too."""
    return torch.exp(-28.0 * torch.rand(shape))


def grid_pair(M, N, K):
    """Two operands of a product over K, each row on a grid of its own within each block of K, and the block edges."""
    a, b = (
        torch.cat([to_grid(x, product_bits(K_BLOCK)) for x in wide(rows, K).split(K_BLOCK, 1)], 1) for rows in (M, N)
    )
    return a, b, block_edges(K)


def shuffled_within(edges):
    """A permutation of a dimension that leaves every element in its block."""
    return torch.cat([start + torch.randperm(stop - start) for start, stop in pairwise(edges)])


def test_power_of_two_is_exact():
    exponents = list(range(-1022, 1024))
    assert power_of_two(torch.tensor(exponents)).tolist() == [math.ldexp(1.0, e) for e in exponents]
    assert power_of_two(torch.tensor([3], dtype=torch.int32)).tolist() == [8.0]


@pytest.mark.parametrize("num_terms", [1, 2, 3, 64, 65, 128, 576, 4096, 2**18])
def test_product_bits_is_the_most_that_stays_exact(num_terms):
    bits = product_bits(num_terms)
    assert num_terms * 2 ** (2 * bits) <= 2**MANTISSA_BITS < 4 ** (bits + 1) * 2 ** (num_terms - 1).bit_length()


@pytest.mark.parametrize("size, block, edges", [(576, 128, [0, 128, 256, 384, 512, 576]), (128, 128, [0, 128])])
def test_block_edges(size, block, edges):
    assert block_edges(size, block) == edges
    assert block_edges(size, None) == [0, size]


def test_largest_block_sum_is_exact():
    # 128 products of the largest grid number, 2**23 steps: 2**53 exactly; one step less each is below it.
    for steps in (2**23, 2**23 - 1):
        a = torch.full((1, 128), float(steps), dtype=torch.float64)
        assert block_matmul(a, a, None, None, [0, 128]).item() == 128 * steps**2


@pytest.mark.parametrize("bits", [3, 12, 23])
def test_to_grid_equals_rational_rounding(bits):
    x = wide(20, 33)
    x[0], x[1, 5], x[2] = 0.0, -0.0, x[2].bfloat16().float()
    x[3] = torch.linspace(-1, 1, 33)  # many ties when bits are few
    got = to_grid(x, bits)
    for row, got_row in zip(x.tolist(), got.tolist(), strict=True):
        amax = max(map(abs, row))
        step = Fraction(2) ** (math.frexp(amax)[1] - bits)
        assert got_row == [float(round(Fraction(value) / step) * step) for value in row]  # round is half to even


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_to_grid_has_one_grid_per_sum(dim):
    x = wide(40, 30)
    got = to_grid(x, 10, dim)
    for i in range(x.shape[1 if dim == 0 else 0]):
        line = x[:, i] if dim == 0 else x[i]
        assert torch.equal(got[:, i] if dim == 0 else got[i], to_grid(line, 10))
    assert not torch.equal(got, x.double())


@pytest.mark.parametrize("bits", [10, 20, 23])
@pytest.mark.parametrize("amax", [1.0, 1.9921875, 3e38, 1.5 * 2.0**-100])
def test_to_grid_keeps_every_bf16_value_within_its_range(bits, amax):
    # All BF16 numbers from amax down to 2**(bits - 8) times less, of both signs.
    amax = torch.tensor(amax).bfloat16()
    every = torch.arange(2**15, dtype=torch.int16).view(torch.bfloat16)
    kept = every[(every <= amax) & (every.double() >= amax.double() * 2.0 ** (8 - bits))]
    assert len(kept) > 128 * (bits - 9)
    x = torch.cat([kept, -kept])
    assert torch.equal(to_grid(x, bits), x.double())
    # The bound is tight: among the next smaller octave below it some do change.
    below = every[(every.double() < amax.double() * 2.0 ** (7 - bits)) & (every > 0)][-128:]
    assert not torch.equal(to_grid(torch.cat([amax[None], below]), bits)[1:], below.double())


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0,)])
def test_to_grid_of_nothing(shape):
    assert to_grid(torch.zeros(shape), 23).shape == shape


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_bad_value_spoils_its_row_and_no_other(bad):
    x = wide(5, 200)
    x[3, 7] = bad
    row = torch.arange(5) == 3
    assert torch.equal(to_grid(x, 23).isnan(), row[:, None].expand(5, 200))
    assert torch.equal(mean_square(x).isnan(), row[:, None])
    good = wide(6, 200)
    a, b = (torch.cat([to_grid(part, 23) for part in y.split(128, 1)], 1) for y in (x, good))
    out = block_matmul(a, b, None, None, [0, 128, 200])
    assert torch.equal(out.isnan(), row[:, None].expand(5, 6))
    assert torch.equal(block_matmul(b, a, None, None, [0, 128, 200]).T.nan_to_num(7.0), out.nan_to_num(7.0))
    p = weights(5, 200)
    p[3, 7] = torch.nan
    assert torch.equal(unit_sum(p).isnan(), row)


def test_an_ordinary_sum_does_depend_on_the_order():
    # What the grids are for: without them these data tell one order from another, even in float64.
    for x in (wide(1000).double().square(), weights(1000).double()):
        assert len({x[torch.randperm(1000)].sum().item() for _ in range(50)}) > 1


def test_block_matmul_in_any_order():
    a, b, edges = grid_pair(9, 11, 300)
    out = block_matmul(a, b, None, None, edges)
    assert out.abs().min() > 0.0
    for _ in range(20):
        order = shuffled_within(edges)
        assert torch.equal(block_matmul(a[:, order], b[:, order], None, None, edges), out)


def test_fp8_products_in_any_order():
    # E4M3 codes need no grid, and a row of scales per block no special order.
    (q, scale), (w, w_scale) = (quantize(wide(rows, 300), BLOCK_1X128) for rows in (9, 11))
    a, b, edges = q.double(), w.double(), block_edges(300)
    out = block_matmul(a, b, scale, w_scale, edges)
    assert out.abs().min() > 0.0
    for _ in range(20):
        order = shuffled_within(edges)
        assert torch.equal(block_matmul(a[:, order], b[:, order], scale, w_scale, edges), out)


def test_mean_square_and_unit_sum_in_any_order():
    x, p = wide(7, 577), weights(7, 577)
    for _ in range(20):
        order = torch.randperm(577)
        assert torch.equal(mean_square(x[:, order]), mean_square(x))
        assert torch.equal(unit_sum(p[:, order]), unit_sum(p))


def test_a_row_does_not_depend_on_its_batch():
    a, b, edges = grid_pair(1000, 130, 576)
    x, p = wide(1000, 576), weights(1000, 576)
    out, squares, sums, grid = block_matmul(a, b, None, None, edges), mean_square(x), unit_sum(p), to_grid(x, 20)
    for row in range(0, 1000, 37):
        one = slice(row, row + 1)
        assert torch.equal(block_matmul(a[one], b, None, None, edges), out[one])
        assert torch.equal(mean_square(x[one]), squares[one])
        assert torch.equal(unit_sum(p[one]), sums[one])
        assert torch.equal(to_grid(x[one], 20), grid[one])
    assert torch.equal(block_matmul(a, b[3:4], None, None, edges), out[:, 3:4])


@pytest.mark.parametrize("num_threads", [2, 3, 4])
def test_threads_change_nothing(threads, num_threads):
    a, b, edges = grid_pair(200, 130, 576)
    x, p = wide(3, 2**16), weights(2, 2**17)

    def results():
        return block_matmul(a, b, None, None, edges), mean_square(x), unit_sum(p), to_grid(x, 20)

    threads(1)
    single = results()
    threads(num_threads)
    for several, one in zip(results(), single, strict=True):
        assert torch.equal(several, one)


def test_strides_change_nothing():
    a, b, edges = grid_pair(33, 17, 300)
    out = block_matmul(a, b, None, None, edges)
    columns_first = (y.T.contiguous().T for y in (a, b))
    assert torch.equal(block_matmul(*columns_first, None, None, edges), out)
    every_other = (torch.stack([y, -y], dim=2)[..., 0] for y in (a, b))
    assert torch.equal(block_matmul(*every_other, None, None, edges), out)
    x = wide(9, 600)
    for view in (x.T, x[:, ::2], x[::3], x.flip(1), x[:, 1:]):
        assert torch.equal(mean_square(view), mean_square(view.contiguous()))
        assert torch.equal(to_grid(view, 20), to_grid(view.contiguous(), 20))
        assert torch.equal(unit_sum(view.abs() / 2**16), unit_sum((view.abs() / 2**16).contiguous()))


@pytest.mark.parametrize("K", [1, 128, 129, 576])
def test_block_matmul_is_as_exact_as_its_grid(K):
    # A grid moves an element by at most half a step, amax * 2**-bits. The block sums are exact; adding B of them in
    # float64 is off by less than B * 2**-53 of the sum of absolute products.
    x, y = wide(4, K), wide(5, K)
    bits, edges = product_bits(K_BLOCK), block_edges(K)
    a, b = (torch.cat([to_grid(part, bits) for part in z.split(K_BLOCK, 1)], 1) for z in (x, y))
    out = block_matmul(a, b, None, None, edges)
    for i in range(4):
        for j in range(5):
            products = [Fraction(u) * Fraction(v) for u, v in zip(x[i].tolist(), y[j].tolist(), strict=True)]
            bound = len(edges) * 2.0**-53 * float(sum(map(abs, products)))
            for start, stop in pairwise(edges):
                u, v = x[i, start:stop].double().abs(), y[j, start:stop].double().abs()
                moved = 2.0**-bits * (u.sum() * v.max() + v.sum() * u.max())
                bound += (moved + 2.0 ** (-2 * bits) * (stop - start) * u.max() * v.max()).item()
            error = abs(float(Fraction(out[i, j].item()) - sum(products)))
            assert error <= bound, f"error {error:.3g}, bound {bound:.3g}"


def test_block_matmul_of_bf16_is_exact():
    # Values within 2**15 of each other keep all their bits, and one block rounds nothing.
    x, y = (torch.randn(3, 128).clamp(min=2.0**-8).bfloat16() for _ in range(2))
    out = block_matmul(to_grid(x, 23), to_grid(y, 23), None, None, [0, 128])
    for i in range(3):
        for j in range(3):
            products = [Fraction(u) * Fraction(v) for u, v in zip(x[i].tolist(), y[j].tolist(), strict=True)]
            assert Fraction(out[i, j].item()) == sum(products) != 0


def test_block_matmul_multiplies_by_one_fp32_product_of_scales():
    a, b = torch.tensor([[3.0, 5.0]]).double(), torch.tensor([[7.0, 11.0]]).double()
    a_scale, b_scale = torch.tensor([[0.1, 0.3]]), torch.tensor([[0.7, 0.9]])
    both = [(a_scale[0, i] * b_scale[0, i]).item() for i in range(2)]  # rounded to FP32
    assert both[0] != a_scale[0, 0].item() * b_scale[0, 0].item()
    assert block_matmul(a, b, a_scale, b_scale, [0, 1, 2]).item() == 21.0 * both[0] + 55.0 * both[1]


def test_block_matmul_adds_blocks_in_ascending_order():
    # 1 + 2**-53 + 2**-53 is 1 from the left, and 1 + 2**-52 if the last two are added first.
    a = torch.tensor([[1.0, 2.0**-53, 2.0**-53]], dtype=torch.float64)
    assert block_matmul(a, torch.ones_like(a), None, None, [0, 1, 2, 3]).item() == 1.0
    assert block_matmul(a.flip(1), torch.ones_like(a), None, None, [0, 1, 2, 3]).item() == 1.0 + 2.0**-52


def test_quantised_block_matmul_equals_fsum():
    (q, scale), (w, w_scale) = (quantize(torch.randn(rows, 200), BLOCK_1X128) for rows in (2, 3))
    out = block_matmul(q.double(), w.double(), scale, w_scale, block_edges(200))
    wide_scale = expand_scale(scale, (2, 200), BLOCK_1X128), expand_scale(w_scale, (3, 200), BLOCK_1X128)
    for i in range(2):
        for j in range(3):
            both = (wide_scale[0][i] * wide_scale[1][j]).double()
            terms = (q[i].double() * w[j].double() * both).tolist()
            exact = math.fsum(terms)
            # Off by a rounding of each term here, of two products and one sum there: 2**-53 each.
            bound = 4 * 2.0**-53 * sum(map(abs, terms))
            assert exact != 0.0 and abs(out[i, j].item() - exact) <= bound, f"{out[i, j].item() - exact}, bound {bound}"


@pytest.mark.parametrize("width", [1, 64, 576, 5000])
def test_mean_square_is_as_exact_as_its_grid(width):
    x = wide(3, width)
    step = x.double().abs().amax(dim=1) * 2.0 ** -product_bits(width)
    for row, got, moved in zip(x.tolist(), mean_square(x).tolist(), step.tolist(), strict=True):
        exact = sum(Fraction(value) ** 2 for value in row) / width
        bound = 2 * moved * sum(map(abs, row)) / width + moved**2 + float(exact) * 2.0**-52
        error = abs(float(Fraction(got[0]) - exact))
        assert exact > 0 and error <= bound, f"error {error:.3g}, bound {bound:.3g}"
    whole = torch.tensor([[3.0, 4.0, 0.0, -12.0]])
    assert mean_square(whole).item() == 169 / 4


def test_unit_sum_is_as_exact_as_its_grid():
    p = weights(4, 5000)
    for row, got in zip(p.tolist(), unit_sum(p).tolist(), strict=True):
        error, bound = abs(got - math.fsum(row)), len(row) * 2.0 ** (-UNIT_BITS - 1)
        assert got > 1.0 and error <= bound, f"error {error:.3g}, bound {bound:.3g}"
    assert unit_grid(torch.tensor([1.0, 0.5, 2.0**-35, 2.0**-37, 0.0])).tolist() == [2.0**35, 2.0**34, 1.0, 0.0, 0.0]


def test_unit_sum_holds_a_vocabulary():
    ones = torch.ones(2**18)
    ones[1:] -= 2.0**-24
    assert unit_sum(ones).item() == 2**18 - (2**18 - 1) * 2.0**-24
    with pytest.raises(AssertionError, match="unit_sum of 262145 terms"):
        unit_sum(torch.ones(2**18 + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("function", [torch.exp, torch.log, torch.rsqrt, torch.reciprocal, torch.cos, torch.sin])
def test_an_elementwise_function_does_not_know_its_place(function, dtype):
    # A vectorised function may treat the last elements of a tensor otherwise than the rest; torch.sigmoid does, which
    # is why it is not used. The forward pass relies on these not doing so, whatever lies beside an element.
    x = torch.rand(2048, dtype=dtype) * 8 + 2.0**-10
    x[::2] *= 2.0**-6
    if function is torch.exp:
        x = -x
    whole = function(x)
    for length in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 63, 127):
        pieces = torch.cat([function(piece.clone()) for piece in x.split(length)])
        assert torch.equal(pieces, whole), f"{(pieces != whole).sum()} of 2048 differ in tensors of {length}"
    for offset in range(1, 33):
        moved = function(torch.cat([x.new_ones(offset), x]))
        assert torch.equal(moved[offset:], whole)
