"""Rollout of published shapes with random weights on one GPU: whole runs, prefill, decode; beside the memory's bound.

    python benchmarks/rollout.py [A] [B] [C] [W] [S] [L] [D]    # a table, and benchmarks/results/rollout.json

A   Qwen3-8B, 256 prompts of 512 tokens -> 1,024 each, 128 at once
B1  Qwen3-8B, prefill of 128 x 4,096              B2  decode 4,096 -> 4,608, 128 at once
C   Qwen3-8B, decode steps at contexts 1K to 8K, each precision at its own largest batch
W   Qwen3-8B, decode steps at 1K of 16, 64 and 128 sequences, w8a16 over block128
S   Qwen3-8B, decode steps of 4 sequences at 8K
L   Llama-3.1-8B, 1,000 -> 2,000, all at once, at the better of two concurrencies, FP8 with FP8 KV
D   Qwen3-32B, decode steps at 2K, FP8 over BF16

Protocols are commands of their own: what was measured at the same commit on the same device is kept, and not measured
again; remove the file to begin anew. With OUT set the file is written there. OCTAVO_COMMIT names the commit
where git cannot.

Every figure is of exact rollout, whose log-probabilities are training's to the bit. There is no mode without that to
set beside it; what faster attention would save is in LOG.md, by arithmetic on benchmarks/attention.py's peers.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from octavo.bench.measure import copy_speed
from octavo.bench.results import Results, Row
from octavo.bench.rollout import bench_decode, decode_kernels, max_batch, random_decoder, step_bytes
from octavo.models.config import decoder_config
from octavo.models.decoder import Decoder
from octavo.numerics.recipe import get_recipe
from octavo.rollout.engine import Engine, EngineConfig
from octavo.rollout.sampler import SamplingConfig

QWEN3 = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960}
QWEN3 |= {"tie_word_embeddings": False}
SHAPES: dict[str, PretrainedConfig] = {
    "qwen3-8b": Qwen3Config(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, **QWEN3
    ),
    "qwen3-32b": Qwen3Config(
        hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64, **QWEN3
    ),
    "llama-3.1-8b": LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
    ),
}
PRECISIONS = {
    "bf16": ("bf16", "bf16"),
    "block128": ("block128", "bf16"),
    "block128+kv8": ("block128", "fp8"),
    "w8a16": ("w8a16", "bf16"),
}
"""Recipe and KV format."""
WITHOUT_W8A16 = ("bf16", "block128", "block128+kv8")
GOALS = {
    "A/qwen3-8b/block128+kv8": 16000.0,
    "B1/qwen3-8b/block128+kv8": 50000.0,
    "B2/qwen3-8b/block128+kv8": 8300.0,
    "L/llama-3.1-8b/block128+kv8": 14000.0,
}
VLLM = {
    "A": {"bf16": 9572, "block128": 11255, "block128+kv8": 12014},
    "B1": {"bf16": 40294, "block128": 61805, "block128+kv8": 61483},
    "B2": {"bf16": 4901, "block128": 5199, "block128+kv8": 6465},
}
"""vLLM 0.24.0 on another H200, tok/s; benchmarks/vllm_rollout.py."""
CONTEXTS = (1024, 2048, 4096, 8192)
CONCURRENCIES = (512, 256)
BATCHES = (16, 64)
MAX_TOKENS = 8704
"""Of the longest sequence of any protocol."""
SPARE_BYTES = 8e9
"""Of the card, for logits and what a step needs."""

Measure = Callable[[Decoder], Iterator[Row]]


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What one argument of the command measures."""

    shape: str
    """One of SHAPES."""
    precisions: tuple[str, ...]
    """Some of PRECISIONS."""
    cases: Callable[[str, float], dict[str, Measure]]
    """(precision, GB/s of a copy) -> the last case that each measurement gives a row of, and the measurement."""
    summary: Callable[[Results], Iterator[Row]] = lambda results: iter(())
    """Rows made of others, in the end."""


