"""Early warning and rollback on runs that are damaged from outside: seen in time, recovered, no alarm without damage.

    python benchmarks/rescue.py        writes benchmarks/results/rescue.json; about half an hour on one CPU thread

Every run is examples/demo.yaml with half the prompts, 50 steps and watch.action=rollback. From step 25 on each update
of a damaged run is followed by more damage, until the run is rolled back:

    weights   noise on every matrix, 0.1, 0.2, 0.3 ... of its standard deviation
    ratios    noise on the old log-probabilities, 0.2, 0.4, 0.6 ... nats, so that updates follow it

`unwatched` is the same damage with watch.action=warn, to the end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from octavo.bench.results import Results, Row
from octavo.rl.batch import MiniBatch
from octavo.trainer import loop, train
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import load_config
from octavo.trainer.metrics import Display
from octavo.trainer.resume import Session
from octavo.trainer.run import Run

REPO = Path(__file__).resolve().parents[1]
NUM_STEPS, DAMAGED_FROM, LAST = 50, 25, 10
SETTINGS = [
    f"trainer.num_steps={NUM_STEPS}",
    "rollout.prompts_per_step=8",
    "calibration.min_tokens=50",
    "evaluation.interval=0",
    "checkpoint={interval: 5, keep_last: 100}",
    "watch={action: rollback, margin_steps: 2}",
]


@contextmanager
def damage(kind: str) -> Iterator[None]:
    """Inside, every run without a rollback is damaged after each of its steps from DAMAGED_FROM on."""
    one_step, check_mismatch = train.one_step, loop.check_mismatch
    amount = [0]

    def damaged_step(session: Session) -> dict:
        progress = session.progress
        amount[0] = max(0, progress.next_step + 1 - DAMAGED_FROM) if progress.rollbacks == 0 else 0
        pending = one_step(session)
        if kind == "weights" and amount[0]:
            damage_weights(session, 0.1 * amount[0])
        return pending

    def damaged_ratios(run: Run, mini_batches: list[MiniBatch]) -> dict:
        metrics = check_mismatch(run, mini_batches)  # which would see the damage, and stop
        if kind == "ratios" and amount[0]:
            for batch in mini_batches:
                for part in batch.microbatches:
                    noise = 0.2 * amount[0] * torch.randn_like(part.old_logprobs)
                    part.old_logprobs.add_(noise * part.loss_mask)
        return metrics

    train.one_step, loop.check_mismatch = damaged_step, damaged_ratios
    try:
        yield
    finally:
        train.one_step, loop.check_mismatch = one_step, check_mismatch


def damage_weights(session: Session, size: float) -> None:
    """Noise on every matrix, in standard deviations of its own."""
    with torch.no_grad():
        for parameter in session.run.policy.parameters():
            if parameter.ndim > 1:
                parameter += size * parameter.std() * torch.randn_like(parameter)
    for decoder in session.run.decoders:
        decoder.requantize_()


def run(config: TrainConfig, resume: bool = False) -> list[dict]:
    """Train; the lines of the run."""
    train.train(config, Display(Console(quiet=True)), resume=resume, allow_changes=resume)
    return read(Path(config.output_dir) / "metrics.jsonl")


def read(path: Path) -> list[dict]:
    """Lines of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def from_healthy(healthy: Path, folder: Path) -> None:
    """A copy of a healthy run as it was before the damage; a resume cuts its metrics."""
    shutil.copytree(healthy, folder)
    shutil.rmtree(folder / "model")
    for path in (folder / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > DAMAGED_FROM:
            shutil.rmtree(path)


def reward(lines: list[dict], first: int, last: int) -> float:
    """Mean reward of steps first to last - 1."""
    return statistics.fmean(line["reward/mean"] for line in lines[first:last])


def main() -> None:
    """Healthy runs of every seed, then each kind of damage with rollback, and once without."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5, help="healthy seeds 0 .. N - 1")
    parser.add_argument("--damaged", type=int, default=3, help="seeds of them that are damaged too")
    parser.add_argument("--folder", type=Path, help="where runs are left; default: a temporary folder")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results("rescue", f"python benchmarks/rescue.py --seeds {args.seeds} --damaged {args.damaged}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        configs = [
            load_config(
                TrainConfig, REPO / "examples/demo.yaml", [*SETTINGS, f"seed={seed}", f"output_dir={folder}/{seed}"]
            )
            for seed in range(args.seeds)
        ]
        finals = []
        for seed, config in enumerate(configs):
            lines = run(config)
            finals.append(reward(lines, NUM_STEPS - LAST, NUM_STEPS))
            add(
                results,
                "healthy",
                seed,
                "alarms",
                len(list(Path(config.output_dir).glob("rollbacks/*"))),
                "alarms",
                0,
                "lower",
            )
            add(
                results,
                "healthy",
                seed,
                "largest_sum",
                max(line["watch/sum"] for line in lines),
                "threshold",
                1,
                "lower",
            )
            add(results, "healthy", seed, "final_reward", finals[-1], "reward")
        lowest = min(finals) - 2.0 * statistics.stdev(finals)
        for kind in ("weights", "ratios"):
            for seed, config in enumerate(configs[: args.damaged]):
                damaged(results, kind, seed, config, folder, lowest)
            unwatched(results, kind, configs[0], folder)


def damaged(results: Results, kind: str, seed: int, config: TrainConfig, folder: Path, lowest: float) -> None:
    """One damaged run with rollback: when it was seen, at what reward, and where it ended."""
    config = replace(config, output_dir=str(folder / f"{kind}{seed}"))
    from_healthy(folder / str(seed), Path(config.output_dir))
    with damage(kind):
        lines = run(config, resume=True)
    decision, *undone = read(Path(config.output_dir) / "rollbacks/001.jsonl")
    before = reward(read(folder / str(seed) / "metrics.jsonl"), DAMAGED_FROM - LAST, DAMAGED_FROM)
    least = min(line["reward/mean"] for line in undone)
    add(
        results,
        kind,
        seed,
        "steps_to_alarm",
        decision["from_step"] - DAMAGED_FROM + 1,
        "steps",
        note=decision["reason"],
    )
    add(results, kind, seed, "lowest_reward_until_alarm", least / before, "of before", 0.5)
    note = f"from step {decision['from_step']} to {decision['to_step']}"
    rollbacks = len(list(Path(config.output_dir).glob("rollbacks/*")))
    add(results, kind, seed, "rollbacks", rollbacks, "rollbacks", 1, "lower", note)
    note = "goal: lowest healthy seed less two standard deviations"
    add(results, kind, seed, "final_reward", reward(lines, NUM_STEPS - LAST, NUM_STEPS), "reward", lowest, note=note)


def unwatched(results: Results, kind: str, config: TrainConfig, folder: Path) -> None:
    """The same damage without a rescue."""
    watch = replace(config.watch, action="warn")  # type: ignore[type-var]
    config = replace(config, output_dir=str(folder / f"{kind}-unwatched"), watch=watch)
    from_healthy(folder / "0", Path(config.output_dir))
    with damage(kind):
        lines = run(config, resume=True)
    before = reward(lines, DAMAGED_FROM - LAST, DAMAGED_FROM)
    halved = [line["step"] for line in lines[DAMAGED_FROM:] if line["reward/mean"] <= before / 2]
    alarms = [line["step"] for line in lines if "watch/alarm" in line]
    note = f"alarms at steps {alarms}, reward first halved at {halved[0] if halved else 'no step'}"
    add(
        results,
        f"{kind}, unwatched",
        0,
        "final_reward",
        reward(lines, NUM_STEPS - LAST, NUM_STEPS),
        "reward",
        note=note,
    )


def add(
    results: Results,
    case: str,
    seed: int,
    metric: str,
    value: float,
    unit: str,
    goal: float | None = None,
    better: str = "higher",
    note: str = "",
) -> None:
    """One figure of one run."""
    row = Row(case=f"demo/tiny-qwen3/{case}, seed {seed}", metric=metric, value=value, unit=unit, goal=goal, note=note)
    results.add(replace(row, better=better))  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
