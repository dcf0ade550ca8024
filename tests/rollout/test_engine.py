"""The engine's contract: what ends a completion, what is refused, and what a sample may not depend on."""

import functools
import itertools
import random

import pytest
import torch
from tiny_models import VOCAB, lay_end_to_end, mismatch, random_prompts, tiny_config, tiny_decoder

from octavo.kernels.attention import attend
from octavo.layers.attention import PackedAttention
from octavo.models.decoder import Decoder
from octavo.numerics.recipe import get_recipe
from octavo.rollout import kv_cache
from octavo.rollout.engine import MAX_GROUP_SIZE, Engine, EngineConfig
from octavo.rollout.sampler import SamplingConfig, uniform_bits

ROOMY = EngineConfig()


@functools.cache
def policy(recipe):
    return tiny_decoder(tiny_config("qwen3"), get_recipe(recipe))


def generate(prompts, *, config=ROOMY, stops=(), sampling=None, length=12, recipe="block128", **options):
    engine = Engine(policy(recipe), config, stops)
    return engine.generate(prompts, sampling or SamplingConfig(), max_completion_tokens=length, **options)


@torch.no_grad()
def logits_of(decoder, completion):
    """Logits that each token of a completion was sampled from, [tokens, V], by a packed forward."""
    tokens, positions, cu_seqlens = lay_end_to_end([completion.prompt + completion.tokens])
    hidden = decoder(tokens, positions, PackedAttention(cu_seqlens, decoder.recipe.kv_cache))
    return decoder.logits(hidden[len(completion.prompt) - 1 : -1])


def test_each_completion_is_told_of_as_it_finishes():
    told, steps = {}, []

    def on_completion(p, g, completion):
        told[p, g] = completion, len(steps)

    prompts = random_prompts(1, 3)
    options = {"group_size": 2, "stops": tuple(range(0, VOCAB, 9)), "length": 20, "first_index": 7}
    groups = generate(prompts, progress=steps.append, on_completion=on_completion, **options)
    assert {place: completion for place, (completion, _) in told.items()} == {
        (p, g): completion for p, group in enumerate(groups) for g, completion in enumerate(group)
    }
    assert len({step for _, step in told.values()}) > 2 and max(step for _, step in told.values()) == len(steps) - 1
    assert groups == generate(prompts, **options)


# How a completion ends.


@pytest.mark.parametrize("stops", [(3,), (3, 17, 41, 90), tuple(range(0, VOCAB, 2))])
def test_a_completion_ends_with_its_first_stop_token(stops):
    prompts = random_prompts(1, 5)
    free = generate(prompts, length=40, group_size=4)
    stopped = generate(prompts, length=40, group_size=4, stops=stops)
    reasons = set()
    for long, short in zip(itertools.chain(*free), itertools.chain(*stopped), strict=True):
        assert long.finish_reason == "length" and len(long.tokens) == 40
        first = next((i for i, token in enumerate(long.tokens) if token in stops), None)
        end = 40 if first is None else first + 1
        # The stop token is part of the completion and has a log-probability; sampling before it is the same.
        assert short.tokens == long.tokens[:end]
        assert short.rollout_logprobs == long.rollout_logprobs[:end]
        assert short.finish_reason == ("length" if first is None else "stop")
        assert short.prompt == long.prompt
        reasons.add(short.finish_reason)
    assert "stop" in reasons and (len(stops) > 4 or "length" in reasons)


def test_a_stop_token_in_the_last_place_is_a_stop():
    prompt = [5, 6, 7]
    (token,) = generate([prompt], length=1)[0][0].tokens
    for stops, reason in (((token,), "stop"), (((token + 1) % VOCAB,), "length")):
        (completion,) = generate([prompt], length=1, stops=stops)[0]
        assert (completion.tokens, completion.finish_reason) == ([token], reason)


def test_a_stop_token_in_the_prompt_stops_nothing():
    assert len(generate([[3, 3, 3]], length=5, stops=(3,))[0][0].tokens) >= 1
    free, stopped = generate([[3, 3, 3]], length=5)[0][0], generate([[3, 3, 3]], length=5, stops=(3,))[0][0]
    assert stopped.tokens[0] == free.tokens[0]


