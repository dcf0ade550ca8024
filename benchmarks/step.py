"""A GRPO step of the Qwen3-8B shape in steady state: 64 completions of a forced length, 4 mini-batches, phase by phase.

    python benchmarks/step.py [sampled] [lent] [bf16] [block128] [block128+kv8] [1024] [2048] [4096] [8192] [16384]

All precisions and lengths where none is named; BF16 comes before what is set beside it. A table, and
benchmarks/results/step.json (under $OUT if that is set), which keeps the figures of earlier calls.
How many sequences decode at once depends on what the cache gets of the card. A run calibrates once in several steps,
and a step counts that part of the shadow phase, whose own row has all of its seconds: so do tok_s, speedup_vs_bf16 and
tok_s_rarely_checked, of a step without old_logprobs (`trainer.exactness_interval`).
`sampled` measures samples of each phase in place of a whole step (`octavo.bench.step_sampled`), and `lent` gives the
cache's memory to training between rollouts (`rollout.engine.lend_memory`); cases say so.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import replace

import torch
from train import SHAPES

from octavo.bench.results import Results, Row
from octavo.bench.step import CALIBRATION_INTERVAL, StepTime, calibration_share, step_seconds, step_times, whole_step
from octavo.bench.step_plan import StepWork
from octavo.bench.step_sampled import sampled_step
from octavo.models.config import decoder_config
from octavo.numerics.recipe import get_recipe
from octavo.trainer.memory import GIB

LENGTHS = ("1024", "2048", "4096", "8192", "16384")
PRECISIONS = {"bf16": ("bf16", "bf16"), "block128": ("block128", "bf16"), "block128+kv8": ("block128", "fp8")}
"""Recipe and KV format."""
GOAL = 1.5
"""Speed-up of the last at 8,192 tokens."""
SHARE_GOAL = 0.02
"""The most of a step that calibration takes."""


def rows_of(case: str, time: StepTime, bf16_tok_s: float | None) -> list[Row]:
    """Each phase beside its prediction, the step with calibration's share, and its speed-up where BF16 was measured."""
    rows = [
        Row(
            case=f"{case}/{phase}",
            metric="seconds",
            value=seconds,
            unit="s",
            better="lower",
            note=f"predicted {time.predicted[phase]:.3f} s"
            + f", once in {CALIBRATION_INTERVAL} steps" * (phase == "shadow"),
        )
        for phase, seconds in time.measured.items()
    ]
    room = f"{time.at_once} sequences at once in {time.cache_tokens:,} tokens of KV"
    note = f"{time.seconds:.1f} s a step, predicted {step_seconds(time.predicted):.1f} s, {room}; {time.formats}"
    rows.append(Row(case=case, metric="tok_s", value=time.tok_s, unit="tok/s", note=note))
    if (tok_s := time.tok_s_rarely_checked) is not None:
        note = "without old_logprobs: trainer.exactness_interval above 1, between two checks"
        rows.append(Row(case=case, metric="tok_s_rarely_checked", value=tok_s, unit="tok/s", note=note))
    rows.append(
        Row(
            case=case,
            metric="calibration_share",
            value=time.calibration_share,
            unit="share",
            goal=SHARE_GOAL,
            better="lower",
            note=f"predicted {calibration_share(time.predicted):.2e}",
        )
    )
    if time.peak_bytes:
        off, note = abs(time.planned_bytes / time.peak_bytes - 1.0), f"planned {time.planned_bytes / GIB:.1f} GiB"
        peak = Row(case=case, metric="peak_gib", value=time.peak_bytes / GIB, unit="GiB", better="lower", note=note)
        rows += [peak, replace(peak, metric="plan_off", value=off, unit="share", goal=0.05)]
    if bf16_tok_s is not None:
        goal = GOAL if time.work.completion_tokens == 8192 and "kv8" in case else None
        rows.append(Row(case=case, metric="speedup_vs_bf16", value=time.tok_s / bf16_tok_s, unit="x", goal=goal))
    return rows


def measure(results: Results, name: str, lengths: Sequence[str], sampled: bool, lent: bool) -> None:
    """Steps of a precision."""
    hf_config, (recipe, kv_cache) = SHAPES["8b"], PRECISIONS[name]
    works = [StepWork(completion_tokens=int(length), lends_memory=lent) for length in lengths]
    chosen, run = get_recipe(recipe, kv_cache=kv_cache), sampled_step if sampled else whole_step
    for time in step_times(decoder_config(hf_config), hf_config, chosen, works, run):
        case, kind = f"step/qwen3-8b/{time.work.completion_tokens}", ", lent" * lent + ", sampled" * sampled
        speeds = {row.case: row.value for row in results.rows if row.metric == "tok_s"}
        for row in rows_of(f"{case}/{name}{kind}", time, None if name == "bf16" else speeds.get(f"{case}/bf16{kind}")):
            results.add(row)


def main() -> None:
    """Measure what is named, print, write."""
    arguments, known = sys.argv[1:], ("sampled", "lent", *PRECISIONS, *LENGTHS)
    if unknown := [argument for argument in arguments if argument not in known]:
        raise SystemExit(f"no {unknown[0]!r}; name some of {' '.join(known)}")
    results = Results("step", f"python benchmarks/step.py {' '.join(arguments)}".strip(), resume=True)
    lengths, (sampled, lent) = [size for size in LENGTHS if size in arguments], (k in arguments for k in known[:2])
    for name in [name for name in PRECISIONS if name in arguments] or PRECISIONS:
        measure(results, name, lengths or LENGTHS, sampled, lent)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        print("benchmarks/step.py measures a GPU, and there is none here: skipped")
