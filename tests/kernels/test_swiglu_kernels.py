"""SwiGLU's kernels: close to float64, and the same bits alone and fused with the casts of value and gradient."""

import pytest
import torch
from kernel_checks import interpreted, needs_triton, padded, same

from octavo.kernels.cast_whole import new_amax_bits
from octavo.kernels.swiglu import swiglu_backward, swiglu_backward_cast, swiglu_cast, swiglu_forward
from octavo.numerics.error import relative_error
from octavo.numerics.fp8 import BLOCK_1X128, BLOCK_128X1, PER_ROW, PER_TENSOR, quantize

SHAPES = [(1, 64), (7, 200), (130, 136)]
PADDINGS = ((1, 1), (1, 128))


def random_input(T, F, device="cpu", aligned=True):
    """gate_up, whose rows start at odd addresses if not aligned, and a gradient."""
    gate_up = (torch.randn(T, 2 * F + (not aligned)) * 4).bfloat16().to(device)[:, : 2 * F]
    return gate_up, torch.randn(T, F).bfloat16().to(device)


def check_values(T, F, device="cpu"):
    """The value and the gradient are those of float64, rounded once; the formula's own error is far smaller."""
    gate_up, grad_y = random_input(T, F, device)
    exact = gate_up.double().requires_grad_()
    gate, up = exact.chunk(2, dim=1)
    wanted = gate / (1.0 + torch.exp(-gate)) * up
    wanted.backward(grad_y.double())
    error = (swiglu_forward(gate_up).double() - wanted).abs()
    assert wanted.abs().max() > 0.0 and (error <= wanted.abs() * (2.0**-8 + 1e-5)).all()
    grad = swiglu_backward(gate_up, grad_y)
    error, floor = relative_error(grad, exact.grad), relative_error(exact.grad.bfloat16(), exact.grad)
    assert error <= 1.01 * floor, f"error {error:.3g}, floor {floor:.3g}"


def check_fused(T, F, device="cpu", aligned=True, rounding="none", paddings=PADDINGS):
    """The casts of `swiglu` and of its gradient are the same bits as when they are made one by one."""
    gate_up, grad_y = random_input(T, F, device, aligned)
    y, grad = swiglu_forward(gate_up).cpu(), swiglu_backward(gate_up, grad_y).cpu()
    for pad_to in paddings:
        for quant_block, transposed in ((BLOCK_1X128, True), (BLOCK_1X128, False), (PER_ROW, False)):
            found = swiglu_cast(
                gate_up, quant_block=quant_block, transposed=transposed, rounding=rounding, pad_to=pad_to
            )
            wanted = [*quantize(padded(y, *pad_to), quant_block, rounding)]
            if transposed:
                wanted += [part.T for part in quantize(padded(y, *pad_to[::-1]), BLOCK_128X1, rounding)]
            wrong = [i for i, part in enumerate(wanted) if not same(found[i].cpu(), part)]
            assert not wrong, (T, F, quant_block, transposed, pad_to, wrong)
        plain, columns = swiglu_backward_cast(gate_up, grad_y, rounding, pad_to=pad_to)
        halves = grad.chunk(2, dim=1)
        along_rows = [quantize(padded(half, *pad_to), BLOCK_1X128, rounding) for half in halves]
        along_columns = [quantize(padded(half, *pad_to[::-1]), BLOCK_128X1, rounding) for half in halves]
        for i in range(2):
            assert same(plain[i].cpu(), torch.cat([cast[i] for cast in along_rows], dim=1)), (T, F, pad_to, i)
            assert same(columns[i].cpu(), torch.cat([cast[i] for cast in along_columns], dim=1).T), (T, F, pad_to, i)


def check_amax(T, F, device="cpu"):
    """The largest magnitudes of the value and of each gradient, as they are made; no other bit changes."""
    gate_up, grad_y = random_input(T, F, device)
    one, two = new_amax_bits(gate_up), new_amax_bits(gate_up, 2)
    y, grad = swiglu_forward(gate_up, one), swiglu_backward(gate_up, grad_y, two)
    assert same(y, swiglu_forward(gate_up)) and same(grad, swiglu_backward(gate_up, grad_y))
    for bits, parts in ((one, [y]), (two, grad.chunk(2, dim=1))):
        wanted = [part.abs().max().item() for part in parts]
        assert bits.view(torch.float32).tolist() == wanted and grad.abs().max() > 0.0, (T, F)


@pytest.mark.parametrize("T, F", SHAPES)
def test_fused_on_a_cpu(T, F):
    check_fused(T, F)
    check_amax(T, F)


def test_what_is_not_fused_is_refused():
    with pytest.raises(ValueError, match="swiglu_cast casts per 1x128 block"):
        swiglu_cast(torch.zeros(2, 16), quant_block=PER_TENSOR)
    with pytest.raises(ValueError, match=r"multiple of 8; got 5. Pass pad_to=\(1, 128\)"):
        swiglu_backward_cast(torch.zeros(2, 10), torch.zeros(2, 5))


@needs_triton
def test_swiglu_in_the_interpreter():
    interpreted(
        "from test_swiglu_kernels import *\n"
        "for T, F in SHAPES:\n"
        "    check_values(T, F)\n"
        "    check_amax(T, F)\n"
        "check_fused(7, 200, aligned=False)\n"
        "check_fused(130, 136, rounding='power_of_two', paddings=PADDINGS[1:])\n"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("T, F", [*SHAPES, (300, 1000), (1000, 4864)])
def test_swiglu_on_a_gpu(T, F):
    check_values(T, F, "cuda")
    check_amax(T, F, "cuda")
    check_fused(T, F, "cuda")
    check_fused(T, F, "cuda", aligned=False, rounding="power_of_two")


@pytest.mark.gpu
def test_extremes_on_a_gpu():
    gate = torch.tensor([-1e30, -1000.0, -100.0, 0.0, 100.0, 1e30])
    gate_up = torch.cat([gate, torch.full((6,), 2.0)])[None].bfloat16().cuda()
    gate = gate_up[0, :6].tolist()
    assert swiglu_forward(gate_up)[0].tolist() == [0.0, 0.0, 0.0, 0.0, 200.0, 2 * gate[5]]
    grad = swiglu_backward(gate_up, torch.ones(1, 6).bfloat16().cuda())[0].tolist()
    assert grad == [0.0, 0.0, 0.0, 1.0, 2.0, 2.0, 0.0, 0.0, 0.0, 0.0, 100.0, gate[5]]
    gate_up[0, 2] = torch.nan
    assert swiglu_forward(gate_up)[0].isnan().tolist() == [False, False, True, False, False, False]
