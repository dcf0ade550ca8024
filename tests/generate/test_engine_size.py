"""The engine's size: what the completions can use, what fits beside the weights, and what is refused."""

from dataclasses import replace

import pytest

from octavo.generate.engine_size import Demand, engine_config
from octavo.models.config import DecoderConfig
from octavo.numerics.recipe import get_recipe
from octavo.trainer.memory import FRAGMENTATION, GIB, LIBRARY_BYTES, rollout_bytes, workspace_bytes
from octavo.trainer.memory_held import forward_bytes

QWEN3_8B = DecoderConfig(
    family="qwen3",
    norm_eps=1e-6,
    qkv_bias=False,
    qk_norm=True,
    max_positions=40960,
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    tied_embeddings=False,
)
RECIPE = get_recipe("block128", kv_cache="fp8")
TOKEN_BYTES = 36 * 2 * 8 * 132
LONG = Demand(num_completions=10_000, longest=32_768 + 500, truncates=False)


def size_of(demand, free, recipe=RECIPE):
    config = engine_config(demand, QWEN3_8B, recipe, free)
    return config.kv_cache_tokens, config.max_sequences


def test_without_kernels_it_has_room_for_all_that_runs():
    assert size_of(Demand(num_completions=3, longest=100, truncates=False), None) == (3 * 112, 3)
    assert size_of(Demand(num_completions=900, longest=16, truncates=True), None) == (64 * 16, 64)


def test_on_a_large_gpu_no_more_than_can_be_used():
    assert size_of(Demand(num_completions=900, longest=2048, truncates=False), 120 * GIB) == (256 * 2048, 256)
    assert size_of(Demand(num_completions=10, longest=2040, truncates=False), 120 * GIB) == (10 * 2048, 10)


def test_long_completions_take_what_fits_and_the_plan_agrees():
    tokens, sequences = size_of(LONG, 100 * GIB)
    assert sequences == 256 and tokens % 16 == 0 and 0.9 < tokens * TOKEN_BYTES / (90 * GIB) < 1.05
    prefill, decode = rollout_bytes(QWEN3_8B, RECIPE, 256, LONG.longest, LONG.longest, False)

    def needed(num_tokens):
        """As the plan of a run counts: the cache with its scratch page, tables and the widest step."""
        tensors = (num_tokens + 16) * TOKEN_BYTES + 4 * 256 * 2080 + workspace_bytes(256, True) + max(prefill, decode)
        return tensors * (1 + FRAGMENTATION) + LIBRARY_BYTES + decode

    assert needed(tokens) <= 100 * GIB < needed(tokens + 32)


def test_what_else_a_step_holds_takes_from_the_cache():
    tokens, _ = size_of(LONG, 60 * GIB)
    truncating, _ = size_of(replace(LONG, truncates=True), 60 * GIB)
    fewer, _ = size_of(replace(LONG, max_sequences=32), 60 * GIB)
    in_bf16, _ = size_of(LONG, 60 * GIB, get_recipe("block128", kv_cache="bf16"))
    assert truncating < tokens < fewer and in_bf16 == pytest.approx(tokens * 132 / 256, rel=1e-3)


def test_what_was_asked_for_is_taken_or_refused():
    assert size_of(replace(LONG, kv_cache_tokens=50_000, max_sequences=7), 100 * GIB) == (50_000, 7)
    with pytest.raises(ValueError, match=r"a KV cache of 9000000 tokens takes 637.\d+ GiB, and there is room for \d+ "):
        size_of(replace(LONG, kv_cache_tokens=9_000_000), 100 * GIB)


def test_a_gpu_without_room_for_one_completion_is_refused():
    with pytest.raises(ValueError, match=r"room for 0 tokens beside the weights, in 1.00 GiB .* Lower --kv-"):
        size_of(LONG, GIB)


def test_copies_that_kernels_make_of_odd_widths_take_from_the_cache():
    odd = replace(QWEN3_8B, intermediate_size=12288 + 64)
    copies = forward_bytes(odd, RECIPE, on_gpu=True).operands
    assert copies > GIB and forward_bytes(QWEN3_8B, RECIPE, on_gpu=True).operands == 0
    rooms = [engine_config(LONG, shape, RECIPE, 60 * GIB).kv_cache_tokens for shape in (QWEN3_8B, odd)]
    widest = [max(rollout_bytes(shape, RECIPE, 256, LONG.longest, LONG.longest, False)) for shape in (QWEN3_8B, odd)]
    assert (rooms[0] - rooms[1]) * TOKEN_BYTES == pytest.approx(copies + widest[1] - widest[0], rel=0.01)
