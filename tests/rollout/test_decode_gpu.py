"""The engine on a GPU: with graphs or without, in any batch, the same samples, and training's log-probabilities."""

import random

import pytest
import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from octavo.models.config import decoder_config
from octavo.models.decoder import Decoder
from octavo.numerics.recipe import get_recipe
from octavo.rl.batch import pack
from octavo.rollout.engine import Engine, EngineConfig
from octavo.rollout.sampler import NonFiniteLogits, SamplingConfig
from octavo.trainer.policy import packed_logprobs

pytestmark = pytest.mark.gpu

VOCAB = 8192
SHAPES = {
    "qwen3-8b": (Qwen3Config, 4096, 12288, 32, 8, 128),
    "llama3-8b": (LlamaConfig, 4096, 14336, 32, 8, 128),
    "qwen2.5-0.5b": (Qwen2Config, 896, 4864, 14, 2, 64),
    "smollm2": (LlamaConfig, 576, 1536, 9, 3, 64),
}
"""Class, hidden and intermediate size, heads, KV heads, head width; two layers of each."""
RECIPES = ["block128", "w8a16", "rowwise", "tensorwise_static", "bf16"]


def decoder_of(shape, recipe, **changes):
    cls, width, inner, heads, kv_heads, head_dim = SHAPES[shape]
    config = cls(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=inner, num_hidden_layers=2, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=9216, tie_word_embeddings=False,
    )  # fmt: skip
    decoder = Decoder(decoder_config(config), config, get_recipe(recipe, **changes)).cuda()
    update_(decoder, 0)
    return decoder


@torch.no_grad()
def update_(decoder, seed):
    """Other weights, as after an optimiser step; the bytes are written in place."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, device="cuda")
        parameter.copy_(1.0 + 0.2 * noise if "norm" in name else noise * parameter.shape[-1] ** -0.5)
    decoder.requantize_()


def engine_of(decoder, graphs, steps, **settings):
    settings = {"kv_cache_tokens": 65536, "page_size": 16} | settings
    return Engine(decoder, EngineConfig(cuda_graphs=graphs, decode_steps=steps, **settings), [1, 5])


def prompts_of(count, longest, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(2, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def assert_exact(decoder, groups, temperature, microbatch_tokens=9000):
    advantages = torch.zeros(len(groups), len(groups[0]))
    (batch,) = pack(groups, advantages, num_mini_batches=1, microbatch_tokens=microbatch_tokens, device="cuda")
    for microbatch in batch.microbatches:
        logprobs = packed_logprobs(decoder, microbatch, temperature)[0].detach()  # as training runs, with a gradient
        with torch.no_grad():
            assert torch.equal(logprobs, packed_logprobs(decoder, microbatch, temperature)[0])
        assert torch.equal(logprobs, microbatch.rollout_logprobs) and logprobs.abs().sum() > 0


@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_graphs_and_eager_steps_sample_what_training_computes(shape, recipe, kv_cache):
    decoder = decoder_of(shape, recipe, kv_cache=kv_cache)
    graphed, eager = engine_of(decoder, True, 8, page_size=32), engine_of(decoder, False, 1, kv_cache_tokens=8192)
    prompts = prompts_of(9, 300)
    for seed in range(4):  # three updates, with graphs of the first weights
        groups = [
            engine.generate(prompts, SamplingConfig(temperature=0.8), max_completion_tokens=70, group_size=3, seed=seed)
            for engine in (graphed, eager)
        ]
        if recipe != "tensorwise_static":  # whose first batch sets the scale, and which learns as it runs
            assert groups[0] == groups[1]
        assert_exact(decoder, groups[0], 0.8)
        assert_exact(decoder, groups[1], 0.8)
        update_(decoder, seed + 1)


@pytest.mark.parametrize("batch", [1, 2, 3, 17, 64, 100, 256])
def test_any_batch_size_is_exact(batch):
    decoder = decoder_of("qwen2.5-0.5b", "block128", kv_cache="fp8")
    engine = engine_of(decoder, True, 8, max_sequences=batch)
    prompts = prompts_of(max(batch, 5), 60)
    groups = engine.generate(prompts, SamplingConfig(), max_completion_tokens=40, seed=1)
    assert_exact(decoder, groups, 1.0)
    order = list(range(len(prompts)))
    random.Random(0).shuffle(order)
    for index in order[:3]:
        (alone,) = engine.generate(
            [prompts[index]], SamplingConfig(), max_completion_tokens=40, seed=1, first_index=index
        )
        assert alone == groups[index]


@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
def test_long_sequences_are_exact(kv_cache):
    decoder = decoder_of("qwen3-8b", "block128", kv_cache=kv_cache)
    engine = engine_of(decoder, True, 8, kv_cache_tokens=40000, max_prefill_tokens=3000)
    rng = random.Random(1)
    lengths = [1, 63, 64, 65, 1000, 4050]
    prompts = [[rng.randrange(2, VOCAB) for _ in range(n)] for n in lengths]
    assert_exact(decoder, engine.generate(prompts, SamplingConfig(), max_completion_tokens=64, seed=2), 1.0)
    prompts = [[rng.randrange(2, VOCAB) for _ in range(8100)] for _ in range(4)]
    assert_exact(decoder, engine.generate(prompts, SamplingConfig(), max_completion_tokens=64, seed=2), 1.0)


def test_a_changed_byte_shows_in_a_graphs_replay():
    decoder = decoder_of("qwen2.5-0.5b", "block128", kv_cache="fp8")
    engine = engine_of(decoder, True, 8)
    prompts = prompts_of(4, 40)
    clean = engine.generate(prompts, SamplingConfig(), max_completion_tokens=40)
    assert_exact(decoder, clean, 1.0)
    stored = decoder.layers[1].gate_up_proj.weight_q.view(torch.uint8)
    stored[150, 40] ^= 0x10
    other = engine.generate(prompts, SamplingConfig(), max_completion_tokens=40)
    assert other != clean
    stored[150, 40] ^= 0x10
    assert engine.generate(prompts, SamplingConfig(), max_completion_tokens=40) == clean


def test_weights_that_diverged_are_named():
    decoder = decoder_of("smollm2", "block128")
    decoder.norm.weight.data[3] = torch.nan
    with pytest.raises(NonFiniteLogits, match="are not finite"):
        engine_of(decoder, True, 8).generate(prompts_of(3, 10), SamplingConfig(), max_completion_tokens=20)
