"""Casts to FP8 on a GPU, as a share of the bandwidth of a large copy measured in the same run.

    python benchmarks/cast.py        # a table, and benchmarks/results/cast.json (under $OUT if that is set)

Bytes are what a cast must move: its input once, its FP8 outputs and scales once. Peer: the same cast in plain torch.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from octavo.kernels.cast import cast_1x128, cast_128x1, cast_128x128, cast_both, cast_rows
from octavo.numerics.fp8 import BLOCK_1X128, BLOCK_128X1, BLOCK_128X128, PER_ROW, QuantBlock, quantize

TOKENS = 16384
ACTIVATIONS = {"qwen3-8b hidden": 4096, "qwen3-8b feed-forward": 12288, "qwen2.5-0.5b hidden": 896}
WEIGHTS = {"qwen3-8b gate and up": (24576, 4096), "qwen3-8b down": (4096, 12288)}
GOAL = 0.85
"""Share of the copy bandwidth."""


Cast = Callable[[Tensor], object]


def plain(*quant_blocks: QuantBlock) -> Cast:
    """The casts of each block shape in plain torch."""
    return lambda x: [quantize(x, quant_block) for quant_block in quant_blocks]


def transposed_too(w: Tensor) -> Tensor:
    """A weight's cast in plain torch, and its transpose."""
    return quantize(w, BLOCK_128X128)[0].T.contiguous()


def bandwidth(call: Callable[[], object], num_bytes: float) -> float:
    """Median GB/s."""
    from triton.testing import do_bench

    return num_bytes / do_bench(call, return_mode="median") / 1e6


def main() -> None:
    """Measure, print, write."""
    torch.manual_seed(0)
    source = torch.randint(0, 255, (2**30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy = bandwidth(lambda: target.copy_(source), 2 * source.numel())
    print(f"copy of 1 GiB: {copy:.0f} GB/s")
    rows = [{"case": "copy/1 GiB/uint8", "metric": "gb_s", "value": copy, "unit": "GB/s", "goal": None}]

    def add(case: str, x: Tensor, cast: Cast, peer: Cast, num_bytes: float) -> None:
        mine, again, theirs = (bandwidth(partial(work, x), num_bytes) / copy for work in (cast, cast, peer))
        print(f"{case:44} {mine:6.1%}  again {again:6.1%}  plain torch {theirs:6.1%}")
        note = f"second run {again:.3f}; plain torch {theirs:.3f}"
        row = {"case": case, "metric": "bandwidth_share", "value": mine, "unit": "of copy", "goal": GOAL, "note": note}
        rows.append(row)

    for name, width in ACTIVATIONS.items():
        x = torch.randn(TOKENS, width, device="cuda", dtype=torch.bfloat16)
        size = x.numel()
        scales = 4 * size / 128
        add(f"rows/{name}/bf16", x, cast_rows, plain(PER_ROW), 3 * size + 4 * TOKENS)
        add(f"1x128/{name}/bf16", x, cast_1x128, plain(BLOCK_1X128), 3 * size + scales)
        add(f"128x1/{name}/bf16", x, cast_128x1, plain(BLOCK_128X1), 3 * size + scales)
        add(f"both/{name}/bf16", x, cast_both, plain(BLOCK_1X128, BLOCK_128X1), 4 * size + 2 * scales)
    for name, shape in WEIGHTS.items():
        for dtype in (torch.float32, torch.bfloat16):
            w = torch.randn(shape, device="cuda", dtype=dtype)
            case = f"128x128 and transpose/{name}/{str(dtype).removeprefix('torch.')}"
            add(case, w, cast_128x128, transposed_too, w.numel() * (dtype.itemsize + 2))
    write(rows)


def write(rows: list[dict]) -> None:
    """One JSON file with device, versions, commit and command."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton"),
        "commit": os.environ.get("OCTAVO_COMMIT") or commit or "unknown",
        "command": "python benchmarks/cast.py",
        "date": datetime.date.today().isoformat(),
        "rows": [{"better": "higher", "note": "", **row} for row in rows],
    }
    folder = Path(os.environ.get("OUT", "benchmarks/results"))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cast.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        print("benchmarks/cast.py measures a GPU, and there is none here: skipped")
