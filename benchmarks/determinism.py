"""What the deterministic backward costs on a GPU: a train step of 8 layers of Qwen3-8B's width at 8,192 tokens.

    python benchmarks/determinism.py     # a table, and benchmarks/results/determinism.json (under $OUT if that is set)

Forward, backward, AdamW and re-quantisation of random weights under block128 with FP8 keys and values, by each back end
of attention's backward: `triton` is the default and gives the same bits every time. Medians of 5 steps after 2. Two
backward passes from the same weights say whether a back end's gradients are the same every time.
"""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import get_args

import torch
from torch import Tensor
from transformers import Qwen3Config

from octavo.bench.measure import milliseconds
from octavo.bench.results import Results, Row
from octavo.kernels.attention_backward import BackwardName
from octavo.layers.attention import PackedAttention
from octavo.models.config import decoder_config
from octavo.models.decoder import Decoder
from octavo.numerics.recipe import get_recipe
from octavo.trainer.optimizer import Optimizer, OptimizerConfig

COMMAND = "python benchmarks/determinism.py"
CASE = "train step 8,192 tokens/8 layers of qwen3-8b/block128+kv8"
SHAPE = Qwen3Config(
    vocab_size=151_936, hidden_size=4096, intermediate_size=12_288, num_hidden_layers=8, num_attention_heads=32,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=8192, tie_word_embeddings=False,
)  # fmt: skip
SEQUENCES, LENGTH = 2, 4096
WARM_UP, STEPS = 2, 5
DEFAULT: BackwardName = "gluon"


@torch.no_grad()
def random_decoder() -> Decoder:
    """Weights of the usual sizes."""
    decoder = Decoder(decoder_config(SHAPE), SHAPE, get_recipe("block128", kv_cache="fp8")).cuda()
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    decoder.requantize_()
    return decoder


def accumulate_gradients(decoder: Decoder, tokens: Tensor, back_end: BackwardName) -> None:
    """Forward and backward of the mean log-probability of the next tokens."""
    boundaries = torch.arange(0, SEQUENCES * LENGTH + 1, LENGTH, device="cuda")
    positions = torch.arange(LENGTH, device="cuda").repeat(SEQUENCES)
    hidden = decoder(tokens, positions, PackedAttention(boundaries, "fp8", backward=back_end))
    logprobs, _ = decoder.logprobs(hidden, tokens.roll(-1), 1.0)
    (-logprobs.mean()).backward()


def same_bits(decoder: Decoder, tokens: Tensor, back_end: BackwardName) -> bool:
    """Whether two backward passes give the same gradients."""
    accumulate_gradients(decoder, tokens, back_end)
    first = [parameter.grad for parameter in decoder.parameters()]
    decoder.zero_grad(set_to_none=True)
    accumulate_gradients(decoder, tokens, back_end)
    pairs = zip(first, decoder.parameters(), strict=True)
    same = all(before is not None and torch.equal(before, now.grad) for before, now in pairs)
    decoder.zero_grad(set_to_none=True)
    return same


def step_seconds(decoder: Decoder, optimizer: Optimizer, tokens: Tensor, back_end: BackwardName) -> list[float]:
    """Of whole train steps, the first ones left out."""
    taken = []
    for _ in range(WARM_UP + STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        accumulate_gradients(decoder, tokens, back_end)
        optimizer.step()
        decoder.requantize_()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - start)
    return taken[WARM_UP:]


def embedding_gradients(results: Results, tokens: Tensor) -> None:
    """The embedding's gradient as it is, rows sorted by token, and by atomic sums."""
    grad = torch.randn(len(tokens), SHAPE.hidden_size, device="cuda")
    out = torch.zeros(SHAPE.vocab_size, SHAPE.hidden_size, device="cuda")
    calls = {
        "sorted": partial(out.index_put_, (tokens,), grad, accumulate=True),
        "atomic": partial(out.index_add_, 0, tokens, grad),
    }
    for name, call in calls.items():
        case = f"embedding gradient 8,192 tokens/qwen3-8b/{name}"
        results.add(Row(case=case, metric="ms", value=milliseconds(call, 60), unit="ms", better="lower"))


def main() -> None:
    """Measure, print, write."""
    torch.manual_seed(0)
    results = Results("determinism", COMMAND)
    tokens = torch.randint(SHAPE.vocab_size, (SEQUENCES * LENGTH,), device="cuda")
    embedding_gradients(results, tokens)
    decoder = random_decoder()
    same = {back_end: same_bits(decoder, tokens, back_end) for back_end in get_args(BackwardName)}
    optimizer = Optimizer(dict(decoder.named_parameters()), OptimizerConfig(lr=1e-6), 100, fused=True)
    medians: dict[str, float] = {}
    for back_end in get_args(BackwardName):
        taken = step_seconds(decoder, optimizer, tokens, back_end)
        medians[back_end] = statistics.median(taken)
        note = f"{min(taken):.3f} to {max(taken):.3f} s, {STEPS} steps"
        row = partial(Row, case=f"{CASE}/{back_end}")
        results.add(row(metric="s", value=medians[back_end], unit="s", better="lower", note=note))
        goal = 1.0 if back_end == DEFAULT else None
        results.add(row(metric="same_bits", value=float(same[back_end]), unit="bool", goal=goal))
    fastest = min((name for name in medians if name != DEFAULT), key=lambda name: medians[name])
    results.add(
        Row(
            case=CASE,
            metric="cost_of_determinism",
            value=medians[DEFAULT] / medians[fastest],
            unit="x",
            better="lower",
            note=f"{DEFAULT} over {fastest}",
        )
    )


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        print(f"{COMMAND} measures a GPU, and there is none here: skipped")
