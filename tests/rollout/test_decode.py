"""Decode steps in a row and in padded batches give what single steps give; graphs are replayed on what they expect."""

import importlib.util
import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB, random_prompts, tiny_config, tiny_decoder

from octavo.layers.linear import quantized_layers
from octavo.numerics.recipe import get_recipe
from octavo.rollout import decode as decode_module
from octavo.rollout.cuda_graph import GraphedSteps, padded_size
from octavo.rollout.decode import DecodeSteps, Run
from octavo.rollout.engine import Engine, EngineConfig
from octavo.rollout.sampler import NonFiniteLogits, SamplingConfig

STOPS = (3, 17, 41)


def engine_of(decoder, steps=1, graphs=False, **settings):
    engine = Engine(decoder, EngineConfig(decode_steps=steps, **settings), STOPS)
    engine.decode_steps = steps
    if graphs:
        engine.decode = DecodeSteps(
            decoder, engine.cache, STOPS, max_sequences=engine.config.max_sequences, max_tokens=decoder.max_tokens,
            max_steps=steps, graphs=True,
        )  # fmt: skip
    return engine


def generate(engine, sampling=None, **options):
    settings = {"max_completion_tokens": 21, "group_size": 3, "seed": 2**64 - 4} | options
    return engine.generate(random_prompts(1, 4, 3, 20), sampling or SamplingConfig(), **settings)


class Replayed(GraphedSteps):
    """A graph's contract without a GPU: a capture runs the step on cleared buffers, a replay runs it as captured."""

    def __init__(self, step, harmless):
        self.step, self.harmless, self.sizes, self.num_replays = step, harmless, [], 0

    def prepare(self, size):
        if size not in self.sizes:
            with self.harmless():
                self.step(size)
            self.sizes.append(size)

    def __call__(self, size):
        assert size in self.sizes, "replayed before it was captured"
        self.num_replays += 1
        self.step(size)


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder(tiny_config("qwen3"), get_recipe("block128", kv_cache="fp8"))


@pytest.fixture(scope="module")
def one_by_one(decoder):
    completions = generate(engine_of(decoder))
    reasons = {completion.finish_reason for completion in itertools.chain(*completions)}
    assert reasons == {"stop", "length"}
    return completions


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_steps_in_a_row_change_no_completion(decoder, one_by_one, monkeypatch, seed, ahead):
    monkeypatch.setattr(decode_module, "GraphedSteps", Replayed)
    rng = random.Random(seed)
    size = rng.choice([1, 2, 5, 16])
    engine = engine_of(
        decoder,
        rng.choice([2, 3, 8, 40]),
        graphs=ahead,
        page_size=size,
        kv_cache_tokens=rng.choice([48, 64, 100, 4096]),
        max_sequences=rng.choice([1, 3, 64]),
    )
    assert generate(engine) == one_by_one


def test_a_run_starts_before_the_last_is_looked_at_until_a_sequence_ends(decoder, one_by_one, monkeypatch):
    monkeypatch.setattr(decode_module, "GraphedSteps", Replayed)
    events = []
    start, result = DecodeSteps.start, Run.result

    def started(self, sequences, num_steps, *args, go_on=False):
        events.append(("start", num_steps, go_on))
        return start(self, sequences, num_steps, *args, go_on=go_on)

    monkeypatch.setattr(DecodeSteps, "start", started)
    monkeypatch.setattr(Run, "result", lambda self: events.append(("look", self.num_steps)) or result(self))
    engine = engine_of(decoder, 8, graphs=True)
    assert generate(engine) == one_by_one
    first_end = next(i for i, event in enumerate(events[2:], start=2) if event[0] == "start" and not event[2])
    assert events[:2] == [("start", 8, False), ("start", 8, True)] and events[first_end - 1][0] == "look"
    engine.stop_token_ids = frozenset()
    engine.decode.stop_tokens = torch.tensor([], dtype=torch.int64)
    events.clear()
    generate(engine, group_size=1)  # 21 tokens, the first from the prefill: nothing is wasted at the end
    runs = [("start", 8, False), ("start", 8, True), ("look", 8), ("start", 4, True), ("look", 8), ("look", 4)]
    assert events == runs


def test_steps_in_a_row_look_at_the_host_less_often(decoder, monkeypatch):
    looks = []
    start = DecodeSteps.start
    monkeypatch.setattr(DecodeSteps, "start", lambda self, *args: looks.append(args[1]) or start(self, *args))
    engine = engine_of(decoder, 8)
    engine.stop_token_ids = frozenset()
    engine.decode.stop_tokens = torch.tensor([], dtype=torch.int64)
    generate(engine, group_size=1)
    assert looks == [8, 8, 4]  # 21 tokens, the first from the prefill; no step is wasted at the end


