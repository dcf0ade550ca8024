"""What an alarm leads to, in runs whose weights are damaged; a kill anywhere in a rollback changes no bit."""

import math
import os
import shutil
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from rescue_runs import damage_after, watched_run
from training_runs import in_a_child, read_lines, run, same_run, signal_at, train_quietly, without_times

from octavo.trainer import loop, rescue, rollout, train
from octavo.trainer.checkpoint import list_checkpoints
from octavo.trainer.interrupt import Interrupted
from octavo.trainer.optimizer import Optimizer
from octavo.trainer.progress import Progress
from octavo.trainer.watch import Alarm


def alarm_at(monkeypatch, step, onset=None, rollbacks=(0,)):
    """The detector gives an alarm after this step, as long as the run has these rollbacks behind it."""
    watch_pending = rescue.watch_pending

    def alarmed(session):
        watch_pending(session)
        progress, metrics, first = (
            session.progress,
            session.progress.pending["metrics"],
            step if onset is None else onset,
        )
        if metrics["step"] < first or progress.rollbacks not in rollbacks:
            return None
        progress.signals["reward"].onset = first
        if metrics["step"] != step:
            return None
        metrics["watch/alarm"] = "reward out of line"
        return Alarm(step=step, signals=("reward",), onset=first)

    monkeypatch.setattr(train, "watch_pending", alarmed)


@pytest.fixture(scope="module")
def rolled_back(tmp_path_factory):
    """A run whose weights broke after 10 steps, rolled back by a real alarm; and what it printed."""
    folder = tmp_path_factory.mktemp("rolled") / "run"
    with pytest.MonkeyPatch.context() as patch:
        damage_after(patch, 10)
        return folder, run(watched_run(folder, "rollback"))


def test_broken_weights_are_seen_and_rolled_back_and_the_run_goes_on(rolled_back):
    folder, printed = rolled_back
    lines = read_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(14))
    (record,) = [read_lines(path) for path in sorted((folder / "rollbacks").iterdir())]
    decision, undone = record[0], record[1:]
    assert decision["number"] == 1 and decision["checkpoint"] == "step_000008" and decision["to_step"] == 8
    assert [line["step"] for line in undone] == list(range(8, decision["from_step"] + 1))
    assert "watch/alarm" in undone[-1] and undone[-1]["rescue/action"] == "rollback"
    assert "since step 10" in decision["reason"] and undone[-1]["watch/sum"] >= 1.0
    assert [line["step"] for line in lines if "rescue/rollbacks" in line] == list(range(8, 14))
    assert f"rollback 1 from step {decision['from_step']} to step_000008" in printed
    before, after = undone[0], lines[8]
    assert after["reward/mean"] != before["reward/mean"] or after["policy/entropy"] != before["policy/entropy"]
    assert max(line["policy/entropy"] for line in lines[8:]) < min(line["policy/entropy"] for line in undone[2:])
    samples = read_lines(folder / "samples.jsonl")
    assert [row["step"] for row in samples] == sorted(row["step"] for row in samples)
    (note,) = read_lines(folder / "resumes.jsonl")
    assert note["step"] == 8 and "rollback 1" in note["message"]


def short_run(folder, action, **changes):
    """Five steps, a checkpoint after each."""
    settings = {
        "rollout__group_size": 2,
        "rollout__max_completion_tokens": 8,
        "trainer__num_steps": 5,
        "evaluation__interval": 0,
        "checkpoint__interval": 1,
        "watch__margin_steps": 1,
    }
    return watched_run(folder, action, **(settings | changes))


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """A short run that was rolled back from step 3 to what it was after 2."""
    folder = tmp_path_factory.mktemp("short") / "run"
    with pytest.MonkeyPatch.context() as patch:
        alarm_at(patch, 3)
        run(short_run(folder, "rollback"))
    assert [line["step"] for line in read_lines(folder / "rollbacks/001.jsonl")[1:]] == [2, 3]
    return folder


