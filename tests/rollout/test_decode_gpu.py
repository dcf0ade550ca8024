"""The engine on a GPU: with graphs or without, in any batch, the same samples, and training's log-probabilities."""

import random

import pytest
import torch
from gpu_models import RECIPES, SHAPES, VOCAB, assert_exact, decoder_of, digests, prompts_of, update_
from tiny_models import lay_end_to_end

from octavo.layers.attention import PackedAttention
from octavo.rollout.engine import Engine, EngineConfig
from octavo.rollout.sampler import NonFiniteLogits, SamplingConfig

pytestmark = pytest.mark.gpu


def engine_of(decoder, graphs, steps, **settings):
    settings = {"kv_cache_tokens": 65536, "page_size": 16} | settings
    return Engine(decoder, EngineConfig(cuda_graphs=graphs, decode_steps=steps, **settings), [1, 5])


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
        if shape == "smollm2":
            assert digests(decoder, fresh=False) == digests(decoder, fresh=True)


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


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape, kv_cache", [("qwen3-8b", "fp8"), ("smollm2", "bf16"), ("smollm2", "fp8")])
def test_packing_never_changes_a_sequences_bits(shape, recipe, kv_cache):
    decoder = decoder_of(shape, recipe, kv_cache=kv_cache)
    rng = random.Random(0)
    sequences = [[rng.randrange(VOCAB) for _ in range(n)] for n in (1500, 2, 129, 64, 700, 3, 65, 1900, 31)]
    whole = logprobs_of(decoder, sequences)  # 4,394 tokens: the library's products, where they are equal to ours
    assert all(len(row) == len(sequence) - 1 for row, sequence in zip(whole, sequences, strict=True))
    order = rng.sample(range(len(sequences)), len(sequences))
    for some in (order, order[:4], *([index] for index in order)):
        for index, found in zip(some, logprobs_of(decoder, [sequences[index] for index in some]), strict=True):
            wrong = (found != whole[index]).sum().item()
            assert not wrong, f"{wrong} of {len(found)} differ for sequence {index} packed as {some}"
    assert min(row.min().item() for row in whole) < -3.0


def logprobs_of(decoder, sequences):
    """Of each token but the first, packed in this order, as training runs."""
    tokens, positions, boundaries = (x.cuda() for x in lay_end_to_end(sequences))
    hidden = decoder(tokens, positions, PackedAttention(boundaries, decoder.recipe.kv_cache))
    logprobs, _ = decoder.logprobs(hidden, tokens.roll(-1), 0.8)
    return [row[:-1] for row in logprobs.detach().split([len(sequence) for sequence in sequences])]


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
