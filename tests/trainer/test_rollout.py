"""Dynamic sampling in a step: which prompts are drawn, what is trained on, and a resume to the bit."""

import signal
from dataclasses import replace

import pytest
from training_runs import read_lines, same_run, signal_at, tiny_config, train_quietly

from octavo.rl.losses import ClipBounds
from octavo.trainer import rollout
from octavo.trainer.divergence import StepRecord
from octavo.trainer.interrupt import Interrupted
from octavo.trainer.metrics import Display
from octavo.trainer.progress import Progress
from octavo.trainer.run import TRAINING, load_run
from octavo.trainer.scoring import Scoring


def dynamic(folder, max_tries=5, **changes):
    settings = {
        "calibration": None,
        "rollout__group_size": 2,
        "trainer": {"num_steps": 3, "num_mini_batches": 2, "shadow_interval": 0},
        "evaluation__interval": 0,
        "algorithm__dynamic_sampling": {"max_tries": max_tries},
    }
    return tiny_config(folder, **(settings | changes))


def scored(monkeypatch, rewards_of):
    """Rewards of a group by the number of its problem in the training set."""

    gather = Scoring.gather

    def gather_others(self):
        wanted = [rewards_of(int(encoded.problem.id.rpartition("/")[2])) for encoded in self.problems]
        return [
            [replace(each, reward=reward) for each, reward in zip(group, rewards, strict=True)]
            for group, rewards in zip(gather(self), wanted, strict=True)
        ]

    monkeypatch.setattr(Scoring, "gather", gather_others)


def collected(run, next_prompt=0):
    progress, record = Progress(bounds=ClipBounds(low=0.8, high=1.2), next_prompt=next_prompt), StepRecord(step=3)
    drawn, kept, metrics = rollout.collect(run, progress, record)
    assert record.prompts == [encoded.problem.id for encoded in drawn.problems]
    return drawn, kept, metrics


def test_groups_of_equal_rewards_are_dropped_and_replaced_by_the_next_prompts(tmp_path, monkeypatch):
    run = load_run(dynamic(tmp_path), Display())
    scored(monkeypatch, lambda number: [0.0, 1.0] if number % 2 else [1.0, 1.0])
    drawn, kept, metrics = collected(run, next_prompt=5)
    order = run.problems(5, len(drawn.problems))
    assert drawn.problems == order and len(order) > 4
    odd = [encoded for encoded in order if int(encoded.problem.id.rpartition("/")[2]) % 2]
    assert kept.problems == odd[:4] and kept.rewards.tolist() == [[0.0, 1.0]] * 4
    assert metrics["sampling/groups_trained"] == 4 and metrics["sampling/prompts_drawn"] == len(order)
    share = pytest.approx(1.0 - len(odd) / len(order))
    assert metrics["sampling/all_right_share"] == share and metrics["sampling/dropped_share"] == share
    # what a prompt is answered with does not depend on the try that it came in
    whole = rollout.sample(run, order, run.seed(TRAINING, 3))
    assert drawn.completions == whole
    assert kept.completions == [group for encoded, group in zip(order, whole, strict=True) if encoded in odd][:4]


def test_tries_end_and_the_step_trains_on_what_there_is(tmp_path, monkeypatch):
    config, log = dynamic(tmp_path / "run", max_tries=2, trainer__num_steps=2), tmp_path / "log"
    first = load_run(config, Display()).problems(0, 1)[0].problem.id
    rare = int(first.rpartition("/")[2])
    scored(monkeypatch, lambda number: [0.0, 1.0] if number in (rare, rare + 1) else [0.0, 0.0])
    with pytest.raises(
        ValueError, match=r"step 1: none of 8 groups in 2 tries .*0% are all right, 100% all wrong.*Raise"
    ):
        train_quietly(config, log)
    (line,) = read_lines(tmp_path / "run/metrics.jsonl")
    assert line["sampling/tries"] == 2 and line["sampling/prompts_drawn"] == 8
    assert 1 <= line["sampling/groups_trained"] <= 2 and line["optimizer/grad_norm"] > 0.0
    assert line["reward/mean"] == line["sampling/groups_trained"] / 16, "of all that were drawn"
    assert 0.0 <= line["time/refill_s"] <= line["time/rollout_s"]


def test_a_run_with_dynamic_sampling_resumes_to_the_bit(tmp_path, monkeypatch):
    log = tmp_path / "log"
    train_quietly(dynamic(tmp_path / "whole"), log)
    lines = read_lines(tmp_path / "whole/metrics.jsonl")
    assert (
        max(line["sampling/tries"] for line in lines) > 1 and sum(line["sampling/prompts_drawn"] for line in lines) > 12
    )
    config = dynamic(tmp_path / "run")
    calls = int(lines[0]["sampling/tries"]) + 2
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        signal_at(patch, rollout, "sample", calls, signal.SIGTERM)  # in a later try of the second step
        train_quietly(config, log)
    train_quietly(config, log, resume=True)
    same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"rollout__group_size": 1, "algorithm__advantage": {"scale_by_std": False}}, "group_size=1 makes the rewards"),
        ({"algorithm__advantage": {"type": "gae"}}, "dynamic_sampling drops groups .*type=gae learns"),
    ],
)
def test_dynamic_sampling_that_cannot_work_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        dynamic(tmp_path, **changes)
