"""Protocols A, B1 and B2 of benchmarks/rollout.py in octavo and in vLLM, on the same machine, one after the other.

    PYTHONPATH=. python benchmarks/vllm_rollout.py [A] [B] [--precision NAME] [--engine octavo|vllm] [--tiny]

Random weights and log-probabilities in both; vLLM runs offline. Writes benchmarks/results/vllm_rollout.json (under $OUT
if set), with vLLM's release in its notes. Each precision and engine has a process of its own, and what was measured at
the same commit on the same device is kept. vLLM takes one to five minutes to start: where commands have a limit, give
one precision and engine each.

vLLM compiles products when it first meets their shapes: the timed batches come after batches of the same prompts with
few new tokens.

Needs vLLM 0.24 on a Hopper GPU. --tiny tries the script with a tiny model in vLLM alone, wherever that runs,
and leaves no file.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rollout import PROTOCOLS, SHAPES, run_protocol
from transformers import PretrainedConfig, Qwen3Config

from octavo.bench.measure import copy_speed
from octavo.bench.results import Results, Row
from octavo.models.config import FP8_FORMAT

ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # may be absent
    "VLLM_DEEP_GEMM_WARMUP": "skip",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
PRECISIONS = {"bf16": (False, "auto"), "block128": (True, "auto"), "block128+kv8": (True, "fp8")}
"""FP8 weights and activations by blocks; format of keys and values."""
ENGINES = ("octavo", "vllm")
MODEL = "qwen3-8b"
WARM_UP_TOKENS = 40
"""New tokens of a batch that is not timed. Prompts take up to 33 steps, and so all of them are decoding at its end."""
TINY = Qwen3Config(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
)


def write_model(folder: Path, shape: PretrainedConfig, in_fp8: bool) -> None:
    """A folder with a config alone, which `load_format="dummy"` fills."""
    shape = copy.deepcopy(shape)
    shape.architectures = ["Qwen3ForCausalLM"]
    shape.dtype = torch.bfloat16
    if in_fp8:
        shape.quantization_config = FP8_FORMAT
    shape.save_pretrained(folder)


def start(folder: Path, kv_cache: str, longest: int, sequences: int, tiny: bool) -> Any:
    """vLLM on that folder, with CUDA graphs and without a prefix cache, which octavo's engine has none of."""
    from vllm import LLM

    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        kv_cache_dtype=kv_cache,
        max_model_len=longest,
        max_num_seqs=sequences,
        max_num_batched_tokens=16384,
        gpu_memory_utilization=0.9,
        enable_prefix_caching=False,
        compilation_config={} if tiny else {"cudagraph_capture_sizes": [1, 8, 32, sequences]},  # of nearly all steps
        enforce_eager=tiny,
        seed=0,
    )


def generate_seconds(llm: Any, vocab_size: int, count: int, prompt_tokens: int, new_tokens: int) -> float:
    """Wall-clock seconds of a batch of random prompts."""
    from vllm import SamplingParams

    rng = random.Random(0)
    prompts = [{"prompt_token_ids": [rng.randrange(vocab_size) for _ in range(prompt_tokens)]} for _ in range(count)]
    params = SamplingParams(temperature=1.0, max_tokens=new_tokens, ignore_eos=True, logprobs=0, detokenize=False)
    begun = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begun
    for output in outputs:
        (completion,) = output.outputs
        lengths = len(completion.token_ids), len(completion.logprobs)
        assert lengths == (new_tokens, new_tokens), f"{lengths} tokens and log-probabilities, not {new_tokens}"
    return seconds


def measure_octavo(results: Results, name: str, protocols: list[str]) -> None:
    """The protocols under one precision by octavo's engine, in this process."""
    copy_gb_s = copy_speed()
    for protocol in protocols:
        run_protocol(results, replace(PROTOCOLS[protocol], precisions=(name,)), copy_gb_s, suffix="/octavo")


