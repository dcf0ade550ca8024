"""lm_head on a GPU: log-probabilities of a batch, their gradients, and the logits of decode.

    python benchmarks/logprobs.py    # a table, and benchmarks/results/logprobs.json (under $OUT if that is set)

Training: TFLOP/s as a share of a plain BF16 product of the same matrices, measured beside it. Peers: logits by
torch.mm in FP32 and log_softmax in chunks of rows, eager and compiled; cross entropy over all logits at once.
Decode: the share of the time that a large copy would take for the weight once and the logits once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from octavo.bench.measure import copy_speed, milliseconds
from octavo.bench.results import Results, Row
from octavo.kernels.lm_head import logsumexp_of
from octavo.kernels.logprobs import chosen_logprobs, logits_from_hidden, token_logprobs
from octavo.kernels.operands import grid_operand

TOKENS = 8192
CHUNK = 1024
MODELS = {"qwen3-8b": (151936, 4096), "llama-3-8b": (128256, 4096)}
BATCHES = (1, 8, 64, 128, 256)
FORWARD_GOAL = 0.85
"""Share of the speed of a BF16 product."""
DECODE_GOAL = 0.75
"""Share of the bandwidth bound, up to 64 sequences."""


def chosen(logits: Tensor, tokens: Tensor) -> Tensor:
    """[T, V] fp32, [T] -> [T] fp32 in plain torch."""
    return torch.log_softmax(logits, dim=-1).gather(1, tokens[:, None])


def by_chunks(pick: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    """Log-probabilities from the FP32 logits of CHUNK rows at a time."""
    pairs = zip(hidden.split(CHUNK), tokens.split(CHUNK), strict=True)
    return torch.cat([pick(torch.mm(h, weight.T, out_dtype=torch.float32), t) for h, t in pairs])


def ours_backward(hidden: Tensor, weight: Tensor, master: Tensor, tokens: Tensor) -> None:
    """Forward and backward."""
    token_logprobs(hidden, master, grid_operand(weight), tokens, 1.0)[0].sum().backward()


def all_logits_backward(hidden: Tensor, weight: Tensor, tokens: Tensor) -> None:
    """Forward and backward over all logits at once, in BF16 and then FP32."""
    torch.nn.functional.cross_entropy((hidden @ weight.T).float(), tokens, reduction="sum").backward()


def peak_gib(call: Callable[[], object]) -> float:
    """GiB that a call adds to what is held before it, results included."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def main() -> None:
    """Measure, print, write."""
    torch.manual_seed(0)
    copy = copy_speed()
    results = Results("logprobs", "python benchmarks/logprobs.py")

    def add(case: str, metric: str, value: float, unit: str, goal: float | None = None, note: str = "") -> None:
        better = "lower" if metric in ("ms", "peak_gib") else "higher"
        results.add(Row(case=case, metric=metric, value=value, unit=unit, goal=goal, better=better, note=note))

    add("copy/1 GiB/uint8", "gb_s", copy, "GB/s")
    compiled = torch.compile(chosen, dynamic=False)
    for name, (V, D) in MODELS.items():
        weight = (torch.randn(V, D, device="cuda") * 3 / D**0.5).bfloat16()
        hidden = torch.randn(TOKENS, D, device="cuda").bfloat16()
        tokens = torch.randint(V, (TOKENS,), device="cuda")
        decode(f"{name}/bf16", hidden, weight, tokens, copy, add)
        training(f"{name}/bf16", hidden, weight, tokens, partial(by_chunks, compiled), add)


def training(case: str, hidden: Tensor, weight: Tensor, tokens: Tensor, compiled: Callable, add: Callable) -> None:
    """Forward, and forward with backward, of TOKENS tokens."""
    flop, V = 2 * len(hidden) * weight.numel(), len(weight)
    operand, master = grid_operand(weight), weight.float()
    forward = partial(token_logprobs, hidden, master, operand, tokens, 1.0)
    product = milliseconds(partial(torch.mm, hidden, weight.T))
    ours, again = milliseconds(forward), milliseconds(forward)
    product_again = milliseconds(partial(torch.mm, hidden, weight.T))
    product = (product + product_again) / 2
    add(f"product/{case}", "tflop_s", flop / product / 1e9, "TFLOP/s", note=f"second run {product_again:.2f} ms")
    add(f"forward/{case}", "tflop_s", flop / ours / 1e9, "TFLOP/s", note=f"{ours:.2f} ms, second run {again:.2f} ms")
    add(f"forward/{case}", "matmul_share", product / ours, "of BF16 product", FORWARD_GOAL)
    for peer, call in (("chunked eager", partial(by_chunks, chosen)), ("chunked compiled", compiled)):
        call(hidden, weight, tokens)
        theirs = milliseconds(partial(call, hidden, weight, tokens))
        note = f"{theirs:.2f} ms, {peak_gib(partial(call, hidden, weight, tokens)):.2f} GiB, no entropy"
        add(f"forward against {peer}/{case}", "speedup", theirs / ours, "x", note=note)
    add(f"forward/{case}", "peak_gib", peak_gib(forward), "GiB", note=f"FP32 logits {4 * len(hidden) * V / 2**30:.2f}")
    leaf = hidden.detach().requires_grad_()
    plain = partial(all_logits_backward, leaf, weight.requires_grad_(), tokens)
    both = partial(ours_backward, leaf, weight.detach(), master.requires_grad_(), tokens)
    for label, call, leaves in ((" of all logits", plain, [leaf, weight]), ("", both, [leaf, master])):
        time = milliseconds(call, 400, leaves)
        for x in leaves:
            x.grad = None
        note = f"3 products at {3 * flop / time / 1e9:.0f} TFLOP/s"
        add(f"forward and backward{label}/{case}", "ms", time, "ms", note=note)
        add(f"forward and backward{label}/{case}", "peak_gib", peak_gib(call), "GiB", note="gradients included")
        for x in leaves:
            x.grad = None


def decode(case: str, hidden: Tensor, weight: Tensor, tokens: Tensor, copy: float, add: Callable) -> None:
    """Logits, their logsumexp and the chosen log-probabilities."""
    operand = grid_operand(weight)
    for B in BATCHES:
        few, drawn = hidden[:B].contiguous(), tokens[:B]

        def report(few: Tensor = few, drawn: Tensor = drawn) -> Tensor:
            logits = logits_from_hidden(few, operand)
            return chosen_logprobs(logits, logsumexp_of(logits), drawn)

        bound = (2 * weight.numel() + 4 * B * len(weight)) / copy / 1e6
        logits, whole = milliseconds(partial(logits_from_hidden, few, operand)), milliseconds(report)
        peer = milliseconds(lambda few=few: torch.mm(few, weight.T, out_dtype=torch.float32))
        note = f"{logits:.3f} ms, with log-probabilities {whole:.3f}, bound {bound:.3f}, torch.mm {peer:.3f}"
        goal = DECODE_GOAL if B <= 64 else None
        add(f"decode of {B}/{case}", "bandwidth_share", bound / logits, "of copy", goal, note)


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        print("benchmarks/logprobs.py measures a GPU, and there is none here: skipped")
