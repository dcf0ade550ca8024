"""A run goes on from its newest whole checkpoint, to the bit, or says why it cannot."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from octavo.models.decoder import Decoder
from octavo.trainer import progress as state_of
from octavo.trainer.checkpoint import (
    Checkpoint,
    checkpoint_name,
    newest_checkpoint,
    prune,
    remove_newer,
    set_aside,
    write_checkpoint,
)
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import differences, from_dict, to_dict
from octavo.trainer.critic import CriticLearner, updates_per_step
from octavo.trainer.memory import MemoryPlan
from octavo.trainer.metrics import StepClock
from octavo.trainer.optimizer import Optimizer
from octavo.trainer.output import RunFolder
from octavo.trainer.progress import Progress
from octavo.trainer.rollback import Rollback, pending_rollback
from octavo.trainer.run import Run, in_bf16, model_fingerprint, policy_steps, problems_fingerprint

FREE_TO_CHANGE = ("output_dir", "overwrite", "checkpoint", "tracking")
"""Keys and sections that change no number of a run, so a resume may have others without asking."""


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """A checkpoint that the run may go on from."""

    checkpoint: Checkpoint
    changes: list[str]
    """Differences of the config from the run's, each `key: old -> new`; allowed by the user."""
    damage: list[str]
    """Why newer checkpoints are not used."""
    rollback: Rollback | None = None
    """The decision to go back to it, which is not carried out yet."""


def find_resume_point(folder: RunFolder, config: TrainConfig, allow_changes: bool) -> ResumePoint | None:
    """The newest whole checkpoint; None where there is none, so that the run begins.

    Raises:
        ValueError: all checkpoints are damaged, or a trained model stands without one; the config differs from the
            run's and `allow_changes` is false; more steps are done than it wants; another process is in the folder, or
            what is in it was not left by a run.
    """
    if not folder.holds_run:
        folder.check(config)
        return None
    folder.lock()
    checkpoint, damage = newest_checkpoint(folder.path)
    rollback = None
    if checkpoint is not None:
        rollback = pending_rollback(folder.path, checkpoint.state["progress"].get("rollbacks", 0))
    if rollback is not None:  # the run was stopped in the middle of it, or before its first checkpoint
        checkpoint, damage = newest_checkpoint(folder.path, most_steps=rollback.to_step)
        if checkpoint is None:
            raise ValueError(
                f"{folder.path} was to be rolled back to {rollback.checkpoint}, which is gone. Put it back, or remove "
                f"{folder.path}/rollbacks to go on from the newest checkpoint"
            )
    if checkpoint is None and (folder.path / "model").exists():
        raise ValueError(
            f"{folder.path} holds a trained model and no checkpoint to go on from. overwrite=true without --resume "
            f"replaces it by a new run"
        )
    if checkpoint is None and not folder.has_lines:  # killed in its first moments
        return None
    before = folder.read_config() if checkpoint is None else checkpoint.state["config"]
    changes = [
        f"{key}: {old} -> {new}"
        for key, old, new in differences(_completed(before), to_dict(config))
        if key.partition(".")[0] not in FREE_TO_CHANGE
    ]
    _refuse(changes, folder.path if checkpoint is None else checkpoint.path, allow_changes)
    if checkpoint is None:
        return None
    done, wanted = checkpoint.state["progress"]["next_step"], config.trainer.num_steps
    if done > wanted:
        raise ValueError(
            f"{checkpoint.path} has done {done} steps, and trainer.num_steps={wanted}. Give at least {done}"
        )
    return ResumePoint(checkpoint=checkpoint, changes=changes, damage=damage, rollback=rollback)