@pytest.mark.parametrize("length", [1, 2, 7])
def test_completions_are_cut_off_at_the_limit(length):
    groups = generate(random_prompts(2, 3), length=length, group_size=2)
    assert len(groups) == 3
    for group in groups:
        assert len(group) == 2
        for completion in group:
            assert len(completion.tokens) == len(completion.rollout_logprobs) == length
            assert completion.finish_reason == "length"
            assert all(0 <= token < VOCAB for token in completion.tokens)
            assert all(logprob < 0.0 for logprob in completion.rollout_logprobs)


def test_prompts_come_back_as_they_went_in():
    prompts = random_prompts(3, 4)
    groups = generate(prompts, group_size=2, length=2)
    assert [[completion.prompt for completion in group] for group in groups] == [[p, p] for p in prompts]
    kept = groups[0][0].prompt.copy()
    prompts[0].append(1)
    assert groups[0][0].prompt == kept


def test_no_prompt_gives_no_completion():
    assert generate([]) == []


# What is refused.


@pytest.mark.parametrize(
    "prompts, options, message",
    [
        ([[1], []], {}, r"prompt 1 is empty"),
        ([[1], [1] * 245], {}, r"prompt 1 has 245 tokens; with 12 more it exceeds the 256"),
        ([[1], [1, 97]], {}, r"prompt 1 has token ids from 1 to 97, but the model's vocabulary is 0 to 96"),
        ([[-1, 5]], {}, r"prompt 0 has token ids from -1 to 5"),
        ([[1]], {"length": 0}, r"max_completion_tokens must be at least 1; got 0"),
        ([[1]], {"group_size": 0}, r"group_size must be at least 1; got 0"),
        (
            [[1] * 20],
            {"config": EngineConfig(page_size=4, kv_cache_tokens=31)},
            r"up to 32 tokens needs 8 pages of 4, but the KV cache has 7",
        ),
    ],
)
def test_what_cannot_run_is_refused_before_it_runs(prompts, options, message, monkeypatch):
    monkeypatch.setattr(Decoder, "forward", lambda *_: pytest.fail("ran"))
    with pytest.raises(ValueError, match=message):
        generate(prompts, **options)


def test_the_longest_prompt_that_fits_runs():
    (group,) = generate([[1] * 244], config=EngineConfig(page_size=4, kv_cache_tokens=256))
    assert len(group[0].tokens) == 12


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"page_size": 0}, "page_size must be at least 1; got 0"),
        ({"max_sequences": 0}, "max_sequences must be at least 1"),
        ({"max_prefill_tokens": 0}, "max_prefill_tokens must be at least 1"),
        ({"kv_cache_tokens": 15}, "kv_cache_tokens=15 is less than one page of 16"),
    ],
)
def test_engine_config_is_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**changes)


def test_diverged_weights_are_named():
    decoder = tiny_decoder(tiny_config("llama"), get_recipe("block128"))
    with torch.no_grad():
        decoder.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match=r"logits of sequence 0 at position 2 are not finite"):
        Engine(decoder, ROOMY, []).generate([[1, 2]], SamplingConfig(), max_completion_tokens=3)


# What a sample is.


