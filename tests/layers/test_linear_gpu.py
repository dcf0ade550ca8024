"""FP8Linear on a GPU: every recipe against float64 products of the very operands that it declares."""

import pytest
import torch
from linear_layers import GEMMS, assert_is_product, hat, make_batch, make_layer, run, static_scale, weight_hat

from octavo.layers import linear
from octavo.numerics.error import relative_error
from octavo.numerics.recipe import get_recipe

pytestmark = pytest.mark.gpu
KERNELS = [name for name in GEMMS if name != "fp32"]
SHAPES = {
    "aligned": (256, {"q_proj": 256, "k_proj": 128, "v_proj": 128}),
    "ragged": (200, {"q_proj": 192, "k_proj": 64, "v_proj": 64}),
    "smollm2": (576, {"q_proj": 576, "k_proj": 192, "v_proj": 192}),
}


def close(got, exact, dtype):
    """Within a rounding to the dtype and what 14 bits of a tensor core's FP8 sums lose."""
    return relative_error(got, exact) <= (2.0**-8 if dtype == torch.bfloat16 else 2.0**-9)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("T", [128, 77, 1000])
def test_three_products_against_float64(name, shape, T):
    K, projections = SHAPES[shape]
    layer = make_layer(name, projections, bias=True, in_features=K).cuda()
    layer.requantize_()
    x, grad_y = (tensor.cuda() for tensor in make_batch(layer, T))
    y, grad_x, grad_weight, grad_bias = run(layer, x, grad_y)
    fprop, dgrad, wgrad = GEMMS[name]
    scale = static_scale(x) if name == "tensorwise_static" else None
    w = weight_hat(layer, name, fprop[1])
    if name == "w8a16":
        w = w.bfloat16().double()
    exact = hat(x, fprop[0], scale=scale) @ w.T + layer.bias.bfloat16().double()
    assert y.dtype == torch.bfloat16 and close(y, exact, y.dtype), relative_error(y, exact)
    exact = hat(grad_y, dgrad[0], layer.splits) @ weight_hat(layer, name, dgrad[1])
    assert close(grad_x, exact, grad_x.dtype), relative_error(grad_x, exact)
    pad = (lambda t: torch.nn.functional.pad(t, (0, 0, 0, -T % 128))) if wgrad[0] is not None else (lambda t: t)
    exact = hat(pad(grad_y), wgrad[0], layer.splits).T @ hat(pad(x), wgrad[1])
    assert grad_weight.dtype == torch.float32 and close(grad_weight, exact, torch.float32)
    assert relative_error(grad_bias, grad_y.double().sum(dim=0)) < 1e-5


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_bytes_are_those_of_a_cpu(name, shape, dtype):
    K, projections = SHAPES[shape]
    layer, there = (make_layer(name, projections, in_features=K) for _ in range(2))
    layer.weight.data, there.weight.data = layer.weight.data.to(dtype), layer.weight.data.to(dtype)
    layer.requantize_()
    there.cuda()
    there.requantize_()
    for buffer, value in layer.named_buffers():
        if buffer.startswith(linear.WEIGHTS) and value is not None:
            found = getattr(there, buffer).cpu()
            assert torch.equal(found.view(torch.uint8), value.view(torch.uint8)), buffer


@pytest.mark.parametrize("name", ["block128", "tensorwise"])
def test_the_transposed_weight_follows_every_update(name):
    layer = make_layer(name, {"o_proj": 256}, in_features=256).cuda()
    layer.requantize_()
    x, grad_y = (tensor.cuda() for tensor in make_batch(layer, 128))
    first = run(layer, x, grad_y)
    address = layer.weight_t.data_ptr()
    for _ in range(3):
        with torch.no_grad():
            layer.weight.add_(torch.randn_like(layer.weight) * 0.1)
        layer.requantize_()
        assert layer.weight_t.data_ptr() == address
        assert torch.equal(layer.weight_t.view(torch.uint8), layer.weight_q.view(torch.uint8).T)
        grad_x = run(layer, x, grad_y)[1]
        _, dgrad, _ = GEMMS[name]
        exact = hat(grad_y, dgrad[0]) @ weight_hat(layer, name, dgrad[1])
        assert close(grad_x, exact, torch.bfloat16) and not torch.equal(grad_x, first[1])


@pytest.mark.parametrize("name", ["block128", "rowwise", "tensorwise", "tensorwise_static", "w8a16"])
def test_one_cast_gives_what_two_give(monkeypatch, name):
    layer = make_layer(name, SHAPES["aligned"][1], in_features=256).cuda()
    layer.requantize_()
    x, grad_y = (tensor.cuda() for tensor in make_batch(layer, 256))
    once = run(layer, x, grad_y)
    monkeypatch.setattr(type(layer), "_casts_once", lambda *_: False)
    for mine, theirs in zip(once, run(layer, x, grad_y), strict=True):
        assert mine is theirs is None or torch.equal(mine, theirs)


def test_the_fp32_recipe_stays_on_the_reference():
    layer = make_layer("fp32").cuda()
    layer.requantize_()
    x, grad_y = (tensor.cuda() for tensor in make_batch(layer, 130))
    y = run(layer, x, grad_y)[0]
    assert_is_product(y.cpu(), x.cpu().double(), weight_hat(layer, "fp32", None).cpu().T, on_grid=True)


@pytest.mark.parametrize("name", ["block128", "w8a16", "rowwise", "tensorwise_static", "bf16"])
def test_rollout_rows_are_training_rows(name):
    layer = make_layer(get_recipe(name), SHAPES["smollm2"][1], bias=True, in_features=576).cuda()
    layer.requantize_()
    x = make_batch(layer, 700)[0].cuda()
    trained = layer(x.clone().requires_grad_()).detach()
    with torch.no_grad():
        for start, stop in ((0, 1), (3, 40), (100, 400), (0, 700)):
            assert torch.equal(layer(x[start:stop]), trained[start:stop]), (name, start, stop)
