"""What the observatory sees on the demo, and what it costs.

    python benchmarks/observatory.py --seeds 2        writes benchmarks/results/observatory.json

Each run is `octavo train examples/demo.yaml` with a seed, observed every five steps, in FP32 too; on one CPU thread.
"""

import argparse
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from demo_seeds import run_demo

from octavo.bench.results import Results, Row

CASES = {"block128+kv8": [], "w8a16+kv8": ["precision.recipe=w8a16"]}
OBSERVED = [
    "observatory={interval: 5, fp32: true, modules: true}",
    "evaluation.interval=0",
    "trainer.shadow_interval=5",
]
METRICS = {
    **{f"{area}/log_ratio_std_{name}": "nats" for area in ("observed", "null") for name in ("fp8", "bf16", "fp32")},
    **{
        f"{area}/{name}": ""
        for area in ("observed", "null")
        for name in ("nmae_probability", "nmae_ratio", "amplification")
    },
    "observed/num_clipped_fp8": "tokens",
    "observed/num_clipped_bf16": "tokens",
    "observed/num_clipped_both": "tokens",
    "null/num_clipped_fp8": "tokens",
    "observed/low_share": "share",
    "observed/high_share": "share",
    "observed/factor": "",
    "observed/agreement_of_bf16": "share",
    "observed/agreement_of_fp8": "share",
    "observed/low_side_share": "share",
    "observed/high_entropy_answer_share": "share",
    "answers/high_entropy_share": "share",
    "answers/high_entropy_positive_share": "share",
    "reward/all_right_groups_share": "share",
    "reward/all_wrong_groups_share": "share",
}


def observed(lines: list[dict], key: str) -> list[float]:
    """A metric on the observed steps that have it."""
    return [line[key] for line in lines if "time/observatory_s" in line and line.get(key) is not None]


def main() -> None:
    """Run every case with every seed; means over observations and seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="seeds 0 .. N - 1")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    options = parser.parse_args()
    results = Results("observatory", f"python benchmarks/observatory.py --seeds {options.seeds} --jobs {options.jobs}")
    jobs = [(name, seed) for name in CASES for seed in range(options.seeds)]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        started = {
            (name, seed): pool.submit(run_demo, [*OBSERVED, *CASES[name]], seed, Path(scratch) / f"{name}-{seed}")
            for name, seed in jobs
        }
        lines_of = {job: run.result() for job, run in started.items()}
    for name in CASES:
        runs = [lines_of[name, seed] for seed in range(options.seeds)]
        case = f"demo/tiny-qwen3/{name}"
        for key, unit in METRICS.items():
            values = [statistics.fmean(found) for lines in runs if (found := observed(lines, key))]
            if values:
                note = "mean of each seed: " + ", ".join(f"{value:.4g}" for value in values)
                results.add(Row(case=case, metric=key, value=statistics.fmean(values), unit=unit, note=note))
        last = [observed_lists(lines)[-1] for lines in runs]
        for layer, errors in enumerate(zip(*last, strict=True)):
            metric = f"modules/error_by_layer[{layer}]"
            results.add(Row(case=case, metric=metric, value=statistics.fmean(errors), unit="", better="lower"))
        cost = statistics.median(
            line["time/observatory_s"] / (line["time/step_s"] - line["time/observatory_s"])
            for lines in runs
            for line in lines
            if "time/observatory_s" in line
        )
        note = "of the rest of the observed step; FP32, modules and null line on"
        results.add(Row(case=case, metric="time/observatory", value=cost, unit="share", better="lower", note=note))


def observed_lists(lines: list[dict]) -> list[list[float]]:
    """modules/error_by_layer of each observed step."""
    return [line["modules/error_by_layer"] for line in lines if "modules/error_by_layer" in line]


if __name__ == "__main__":
    main()
