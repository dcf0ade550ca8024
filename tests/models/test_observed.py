"""The live model against the declaration: equal for every recipe, and each tampering is named."""

import dataclasses
import re

import kernel_products
import pytest
import torch
from tiny_models import lay_end_to_end, random_prompts, tiny_config, tiny_decoder

from octavo.kernels.attention import StoredKV
from octavo.layers import linear
from octavo.layers.attention import PackedAttention
from octavo.models.config import decoder_config
from octavo.models.modules import decoder_modules
from octavo.models.observed import LiveCache, check_observed, kv_probe, packed_cache
from octavo.numerics.flow_edges import declare_graph
from octavo.numerics.fp8 import BLOCK_128X128, PER_ROW, PER_TENSOR, quantize
from octavo.numerics.recipe import FORWARD_ONLY, RECIPE_NAMES, GemmRecipe, get_recipe

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


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "fp32"])
def test_what_kernels_are_given_on_a_gpu_is_as_declared(name, monkeypatch):
    kernel_products.as_on_gpu(monkeypatch)
    decoder = tiny_decoder(tiny_config("qwen2"), RECIPES[name])
    check_observed(declared("train", RECIPES[name], tiny_config("qwen2")), decoder, packed_cache(decoder))
    decoder.layers[1].o_proj.forget_prepared()
    scale = dict(decoder.layers[1].o_proj.named_buffers()).get("weight_q_scale")
    if scale is not None:
        scale.data.mul_(2.0)
        with pytest.raises(ValueError, match="declared / found: .*layers.1.self_attn.o_proj"):
            check_observed(declared("train", RECIPES[name], tiny_config("qwen2")), decoder, packed_cache(decoder))


@pytest.mark.parametrize("name", FORWARD_ONLY)
def test_a_forward_only_decoder_is_as_declared(name):
    decoder = tiny_decoder(tiny_config("qwen3"), get_recipe(name))
    check_observed(declared("rollout", get_recipe(name)), decoder, packed_cache(decoder))


def switch_off(decoder):
    decoder.layers[1].down_proj.quantized = False


def keep_layer(decoder):
    other = tiny_decoder(tiny_config("qwen2"), get_recipe("block128", keep_bf16=(*ALWAYS, "down_proj")))
    decoder.layers[1].down_proj = other.layers[1].down_proj


def other_recipe(decoder):
    decoder.layers[0].qkv_proj = tiny_decoder(tiny_config("qwen2"), get_recipe("tensorwise")).layers[0].qkv_proj


def forward_only(decoder):
    decoder.layers[0].o_proj = tiny_decoder(tiny_config("qwen2"), get_recipe("fp8_channel")).layers[0].o_proj


def other_class(decoder):
    decoder.layers[0].o_proj = torch.nn.Linear(128, 96, bias=False)


def change_recipe(**changes):
    def change(decoder):
        layer = decoder.layers[0].o_proj
        layer.recipe = dataclasses.replace(layer.recipe, **changes)
        layer.requantize_()

    return change


def other_format(decoder):
    layer = decoder.layers[0].o_proj
    layer.weight_q = layer.weight_q.float().to(torch.float8_e5m2)


def unpacked_bytes(decoder):
    layer = decoder.layers[0].o_proj
    layer.weight_q = layer.weight_q.bfloat16()


def unpacked_saved(decoder):
    layer = decoder.layers[0].o_proj
    save = layer.save_activation
    layer.save_activation = lambda x: dataclasses.replace(save(x), q=save(x).q.bfloat16())


def stale_bytes(decoder):
    with torch.no_grad():
        decoder.layers[1].gate_up_proj.weight[-1, -1] *= 2.0


def stale_operand(decoder):
    layer = decoder.layers[1].o_proj
    layer.weight_operand()
    layer.weight_q_scale.data.mul_(2.0)  # which no version counter sees


def stale_scale(decoder):
    decoder.layers[1].o_proj.weight_q_scale.mul_(2.0)


