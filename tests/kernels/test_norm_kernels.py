"""RMSNorm's kernels: the reference's bits, alone and fused with residual sum and casts; gradients to float64."""

import pytest
import torch
from kernel_checks import interpreted, needs_triton, padded, same

from octavo.kernels.cast_whole import cast_tensor, new_amax_bits
from octavo.kernels.norm import add_rms_norm, add_rms_norm_cast, rms_norm_backward, rms_norm_forward
from octavo.numerics.error import relative_error
from octavo.numerics.exact import mean_square
from octavo.numerics.fp8 import BLOCK_1X128, BLOCK_128X1, BLOCK_128X128, PER_ROW, quantize

NORM_EPS = 1e-6
SHAPES = [(3, 64), (9, 576), (5, 3, 128), (1, 4096), (7, 129)]  # real, heads, odd


def reference(x, gain):
    """Output and inverse root mean squares, as a CPU computes them."""
    inverse_rms = (mean_square(x) + NORM_EPS).rsqrt().float()
    return (x.float() * inverse_rms * gain).to(x.dtype), inverse_rms.squeeze(-1)


def random_rows(shape, device="cpu"):
    """Rows of very different magnitude, among them tiny ones, and a gain."""
    x = torch.randn(shape) * torch.exp(torch.randn(*shape[:-1], 1) * 6)
    x.view(-1, shape[-1])[-1] *= 1e-25 if device == "cpu" else 1e-36  # the interpreter converts subnormals wrongly
    return x.bfloat16().to(device), torch.randn(shape[-1]).to(device)


def check_forward(shape, device="cpu"):
    """The bits of the reference on a CPU, also of rows that are slices of wider ones, and of a row alone."""
    x, gain = random_rows(shape, device)
    sliced = torch.cat([x, x.flip(0)], dim=-1)[..., : shape[-1]]
    for rows in (x, sliced):
        y, inverse_rms = rms_norm_forward(rows, gain, NORM_EPS)
        wanted, wanted_inverse = reference(rows.cpu(), gain.cpu())
        assert y.abs().max() > 0.0
        assert same(y.cpu(), wanted) and same(inverse_rms.cpu(), wanted_inverse), (shape, rows.stride())
    assert same(rms_norm_forward(x[-1:], gain, NORM_EPS)[0], rms_norm_forward(x, gain, NORM_EPS)[0][-1:])


def check_backward(shape, device="cpu"):
    """dx is the float64 gradient rounded once, the gain's gradient is FP32's best, and both come out twice the same."""
    x, gain = torch.randn(shape).bfloat16().to(device), torch.randn(shape[-1]).to(device)
    grad_y = torch.randn(*shape[:-1], 2 * shape[-1]).bfloat16().to(device)[..., ::2]
    exact_x, exact_gain = x.double().requires_grad_(), gain.double().requires_grad_()
    y = exact_x * (exact_x.square().mean(dim=-1, keepdim=True) + NORM_EPS).rsqrt() * exact_gain
    y.backward(grad_y.double())
    inverse_rms = rms_norm_forward(x, gain, NORM_EPS)[1]
    grad_x, grad_gain = rms_norm_backward(x, gain, inverse_rms, grad_y)
    floor = relative_error(exact_x.grad.bfloat16(), exact_x.grad)
    error = relative_error(grad_x, exact_x.grad)
    assert error <= 1.01 * floor, f"{shape}: error {error:.3g}, floor {floor:.3g}"
    assert relative_error(grad_gain, exact_gain.grad) <= 5e-7
    again = rms_norm_backward(x, gain, inverse_rms, grad_y)
    assert torch.equal(again[0], grad_x) and torch.equal(again[1], grad_gain)
    past = torch.randn(shape).bfloat16().to(device)
    for added in (past, past[..., :1].expand(shape)):
        found = rms_norm_backward(x, gain, inverse_rms, grad_y, added)
        assert same(found[0], grad_x + added) and torch.equal(found[1], grad_gain)


