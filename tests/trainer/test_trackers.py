"""What trackers are sent, and that none of them can stop a run."""

import json
import sys
from io import StringIO
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console
from training_runs import tiny_config

from octavo.trainer.metrics import Display
from octavo.trainer.trackers import Trackers, TrackingConfig
from octavo.trainer.train import train

METRICS = {
    "step": 3,
    "reward/mean": 0.5,
    "policy/entropy_histogram": [1, 2],
    "calibration/skipped": "few",
    "flag": True,
}


def display() -> Display:
    """One that keeps what it shows in console.file."""
    return Display(Console(file=StringIO(), width=500, soft_wrap=True))


def events_of(folder) -> Any:
    """The event files of a run, read."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return events


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    """Tag -> (step, value) of the event files."""
    events = events_of(folder)
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


class FakeWandB(ModuleType):
    """wandb as far as it is called; `calls` has them."""

    def __init__(self, fails: str = "") -> None:
        super().__init__("wandb")
        self.fails, self.calls = fails, []

    def called(self, call: str, /, *arguments: Any, **settings: Any) -> "FakeWandB":
        self.calls.append((call, arguments, settings))
        if call == self.fails:
            raise RuntimeError(f"no network\nin {call}")
        return self

    def init(self, **settings):
        return self.called("init", **settings)

    def log(self, metrics, step):
        self.called("log", metrics, step=step)

    def finish(self):
        self.called("finish")


def test_a_run_leaves_every_number_of_metrics_jsonl_in_event_files(tmp_path):
    shown = display()
    folder = train(tiny_config(tmp_path / "a", trainer__num_steps=2, evaluation__interval=0), shown)
    written = scalars(folder)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for key, value in line.items():
            if isinstance(value, float | int) and key != "step":
                assert (line["step"], pytest.approx(value, rel=1e-6)) in written[key], key
    assert len(written["reward/mean"]) == 2 and "step" not in written
    assert "warning" not in shown.console.file.getvalue()


def test_lists_texts_and_the_step_are_no_scalars_and_samples_are_texts(tmp_path):
    trackers = Trackers(tmp_path, TrackingConfig(), {}, display())
    sample = {"prompt": "1+1=", "completion": "2\n# end", "reward": 1.0}
    trackers.log(3, METRICS, [sample] * 9)
    trackers.close()
    assert scalars(tmp_path) == {"reward/mean": [(3, 0.5)]}
    events = events_of(tmp_path)
    tags = [tag for tag in events.Tags()["tensors"] if tag.startswith("samples/")]
    assert len(tags) == 4
    text = events.Tensors(tags[0])[0].tensor_proto.string_val[0].decode()
    assert text == "    1+1=2\n    # end\n    [reward 1]"


def test_a_resumed_run_overwrites_the_steps_it_runs_again(tmp_path, monkeypatch):
    event_file_writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    monkeypatch.setattr(event_file_writer._global_uid, "_value", 9)  # of file names: 9, then 10, which sorts first
    for start_step, value in ((0, 1.0), (2, 2.0)):
        trackers = Trackers(tmp_path, TrackingConfig(), {}, display(), start_step)
        for step in range(start_step, 4):
            trackers.log(step, {"a": value})
        trackers.close()
    assert scalars(tmp_path) == {"a": [(0, 1.0), (1, 1.0), (2, 2.0), (3, 2.0)]}


def test_without_tensorboard_one_line_says_so_and_the_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    shown = display()
    trackers = Trackers(tmp_path, TrackingConfig(), {}, shown)
    trackers.log(0, METRICS)
    trackers.close()
    said = shown.console.file.getvalue()
    assert said.startswith("warning: TensorBoard (event files) is off") and said.count("\n") == 1
    assert not (tmp_path / "tensorboard").exists()


def test_event_files_that_cannot_be_written_are_said_once(tmp_path):
    (tmp_path / "tensorboard").write_text("in the way")
    shown = display()
    trackers = Trackers(tmp_path, TrackingConfig(), {}, shown)
    trackers.log(0, METRICS)
    assert shown.console.file.getvalue().count("is off from here on (") == 1


def test_weights_and_biases_gets_the_config_and_the_numbers(tmp_path, monkeypatch):
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    config = TrackingConfig(wandb_project="p", wandb_name="n")
    config.check()
    trackers = Trackers(tmp_path, config, {"seed": 1}, display())
    trackers.log(3, METRICS)
    trackers.close()
    assert fake.calls == [
        ("init", (), {"project": "p", "name": "n", "dir": str(tmp_path), "config": {"seed": 1}}),
        ("log", ({"reward/mean": 0.5},), {"step": 3}),
        ("finish", (), {}),
    ]


@pytest.mark.parametrize("fails, calls", [("init", 1), ("log", 2), ("finish", 4)])
def test_weights_and_biases_that_fails_is_off_after_one_line(tmp_path, monkeypatch, fails, calls):
    fake = FakeWandB(fails)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    shown = display()
    trackers = Trackers(tmp_path, TrackingConfig(wandb_project="p"), {}, shown)
    for step in range(2):
        trackers.log(step, METRICS)
    trackers.close()
    assert len(fake.calls) == calls
    said = shown.console.file.getvalue()
    assert (
        said.count("\n") == 1 and f"Weights & Biases is off from here on (RuntimeError: no network in {fails})" in said
    )
    assert len(scalars(tmp_path)["reward/mean"]) == 2  # the other one goes on


@pytest.mark.parametrize("module", [None, ModuleType("wandb")])  # absent, or only a folder of that name
def test_weights_and_biases_that_is_missing_is_an_error(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "wandb", module)
    TrackingConfig().check()
    with pytest.raises(ValueError, match=r"wandb_project='p' .* pip install wandb"):
        TrackingConfig(wandb_project="p").check()


def test_a_name_without_a_project_is_an_error():
    with pytest.raises(ValueError, match="wandb_name='n' has no wandb_project"):
        TrackingConfig(wandb_name="n")
