"""Matrix products of a Qwen3-8B layer on a GPU: training against the tensor cores, decoding against the memory.

    python benchmarks/gemm.py        # a table, and benchmarks/results/gemm.json (under $OUT if that is set)

Operands are random and cast beforehand. Training: TFLOP/s of each product at 16,384 tokens. Decoding: the share of the
time that a copy would take for the weight once, weights cold, products in a CUDA graph; `layer` sums the four linears.
Peers: cuBLASLt and cuBLAS through torch, DeepGEMM where it is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from octavo.bench.measure import copy_speed, microseconds_each, milliseconds
from octavo.bench.results import Results, Row
from octavo.kernels.deep_gemm import deep_gemm
from octavo.kernels.gemm import Backend, product
from octavo.kernels.operands import Operand, grid_operand, quantize_matrix
from octavo.numerics.fp8 import BLOCK_1X128, BLOCK_128X1, BLOCK_128X128, PER_COLUMN, PER_ROW

MODEL = "qwen3-8b"
LINEARS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
TOKENS = 16384
BATCHES = (1, 16, 32, 64, 128)
COLD_BYTES = 400e6
FORWARD_GOAL, WGRAD_GOAL = 1100.0, 900.0
"""TFLOP/s of block128, mean of the four linears."""
DECODE_GOALS = {1: 0.70, 16: 0.70, 32: 0.70, 64: 0.70, 128: 0.55}
"""Share of the bandwidth bound of block128, time-weighted over the four linears."""

results = Results("gemm", "python benchmarks/gemm.py")


def add(case: str, metric: str, value: float, unit: str, goal: float | None = None, note: str = "") -> None:
    """Keep a figure."""
    results.add(Row(case=case, metric=metric, value=value, unit=unit, goal=goal, note=note))


def activations(M: int, K: int) -> Tensor:
    """Random BF16."""
    return torch.randn(M, K, device="cuda").bfloat16()


def weights(N: int, K: int) -> Tensor:
    """A random FP32 master."""
    return torch.randn(N, K, device="cuda") * 0.02


def products(N: int, K: int) -> dict[str, dict[str, Callable[[], object]]]:
    """Product -> back end -> call, at TOKENS tokens."""
    x, grad_y, w = activations(TOKENS, K), activations(TOKENS, N), weights(N, K)
    w16 = w.bfloat16()
    x_block, dy_block = (quantize_matrix(t, BLOCK_1X128).operand() for t in (x, grad_y))
    x_across, dy_across = (quantize_matrix(t, BLOCK_128X1).T.operand() for t in (x, grad_y))
    w_block = quantize_matrix(w, BLOCK_128X128)
    w_fprop, w_dgrad = w_block.operand(), w_block.T.operand()
    x_row, w_row = quantize_matrix(x, PER_ROW).operand(), quantize_matrix(w, PER_ROW).operand()
    dy_row, w_column = quantize_matrix(grad_y, PER_ROW).operand(), quantize_matrix(w, PER_COLUMN).T.operand()
    dy_rows, x_rows = (quantize_matrix(t, PER_COLUMN).T.operand() for t in (grad_y, x))

    def by(left: Operand, right: Operand, *names: Backend, dtype: torch.dtype = torch.bfloat16) -> dict:
        names = tuple(name for name in names if name != "deep_gemm" or deep_gemm() is not None)
        return {name: partial(product, left, right, dtype=dtype, backend=name) for name in names}

    fp32 = torch.float32
    return {
        "fprop/block128": by(x_block, w_fprop, "scaled_mm", "triton", "deep_gemm"),
        "dgrad/block128": by(dy_block, w_dgrad, "scaled_mm", "deep_gemm"),
        "wgrad/block128": by(dy_across, x_across, "scaled_mm", "deep_gemm", dtype=fp32),
        "fprop/rowwise": by(x_row, w_row, "scaled_mm"),
        "dgrad/rowwise": by(dy_row, w_column, "scaled_mm"),
        "wgrad/rowwise": by(dy_rows, x_rows, "scaled_mm", dtype=fp32),
        "fprop/w8a16": by(grid_operand(x), w_fprop, "cublas", "triton"),
        "fprop/bf16": by(grid_operand(x), grid_operand(w16), "cublas", "triton"),
        "dgrad/bf16": {"cublas": partial(torch.mm, grad_y, w16)},
        "wgrad/bf16": {"cublas": partial(torch.mm, grad_y.T, x, out_dtype=fp32)},
    }


def training() -> None:
    """TFLOP/s of every product and back end, and the means that have goals."""
    speeds: dict[str, dict[str, list[float]]] = {}
    for linear, (N, K) in LINEARS.items():
        for what, calls in products(N, K).items():
            for backend, call in calls.items():
                first, again = (2 * TOKENS * N * K / milliseconds(call, 60) / 1e9 for _ in range(2))
                speeds.setdefault(what, {}).setdefault(backend, []).append((first + again) / 2)
                kind, recipe = what.split("/")
                case = f"{kind} of {linear} by {backend}/{MODEL}/{recipe}"
                add(case, "tflop_s", (first + again) / 2, "TFLOP/s", note=f"two runs, {first:.0f} and {again:.0f}")
        torch.cuda.empty_cache()
    means = {key: {name: sum(values) / len(values) for name, values in calls.items()} for key, calls in speeds.items()}
    for what, calls in means.items():
        for backend, speed in calls.items():
            kind, recipe = what.split("/")
            goal = None
            if recipe == "block128" and backend != "triton":
                goal = WGRAD_GOAL if kind == "wgrad" else FORWARD_GOAL
            add(f"{kind} of a layer by {backend}/{MODEL}/{recipe}", "tflop_s", speed, "TFLOP/s", goal, "mean of four")


def decoding(copy: float) -> None:
    """Microseconds of every linear, and the share of the bound over the layer."""
    kinds: dict[str, tuple[Backend | None, int]] = {
        "block128": (None, 1),
        "block128 by scaled_mm": ("scaled_mm", 1),
        "w8a16": (None, 1),
        "rowwise": (None, 1),
        "bf16": (None, 2),
        "bf16 by cublas": (None, 2),
    }
    totals: dict[tuple[str, int], list[float]] = {}
    for linear, (N, K) in LINEARS.items():
        masters = [weights(N, K) for _ in range(max(3, int(COLD_BYTES // (N * K))))]
        square = [quantize_matrix(w, BLOCK_128X128).operand() for w in masters]
        by_row = [quantize_matrix(w, PER_ROW).operand() for w in masters]
        plain = [w.bfloat16() for w in masters]
        del masters
        for M in BATCHES:
            x = activations(M, K)
            block, row, high = quantize_matrix(x, BLOCK_1X128), quantize_matrix(x, PER_ROW), grid_operand(x)
            for kind, (backend, width) in kinds.items():
                if kind == "bf16 by cublas":
                    calls = [partial(torch.mm, x, w.T) for w in plain]
                elif kind == "bf16":
                    calls = [partial(product, high, grid_operand(w)) for w in plain]
                else:
                    left = {"w8a16": high, "rowwise": row.operand()}.get(kind, block.operand())
                    some = by_row if kind == "rowwise" else square
                    calls = [partial(product, left, w, backend=backend) for w in some]
                time = microseconds_each(calls)
                bound = width * N * K / copy / 1e3
                totals.setdefault((kind, M), []).append(time)
                case = f"decode of {M}, {linear}/{MODEL}/{kind}"
                add(case, "bandwidth_share", bound / time, "of copy", note=f"{time:.1f} us, bound {bound:.1f}")
        del square, by_row, plain
        torch.cuda.empty_cache()
    for (kind, M), times in totals.items():
        bound = kinds[kind][1] * sum(N * K for N, K in LINEARS.values()) / copy / 1e3
        goal = DECODE_GOALS[M] if kind == "block128" else None
        note = f"{sum(times):.1f} us, bound {bound:.1f}"
        add(f"decode of {M}, layer/{MODEL}/{kind}", "bandwidth_share", bound / sum(times), "of copy", goal, note)


def main() -> None:
    """Measure, print, write."""
    torch.manual_seed(0)
    copy = copy_speed()
    add("copy/1 GiB/uint8", "gb_s", copy, "GB/s")
    decoding(copy)
    training()


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        print("benchmarks/gemm.py measures a GPU, and there is none here: skipped")
