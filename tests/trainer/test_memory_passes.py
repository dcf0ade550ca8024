"""What a pass is said to hold, against what the CUDA path allocates: run on a CPU, with kernels that write nothing."""

from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_config, tiny_decoder

pytest.importorskip("triton", reason="the launchers are triton's")

from cuda_dry_run import Allocations, pretend_cuda

from octavo.kernels import lm_head, lm_head_gradients
from octavo.layers.attention import PackedAttention
from octavo.layers.linear import quantized_layers
from octavo.models.config import decoder_config
from octavo.numerics.recipe import get_recipe
from octavo.rollout.kv_cache import KVCache, PagedAttention
from octavo.rollout.sampler import SamplingConfig, draw
from octavo.trainer.memory_held import forward_bytes
from octavo.trainer.memory_passes import DecoderPass

WHOLE = {"hidden_size": 256, "intermediate_size": 768, "head_dim": 64}
"""Widths of whole blocks of 128."""
RAGGED = {"hidden_size": 192, "intermediate_size": 320, "head_dim": 64}
ATTENTION = {"hidden_size": 256, "intermediate_size": 128, "head_dim": 64}
"""Attention's backward is the widest moment."""
UNTIED = {"tie_word_embeddings": False}
SHORT, LONG = 512, 4480
"""Tokens, whole blocks of 128; LONG is enough for cuBLAS in BF16."""
LONGEST = 200
"""Tokens of a sequence."""


def decoder_of(recipe, family, shape):
    """With static scales set, as no kernel here finds one."""
    defaults = {
        "num_hidden_layers": 3,
        "vocab_size": 1024,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4608,
    }
    decoder = tiny_decoder(tiny_config(family, **{**defaults, **shape}), recipe)
    for layer in quantized_layers(decoder) if recipe.static_activation_scale else ():
        layer.activation_scale.fill_(1.0)
    return decoder


def scored(decoder, num_tokens, shadow=False):
    """The sum of all log-probabilities of a packed batch."""
    tokens = torch.zeros(num_tokens, dtype=torch.int64)
    positions, edges = torch.arange(num_tokens) % LONGEST, torch.tensor([*range(0, num_tokens, LONGEST), num_tokens])
    kv_format = "bf16" if shadow else decoder.recipe.kv_cache
    hidden = decoder(tokens, positions, PackedAttention(edges, kv_format), shadow=shadow)
    sampled = torch.arange(1, num_tokens)
    return decoder.logprobs(hidden[sampled - 1], tokens[sampled], 1.0)[0].sum()


RECIPES = ["block128", "w8a16", "rowwise", "tensorwise", "tensorwise_static", "bf16"]
CASES = [
    *((recipe, {}, "qwen3", WHOLE, SHORT, recompute) for recipe in RECIPES for recompute in (False, True)),
    *((recipe, {}, "llama", RAGGED, SHORT, True) for recipe in ("block128", "rowwise", "tensorwise")),
    *((recipe, {}, "qwen3", WHOLE | {"intermediate_size": 3072}, SHORT, True) for recipe in ("rowwise", "tensorwise")),
    *((recipe, {"kv_cache": "bf16"}, "qwen3", ATTENTION, SHORT, True) for recipe in ("block128", "bf16")),
    ("w8a16", {}, "qwen3", WHOLE, LONG, False),
    ("block128", {}, "qwen2", WHOLE | UNTIED, SHORT, False),
    ("block128", {"saved_activations": "bf16"}, "qwen3", WHOLE, SHORT, False),
    ("block128", {"keep_bf16": ("lm_head", "embed_tokens", "layers.0.*", "down_proj")}, "qwen3", WHOLE, SHORT, False),
    *(("block128", {}, "qwen3", WHOLE | UNTIED | {"vocab_size": 16384}, SHORT, again) for again in (False, True)),
]


@pytest.mark.parametrize("name, changes, family, shape, num_tokens, recompute", CASES)
def test_forward_and_backward_hold_what_is_allocated(name, changes, family, shape, num_tokens, recompute, monkeypatch):
    recipe = get_recipe(name, **changes)
    decoder = decoder_of(recipe, family, shape)
    decoder.recompute_layers = recompute
    tokens = {"num_tokens": num_tokens, "num_scored": num_tokens - 1, "longest": LONGEST}
    plan = DecoderPass(shape=decoder.config, recipe=recipe, recompute=recompute, **tokens)
    pretend_cuda(monkeypatch)
    monkeypatch.setattr(lm_head, "GRAD_LOGITS_PER_CHUNK", 2**21)
    scored(decoder, num_tokens).backward()  # makes the operands that are kept, and the gradients
    with Allocations() as allocated:
        loss = scored(decoder, num_tokens)
        assert plan.saved_bytes == pytest.approx(allocated.live, rel=0.006)
        loss.backward()
    assert plan.update(accumulated=True) == pytest.approx(allocated.peak, rel=0.0015)


