"""The four linear layers of a Qwen3-8B layer on a GPU, forward and backward, casts included, at 16,384 tokens.

    python benchmarks/linear.py      # a table, and benchmarks/results/linear.json (under $OUT if that is set)

Each is timed alone: Y = X W^T, dX and dW of random X and dY, weights quantised beforehand (once per optimiser step).
BF16 is the faster of torch.nn.Linear and this package's `bf16` recipe. Peers: torchao's Float8Linear, tensorwise and
rowwise, compiled as its documentation advises, and its blockwise prototype, where torchao is installed.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from octavo.bench.gemm import random_linear
from octavo.bench.measure import kernel_names, milliseconds
from octavo.bench.results import Row, write_results
from octavo.numerics.recipe import get_recipe

MODEL = "qwen3-8b"
TOKENS = 16384
LINEARS = {
    "qkv": (4096, {"q_proj": 4096, "k_proj": 1024, "v_proj": 1024}),
    "o": (4096, {"o_proj": 4096}),
    "gate_up": (4096, {"gate_proj": 12288, "up_proj": 12288}),
    "down": (12288, {"down_proj": 4096}),
}
GOALS = {"block128": 1.45, "tensorwise": 1.7, "w8a16": 1.2}
RECIPES = ("bf16", "block128", "w8a16", "rowwise", "tensorwise")

Make = Callable[[int, int], nn.Module]


def peers() -> dict[str, Make]:
    """Peer -> what makes its layer [in, out], in BF16."""

    def plain(K: int, N: int) -> nn.Module:
        return nn.Linear(K, N, bias=False, device="cuda", dtype=torch.bfloat16)

    found: dict[str, Make] = {"torch.nn.Linear bf16": plain}
    if importlib.util.find_spec("torchao") is None:
        return found
    float8 = importlib.import_module("torchao.float8")
    for name in ("tensorwise", "rowwise"):

        def convert(K: int, N: int, name: str = name) -> nn.Module:
            config = float8.Float8LinearConfig.from_recipe_name(name)
            return torch.compile(float8.convert_to_float8_training(nn.Sequential(plain(K, N)), config=config))

        found[f"torchao {name}"] = convert
    try:
        blockwise = importlib.import_module("torchao.prototype.blockwise_fp8_training.linear")
    except ImportError as error:
        print(f"torchao's blockwise prototype does not import here: {error}")
        return found
    found["torchao blockwise"] = lambda K, N: blockwise.Float8BlockwiseLinear.from_float(plain(K, N))
    return found


def measure(layer: nn.Module, K: int, N: int) -> tuple[float, float]:
    """Milliseconds of forward and backward, twice."""
    x = torch.randn(TOKENS, K, device="cuda").bfloat16().requires_grad_()
    grad_y = torch.randn(TOKENS, N, device="cuda").bfloat16()

    def step() -> None:
        layer(x).backward(grad_y)

    step()
    leaves = (x, *layer.parameters())
    return milliseconds(step, 100, leaves), milliseconds(step, 100, leaves)


def main() -> None:
    """Measure, print, write."""
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    totals: dict[str, list[tuple[float, float]]] = {}
    kernels: dict[str, list[str]] = {}
    for name, (K, projections) in LINEARS.items():
        N = sum(projections.values())
        for recipe in RECIPES:
            layer = random_linear(K, projections, get_recipe(recipe))
            totals.setdefault(recipe, []).append(measure(layer, K, N))
            x = torch.randn(TOKENS, K, device="cuda").bfloat16().requires_grad_()
            kernels.setdefault(recipe, []).extend(kernel_names(partial(_once, layer, x)))
        for peer, make in peers().items():
            try:
                totals.setdefault(peer, []).append(measure(make(K, N), K, N))
            except (RuntimeError, AssertionError, TypeError) as error:
                print(f"{peer} does not run {name}: {type(error).__name__}: {str(error)[:200]}")
        torch.cuda.empty_cache()
        print(name, {key: f"{times[-1][0]:.2f} ms" for key, times in totals.items()}, flush=True)
    whole = {key: [sum(run) for run in zip(*times, strict=True)] for key, times in totals.items() if len(times) == 4}
    mean = {key: sum(runs) / 2 for key, runs in whole.items()}
    bf16 = min(mean["bf16"], mean["torch.nn.Linear bf16"])
    rows = []
    for key, runs in whole.items():
        case, note = f"linears of a layer/{MODEL}/{key}", f"two runs, {runs[0]:.2f} and {runs[1]:.2f} ms"
        rows.append(Row(case=case, metric="ms", value=mean[key], unit="ms", better="lower", note=note))
        goal = GOALS.get(key)
        rows.append(Row(case=case, metric="speedup_vs_bf16", value=bf16 / mean[key], unit="x", goal=goal))
    for row in rows:
        print(row.line())
    for recipe, names in kernels.items():
        print(f"kernels of {recipe}: {', '.join(dict.fromkeys(names))}")
    write_results("linear", "python benchmarks/linear.py", rows)


def _once(layer: nn.Module, x: torch.Tensor) -> None:
    y = layer(x)
    y.backward(torch.ones_like(y))


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        print("benchmarks/linear.py measures a GPU, and there is none here: skipped")