def generate_seconds(engine: Engine, count: int, prompt_tokens: int, new_tokens: int) -> float:
    """Wall-clock seconds of a batch of random prompts."""
    rng, vocab_size = random.Random(0), engine.decoder.config.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(prompt_tokens)] for _ in range(count)]
    torch.cuda.synchronize()
    start = time.perf_counter()
    engine.generate(prompts, SamplingConfig(), max_completion_tokens=new_tokens)
    return time.perf_counter() - start


def speed_row(case: str, tok_s: float, *notes: str) -> Row:
    """Tokens a second beside the goal and vLLM's figure."""
    protocol, _, name = case.split("/")[:3]
    peer = VLLM.get(protocol, {}).get(name)
    note = "; ".join([*notes, *([f"vLLM 0.24 on another H200: {peer:,}"] if peer else [])])
    return Row(case=case, metric="tok_s", value=tok_s, unit="tok/s", goal=GOALS.get(case), note=note)


def of_bound(decoder: Decoder, tok_s: float, batch: int, context: int, copy_gb_s: float) -> str:
    """The share of what the memory allows decode steps of `batch` sequences of this mean context."""
    bound = batch / (step_bytes(decoder, batch, context) / copy_gb_s / 1e9)
    return f"{tok_s / bound:.0%} of the bound of decode, {bound:,.0f}"


def room() -> int:
    """Bytes of the card for keys and values."""
    return int(torch.cuda.mem_get_info()[0] - SPARE_BYTES)


def whole_runs(name: str, copy_gb_s: float) -> dict[str, Measure]:
    """Protocol A."""
    case = f"A/qwen3-8b/{name}"

    def measure(decoder: Decoder) -> Iterator[Row]:
        config = EngineConfig(kv_cache_tokens=128 * 1600, max_sequences=128, max_prefill_tokens=16384)
        engine = Engine(decoder, config, [])
        generate_seconds(engine, 128, 512, 16)  # compiles, captures
        before, seconds = engine.prefill_s, generate_seconds(engine, 256, 512, 1024)
        prefill = f"{engine.prefill_s - before:.2f} s of {seconds:.2f} for prompts"
        tok_s = 256 * 1024 / seconds
        yield speed_row(case, tok_s, prefill, of_bound(decoder, tok_s, 128, 1024, copy_gb_s))

    return {case: measure}


def prefill_and_decode(name: str, copy_gb_s: float) -> dict[str, Measure]:
    """Protocols B1 and B2."""

    def measure(decoder: Decoder) -> Iterator[Row]:
        config = EngineConfig(kv_cache_tokens=128 * 4640, max_sequences=128, max_prefill_tokens=16384)
        engine = Engine(decoder, config, [])
        generate_seconds(engine, 4, 4096, 2)
        generate_seconds(engine, 128, 64, 16)
        before, seconds = engine.prefill_s, generate_seconds(engine, 128, 4096, 512)
        prefill = engine.prefill_s - before
        yield speed_row(f"B1/qwen3-8b/{name}", 128 * 4096 / prefill)
        tok_s = 128 * 511 / (seconds - prefill)
        yield speed_row(f"B2/qwen3-8b/{name}", tok_s, of_bound(decoder, tok_s, 128, 4352, copy_gb_s))

    return {f"B2/qwen3-8b/{name}": measure}


def decode_row(decoder: Decoder, case: str, batch: int, context: int, copy_gb_s: float) -> Row:
    """Decode steps of a batch, all at one context."""
    config = EngineConfig(kv_cache_tokens=batch * (context + 128), max_sequences=batch)
    (speed,) = bench_decode(decoder, [(batch, context)], copy_gb_s, config, calls=3)
    share = f"{speed.bandwidth_share:.0%} of the bound {speed.tok_s / speed.bandwidth_share:,.0f}"
    return speed_row(case, speed.tok_s, f"batch {batch}, {speed.step_ms:.2f} ms a step, {share}")


