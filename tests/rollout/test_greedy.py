"""Greedy decoding on a CPU is that of transformers, up to ties under BF16."""

import pytest
import torch
from greedy_checks import check_greedy, logits_along
from tiny_models import random_prompts, tiny_config, tiny_decoder, tiny_transformers

from octavo.numerics.recipe import get_recipe
from octavo.rollout.engine import Engine, EngineConfig
from octavo.rollout.sampler import SamplingConfig

FAMILIES = ["llama", "qwen3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_in_fp32_every_token_is_transformers_argmax(family):
    config = tiny_config(family)
    reference = tiny_transformers(config)
    decoder, prompts = tiny_decoder(config, get_recipe("fp32"), reference), random_prompts(0, 4)
    groups = Engine(decoder, EngineConfig(), ()).generate(
        prompts, SamplingConfig(temperature=0.0), max_completion_tokens=40
    )
    for prompt, (completion,) in zip(prompts, groups, strict=True):
        assert logits_along(reference, prompt, completion.tokens).argmax(dim=-1).tolist() == completion.tokens


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bf16_a_token_is_at_most_a_tie_away(family):
    config = tiny_config(family)
    reference = tiny_transformers(config)
    agreement = check_greedy(tiny_decoder(config, get_recipe("bf16"), reference), reference, random_prompts(0, 4))
    assert agreement.equal_share > 0.9, agreement


@pytest.mark.parametrize("damage", ["weight", "format"])
def test_what_is_more_than_a_tie_is_seen(damage):
    config = tiny_config("qwen3")
    reference = tiny_transformers(config)
    recipe = "bf16" if damage == "weight" else "block128"
    decoder = tiny_decoder(config, get_recipe(recipe), reference)
    if damage == "weight":
        with torch.no_grad():
            decoder.layers[0].down_proj.weight *= 1.2
        decoder.requantize_()
    with pytest.raises(AssertionError, match="below the largest FP32 logit"):
        check_greedy(decoder, reference, random_prompts(0, 4))
