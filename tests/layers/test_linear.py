"""The three GEMMs of a linear layer, recipe by recipe, against float64 on the operands that the recipe's row names."""

import copy

import pytest
import torch

from octavo.kernels.gemm import QuantizedMatrix
from octavo.layers.linear import FP8Linear, pad_tokens, quantized_layers
from octavo.numerics.error import relative_error
from octavo.numerics.exact import to_grid
from octavo.numerics.fp8 import expand_scale, quantize
from octavo.numerics.recipe import GemmRecipe, get_recipe

TENSOR, ROW, COLUMN = (None, None), (1, None), (None, 1)
ALONG_K, ALONG_T, SQUARE = (1, 128), (128, 1), (128, 128)
# Blocks of (X, W) in FProp, (dY, W) in DGrad, (dY, X) in WGrad; None is not quantised.
GEMMS = {
    "bf16": ((None, None), (None, None), (None, None)),
    "fp32": ((None, None), (None, None), (None, None)),
    "block128": ((ALONG_K, SQUARE), (ALONG_K, SQUARE), (ALONG_T, ALONG_T)),
    "rowwise": ((ROW, ROW), (ROW, COLUMN), (COLUMN, COLUMN)),
    "tensorwise": ((TENSOR, TENSOR), (TENSOR, TENSOR), (TENSOR, TENSOR)),
    "w8a16": ((None, SQUARE), (ALONG_K, SQUARE), (ALONG_T, ALONG_T)),
    "tensorwise_static": ((TENSOR, TENSOR), (TENSOR, TENSOR), (TENSOR, TENSOR)),
}
QUANTISED = [name for name in GEMMS if name not in ("bf16", "fp32")]
BATCH_INVARIANT = [name for name in GEMMS if name != "tensorwise"]
every_recipe = pytest.mark.parametrize("name", GEMMS)
every_quantised = pytest.mark.parametrize("name", QUANTISED)

K = 200  # a block of 128 and a ragged one
QKV = {"q_proj": 192, "k_proj": 64, "v_proj": 64}


def make_layer(recipe, projections=None, bias=False, in_features=K):
    """A layer with random masters whose projections differ in size, ready to run."""
    recipe = get_recipe(recipe) if isinstance(recipe, str) else recipe
    layer = FP8Linear(in_features, projections or QKV, bias=bias, recipe=recipe, path="model.layers.0.self_attn")
    with torch.no_grad():
        layer.weight.normal_(std=0.1)
        for size, piece in zip((1.0, 0.05, 20.0), layer.weight.split(layer.splits), strict=False):
            piece.mul_(size)
        if bias:
            layer.bias.normal_()
    layer.requantize_()
    return layer


def make_batch(layer, T):
    """X [T, K] and dY [T, N] in the activation format, tokens of different sizes."""
    dtype = torch.float32 if layer.recipe.high_precision == "fp32" else torch.bfloat16
    x, grad_y = (torch.randn(T, n) * (0.1 + torch.rand(T, 1)) for n in (layer.in_features, sum(layer.splits)))
    return x.to(dtype), grad_y.to(dtype)


def run(layer, x, grad_y):
    """Y, dX, dW, db."""
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(grad_y)
    return y.detach(), x.grad, layer.weight.grad, None if layer.bias is None else layer.bias.grad


def hat(x, quant_block, splits=None, dim=1, scale=None):
    """What an operand decodes to, in float64; each fused projection along dim is quantised on its own."""
    if quant_block is None:
        return x.detach().double()
    if scale is not None:
        return (x.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).double() * scale.double()
    pieces = []
    for piece in x.detach().split(splits or [x.shape[dim]], dim=dim):
        q, scales = quantize(piece, quant_block)
        pieces.append(q.double() * expand_scale(scales, piece.shape, quant_block).double())
    return torch.cat(pieces, dim=dim)


def weight_hat(layer, name, block):
    """W as a GEMM of the recipe sees it, in float64."""
    if block is None:
        return layer.weight.detach().to(torch.float32 if name == "fp32" else torch.bfloat16).double()
    return hat(layer.weight, block, layer.splits, dim=0)


def static_scale(x, margin=1.25):
    return (x.float().abs().amax() * margin / 448.0).reshape(1, 1)


def assert_is_product(got, a, b, bias=None, on_grid=False):
    """got is a @ b + bias, rounded once.

    Element by element: FP32 factors, scales and sums round each of n terms by n * 2**-24 at most; on_grid, factors are
    moved to a grid of 2**-23 of their amax instead. On the whole: as good as FP32, or as factors on a grid.
    """
    bias = torch.zeros(1) if bias is None else bias
    expected, terms = a @ b + bias.double(), a.abs() @ b.abs() + bias.double().abs()
    bound = (a.shape[1] + 3) * 2.0**-24 * terms
    bound += (2.0**-8 if got.dtype == torch.bfloat16 else 2.0**-24) * expected.abs()
    if on_grid:
        bound += 2.0**-23 * a.shape[1] * a.abs().amax() * b.abs().amax()
    error = (got.double() - expected).abs()
    assert expected.abs().max() > 0.01
    assert (error <= bound).all(), f"{(error / bound).max():.2f} times the bound"
    floor = (to_grid(a, 23) @ to_grid(b, 23, dim=0) if on_grid else a.float() @ b.float()) + bias.float()
    error, floor = relative_error(got, expected), relative_error(floor.float().to(got.dtype), expected)
    margin = 1.01 if got.dtype == torch.bfloat16 else 1.5
    assert error <= margin * floor, f"error {error:.3g}, floor {floor:.3g}"


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
    kept = layers[0](x).grad_fn.saved_x  # what the graph holds on to, not X itself
    assert isinstance(kept, QuantizedMatrix) and kept.q.element_size() == 1


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


def make_twin(layer, recipe):
    """The same masters under another recipe."""
    twin = make_layer(recipe, layer.projections, layer.bias is not None)
    twin.load_state_dict(layer.state_dict())
    twin.requantize_()
    return twin


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
