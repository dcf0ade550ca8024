"""Layers in fewer kernels: the bits of one operation after another, and only where X is cast by what makes it."""

import kernel_products
import pytest
import torch
from tiny_models import lay_end_to_end, random_prompts, tiny_config, tiny_decoder

from octavo.kernels import norm
from octavo.layers.attention import PackedAttention
from octavo.models import fused, fused_functions
from octavo.numerics.recipe import RECIPE_NAMES, get_recipe

SHAPES = {
    "aligned": dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    "whole": dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=4, head_dim=32),
    "ragged": dict(hidden_size=144, intermediate_size=208, num_attention_heads=3, num_key_value_heads=1, head_dim=48),
}


def hidden(decoder, grad=False):
    tokens, positions, cu_seqlens = lay_end_to_end(random_prompts(0, 3))
    with torch.set_grad_enabled(grad):
        return decoder(tokens, positions, PackedAttention(cu_seqlens, decoder.recipe.kv_cache))


def trained(decoder, lengths=(40, 77, 11)):
    """Log-probabilities of a batch, and the gradient of every parameter that has one."""
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(97, (length,), generator=generator).tolist() for length in lengths]
    tokens, positions, cu_seqlens = (part.long() for part in lay_end_to_end(sequences))  # none are no integers
    weights = torch.randn(len(tokens), generator=generator)
    decoder.zero_grad()
    states = decoder(tokens, positions, PackedAttention(cu_seqlens, decoder.recipe.kv_cache))
    logprobs, _ = decoder.logprobs(states, tokens, 1.0)
    (weights * logprobs).sum().backward()
    return {"logprobs": logprobs.detach()} | {
        name: parameter.grad for name, parameter in decoder.named_parameters() if parameter.grad is not None
    }


def counted(monkeypatch, module, *names):
    """A list that the names of these functions of a module are added to as they are called."""
    called = []
    for name in names:
        function = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda *args, name=name, function=function, **options: called.append(name) or function(*args, **options),
        )
    return called


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys() and len(found) > 1
    different = [name for name in found if not torch.equal(found[name], wanted[name]) or not found[name].any()]
    assert not different, different


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_the_same_bits_in_fewer_kernels(monkeypatch, recipe, shape):
    decoder = tiny_decoder(tiny_config("qwen3", **SHAPES[shape]), get_recipe(recipe))
    casts = counted(monkeypatch, fused, "add_rms_norm_cast", "swiglu_cast")
    if decoder.dtype == torch.bfloat16:
        kernel_products.as_on_gpu(monkeypatch)
    training, rollout = hidden(decoder, grad=True), hidden(decoder)
    assert torch.equal(training, rollout) and rollout.float().abs().sum() > 0
    assert len(casts) == (3 * len(decoder.layers) if recipe in ("block128", "rowwise", "fp8_channel") else 0)
    decoder.fuses = False
    assert torch.equal(hidden(decoder), rollout) and len(casts) in (0, 3 * len(decoder.layers))


def test_a_layer_that_is_kept_gets_its_norm_as_it_is(monkeypatch):
    recipe = get_recipe(
        "block128", keep_bf16=("lm_head", "embed_tokens", "layers.0.mlp.down_proj", "q_proj", "k_proj", "v_proj")
    )
    decoder = tiny_decoder(tiny_config("qwen3", **SHAPES["aligned"]), recipe)
    kernel_products.as_on_gpu(monkeypatch)
    assert torch.equal(hidden(decoder, grad=True), hidden(decoder))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("lengths", [(40, 77, 11), (2, 1), (130, 41)], ids=["whole block", "few", "ragged"])
@pytest.mark.parametrize("family, shape", [("qwen3", "aligned"), ("qwen2", "ragged")])
def test_gradients_of_the_same_bits_in_fewer_kernels(monkeypatch, family, shape, lengths, recompute):
    decoder = tiny_decoder(tiny_config(family, **SHAPES[shape]), get_recipe("block128"))
    kernel_products.as_on_gpu(monkeypatch)
    casts = counted(monkeypatch, fused_functions, "add_rms_norm_cast", "swiglu_cast", "swiglu_backward_cast")
    alone = counted(monkeypatch, norm, "rms_norm_forward")
    decoder.recompute_layers = recompute
    found = trained(decoder, lengths)
    num_layers, forwards = len(decoder.layers), 2 if recompute else 1
    assert casts.count("add_rms_norm_cast") == 2 * forwards * num_layers
    assert casts.count("swiglu_cast") == forwards * num_layers and casts.count("swiglu_backward_cast") == num_layers
    inside = casts.count("add_rms_norm_cast") + (2 * forwards * num_layers if decoder.config.qk_norm else 0)
    assert len(alone) == inside + 1, "of norms that make an output, the last"
    decoder.fuses = False
    assert_equal(found, trained(decoder, lengths))
    assert len(casts) == (3 * forwards + 1) * num_layers


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("lengths", [(40, 77, 11), (130, 41)], ids=["whole block", "ragged"])
@pytest.mark.parametrize("shape", ["aligned", "whole"])
@pytest.mark.parametrize("name", ["rowwise", "tensorwise"])
def test_scales_over_whole_rows_and_tensors_give_the_same_bits(monkeypatch, name, shape, lengths, recompute):
    decoder = tiny_decoder(tiny_config("qwen3", **SHAPES[shape]), get_recipe(name))
    kernel_products.as_on_gpu(monkeypatch)
    names = "add_rms_norm", "swiglu_forward", "swiglu_backward"
    made = counted(monkeypatch, fused_functions, *names)
    decoder.recompute_layers = recompute
    found = trained(decoder, lengths)
    num_layers, forwards = len(decoder.layers), 2 if recompute else 1
    halves = num_layers if sum(lengths) % 128 == 0 else 0
    norms = {"aligned": 1, "whole": 2}[
        shape
    ]  # where 128 does not divide the width of k and v, the norm before them stays alone
    assert [made.count(each) for each in names] == [norms * halves * forwards, halves * forwards, halves]
    decoder.fuses = False
    assert_equal(found, trained(decoder, lengths))
    assert len(made) == halves * ((norms + 1) * forwards + 1)