def stale_bias(decoder):
    decoder.layers[1].qkv_proj.bias_hp[70] += 1.0


def stale_embedding(decoder):
    decoder.embed_hp[3, 5] += 1.0


def wide_output(decoder):
    decoder.layers[0].o_proj._dtype = torch.float32


def round_norm(decoder):
    decoder.norm.weight.data = decoder.norm.weight.data.bfloat16()


def round_rotary(decoder):
    decoder.sin = decoder.sin.bfloat16()


def widen_head(decoder):
    decoder.lm_head_hp = decoder.lm_head_hp.float()


NO_GEMM = GemmRecipe(left=None, right=None)
TAMPERED = [
    (switch_off, "model.layers.1.mlp.down_proj: fprop X e4m3 1x128 / absent, fprop W e4m3 128x128 / absent"),
    (keep_layer, "model.layers.1.mlp.down_proj: fprop X e4m3 1x128 / bf16, fprop W e4m3 128x128 / bf16"),
    (
        other_recipe,
        "model.layers.0.self_attn.v_proj: fprop X e4m3 1x128 / e4m3 tensor, ",
    ),
    (forward_only, "saved X e4m3 128x1 / absent"),
    (other_class, "layers.0.self_attn.o_proj: fprop X e4m3 1x128 / absent"),
    (change_recipe(dgrad=GemmRecipe(left=None, right=BLOCK_128X128)), "o_proj: dgrad dY e4m3 1x128 / bf16. No"),
    (change_recipe(wgrad=NO_GEMM, saved_activations="bf16"), "wgrad dY e4m3 128x1 / bf16, wgrad X e4m3 128x1 / bf16"),
    (change_recipe(saved_activations="bf16"), "layers.0.self_attn.o_proj: saved X e4m3 128x1 / bf16. No"),
    (change_recipe(scale_rounding="power_of_two"), "fprop X e4m3 1x128 / e4m3 1x128 (2^n scale)"),
    (change_recipe(fprop=GemmRecipe(left=None, right=BLOCK_128X128)), "/ e4m3 128x128 [ordered sums]"),
    (other_format, "o_proj: fprop W e4m3 128x128 / torch.float8_e5m2, "),
    (unpacked_bytes, "o_proj: fprop W e4m3 128x128 / bf16, "),
    (unpacked_saved, "layers.0.self_attn.o_proj: saved X e4m3 128x1 / bf16. No"),
    (stale_bytes, "layers.1.mlp.up_proj: fprop W e4m3 128x128 / e4m3 of other numbers, dgrad W e4m3"),
    (stale_operand, "layers.1.self_attn.o_proj: dgrad W e4m3 128x128 / e4m3 of other numbers. No"),
    (stale_scale, "layers.1.self_attn.o_proj: fprop W e4m3 128x128 / e4m3 of other numbers, dgrad W"),
    (stale_bias, "layers.1.self_attn.q_proj: fprop bias bf16 / bf16 of other numbers. No"),
    (stale_embedding, "model.embed_tokens: fprop W bf16 / bf16 of other numbers. No"),
    (wide_output, "layers.0.self_attn.o_proj: fprop Y bf16 / fp32. No"),
    (round_norm, "model.norm: fprop W fp32 / bf16, master W fp32 / bf16. No"),
    (round_rotary, "model.layers.*.self_attn.rotary in 2 layers: fprop cos sin fp32 / bf16. No"),
    (widen_head, "lm_head: fprop W bf16 / fp32. No"),
]


@pytest.mark.parametrize("tamper, expected", TAMPERED)
def test_fp8_that_is_silently_off_or_other_is_named(tamper, expected):
    recipe = get_recipe("block128")
    decoder = tiny_decoder(tiny_config("qwen2"), recipe)
    tamper(decoder)
    with pytest.raises(ValueError, match="declared / found: ") as caught:
        check_observed(declared("train", recipe, tiny_config("qwen2")), decoder, packed_cache(decoder))
    assert expected in str(caught.value)


