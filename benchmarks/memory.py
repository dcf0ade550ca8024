"""The memory plan beside what runs take: three steps of models with random weights, of several shapes and recipes.

python benchmarks/memory.py      # a table, and benchmarks/results/memory.json (under $OUT if that is set)
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from octavo.bench.memory import full_run, random_model, train_beside_plan
from octavo.bench.results import Results, Row

TINY_MODEL = Path(__file__).resolve().parents[1] / "examples/tiny/model"
QWEN3 = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
SMOLLM2 = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3, 8 layers": {**QWEN3, "head_dim": 128, "num_hidden_layers": 8, "vocab_size": 32000},
    "qwen3-0.6b": {**QWEN3, "head_dim": 128, "num_hidden_layers": 28, "vocab_size": 151936},
    "smollm2-135m": {**SMOLLM2, "head_dim": 64, "num_hidden_layers": 30, "vocab_size": 49152},
}
"""Qwen3's architecture in each; widths and depths are those of the models."""
RECIPES = ("block128", "w8a16", "rowwise", "tensorwise_static", "bf16")
GOAL = 0.05
"""Most that a plan's peak is off, as a share of the measured one."""


def main() -> None:
    """Every shape under every recipe, and with layers computed again under the first."""
    results = Results("memory", "python benchmarks/memory.py")
    for shape, widths in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            model = random_model(Path(folder) / "model", TINY_MODEL, widths)
            for recipe, recompute in [(recipe, False) for recipe in RECIPES] + [(RECIPES[0], True)]:
                case = f"memory/{shape}/{recipe}{', layers again' * recompute}"
                run = train_beside_plan(full_run(model, Path(folder) / "run", {"recipe": recipe}, recompute))
                print(f"{case}\n{run.table()}")
                for phase, planned in run.planned.items():
                    note = f"planned {planned:.3f} GiB, measured {run.measured[phase]:.3f} GiB"
                    off, goal = abs(run.off(phase)), GOAL if phase == "peak" else None
                    metric = f"{phase}_off"
                    results.add(
                        Row(case=case, metric=metric, value=off, unit="share", goal=goal, better="lower", note=note)
                    )


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        print("benchmarks/memory.py measures a GPU, and there is none here: skipped")
