"""The record of a run's rollbacks: what was decided, and the lines that it undid.

    RUN/rollbacks/001.jsonl    the decision, then the lines of metrics.jsonl after its checkpoint

A file is on disk, whole, before anything is undone: it is the decision. A checkpoint says how many rollbacks lie behind
it, so a run that is killed in the middle of one ends it when it is resumed, and never does it twice.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from octavo.trainer.checkpoint import Checkpoint, list_checkpoints, newest_checkpoint, read_checkpoint
from octavo.trainer.output import ROLLBACKS
from octavo.trainer.watch import WatchConfig


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """One decision to go back."""

    number: int
    """From 1."""
    from_step: int
    """The step that gave the alarm, or broke."""
    to_step: int
    """Steps done in the checkpoint that the run goes on from."""
    checkpoint: str
    """Its name."""
    reason: str
    time: float
    """Seconds since 1970."""

    def __str__(self) -> str:
        return f"rollback {self.number} from step {self.from_step} to {self.checkpoint}: {self.reason}"


def last_rollback(run_folder: Path) -> Rollback | None:
    """The newest decision; None where there is none.

    Raises:
        ValueError: its file is damaged.
    """
    files = sorted((run_folder / ROLLBACKS).glob("*.jsonl"))
    if not files:
        return None
    try:
        return Rollback(**json.loads(files[-1].read_bytes().partition(b"\n")[0]))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{files[-1]} cannot be read, and a rollback may have to be ended: {error}. Restore it, or remove it to go "
            f"on from the newest checkpoint"
        ) from error


def decide(run_folder: Path, step: int, onset: int, reason: str, config: WatchConfig) -> tuple[Rollback, Checkpoint]:
    """Choose the checkpoint to go back to: the newest whole one of before the onset and its margin.

    A second alarm that comes before the run is past the first says that the checkpoint was not sound either; then it is
    one before that. Where none is old enough it is the oldest.

    Args:
        run_folder: of the run.
        step: that gave the alarm, or broke.
        onset: first step that was off.
        reason: for the user and the record.
        config: margin and number of rollbacks.

    Raises:
        ValueError: no rollback is left, or no checkpoint.
    """
    last = last_rollback(run_folder)
    number = 1 if last is None else last.number + 1
    if number > config.max_rollbacks:
        raise ValueError(
            f"step {step}: {reason}. The run was rolled back {number - 1} times, as often as "
            f"watch.max_rollbacks={config.max_rollbacks} allows; {run_folder / ROLLBACKS} holds what that undid. Lower "
            f"optimizer.lr or change the recipe, and go on with --resume --allow-changes and more watch.max_rollbacks"
        )
    limit = onset - config.margin_steps
    if last is not None and onset <= last.from_step:
        limit = min(limit, last.to_step - 1)
    checkpoint, _ = newest_checkpoint(run_folder, most_steps=limit)
    if checkpoint is None:
        paths = list_checkpoints(run_folder)
        if not paths:
            raise ValueError(f"step {step}: {reason}. {run_folder} holds no checkpoint to roll back to")
        checkpoint = read_checkpoint(paths[-1])
    rollback = Rollback(
        number=number,
        from_step=step,
        to_step=checkpoint.state["progress"]["next_step"],
        checkpoint=checkpoint.path.name,
        reason=reason,
        time=time.time(),
    )
    return rollback, checkpoint


def record(run_folder: Path, rollback: Rollback, undone: str) -> None:
    """Put the decision on disk, with the lines of metrics.jsonl that it undoes.

    Raises:
        OSError: the disk refuses; nothing is decided.
    """
    folder = run_folder / ROLLBACKS
    folder.mkdir(exist_ok=True)
    partial = folder / f"{rollback.number:03d}.partial"
    with partial.open("w", encoding="utf-8") as file:
        file.write(f"{json.dumps(asdict(rollback))}\n{undone}")
        file.flush()
        os.fsync(file.fileno())
    partial.replace(partial.with_suffix(".jsonl"))


def pending_rollback(run_folder: Path, rollbacks_done: int) -> Rollback | None:
    """The newest decision, when the state that a checkpoint holds does not have it behind it."""
    last = last_rollback(run_folder)
    return last if last is not None and rollbacks_done < last.number else None
