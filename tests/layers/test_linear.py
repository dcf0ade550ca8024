"""The three GEMMs of a linear layer, recipe by recipe, against float64 on the operands that the recipe's row names."""

import pytest
import torch
from linear_layers import (
    BATCH_INVARIANT,
    GEMMS,
    QKV,
    K,
    assert_is_product,
    every_quantised,
    every_recipe,
    hat,
    make_batch,
    make_layer,
    make_twin,
    run,
    static_scale,
    weight_hat,
)

from octavo.kernels.operands import QuantizedMatrix, pad_tokens
from octavo.numerics.error import relative_error
from octavo.numerics.recipe import GemmRecipe, get_recipe


@pytest.mark.parametrize(
    "projections, bias, T",
    [(QKV, True, 200), (QKV, False, 37), ({"o_proj": 96}, True, 1), ({"gate_proj": 130, "up_proj": 130}, False, 129)],
)
@every_recipe
def test_three_gemms_equal_float64(name, projections, bias, T):
    layer = make_layer(name, projections, bias)
    x, grad_y = make_batch(layer, T)
    y, grad_x, grad_weight, grad_bias = run(layer, x, grad_y)
    assert y.dtype == grad_x.dtype == x.dtype and grad_weight.dtype == torch.float32
    (x_block, w_block), (left, right), (grad_block, saved_block) = GEMMS[name]

    x_hat = hat(x, x_block, scale=static_scale(x) if name == "tensorwise_static" else None)
    w_hat = weight_hat(layer, name, w_block)
    if name == "w8a16":
        w_hat = w_hat.float().bfloat16().double()
    rounded_bias = layer.bias.detach().to(x.dtype) if bias else None
    assert_is_product(y, x_hat, w_hat.T, rounded_bias, on_grid=True)

    grad_hat = hat(grad_y, left, layer.splits)
    assert_is_product(grad_x, grad_hat, weight_hat(layer, name, right))

    grad_hat = hat(pad_tokens(grad_y), grad_block, layer.splits)
    assert_is_product(grad_weight, grad_hat.T, hat(pad_tokens(x), saved_block))

    if bias:  # T terms in FP32, in any order
        assert grad_bias.dtype == torch.float32
        exact, size = grad_y.double().sum(dim=0), grad_y.double().abs().sum(dim=0)
        assert exact.abs().max() > 0.01 and ((grad_bias.double() - exact).abs() <= T * 2.0**-24 * size).all()


@every_quantised
def test_quantisation_is_seen(name):
    # The references above tell the recipes apart: each differs from the BF16 layer in Y, dX and dW, by E4M3's 2 to 5 %.
    layer, plain = make_layer(name, bias=True), make_layer("bf16", bias=True)
    plain.load_state_dict(layer.state_dict())
    plain.requantize_()
    x, grad_y = make_batch(layer, 150)
    for what, got, expected in zip(("y", "dX", "dW"), run(layer, x, grad_y), run(plain, x, grad_y), strict=False):
        assert 0.01 < relative_error(got, expected) < 2.0**-4, what
    assert torch.equal(run(layer, x, grad_y)[3], run(plain, x, grad_y)[3])


