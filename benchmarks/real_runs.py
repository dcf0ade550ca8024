"""What finished runs show: accuracy against the start and against a constant answer, mismatch, clipping, cost, speed.

    python benchmarks/real_runs.py smollm2_reasoning runs/smollm2_*

prints a table and writes benchmarks/results/smollm2_reasoning.json and, beside it, curves/smollm2_reasoning/RUN.jsonl:
of every step the figures that curves are drawn from, and the curves themselves (curves/smollm2_reasoning.svg) where
matplotlib is installed. Runs whose names differ by a last _0, _1, ... are seeds of one case.

    python benchmarks/real_runs.py smollm2_reasoning    # without runs: draws the curves that lie there anew
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.bench.results import Results, Row
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import load_config
from octavo.trainer.metrics import Display
from octavo.trainer.problems import load_problems
from octavo.trainer.run import load_tokenizer

CURVES = (
    *("step", "reward/mean", "eval/initial_accuracy", "eval/accuracy", "policy/entropy", "policy/ratio_std"),
    *("completion/length_mean", "reward/informative_groups_share"),
    *("mismatch/max_abs_logprob_diff", "mismatch/std_logprob_diff", "mismatch/outside_share", "loss/clip_fraction"),
    *(
        "clip/low",
        "clip/high",
        "overclip/low_share",
        "overclip/high_share",
        "noise/amplification",
        "calibration/skipped",
    ),
    *("optimizer/grad_norm", "rollout/num_tokens", "memory/peak_gib", "time/step_s", "time/rollout_s"),
    *("time/old_logprobs_s", "time/update_s", "time/shadow_s", "time/checkpoint_s"),
)
MEANS = {
    "mismatch/std_logprob_diff": "nats",
    "mismatch/outside_share": "share",
    "loss/clip_fraction": "share",
    "overclip/low_share": "share",
    "overclip/high_share": "share",
    "overclip/clip_low_share_fp8": "share",
    "overclip/clip_low_share_bf16": "share",
    "overclip/log_ratio_std_diff": "nats",
    "noise/amplification": "x",
}
"""Metrics whose mean over the steps that have them is reported."""

PANELS = {"reward/mean": 5, "mismatch/std_logprob_diff": 1, "overclip/low_share": 1, "clip/low": 1}
"""What is drawn, and over how many values each point is a mean."""

EVALUATIONS = ("eval/initial_accuracy", "eval/accuracy")
COLD_STEPS = 5
"""Not timed: kernels are compiled."""


def read(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def refusal(folder: Path) -> str:
    """Why a folder shows nothing; empty where it does."""
    if not (folder / "metrics.jsonl").is_file():
        return f"{folder} has no metrics.jsonl; name the folder of a finished run"
    lines = read(folder)
    if len(lines) <= COLD_STEPS:
        return f"{folder} has {len(lines)} steps, of which the first {COLD_STEPS} are not timed; name a longer run"
    if EVALUATIONS[0] not in lines[0] or not any(EVALUATIONS[1] in line for line in lines):
        return f"{folder} was not evaluated before and after; train with evaluation.interval"
    return ""


def rounded(value: Any) -> Any:
    """Five digits of a number."""
    return float(f"{value:.5g}") if isinstance(value, float) else value


def constant_accuracy(folder: Path) -> float:
    """The share of the evaluated problems that the most frequent answer would solve."""
    config = load_config(TrainConfig, folder / "config.yaml", [])
    benchmarks = load_problems(config, load_tokenizer(config.model.path), Display())[2]
    answers = Counter(str(each.problem.answer) for benchmark in benchmarks for each in benchmark.problems)
    return max(answers.values()) / answers.total()


def figures(lines: list[dict[str, Any]]) -> dict[str, tuple[float, str]]:
    """Metric -> value and unit, of one run."""
    first, last = lines[0], [line for line in lines if "eval/accuracy" in line][-1]
    start, end, count = first["eval/initial_accuracy"], last["eval/accuracy"], last["eval/num_problems"]
    error = math.sqrt((start * (1 - start) + end * (1 - end)) / count)
    warm = lines[COLD_STEPS:]
    seconds = sum(line["time/step_s"] for line in warm)
    shadow = sum(line.get("time/shadow_s", 0.0) for line in warm)
    found = {
        "accuracy_start": (start, "share"),
        "accuracy_end": (end, "share"),
        **({"gain_in_standard_errors": ((end - start) / error, "x")} if error else {}),
        "reward_first_10": (statistics.fmean(line["reward/mean"] for line in lines[:10]), "share"),
        "reward_last_10": (statistics.fmean(line["reward/mean"] for line in lines[-10:]), "share"),
        "mismatch_max": (max(line["mismatch/max_abs_logprob_diff"] for line in lines), "nats"),
        "clip_low_end": (last["clip/low"], "ratio"),
        "clip_high_end": (last["clip/high"], "ratio"),
        "step_s": (statistics.median(line["time/step_s"] for line in warm), "s"),
        "rollout_tok_s": (
            sum(line["rollout/num_tokens"] for line in warm) / sum(line["time/rollout_s"] for line in warm),
            "tok/s",
        ),
        "shadow_share_of_time": (shadow / seconds, "share"),
        "calibrations": (float(sum(line.get("calibration/skipped") == "" for line in lines)), ""),
    }
    for key, unit in MEANS.items():
        values = [line[key] for line in lines if isinstance(line.get(key), int | float)]
        if values:
            found[key] = (statistics.fmean(values), unit)
    return found


def draw(name: str, folder: Path) -> None:
    """One picture of the curves in a folder: reward and accuracy, mismatch, over-clipping, bounds."""
    pyplot = importlib.import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), sharex=True, layout="constrained")
    for index, path in enumerate(sorted(folder.glob("*.jsonl"))):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for axis, (key, width) in zip(axes.flat, PANELS.items(), strict=True):
            points = [(line["step"], line[key]) for line in lines if key in line]
            smooth = [
                (step, statistics.fmean(y for _, y in points[max(0, i - width + 1) : i + 1]))
                for i, (step, _) in enumerate(points)
            ]
            axis.plot(*zip(*smooth, strict=True), color=f"C{index}", label=path.stem)
            axis.set_title(f"{key}, mean of {width} values" if width > 1 else key)
        accuracy = [(line["step"], line[key]) for line in lines for key in EVALUATIONS if key in line]
        axes[0, 0].plot(*zip(*accuracy, strict=True), "o", color=f"C{index}")
    axes[0, 0].set_title("reward/mean; dots: eval/accuracy")
    axes[0, 1].legend(fontsize="small")
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.suptitle(name)
    figure.savefig(folder.with_suffix(".svg"), metadata={"Date": None})


def main() -> None:
    """Read, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the result file")
    parser.add_argument("runs", nargs="*", type=Path, help="folders of runs")
    args = parser.parse_args()
    curves = Path(os.environ.get("OUT", "benchmarks/results")) / "curves" / args.name
    for why in filter(None, map(refusal, args.runs)):
        parser.error(why)
    if not args.runs and not any(curves.glob("*.jsonl")):
        parser.error(f"no curves lie in {curves}; name folders of runs")
    if args.runs:
        report(args.name, args.runs, curves)
    if importlib.util.find_spec("matplotlib") is not None:
        draw(args.name, curves)


