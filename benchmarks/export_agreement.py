"""Whether others compute from an FP8 export what octavo does: log-probabilities of the same text, token by token.

    make test-verl                                            makes the environment, with vLLM for a CPU
    PYTHONPATH=. .venv-verl/bin/python benchmarks/export_agreement.py MODEL [--device cuda] [--problems 8]

MODEL is a Hugging Face folder. It is written as a block-FP8 folder, whose bytes are then read by all: octavo's
`block128` beside vLLM, and octavo's `w8a16` beside transformers, which on a CPU decodes the weights. The text is
problems of GSM8K with their solutions, from $OCTAVO_DATA. Writes benchmarks/results/export_agreement.json (under $OUT
if that is set), which keeps the figures of other models. On a CPU vLLM's block kernel is emulated
(tests/verl/vllm_on_cpu.py).
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.bench.results import Results, Row
from octavo.layers.attention import PackedAttention
from octavo.models.checkpoint import load_decoder, save_decoder
from octavo.models.fp8_folder import obstacles
from octavo.numerics.recipe import get_recipe

TESTS = Path(__file__).resolve().parents[1] / "tests" / "verl"
MAX_TOKENS = 160
"""Of a text; the rest is cut off."""


def read_texts(model: Path, count: int) -> list[list[int]]:
    """Token ids of the first problems and their solutions."""
    path = Path(os.environ.get("OCTAVO_DATA", "../shared/data")) / "gsm8k" / "test.jsonl"
    if not path.is_file():
        sys.exit(f"{path} is not there; set OCTAVO_DATA to the folder that holds gsm8k/test.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()[:count]]
    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tokenizer(f"{row['problem']}\n{row['solution']}")["input_ids"][:MAX_TOKENS] for row in rows]


def chosen(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities of tokens [T] but the first from logits [T, V], [T - 1] fp32."""
    return logits.float().log_softmax(-1)[:-1].gather(1, tokens[1:, None]).flatten().cpu()


@torch.no_grad()
def by_octavo(folder: Path, recipe: str, texts: list[list[int]], device: str) -> Tensor:
    """All texts', end to end."""
    decoder = load_decoder(folder, get_recipe(recipe, kv_cache="bf16"), max_tokens=MAX_TOKENS, device=device)
    found = []
    for tokens in (torch.tensor(ids, device=device) for ids in texts):
        edges = torch.tensor([0, len(tokens)], device=device)
        hidden = decoder(tokens, torch.arange(len(tokens), device=device), PackedAttention(edges, "bf16"))
        found.append(chosen(decoder.logits(hidden), tokens))
    return torch.cat(found)


@torch.no_grad()
def by_transformers(folder: Path, texts: list[list[int]]) -> Tensor:
    """On the CPU: its FP8 kernels for a GPU come from the hub."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    return torch.cat([chosen(model(ids[None]).logits[0], ids) for ids in map(torch.tensor, texts)])


def by_vllm(folder: Path, texts: list[list[int]], device: str) -> tuple[Tensor, str]:
    """And its release."""
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
    os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_USE_DEEP_GEMM_E8M0="0")
    import vllm

    if device == "cpu":
        sys.path.insert(0, str(TESTS))
        from vllm_on_cpu import register

        register()
    llm = vllm.LLM(
        model=str(folder),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=MAX_TOKENS + 1,
        dtype="bfloat16",
        max_num_seqs=8,
        gpu_memory_utilization=0.4,
    )
    parameters = vllm.SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in texts], parameters, use_tqdm=False)
    rows = [zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True) for output in outputs]
    return torch.tensor([found[token].logprob for row in rows for token, found in row]), vllm.__version__


def rows_of(case: str, found: Tensor, wanted: Tensor, bf16: Tensor, note: str) -> list[Row]:
    """Distances of log-probabilities [T], which are to be less than FP8 itself makes in octavo."""
    apart, itself = (found - wanted).abs(), (wanted - bf16).abs().mean().item()
    row = partial(Row, case=case, unit="nats", better="lower", note=f"{note}; FP8 itself {itself:.4f}")
    return [
        row(metric="mean_abs", value=apart.mean().item(), goal=itself),
        row(metric="max_abs", value=apart.max().item()),
    ]


def main() -> None:
    """Write, read, compare."""
    parser = argparse.ArgumentParser(description="An FP8 export in octavo, vLLM and transformers.")
    parser.add_argument("model", type=Path, help="Hugging Face folder")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="of octavo and vLLM")
    parser.add_argument("--problems", type=int, default=8, help="of GSM8K")
    arguments = parser.parse_args()
    texts = read_texts(arguments.model, arguments.problems)
    note = f"{sum(len(ids) - 1 for ids in texts)} tokens"
    command = f"PYTHONPATH=. python benchmarks/export_agreement.py {arguments.model.name} --device {arguments.device}"
    results = Results("export_agreement", command, resume=True)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "fp8"
        decoder = load_decoder(arguments.model, get_recipe("block128"), max_tokens=MAX_TOKENS)
        if refused := {engine: names for engine, names in obstacles(decoder).items() if names}:
            sys.exit(f"{arguments.model} has projections that {', '.join(refused)} refuse: {refused}")
        save_decoder(decoder, folder, arguments.model, weights="fp8")
        del decoder
        case, device = f"export/{arguments.model.name}", arguments.device
        bf16 = by_octavo(arguments.model, "bf16", texts, device)
        found, wanted = by_transformers(folder, texts), by_octavo(folder, "w8a16", texts, device)
        for row in rows_of(f"{case}/transformers", found, wanted, bf16, note):
            results.add(row)
        if importlib.util.find_spec("vllm") is None:
            print("vLLM is not installed here, and is left out")
            return
        wanted = by_octavo(folder, "block128", texts, device)
        gc.collect()
        torch.cuda.empty_cache()
        found, release = by_vllm(folder, texts, device)
        for row in rows_of(f"{case}/vllm", found, wanted, bf16, f"{note}, vLLM {release}"):
            results.add(row)


if __name__ == "__main__":
    main()
