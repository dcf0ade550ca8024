"""The estimate against a decoder that is really built."""

import pytest
from tiny_models import tiny_config, tiny_decoder

from octavo.check.memory import estimate_memory
from octavo.layers.linear import quantized_layers
from octavo.models.config import decoder_config
from octavo.numerics.recipe import get_recipe
from octavo.rollout.kv_cache import KVCache
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import from_dict

BASE = {"output_dir": "runs/x", "model": {"path": "x"}, "task": {"type": "arithmetic"}}


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("recipe", ["block128", "rowwise", "bf16", "fp32"])
@pytest.mark.parametrize("tied", [False, True])
def test_parts_are_the_bytes_of_a_decoder(family, recipe, tied):
    config = tiny_config(family, tie_word_embeddings=tied)
    keep = ("lm_head", "embed_tokens", "layers.0.mlp.down_proj")
    decoder = tiny_decoder(config, get_recipe(recipe, keep_bf16=keep))
    run = from_dict(TrainConfig, BASE, "test")
    estimate = estimate_memory(run, decoder_config(config), decoder.recipe)
    parameters = list(decoder.parameters())
    assert estimate.num_parameters == sum(p.numel() for p in parameters)
    assert estimate.parts["FP32 masters"] == size(parameters)
    assert estimate.model_bytes == estimate.num_parameters * decoder.dtype.itemsize
    small = ("cos", "sin", "scale", "bias_hp")
    buffers = [b for name, b in decoder.named_buffers() if not name.endswith(small)]
    assert estimate.parts[f"{recipe} bytes"] == size(buffers)

    decoder._head_operand()
    layers = quantized_layers(decoder)
    operands = [layer.weight_operand().values for layer in layers]
    backward = [layer._backward_weight() for layer in layers if layer.quantized]
    assert estimate.parts["operands"] == size([*operands, *backward, decoder._head[1].values])

    engine = run.rollout.engine
    cache = KVCache(
        decoder.config, engine.kv_cache_tokens // engine.page_size, engine.page_size, decoder.recipe.kv_cache
    )
    stored = [x for x in (cache.k, cache.v, cache.k_scale, cache.v_scale) if x is not None]
    assert estimate.parts["KV cache"] == size(stored)


def test_a_kl_penalty_adds_the_reference():
    shape, recipe = decoder_config(tiny_config("llama")), get_recipe("block128")
    plain = estimate_memory(from_dict(TrainConfig, BASE, "test"), shape, recipe)
    kl = {**BASE, "algorithm": {"kl": {"coefficient": 1e-3}}}
    penalised = estimate_memory(from_dict(TrainConfig, kl, "test"), shape, recipe)
    assert penalised.total_bytes - plain.total_bytes == penalised.parts["reference model"]
    assert penalised.parts["reference model"] > plain.parts["FP32 masters"]