def report(name: str, runs: Sequence[Path], curves: Path) -> None:
    """The figures of the runs, and what their curves are drawn from."""
    results = Results(name, f"python benchmarks/real_runs.py {name} {' '.join(map(str, runs))}")
    curves.mkdir(parents=True, exist_ok=True)
    cases: dict[str, list[dict[str, tuple[float, str]]]] = {}
    for folder in runs:
        lines = read(folder)
        kept = [json.dumps({key: rounded(line[key]) for key in CURVES if key in line}) for line in lines]
        (curves / f"{folder.name}.jsonl").write_text("\n".join(kept) + "\n")
        cases.setdefault(re.sub(r"_\d+$", "", folder.name), []).append(figures(lines))
    baseline = constant_accuracy(runs[0])
    results.add(Row(case=name, metric="constant_answer_accuracy", value=baseline, unit="share"))
    for case, seeds in cases.items():
        for metric, (_, unit) in seeds[0].items():
            values = [found[metric][0] for found in seeds if metric in found]
            note = f"{len(values)} seeds: " + ", ".join(f"{value:.4g}" for value in values) if len(values) > 1 else ""
            value = statistics.fmean(values)
            results.add(Row(case=f"{name}/{case}", metric=metric, value=value, unit=unit, note=note))


if __name__ == "__main__":
    main()
