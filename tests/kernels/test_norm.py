"""RMSNorm and its gradients against float64, and a row's independence of its batch."""

import pytest
import torch

from octavo.kernels.norm import rms_norm
from octavo.numerics.error import relative_error
from octavo.numerics.exact import product_bits

NORM_EPS = 1e-6


def reference(x, gain, norm_eps=NORM_EPS):
    """The formula in float64, by autograd."""
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + norm_eps) * gain


def run(function, x, gain, grad_y):
    """Output and gradients of x and gain."""
    x, gain = x.detach().clone().requires_grad_(), gain.detach().clone().requires_grad_()
    y = function(x, gain)
    y.backward(grad_y)
    return y.detach(), x.grad, gain.grad


def ours(x, gain):
    return rms_norm(x, gain, NORM_EPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 64, 129, 576])
def test_forward_equals_float64(dtype, width):
    x, gain = (torch.randn(9, width) * torch.rand(9, 1) * 10).to(dtype), torch.randn(width)
    expected = reference(x.double(), gain.double())
    # Rounding the root and two products to FP32: 3 * 2**-24. The grid of the mean square moves each x by at most
    # amax * 2**-bits, so the mean of squares by 2 amax mean|x| of it, and its root by half of that, relatively.
    size = x.double().abs()
    moved = 2.0 ** -product_bits(width) * size.amax(1, keepdim=True) * size.mean(1, keepdim=True)
    bound = expected.abs() * (3.1 * 2.0**-24 + 1.1 * moved / size.square().mean(1, keepdim=True))
    if dtype == torch.bfloat16:
        bound += expected.abs() * 1.01 * 2.0**-8
    error = (ours(x, gain).double() - expected).abs()
    assert expected.abs().min() > 0.0
    assert (error <= bound).all(), f"{(error / bound).max():.2f} times the bound"


def test_forward_by_hand():
    x = torch.tensor([[3.0, 4.0, 0.0, 0.0], [0.0, 0.0, 0.0, -6.0]])  # mean squares 25 / 4 and 9
    got = rms_norm(x, torch.tensor([1.0, 2.0, 1.0, 3.0]), 0.0)
    torch.testing.assert_close(
        got, torch.tensor([[1.2, 3.2, 0.0, 0.0], [0.0, 0.0, 0.0, -6.0]]), rtol=2.0**-22, atol=0.0
    )
    # norm_eps is added to the mean square: 1 / sqrt(1 + 3) of ones.
    assert rms_norm(torch.ones(1, 4), torch.ones(4), 3.0).tolist() == [[0.5] * 4]


def test_the_product_is_rounded_once():
    # BF16 of the whole product; rounding x / rms to BF16 first, as some models do, gives other numbers.
    x, gain = torch.randn(50, 64).bfloat16(), torch.randn(64)
    got = ours(x, gain)
    assert torch.equal(got, ours(x.float(), gain).bfloat16())
    twice = (gain * ours(x.float(), torch.ones(64)).bfloat16()).bfloat16()
    assert not torch.equal(got, twice)


@pytest.mark.parametrize("shape", [(40, 576), (7, 3, 64), (1, 8), (64,)])
def test_fp32_gradients_are_as_good_as_autograd(shape):
    # Floor: torch's own autograd of the formula in FP32.
    x, gain, grad_y = torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape)
    exact = run(reference, x.double(), gain.double(), grad_y.double())
    plain = run(reference, x, gain, grad_y)
    for name, got, floor, truth in zip(
        ("y", "grad_x", "grad_gain"), run(ours, x, gain, grad_y), plain, exact, strict=True
    ):
        error, noise = relative_error(got, truth), relative_error(floor, truth)
        assert truth.abs().max() > 0.0
        assert error <= 1.5 * max(noise, 2.0**-24), f"{name}: error {error:.3g}, plain FP32 {noise:.3g}"


@pytest.mark.parametrize("shape", [(40, 576), (7, 3, 64)])
def test_bf16_gradients_are_rounded_once(shape):
    # Floor: rounding the exact gradient to BF16. The gain's gradient stays FP32.
    x, gain, grad_y = torch.randn(shape).bfloat16(), torch.randn(shape[-1]), torch.randn(shape).bfloat16()
    _, grad_x, grad_gain = run(ours, x, gain, grad_y)
    _, exact_x, exact_gain = run(reference, x.double(), gain.double(), grad_y.double())
    assert grad_x.dtype == torch.bfloat16 and grad_gain.dtype == torch.float32
    error, floor = relative_error(grad_x, exact_x), relative_error(exact_x.bfloat16(), exact_x)
    assert error <= 1.01 * floor, f"error {error:.3g}, floor {floor:.3g}"
    _, _, plain_gain = run(reference, x.float(), gain, grad_y.float())
    error, floor = relative_error(grad_gain, exact_gain), relative_error(plain_gain, exact_gain)
    assert error <= 1.5 * floor, f"error {error:.3g}, floor {floor:.3g}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_batch(dtype):
    x, gain = torch.randn(1000, 577).to(dtype), torch.randn(577)
    whole = ours(x, gain)
    assert whole.abs().min() < whole.abs().max()
    for row in (0, 1, 15, 16, 500, 999):
        assert torch.equal(ours(x[row : row + 1], gain), whole[row : row + 1])
    assert torch.equal(ours(x[3:50], gain), whole[3:50])


def test_strided_inputs():
    x, gain = torch.randn(20, 3, 128), torch.randn(64)
    for view in (x[..., :64], x[..., ::2], x.transpose(0, 1)[..., 64:], x[::3, :, :64]):
        assert torch.equal(ours(view, gain), ours(view.contiguous(), gain))
        grad_y = torch.randn(view.shape)
        for got, expected in zip(
            run(ours, view, gain, grad_y), run(ours, view.contiguous(), gain, grad_y), strict=True
        ):
            assert torch.equal(got, expected)
    _, grad_x, _ = run(ours, x[..., :64], gain, torch.ones(1).expand(20, 3, 64))
    assert torch.equal(grad_x, run(ours, x[..., :64], gain, torch.ones(20, 3, 64))[1])


def test_zero_huge_and_empty():
    gain = torch.randn(64)
    y, grad_x, grad_gain = run(ours, torch.zeros(2, 64), gain, torch.ones(2, 64))
    assert torch.equal(y, torch.zeros(2, 64)) and torch.equal(grad_gain, torch.zeros(64))
    assert torch.equal(grad_x, (gain * torch.tensor(1 / NORM_EPS, dtype=torch.float64).sqrt().float()).expand(2, 64))
    x = torch.randn(2, 64)
    x = x / x.abs().max()
    huge = x * 2.0**127  # its squares overflow FP32; relative to them norm_eps is nothing
    assert torch.equal(ours(huge, gain), rms_norm(x, gain, 0.0))
    y, grad_x, grad_gain = run(ours, torch.zeros(0, 64), gain, torch.zeros(0, 64))
    assert y.shape == grad_x.shape == (0, 64) and torch.equal(grad_gain, torch.zeros(64))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_row_spoils_itself_only(bad):
    x, gain = torch.randn(5, 64), torch.randn(64)
    clean = ours(x, gain)
    x[2, 9] = bad
    got, others = ours(x, gain), [0, 1, 3, 4]
    assert got[2].isnan().all() and torch.equal(got[others], clean[others])
