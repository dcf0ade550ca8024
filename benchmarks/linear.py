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
from octavo.bench.measure import kernel_milliseconds, milliseconds
from octavo.bench.results import Results, Row
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

Make = Callable[[int, dict[str, int]], nn.Module]
"""Of K and the widths of the projections."""


def peers() -> dict[str, Make]:
    """Peer -> what makes its layer [in, out], in BF16."""
    if importlib.util.find_spec("torchao") is None:
        return {}
    float8 = importlib.import_module("torchao.float8")
    found: dict[str, Make] = {}
    for name in ("tensorwise", "rowwise"):

        def convert(K: int, projections: dict[str, int], name: str = name) -> nn.Module:
            config = float8.Float8LinearConfig.from_recipe_name(name)
            layer = float8.convert_to_float8_training(nn.Sequential(plain(K, projections)), config=config)
            return torch.compile(layer, dynamic=False)

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
    return milliseconds(step, 60, leaves), milliseconds(step, 60, leaves)


def main() -> None:
    """Measure, print, write; kernels, then recipes, then peers, whose compilation takes most of the time."""
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    results = Results("linear", "python benchmarks/linear.py")
    for recipe in RECIPES:
        for name, ms in profile_of(recipe).items():
            case = f"kernels of a layer/{MODEL}/{recipe}/{name}"
            results.add(Row(case=case, metric="ms", value=ms, unit="ms", better="lower"))
    best_bf16 = float("inf")
    recipes = {recipe: partial(random_layer, recipe) for recipe in RECIPES}
    for name, make in {"torch.nn.Linear bf16": plain, **recipes, **peers()}.items():
        try:
            first, again = layer_milliseconds(make)
        except (RuntimeError, AssertionError, TypeError) as error:
            print(f"{name} does not run here: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        case, mean = f"linears of a layer/{MODEL}/{name}", (first + again) / 2
        note = f"two runs, {first:.2f} and {again:.2f} ms"
        results.add(Row(case=case, metric="ms", value=mean, unit="ms", better="lower", note=note))
        if name.endswith("bf16"):
            best_bf16 = min(best_bf16, mean)
        else:
            goal, speedup = GOALS.get(name), best_bf16 / mean
            results.add(Row(case=case, metric="speedup_vs_bf16", value=speedup, unit="x", goal=goal))


def profile_of(recipe: str) -> dict[str, float]:
    """Kernel -> milliseconds in forward and backward of the four linears, those of 0.05 and more."""
    total: dict[str, float] = {}
    for K, projections in LINEARS.values():
        layer = random_layer(recipe, K, projections)
        x = torch.randn(TOKENS, K, device="cuda").bfloat16().requires_grad_()
        grad_y = torch.randn(TOKENS, sum(projections.values()), device="cuda").bfloat16()
        for name, ms in kernel_milliseconds(partial(_once, layer, x, grad_y)).items():
            total[name] = total.get(name, 0.0) + ms
    return {name: ms for name, ms in sorted(total.items(), key=lambda item: -item[1]) if ms >= 0.05}


def random_layer(recipe: str, K: int, projections: dict[str, int]) -> nn.Module:
    """FP8Linear with random weights."""
    return random_linear(K, projections, get_recipe(recipe))


def plain(K: int, projections: dict[str, int]) -> nn.Module:
    """torch.nn.Linear in BF16."""
    return nn.Linear(K, sum(projections.values()), bias=False, device="cuda", dtype=torch.bfloat16)


def layer_milliseconds(make: Make) -> tuple[float, float]:
    """Sum over the four linears of a layer, measured twice."""
    runs = [measure(make(K, projections), K, sum(projections.values())) for K, projections in LINEARS.values()]
    torch.cuda.empty_cache()
    first, again = (sum(times) for times in zip(*runs, strict=True))
    return first, again


def _once(layer: nn.Module, x: torch.Tensor, grad_y: torch.Tensor) -> None:
    for leaf in (x, *layer.parameters()):
        leaf.grad = None
    layer(x).backward(grad_y)


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        print("benchmarks/linear.py measures a GPU, and there is none here: skipped")
