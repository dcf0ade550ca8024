"""What stands for BF16: followed as it says, resumed to the bit, and left alone by those who only look."""

import signal

import pytest
import torch
from training_runs import half_right, read_lines, same_run, signal_at, tiny_config, without_times

from octavo.trainer import rollout
from octavo.trainer.interrupt import Interrupted
from octavo.trainer.metrics import Display
from octavo.trainer.optimizer import Optimizer
from octavo.trainer.reference import Reference, nudged_gain
from octavo.trainer.run import load_run
from octavo.trainer.train import train


def calibrated(folder, **calibration):
    return tiny_config(
        folder,
        calibration={"interval": 1, "min_tokens": 1, "min_clipped": 0, "max_shadow_clipped": 1.0, **calibration},
        rollout__prompts_per_step=2,
        optimizer__lr=2e-4,
        trainer={"num_steps": 4, "num_mini_batches": 2, "shadow_interval": 0},
        evaluation__interval=0,
    )


def lines_of(folder, **calibration):
    """Metrics of a run in which every mini-batch has punished and rewarded completions."""
    with pytest.MonkeyPatch.context() as patch:
        half_right(patch)
        train(calibrated(folder, **calibration), Display())
    return without_times(read_lines(folder / "metrics.jsonl"))


def numbers(lines):
    """All but what says which reference it was."""
    texts = ("calibration/reference", "calibration/reference_bytes")
    return [
        {k: v for k, v in line.items() if k not in texts and not k.startswith(("overclip", "noise"))} for line in lines
    ]


@pytest.fixture(scope="module")
def on_masters(tmp_path_factory):
    return lines_of(tmp_path_factory.mktemp("masters") / "run", type="exact")


@pytest.mark.parametrize("reference", [{"type": "ema", "decay": 0.0}, {"type": "snapshot", "every": 1}])
def test_a_reference_that_keeps_up_is_the_masters_to_the_bit(reference, on_masters, tmp_path):
    lines = lines_of(tmp_path / "run", type="exact", reference=reference)
    assert numbers(lines) == numbers(on_masters)
    assert [line["calibration/reference"] for line in lines] == [reference["type"]] * 4
    assert all(line["calibration/reference_bytes"] > 4 * 1_700_000 for line in lines)
    assert any(line["calibration/low"] != line["calibration/low_before"] for line in lines)
    assert "overclip/low_share" in on_masters[0] and "overclip/low_share" not in lines[0]


def test_a_slow_reference_follows_by_its_decay_and_its_copies(tmp_path):
    run = load_run(calibrated(tmp_path / "run"), Display())
    name, master = next(iter(run.policy.named_parameters()))
    ema, snapshot = (
        Reference(run.policy, calibrated(tmp_path / "run", reference=kind).calibration, 1.0)
        for kind in ({"type": "ema", "decay": 0.75}, {"type": "snapshot", "every": 2})
    )
    start, seen = master.detach().clone(), []
    for step in range(3):
        snapshot.start_step_(step)
        with torch.no_grad():
            master += 1.0
        ema.follow_()
        snapshot.follow_()
        mine = (dict(each.own.named_parameters())[name] - start for each in (ema, snapshot))
        seen.append([round(x.mean().item(), 4) for x in mine] + [int(snapshot.updates_since_copy)])
    # 0.25 of the way each time; copies of steps 0 and 2, taken before their updates.
    assert seen == [[0.25, 0.0, 1], [0.6875, 0.0, 2], [1.2656, 2.0, 1]]


def test_the_log_ratio_of_a_snapshot_is_scaled_to_the_step(tmp_path):
    config = calibrated(tmp_path / "run", reference={"type": "snapshot", "every": 3})
    reference = Reference(load_run(config, Display()).policy, config.calibration, 1.0)
    for step in range(2):
        reference.start_step_(step)
        for _ in range(4):
            reference.follow_()

    class Batch:
        reference_old_logprobs = torch.tensor([-2.0])

    assert reference.log_ratio(Batch, torch.tensor([-1.0])).item() == 0.5  # 4 updates of this step's, 8 since the copy


def test_a_nudged_gain_moves_the_logprobs_and_comes_back(tmp_path):
    run = load_run(calibrated(tmp_path / "run"), Display())
    gains = [block.input_norm.weight.detach().clone() for block in run.policy.blocks()]
    with nudged_gain(run.policy):
        changed = [not torch.equal(g, b.input_norm.weight) for g, b in zip(gains, run.policy.blocks(), strict=True)]
        middle = list(run.policy.blocks())[1].input_norm.weight
        steps = (middle / gains[1].bfloat16().float() - 1).abs()
        assert changed == [False, True, False] and 2**-9 < steps.min() and steps.max() <= 2**-7
    assert all(torch.equal(g, b.input_norm.weight) for g, b in zip(gains, run.policy.blocks(), strict=True))


@pytest.mark.parametrize(
    "calibration",
    [
        {"reference": {"type": "ema", "decay": 0.5}},
        {"reference": {"type": "snapshot", "every": 3}, "type": "exact"},
        {
            "reference": {"type": "carried", "refresh_every": 3},
            "type": "symmetric",
            "trigger": {"type": "event", "drift_band": 1e-9, "min_interval": 1},
            "interval": 3,
            "pooled_steps": 2,
        },
    ],
)
def test_references_and_triggers_are_resumed_to_the_bit(calibration, tmp_path, monkeypatch):
    half_right(monkeypatch)
    train(calibrated(tmp_path / "whole", **calibration), Display())
    config = calibrated(tmp_path / "run", **calibration)
    with monkeypatch.context() as patch:
        signal_at(patch, Optimizer, "step", 5, signal.SIGINT)
        with pytest.raises(Interrupted):
            train(config, Display())
    train(config, Display(), resume=True)
    same_run(tmp_path / "run", tmp_path / "whole")
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    assert any(line.get("calibration/skipped") == "" for line in lines)


def test_a_resumed_run_may_take_another_reference_or_form(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        signal_at(patch, Optimizer, "step", 3, signal.SIGINT)
        with pytest.raises(Interrupted):
            train(calibrated(tmp_path / "run", interval=3, pooled_steps=3), Display())
    for calibration in (
        {"reference": "ema", "type": "exact", "interval": 3, "pooled_steps": 3},
        {"reference": "masters"},
    ):
        with monkeypatch.context() as patch:
            signal_at(patch, rollout, "sample", 1, signal.SIGINT)
            with pytest.raises(Interrupted):
                train(calibrated(tmp_path / "run", **calibration), Display(), resume=True, allow_changes=True)
    train(calibrated(tmp_path / "run"), Display(), resume=True, allow_changes=True)
    assert len(read_lines(tmp_path / "run/metrics.jsonl")) == 4


def test_carried_shares_take_no_pass(tmp_path):
    lines = lines_of(tmp_path / "run", reference={"type": "carried", "refresh_every": 3})
    made = [line for line in lines if line["calibration/skipped"] == ""]
    assert made == lines, "a skipped calibration would carry nothing"
    assert [line["calibration/reference"] for line in lines] == ["masters", "carried", "carried", "masters"]
    assert [line["calibration/shadow_tokens"] > 0 for line in lines] == [True, False, False, True]
    alphas = [line["calibration/shadow_clipped_low"] / max(line["calibration/num_negative"], 1) for line in lines]
    assert alphas[0] == pytest.approx(alphas[1]) == pytest.approx(alphas[2])
    assert [("overclip/low_share" in line) for line in lines] == [True, False, False, True]
