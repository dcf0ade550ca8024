"""PPO with a critic beside GRPO on the demo: what each gains in the same steps, and what the critic knows.

    python benchmarks/ppo.py        writes benchmarks/results/ppo.json; about a quarter of an hour on one CPU thread

Both are examples/demo.yaml with half the prompts and without calibration, 40 steps; PPO with a critic in BF16 that
starts from the policy's model and learns alone for two steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from rich.console import Console

from octavo.bench.results import Results, Row
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import load_config
from octavo.trainer.metrics import Display
from octavo.trainer.train import train

REPO = Path(__file__).resolve().parents[1]
SETTINGS = [
    "trainer.num_steps=40",
    "trainer.shadow_interval=0",
    "rollout.prompts_per_step=8",
    "calibration=null",
    "evaluation={interval: 40, num_problems: 256}",
    "checkpoint={interval: 0, keep_best: false}",
]
CASES: dict[str, list[str]] = {
    "grpo": [],
    "ppo": [
        "algorithm.advantage={type: gae, gae_lambda: 0.95}",
        "critic={warmup_steps: 2, num_epochs: 2, optimizer: {lr: 3e-4}}",
    ],
}


def main() -> None:
    """Every case with every seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 .. N - 1")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a thread each; changes times alone")
    args = parser.parse_args()
    results = Results("ppo", f"python benchmarks/ppo.py --seeds {args.seeds} --jobs {args.jobs}")
    runs = [(case, seed) for seed in range(args.seeds) for case in CASES]
    with ProcessPoolExecutor(args.jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        for (case, seed), found in zip(runs, pool.map(figures_of, *zip(*runs, strict=True)), strict=True):
            for metric, value, unit in found:
                results.add(Row(case=f"demo/tiny-qwen3/{case}, seed {seed}", metric=metric, value=value, unit=unit))


def figures_of(case: str, seed: int) -> list[tuple[str, float, str]]:
    """Train once: (metric, value, unit)."""
    with tempfile.TemporaryDirectory() as scratch:
        overrides = [*SETTINGS, *CASES[case], f"seed={seed}", f"output_dir={scratch}/run"]
        config = load_config(TrainConfig, REPO / "examples/demo.yaml", overrides)
        folder = train(config, Display(Console(quiet=True)))
        return figures([json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()])


def figures(lines: list[dict]) -> list[tuple[str, float, str]]:
    """(metric, value, unit) of one run."""

    def mean(key: str, last: int) -> float:
        return statistics.fmean(line[key] for line in lines[-last:])

    found = [
        ("accuracy_start", lines[0]["eval/initial_accuracy"], "share"),
        ("accuracy_end", lines[-1]["eval/accuracy"], "share"),
        ("reward_last_10", mean("reward/mean", 10), "reward"),
        ("max_abs_logprob_diff", max(line["mismatch/max_abs_logprob_diff"] for line in lines), "nats"),
        ("step_s", statistics.median(line["time/step_s"] for line in lines), "s"),
    ]
    if "critic/explained_variance" in lines[-1]:
        found.append(("explained_variance_last_10", mean("critic/explained_variance", 10), "share"))
        found.append(("critic_s", statistics.median(line["time/critic_s"] for line in lines), "s"))
    return found


if __name__ == "__main__":
    main()
