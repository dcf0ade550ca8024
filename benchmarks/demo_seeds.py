"""The demo over several seeds and precision flows: what it gains, and with what spread.

    python benchmarks/demo_seeds.py --seeds 3 --jobs 2        writes benchmarks/results/demo_seeds.json

Each run is `octavo train examples/demo.yaml` with a seed and the changes of its variant, on one CPU thread.
"""

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

REPO = Path(__file__).resolve().parents[1]
CASES = {
    "block128+kv8": [],
    "block128+kv8, fixed [0.8, 1.28]": ["calibration=null"],
    "block128+kv8, fixed [0.5, 2.0]": ["calibration=null", "algorithm.clip={clip_low: 0.5, clip_high: 1.0}"],
    "w8a16+kv8": ["precision.recipe=w8a16"],
    "bf16": ["precision={recipe: bf16, kv_cache: bf16}", "calibration=null"],
}


def run_demo(changes: list[str], seed: int, folder: Path) -> list[dict]:
    """The metrics of one run, a dict a step."""
    command = [
        sys.executable,
        "-m",
        "octavo.cli",
        "train",
        "examples/demo.yaml",
        f"seed={seed}",
        f"output_dir={folder}",
    ]
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command + changes, cwd=REPO, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command + changes)} failed:\n{done.stderr}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def figures(lines: list[dict]) -> dict[str, tuple[float, str]]:
    """Metric -> (value, unit) of one run."""

    def mean(key: str) -> float:
        return statistics.fmean(line[key] for line in lines if key in line)

    return {
        "accuracy_start": (lines[0]["eval/initial_accuracy"], "share"),
        "accuracy_end": (lines[-1]["eval/accuracy"], "share"),
        "accuracy_gain": (lines[-1]["eval/accuracy"] - lines[0]["eval/initial_accuracy"], "share"),
        "max_abs_logprob_diff": (max(line["mismatch/max_abs_logprob_diff"] for line in lines), "nats"),
        "clip_fraction": (mean("loss/clip_fraction"), "share"),
        "overclip_low_share": (mean("overclip/low_share"), "share"),
        "overclip_high_share": (mean("overclip/high_share"), "share"),
        "log_ratio_std_diff": (mean("overclip/log_ratio_std_diff"), "nats"),
        "clip_low_end": (lines[-1]["clip/low"], "ratio"),
        "clip_high_end": (lines[-1]["clip/high"], "ratio"),
        "entropy_end": (lines[-1]["policy/entropy"], "nats"),
        "step_s": (statistics.median(line["time/step_s"] for line in lines), "s"),
    }


GOALS = {"accuracy_gain": 0.2, "max_abs_logprob_diff": 0.0}
HIGHER_IS_BETTER = ("accuracy_end", "accuracy_gain")


def main() -> None:
    """Run every case with every seed and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 .. N - 1")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--output", type=Path, default=REPO / "benchmarks/results/demo_seeds.json")
    args = parser.parse_args()

    jobs = [(case, seed) for case in CASES for seed in range(args.seeds)]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(args.jobs) as pool:
        runs = [pool.submit(run_demo, CASES[c], s, Path(scratch) / f"{i}") for i, (c, s) in enumerate(jobs)]
        results = {job: figures(run.result()) for job, run in zip(jobs, runs, strict=True)}

    rows = []
    for case in CASES:
        per_seed = [results[case, seed] for seed in range(args.seeds)]
        for metric, (_, unit) in per_seed[0].items():
            values = [values[metric][0] for values in per_seed]
            rows.append(
                {
                    "case": f"demo/tiny-qwen3/{case}",
                    "metric": metric,
                    "value": statistics.fmean(values),
                    "unit": unit,
                    "goal": GOALS.get(metric),
                    "better": "higher" if metric in HIGHER_IS_BETTER else "lower",
                    "note": f"seeds 0..{args.seeds - 1}: " + ", ".join(f"{value:.4g}" for value in values),
                }
            )
            print(f"{case:34} {metric:22} {statistics.fmean(values):8.4f}   {rows[-1]['note']}")
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPO, capture_output=True, text=True, check=False)
    result = {
        "device": f"CPU, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "triton": None,
        "commit": os.environ.get("OCTAVO_COMMIT") or git.stdout.strip() or "unknown",
        "command": f"python benchmarks/demo_seeds.py --seeds {args.seeds} --jobs {args.jobs}",
        "date": datetime.date.today().isoformat(),
        "rows": rows,
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