def long_contexts(name: str, copy_gb_s: float) -> dict[str, Measure]:
    """Protocol C, and the kernels of a step at 4K."""

    def measure(context: int, decoder: Decoder) -> Iterator[Row]:
        batch = min(512, max_batch(decoder, context + 128, room()))
        yield decode_row(decoder, f"C/qwen3-8b/{name}/{context}", batch, context, copy_gb_s)

    def kernels(decoder: Decoder) -> Iterator[Row]:
        config = EngineConfig(kv_cache_tokens=128 * 4352, max_sequences=128)
        times = decode_kernels(decoder, 128, 4096, config)
        case = f"kernels of a step/qwen3-8b/{name}"
        for kernel, ms in times.items():
            if ms >= 0.1:
                yield Row(case=f"{case}/{kernel}", metric="ms", value=ms, unit="ms", better="lower")
        yield Row(case=case, metric="ms", value=sum(times.values()), unit="ms", better="lower")

    cases: dict[str, Measure] = {f"C/qwen3-8b/{name}/{context}": partial(measure, context) for context in CONTEXTS}
    return cases | {f"kernels of a step/qwen3-8b/{name}": kernels}


def weights_alone(name: str, copy_gb_s: float) -> dict[str, Measure]:
    """Protocol W for each batch."""
    prefix = f"W/qwen3-8b/{name}"

    def measure(batch: int, decoder: Decoder) -> Iterator[Row]:
        yield decode_row(decoder, f"{prefix}/{batch}", batch, 1024, copy_gb_s)

    return {f"{prefix}/{batch}": partial(measure, batch) for batch in (16, 64, 128)}


def few_long(name: str, copy_gb_s: float) -> dict[str, Measure]:
    """Protocol S."""
    case = f"S/qwen3-8b/{name}"

    def measure(decoder: Decoder) -> Iterator[Row]:
        yield decode_row(decoder, case, 4, 8192, copy_gb_s)

    return {case: measure}


def concurrencies(name: str, copy_gb_s: float) -> dict[str, Measure]:
    """Protocol L at each concurrency that fits."""
    prefix = f"L/llama-3.1-8b/{name}"

    def measure(count: int, decoder: Decoder) -> Iterator[Row]:
        if count > max_batch(decoder, 3072, room()):
            print(f"{prefix}/{count}: keys and values do not fit")
            return
        config = EngineConfig(kv_cache_tokens=count * 3072, max_sequences=count, max_prefill_tokens=16384)
        engine = Engine(decoder, config, [])
        generate_seconds(engine, 16, 1000, 2)
        generate_seconds(engine, count, 64, 16)
        tok_s = count * 2000 / generate_seconds(engine, count, 1000, 2000)
        yield speed_row(f"{prefix}/{count}", tok_s, of_bound(decoder, tok_s, count, 2000, copy_gb_s))

    return {f"{prefix}/{count}": partial(measure, count) for count in CONCURRENCIES}


def best_concurrency(results: Results) -> Iterator[Row]:
    """Protocol L's own figures."""
    for name in PRECISIONS:
        prefix = f"L/llama-3.1-8b/{name}"
        rows = [row for row in results.rows if row.case.startswith(f"{prefix}/")]
        if rows:
            best = max(rows, key=lambda row: row.value)
            yield speed_row(prefix, best.value, f"{best.case.rpartition('/')[2]} at once", best.note)


def large_model(name: str, copy_gb_s: float) -> dict[str, Measure]:
    """Protocol D for each batch that fits."""
    prefix = f"D/qwen3-32b/{name}"

    def measure(batch: int, decoder: Decoder) -> Iterator[Row]:
        if batch > max_batch(decoder, 2176, room()):
            print(f"{prefix}/{batch}: keys and values do not fit")
            return
        yield decode_row(decoder, f"{prefix}/{batch}", batch, 2048, copy_gb_s)

    return {f"{prefix}/{batch}": partial(measure, batch) for batch in BATCHES}