MIXED = {
    "down kept": ({"keep_bf16": ("lm_head", "embed_tokens", "layers.0.mlp.down_proj")}, 4),
    "gate and up kept": ({"keep_bf16": ("lm_head", "embed_tokens", "gate_proj", "up_proj")}, 2),
    "q, k and v kept": ({"keep_bf16": ("lm_head", "embed_tokens", "q_proj", "k_proj", "v_proj")}, 2),
    "power of two": ({"scale_rounding": "power_of_two"}, 4),
    "X saved as it is": ({"saved_activations": "bf16"}, 0),
}


@pytest.mark.parametrize("name", MIXED)
def test_only_what_the_recipe_casts_for_both_products_is_cast_early(monkeypatch, name):
    changes, num_norms = MIXED[name]
    decoder = tiny_decoder(tiny_config("qwen3", **SHAPES["aligned"]), get_recipe("block128", **changes))
    kernel_products.as_on_gpu(monkeypatch)
    casts = counted(monkeypatch, fused_functions, "add_rms_norm_cast")
    found = trained(decoder)
    assert len(casts) == num_norms
    decoder.fuses = False
    assert_equal(found, trained(decoder))


def test_an_empty_batch_has_gradients_of_zero(monkeypatch):
    decoder = tiny_decoder(tiny_config("qwen3", **SHAPES["ragged"]), get_recipe("block128"))
    kernel_products.as_on_gpu(monkeypatch)
    found = trained(decoder, ())
    assert found.keys() == {"logprobs", *(name for name, _ in decoder.named_parameters())}
    assert not any(tensor.any() for tensor in found.values())


@pytest.mark.parametrize(
    "frozen, num_norms", [("weight", 0), ("norm", 4), ("embed_tokens", 4), ("down_proj", 4), ("layers.0", 2)]
)
@pytest.mark.parametrize("recipe, maker", [("block128", "add_rms_norm_cast"), ("tensorwise", "add_rms_norm")])
def test_frozen_parameters_have_no_gradient_and_change_no_other(monkeypatch, recipe, maker, frozen, num_norms):
    decoder = tiny_decoder(tiny_config("qwen3", **SHAPES["whole"]), get_recipe(recipe))
    kernel_products.as_on_gpu(monkeypatch)
    whole = trained(decoder)
    for name, parameter in decoder.named_parameters():
        parameter.requires_grad_(frozen not in name or name == "lm_head")
    makers = counted(monkeypatch, fused_functions, maker)
    assert_equal(trained(decoder), {name: grad for name, grad in whole.items() if frozen not in name})
    assert len(makers) == num_norms, "a frozen weight saves nothing"


def test_a_second_backward_needs_the_graph_kept(monkeypatch):
    decoder = tiny_decoder(tiny_config("qwen3", **SHAPES["aligned"]), get_recipe("block128"))
    kernel_products.as_on_gpu(monkeypatch)
    loss = hidden(decoder, grad=True).float().square().sum()
    loss.backward(retain_graph=True)
    reached = [parameter for parameter in decoder.parameters() if parameter.grad is not None]
    once = [parameter.grad.clone() for parameter in reached]
    loss.backward()
    assert once and all(torch.equal(parameter.grad, 2 * grad) for parameter, grad in zip(reached, once, strict=True))
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


@pytest.mark.parametrize("recipe", ["block128", "rowwise", "tensorwise"])
@pytest.mark.parametrize("name", ["qkv_proj", "gate_up_proj", "down_proj"])
def test_a_backward_after_a_weight_was_rewritten_is_refused(monkeypatch, name, recipe):
    decoder = tiny_decoder(tiny_config("qwen3", **SHAPES["whole"]), get_recipe(recipe))
    kernel_products.as_on_gpu(monkeypatch)
    tokens, positions, cu_seqlens = lay_end_to_end([[5] * 128])
    loss = decoder(tokens, positions, PackedAttention(cu_seqlens, decoder.recipe.kv_cache)).float().sum()
    getattr(decoder.layers[1], name).requantize_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
