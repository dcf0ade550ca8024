"""Layers in fewer kernels: the bits of one operation after another, and only where X is cast by what makes it."""

import kernel_products
import pytest
import torch
from tiny_models import lay_end_to_end, random_prompts, tiny_config, tiny_decoder

from octavo.layers.attention import PackedAttention
from octavo.models import fused
from octavo.numerics.recipe import RECIPE_NAMES, get_recipe

SHAPES = {
    "aligned": dict(hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=32),
    "ragged": dict(hidden_size=144, intermediate_size=208, num_attention_heads=3, num_key_value_heads=1, head_dim=48),
}


def hidden(decoder, grad=False):
    tokens, positions, cu_seqlens = lay_end_to_end(random_prompts(0, 3))
    with torch.set_grad_enabled(grad):
        return decoder(tokens, positions, PackedAttention(cu_seqlens, decoder.recipe.kv_cache))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_the_same_bits_in_fewer_kernels(monkeypatch, recipe, shape):
    decoder = tiny_decoder(tiny_config("qwen3", **SHAPES[shape]), get_recipe(recipe))
    casts = []
    for name in ("add_rms_norm_cast", "swiglu_cast"):
        cast = getattr(fused, name)
        monkeypatch.setattr(
            fused, name, lambda *args, cast=cast, **options: casts.append(cast) or cast(*args, **options)
        )
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