def check_fused(T, D, device="cpu", rounding="none"):
    """The sum, the norm and the casts one by one give the same bits, with and without the transpose."""
    residual, gain = random_rows((T, D), device)
    delta = random_rows((T, D), device)[0]
    for added in (delta, None):
        h = residual if added is None else residual + added
        y, inverse_rms = reference(h.cpu(), gain.cpu())
        for quant_block, transposed in ((BLOCK_1X128, True), (BLOCK_1X128, False), (PER_ROW, False)):
            for pad_to in ((1, 1), (1, 128)):
                found = add_rms_norm_cast(
                    residual,
                    added,
                    gain,
                    NORM_EPS,
                    quant_block=quant_block,
                    transposed=transposed,
                    rounding=rounding,
                    pad_to=pad_to,
                )
                wanted = [h.cpu(), inverse_rms, *quantize(padded(y, *pad_to), quant_block, rounding)]
                if transposed:
                    wanted += [part.T for part in quantize(padded(y, *pad_to[::-1]), BLOCK_128X1, rounding)]
                wrong = [i for i, part in enumerate(wanted) if not same(found[i].cpu(), part)]
                assert not wrong, (T, D, added is None, quant_block, transposed, pad_to, wrong)
                assert transposed or (found.q_t is None and found.scale_t is None)


def check_sum(T, D, device="cpu"):
    """The sum, the norm and its largest magnitude; the cast by that is the cast without it."""
    residual, gain = random_rows((T, D), device)
    delta = random_rows((T, D), device)[0]
    for added in (delta, None):
        amax_bits = new_amax_bits(residual)
        h, y, inverse_rms = add_rms_norm(residual, added, gain, NORM_EPS, amax_bits)
        wanted_h = residual if added is None else residual + added
        wanted, wanted_inverse = reference(wanted_h.cpu(), gain.cpu())
        assert same(h, wanted_h) and same(y.cpu(), wanted) and same(inverse_rms.cpu(), wanted_inverse), (T, D)
        assert y.abs().max() > 0.0
        assert amax_bits.view(torch.float32).item() == y.abs().max(), (T, D)
        casts = cast_tensor(y, transposed=True, amax_bits=amax_bits), cast_tensor(y, transposed=True)
        assert all(map(same, *casts)), (T, D)
        assert same(add_rms_norm(residual, added, gain, NORM_EPS)[1], y)


@pytest.mark.parametrize("shape", SHAPES)
def test_backward_on_a_cpu(shape):
    check_backward(shape)


@pytest.mark.parametrize("T, D", [(5, 576), (130, 200), (1, 1)])
def test_fused_on_a_cpu(T, D):
    check_fused(T, D)
    check_sum(T, D)


def test_casts_that_are_not_fused_are_refused():
    x, gain = torch.zeros(2, 8), torch.zeros(8)
    for quant_block, transposed in ((PER_ROW, True), (BLOCK_128X128, False)):
        with pytest.raises(ValueError, match="add_rms_norm_cast casts per 1x128 block, .* Use cast_columns"):
            add_rms_norm_cast(x, x, gain, NORM_EPS, quant_block=quant_block, transposed=transposed)


@needs_triton
def test_norm_in_the_interpreter_equals_the_reference():
    interpreted(
        "from test_norm_kernels import *\n"
        "for shape in SHAPES:\n"
        "    check_forward(shape)\n"
        "    check_backward(shape)\n"
        "check_fused(5, 576)\n"
        "check_sum(5, 576)\n"
        "check_sum(130, 73)\n"
        "check_fused(130, 73, rounding='power_of_two')\n"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (300, 32, 128), (1000, 4096), (64, 5120), (16, 12288), (3000, 896)])
def test_norm_on_a_gpu_equals_the_reference_on_a_cpu(shape):
    check_forward(shape, "cuda")
    check_backward(shape, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("T, D", [(5, 576), (300, 576), (1000, 4096), (130, 129)])
def test_fused_on_a_gpu(T, D):
    check_fused(T, D, "cuda")
    check_sum(T, D, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_row_on_a_gpu_spoils_itself_only(bad):
    x, gain = random_rows((5, 576), "cuda")
    clean = rms_norm_forward(x, gain, NORM_EPS)[0]
    x[2, 9] = bad
    spoilt, others = rms_norm_forward(x, gain, NORM_EPS)[0], [0, 1, 3, 4]
    assert spoilt[2].isnan().all() and torch.equal(spoilt[others], clean[others])
    empty = rms_norm_forward(x[:0], gain, NORM_EPS)
    assert empty[0].shape == (0, 576) and rms_norm_backward(x[:0], gain, empty[1], x[:0])[1].abs().max() == 0.0
