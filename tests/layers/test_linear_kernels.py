"""What FP8Linear hands to kernels on a GPU, on any machine: their products in float64, with the layouts they take."""

import copy
from dataclasses import replace

import kernel_products
import pytest
import torch
from linear_layers import GEMMS, hat, make_batch, make_layer, run, static_scale, weight_hat

from octavo.kernels import weights
from octavo.kernels.operands import quantize_matrix
from octavo.layers import linear
from octavo.layers.linear import FP8Linear
from octavo.numerics.error import relative_error
from octavo.numerics.recipe import get_recipe

KERNELS = [name for name in GEMMS if name != "fp32"]
SHAPES = {
    "aligned": (256, {"q_proj": 256, "k_proj": 128, "v_proj": 128}),
    "ragged": (200, {"q_proj": 192, "k_proj": 64, "v_proj": 64}),
    "narrow": (72, {"q_proj": 24, "k_proj": 24, "v_proj": 8}),
    "odd": (51, {"q_proj": 33, "k_proj": 7, "v_proj": 7}),
}


@pytest.fixture
def called(monkeypatch):
    """As on a GPU; the names of the back ends that are called."""
    return kernel_products.as_on_gpu(monkeypatch)


def close(got, exact):
    return relative_error(got, exact) < (2.0**-8 if got.dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("T", [1, 77, 128, 300])
def test_three_products_of_what_is_declared(called, name, shape, T):
    K, projections = SHAPES[shape]
    layer = make_layer(name, projections, bias=True, in_features=K)
    x, grad_y = make_batch(layer, T)
    y, grad_x, grad_weight, _ = run(layer, x, grad_y)
    fprop, dgrad, wgrad = GEMMS[name]
    scale = static_scale(x) if name == "tensorwise_static" else None
    w = weight_hat(layer, name, fprop[1])
    w = w.bfloat16().double() if name == "w8a16" else w
    assert close(y, hat(x, fprop[0], scale=scale) @ w.T + layer.bias.bfloat16().double())
    assert close(grad_x, hat(grad_y, dgrad[0], layer.splits) @ weight_hat(layer, name, dgrad[1]))
    pad = (lambda t: torch.nn.functional.pad(t, (0, 0, 0, -T % 128))) if wgrad[0] is not None else (lambda t: t)
    assert close(grad_weight, hat(pad(grad_y), wgrad[0], layer.splits).T @ hat(pad(x), wgrad[1]))
    assert called or name == "bf16"


@pytest.mark.parametrize("name", ["block128", "w8a16", "tensorwise"])
def test_the_transposed_weight_is_written_in_place_and_seen(called, name):
    layer = make_layer(name, SHAPES["aligned"][1], in_features=256)
    x, grad_y = make_batch(layer, 128)
    before = run(layer, x, grad_y)
    address = layer.weight_t.data_ptr()
    with torch.no_grad():
        layer.weight.mul_(1.5).add_(torch.randn_like(layer.weight) * 0.1)
    layer.requantize_()
    assert layer.weight_t.data_ptr() == address
    assert torch.equal(layer.weight_t.view(torch.uint8), layer.weight_q.view(torch.uint8).T)
    y, grad_x = run(layer, x, grad_y)[:2]
    fprop, dgrad, _ = GEMMS[name]
    w = weight_hat(layer, name, fprop[1])
    assert close(y, hat(x, fprop[0]) @ (w.bfloat16().double() if name == "w8a16" else w).T)
    assert close(grad_x, hat(grad_y, dgrad[0], layer.splits) @ weight_hat(layer, name, dgrad[1]))
    assert not torch.equal(y, before[0]) and not torch.equal(grad_x, before[1])


WRITTEN = {
    "aligned": SHAPES["aligned"],
    "ragged": (208, {"q_proj": 192, "k_proj": 72, "v_proj": 72}),
    "ragged at the end": (16, {"gate_proj": 128, "up_proj": 200}),
}


def with_new_masters(name, shape, dtype=torch.float32):
    """A layer that has made ready what it multiplies, and whose masters then changed; one row is all zeros."""
    K, projections = WRITTEN[shape]
    layer = make_layer(name, projections, in_features=K)
    if layer.recipe.dgrad is not None:
        run(layer, *make_batch(layer, 128))
    with torch.no_grad():
        layer.weight.mul_(1.5).add_(torch.randn_like(layer.weight) * 0.1)[7] = 0.0
        layer.weight.data = layer.weight.data.to(dtype)
    return layer


@pytest.mark.parametrize("shape", WRITTEN)
@pytest.mark.parametrize("name, block", [("block128", (128, 128)), ("tensorwise", (None, None))])
def test_bytes_and_their_transpose_are_those_of_the_masters(called, name, block, shape):
    layer = with_new_masters(name, shape)
    address = layer.weight_t.data_ptr()
    layer.requantize_()
    fresh = quantize_matrix(layer.weight.detach(), block, row_splits=layer.splits)
    assert torch.equal(layer.weight_q.view(torch.uint8), fresh.q.view(torch.uint8))
    assert torch.equal(layer.weight_q_scale, fresh.scale)
    place, multiple = 0, block[0] or 16
    for piece in layer.weight_q.split(layer.splits):
        stop = place + -(-len(piece) // multiple) * multiple
        columns = layer.weight_t[:, place:stop].float()
        assert torch.equal(columns[:, : len(piece)], piece.T.float()) and not columns[:, len(piece) :].any()
        place = stop
    assert place == layer.weight_t.shape[1] and layer.weight_t.data_ptr() == address


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", WRITTEN)
@pytest.mark.parametrize("name", ["block128", "rowwise", "tensorwise", "fp8_channel"])
def test_kernels_write_in_place_what_plain_torch_does(called, monkeypatch, name, shape, dtype):
    layer = with_new_masters(name, shape, dtype)
    buffers = {key: value for key, value in layer.named_buffers() if value is not None}
    layer.requantize_()
    by_kernels = {key: value.clone() for key, value in buffers.items()}
    for value in buffers.values():
        value.view(torch.uint8).fill_(0x7F)
    monkeypatch.setattr(FP8Linear, "uses_kernels", False)
    layer.requantize_()
    for key, value in layer.named_buffers():
        assert value is None or value is buffers[key]
        assert value is None or torch.equal(by_kernels[key].view(torch.uint8), value.view(torch.uint8)), key


@pytest.mark.parametrize("shape", WRITTEN)
def test_the_bytes_of_dgrad_by_columns_lie_as_its_kernels_read_them(called, shape):
    layer = with_new_masters("rowwise", shape)
    layer.requantize_()
    operand = layer._prepare_dgrad()
    assert (operand.values.data_ptr() == layer.dgrad_q.data_ptr()) == (shape == "aligned")
    fresh = quantize_matrix(layer.weight.detach(), (None, 1), row_splits=layer.splits)
    assert torch.equal(operand.decode(), fresh.dequantize().T) and operand.decode().any()


@pytest.mark.parametrize("name, block", [("fp8_channel", (1, None)), ("block128", (1, 128))])
def test_a_layer_that_only_runs_forward_keeps_no_transpose(called, name, block):
    layer = make_layer(name, SHAPES["aligned"][1], in_features=256)
    x = make_batch(layer, 5)[0]
    with torch.no_grad():
        assert close(layer(x), hat(x, block) @ weight_hat(layer, name, layer.recipe.fprop.right).T)
    layer.requantize_()
    assert layer.weight_t is None


def dgrad_is_of_its_bytes(layer, x, grad_y):
    layer_bytes = layer.quantized_weight("weight_q").dequantize().double()
    return close(run(layer, x, grad_y)[1], hat(grad_y, (1, 128)) @ layer_bytes)


@pytest.mark.parametrize("name", ["block128", "w8a16"])
def test_the_transposed_weight_is_of_the_bytes_whoever_wrote_them(called, monkeypatch, name):
    layer = make_layer(name, SHAPES["aligned"][1], in_features=256)
    batch = make_batch(layer, 128)
    assert dgrad_is_of_its_bytes(layer, *batch)
    layer.weight_q.view(torch.uint8)[:, :128] ^= 0x80
    assert dgrad_is_of_its_bytes(layer, *batch)
    with torch.no_grad():
        layer.weight.mul_(-1.5)
    monkeypatch.setattr(FP8Linear, "uses_kernels", False)  # as after a move to a CPU
    layer.requantize_()
    monkeypatch.setattr(FP8Linear, "uses_kernels", True)
    assert dgrad_is_of_its_bytes(layer, *batch)
    assert dgrad_is_of_its_bytes(copy.deepcopy(layer), *batch)


def test_what_a_kernel_writes_counts_as_written(called, monkeypatch):
    """A kernel raises no version counter of its own."""

    def as_kernel(w, rounding, *, transposed, out):
        linear_cast(w, rounding, transposed=transposed, out=tuple(t if t is None else t.data for t in out))

    linear_cast = weights.cast_128x128
    monkeypatch.setattr(weights, "cast_128x128", as_kernel)
    layer = make_layer("block128", SHAPES["aligned"][1], in_features=256)
    x, grad_y = make_batch(layer, 128)
    layer(x.requires_grad_())
    with torch.no_grad():
        layer.weight.mul_(-1.5)
    y = layer(x)
    layer.requantize_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grad_y)
    assert dgrad_is_of_its_bytes(layer, x, grad_y)


@pytest.mark.parametrize("square", ["fprop", "dgrad"])
def test_the_transposed_weight_is_that_of_dgrad(called, square):
    """Where the two products quantise W differently."""
    recipes = {"fprop": ("block128", "rowwise"), "dgrad": ("rowwise", "block128")}[square]
    fprop, backward = (get_recipe(name) for name in recipes)
    layer = make_layer(replace(fprop, dgrad=backward.dgrad), SHAPES["aligned"][1], in_features=256)
    x, grad_y = make_batch(layer, 128)
    for _ in range(2):
        y, grad_x = run(layer, x, grad_y)[:2]
        assert close(y, hat(x, fprop.fprop.left) @ weight_hat(layer, fprop.name, fprop.fprop.right).T)
        exact = hat(grad_y, backward.dgrad.left, layer.splits) @ weight_hat(layer, "", backward.dgrad.right)
        assert close(grad_x, exact)
        with torch.no_grad():
            layer.weight.mul_(-1.5)
        layer.requantize_()


def test_one_cast_serves_two_products_where_it_can(called, monkeypatch):
    readings, both = [], linear.quantize_both
    monkeypatch.setattr(linear, "quantize_both", lambda x, *more: readings.append(x.shape) or both(x, *more))
    layer = make_layer("block128", SHAPES["aligned"][1], in_features=256)
    run(layer, *make_batch(layer, 256))
    assert readings == [(256, 256), (256, 512)]  # X, dY
    run(layer, *make_batch(layer, 77))
    run(make_layer("w8a16", SHAPES["aligned"][1], in_features=256), *make_batch(layer, 256))
    assert readings[2:] == [(256, 512)]  # whose X is cast for WGrad alone
    run(make_layer("tensorwise_static", SHAPES["aligned"][1], in_features=256), *make_batch(layer, 256))
    assert readings[3:] == [(256, 512)]  # whose X has a frozen scale in FProp


@pytest.mark.parametrize("name", ["block128", "rowwise", "tensorwise", "tensorwise_static", "w8a16"])
def test_one_cast_gives_what_two_give(called, monkeypatch, name):
    layer = make_layer(name, SHAPES["aligned"][1], in_features=256)
    batch = make_batch(layer, 256)
    once = run(layer, *batch)
    monkeypatch.setattr(FP8Linear, "_casts_once", lambda *_: False)
    for mine, theirs in zip(once, run(layer, *batch), strict=True):
        assert mine is theirs is None or (torch.equal(mine, theirs) and mine.abs().sum() > 0)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("T", [77, 128])
def test_an_expanded_gradient_is_as_good_as_any(called, name, T):
    layer = make_layer(name, SHAPES["aligned"][1], in_features=256)
    x, grad_y = make_batch(layer, T)[0], torch.ones((), dtype=torch.bfloat16).expand(T, 512)
    for mine, theirs in zip(run(layer, x, grad_y), run(layer, x, grad_y.contiguous()), strict=True):
        assert mine is theirs is None or torch.equal(mine, theirs)


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_cuda_graph_reads_stays_where_it_is(called, name, shape):
    K, projections = SHAPES[shape]
    layer = make_layer(name, projections, bias=False, in_features=K)
    before = layer.weight_operand()
    old = before.decode().clone()
    for _ in range(2):
        with torch.no_grad():
            layer.weight.normal_()
        layer.requantize_()
        after, anew = layer.weight_operand(), copy.deepcopy(layer).weight_operand()
        assert after.values.data_ptr() == before.values.data_ptr()
        assert after.scale is None or after.scale.data_ptr() == before.scale.data_ptr()
        assert torch.equal(after.decode(), anew.decode()) and not torch.equal(after.decode(), old)
        assert torch.equal(before.decode(), anew.decode())  # what was captured at first
