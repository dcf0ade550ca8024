"""A GRPO step of the Qwen3-8B shape in steady state: 64 completions of a forced length, 4 mini-batches, phase by phase.

    python benchmarks/step.py [1024] [2048] [4096] [8192] [16384]    # all lengths where none is named

A table, and benchmarks/results/step.json (under $OUT if that is set), which keeps the figures of earlier calls. BF16,
FP8, and FP8 with FP8 keys and values; how many sequences decode at once depends on what the cache gets of the card.
"""

from __future__ import annotations

import gc
import sys

import torch
from train import SHAPES

from octavo.bench.results import Results, Row
from octavo.bench.step import StepTime, StepWork, step_time
from octavo.models.config import decoder_config
from octavo.numerics.recipe import get_recipe

LENGTHS = ("1024", "2048", "4096", "8192", "16384")
PRECISIONS = {"bf16": ("bf16", "bf16"), "block128": ("block128", "bf16"), "block128+kv8": ("block128", "fp8")}
"""Recipe and KV format."""


def rows_of(case: str, time: StepTime, bf16: StepTime | None) -> list[Row]:
    """Each phase beside its prediction, the step, and its speed-up where BF16 was measured."""
    rows = [
        Row(
            case=f"{case}/{phase}",
            metric="seconds",
            value=seconds,
            unit="s",
            better="lower",
            note=f"predicted {time.predicted[phase]:.3f} s",
        )
        for phase, seconds in time.measured.items()
    ]
    note = f"{time.seconds:.1f} s a step, {time.at_once} sequences at once; {time.formats}"
    rows.append(Row(case=case, metric="tok_s", value=time.tok_s, unit="tok/s", note=note))
    if bf16 is not None:
        rows.append(Row(case=case, metric="speedup_vs_bf16", value=bf16.seconds / time.seconds, unit="x"))
    return rows


def main() -> None:
    """Measure what is named, print, write."""
    lengths = sys.argv[1:] or LENGTHS
    if unknown := [length for length in lengths if length not in LENGTHS]:
        raise SystemExit(f"no length {unknown[0]!r}; name some of {' '.join(LENGTHS)}")
    results = Results("step", f"python benchmarks/step.py {' '.join(sys.argv[1:])}".strip(), resume=True)
    hf_config = SHAPES["8b"]
    for length in lengths:
        bf16 = None
        for name, (recipe, kv_cache) in PRECISIONS.items():
            chosen, work = get_recipe(recipe, kv_cache=kv_cache), StepWork(completion_tokens=int(length))
            time = step_time(decoder_config(hf_config), hf_config, chosen, work)
            for row in rows_of(f"step/qwen3-8b/{length}/{name}", time, bf16):
                results.add(row)
            bf16 = bf16 or time
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        print("benchmarks/step.py measures a GPU, and there is none here: skipped")
