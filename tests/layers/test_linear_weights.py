"""The bytes of a linear layer: when they change, what the shadow reads, static scales, layers that stay in BF16."""

import copy

import pytest
import torch
from linear_layers import (
    TENSOR,
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

from octavo.layers.linear import quantized_layers
from octavo.numerics.recipe import FORWARD_ONLY, get_recipe

# One weight: quantised once, in place.


def bytes_of(layer):
    """Every buffer that the forward and backward passes read."""
    return {name: buffer for name, buffer in layer.named_buffers() if name.startswith(("weight", "dgrad", "bias"))}


@every_recipe
def test_requantize_writes_in_place_and_only_then_is_the_master_seen(name):
    layer = make_layer(name, bias=True)
    x, grad_y = make_batch(layer, 40)
    if name == "tensorwise_static":
        layer(x)
    y, grad_x, _, _ = run(layer, x, grad_y)
    addresses = {buffer: tensor.data_ptr() for buffer, tensor in bytes_of(layer).items()}
    expected = {"weight_hp"} if name in ("bf16", "fp32") else {"weight_q", "weight_q_scale"}
    expected |= {"dgrad_q", "dgrad_q_scale"} if name == "rowwise" else set()
    assert set(addresses) == expected | {"bias_hp"}
    with torch.no_grad():
        layer.weight.mul_(-1.7).add_(0.01)
        layer.bias.add_(1.0)
    same = run(layer, x, grad_y)
    assert torch.equal(same[0], y) and torch.equal(same[1], grad_x)
    layer.requantize_()
    assert {buffer: tensor.data_ptr() for buffer, tensor in bytes_of(layer).items()} == addresses
    got = run(layer, x, grad_y)
    fresh = make_twin(layer, name)
    if name == "tensorwise_static":
        fresh(x)
    expected = run(fresh, x, grad_y)
    assert not torch.equal(got[0], y) and not torch.equal(got[1], grad_x)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


@every_quantised
def test_a_flipped_bit_or_scale_is_seen_at_once(name):
    # Prepared operands must not outlive the bytes they were made from, in either direction.
    layer = make_layer(name)
    x, grad_y = make_batch(layer, 40)
    layer(x)
    y, grad_x, _, _ = run(layer, x, grad_y)
    dgrad = "dgrad_q" if name == "rowwise" else "weight_q"
    layer.weight_q.view(torch.uint8)[300, 7] ^= 0x80  # the sign of one weight
    flipped = run(layer, x, grad_y)
    changed = (flipped[0] != y).any(dim=0)
    assert changed[300] and changed.sum() == 1
    assert torch.equal(flipped[1], grad_x) == (name == "rowwise")  # which has other bytes for DGrad
    layer.weight_q.view(torch.uint8)[300, 7] ^= 0x80
    again = run(layer, x, grad_y)
    assert torch.equal(again[0], y) and torch.equal(again[1], grad_x)
    layer.weight_q_scale[0, 0] *= 2.0
    assert not torch.equal(run(layer, x, grad_y)[0], y)
    layer.weight_q_scale[0, 0] /= 2.0
    getattr(layer, dgrad).view(torch.uint8)[300, 7] ^= 0x80
    changed = (run(layer, x, grad_y)[1] != grad_x).any(dim=0)
    assert changed[7] and changed.sum() == 1
    getattr(layer, dgrad).view(torch.uint8)[300, 7] ^= 0x80
    getattr(layer, f"{dgrad}_scale")[0, 0] *= 2.0
    assert not torch.equal(run(layer, x, grad_y)[1], grad_x)


def test_a_copy_has_its_own_bytes():
    # A copied buffer counts its writes from the beginning again: what was prepared for the original is not the copy's.
    layer = make_layer("block128")
    layer.requantize_()
    x, _ = make_batch(layer, 40)
    y = layer(x)
    for writes in range(1, 4):
        twin = copy.deepcopy(layer)
        with torch.no_grad():
            twin.weight.neg_()
        for _ in range(writes):
            twin.requantize_()
        assert torch.equal(twin(x), -y)
    assert torch.equal(layer(x), y)


# The BF16 shadow.


@every_recipe
def test_shadow_is_a_product_with_the_rounded_master(name):
    layer = make_layer(name, bias=True)
    plain = make_twin(layer, "fp32" if name == "fp32" else "bf16")
    x, _ = make_batch(layer, 50)
    expected = plain(x).detach()
    assert torch.equal(layer(x, shadow=True), expected)
    for buffer in bytes_of(layer).values():
        buffer.view(torch.uint8).fill_(0x7F)  # a NaN in E4M3, 3e38 in the others
    assert torch.equal(layer(x, shadow=True), expected)
    with torch.no_grad():
        layer.weight.neg_()  # seen without requantize_
        layer.bias.neg_()
    assert torch.equal(layer(x, shadow=True), -expected)


def test_shadow_carries_no_gradient_and_calibrates_nothing():
    layer = make_layer("tensorwise_static", bias=True)
    x, _ = make_batch(layer, 50)
    assert not layer(x.requires_grad_(), shadow=True).requires_grad
    assert layer.activation_amax.item() == 0.0 and layer.activation_scale.isnan().all()
    assert layer.saturation_counts.tolist() == [0, 0]


# Static activation scales.


@pytest.mark.parametrize("margin", [1.0, 1.25, 2.0])
def test_a_static_scale_is_frozen_until_told_otherwise(margin):
    layer = make_layer(get_recipe("tensorwise_static", amax_margin=margin))
    x, _ = make_batch(layer, 40)
    w_hat = weight_hat(layer, "tensorwise_static", TENSOR)
    layer(x)  # the very first batch calibrates itself
    scale = static_scale(x, margin)
    assert torch.equal(layer.activation_scale, scale)
    for factor in (0.5, 3.0, 0.1):
        y = layer(x * factor).detach()
        assert torch.equal(layer.activation_scale, scale)
        assert_is_product(y, hat(x * factor, TENSOR, scale=scale), w_hat.T, on_grid=True)
    layer.freeze_activation_scale_()  # from the largest amax since the last time
    assert torch.equal(layer.activation_scale, static_scale(x * 3.0, margin))
    layer(x * 0.25)
    layer.freeze_activation_scale_()
    assert torch.equal(layer.activation_scale, static_scale(x * 0.25, margin))


def test_saturated_activations_are_counted_and_get_no_gradient():
    layer, dynamic = make_layer("tensorwise_static"), make_layer("tensorwise")
    dynamic.load_state_dict(layer.state_dict())
    dynamic.requantize_()
    x, grad_y = make_batch(layer, 40)
    x = x.clamp(-1.0, 1.0)
    x[0, 0] = 1.0  # amax 1 and the margin: saturation above 1.25
    run(layer, x, grad_y)
    assert layer.saturation_counts.tolist() == [0, 40 * K]
    x[3, 5], x[7, :4], x[8, 0], x[8, 1] = 1.5, -20.0, 1.2, 1e30
    _, grad_x, grad_weight, _ = run(layer, x, grad_y)
    saturated = torch.zeros(40, K, dtype=torch.bool)
    saturated[3, 5], saturated[7, :4], saturated[8, 1] = True, True, True
    assert layer.saturation_counts.tolist() == [6, 2 * 40 * K]
    assert torch.equal(layer.saturated(x), saturated) and dynamic.saturated(x) is None
    straight = run(dynamic, torch.zeros_like(x), grad_y)[1]  # DGrad does not see X
    assert (straight[saturated] != 0.0).all()
    assert torch.equal(grad_x, straight.masked_fill(saturated, 0.0))
    layer.freeze_activation_scale_()
    assert layer.saturation_counts.tolist() == [0, 0]


def test_activations_that_are_not_finite_give_no_static_scale():
    layer = make_layer("tensorwise_static")
    run(layer, *make_batch(layer, 40))
    layer.activation_amax.fill_(torch.inf)
    with pytest.raises(ValueError, match="amax inf, which gives no static scale"):
        layer.freeze_activation_scale_()


def test_saturation_is_that_of_the_forward_pass():
    layer = make_layer("tensorwise_static")
    x, grad_y = make_batch(layer, 40)
    layer(x)
    leaf = (x * 4.0).requires_grad_()
    y = layer(leaf)
    layer.freeze_activation_scale_()  # a new RL step before this backward: the forward pass saturated all the same
    saturated = (x * 4.0).float().abs() > 1.25 * x.float().abs().amax()
    y.backward(grad_y)
    assert saturated.sum() > 10 and torch.equal(leaf.grad == 0.0, saturated)


# Layers that stay in BF16.


@pytest.mark.parametrize("pattern", ["[qkv]_proj", "self_attn.*", "layers.0.*", "model.layers.0.self_attn.?_proj"])
@every_quantised
def test_kept_layers_are_bf16_layers(name, pattern):
    layer = make_layer(get_recipe(name, keep_bf16=("lm_head", "embed_tokens", pattern)), bias=True)
    assert not layer.quantized and "weight_q" not in dict(layer.named_buffers())
    plain = make_twin(layer, "bf16")
    x, grad_y = make_batch(layer, 150)
    for got, expected in zip(run(layer, x, grad_y), run(plain, x, grad_y), strict=True):
        assert expected.abs().max() > 0.0 and torch.equal(got, expected)
    assert layer.saturated(x) is None


@pytest.mark.parametrize("pattern", ["q", "proj", "layers.1.*", "self_attn", "o_proj"])
def test_other_patterns_keep_nothing(pattern):
    assert make_layer(get_recipe("block128", keep_bf16=("lm_head", "embed_tokens", pattern))).quantized


@pytest.mark.parametrize("pattern", ["q_proj", "[qk]_proj", "layers.0.self_attn.v_proj"])
def test_a_fused_projection_is_kept_whole_or_not_at_all(pattern):
    recipe = get_recipe("block128", keep_bf16=("lm_head", "embed_tokens", pattern))
    with pytest.raises(
        ValueError, match=r"keep_bf16.*'q_proj', 'k_proj', 'v_proj'.* of model.layers.0.self_attn; name all"
    ):
        make_layer(recipe)


def test_quantized_layers_and_their_description():
    kept = get_recipe("block128", keep_bf16=("lm_head", "embed_tokens", "o_proj"))
    module = torch.nn.Sequential(make_layer("block128"), torch.nn.ReLU(), make_layer(kept, {"o_proj": 96}, bias=True))
    assert quantized_layers(module) == [module[0], module[2]]
    assert module[0].extra_repr() == "200 -> {'q_proj': 192, 'k_proj': 64, 'v_proj': 64}, bias=False, block128"
    assert module[2].extra_repr() == "200 -> {'o_proj': 96}, bias=True, bf16"


def test_state_dict_holds_masters_only():
    # Bytes and scales are made from them, so a checkpoint cannot contradict itself.
    assert set(make_layer("rowwise", bias=True).state_dict()) == {"weight", "bias"}


@pytest.mark.parametrize("name", FORWARD_ONLY)
def test_a_forward_only_layer_is_the_forward_of_its_twin_and_has_no_backward(name):
    layer = make_layer(FORWARD_ONLY[name])
    twin = make_twin(layer, name)
    x, _ = make_batch(layer, 9)
    with torch.no_grad():
        assert torch.equal(twin(x), layer(x)) and layer(x).abs().max() > 0.1
    assert "dgrad_q" not in twin._buffers
    with pytest.raises(AssertionError, match=name):
        twin(x)


def test_a_forward_without_gradient_saves_nothing(monkeypatch):
    layer = make_layer("block128")
    x, _ = make_batch(layer, 9)
    with_gradient = layer(x)
    monkeypatch.setattr(layer, "save_activation", lambda x: pytest.fail("an activation was saved"))
    with torch.no_grad():
        assert torch.equal(layer(x), with_gradient)
