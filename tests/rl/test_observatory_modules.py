"""The bisect names the operation at which two numerics part, and none where they do not."""

import math

import pytest
import torch
from tiny_models import tiny_config, tiny_decoder

from octavo.numerics.recipe import RECIPE_NAMES, get_recipe
from octavo.rl.observatory_modules import (
    first_difference,
    module_differences,
    packed_outputs,
    rollout_outputs,
)

TOKENS = torch.tensor([5, 9, 2, 77, 31, 8, 8, 60, 12, 3, 44, 71])


def test_a_difference_by_hand():
    left = {"a": torch.tensor([[1.0], [2.0]]), "b": torch.tensor([[1.0, 5.0], [3.0, 4.0]])}
    right = {"a": torch.tensor([[1.0], [2.0]]), "b": torch.tensor([[1.0, 2.0], [3.0, 8.0]])}
    same, other = module_differences(left, right)
    assert (same.max_abs, same.relative, same.differing_share) == (0.0, 0.0, 0.0)
    assert (other.max_abs, other.differing_share) == (4.0, 0.5)
    assert other.relative == pytest.approx(5.0 / math.sqrt(1 + 4 + 9 + 64))
    assert first_difference([same, other]) is other and first_difference([same]) is None


def test_not_a_number_on_one_side_differs():
    nan, one = torch.tensor([[math.nan]]), torch.tensor([[1.0]])
    assert module_differences({"a": nan}, {"a": nan})[0].differing_share == 0.0
    found = module_differences({"a": nan}, {"a": one})[0]
    assert found.differing_share == 1.0 and found.max_abs == math.inf


@pytest.mark.parametrize("recipe", [name for name in RECIPE_NAMES if name != "tensorwise"])
def test_rollout_and_training_are_equal_in_every_operation(recipe):
    decoder = tiny_decoder(tiny_config("qwen3"), get_recipe(recipe))
    packed = packed_outputs(decoder, TOKENS, 0.8)
    rollout = rollout_outputs(decoder, TOKENS, 0.8, num_prompt=5, page_size=4)
    differences = module_differences(packed, rollout)
    assert first_difference(differences) is None
    assert len(differences) == 1 + 2 * 15 + 2
    assert all(output.double().abs().sum() > 0 for output in packed.values())


def test_a_scale_that_follows_the_batch_is_seen():
    decoder = tiny_decoder(tiny_config("qwen3"), get_recipe("tensorwise"))
    packed, rollout = packed_outputs(decoder, TOKENS, 1.0), rollout_outputs(decoder, TOKENS, 1.0, num_prompt=5)
    assert first_difference(module_differences(packed, rollout)).module == "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    "layer, linear, row, named",
    [
        (1, "qkv_proj", 130, "model.layers.1.self_attn.k_proj"),
        (0, "o_proj", 0, "model.layers.0.self_attn.o_proj"),
        (1, "gate_up_proj", 399, "model.layers.1.mlp.up_proj"),
        (0, "down_proj", 95, "model.layers.0.mlp.down_proj"),
    ],
)
@pytest.mark.parametrize("recipe", ["block128", "w8a16"])
def test_one_weight_byte_of_one_layer_is_named(recipe, layer, linear, row, named):
    decoder = tiny_decoder(tiny_config("qwen3"), get_recipe(recipe))
    before = packed_outputs(decoder, TOKENS, 1.0)
    weight = getattr(decoder.layers[layer], linear).weight_q.view(torch.uint8)
    weight[row, 7] ^= 0x40  # an exponent bit
    differences = module_differences(packed_outputs(decoder, TOKENS, 1.0), before)
    assert first_difference(differences).module == named
    assert differences[-1].differing_share > 0.0


def test_the_shadow_parts_from_the_recipe_at_the_first_product_that_is_quantised():
    recipe = get_recipe(
        "block128", keep_bf16=("lm_head", "embed_tokens", "q_proj", "k_proj", "v_proj"), kv_cache="bf16"
    )
    decoder = tiny_decoder(tiny_config("qwen3"), recipe)
    differences = module_differences(
        packed_outputs(decoder, TOKENS, 1.0), packed_outputs(decoder, TOKENS, 1.0, shadow=True)
    )
    assert first_difference(differences).module == "model.layers.0.self_attn.o_proj"
    bf16 = tiny_decoder(tiny_config("llama"), get_recipe("bf16"))
    same = module_differences(packed_outputs(bf16, TOKENS, 1.0), packed_outputs(bf16, TOKENS, 1.0, shadow=True))
    assert first_difference(same) is None and len(same) == 1 + 2 * 13 + 2


def test_the_decoder_is_left_without_hooks_and_the_last_output_is_the_log_probability():
    decoder = tiny_decoder(tiny_config("qwen2"), get_recipe("block128"))
    outputs = packed_outputs(decoder, TOKENS, 1.0)
    assert len(outputs["lm_head"]) == len(TOKENS) - 1 and (outputs["lm_head"] < 0.0).all()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in decoder.modules())
