"""`octavo bench rollout`: what a step must read, the sequences that are decoded, and when it refuses."""

from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from octavo.bench.rollout import bench_decode, max_batch, random_decoder, running, step_bytes
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
