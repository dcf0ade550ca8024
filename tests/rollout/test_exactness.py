"""The exactness contract: rollout_logprobs equal an independent packed training forward, float for float.

And the check of the check: one flipped byte anywhere in the engine, while it generates, must show.
"""

import itertools
import random

import pytest
import torch
from gpu_models import digests
from tiny_models import disturb_, mismatch, random_prompts, tiny_config, tiny_decoder

from octavo.numerics.recipe import RECIPE_NAMES, get_recipe
from octavo.rollout.engine import Engine, EngineConfig
from octavo.rollout.kv_cache import PagedAttention
from octavo.rollout.sampler import SamplingConfig

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "qwen3": ("qwen3", {}),
    "qwen2": ("qwen2", {"hidden_size": 192, "num_attention_heads": 6, "num_key_value_heads": 6}),  # kv 192 wide
    "llama": ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3, "head_dim": 24}),
}
INVARIANT = [
    (name, kv)
    for name in (*RECIPE_NAMES, "fp8_channel")
    if name != "tensorwise"
    for kv in (("fp32",) if name == "fp32" else ("bf16", "fp8"))
]
ROOMY = EngineConfig(page_size=16, kv_cache_tokens=4096)
TIGHT = EngineConfig(page_size=4, kv_cache_tokens=72, max_prefill_tokens=60)  # 18 pages: two long sequences at most


def build(recipe="block128", model="qwen3", seed=0, **changes):
    family, shape = MODELS[model]
    return tiny_decoder(tiny_config(family, **shape), get_recipe(recipe, **changes), seed)


def generate(decoder, config, *, temperature=1.0, prompts=5, group_size=2, length=24, seed=0, stops=(3,)):
    engine = Engine(decoder, config, stops)
    completions = engine.generate(
        random_prompts(seed, prompts),
        SamplingConfig(temperature=temperature),
        max_completion_tokens=length,
        group_size=group_size,
        seed=seed,
    )
    return completions, engine


def assert_exact(decoder, completions, temperature=1.0):
    difference = mismatch(decoder, completions, temperature)
    reported = [x for group in completions for completion in group for x in completion.rollout_logprobs]
    assert len(difference) == len(reported) > 50 and min(reported) < -1.0
    wrong = difference != 0.0
    assert not wrong.any(), f"{wrong.sum()} of {len(wrong)} logprobs differ, by up to {difference.abs().max():.3g}"


@pytest.mark.parametrize("recipe, kv", INVARIANT)
def test_rollout_equals_training_before_and_after_an_update(recipe, kv):
    decoder = build(recipe, list(MODELS)[len(recipe) % 3], kv_cache=kv)
    roomy, engine = generate(decoder, ROOMY, temperature=0.8)
    assert engine.num_preemptions == 0
    assert_exact(decoder, roomy, 0.8)
    tight, engine = generate(decoder, TIGHT, temperature=0.8)
    assert engine.num_preemptions > 0
    assert tight == roomy

    disturb_(decoder, seed=1)
    with pytest.raises(AssertionError, match="logprobs differ"):
        assert_exact(decoder, roomy, 0.8)  # those were sampled with the weights before
    updated, _ = generate(decoder, TIGHT, temperature=0.8)
    assert updated != roomy
    assert_exact(decoder, updated, 0.8)
    assert digests(decoder, fresh=False) == digests(decoder, fresh=True)


def test_a_byte_that_is_not_the_masters_shows_in_its_digest():
    decoder = build()
    before = digests(decoder, fresh=True)
    assert digests(decoder, fresh=False) == before and len(set(before.values())) == len(before)
    decoder.layers[1].down_proj.weight_q.view(torch.uint8)[3, 5] ^= 1
    after = digests(decoder, fresh=False)
    assert [key for key in before if after[key] != before[key]] == [(7, "weight_q")]
    decoder.layers[0].qkv_proj.weight_q_scale[0, 0] *= 1.0 + 2.0**-20
    assert sum(digests(decoder, fresh=False)[key] != before[key] for key in before) == 2


