"""What a step's metrics lead to: nothing, a warning, a calibration, some steps in BF16, or a rollback."""

from __future__ import annotations

import json

from octavo.trainer.critic import warms_up
from octavo.trainer.resume import ResumePoint, Session
from octavo.trainer.rollback import decide, record
from octavo.trainer.trackers import Trackers
from octavo.trainer.watch import Alarm, SignalState, WatchConfig, observe, watch_metrics


def watch_pending(session: Session) -> Alarm | None:
    """Show the detector the step that is not written yet, and add what it says to its metrics.

    Steps in BF16 have other noise, and in a critic's warm-up every ratio is 1: neither is judged nor remembered.
    """
    config, progress = session.run.config.watch, session.progress
    assert progress.pending is not None
    metrics = progress.pending["metrics"]
    if config is None:
        return None
    before, progress.weight_norm = progress.weight_norm, session.optimizer.weight_norm()
    if before:
        metrics["watch/weight_change"] = abs(progress.weight_norm / before - 1.0)
    if "rescue/bf16" in metrics or warms_up(session.run.config, metrics["step"]):
        return None
    alarm = observe(progress.signals, metrics, metrics["step"], config)
    metrics |= watch_metrics(progress.signals, config)
    if alarm is not None:
        metrics |= {"watch/alarm": str(alarm), "rescue/action": config.action}
    return alarm


def respond(session: Session, trackers: Trackers, alarm: Alarm) -> None:
    """Do what `watch.action` says about an alarm.

    Raises:
        ValueError: it is a rollback, and none is left.
    """
    config, progress, display = session.run.config.watch, session.progress, session.run.display
    assert config is not None
    if config.action == "rollback":
        roll_back(session, trackers, alarm.step, alarm.onset, str(alarm))
        return
    done = {
        "warn": "training goes on",
        "recalibrate": "the next step calibrates",
        "bf16_forward": f"the next {config.bf16_steps} steps run in BF16",
    }
    display.line(f"warning: step {alarm.step}: {alarm}; {done[config.action]}")
    if config.action == "warn":
        return
    if config.action == "recalibrate":
        progress.watch.event = f"alarm: {alarm}"
    else:
        progress.bf16_steps_left = config.bf16_steps
        progress.pool.clear()
    forget(progress.signals)


def rolls_back(config: WatchConfig | None) -> bool:
    """Whether a step that broke is a case for a rollback."""
    return config is not None and config.action == "rollback"


def roll_back(session: Session, trackers: Trackers, step: int, onset: int, reason: str) -> None:
    """Go on from a checkpoint of before the onset, with other random numbers.

    Args:
        session: put back as it was then; its step that is not written yet is undone too.
        trackers: are told to hide what was undone.
        step: that gave the alarm, or broke.
        onset: first step that was off.
        reason: for the user and the record.

    Raises:
        ValueError: no rollback is left, no checkpoint, or the disk refuses the record.
    """
    folder, config, pending = session.folder, session.run.config.watch, session.progress.pending
    assert config is not None
    rollback, checkpoint = decide(folder.path, step, onset, reason, config)
    undone = folder.metrics.path.read_bytes()[checkpoint.state["sizes"][folder.metrics.path.name] :].decode()
    last = "" if pending is None else json.dumps(pending["metrics"]) + "\n"
    try:
        record(folder.path, rollback, undone + last)
    except OSError as error:
        raise ValueError(
            f"step {step}: {reason}. The rollback could not be written to {folder.path} ({error.strerror}), and "
            f"nothing was undone. Make room, then the same command with --resume goes on from the newest checkpoint"
        ) from error
    session.run.display.line(f"warning: {rollback}; going on from there with other random numbers")
    session.restore(ResumePoint(checkpoint=checkpoint, changes=[], damage=[], rollback=rollback), allow_changes=False)
    trackers.rewind(session.progress.next_step)


def forget(states: dict[str, SignalState]) -> None:
    """After a rescue every sum begins anew, and what was off is not remembered."""
    for state in states.values():
        state.forget()
