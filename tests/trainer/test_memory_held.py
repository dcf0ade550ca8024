"""The estimate against a decoder that is really built."""

import pytest
import torch
from tiny_models import tiny_config, tiny_decoder

from octavo.layers.attention import PackedAttention
from octavo.layers.linear import quantized_layers
from octavo.models.config import decoder_config
from octavo.models.critic import Critic
from octavo.numerics.recipe import get_recipe
from octavo.rollout.kv_cache import KVCache
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import from_dict
from octavo.trainer.memory_held import estimate_memory, linears
from octavo.trainer.reference import Reference

BASE = {"output_dir": "runs/x", "model": {"path": "x"}, "task": {"type": "arithmetic"}}

SMALL = ("cos", "sin", "scale", "bias_hp", "num_saturated")
"""Buffers that the estimate leaves out."""


def size(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("recipe", ["block128", "rowwise", "bf16", "fp32"])
@pytest.mark.parametrize("tied", [False, True])
def test_parts_are_the_bytes_of_a_decoder(family, recipe, tied):
    config = tiny_config(family, tie_word_embeddings=tied)
    precision = {"recipe": recipe, "keep_bf16": ["layers.0.mlp.down_proj"]}
    run = from_dict(TrainConfig, {**BASE, "precision": precision}, "test")
    decoder = tiny_decoder(config, run.precision.train_recipe())
    estimate = estimate_memory(run, decoder_config(config), two_forwards=False)
    parameters = list(decoder.parameters())
    assert estimate.num_parameters == sum(p.numel() for p in parameters)
    assert estimate.parts["FP32 masters"] == size(parameters)
    assert estimate.model_bytes == estimate.num_parameters * decoder.dtype.itemsize
    buffers = [b for name, b in decoder.named_buffers() if not name.endswith(SMALL)]
    assert estimate.parts[f"{recipe} bytes"] == size(buffers)

    decoder._head_operand()
    layers = quantized_layers(decoder)
    operands = [layer.weight_operand().values for layer in layers]
    backward = [layer.backward_weight() for layer in layers if layer.quantized]
    assert estimate.parts["operands"] == size([*operands, *backward, decoder._head[1].values])

    engine = run.rollout.engine
    cache = KVCache(
        decoder.config, engine.kv_cache_tokens // engine.page_size, engine.page_size, decoder.recipe.kv_cache
    )
    stored = [x for x in (cache.k, cache.v, cache.k_scale, cache.v_scale) if x is not None]
    assert estimate.parts["KV cache"] == size(stored)


def test_a_kl_penalty_adds_the_reference():
    shape = decoder_config(tiny_config("llama"))
    plain = estimate_memory(from_dict(TrainConfig, BASE, "test"), shape, two_forwards=False)
    kl = {**BASE, "algorithm": {"kl": {"coefficient": 1e-3}}}
    penalised = estimate_memory(from_dict(TrainConfig, kl, "test"), shape, two_forwards=False)
    assert penalised.total_bytes - plain.total_bytes == penalised.parts["reference model"]
    reference = tiny_decoder(tiny_config("llama"), get_recipe("block128"))
    reference._head_operand()
    forward = [buffer for name, buffer in reference.named_buffers() if not name.endswith(SMALL)]
    operands = [layer.weight_operand().values for layer in quantized_layers(reference)]
    assert penalised.parts["reference model"] == size([*forward, *operands, reference._head[1].values]), "no masters"


def test_a_rollout_of_its_own_adds_its_bytes_and_sets_the_cache():
    config = tiny_config("llama")
    precision = {"recipe": "bf16", "rollout": {"recipe": "block128"}, "allow_mismatch": True}
    run = from_dict(TrainConfig, {**BASE, "precision": precision}, "test")
    estimate = estimate_memory(run, decoder_config(config), two_forwards=True)
    twin = tiny_decoder(config, run.precision.rollout_recipe())
    stored = [b for name, b in twin.named_buffers() if not name.endswith(SMALL)]
    twin._head_operand()
    operands = [layer.weight_operand().values for layer in quantized_layers(twin)]
    assert estimate.parts["the rollout's own bytes"] == size([*stored, *operands, twin._head[1].values])
    same = from_dict(TrainConfig, {**BASE, "precision": {"recipe": "block128"}}, "test")
    assert estimate.parts["KV cache"] == estimate_memory(same, decoder_config(config), False).parts["KV cache"]


@pytest.mark.parametrize("recipe", ["bf16", "block128"])
@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_adds_its_masters_moments_and_bytes(recipe, tied):
    config = tiny_config("qwen2", tie_word_embeddings=tied)
    ppo = {**BASE, "algorithm": {"advantage": {"type": "gae"}}, "critic": {"recipe": recipe}}
    run, shape = from_dict(TrainConfig, ppo, "test"), decoder_config(config)
    plain = estimate_memory(run, shape, two_forwards=False)
    estimate = estimate_memory(run, shape, two_forwards=False, critic_shape=shape)
    critic = Critic(tiny_decoder(config, get_recipe(recipe)))
    parameters = list(critic.parameters())
    assert estimate.num_critic_parameters == sum(p.numel() for p in parameters)
    stored = [b for name, b in critic.named_buffers() if not name.endswith(SMALL)]
    layers = quantized_layers(critic)
    prepared = [layer.weight_operand().values for layer in layers]
    prepared += [layer.backward_weight() for layer in layers if layer.quantized]
    assert estimate.parts["critic"] == 4 * size(parameters) + size([*stored, *prepared])
    assert estimate.total_bytes - plain.total_bytes == estimate.parts["critic"]


@pytest.mark.parametrize("reference", ["ema", "snapshot"])
def test_a_reference_of_its_own_is_what_calibration_holds_beside_the_masters(reference):
    config = tiny_config("qwen3")
    run = from_dict(TrainConfig, {**BASE, "calibration": {"reference": reference}}, "test")
    estimate = estimate_memory(run, decoder_config(config), two_forwards=False)
    held = Reference(tiny_decoder(config, get_recipe("block128")), run.calibration, 1.0)
    small = size(buffer for name, buffer in held.own.named_buffers() if name.endswith(SMALL))
    assert estimate.parts["calibration's reference"] == held.num_bytes - small > estimate.parts["FP32 masters"]


def test_a_ratio_from_an_fp32_shadow_adds_its_copies():
    config = tiny_config("llama")
    shadowed = {**BASE, "algorithm": {"ratio_from": "fp32_shadow"}, "calibration": None}
    estimate = estimate_memory(from_dict(TrainConfig, shadowed, "test"), decoder_config(config), two_forwards=False)
    twin = tiny_decoder(config, get_recipe("block128")).with_recipe(get_recipe("fp32"))
    tokens = torch.arange(5)
    hidden = twin(tokens, tokens, PackedAttention(torch.tensor([0, 5]), "fp32"), shadow=True)
    twin.logprobs(hidden, tokens, 1.0)
    stored = [b for name, b in twin.named_buffers() if not name.endswith(SMALL)]
    assert not any(layer._cache for layer in quantized_layers(twin)), "an operand is kept"
    assert estimate.parts["FP32 shadow"] == size([*stored, twin._head[1].values])


def test_bf16_steps_as_a_rescue_add_their_weights_and_cache():
    shape = decoder_config(tiny_config("llama"))
    plain = estimate_memory(from_dict(TrainConfig, BASE, "test"), shape, two_forwards=False)
    rescued = {**BASE, "watch": {"action": "bf16_forward"}}
    estimate = estimate_memory(from_dict(TrainConfig, rescued, "test"), shape, two_forwards=False)
    bf16 = estimate_memory(from_dict(TrainConfig, {**BASE, "precision": {"recipe": "bf16"}}, "test"), shape, False)
    wanted = sum(bf16.parts[name] for name in ("bf16 bytes", "operands", "KV cache"))
    assert estimate.total_bytes - plain.total_bytes == estimate.parts["rescue in BF16"] == wanted


@pytest.mark.parametrize("recipe", ["block128", "w8a16", "rowwise", "bf16"])
def test_kernels_on_a_gpu_read_the_stored_bytes(recipe):
    widths = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}  # whole blocks
    shape = decoder_config(tiny_config("llama", **widths))
    run = from_dict(TrainConfig, {**BASE, "precision": {"recipe": recipe}, "device": "cuda"}, "test")
    on_cpu = from_dict(TrainConfig, {**BASE, "precision": {"recipe": recipe}}, "test")
    here, there = (estimate_memory(config, shape, two_forwards=False).parts for config in (run, on_cpu))
    linear = sum(rows * columns for _, rows, columns in linears(shape))
    stored = recipe in ("bf16", "rowwise")  # whose second set of bytes lies transposed
    assert here["operands"] == (0 if stored else linear), "a transposed byte for each"
    assert {key: value for key, value in here.items() if key != "operands"} == {
        key: value for key, value in there.items() if key != "operands"
    }


@pytest.mark.parametrize("recipe", ["block128", "bf16"])
def test_vllm_holds_weights_of_its_own_and_no_cache_of_octavos(recipe, monkeypatch):
    config = tiny_config("llama")
    precision = {"recipe": recipe, "allow_mismatch": True}
    data = {**BASE, "precision": precision, "rollout": {"engine": {"type": "vllm", "gpu_memory_utilization": 0.25}}}
    run = from_dict(TrainConfig, data, "test")
    decoder = tiny_decoder(config, run.precision.rollout_recipe())
    estimate = estimate_memory(run, decoder_config(config), two_forwards=False)
    assert "KV cache" not in estimate.parts
    stored = [buffer for name, buffer in decoder.named_buffers() if not name.endswith(SMALL)]
    assert estimate.parts["vLLM's weights"] == size(stored)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (1, 8000))
    there = estimate_memory(from_dict(TrainConfig, {**data, "device": "cuda"}, "test"), decoder_config(config), False)
    assert there.parts["vLLM"] == 2000
