"""`octavo bench rollout`: what a step must read, the sequences that are decoded, and when it refuses."""

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from octavo.bench import rollout
from octavo.bench.rollout import bench_decode, decode_speeds, max_batch, random_decoder, running, step_bytes
from octavo.cli import app
from octavo.models.config import read_config
from octavo.numerics.recipe import get_recipe
from octavo.rollout.engine import Engine, EngineConfig

MODEL = "examples/tiny/model"


def decoder_of(recipe="block128", kv_cache="fp8"):
    config, hf_config = read_config(MODEL)
    return random_decoder(config, hf_config, get_recipe(recipe, kv_cache=kv_cache), 64, device="cpu")


@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
@pytest.mark.parametrize("recipe", ["bf16", "block128"])
def test_a_step_reads_weights_once_and_every_key(recipe, kv_cache):
    decoder, config = decoder_of(recipe, kv_cache), read_config(MODEL)[0]
    D, F, L, Hkv, Dh = (
        getattr(config, x) for x in ("hidden_size", "intermediate_size", "num_layers", "num_kv_heads", "head_dim")
    )
    heads = config.num_heads * Dh
    per_layer = (heads + 2 * Hkv * Dh) * D + heads * D + 3 * F * D
    blocks = (
        sum(
            layer.weight_q_scale.numel()
            for b in decoder.blocks()
            for layer in (b.qkv_proj, b.o_proj, b.gate_up_proj, b.down_proj)
        )
        if recipe == "block128"
        else 0
    )
    weights = L * per_layer * (1 if recipe == "block128" else 2) + 4 * blocks + 2 * config.vocab_size * D
    row = 2 * Dh if kv_cache == "bf16" else Dh + 4
    assert step_bytes(decoder, 3, 100) == weights + 2 * L * Hkv * row * 300
    assert max_batch(decoder, 100, 2 * L * Hkv * row * 100 * 7 + 5) == 7


def test_sequences_hold_pages_of_their_own():
    decoder = decoder_of()
    engine = Engine(decoder, EngineConfig(kv_cache_tokens=640, page_size=16), [])
    sequences = running(engine, 5, 40, 20)
    pages = [page for sequence in sequences for page in sequence.pages]
    assert len(pages) == len(set(pages)) == 5 * 4 and max(pages) < 40
    assert all(s.num_tokens == 40 and s.longest == 60 and not s.is_new for s in sequences)


def test_steps_are_timed_beside_their_bound():
    config = EngineConfig(kv_cache_tokens=640, page_size=16, decode_steps=2)
    speeds = bench_decode(decoder_of(), [(2, 20), (4, 30)], 1000.0, config, calls=2)
    assert [(s.batch, s.context) for s in speeds] == [(2, 20), (4, 30)]
    for s in speeds:
        assert s.bound_ms == pytest.approx(step_bytes(decoder_of(), s.batch, s.context) / 1e9)
        assert s.tok_s == pytest.approx(s.batch / s.step_ms * 1e3) and s.step_ms > 0.0
        assert replace(s, step_ms=2 * s.bound_ms).bandwidth_share == pytest.approx(0.5)


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(app, ["bench", "rollout", "--model", MODEL])
    assert "octavo bench rollout measures a CUDA device" in f"{result.exception}{result.output}"


@pytest.fixture
def pretended_gpu(monkeypatch):
    """A GPU that has the kernels, and 8 GB left beside the weights of the tiny model."""
    monkeypatch.setattr(rollout, "require_cuda", lambda what: None)
    monkeypatch.setattr(rollout, "require_kernels", lambda *_: None)
    monkeypatch.setattr(rollout, "random_decoder", lambda *_: decoder_of())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8 * 10**9, 9 * 10**9))


def test_a_context_beyond_the_models_positions_is_refused(pretended_gpu):
    with pytest.raises(ValueError, match="more than the model's 256 positions. Give a --context of at most 128"):
        decode_speeds(*read_config(MODEL), get_recipe("block128"), [1], [64, 129])


def test_keys_and_values_that_do_not_fit_are_refused(pretended_gpu):
    with pytest.raises(ValueError, match="keys and values of 100000000 sequences of 256 tokens do not fit"):
        decode_speeds(*read_config(MODEL), get_recipe("block128"), [1, 10**8], [128])


def test_weights_that_do_not_fit_are_refused(pretended_gpu, monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(rollout, "random_decoder", full)
    config, hf_config = read_config(MODEL)
    large = replace(config, num_layers=20000)
    with pytest.raises(ValueError, match="weights take 12 GB in block128, which this GPU did not give. Take a smaller"):
        decode_speeds(large, hf_config, get_recipe("block128"), [1], [64])
