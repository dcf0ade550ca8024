"""Early warning and rollback on runs that are damaged from outside: seen in time, recovered, no alarm without damage.

    python benchmarks/rescue.py        writes benchmarks/results/rescue.json; half an hour on one CPU thread

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
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

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
                    assert part.old_logprobs is not None
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
                parameter.add_(size * parameter.std() * torch.randn_like(parameter))
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
    parser.add_argument("--damaged", type=int, default=2, help="seeds of them that are damaged too")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, a thread each; changes no figure")
    parser.add_argument("--folder", type=Path, help="where runs are left; default: a temporary folder")
    args = parser.parse_args()
    results = Results("rescue", f"python benchmarks/rescue.py --seeds {args.seeds} --damaged {args.damaged}")
    with tempfile.TemporaryDirectory() as scratch, spawned(args.jobs) as pool:
        folder = (args.folder or Path(scratch)).absolute()
        healthy = [pool.submit(healthy_run, seed, folder) for seed in range(args.seeds)]
        finals = []
        for rows, final in (future.result() for future in healthy):
            finals.append(final)
            extend(results, rows)
        lowest = min(finals) - 2.0 * statistics.stdev(finals)
        for kind in ("weights", "ratios"):
            futures = [pool.submit(damaged_run, kind, seed, folder, lowest) for seed in range(args.damaged)]
            for future in [*futures, pool.submit(unwatched_run, kind, folder)]:
                extend(results, future.result())


def spawned(jobs: int) -> ProcessPoolExecutor:
    """Processes of one thread each."""
    return ProcessPoolExecutor(jobs, get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,))


def extend(results: Results, rows: list[Row]) -> None:
    """Add the rows of a run."""
    for row in rows:
        results.add(row)


def run_config(seed: int, output_dir: Path, **watch: str) -> TrainConfig:
    """The configuration of every run here."""
    changes = [f"seed={seed}", f"output_dir={output_dir}", *(f"watch.{key}={value}" for key, value in watch.items())]
    return load_config(TrainConfig, REPO / "examples/demo.yaml", SETTINGS + changes)


def healthy_run(seed: int, folder: Path) -> tuple[list[Row], float]:
    """A run without damage: its rows, and its final reward."""
    lines = run(run_config(seed, folder / str(seed)))
    final = reward(lines, NUM_STEPS - LAST, NUM_STEPS)
    alarms, largest = num_rollbacks(folder / str(seed)), max(line["watch/sum"] for line in lines)
    rows = [
        figure("healthy", seed, "alarms", alarms, "alarms", 0, "lower"),
        figure("healthy", seed, "largest_sum", largest, "threshold", 1, "lower"),
        figure("healthy", seed, "final_reward", final, "reward"),
    ]
    return rows, final


def damaged_run(kind: str, seed: int, folder: Path, lowest: float) -> list[Row]:
    """One damaged run with rollback: when it was seen, at what reward, and where it ended."""
    path = folder / f"{kind}{seed}"
    from_healthy(folder / str(seed), path)
    with damage(kind):
        lines = run(run_config(seed, path), resume=True)
    decision, *undone = read(path / "rollbacks/001.jsonl")
    before = reward(read(folder / str(seed) / "metrics.jsonl"), DAMAGED_FROM - LAST, DAMAGED_FROM)
    to_alarm, least = decision["from_step"] - DAMAGED_FROM + 1, min(line["reward/mean"] for line in undone)
    final, goal = reward(lines, NUM_STEPS - LAST, NUM_STEPS), "goal: lowest healthy seed less two standard deviations"
    went = f"from step {decision['from_step']} to {decision['to_step']}"
    return [
        figure(kind, seed, "steps_to_alarm", to_alarm, "steps", note=decision["reason"]),
        figure(kind, seed, "lowest_reward_until_alarm", least / before, "of before", 0.5),
        figure(kind, seed, "rollbacks", num_rollbacks(path), "rollbacks", 1, "lower", went),
        figure(kind, seed, "final_reward", final, "reward", lowest, note=goal),
    ]


def unwatched_run(kind: str, folder: Path) -> list[Row]:
    """The same damage to seed 0 without a rescue."""
    path = folder / f"{kind}-unwatched"
    from_healthy(folder / "0", path)
    with damage(kind):
        lines = run(run_config(0, path, action="warn"), resume=True)
    before = reward(lines, DAMAGED_FROM - LAST, DAMAGED_FROM)
    halved = [line["step"] for line in lines[DAMAGED_FROM:] if line["reward/mean"] <= before / 2]
    alarms = [line["step"] for line in lines if "watch/alarm" in line]
    note = f"alarms at steps {alarms}, reward first halved at {halved[0] if halved else 'no step'}"
    final = reward(lines, NUM_STEPS - LAST, NUM_STEPS)
    return [figure(f"{kind}, unwatched", 0, "final_reward", final, "reward", note=note)]


def num_rollbacks(path: Path) -> int:
    """Of a run's folder."""
    return len(list(path.glob("rollbacks/*.jsonl")))


def figure(
    case: str,
    seed: int,
    metric: str,
    value: float,
    unit: str,
    goal: float | None = None,
    better: Literal["higher", "lower"] = "higher",
    note: str = "",
) -> Row:
    """One figure of one run."""
    name = f"demo/tiny-qwen3/{case}, seed {seed}"
    return Row(case=name, metric=metric, value=value, unit=unit, goal=goal, better=better, note=note)


if __name__ == "__main__":
    main()
