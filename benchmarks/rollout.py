"""Rollout of the Qwen3-8B shape with random weights: whole runs, prefill, decode, long contexts; exact throughout.

    python benchmarks/rollout.py [A] [B] [C]    # a table, and benchmarks/results/rollout.json (under $OUT if set)

A   256 prompts of 512 tokens -> 1,024 each, 128 at once     B1  prefill of 128 x 4,096
B2  decode 4,096 -> 4,608, 128 at once                       C   decode steps at contexts 1K, 2K, 4K and 8K, each
                                                                 precision at its own largest batch
"""

from __future__ import annotations

import random
import sys
import time

import torch
from transformers import Qwen3Config

from octavo.bench.measure import copy_speed
from octavo.bench.results import Results, Row
from octavo.bench.rollout import bench_decode, decode_kernels, max_batch, random_decoder, step_bytes
from octavo.models.config import decoder_config
from octavo.models.decoder import Decoder
from octavo.numerics.recipe import get_recipe
from octavo.rollout.engine import Engine, EngineConfig
from octavo.rollout.sampler import SamplingConfig

MODEL = "qwen3-8b"
SHAPE = Qwen3Config(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=40960,
    tie_word_embeddings=False,
)
PRECISIONS = {"bf16": ("bf16", "bf16"), "block128": ("block128", "bf16"), "block128+kv8": ("block128", "fp8")}
"""Recipe and KV format; w8a16 decodes as block128 does, but for its products."""
GOALS = {("A", "block128+kv8"): 16000.0, ("B1", "block128+kv8"): 50000.0, ("B2", "block128+kv8"): 8300.0}
VLLM = {
    "A": {"bf16": 9572, "block128": 11255, "block128+kv8": 12014},
    "B1": {"bf16": 40294, "block128": 61805, "block128+kv8": 61483},
    "B2": {"bf16": 4901, "block128": 5199, "block128+kv8": 6465},
}
"""vLLM 0.24.0 on another H200, tok/s."""
CONTEXTS = (1024, 2048, 4096, 8192)
SPARE_BYTES = 8e9
"""Of the card, for logits and what a step needs."""


def generate_seconds(engine: Engine, count: int, prompt_tokens: int, new_tokens: int) -> float:
    """Wall-clock seconds of a batch of random prompts."""
    rng = random.Random(0)
    prompts = [[rng.randrange(SHAPE.vocab_size) for _ in range(prompt_tokens)] for _ in range(count)]
    torch.cuda.synchronize()
    start = time.perf_counter()
    engine.generate(prompts, SamplingConfig(), max_completion_tokens=new_tokens)
    return time.perf_counter() - start


def add_speed(results: Results, protocol: str, name: str, tok_s: float, note: str = "") -> None:
    """A row of tokens a second beside its goal and vLLM's figure."""
    note = "; ".join(filter(None, [note, f"vLLM 0.24 on another H200: {VLLM[protocol][name]:,}"]))
    goal = GOALS.get((protocol, name))
    results.add(Row(case=f"{protocol}/{MODEL}/{name}", metric="tok_s", value=tok_s, unit="tok/s", goal=goal, note=note))


def whole_runs(results: Results, name: str, decoder: Decoder) -> None:
    """Protocol A."""
    engine = Engine(decoder, EngineConfig(kv_cache_tokens=128 * 1600, max_sequences=128), [])
    generate_seconds(engine, 128, 512, 16)  # compiles, captures
    seconds = generate_seconds(engine, 256, 512, 1024)
    add_speed(results, "A", name, 256 * 1024 / seconds)


def prefill_and_decode(results: Results, name: str, decoder: Decoder, copy_gb_s: float) -> None:
    """Protocols B1 and B2."""
    engine = Engine(decoder, EngineConfig(kv_cache_tokens=128 * 4640, max_sequences=128, max_prefill_tokens=16384), [])
    generate_seconds(engine, 4, 4096, 2)
    generate_seconds(engine, 128, 64, 16)
    prefill = generate_seconds(engine, 128, 4096, 1)
    add_speed(results, "B1", name, 128 * 4096 / prefill)
    decode = generate_seconds(engine, 128, 4096, 512) - prefill
    tok_s = 128 * 511 / decode
    bound = 128 / (step_bytes(decoder, 128, 4352) / copy_gb_s / 1e9)
    add_speed(results, "B2", name, tok_s, f"{tok_s / bound:.0%} of the bound {bound:,.0f}")


def long_contexts(results: Results, name: str, decoder: Decoder, copy_gb_s: float) -> None:
    """Protocol C, and the kernels of a step at 4K."""
    room = int(torch.cuda.mem_get_info()[0] - SPARE_BYTES)
    for context in CONTEXTS:
        batch = min(512, max_batch(decoder, context + 128, room))
        config = EngineConfig(kv_cache_tokens=batch * (context + 128), max_sequences=batch)
        (speed,) = bench_decode(decoder, [(batch, context)], copy_gb_s, config, calls=3)
        case = f"C/{MODEL}/{name}/{context}"
        note = f"batch {batch}, {speed.step_ms:.2f} ms a step, {speed.bandwidth_share:.0%} of the bound"
        results.add(Row(case=case, metric="tok_s", value=speed.tok_s, unit="tok/s", note=note))
        torch.cuda.empty_cache()
    config = EngineConfig(kv_cache_tokens=128 * 4352, max_sequences=128)
    for kernel, ms in decode_kernels(decoder, 128, 4096, config).items():
        if ms >= 0.1:
            row = Row(
                case=f"kernels of a step/{MODEL}/{name}/{kernel}", metric="ms", value=ms, unit="ms", better="lower"
            )
            results.add(row)


def main() -> None:
    """Measure, print, write."""
    protocols = sys.argv[1:] or ["A", "B", "C"]
    results = Results("rollout", f"python benchmarks/rollout.py {' '.join(sys.argv[1:])}".strip())
    copy_gb_s = copy_speed()
    results.add(Row(case="copy", metric="gb_s", value=copy_gb_s, unit="GB/s"))
    for name, (recipe, kv_cache) in PRECISIONS.items():
        chosen = get_recipe(recipe, kv_cache=kv_cache)
        decoder = random_decoder(decoder_config(SHAPE), SHAPE, chosen, max_tokens=8704)
        if "A" in protocols:
            whole_runs(results, name, decoder)
        if "B" in protocols:
            prefill_and_decode(results, name, decoder, copy_gb_s)
        if "C" in protocols:
            long_contexts(results, name, decoder, copy_gb_s)
        del decoder
        torch.cuda.empty_cache()


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        print("benchmarks/rollout.py measures a GPU, and there is none here: skipped")