@pytest.mark.parametrize(
    "owner, name, after",
    [
        (rescue, "record", False),  # before the decision is on disk
        (rescue, "record", True),  # after it
        (train, "roll_back", True),  # back in the loop, no checkpoint of the new state yet
    ],
)
def test_a_kill_anywhere_in_a_rollback_changes_no_bit(owner, name, after, short, tmp_path, monkeypatch):
    def killed():
        original, decide, deciding = getattr(owner, name), rescue.decide, []

        def decided(*arguments):
            deciding.append(True)
            return decide(*arguments)

        def dying(*arguments, **keywords):
            if deciding and not after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*arguments, **keywords)
            if deciding:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        rescue.decide = decided
        setattr(rescue if name == "roll_back" else owner, name, dying)
        train_quietly(config, tmp_path / "log")

    alarm_at(monkeypatch, 3)
    config = short_run(tmp_path / "run", "rollback")
    assert in_a_child(killed) == -signal.SIGKILL, (tmp_path / "log").read_text()
    run(config, resume=True)
    same_run(tmp_path / "run", short)
    mine, theirs = (read_lines(folder / "rollbacks/001.jsonl")[0] for folder in (tmp_path / "run", short))
    assert {**mine, "time": 0} == {**theirs, "time": 0}


def test_a_second_alarm_before_the_run_is_past_the_first_goes_further_back_and_then_it_is_an_error(
    tmp_path, monkeypatch
):
    alarm_at(monkeypatch, 3, rollbacks=(0, 1, 2))
    config = short_run(tmp_path / "run", "rollback", watch__max_rollbacks=2)
    with pytest.raises(
        ValueError, match=r"step 3: reward out of line.*rolled back 2 times.*max_rollbacks=2.*--resume"
    ) as error:
        run(config)
    assert "\n" not in str(error.value)
    went_to = [read_lines(path)[0]["to_step"] for path in sorted((tmp_path / "run/rollbacks").iterdir())]
    assert went_to == [2, 1]
    monkeypatch.undo()
    run(config, resume=True)
    assert [line["rescue/rollbacks"] for line in read_lines(tmp_path / "run/metrics.jsonl")[1:]] == [2.0] * 4


def test_the_checkpoint_that_a_rollback_needs_is_kept(tmp_path, monkeypatch):
    alarm_at(monkeypatch, 4, onset=3)
    run(short_run(tmp_path / "run", "rollback", watch__margin_steps=2))
    assert read_lines(tmp_path / "run/rollbacks/001.jsonl")[0]["to_step"] == 1
    names = [path.name for path in list_checkpoints(tmp_path / "run")]
    assert names[0] == "step_000005" and len(names) <= 4


def test_a_rollback_to_the_beginning_brings_the_first_bytes_back(tmp_path, monkeypatch):
    one_step, found = train.one_step, []

    def looking(session):
        if session.progress.next_step == 0:
            found.append([buffer.clone() for buffer in session.run.policy.buffers()])
        return one_step(session)

    alarm_at(monkeypatch, 1)
    monkeypatch.setattr(train, "one_step", looking)
    run(short_run(tmp_path / "run", "rollback", trainer__num_steps=2))
    assert read_lines(tmp_path / "run/rollbacks/001.jsonl")[0]["to_step"] == 0
    before, after = found
    assert all(same_bytes(x, y) for x, y in zip(before, after, strict=True))


def same_bytes(x, y):
    """Whether two tensors are equal to the bit, in any format."""
    return torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))


def test_what_is_not_finite_is_rolled_back_too(tmp_path, monkeypatch):
    step = Optimizer.step

    def breaking(self):
        if self.update == 5 and not broken:
            broken.append(True)
            self.parameters["layers.1.down_proj.weight"].grad[3, 4] = torch.inf
        return step(self)

    broken = []
    monkeypatch.setattr(Optimizer, "step", breaking)
    printed = run(short_run(tmp_path / "run", "rollback"))
    (decision, *undone) = read_lines(tmp_path / "run/rollbacks/001.jsonl")
    assert (decision["from_step"], decision["to_step"]) == (2, 1) and [line["step"] for line in undone] == [1]
    assert "gradient of optimiser step 5 is not finite" in decision["reason"] and "rollback 1" in printed
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(5)) and lines[4]["policy_version"] == 8
    assert (tmp_path / "run/failure/diagnosis.json").is_file()


def test_a_warning_changes_no_number(short, tmp_path, monkeypatch):
    alarm_at(monkeypatch, 2)
    assert "warning: step 2: reward out of line since step 2; training goes on" in run(
        short_run(tmp_path / "run", "warn", trainer__num_steps=4)
    )
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in lines if "watch/alarm" in line] == [2]
    before = read_lines(short / "metrics.jsonl")[:2] + read_lines(short / "rollbacks/001.jsonl")[1:]
    for line in (lines[2], before[3]):
        line.pop("watch/alarm")
    assert without_times(lines)[:4] == without_times(before)


