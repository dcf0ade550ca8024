"""SwiGLU and its gradients against float64, and that no element knows its place in the tensor."""

import pytest
import torch

from octavo.kernels.swiglu import swiglu
from octavo.numerics.error import relative_error


def reference(gate_up):
    """The formula, by autograd, in the dtype of its input."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate / (1.0 + torch.exp(-gate)) * up


def run(function, x, grad_y):
    """Output and gradient."""
    x = x.detach().clone().requires_grad_()
    y = function(x)
    y.backward(grad_y)
    return y.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("T, F", [(1, 1), (7, 129), (33, 576)])
def test_forward_equals_float64(dtype, T, F):
    x = (torch.randn(T, 2 * F) * 4).to(dtype)
    expected = reference(x.double())
    # exp is off by at most one unit in the last place, 2**-23; a sum, a quotient and two products round by 2**-24.
    bound = expected.abs() * (2.0**-23 + 4.1 * 2.0**-24 + (1.01 * 2.0**-8 if dtype == torch.bfloat16 else 0.0))
    error = (swiglu(x).double() - expected).abs()
    assert expected.abs().min() > 0.0
    assert (error <= bound).all(), f"{(error / bound).max():.2f} times the bound"


def test_gate_comes_first():
    # silu(0) = 0, silu(x) = x for large x: (gate, up) = (0, 5), (100, 3).
    assert swiglu(torch.tensor([[0.0, 100.0, 5.0, 3.0]])).tolist() == [[0.0, 300.0]]


def test_fp32_gradient_is_as_good_as_autograd():
    # Floor: torch's own autograd of the formula in FP32.
    x, grad_y = torch.randn(40, 600) * 3, torch.randn(40, 300)
    _, exact = run(reference, x.double(), grad_y.double())
    floor, error = (relative_error(run(f, x, grad_y)[1], exact) for f in (reference, swiglu))
    assert exact.abs().min() > 0.0 and error <= 1.5 * floor, f"error {error:.3g}, floor {floor:.3g}"


def test_bf16_gradient_is_rounded_once():
    x, grad_y = (torch.randn(40, 600) * 3).bfloat16(), torch.randn(40, 300).bfloat16()
    _, exact = run(reference, x.double(), grad_y.double())
    _, grad = run(swiglu, x, grad_y)
    error, floor = relative_error(grad, exact), relative_error(exact.bfloat16(), exact)
    assert grad.dtype == torch.bfloat16
    assert error <= 1.01 * floor, f"error {error:.3g}, floor {floor:.3g}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("F", [1, 3, 8, 15, 64, 577])
def test_a_token_does_not_know_its_place(dtype, F):
    # torch.sigmoid and silu give other last bits in the last elements of a tensor than inside it.
    x = (torch.randn(70, 2 * F) * 4).to(dtype)
    whole = swiglu(x)
    assert whole.abs().max() > 0.0
    for T in range(1, 71):
        assert torch.equal(swiglu(x[:T]), whole[:T])
        assert torch.equal(swiglu(x[-T:]), whole[-T:])


def test_no_element_knows_its_place():
    # Every gate of 4096, alone and in short tensors of every length that a vector register leaves a rest of.
    gate, up = torch.randn(4096) * 4, torch.randn(4096)
    whole = swiglu(torch.cat([gate, up])[None])[0]
    for length in (1, 3, 5, 7, 9, 15, 17, 31, 33):
        pieces = zip(gate.split(length), up.split(length), strict=True)
        assert torch.equal(torch.cat([swiglu(torch.cat(piece)[None])[0] for piece in pieces]), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_inputs(dtype):
    x = torch.randn(30, 400).to(dtype)
    for view in (x[:, ::2], x[::2], x[:, 100:300], x.T, x.flip(1)):
        grad_y = torch.randn(len(view), view.shape[1] // 2).to(dtype)
        for got, expected in zip(run(swiglu, view, grad_y), run(swiglu, view.contiguous(), grad_y), strict=True):
            assert torch.equal(got, expected)
        assert torch.equal(swiglu(view), swiglu(view.contiguous()))


def test_extremes():
    # exp overflows below -88; silu is 0 there, and gate itself far above 0.
    gate = torch.tensor([-1e30, -1000.0, -100.0, 0.0, 100.0, 1e30])
    y, grad = run(swiglu, torch.cat([gate, torch.full((6,), 2.0)])[None], torch.ones(1, 6))
    assert y[0, :2].tolist() == [0.0, 0.0] and y[0, 3:].tolist() == [0.0, 200.0, 2 * gate[5].item()]
    assert abs(y[0, 2]) < 1e-38
    assert grad[0, :2].tolist() == [0.0, 0.0]  # d silu = sigmoid (1 + gate (1 - sigmoid))
    assert abs(grad[0, 2]) < 1e-38
    assert grad[0, 3:6].tolist() == [1.0, 2.0, 2.0]
    assert grad[0, 9:].tolist() == [0.0, 100.0, gate[5].item()]


def test_zero_empty_and_nan():
    y, grad = run(swiglu, torch.zeros(3, 8), torch.ones(3, 4))
    assert torch.equal(y, torch.zeros(3, 4)) and torch.equal(grad, torch.zeros(3, 8))
    y, grad = run(swiglu, torch.zeros(0, 8), torch.zeros(0, 4))
    assert y.shape == (0, 4) and grad.shape == (0, 8)
    x = torch.randn(3, 8)
    x[1, 2], x[2, 7] = torch.nan, torch.nan
    expected = torch.zeros(3, 4, dtype=torch.bool)
    expected[1, 2], expected[2, 3] = True, True
    assert torch.equal(swiglu(x).isnan(), expected)
