"""What each way to see BF16 costs a step: CPU seconds, bytes, tokens, on the tiny model.

    python benchmarks/calibration_cost.py        writes benchmarks/results/calibration_cost.json

Runs of a few steps on one CPU thread, every step calibrated; seconds are processor time of the step's phases, so that
other work on the machine does not count. `share` is that of a step without any shadow.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from octavo.bench.results import Results, Row
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import load_config
from octavo.trainer.metrics import Display
from octavo.trainer.train import train

REPO = Path(__file__).resolve().parents[1]
EVERY = [
    "calibration.interval=1",
    "calibration.pooled_steps=1",
    "calibration.min_tokens=1",
    "calibration.min_clipped=0",
]
OFF = ["calibration=null"]
CASES: dict[str, list[str]] = {
    "no shadow": OFF,
    "masters": EVERY,
    "masters, a quarter of the completions": [*EVERY, "calibration.shadow_share=0.25"],
    "masters and a null line": [*EVERY, "calibration.max_shadow_noise=1000"],
    "ema": [*EVERY, "calibration.reference=ema"],
    "snapshot": [*EVERY, "calibration.reference=snapshot"],
    "carried, one pass in four": [*EVERY, "calibration.reference=carried"],
    "event, none called": [
        "calibration.trigger=event",
        "calibration.trigger.min_interval=1000",
        "calibration.interval=1000",
        *EVERY[1:],
    ],
    "clip_mask_from: bf16_shadow": [*OFF, "algorithm.clip_mask_from=bf16_shadow"],
    "ratio_from: bf16_shadow": [*OFF, "algorithm.ratio_from=bf16_shadow"],
    "ratio_from: fp32_shadow": [*OFF, "algorithm.ratio_from=fp32_shadow"],
    "w8a16, no shadow": [*OFF, "precision.recipe=w8a16"],
}
STEPS = 6
"""Of a run; the first is left out."""


def main() -> None:
    """Every case, in turn."""
    torch.set_num_threads(1)
    time.perf_counter = time.process_time  # what the clock of a step reads
    results = Results("calibration_cost", "python benchmarks/calibration_cost.py")
    baseline = 0.0
    for case, overrides in CASES.items():
        lines = run(overrides)
        step = statistics.fmean(line["time/step_s"] for line in lines)
        shadow = statistics.fmean(line.get("time/shadow_s", 0.0) for line in lines)
        baseline = baseline or step
        figures = {
            "cpu_s_step": (step, "s"),
            "cpu_s_shadow": (shadow, "s"),
            "share": (step / baseline, "ratio"),
            "reference_bytes": (max(line.get("calibration/reference_bytes", 0.0) for line in lines), "bytes"),
            "shadow_tokens": (statistics.fmean(line.get("calibration/shadow_tokens", 0.0) for line in lines), "tokens"),
        }
        for metric, (value, unit) in figures.items():
            name = f"calibration_cost/tiny-qwen3/{case}"
            results.add(
                Row(case=name, metric=metric, value=value, unit=unit, better="lower", note=f"{STEPS - 1} steps")
            )


def run(overrides: list[str]) -> list[dict[str, Any]]:
    """The metrics of a run's steps but the first."""
    with tempfile.TemporaryDirectory() as folder:
        fixed = [f"output_dir={folder}/run", f"model.path={REPO}/examples/tiny/model", f"trainer.num_steps={STEPS}"]
        fixed += ["trainer.shadow_interval=0", "rollout.prompts_per_step=8", "calibration.type=grid"]
        path = train(load_config(TrainConfig, REPO / "examples/overclip_tiny.yaml", [*fixed, *overrides]), Display())
        return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()][1:]


if __name__ == "__main__":
    main()
