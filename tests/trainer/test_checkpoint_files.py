"""Checkpoint folders: what is written comes back to the bit, what does not fit is refused, order and pruning."""

import json
import math
import os

import pytest
import torch
from training_runs import in_a_child

from octavo.trainer import checkpoint
from octavo.trainer.checkpoint import list_checkpoints, prune, read_checkpoint, write_checkpoint

STATE = {"numbers": [0.1, -1e-300, math.inf, 2**53 + 1], "text": "\u00e9\n", "none": None}


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "a": {"x": torch.randn(64, 3, generator=generator), "y": torch.tensor(3.0), "z": torch.arange(5)},
        "b": {"x": torch.full((2,), torch.nan), "t": torch.randn(3, 4, generator=generator).T},
    }


def test_tensors_and_state_come_back_to_the_bit_in_shards(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 100)
    path = tmp_path / "checkpoints/step_000003"
    write_checkpoint(path, tensors(), STATE)
    assert len(list(path.glob("a-*"))) == 2 and len(list(path.glob("b-*"))) == 1
    found = read_checkpoint(path)
    assert found.state == STATE
    for group, wanted in tensors().items():
        back = dict(found.tensors(group))
        assert back.keys() == wanted.keys()
        for name, tensor in wanted.items():
            assert back[name].dtype == tensor.dtype and back[name].shape == tensor.shape
            assert back[name].numpy().tobytes() == tensor.contiguous().numpy().tobytes()
    targets = {name: torch.zeros_like(x) for name, x in tensors()["a"].items()}
    found.copy_into("a", targets)
    assert torch.equal(targets["x"], tensors()["a"]["x"]) and targets["y"] == 3.0


@pytest.mark.parametrize(
    "targets, wanted",
    [
        ({"x": torch.zeros(64, 2), "y": torch.tensor(0.0), "z": torch.arange(5)}, "x as torch.float32 .64, 3.*64, 2"),
        ({"x": torch.zeros(64, 3), "y": torch.tensor(0.0)}, "z .*nothing of that name"),
        ({**tensors()["a"], "w": torch.zeros(1)}, "has no 'w'"),
    ],
)
def test_tensors_of_another_model_are_named(targets, wanted, tmp_path):
    write_checkpoint(tmp_path / "step_000001", tensors(), STATE)
    with pytest.raises(ValueError, match=wanted):
        read_checkpoint(tmp_path / "step_000001").copy_into("a", targets)


def test_another_format_is_refused_by_its_number(tmp_path):
    path = tmp_path / "step_000001"
    write_checkpoint(path, tensors(), STATE)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(ValueError, match="has format 99, and this octavo reads 2"):
        read_checkpoint(path)


def test_checkpoints_are_listed_by_step_and_pruned_to_the_last_and_the_best(tmp_path):
    names = ["step_000002", "step_000010", "step_000010-before-evaluation", "step_1000000", "step_000009"]
    for name in [*names, "step_000011.partial", "step_000012.damaged", "notes"]:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    order = ["step_1000000", "step_000010", "step_000010-before-evaluation", "step_000009", "step_000002"]
    assert [path.name for path in list_checkpoints(tmp_path)] == order
    prune(tmp_path, keep_last=2, best="step_000002")
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == sorted([*order[:2], "step_000002", "step_000011.partial", "step_000012.damaged", "notes"])


def test_a_write_that_fails_leaves_the_earlier_one_and_no_rest(tmp_path, monkeypatch):
    path = tmp_path / "step_000001"
    write_checkpoint(path, tensors(), STATE)
    with pytest.raises(OSError, match="not empty"):
        write_checkpoint(path, tensors(), {"other": 1})

    def full(file):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_sync", full)
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(tmp_path / "step_000002", tensors(), {"other": 1})
    assert read_checkpoint(path).state == STATE
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_a_full_disk_under_safetensors_is_an_oserror_with_its_reason(tmp_path):
    import resource
    import signal

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.raises(OSError, match="File too large"):
            write_checkpoint(tmp_path / "step_000001", {"a": {"x": torch.zeros(1000)}}, STATE)

    assert in_a_child(limited) == 0 and os.listdir(tmp_path) == []