def over(protocol: str, base: str, goals: dict[str, float], results: Results) -> Iterator[Row]:
    """A protocol's speeds over those of the precision `base`, batch by batch or context by context.

    Args:
        protocol: a key of PROTOCOLS.
        base: a key of PRECISIONS.
        goals: precision -> ratio.
        results: with the speeds.
    """
    speeds = {
        row.case: row.value for row in results.rows if row.case.startswith(f"{protocol}/") and row.metric == "tok_s"
    }
    for case, value in speeds.items():
        _, shape, name, size = case.split("/")
        other = speeds.get(f"{protocol}/{shape}/{base}/{size}")
        if other is not None and name != base:
            yield Row(case=case, metric=f"speedup_vs_{base}", value=value / other, unit="x", goal=goals.get(name))


PROTOCOLS = {
    "A": Protocol(shape="qwen3-8b", precisions=WITHOUT_W8A16, cases=whole_runs),
    "B": Protocol(shape="qwen3-8b", precisions=WITHOUT_W8A16, cases=prefill_and_decode),
    "C": Protocol(
        shape="qwen3-8b",
        precisions=WITHOUT_W8A16,
        cases=long_contexts,
        summary=partial(over, "C", "bf16", {"block128+kv8": 1.6}),
    ),
    "W": Protocol(
        shape="qwen3-8b",
        precisions=("block128", "w8a16"),
        cases=weights_alone,
        summary=partial(over, "W", "block128", {"w8a16": 1.0}),
    ),
    "S": Protocol(shape="qwen3-8b", precisions=WITHOUT_W8A16, cases=few_long),
    "L": Protocol(shape="llama-3.1-8b", precisions=("block128+kv8",), cases=concurrencies, summary=best_concurrency),
    "D": Protocol(
        shape="qwen3-32b", precisions=WITHOUT_W8A16, cases=large_model, summary=partial(over, "D", "bf16", {})
    ),
}
"""By the argument that asks for it."""


def run_protocol(results: Results, protocol: Protocol, copy_gb_s: float, suffix: str = "") -> None:
    """Measure what is missing, precision by precision; the suffix goes to the names of cases."""
    shape = SHAPES[protocol.shape]
    for name in protocol.precisions:
        cases = protocol.cases(name, copy_gb_s)
        missing = {case: measure for case, measure in cases.items() if not results.has(case + suffix)}
        if not missing:
            continue
        recipe, kv_cache = PRECISIONS[name]
        chosen = get_recipe(recipe, kv_cache=kv_cache)
        decoder = random_decoder(decoder_config(shape), shape, chosen, max_tokens=MAX_TOKENS)
        for measure in missing.values():
            for row in measure(decoder):
                results.add(replace(row, case=row.case + suffix))
            gc.collect()  # an engine and its graphs hold each other
            torch.cuda.empty_cache()
        del decoder
    for row in protocol.summary(results):
        results.add(row)


def main() -> None:
    """Measure, print, write."""
    wanted = sys.argv[1:] or list(PROTOCOLS)
    if unknown := set(wanted) - set(PROTOCOLS):
        sys.exit(f"protocols are {', '.join(PROTOCOLS)}; got {', '.join(sorted(unknown))}")
    results = Results("rollout", f"python benchmarks/rollout.py {' '.join(sys.argv[1:])}".strip(), resume=True)
    copy_gb_s = copy_speed()
    results.add(Row(case="copy", metric="gb_s", value=copy_gb_s, unit="GB/s"))
    for name in wanted:
        run_protocol(results, PROTOCOLS[name], copy_gb_s)


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        print("benchmarks/rollout.py measures a GPU, and there is none here: skipped")
