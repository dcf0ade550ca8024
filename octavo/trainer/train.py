"""A whole run, from the first evaluation to the trained model: steps, evaluations, checkpoints, and what goes wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import yaml

from octavo.models.checkpoint import save_decoder
from octavo.rl.calibration_trigger import first_watch
from octavo.rl.policy_loss import fixed_bounds
from octavo.rollout.engine import Engine
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import to_dict
from octavo.trainer.critic import load_critic
from octavo.trainer.divergence import Diagnosed, Diverged, StepRecord, save_diagnosis
from octavo.trainer.evaluation import evaluate
from octavo.trainer.interrupt import Interrupted, StopRequested
from octavo.trainer.loop import train_step
from octavo.trainer.memory import offload_lines
from octavo.trainer.memory_advice import planned
from octavo.trainer.metrics import Display, StepClock
from octavo.trainer.output import RunFolder
from octavo.trainer.progress import Progress, RolloutState
from octavo.trainer.rescue import respond, roll_back, rolls_back, watch_pending
from octavo.trainer.resume import ResumePoint, Session, find_resume_point
from octavo.trainer.run import Run, VLLMFactory, load_reference, load_run, make_optimizer
from octavo.trainer.trackers import Trackers


def train(
    config: TrainConfig,
    display: Display,
    *,
    resume: bool = False,
    allow_changes: bool = False,
    vllm: VLLMFactory | None = None,
) -> Path:
    """Run the whole training, or what is left of it.

    Args:
        config: the run.
        display: where it is shown.
        resume: go on from the newest whole checkpoint in `output_dir`, to the bit; begin where there is none.
        allow_changes: resume although config keys or problems differ from the run's.
        vllm: starts vLLM, where rollout.engine is that: `octavo.plugins.vllm.VLLMEngine`.

    Returns:
        The run's folder: config.yaml, metrics.jsonl, samples.jsonl, checkpoints/, and model/, a Hugging Face folder.

    Raises:
        ValueError: something is missing or does not fit, the run diverged, or its end does not fit on the disk.
        Interrupted: Ctrl-C or SIGTERM; the run is saved.
    """
    config.tracking.check()
    with RunFolder(config.output_dir) as folder:
        point = find_resume_point(folder, config, allow_changes) if resume else None
        if not resume:
            folder.check(config)
        plan = planned(config)
        run = load_run(config, display, vllm)
        for line in plan.lines() or offload_lines(config):
            display.line(line)
        run.check_problems()
        run.check_rewards()
        session = Session(
            run=run,
            optimizer=make_optimizer(run),
            reference=load_reference(config),
            folder=folder,
            progress=Progress(bounds=config.start_bounds(), watch=first_watch(config.calibration)),
            critic=load_critic(run),
            plan=plan,
        )
        open_folder(session, point, resume, allow_changes)
        start_step = session.progress.next_step - (session.progress.pending is not None)
        trackers = Trackers(folder.path, config.tracking, to_dict(config), display, start_step)
        with run.interrupts, closing(run.verifiers), closing(trackers):
            try:
                run_steps(session, trackers)
                write_model(session)
            except StopRequested:
                raise interrupted(session) from None
        return folder.path


def open_folder(session: Session, point: ResumePoint | None, resume: bool, allow_changes: bool) -> None:
    """Put the session where it left off, or make the folder of a new run."""
    run, folder = session.run, session.folder
    if point is not None:
        for line in session.restore(point, allow_changes):
            run.display.line(line)
    else:
        if resume:
            run.display.line(f"no checkpoint in {folder.path}: starting from the beginning")
        num_parameters = sum(parameter.numel() for parameter in run.policy.parameters())
        model_bytes = num_parameters * run.policy.dtype.itemsize
        if session.critic is not None:
            num_parameters += sum(tensor.numel() for tensor in session.critic.parameters().values())
        folder.create(run.config, num_parameters, model_bytes, replace=resume)
    folder.write("config.yaml", yaml.safe_dump(to_dict(run.config), sort_keys=False))
    folder.write("precision.json", run.flow.to_json())


def run_steps(session: Session, trackers: Trackers) -> None:
    """Evaluate, then step, evaluate, log and save until all steps are done.

    Raises:
        StopRequested: where the session's state is a checkpoint's: between steps, or before an evaluation.
    """
    run, watch = session.run, session.run.config.watch
    num_steps, interval = run.config.trainer.num_steps, run.config.evaluation.interval
    if interval and session.progress.next_step == 0 and not session.progress.first_evaluation:
        with diagnosed(session, StepRecord(step=0)):
            session.progress.first_evaluation = first = evaluate(run)
        run.display.line(
            f"before training: eval {first['eval/accuracy']:.3f} of {first['eval/num_problems']:.0f} problems"
        )
    if rolls_back(watch) and session.progress.next_step == 0:
        save_or_warn(session)
    while session.progress.pending is not None or session.progress.next_step < num_steps:
        run.interrupts.check()
        progress, improved = session.progress, False
        try:
            if progress.pending is None:
                progress.pending = one_step(session)
                progress.next_step += 1
            if interval and (progress.next_step % interval == 0 or progress.next_step == num_steps):
                improved = evaluate_pending(session)
        except Diagnosed as error:
            if not rolls_back(watch):
                raise
            step = progress.next_step - (progress.pending is not None)
            roll_back(session, trackers, step, step, str(error.__cause__))
            continue
        alarm = watch_pending(session)
        if alarm is not None:
            respond(session, trackers, alarm)
        if session.progress.pending is not None:  # not rolled back
            write_pending(session, trackers)
            save_if_due(session, improved)


def one_step(session: Session) -> dict[str, Any]:
    """A training step.

    Returns:
        Its `metrics`, and `samples` for samples.jsonl.

    Raises:
        StopRequested: the rollout was interrupted; everything is as before the step.
        ValueError: the step diverged; the diagnosis is in the run's folder.
    """
    run, progress = session.active_run, session.progress
    record = StepRecord(step=progress.next_step, clock=clock_of(run))
    before = RolloutState.take(session.observing)
    metrics: dict[str, Any] = {"step": progress.next_step, "policy_version": session.optimizer.update}
    try:
        with diagnosed(session, record):
            metrics |= train_step(run, session.optimizer, session.reference, progress, record, session.critic)
    except StopRequested:
        before.restore(session.observing)
        raise
    if progress.rollbacks:
        metrics["rescue/rollbacks"] = float(progress.rollbacks)
    if progress.bf16_steps_left:
        metrics["rescue/bf16"] = 1.0
        session.count_bf16_step()
    if progress.next_step == 0:
        metrics |= {key.replace("eval/", "eval/initial_"): value for key, value in progress.first_evaluation.items()}
    try:
        session.folder.audit.add(progress.next_step, record.audited, run.config.verifier.audit_samples)
    except ValueError as error:
        run.display.line(f"warning: {error}")
    metrics |= session.checkpoint_time() | record.clock.finish() | session.plan.metrics()
    return {"metrics": metrics, "samples": record.samples}


def clock_of(run: Run) -> StepClock:
    """Of a step, or of an evaluation after one."""
    engine, device = run.engine, run.config.device
    return StepClock(device, engine.uncounted_bytes) if isinstance(engine, Engine) else StepClock(device)


@contextmanager
def diagnosed(session: Session, record: StepRecord) -> Iterator[None]:
    """Save what is needed to see why something inside diverged; ValueError that says where it is."""
    try:
        yield
    except Diverged as error:
        bounds = fixed_bounds(session.run.config.algorithm.loss, session.progress.bounds)
        context = {} if bounds is None else {"clip/low": bounds.low, "clip/high": bounds.high}
        raise save_diagnosis(session.folder.path, error, record, context) from error


def evaluate_pending(session: Session) -> bool:
    """Add an evaluation to the metrics that are not written yet; whether its accuracy is the run's best."""
    run, progress = session.active_run, session.progress
    clock = clock_of(run)
    assert progress.pending is not None
    with clock.phase("evaluate"), diagnosed(session, StepRecord(step=progress.next_step - 1)):
        evaluation = evaluate(run)
    if isinstance(run.engine, Engine):
        run.engine.lend()
    metrics = progress.pending["metrics"]
    peaks = [found["memory/peak_gib"] for found in (metrics, clock.metrics) if "memory/peak_gib" in found]
    metrics |= evaluation | clock.metrics
    metrics |= {"memory/peak_gib": max(peaks)} if peaks else {}
    metrics["time/step_s"] += clock.metrics["time/evaluate_s"]
    improved = evaluation["eval/accuracy"] > progress.best_accuracy
    progress.best_accuracy = max(progress.best_accuracy, evaluation["eval/accuracy"])
    return improved


