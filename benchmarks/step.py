"""A GRPO step of the Qwen3-8B shape in steady state: 64 completions of a forced length, 4 mini-batches, phase by phase.

    python benchmarks/step.py [sampled] [1024] [2048] [4096] [8192] [16384]    # all lengths where none is named

A table, and benchmarks/results/step.json (under $OUT if that is set), which keeps the figures of earlier calls. BF16,
FP8, and FP8 with FP8 keys and values; how many sequences decode at once depends on what the cache gets of the card.
`sampled` measures samples of each phase in place of a whole step (`octavo.bench.step_sampled`), whose cases say so.
"""

from __future__ import annotations

import gc
import sys

import torch
from train import SHAPES

from octavo.bench.results import Results, Row
from octavo.bench.step import StepTime, StepWork, run_step, step_time
from octavo.bench.step_sampled import sampled_step
from octavo.models.config import decoder_config
from octavo.numerics.recipe import get_recipe

LENGTHS = ("1024", "2048", "4096", "8192", "16384")
PRECISIONS = {"bf16": ("bf16", "bf16"), "block128": ("block128", "bf16"), "block128+kv8": ("block128", "fp8")}
"""Recipe and KV format."""
GOAL = 1.5
"""Speed-up of the last at 8,192 tokens."""


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
    room = f"{time.at_once} sequences at once in {time.cache_tokens:,} tokens of KV"
    note = f"{time.seconds:.1f} s a step, {room}; {time.formats}"
    rows.append(Row(case=case, metric="tok_s", value=time.tok_s, unit="tok/s", note=note))
    if bf16 is not None:
        goal = GOAL if time.work.completion_tokens == 8192 and "kv8" in case else None
        rows.append(Row(case=case, metric="speedup_vs_bf16", value=bf16.seconds / time.seconds, unit="x", goal=goal))
    return rows


def main() -> None:
    """Measure what is named, print, write."""
    sampled = "sampled" in sys.argv[1:]
    lengths = [argument for argument in sys.argv[1:] if argument != "sampled"] or LENGTHS
    if unknown := [length for length in lengths if length not in LENGTHS]:
        raise SystemExit(f"no length {unknown[0]!r}; name some of sampled {' '.join(LENGTHS)}")
    results = Results("step", f"python benchmarks/step.py {' '.join(sys.argv[1:])}".strip(), resume=True)
    hf_config = SHAPES["8b"]
    for length in lengths:
        bf16 = None
        for name, (recipe, kv_cache) in PRECISIONS.items():
            chosen, work = get_recipe(recipe, kv_cache=kv_cache), StepWork(completion_tokens=int(length))
            time = step_time(decoder_config(hf_config), hf_config, chosen, work, sampled_step if sampled else run_step)
            for row in rows_of(f"step/qwen3-8b/{length}/{name}{', sampled' if sampled else ''}", time, bf16):
                results.add(row)
            bf16 = bf16 or time
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        print("benchmarks/step.py measures a GPU, and there is none here: skipped")
