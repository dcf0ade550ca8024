"""What fewer kernels save in training: forward and backward of 8 layers at real widths, each module alone or fused.

    python benchmarks/fused.py     # a table, and benchmarks/results/fused.json (under $OUT if that is set)

Two sequences of 4,096 random tokens with FP8 keys and values, random weights, gradients accumulated; block128, and of
the wide shape tensorwise and rowwise.
Medians of 10 passes after 3, by turns; the memory is the most that a pass adds to what is held before it.
"""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch
from torch import Tensor
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from octavo.bench.results import Results, Row
from octavo.layers.attention import PackedAttention
from octavo.models.config import decoder_config
from octavo.models.decoder import Decoder
from octavo.numerics.recipe import get_recipe

COMMAND = "python benchmarks/fused.py"
COMMON = {"vocab_size": 32_768, "num_hidden_layers": 8, "max_position_embeddings": 8192, "tie_word_embeddings": False}
SHAPES = {
    "qwen3-8b": Qwen3Config(
        hidden_size=4096, intermediate_size=12_288, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        **COMMON,
    ),
    "smollm2-135m": LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3, head_dim=64, **COMMON
    ),
}  # fmt: skip
CASES = (
    ("qwen3-8b", "block128"),
    ("qwen3-8b", "tensorwise"),
    ("qwen3-8b", "rowwise"),
    ("smollm2-135m", "block128"),
)
SEQUENCES, LENGTH = 2, 4096
WARM_UP, PASSES = 3, 10


@torch.no_grad()
def random_decoder(config: PretrainedConfig, recipe: str) -> Decoder:
    """Weights of the usual sizes."""
    decoder = Decoder(decoder_config(config), config, get_recipe(recipe, kv_cache="fp8")).cuda()
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    decoder.requantize_()
    return decoder


def one_pass(decoder: Decoder, tokens: Tensor) -> tuple[float, float]:
    """Milliseconds, and GiB at the peak beyond what was held, of a forward and backward."""
    boundaries = torch.arange(0, SEQUENCES * LENGTH + 1, LENGTH, device="cuda")
    positions = torch.arange(LENGTH, device="cuda").repeat(SEQUENCES)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    held, start = torch.cuda.memory_allocated(), time.perf_counter()
    hidden = decoder(tokens, positions, PackedAttention(boundaries, "fp8"))
    decoder.logprobs(hidden, tokens.roll(-1), 1.0)[0].mean().backward()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3, (torch.cuda.max_memory_allocated() - held) / 2**30


def main() -> None:
    """Measure, print, write."""
    torch.manual_seed(0)
    results = Results("fused", COMMAND)
    for name, recipe in CASES:
        config = SHAPES[name]
        decoder = random_decoder(config, recipe)
        tokens = torch.randint(config.vocab_size, (SEQUENCES * LENGTH,), device="cuda")
        found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for _ in range(WARM_UP + PASSES):
            for fuses, rows in found.items():
                decoder.fuses = fuses
                rows.append(one_pass(decoder, tokens))
        case = f"forward and backward 8,192 tokens/8 layers of {name}/{recipe}+kv8"
        medians = {}
        for fuses, label in ((True, "fused"), (False, "each module")):
            times, peaks = zip(*found[fuses][WARM_UP:], strict=True)
            medians[fuses], note = statistics.median(times), f"{min(times):.2f} to {max(times):.2f} ms, {PASSES} passes"
            row = partial(Row, case=f"{case}/{label}", better="lower")
            results.add(row(metric="ms", value=medians[fuses], unit="ms", note=note))
            results.add(row(metric="peak_gib", value=max(peaks), unit="GiB"))
        results.add(Row(case=case, metric="speedup", value=medians[False] / medians[True], unit="x", goal=1.0))


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        print(f"{COMMAND} measures a GPU, and there is none here: skipped")