def test_recalibrate_calibrates_in_the_next_step_also_after_a_resume(tmp_path, monkeypatch):
    changes = {"calibration": {"interval": 20, "min_tokens": 1, "min_clipped": 0}, "trainer__num_steps": 4}
    alarm_at(monkeypatch, 1)
    config = short_run(tmp_path / "run", "recalibrate", **changes)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        signal_at(patch, rollout, "sample", 3, signal.SIGTERM)
        run(config)
    run(config, resume=True)
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in lines if "calibration/low" in line] == [2]
    assert [line["step"] for line in lines if "overclip/low_share" in line] == [2]


def test_bf16_forward_runs_both_sides_in_bf16_exactly_and_comes_back(tmp_path, monkeypatch):
    recipes = []
    check_mismatch = loop.check_mismatch

    def looking(run, mini_batches, trained):
        recipes.append((run.policy.recipe.name, run.engine.decoder.recipe.name, run.engine.cache.k.dtype))
        return check_mismatch(run, mini_batches, trained)

    alarm_at(monkeypatch, 1)
    monkeypatch.setattr(loop, "check_mismatch", looking)
    config = short_run(tmp_path / "run", "bf16_forward", watch__bf16_steps=2, calibration={"start_low": 0.5})
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        signal_at(patch, loop, "accumulate", 6, signal.SIGTERM)  # in the first step in BF16
        run(config)
    run(config, resume=True)
    names = [name for *both, _ in recipes for name in both]
    assert names == ["block128"] * 4 + ["bf16"] * 4 + ["block128"] * 2
    assert [dtype for *_, dtype in recipes] == [torch.float8_e4m3fn] * 2 + [torch.bfloat16] * 2 + [torch.float8_e4m3fn]
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in lines if line.get("rescue/bf16")] == [2, 3]
    assert all(line["mismatch/max_abs_logprob_diff"] == 0.0 for line in lines)
    assert [line["clip/low"] for line in lines] == [0.5, 0.5, 0.8, 0.8, 0.5], "BF16 clips at the plain bounds"
    run(replace(config, output_dir=str(tmp_path / "whole")))
    same_run(tmp_path / "run", tmp_path / "whole")


def test_a_critics_warm_up_is_neither_judged_nor_remembered(tmp_path):
    changes = {"algorithm__advantage": {"type": "gae"}, "critic": {"warmup_steps": 10}, "trainer__num_steps": 20}
    config = watched_run(tmp_path, "warn", **changes)
    progress = Progress(bounds=config.start_bounds())
    still = SimpleNamespace(weight_norm=lambda: 40.0)
    session = SimpleNamespace(run=SimpleNamespace(config=config), progress=progress, optimizer=still)
    for step in range(20):
        ratio_std = 0.0 if step < 10 else 0.1  # no ratio moves before the policy does
        metrics = {"step": step, "reward/mean": 0.5, "policy/ratio_std": ratio_std}
        progress.pending = {"metrics": metrics}
        assert rescue.watch_pending(session) is None, metrics
        assert metrics.get("watch/sum") == (None if step < 10 else 0.0)
    assert progress.signals["ratio std"].healthy == pytest.approx([math.log(0.101)] * 8)


def test_a_jump_of_the_weights_is_seen_in_the_step_that_made_it(rolled_back):
    lines = read_lines(rolled_back[0] / "rollbacks/001.jsonl")[1:]
    changes = {line["step"]: line["watch/weight_change"] for line in lines}
    assert changes[9] > 100 * max(changes[8], changes[10]) > 0.0  # the damage came after step 9
    assert (lines[1]["watch/signal"], lines[1]["watch/sum"]) == ("weight norm", 0.6), "one step alone is no alarm"


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"watch": {"action": "recalibrate"}, "calibration": None}, "watch.action=recalibrate wants a calibration"),
        (
            {"watch": {"action": "bf16_forward"}, "precision": {"recipe": "bf16"}},
            "changes nothing where no layer is FP8",
        ),
    ],
)
def test_an_action_that_can_do_nothing_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        watched_run(tmp_path, "warn", **changes)


def test_a_damaged_record_is_said(short, tmp_path):
    shutil.copytree(short, tmp_path / "run")
    (tmp_path / "run/rollbacks/001.jsonl").write_text("{")
    with pytest.raises(ValueError, match="001.jsonl cannot be read.*remove it to go on"):
        run(short_run(tmp_path / "run", "rollback"), resume=True)