@dataclass(kw_only=True)
class Session:
    """A run in training: all that a checkpoint is made of."""

    run: Run
    optimizer: Optimizer
    reference: Decoder | None
    folder: RunFolder
    progress: Progress
    plan: MemoryPlan
    critic: CriticLearner | None = None

    _saved: str | None = None
    """Name of the checkpoint of this very state."""
    _clock: StepClock = field(default_factory=StepClock)
    _bf16: Run | None = None

    @property
    def active_run(self) -> Run:
        """The run itself, or in BF16 while a rescue says so."""
        if self.progress.bf16_steps_left == 0:
            return self.run
        self._bf16 = self._bf16 or in_bf16(self.run)
        return self._bf16

    @property
    def observing(self) -> list[Decoder]:
        """All whose static activation scales move: those of the run, and the frozen model of the KL penalty."""
        return [*self.run.decoders, *([] if self.reference is None else [self.reference])]

    def count_bf16_step(self) -> None:
        """A step in BF16 is done; after the last one the run is back with its own recipe."""
        self.progress.bf16_steps_left -= 1
        if self.progress.bf16_steps_left == 0:
            self._bf16 = None
            for decoder in self.run.decoders:
                decoder.requantize_(self.optimizer.update)

    def save(self, best: bool = False) -> str:
        """Write a checkpoint of the state as it is and drop those that are no longer kept.

        Args:
            best: its accuracy is the run's best, so it stays until a better one comes.

        Returns:
            Its name.

        Raises:
            OSError: the disk is full or broken; earlier checkpoints are as they were.
        """
        config, progress = self.run.config, self.progress
        name = checkpoint_name(progress.next_step, before_evaluation=progress.pending is not None)
        if name == self._saved:
            return name
        kept = name if best else progress.best_checkpoint
        state = {
            "progress": progress.to_json() | {"best_checkpoint": kept},
            "policy_version": self.optimizer.update,
            "critic_version": 0 if self.critic is None else self.critic.optimizer.update,
            "sizes": {file.path.name: file.flush() for file in (self.folder.metrics, self.folder.samples)},
            "config": to_dict(config),
            "fingerprints": self._fingerprints,
            "environment": state_of.environment(config.device),
            "random_states": state_of.random_states_to_json(),
        }
        with self._clock.phase("checkpoint"):
            write_checkpoint(self.folder.checkpoints / name, self._tensors(), state)
        self._saved, progress.best_checkpoint = name, kept
        limit = None
        if config.watch is not None and config.watch.action == "rollback":
            limit = max(0, progress.sound_steps - config.watch.margin_steps)
        prune(self.folder.path, config.checkpoint.keep_last, kept, limit)
        return name

    def checkpoint_time(self) -> dict[str, float]:
        """time/checkpoint_s since the last call, for the metrics of the step that comes after the checkpoint."""
        taken, self._clock = self._clock.metrics, StepClock()
        return taken

    def restore(self, point: ResumePoint, allow_changes: bool) -> list[str]:
        """Put everything as it was when the checkpoint was written, and note it in resumes.jsonl.

        Returns:
            What the user should know, a line each.

        Raises:
            ValueError: another model, or other problems (unless `allow_changes`).
        """
        checkpoint, state = point.checkpoint, point.checkpoint.state
        saved = state["fingerprints"]
        others = [
            f"{name}: not those of the run"
            for name, digest in self._fingerprints.items()
            if digest != saved.get(name, digest)
        ]
        _refuse(others, checkpoint.path, allow_changes)
        for group, tensors in self._tensors().items():
            if group != "reference" or tensors and checkpoint.holds(group):
                checkpoint.copy_into(group, tensors)
        self.run.reference.restored_(begins=not checkpoint.holds("reference"))
        self.optimizer.restore(state["policy_version"])
        step = state["progress"]["next_step"]
        drawn = step * state["config"]["rollout"]["prompts_per_step"]  # before octavo counted them
        self.progress = Progress.from_json({"next_prompt": drawn} | state["progress"])
        self._saved, self._bf16 = checkpoint.path.name, None
        config = self.run.config  # of a changed config too, whose other updates the schedule must not count
        if any(change.startswith(("algorithm", "calibration")) for change in point.changes):
            self.progress.pool.clear()  # of another form, perhaps
            if config.calibration is None:
                self.progress.bounds = config.start_bounds()
        updates_left = policy_steps(config, done=step) * config.trainer.num_mini_batches
        self.optimizer.num_updates = self.optimizer.update + updates_left
        if self.critic is not None:
            self.critic.restore(state["critic_version"], (config.trainer.num_steps - step) * updates_per_step(config))
        self._requantize(rolled_back=point.rollback is not None or self.progress.rollbacks > 0)
        state_of.restore_random_states(state["random_states"])

        notes = [f"damaged and set aside: {text}" for text in point.damage]
        if point.rollback is not None:
            self._end_rollback(point.rollback)
            notes.append(str(point.rollback))
        set_aside(self.folder.path, newer_than=checkpoint.path)
        for file in (self.folder.metrics, self.folder.samples):
            if not file.cut(state["sizes"][file.path.name]):
                notes.append(f"{file.path} is not as it was left: lines of earlier steps are gone")
        now = state_of.environment(self.run.config.device)
        if "reference bytes" not in saved and self.reference is not None:  # of when it still had masters
            notes.append("the checkpoint has no hash of the reference model's bytes, which were not checked")
        for key, was in state["environment"].items():
            if was != now[key]:
                notes.append(f"the checkpoint was written under {key} {was}, and this is {now[key]}: bits may differ")
        changes = point.changes + others
        message = "; ".join(notes)
        row = {"step": self.progress.next_step, "time": time.time(), "changes": changes, "message": message}
        self.folder.resumes.extend([row])
        return [f"resuming from {checkpoint.path}", *(f"changed: {text}" for text in changes), *notes]

    def _requantize(self, rolled_back: bool) -> None:
        """Rewrite what forwards read of the masters; before the first update it is as it was loaded."""
        if self.optimizer.update or rolled_back:
            for decoder in self.run.decoders:
                decoder.requantize_(self.optimizer.update)
        if self.critic is not None and (self.critic.optimizer.update or rolled_back):
            self.critic.critic.decoder.requantize_()

    def _end_rollback(self, rollback: Rollback) -> None:
        """What a rollback changes in the state that it goes back to."""
        progress, checkpoints = self.progress, self.folder.checkpoints
        remove_newer(self.folder.path, most_steps=rollback.to_step)
        progress.rollbacks = rollback.number
        for signal in progress.signals.values():
            signal.forget()
        best = progress.best_checkpoint
        if best is not None and not (checkpoints / best).is_dir():  # a better one that is undone had replaced it
            progress.best_checkpoint, progress.best_accuracy = None, -1.0

    def _tensors(self) -> dict[str, Mapping[str, Tensor]]:
        groups: dict[str, Mapping[str, Tensor]] = {
            "policy": {name: parameter.detach() for name, parameter in self.run.policy.named_parameters()},
            "optimizer": self.optimizer.moments(),
            "scales": state_of.static_scales(self.observing),
            "reference": self.run.reference.tensors(),
        }
        if self.critic is not None:
            groups |= {"critic": self.critic.parameters(), "critic_optimizer": self.critic.optimizer.moments()}
        return groups

    @cached_property
    def _fingerprints(self) -> dict[str, str]:
        """Of what the checkpoint does not hold and the run depends on."""
        reference = None if self.reference is None else state_of.weights_fingerprint(self.reference)
        return {
            "problems": problems_fingerprint(self.run),
            "model numbers": model_fingerprint(self.run),
            "reference bytes": reference or "none",
        }


def _completed(saved: dict[str, Any]) -> dict[str, Any]:
    """A saved config with the keys that octavo has had since, at their defaults; as it is where it no longer loads."""
    try:
        return to_dict(from_dict(TrainConfig, saved, "the run's config"))
    except ValueError:
        return saved


def _refuse(changes: list[str], path: Path, allow_changes: bool) -> None:
    if changes and not allow_changes:
        raise ValueError(
            f"the run that left {path} differs from this one in {'; '.join(changes)}. Give what it had, or "
            f"--allow-changes to go on with the new"
        )
