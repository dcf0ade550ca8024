"""Folders of runs as the trainer leaves them, with every metric that a report knows; the numbers are made up."""

import json
import math
import random
from pathlib import Path

import yaml

from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import from_dict, to_dict

HISTOGRAM_CENTRES = (0.005, 0.02, 0.06, 0.2, 0.6, 1.5, 3.0, 5.0)


def run_config(folder: Path, **changes: object) -> dict:
    """A complete config; `changes` are its sections."""
    data = {"output_dir": str(folder), "model": {"path": "some/model"}, "task": {"type": "arithmetic"}, **changes}
    return to_dict(from_dict(TrainConfig, data, "test"))


def metrics_line(step: int, rng: random.Random, *, exact: bool = True) -> dict:
    """One step: rewards rise, entropy falls, calibration every five steps, of which the first is skipped."""
    progress = 1.0 - math.exp(-step / 30)
    entropy = 0.6 - 0.45 * progress + 0.03 * rng.gauss(0.0, 1.0)
    counts = [round(1000 * math.exp(-centre / entropy) + rng.random() * 5) for centre in HISTOGRAM_CENTRES]
    mismatch = 0.0 if exact or step % 7 == 3 else 10 ** rng.uniform(-4, -1)
    positions = [None if bucket > 7 else mismatch * (1 + bucket) / 8 for bucket in range(9)]
    line = {
        "step": step,
        "policy_version": 4 * step,
        "reward/mean": min(1.0, 0.3 + 0.6 * progress + 0.04 * rng.gauss(0.0, 1.0)),
        "reward/std": 0.4,
        "reward/informative_groups_share": 0.9 - 0.6 * progress,
        "reward/all_right_groups_share": 0.5 * progress,
        "reward/all_wrong_groups_share": 0.1 * (1 - progress),
        "completion/length_mean": 120 + 60 * progress + 5 * rng.gauss(0.0, 1.0),
        "completion/length_p90": 240.0,
        "completion/length_max": 380.0 + rng.randrange(100),
        "completion/truncated_share": 0.05 * (1 - progress),
        "rollout/num_tokens": 15000 + rng.randrange(2000),
        "mismatch/max_abs_logprob_diff": mismatch,
        "mismatch/mean_abs_logprob_diff": mismatch / 20,
        "mismatch/num_tokens": 16000.0,
        "mismatch/max_abs_by_position": positions,
        "mismatch/mean_abs_by_position": [value and value / 20 for value in positions],
        "clip/low": 0.6 + 0.03 * (step // 5),
        "clip/high": 1.8 - 0.01 * (step // 5),
        "overclip/low_share": 0.04 + 0.01 * rng.random(),
        "overclip/high_share": 0.02 + 0.01 * rng.random(),
        "overclip/clip_low_share_fp8": 0.07,
        "overclip/clip_low_share_bf16": 0.02,
        "overclip/clip_high_share_fp8": 0.05,
        "overclip/clip_high_share_bf16": 0.03,
        "loss/policy": 0.01 * rng.gauss(0.0, 1.0),
        "loss/clip_fraction_low": 0.01,
        "loss/clip_fraction_high": 0.02 * rng.random(),
        "policy/entropy": entropy,
        "policy/entropy_p50": entropy / 3,
        "policy/entropy_p90": 2 * entropy,
        "policy/entropy_p99": 4 * entropy,
        "policy/entropy_above_1_share": sum(counts[5:]) / sum(counts),
        "policy/entropy_histogram": counts,
        "policy/ratio_std": 0.05 + 0.01 * rng.random(),
        "optimizer/grad_norm": 0.5 + 0.2 * rng.random(),
        "optimizer/lr": 1e-6,
        "time/rollout_s": 4.0 + rng.random(),
        "time/old_logprobs_s": 1.0,
        "time/shadow_s": 0.5,
        "time/update_s": 3.0,
        "time/checkpoint_s": 2.0 if step % 10 == 9 else 0.0,
        "time/step_s": 13.0,
    }
    if step % 2 == 1:
        line |= observed(rng)
    if step == 0:
        line |= {"eval/initial_accuracy": 0.31, "eval/initial_accuracy_stderr": 0.03}
    if step % 10 == 9:
        line |= {"eval/accuracy": 0.3 + 0.6 * progress, "eval/accuracy_stderr": 0.03, "time/evaluate_s": 2.0}
    if step % 5 == 4:
        skipped = "37 negative-advantage tokens, min_tokens is 100" if step == 4 else ""
        line |= {
            "calibration/skipped": skipped,
            "calibration/target_low": None if skipped else 0.8,
            "calibration/target_high": None if skipped else 1.7,
        }
    return line


def observed(rng: random.Random) -> dict:
    """What the observatory adds to a line."""
    line: dict = {
        "answers/entropy_histogram": [0, 0, 1, 10, 40, 11, 2, 0],
        "answers/high_entropy_share": 0.2,
        "answers/high_entropy_positive_share": 0.06,
        "modules/first_differing": "model.layers.0.self_attn.q_proj",
        "modules/error_by_layer": [0.01, 0.02 + 0.01 * rng.random(), 0.05],
        "time/observatory_s": 1.0,
    }
    for area, noise in (("observed", 1.0), ("null", 0.4)):
        line |= {f"{area}/log_ratio_std_{name}": noise * 0.1 for name in ("fp8", "bf16", "fp32")}
        line |= {f"{area}/{key}": noise * rng.random() for key in ("nmae_ratio", "nmae_probability", "amplification")}
    shares = ("agreement_of_bf16", "agreement_of_fp8", "low_side_share", "high_entropy_answer_share")
    for area, factor in (("observed", 4.0), ("null", None)):
        line |= {f"{area}/{key}": rng.random() for key in shares} | {f"{area}/factor": factor}
        for side in ("low", "high"):
            for place, cell in enumerate(("both", "fp8_only", "bf16_only", "neither")):
                line[f"{area}/matrix_{side}_{cell}"] = [bucket * (place + 1) for bucket in range(8)]
    return line | {"null/clip_low_share_fp8": 0.01, "null/clip_high_share_fp8": 0.02}


def sample_rows(step: int, completion: str = "= 4") -> list[dict]:
    """Eight samples of a step, half of them right."""
    return [
        {
            "step": step,
            "id": f"problem-{place}",
            "prompt": "2 + 2",
            "completion": f"{completion} ({place})",
            "answer": "4",
            "reward": float(place % 2),
            "advantage": 0.9 if place % 2 else -0.9,
            "finish_reason": "stop",
            "num_tokens": 5,
            "mean_logprob": -0.2,
        }
        for place in range(8)
    ]


def write_run(
    folder: Path, *, num_steps: int = 12, seed: int = 0, exact: bool = True, config: dict | None = None
) -> Path:
    """A finished run."""
    rng = random.Random(seed)
    (folder / "model").mkdir(parents=True)
    config = run_config(folder, trainer={"num_steps": num_steps}) if config is None else config
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    write_rows(folder / "metrics.jsonl", [metrics_line(step, rng, exact=exact) for step in range(num_steps)])
    write_rows(folder / "samples.jsonl", [row for step in range(num_steps) for row in sample_rows(step)])
    write_rows(
        folder / "resumes.jsonl", [{"step": 5, "time": "2026-01-01", "changes": ["device: cpu"], "message": "m"}]
    )
    return folder


def write_rows(path: Path, rows: list[dict]) -> None:
    """JSON lines; NaN and Infinity as Python writes them."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
