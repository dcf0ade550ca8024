"""A checkpoint as a model folder: the one that was asked for, to the bit."""

import shutil

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from training_runs import tiny_config

from octavo.trainer import train
from octavo.trainer.export import export_checkpoint
from octavo.trainer.metrics import Display


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three steps whose second had the best accuracy."""
    folder = tmp_path_factory.mktemp("export") / "run"
    accuracies = iter([0.0, 0.1, 0.5, 0.3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "evaluate", lambda run: {"eval/accuracy": next(accuracies), "eval/num_problems": 1.0})
        config = tiny_config(folder, trainer__num_steps=3, evaluation__interval=1, checkpoint__interval=1)
        train.train(config, Display(Console(quiet=True)))
    return folder


@pytest.mark.parametrize("which, step", [("best", 2), ("newest", 3), ("step_000002", 2)])
def test_the_checkpoint_that_was_asked_for_is_written(which, step, run, tmp_path):
    assert export_checkpoint(run, tmp_path / "model", which).name == f"step_{step:06d}"
    exported = load_file(tmp_path / "model/model.safetensors")
    masters = load_file(run / f"checkpoints/step_{step:06d}/policy-00000.safetensors")
    assert torch.equal(exported["model.embed_tokens.weight"], masters["embed_tokens"].bfloat16())
    assert (tmp_path / "model/tokenizer.json").is_file()
    trained = load_file(run / "model/model.safetensors")
    assert all(torch.equal(exported[name], trained[name]) for name in trained) == (step == 3)


def test_what_cannot_be_exported_is_said_and_nothing_is_left(run, tmp_path):
    for folder, which, message in (
        (tmp_path, "best", "holds no checkpoint"),
        (run, "step_000009", "no checkpoint 'step_000009'; there are step_000003, step_000002"),
    ):
        with pytest.raises(ValueError, match=message):
            export_checkpoint(folder, tmp_path / "model", which)
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run/checkpoints/step_000002/policy-00000.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="policy-00000.safetensors has 0 bytes"):
        export_checkpoint(tmp_path / "run", tmp_path / "model", "best")
    (tmp_path / "thesis").mkdir()
    with pytest.raises(ValueError, match="is there already"):
        export_checkpoint(run, tmp_path / "thesis")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "thesis"]