def test_greedy_is_the_argmax_at_every_position():
    decoder = policy("block128")
    for group in generate(random_prompts(4, 4), sampling=SamplingConfig(temperature=0.0), group_size=2, length=10):
        assert group[0].tokens == group[1].tokens
        completion = group[0]
        logits = logits_of(decoder, completion)
        assert completion.tokens == logits.argmax(dim=-1).tolist()
        wanted = logits.double().log_softmax(dim=-1).gather(1, torch.tensor(completion.tokens)[:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(completion.rollout_logprobs).double(), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_a_token_is_its_keys_place_in_the_cumulative_softmax(temperature):
    prompts, G, seed = random_prompts(5, 4), 3, 99
    groups = generate(prompts, sampling=SamplingConfig(temperature=temperature), group_size=G, seed=seed, length=25)
    checked = 0
    for p, g in itertools.product(range(len(prompts)), range(G)):
        completion = groups[p][g]
        logits = logits_of(policy("block128"), completion)
        cumulative = (logits.double() / temperature).softmax(dim=-1).cumsum(dim=-1)
        for i, token in enumerate(completion.tokens):
            u = uniform_bits(seed, p * MAX_GROUP_SIZE + g, len(completion.prompt) + i) / 2**64
            below = cumulative[i, token - 1].item() if token else 0.0
            assert below - 1e-6 <= u <= cumulative[i, token].item() + 1e-6
            checked += 1
    assert checked == 300


CONFIGS = [
    EngineConfig(page_size=16, kv_cache_tokens=4096),
    EngineConfig(page_size=1, kv_cache_tokens=60, max_sequences=7),
    EngineConfig(page_size=4, kv_cache_tokens=60),
    EngineConfig(page_size=7, kv_cache_tokens=2048, max_sequences=1),
    EngineConfig(page_size=64, kv_cache_tokens=256, max_prefill_tokens=1),
    EngineConfig(page_size=3, kv_cache_tokens=120, max_prefill_tokens=50, max_sequences=5),
]


def test_memory_settings_change_no_completion():
    prompts = random_prompts(6, 4)
    runs, preemptions = [], []
    for config in CONFIGS:
        engine = Engine(policy("block128"), config, (3, 17, 41, 60, 90))
        runs.append(engine.generate(prompts, SamplingConfig(), max_completion_tokens=16, group_size=2, seed=8))
        preemptions.append(engine.num_preemptions)
    assert all(run == runs[0] for run in runs[1:])
    assert preemptions[0] == 0 and preemptions[2] > 0 and preemptions[1] > 0, preemptions
    assert {completion.finish_reason for group in runs[0] for completion in group} == {"stop", "length"}


def test_other_prompts_and_their_lengths_change_no_completion():
    rng = random.Random(7)
    prompts = random_prompts(7, 6)
    base = generate(prompts, group_size=2, seed=3, config=CONFIGS[2], length=12)
    for _ in range(2):
        kept = set(rng.sample(range(6), 3))
        others = random_prompts(rng.randrange(1000), 6)
        mixed = [prompts[i] if i in kept else others[i] for i in range(6)]
        groups = generate(mixed, group_size=2, seed=3, config=CONFIGS[5], length=12)
        for i in range(6):
            assert (groups[i] == base[i]) == (i in kept)
    # So do later prompts, and none of them at all.
    assert generate(prompts[:2], group_size=2, seed=3, length=12) == base[:2]


def test_equal_prompts_share_nothing_but_their_distribution():
    prompt = random_prompts(8, 1, 30, 30)[0]
    groups = generate([prompt] * 3, group_size=3, length=15)
    completions = list(itertools.chain(*groups))
    assert len({tuple(completion.tokens) for completion in completions}) == 9
    # The first token of all nine comes from one distribution: its probability is the same float wherever it was drawn.
    first = {}
    for completion in completions:
        token, logprob = completion.tokens[0], completion.rollout_logprobs[0]
        assert first.setdefault(token, logprob) == logprob


def test_the_seed_decides():
    prompts = random_prompts(9, 3)
    first, again, other = (generate(prompts, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert all(a[0].tokens != b[0].tokens for a, b in zip(first, other, strict=True))


def test_an_engine_may_be_used_again_whatever_its_cache_holds():
    prompts = random_prompts(10, 4)
    engine = Engine(policy("block128"), EngineConfig(page_size=4, kv_cache_tokens=100), (3,))

    def run():
        return engine.generate(prompts, SamplingConfig(), max_completion_tokens=30, group_size=2)

    first = run()
    assert engine.num_preemptions > 0
    for x in (engine.cache.k, engine.cache.v):
        x.view(torch.uint8).fill_(0x7F)  # NaN
    for scale in (engine.cache.k_scale, engine.cache.v_scale):
        scale.fill_(torch.nan)
    assert run() == first
    engine.generate([[1]], SamplingConfig(), max_completion_tokens=1)
    assert engine.num_preemptions == 0, "of the last generate"


@pytest.mark.parametrize("sampling", [SamplingConfig(top_k=5), SamplingConfig(top_p=0.5), SamplingConfig(min_p=0.2)])
def test_truncated_sampling_draws_likely_tokens_and_reports_full_logprobs(sampling):
    prompts = random_prompts(11, 4)
    groups = generate(prompts, sampling=sampling, group_size=2, length=15)
    assert (mismatch(policy("block128"), groups, 1.0) == 0.0).all()
    plain = generate(prompts, group_size=2, length=15)
    mean = [sum(sum(c.rollout_logprobs) for c in itertools.chain(*run)) / (8 * 15) for run in (groups, plain)]
    assert mean[0] > mean[1] + 0.3
    for completion in itertools.chain(*groups):
        logits = logits_of(policy("block128"), completion)
        for row, token in zip(logits, completion.tokens, strict=True):
            if sampling.top_k:
                assert (row > row[token]).sum() < 5
            elif sampling.min_p:
                assert row[token].exp() >= 0.2 * row.max().exp() * (1 - 1e-6)
            else:
                probabilities = row.double().softmax(dim=-1)
                assert probabilities[probabilities > probabilities[token]].sum() < 0.5 + 1e-6


# What it costs.


def test_whole_prompt_pages_are_computed_once_a_group():
    # 30 tokens in pages of 7 are 4 whole pages: 28 tokens computed once, 2 by each of 6.
    prompt, G, length = random_prompts(12, 1, 30, 30)[0], 6, 4
    decoder = policy("block128")
    counts = []
    handle = decoder.register_forward_pre_hook(lambda _, arguments: counts.append(len(arguments[0])))
    generate([prompt], config=EngineConfig(page_size=7, kv_cache_tokens=1000), group_size=G, length=length)
    handle.remove()
    assert counts == [30, (G - 1) * 2, *[G] * (length - 1)]


def test_shared_pages_leave_room_that_unshared_ones_would_need():
    # A prompt of 33 and 7 tokens more are 10 pages of 4. Eight sequences share 8 of them: 8 + 8 x 2 = 24 pages, and a
    # page a running sequence is kept free at admission. Without sharing they would want 80.
    prompt = random_prompts(13, 1, 33, 33)[0]
    engine = Engine(policy("block128"), EngineConfig(page_size=4, kv_cache_tokens=4 * 32), ())
    running = []
    handle = policy("block128").register_forward_pre_hook(lambda _, arguments: running.append(len(arguments[0])))
    (group,) = engine.generate([prompt], SamplingConfig(), max_completion_tokens=7, group_size=8)
    handle.remove()
    assert engine.num_preemptions == 0
    assert max(running[2:]) == 8, "all eight decode together"
    assert group == generate([prompt], length=7, group_size=8)[0]


def test_progress_is_told_of_every_completion():
    finished = []
    groups = generate(random_prompts(14, 4), group_size=3, stops=(3, 17, 41), length=25, progress=finished.append)
    assert sum(finished) == 12 and min(finished) == 0 and len(finished) > 20  # told of every step
    assert sum(len(group) for group in groups) == 12


def test_padded_scores_are_bounded_and_their_chunks_change_nothing(monkeypatch):
    prompts = [[3] * 60, *([5, 7] for _ in range(9))]
    limit = 60 * 66 * 4
    sizes = []

    def recorded(q, k, *rest):
        sizes.append(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[1])
        return attend(q, k, *rest)

    monkeypatch.setattr(kv_cache, "attend", recorded)
    whole = generate(prompts, sampling=SamplingConfig(), group_size=2, seed=5, length=6)
    assert max(sizes) > limit
    sizes.clear()
    monkeypatch.setattr(kv_cache, "MAX_SCORES_PER_CHUNK", limit)
    assert generate(prompts, sampling=SamplingConfig(), group_size=2, seed=5, length=6) == whole
    assert 0 < max(sizes) <= limit


def test_skipped_completions_are_missing_and_the_others_are_the_same():
    prompts, told = random_prompts(1, 3), []
    whole = generate(prompts, group_size=3, first_index=4)
    skip = {(0, 0), (1, 0), (1, 1), (1, 2), (2, 1)}
    groups = generate(
        prompts, group_size=3, first_index=4, skip=skip, on_completion=lambda p, g, completion: told.append((p, g))
    )
    assert groups == [whole[0][1:], [], [whole[2][0], whole[2][2]]]
    assert sorted(told) == [(0, 1), (0, 2), (2, 0), (2, 2)]


def test_an_engine_counts_what_it_computed():
    prompts = random_prompts(10, 4)
    engine = Engine(policy("block128"), EngineConfig(page_size=4, kv_cache_tokens=100), ())
    for calls in (1, 2):
        engine.generate(prompts, SamplingConfig(), max_completion_tokens=30)
        assert engine.num_sampled == calls * 4 * 30
    assert engine.num_preemptions > 0 and engine.num_prefilled > 2 * sum(map(len, prompts)) and engine.prefill_s > 0.0
    roomy = Engine(policy("block128"), ROOMY, ())
    roomy.generate(prompts, SamplingConfig(), max_completion_tokens=30)
    assert roomy.num_prefilled == sum(map(len, prompts))