@pytest.mark.parametrize("T", [1, 128, 129])
def test_tokens_are_padded_with_zeros(T):
    x = torch.randn(T, 3)
    padded = pad_tokens(x)
    assert len(padded) == 128 * -(-T // 128) and torch.equal(padded[:T], x)
    assert torch.equal(padded[T:], torch.zeros(len(padded) - T, 3))
    assert torch.equal(pad_tokens(x[:0]), torch.zeros(128, 3))


@every_recipe
def test_gradients_accumulate_in_the_master(name):
    layer = make_layer(name, bias=True)
    first, second = make_batch(layer, 50), make_batch(layer, 70)
    if name == "tensorwise_static":
        layer(torch.cat([first[0], second[0]]))  # one scale for all that follows
    alone = [run(layer, *batch)[2:] for batch in (first, second)]
    alone = [(weight.clone(), bias.clone()) for weight, bias in alone]
    layer.zero_grad()
    for x, grad_y in (first, second):
        layer(x).backward(grad_y)
    assert torch.equal(layer.weight.grad, alone[0][0] + alone[1][0])
    assert torch.equal(layer.bias.grad, alone[0][1] + alone[1][1])


@every_recipe
def test_only_what_needs_a_gradient_gets_one(name):
    layer = make_layer(name, bias=True)
    x, grad_y = make_batch(layer, 40)
    _, grad_x, grad_weight, _ = run(layer, x, grad_y)
    layer.zero_grad(set_to_none=True)
    layer(x).backward(grad_y)  # the first layer of a network
    assert torch.equal(layer.weight.grad, grad_weight)
    layer.requires_grad_(False)
    leaf = x.clone().requires_grad_()
    layer(leaf).backward(grad_y)  # a frozen layer
    assert torch.equal(leaf.grad, grad_x)
    with torch.no_grad():
        assert not layer(x).requires_grad


@every_quantised
def test_saved_activations_in_fp8_and_bf16_give_the_same_gradients(name):
    layers = [make_layer(name)]
    layers.append(make_layer(get_recipe(name, saved_activations="bf16")))
    layers[1].load_state_dict(layers[0].state_dict())
    layers[1].requantize_()
    x, grad_y = make_batch(layers[0], 150)
    for got, expected in zip(run(layers[0], x, grad_y)[:3], run(layers[1], x, grad_y)[:3], strict=True):
        assert expected.abs().max() > 0.0 and torch.equal(got, expected)
    saved = layers[0].save_activation(x)
    assert isinstance(saved, QuantizedMatrix) and saved.q.dtype == torch.float8_e4m3fn
    assert torch.equal(saved.dequantize(), hat(pad_tokens(x), GEMMS[name][2][1]).float())
    assert layers[1].save_activation(x) is x
    kept = layers[0](x).grad_fn.saved_tensors  # what the graph holds on to, not X itself
    assert saved.q.shape in [t.shape for t in kept if t is not None and t.dtype == torch.float8_e4m3fn]
    assert not any(t is not None and t.data_ptr() == x.data_ptr() for t in kept)


@every_recipe
def test_the_backward_lets_go_of_what_the_forward_kept(name):
    layer = make_layer(name)
    x, grad_y = make_batch(layer, 150)
    y = layer(x)
    y.backward(grad_y)
    with pytest.raises(RuntimeError, match="already been freed"):
        y.grad_fn.saved_tensors  # noqa: B018
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward(grad_y)


@every_recipe
def test_what_changes_between_forward_and_backward_is_refused(name):
    layer = make_layer(name)
    x, grad_y = make_batch(layer, 150)
    y = layer(x)
    layer.requantize_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(grad_y)
    y = layer(x)
    x.mul_(2.0)
    if layer.recipe.saved_activations == "fp8":
        y.backward(grad_y)
        assert torch.equal(layer.weight.grad, run(layer, x / 2.0, grad_y)[2])
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(grad_y)


def test_wgrad_may_stay_in_bf16():
    recipe = get_recipe("rowwise", wgrad=GemmRecipe(left=None, right=None), saved_activations="bf16")
    layer = make_layer(recipe)
    x, grad_y = make_batch(layer, 150)
    assert_is_product(run(layer, x, grad_y)[2], grad_y.double().T, x.double())


def test_w8a16_multiplies_bf16_of_the_weight_it_decodes():
    layer, plain = make_layer("w8a16", bias=True), make_layer("bf16", bias=True)
    with torch.no_grad():
        plain.weight.copy_(layer.quantized_weight("weight_q").dequantize().bfloat16())
        plain.bias.copy_(layer.bias)
    plain.requantize_()
    x, _ = make_batch(layer, 50)
    assert torch.equal(layer(x), plain(x))
    assert not torch.equal(
        layer.quantized_weight("weight_q").dequantize().bfloat16().float(),
        layer.quantized_weight("weight_q").dequantize(),
    )


@every_quantised
def test_weights_are_quantised_from_the_master(name):
    # From FP32, not by way of BF16: some codes would differ.
    layer = make_layer(name)
    got, block = layer.quantized_weight("weight_q").dequantize(), GEMMS[name][0][1]
    assert torch.equal(got, hat(layer.weight, block, layer.splits, dim=0).float())
    assert relative_error(got, hat(layer.weight.bfloat16(), block, layer.splits, dim=0)) > 2.0**-12


@every_quantised
def test_scale_rounding_reaches_every_operand(name):
    layer = make_layer(get_recipe(name, scale_rounding="power_of_two"))
    x, grad_y = make_batch(layer, 150)
    run(layer, x, grad_y)
    scales = [layer.weight_q_scale, layer.save_activation(x).scale]
    scales += [layer.dgrad_q_scale] if name == "rowwise" else []
    scales += [layer.activation_scale] if name == "tensorwise_static" else []
    for scale in scales:
        assert (torch.frexp(scale).mantissa == 0.5).all()
    assert not torch.equal(run(layer, x, grad_y)[1], run(make_twin(layer, name), x, grad_y)[1])


# One forward: a token's numbers do not depend on its batch.


@pytest.mark.parametrize("name", BATCH_INVARIANT)
def test_a_token_does_not_depend_on_its_batch(name):
    layer = make_layer(name, bias=True)
    x, _ = make_batch(layer, 70)
    layer(x)
    whole = layer(x).detach()
    assert whole.abs().min() < whole.abs().max()
    with torch.no_grad():
        for T in range(1, 71):
            assert torch.equal(layer(x[-T:]), whole[-T:]), f"{T} tokens"
        assert torch.equal(layer(x.flip(0)).flip(0), whole)


def test_tensorwise_does_depend_on_the_batch():
    assert not get_recipe("tensorwise").batch_invariant
    layer = make_layer("tensorwise")
    x, _ = make_batch(layer, 70)
    assert not torch.equal(layer(x[:1]), layer(x)[:1])


@every_recipe
def test_strided_inputs(name):
    layer = make_layer(name, bias=True)
    x, grad_y = make_batch(layer, 60)
    expected = run(layer, x[::2].contiguous(), torch.ones_like(grad_y[:30]))
    wide = torch.cat([x, x], dim=1)[::2, :K]
    got = run(layer, wide, torch.ones(1, 1, dtype=x.dtype).expand(30, sum(layer.splits)))
    leaf = wide.detach().requires_grad_()
    assert not leaf.is_contiguous() and torch.equal(layer(leaf), expected[0])
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", BATCH_INVARIANT)
def test_a_bad_token_spoils_itself_only(name):
    layer = make_layer(name)
    x, _ = make_batch(layer, 9)
    clean = layer(x)
    clean = layer(x)  # a static scale is frozen by now
    x[4, 150] = torch.nan
    got = layer(x)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert got[4].isnan().all() and torch.equal(got[others], clean[others])


@pytest.mark.parametrize("name", [name for name in GEMMS if name != "tensorwise_static"])
def test_zero_huge_and_empty(name):
    layer = make_layer(name, bias=True)
    x, grad_y = make_batch(layer, 20)
    y, grad_x, grad_weight, grad_bias = run(layer, torch.zeros_like(x), torch.zeros_like(grad_y))
    assert torch.equal(y, layer.bias.detach().to(y.dtype).expand_as(y))
    for grad in (grad_x, grad_weight, grad_bias):
        assert torch.equal(grad, torch.zeros_like(grad))
    y, grad_x, grad_weight, grad_bias = run(layer, x[:0], grad_y[:0])
    assert y.shape == (0, sum(layer.splits)) and grad_x.shape == (0, K)
    assert torch.equal(grad_weight, torch.zeros_like(grad_weight)) and torch.equal(
        grad_bias, torch.zeros_like(grad_bias)
    )
    with torch.no_grad():
        layer.bias.zero_()
    layer.requantize_()
    expected = run(layer, x, grad_y)  # powers of two move every scale, grid and rounding exactly
    got = run(layer, x * 2.0**60, grad_y * 2.0**50)
    for one, other, power in zip(got, expected, (60, 50, 110, 50), strict=True):
        assert torch.equal(one, other * 2.0**power)