@pytest.mark.parametrize("seed", range(12))
def test_any_memory_layout_is_exact(seed):
    rng = random.Random(seed)
    recipe, kv = rng.choice(INVARIANT)
    page_size = [1, 4, 7, 16, 64][seed % 5]
    config = EngineConfig(
        page_size=page_size,
        kv_cache_tokens=-(-(40 + 30) // page_size) * page_size + rng.choice([0, 20, 200]),
        max_sequences=rng.choice([1, 3, 100]),
        max_prefill_tokens=rng.choice([1, 64, 8192]),
    )
    temperature = rng.choice([0.5, 1.0, 1.7])
    decoder = build(recipe, rng.choice(list(MODELS)), seed, kv_cache=kv)
    completions, _ = generate(
        decoder, config, temperature=temperature, prompts=4, group_size=rng.choice([1, 3]), length=30, seed=seed
    )
    assert_exact(decoder, completions, temperature)


@pytest.mark.parametrize(
    "recipe, changes",
    [
        ("block128", {"scale_rounding": "power_of_two"}),
        ("rowwise", {"scale_rounding": "power_of_two"}),
        ("tensorwise_static", {"scale_rounding": "power_of_two", "amax_margin": 1.0}),
        ("block128", {"keep_bf16": ("lm_head", "embed_tokens", "layers.0.*")}),
        ("block128", {"keep_bf16": ("lm_head", "embed_tokens", "down_proj", "o_proj")}),
        ("w8a16", {"keep_bf16": ("lm_head", "embed_tokens", "model.layers.1.mlp.*")}),
        ("block128", {"saved_activations": "bf16"}),
    ],
)
def test_every_option_of_a_recipe_is_exact(recipe, changes):
    decoder = build(recipe, **changes)
    completions, engine = generate(decoder, TIGHT)
    assert engine.num_preemptions > 0
    assert_exact(decoder, completions)
    if "saved_activations" not in changes:  # which the forward does not read
        plain = build(recipe)
        generate(plain, ROOMY)  # a static scale calibrates itself
        assert (mismatch(plain, completions, 1.0) != 0.0).any(), "the option changes no number"


@pytest.mark.parametrize("model", MODELS)
def test_long_sequences_are_exact_across_kv_blocks(model):
    # Attention adds its keys in blocks of 64: the completions here begin and end inside the first to the fourth.
    decoder = build("block128", model)
    prompts = random_prompts(1, 1, 62, 62) + random_prompts(2, 1, 140, 140)
    engine = Engine(decoder, EngineConfig(page_size=16, kv_cache_tokens=320), ())
    completions = engine.generate(prompts, SamplingConfig(), max_completion_tokens=60, group_size=2)
    assert engine.num_preemptions > 0
    assert max(len(c.prompt) + len(c.tokens) for group in completions for c in group) > 192
    assert_exact(decoder, completions)


def test_a_static_scale_is_exact_after_it_was_frozen_anew():
    decoder = build("tensorwise_static")
    first, engine = generate(decoder, TIGHT)
    assert_exact(decoder, first)
    decoder.freeze_activation_scales_()
    disturb_(decoder, seed=3)
    second, _ = generate(decoder, TIGHT)
    assert second != first
    assert_exact(decoder, second)


def test_dynamic_tensorwise_is_not_exact_and_says_so():
    decoder = build("tensorwise")
    assert not decoder.recipe.batch_invariant
    completions, _ = generate(decoder, ROOMY)
    difference = mismatch(decoder, completions, 1.0)
    print(f"tensorwise: {(difference != 0).float().mean():.0%} of logprobs differ, std {difference.std():.3f}")
    assert (difference != 0.0).float().mean() > 0.5
    assert difference.abs().max() > 1e-3


@pytest.mark.parametrize("wrong", ["temperature", "kv_format", "recipe", "stale"])
def test_other_numerics_do_not_pass_for_exact(wrong):
    decoder = build("block128", "qwen2")
    completions, _ = generate(decoder, ROOMY, temperature=0.8)
    assert_exact(decoder, completions, 0.8)
    temperature = 0.8
    if wrong == "temperature":
        temperature = 0.80001
    elif wrong == "kv_format":
        decoder = build("block128", "qwen2", kv_cache="bf16")
    elif wrong == "recipe":
        decoder = build("rowwise", "qwen2")
    else:
        disturb_(decoder, seed=1, amount=1e-4)
    assert (mismatch(decoder, completions, temperature) != 0.0).float().mean() > 0.5


# Sabotage: damage done to the engine's memory at one step of a generation.

STEP = 6
"""Of 25: a prefill of the first of each group, one of the others, and then a token each. So five tokens come before."""
TARGET = 5
"""A position inside every prompt here, in its first page."""


def slot_of(cache, page_table):
    return int(page_table[0, TARGET // cache.page_size]) * cache.page_size + TARGET % cache.page_size


def flip_largest(codes):
    """The least bit of one E4M3 code [Dh], of the largest: that of a tiny one may drown in the rounding to BF16."""
    codes[(codes & 0x7F).argmax()] ^= 0x01


def flip_k(decoder, cache, page_table):
    flip_largest(cache.k.view(torch.uint8)[0, slot_of(cache, page_table), 0])


def flip_v(decoder, cache, page_table):
    flip_largest(cache.v.view(torch.uint8)[1, slot_of(cache, page_table), 1])


def double_k_scale(decoder, cache, page_table):
    cache.k_scale[0, slot_of(cache, page_table), 1] *= 2.0


def double_v_scale(decoder, cache, page_table):
    cache.v_scale[1, slot_of(cache, page_table), 0] *= 2.0


def redirect_page(decoder, cache, page_table):
    page_table[0, 0] = page_table[1, 0]


def flip_weight(decoder, cache, page_table):
    decoder.layers[0].gate_up_proj.weight_q.view(torch.uint8)[150, 40] ^= 0x01


def nudge_weight_scale(decoder, cache, page_table):
    decoder.layers[1].qkv_proj.weight_q_scale[0, 0] *= 1.0001


def flip_lm_head(decoder, cache, page_table):
    decoder.lm_head_hp.view(torch.int16)[11, 15] ^= 0x01  # the least bit of one BF16 value


def nudge_embedding(decoder, cache, page_table):
    decoder.embed_hp[:, 5] *= 1.05


def turn_rotary(decoder, cache, page_table):
    decoder.cos[30:50, 2] += 0.05


DAMAGE = {
    f.__name__: f
    for f in (
        flip_k,
        flip_v,
        double_k_scale,
        double_v_scale,
        redirect_page,
        flip_weight,
        nudge_weight_scale,
        flip_lm_head,
        nudge_embedding,
        turn_rotary,
    )
}


def generate_damaged(monkeypatch, damage):
    """Decoder and completions of a generation with `damage` done just before STEP; the decoder is as new afterwards."""
    decoder = build("block128")
    originals = {name: buffer.clone() for name, buffer in decoder.named_buffers()}
    steps = itertools.count()

    make = PagedAttention.__init__

    def build_context(self, cache, page_table, first_positions, num_new):
        if next(steps) == STEP and damage is not None:
            damage(decoder, cache, page_table)
        make(self, cache, page_table, first_positions, num_new)

    prompts = random_prompts(0, 3, 16, 30)
    engine = Engine(decoder, EngineConfig(page_size=8, kv_cache_tokens=512), ())
    with monkeypatch.context() as patch:
        patch.setattr(PagedAttention, "__init__", build_context)
        completions = engine.generate(prompts, SamplingConfig(), max_completion_tokens=24, group_size=2)
    assert next(steps) == 25, "the whole batch decodes together"
    with torch.no_grad():
        for name, buffer in decoder.named_buffers():
            buffer.copy_(originals[name])
    return decoder, completions


@pytest.fixture(scope="module")
def untouched():
    with pytest.MonkeyPatch.context() as patch:
        return generate_damaged(patch, None)


def test_the_untouched_run_is_exact(untouched):
    decoder, completions = untouched
    difference = mismatch(decoder, completions, 1.0)
    assert len(difference) == 6 * 24 and difference.abs().max().item() == 0.0


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_during_generation_shows_from_that_step_on(name, monkeypatch, untouched):
    decoder, completions = generate_damaged(monkeypatch, DAMAGE[name])
    num_wrong = 0
    for completion, clean in zip(itertools.chain(*completions), itertools.chain(*untouched[1]), strict=True):
        difference = mismatch(decoder, [[completion]], 1.0)
        assert completion.tokens[: STEP - 1] == clean.tokens[: STEP - 1]
        assert (difference[: STEP - 1] == 0.0).all(), "seen before it was done"
        num_wrong += (difference != 0.0).sum().item()
    print(f"{name}: {num_wrong} of {6 * 24} logprobs differ")
    assert num_wrong > 0


def test_damage_to_one_sequence_does_not_spread(monkeypatch):
    # A key in a page of its own, past the shared prompt: only the first sequence reads it.
    def damage(decoder, cache, page_table):
        own = int(page_table[0, -1]) * cache.page_size
        cache.k.view(torch.uint8)[:, own : own + cache.page_size] ^= 0x08

    decoder, completions = generate_damaged(monkeypatch, damage)
    wrong = [(mismatch(decoder, [[c]], 1.0) != 0.0).any().item() for c in itertools.chain(*completions)]
    assert sum(wrong) == 1
