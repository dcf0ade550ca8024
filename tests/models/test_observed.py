"""The live model against the declaration: equal for every recipe, and each tampering is named."""

import re

import pytest
import torch
from tiny_models import lay_end_to_end, random_prompts, tiny_config, tiny_decoder

from octavo.kernels.attention import StoredKV
from octavo.layers import linear
from octavo.layers.attention import PackedAttention
from octavo.models.config import decoder_config
from octavo.models.modules import decoder_modules
from octavo.models.observed import LiveCache, check_observed, packed_cache
from octavo.numerics.flow_edges import declare_graph
from octavo.numerics.recipe import FORWARD_ONLY, RECIPE_NAMES, get_recipe

ALWAYS = ("lm_head", "embed_tokens")
RECIPES = {
    **{name: get_recipe(name) for name in RECIPE_NAMES},
    "2^n": get_recipe("block128", scale_rounding="power_of_two", kv_cache="bf16", saved_activations="bf16"),
    "2^n static": get_recipe("tensorwise_static", scale_rounding="power_of_two", amax_margin=2.0),
    "kept": get_recipe("rowwise", keep_bf16=(*ALWAYS, "layers.0.*", "layers.1.self_attn.o_proj")),
}


def declared(role, recipe, config=None):
    return declare_graph(role, decoder_modules(decoder_config(config or tiny_config("qwen3"))), recipe)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_live_decoder_is_as_declared(name, family):
    config = tiny_config(family, tie_word_embeddings=family == "qwen3")
    decoder = tiny_decoder(config, RECIPES[name])
    for role in ("train", "rollout"):
        check_observed(declared(role, RECIPES[name], config), decoder, packed_cache(decoder))


@pytest.mark.parametrize("name", FORWARD_ONLY)
def test_a_forward_only_decoder_is_as_declared(name):
    decoder = tiny_decoder(tiny_config("qwen3"), get_recipe(name))
    check_observed(declared("rollout", get_recipe(name)), decoder, packed_cache(decoder))


def switch_off(decoder):
    decoder.layers[1].down_proj.quantized = False


def keep_layer(decoder):
    other = tiny_decoder(tiny_config("qwen3"), get_recipe("block128", keep_bf16=(*ALWAYS, "down_proj")))
    decoder.layers[1].down_proj = other.layers[1].down_proj


def other_recipe(decoder):
    decoder.layers[0].qkv_proj = tiny_decoder(tiny_config("qwen3"), get_recipe("tensorwise")).layers[0].qkv_proj


def other_format(decoder):
    layer = decoder.layers[0].o_proj
    layer.weight_q = layer.weight_q.float().to(torch.float8_e5m2)


def round_norm(decoder):
    decoder.norm.weight.data = decoder.norm.weight.data.bfloat16()


def widen_head(decoder):
    decoder.lm_head_hp = decoder.lm_head_hp.float()


@pytest.mark.parametrize(  # 96 rows are one block of 128: all of them
    "tamper, expected",
    [
        (switch_off, "model.layers.1.mlp.down_proj: fprop X e4m3 1x128 / bf16, fprop W e4m3 allx128 / absent"),
        (keep_layer, "model.layers.1.mlp.down_proj: fprop X e4m3 1x128 / bf16, fprop W e4m3 allx128 / bf16"),
        (other_recipe, "self_attn.v_proj: fprop X e4m3 row / e4m3 tensor"),
        (other_format, "o_proj: fprop W e4m3 tensor / torch.float8_e5m2 tensor"),
        (round_norm, "model.norm: fprop W fp32 / bf16, master W fp32 / bf16"),
        (widen_head, "lm_head: fprop W bf16 / fp32"),
    ],
)
def test_fp8_that_is_silently_off_or_other_is_named(tamper, expected):
    recipe = get_recipe("block128")
    decoder = tiny_decoder(tiny_config("qwen3"), recipe)
    tamper(decoder)
    with pytest.raises(ValueError, match="declared / found: ") as caught:
        check_observed(declared("train", recipe), decoder, packed_cache(decoder))
    assert expected in str(caught.value)


def test_a_cache_of_another_format_or_scale_is_named():
    recipe = get_recipe("block128")
    decoder = tiny_decoder(tiny_config("qwen3"), recipe)
    right = packed_cache(decoder)
    per_tensor = StoredKV(right.k.values, right.k.scale[0, :1])
    unrounded = StoredKV(right.k.values, right.k.scale * 1.5)
    plain = StoredKV(torch.ones_like(right.k.values, dtype=torch.bfloat16), None)
    for kv_format, k, expected in (
        ("bf16", plain, "kv_cache in 2 layers: fprop K e4m3 row (2^n scale) / bf16"),
        ("fp8", per_tensor, "fprop K e4m3 row (2^n scale) / e4m3 tensor (2^n scale)"),
        ("fp8", unrounded, "fprop K e4m3 row (2^n scale) / e4m3 row"),
        ("bf16", right.k, "attention in 2 layers: fprop Q fp16 / bf16, fprop P fp16 / bf16"),
    ):
        with pytest.raises(ValueError, match=re.escape(expected)):
            check_observed(declared("rollout", recipe), decoder, LiveCache(kv_format, k, right.v))


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_what_the_three_gemms_quantise_is_what_is_declared(name, monkeypatch):
    """Every quantisation of a forward and backward, by its block: also of dY, which leaves nothing behind."""
    decoder = tiny_decoder(tiny_config("qwen3"), get_recipe(name))
    quantize, seen = linear.quantize_matrix, []

    def record(x, quant_block, *args, **options):
        seen.append(quant_block)
        return quantize(x, quant_block, *args, **options)

    layer = decoder.layers[1].down_proj
    monkeypatch.setattr(linear, "quantize_matrix", record)
    x = torch.randn(5, layer.in_features, dtype=decoder.dtype, requires_grad=True)
    layer(x).sum().backward()
    node = declared("train", get_recipe(name)).node("model.layers.1.mlp.down_proj")
    wanted = [node.edge(edge).quant_block for edge in ("saved X", "fprop X", "dgrad dY", "wgrad dY")]
    assert seen == [block for block in wanted if block is not None]


@pytest.mark.parametrize("recipe", ["w8a16", "bf16", "fp8_channel", "tensorwise_static", "fp32"])
def test_a_twin_shares_masters_and_is_the_decoder_of_its_recipe(recipe):
    config = tiny_config("qwen3")
    decoder, alone = tiny_decoder(config, get_recipe("block128")), tiny_decoder(config, get_recipe(recipe))
    twin = decoder.with_recipe(get_recipe(recipe))
    assert [id(p) for p in twin.parameters()] == [id(p) for p in decoder.parameters()]
    tokens, positions, cu_seqlens = lay_end_to_end(random_prompts(0, 3))
    with torch.no_grad():
        for parameters in (decoder.parameters(), alone.parameters()):
            for parameter in parameters:
                parameter.mul_(1.1)
        outs = []
        for each in (twin, alone, decoder):
            before = each(tokens, positions, PackedAttention(cu_seqlens, each.recipe.kv_cache))
            each.requantize_()
            each.freeze_activation_scales_()
            outs.append(each(tokens, positions, PackedAttention(cu_seqlens, each.recipe.kv_cache)))
            assert not torch.equal(before, outs[-1])
    assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[0].float(), outs[2].float())