def test_padded_batches_and_graphs_change_no_completion(decoder, one_by_one, monkeypatch):
    graphs = []
    monkeypatch.setattr(decode_module, "GraphedSteps", lambda *args: graphs.append(Replayed(*args)) or graphs[-1])
    engine = engine_of(decoder, 4, graphs=True, page_size=5, kv_cache_tokens=200, max_sequences=11)
    assert generate(engine) == one_by_one
    sampling = SamplingConfig(temperature=0.7)
    assert generate(engine, sampling) == generate(engine_of(decoder), sampling)
    assert generate(engine) == one_by_one  # after another temperature; nothing is captured again
    assert len(graphs) == 2 and all(graph.num_replays > 8 for graph in graphs)
    for graph in graphs:
        assert all(size == padded_size(size) for size in graph.sizes) and len(graph.sizes) == len(set(graph.sizes))
    truncated = SamplingConfig(top_k=5)
    assert generate(engine, truncated) == generate(engine_of(decoder), truncated)
    assert len(graphs) == 2, "what waits for the host is in no graph"


def test_padding_and_captures_write_to_nobodys_page(decoder, monkeypatch):
    monkeypatch.setattr(decode_module, "GraphedSteps", Replayed)
    engine = engine_of(decoder, 4, graphs=True, page_size=4, kv_cache_tokens=400, max_sequences=11)
    cache = engine.cache
    for values in (cache.k, cache.v):
        values.view(torch.uint8)[:] = 0x55
    generate(engine, group_size=1)
    untouched = (cache.k.view(torch.uint8) == 0x55).all(dim=(0, 2, 3)).view(-1, 4).all(dim=1)
    pages_used = (~untouched).nonzero().flatten().tolist()
    assert cache.scratch_page == 100 == pages_used[-1], "a capture runs on no sequence"
    longest = 20 + 21
    assert len(pages_used) - 1 <= 4 * -(-longest // 4) and untouched[50:100].all()


def test_static_scales_learn_nothing_from_padding_and_captures(monkeypatch):
    monkeypatch.setattr(decode_module, "GraphedSteps", Replayed)
    seen = []
    for graphs in (False, True):
        decoder = tiny_decoder(tiny_config("qwen3"), get_recipe("tensorwise_static"))
        decoder.embed_hp[0] *= 50.0  # the token of cleared rows, larger than any other; no prompt holds it
        engine = engine_of(decoder, 4, graphs=graphs, max_sequences=11)
        prompts = [[max(1, token) for token in prompt] for prompt in random_prompts(1, 3, 3, 20)]
        completions = engine.generate(prompts, SamplingConfig(), max_completion_tokens=21, seed=4)
        assert all(0 not in completion.tokens[:-1] for group in completions for completion in group)
        layers = quantized_layers(decoder)
        seen.append((completions, [layer.activation_amax.item() for layer in layers if layer.quantized]))
    assert seen[0] == seen[1]


def test_sizes_that_have_graphs():
    sizes = [padded_size(size) for size in range(1, 300)]
    assert sizes[:9] == [1, 2, 4, 4, 8, 8, 8, 8, 16]
    assert all(size <= padded and padded_size(padded) == padded for size, padded in enumerate(sizes, start=1))
    assert sizes == sorted(sizes) and len(set(sizes)) == 3 + 8 + 15  # to 64, then to 304
    assert all(padded - size < max(8, size / 4) for size, padded in enumerate(sizes, start=1))


def test_what_is_not_finite_in_a_later_step_is_named(decoder, monkeypatch):
    """As on a GPU, where a draw tells of it by its log-probability alone."""
    draw, calls = decode_module.draw, itertools.count()

    def broken(logits, seed, sequence_ids, positions, config):
        tokens, logprobs = draw(logits, seed, sequence_ids, positions, config)
        if next(calls) == 5:
            logprobs[1] = torch.nan
        return tokens, logprobs

    monkeypatch.setattr(decode_module, "draw", broken)
    engine = engine_of(decoder, 8)
    engine.stop_token_ids = frozenset()
    engine.decode.stop_tokens = torch.tensor([], dtype=torch.int64)
    with pytest.raises(NonFiniteLogits, match=r"sequence 1048576 at position (\d+) are not finite") as error:
        engine.generate([[5] * 4, [7] * 6], SamplingConfig(), max_completion_tokens=20)
    assert "position 12 " in str(error.value)  # 6 of the prompt, one from the prefill, then the sixth of a row


def test_steps_are_at_least_one():
    with pytest.raises(ValueError, match="decode_steps must be at least 1; got 0"):
        EngineConfig(decode_steps=0)
    assert VOCAB > max(STOPS)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_path_of_a_gpu_is_exact_in_tritons_interpreter():
    tests = Path(__file__).resolve().parents[1]
    settings = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{tests.parent}:{tests}"}
    script = tests / "rollout/engine_kernels_check.py"
    result = subprocess.run([sys.executable, script], env={**os.environ, **settings}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