def test_logits_that_are_too_many_to_keep(monkeypatch):
    recipe, T, V = get_recipe("bf16"), SHORT, 16384
    decoder = decoder_of(recipe, "qwen3", WHOLE | UNTIED | {"vocab_size": V})
    plan = DecoderPass(shape=decoder.config, recipe=recipe, num_tokens=T, num_scored=T - 1, longest=LONGEST)
    saved = plan.saved_bytes
    pretend_cuda(monkeypatch)
    monkeypatch.setattr(lm_head, "GRAD_LOGITS_PER_CHUNK", 2**21)
    monkeypatch.setattr(lm_head_gradients, "MAX_KEPT_BYTES", 2 * (T - 1) * V - 1)
    assert saved - plan.saved_bytes == (T - 1) * (2 * V + 4 * V // 256)
    scored(decoder, T).backward()
    with Allocations() as allocated:
        loss = scored(decoder, T)
        assert plan.saved_bytes == pytest.approx(allocated.live, rel=0.006)
        loss.backward()
    assert plan.update(accumulated=True) == pytest.approx(allocated.peak, rel=0.0015)


@pytest.mark.parametrize("name", ["block128", "bf16"])
def test_gradients_of_a_first_microbatch_grow_as_activations_go(name, monkeypatch):
    recipe = get_recipe(name)
    decoder = decoder_of(recipe, "qwen3", WHOLE | UNTIED | {"vocab_size": 128})
    plan = DecoderPass(shape=decoder.config, recipe=recipe, num_tokens=SHORT, num_scored=SHORT - 1, longest=LONGEST)
    pretend_cuda(monkeypatch)
    scored(decoder, SHORT).backward()
    decoder.zero_grad()
    with Allocations() as allocated:
        scored(decoder, SHORT).backward()
    assert plan.update(accumulated=False) == pytest.approx(allocated.peak, rel=0.0015)
    assert plan.update(accumulated=False) > plan.update(accumulated=True)


def test_a_tied_embedding_is_a_table_more_from_the_head_to_the_end():
    shape = decoder_config(tiny_config("qwen3", vocab_size=2**20, tie_word_embeddings=True))
    plan = DecoderPass(shape=shape, recipe=get_recipe("bf16"), num_tokens=128, num_scored=127)
    table = 4 * 2**20 * 96
    assert plan.update(accumulated=True) == pytest.approx(2 * table, rel=0.01)
    untied = replace(plan, shape=replace(shape, tied_embeddings=False))
    assert untied.update(accumulated=True) < 1.7 * table  # with the gradients of the logits, 2 * 128 * 2**20


@pytest.mark.parametrize("shadow", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_a_forward_without_gradients(name, shadow, monkeypatch):
    recipe = get_recipe(name)
    decoder = decoder_of(recipe, "qwen3", WHOLE)
    plan = DecoderPass(shape=decoder.config, recipe=recipe, num_tokens=SHORT, num_scored=SHORT - 1)
    pretend_cuda(monkeypatch)
    with torch.no_grad():
        scored(decoder, SHORT)
        with Allocations() as allocated:
            scored(decoder, SHORT, shadow)
    assert plan.forward(shadow=shadow) == pytest.approx(allocated.peak, rel=0.005)


KEPT_QKV = {"keep_bf16": ("lm_head", "embed_tokens", "q_proj", "k_proj", "v_proj")}


@pytest.mark.parametrize("num_tokens", [SHORT, LONG])
@pytest.mark.parametrize(
    "name, changes, shadow",
    [("bf16", {}, False), ("w8a16", {}, False), ("block128", {}, False), ("block128", KEPT_QKV, False)]
    + [(name, {}, True) for name in ("bf16", "block128")],
)
def test_a_bias_is_added_in_fp32_where_cublas_multiplies(name, changes, shadow, num_tokens, monkeypatch):
    recipe = get_recipe(name, **changes)
    shape = {"hidden_size": 256, "intermediate_size": 128, "head_dim": 64, "vocab_size": 128}  # qkv is the widest
    decoder = decoder_of(recipe, "qwen2", shape)
    plan = DecoderPass(shape=decoder.config, recipe=recipe, num_tokens=num_tokens, num_scored=num_tokens - 1)
    pretend_cuda(monkeypatch)
    with torch.no_grad():
        scored(decoder, num_tokens)
        with Allocations() as allocated:
            scored(decoder, num_tokens, shadow)
    assert plan.forward(shadow=shadow) == pytest.approx(allocated.peak, rel=0.01)


@pytest.mark.parametrize("lengths", [[200, 200, 111], [1] * 64], ids=["prefill", "decode"])
@pytest.mark.parametrize("name", ["block128", "bf16"])
def test_a_step_of_the_engine(name, lengths, monkeypatch):
    recipe = get_recipe(name)
    decoder = decoder_of(recipe, "qwen3", WHOLE | {"vocab_size": 4096})
    num_tokens, N = sum(lengths), len(lengths)
    plan = DecoderPass(shape=decoder.config, recipe=recipe, num_tokens=num_tokens, num_scored=N, paged=True)
    cache, table = KVCache(decoder.config, 1024, 16, recipe.kv_cache), torch.zeros(N, 16, dtype=torch.int64)
    ids, ends = torch.zeros(N, dtype=torch.int64), torch.tensor(lengths).cumsum(0) - 1

    def step():
        context = PagedAttention(cache, table, [0] * N, lengths)
        hidden = decoder(torch.zeros(num_tokens, dtype=torch.int64), context.positions, context)
        logits = decoder.logits(hidden[ends])
        return draw(logits, ids[:1], ids, ids, SamplingConfig())

    pretend_cuda(monkeypatch)
    with torch.no_grad():
        step()
        with Allocations() as allocated:
            step()
    assert plan.forward() == pytest.approx(allocated.peak, rel=0.03)


@pytest.mark.parametrize("shape", [WHOLE, RAGGED, {"hidden_size": 128, "intermediate_size": 200, "head_dim": 32}])
@pytest.mark.parametrize("name", ["block128", "w8a16", "rowwise", "bf16"])
def test_weights_that_kernels_read_in_copies(name, shape, monkeypatch):
    recipe = get_recipe(name)
    decoder = decoder_of(recipe, "qwen3", shape)
    pretend_cuda(monkeypatch)
    with Allocations() as allocated:
        scored(decoder, 33).backward()
        decoder.zero_grad()
    found = forward_bytes(decoder.config, recipe, on_gpu=True)
    assert found.operands + found.backward == pytest.approx(allocated.live, rel=0.001, abs=1000)