def write_pending(session: Session, trackers: Trackers) -> None:
    """Log the step. What a full disk refuses waits in memory, and training goes on."""
    folder, progress, display = session.folder, session.progress, session.run.display
    assert progress.pending is not None
    metrics, samples = progress.pending["metrics"], progress.pending["samples"]
    for file, rows in ((folder.metrics, [metrics]), (folder.samples, samples)):
        try:
            file.extend([{"step": metrics["step"], **row} for row in rows])
        except OSError as error:
            display.line(f"warning: {file.path} cannot be written now ({error.strerror}); its lines wait in memory")
    trackers.log(metrics["step"], metrics, samples)
    progress.pending = None
    display.step(metrics, session.run.config.trainer.num_steps)


def save_if_due(session: Session, improved: bool) -> None:
    """Write a checkpoint at its interval, after the last step, and when the accuracy is the run's best."""
    config, step = session.run.config, session.progress.next_step
    interval = config.checkpoint.interval
    best = improved and config.checkpoint.keep_best
    if best or (interval and step % interval == 0) or step == config.trainer.num_steps:
        save_or_warn(session, best)


def save_or_warn(session: Session, best: bool = False) -> None:
    """Write a checkpoint; a disk that refuses it does not stop the run."""
    try:
        session.save(best=best)
    except OSError as error:
        session.run.display.line(
            f"warning: the checkpoint of step {session.progress.next_step} could not be written ({error.strerror}); "
            f"earlier ones are as they were, training goes on"
        )


def interrupted(session: Session) -> Interrupted:
    """Save the run where it was stopped; the exception that says so."""
    config, step, signal_number = session.run.config, session.progress.next_step, session.run.interrupts.requested
    assert signal_number is not None
    try:
        state = f"saved in {session.folder.checkpoints / session.save()}"
    except OSError as error:
        state = f"not saved ({error.strerror}), so what came after the newest checkpoint will be done again"
    return Interrupted(
        f"stopped after {step} of {config.trainer.num_steps} steps, {state}; the same command with --resume goes on",
        signal_number,
    )


def write_model(session: Session) -> None:
    """Write the trained model, and whatever lines still wait.

    Raises:
        ValueError: the disk is full.
    """
    folder, config = session.folder, session.run.config
    try:
        folder.metrics.flush()
        folder.samples.flush()
        save_decoder(session.run.policy, folder.path / "model", config.model.path)
    except OSError as error:
        raise ValueError(
            f"the end of the run could not be written to {folder.path}: {error.strerror}. Make room, then the same "
            f"command with --resume goes on from the newest checkpoint"
        ) from error