def test_a_weight_that_only_the_backward_reads_is_compared():
    decoder = tiny_decoder(tiny_config("qwen3"), get_recipe("rowwise"))
    decoder.layers[0].down_proj.dgrad_q_scale.mul_(2.0)
    with pytest.raises(
        ValueError, match=r"found: model\.layers\.0\.mlp\.down_proj: dgrad W e4m3 column / e4m3 of other numbers\. "
    ):
        check_observed(declared("train", get_recipe("rowwise")), decoder, packed_cache(decoder))
    check_observed(declared("rollout", get_recipe("rowwise")), decoder, packed_cache(decoder))


def test_another_margin_is_named_and_the_frozen_scale_is_left_as_it_was():
    recipe = get_recipe("tensorwise_static")
    decoder = tiny_decoder(tiny_config("qwen3"), recipe)
    layer = decoder.layers[0].o_proj
    layer.activation_operand(torch.ones(3, layer.in_features))
    before = {name: buffer.clone() for name, buffer in decoder.named_buffers() if "activation" in name or "sat" in name}
    check_observed(declared("train", recipe), decoder, packed_cache(decoder))
    assert before["layers.0.o_proj.activation_scale"] > 0.0 and before["layers.0.o_proj.saturation_counts"][1] > 0
    for name, buffer in before.items():
        assert torch.equal(decoder.get_buffer(name).nan_to_num(-1.0), buffer.nan_to_num(-1.0)), name
    layer.recipe = dataclasses.replace(recipe, amax_margin=1.5)
    with pytest.raises(ValueError, match=r"o_proj: fprop X e4m3 tensor \(frozen x1.25\) / other numbers\. No"):
        check_observed(declared("train", recipe), decoder, packed_cache(decoder))


def test_a_check_keeps_no_operand_ready():
    decoder = tiny_decoder(tiny_config("qwen3"), get_recipe("block128"))
    check_observed(declared("train", get_recipe("block128")), decoder, packed_cache(decoder))
    assert all(not layer._cache for layer in linear.quantized_layers(decoder))


def test_a_cache_of_another_format_or_scale_is_named():
    recipe = get_recipe("block128")
    decoder = tiny_decoder(tiny_config("qwen3"), recipe)
    right = packed_cache(decoder)
    probe = kv_probe(decoder)
    flat = probe.flatten(0, 1)

    def stored(block, rounding):
        q, scale = quantize(flat, block, rounding)
        return StoredKV(q.view_as(probe), scale.expand(len(flat), 1).reshape(probe.shape[:-1]))

    for kv_format, k, expected in (
        ("bf16", StoredKV(probe, None), "kv_cache in 2 layers: fprop K e4m3 row (2^n scale) / bf16"),
        ("fp8", stored(PER_TENSOR, "power_of_two"), "fprop K e4m3 row (2^n scale) / e4m3 tensor (2^n scale)"),
        ("fp8", stored(PER_ROW, "none"), "fprop K e4m3 row (2^n scale) / e4m3 row"),
        ("fp8", StoredKV(right.k.values, right.k.scale * 2.0), "(2^n scale) / e4m3 of other numbers"),
        ("bf16", right.k, "attention in 2 layers: fprop Q fp16 / bf16, fprop P fp16 / bf16"),
    ):
        with pytest.raises(ValueError, match=re.escape(expected)):
            check_observed(declared("rollout", recipe), decoder, LiveCache(kv_format, k, right.v))


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_what_the_three_gemms_quantise_is_what_is_declared(name, monkeypatch):
    """Every quantisation of a forward and backward, by its block: also of dY, which leaves nothing behind."""
    decoder = tiny_decoder(tiny_config("qwen3"), get_recipe(name))
    seen = []

    def recorded(quantize):
        return lambda x, quant_block, *args, **options: (
            seen.append(quant_block) or quantize(x, quant_block, *args, **options)
        )

    layer = decoder.layers[1].down_proj
    for name_of in ("quantize_matrix", "quantized_operand"):
        monkeypatch.setattr(linear, name_of, recorded(getattr(linear, name_of)))
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