def measure_vllm(results: Results, name: str, protocols: list[str], tiny: bool) -> None:
    """The protocols under one precision by vLLM, in this process."""
    import vllm

    in_fp8, kv_cache = PRECISIONS[name]
    model, shape, divisor = ("tiny", TINY, 16) if tiny else (MODEL, SHAPES[MODEL], 1)
    count, short, long, new = (number // divisor for number in (128, 512, 4096, 512))
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), shape, in_fp8)
        begun = time.perf_counter()
        llm = start(Path(folder), kv_cache, long + new + 1, count, tiny)
        note = f"vLLM {vllm.__version__}, up in {time.perf_counter() - begun:.0f} s"

        def add(protocol: str, tok_s: float) -> None:
            case = f"{protocol}/{model}/{name}/vllm"
            results.add(Row(case=case, metric="tok_s", value=tok_s, unit="tok/s", note=note))

        warm = WARM_UP_TOKENS // divisor
        if "A" in protocols:
            generate_seconds(llm, shape.vocab_size, 2 * count, short, warm)
            seconds = generate_seconds(llm, shape.vocab_size, 2 * count, short, 2 * new)
            add("A", 2 * count * 2 * new / seconds)
        if "B" in protocols:
            generate_seconds(llm, shape.vocab_size, count, long, warm)
            prefill = generate_seconds(llm, shape.vocab_size, count, long, 1)
            add("B1", count * long / prefill)
            decode = generate_seconds(llm, shape.vocab_size, count, long, new) - prefill
            add("B2", count * (new - 1) / decode)


def main() -> None:
    """Measure, print, write; a process for each precision and engine."""
    parser = argparse.ArgumentParser(description="Protocols A and B of benchmarks/rollout.py in octavo and in vLLM.")
    parser.add_argument("protocols", nargs="*", metavar="PROTOCOL", help="A or B; default both")
    parser.add_argument("--precision", choices=list(PRECISIONS), help="this one; default all")
    parser.add_argument("--engine", choices=ENGINES, help="this one; default both")
    parser.add_argument("--tiny", action="store_true", help="a tiny model in BF16 in vLLM, without a file")
    arguments = parser.parse_args()
    wanted = arguments.protocols or ["A", "B"]
    if set(wanted) - {"A", "B"}:
        parser.error(f"protocols are A and B; got {' '.join(wanted)}")
    name, engine = arguments.precision, arguments.engine
    if arguments.tiny:
        if (name or "bf16", engine or "vllm") != ("bf16", "vllm"):
            parser.error(f"--tiny is BF16 in vLLM; got {name or 'bf16'} in {engine or 'vllm'}")
        name, engine = "bf16", "vllm"
    without_vllm = engine != "octavo" and importlib.util.find_spec("vllm") is None
    if without_vllm or not (torch.cuda.is_available() or arguments.tiny):
        print("benchmarks/vllm_rollout.py measures vLLM on a GPU, and one of them is missing here: skipped")
        return
    if name is None or engine is None:
        for each in [name] if name else PRECISIONS:
            for one in [engine] if engine else ENGINES:
                command = [sys.executable, __file__, *wanted, "--precision", each, "--engine", one]
                subprocess.run(command, check=True)
        return
    os.environ.update({key: value for key, value in ENVIRONMENT.items() if key not in os.environ})
    with tempfile.TemporaryDirectory() as nowhere:
        if arguments.tiny:
            os.environ["OUT"] = nowhere
        results = Results("vllm_rollout", f"PYTHONPATH=. python {' '.join(sys.argv)}", resume=True)
        if engine == "octavo":
            measure_octavo(results, name, wanted)
            return
        last = {"A": "A", "B": "B2"}
        missing = [p for p in wanted if not results.has(f"{last[p]}/{MODEL}/{name}/vllm")]
        if missing:
            measure_vllm(results, name, missing, arguments.tiny)


if __name__ == "__main__":
    main()
