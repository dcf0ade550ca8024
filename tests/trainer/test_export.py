"""A checkpoint as a model folder: the one that was asked for, to the bit."""

import shutil

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from training_runs import TINY_MODEL, tiny_config

from octavo.layers.linear import quantized_layers
from octavo.models.checkpoint import load_decoder
from octavo.models.fp8_folder import obstacles
from octavo.numerics.recipe import get_recipe
from octavo.trainer import train
from octavo.trainer.export import export_checkpoint, find_checkpoint
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
    assert export_checkpoint(run, tmp_path / "model", which).checkpoint.name == f"step_{step:06d}"
    exported = load_file(tmp_path / "model/model.safetensors")
    masters = load_file(run / f"checkpoints/step_{step:06d}/policy-00000.safetensors")
    assert torch.equal(exported["model.embed_tokens.weight"], masters["embed_tokens"].bfloat16())
    assert (tmp_path / "model/tokenizer.json").is_file()
    trained = load_file(run / "model/model.safetensors")
    assert all(torch.equal(exported[name], trained[name]) for name in trained) == (step == 3)


def test_fp8_weights_are_the_bytes_that_the_rollout_ran(run, tmp_path):
    export = export_checkpoint(run, tmp_path / "fp8", "newest", "fp8")
    decoder = load_decoder(TINY_MODEL, get_recipe("block128"))
    masters = load_file(export.checkpoint / "policy-00000.safetensors")
    for name, parameter in decoder.named_parameters():
        parameter.data.copy_(masters[name])
    decoder.requantize_()  # as after the last update
    exported = load_decoder(tmp_path / "fp8", get_recipe("block128"))
    live = {name: buffer for name, buffer in decoder.named_buffers() if "weight_q" in name}
    assert len(live) == 2 * len(quantized_layers(decoder))
    for name, buffer in live.items():
        assert torch.equal(exported.get_buffer(name).view(torch.uint8), buffer.view(torch.uint8)), name
    assert export.obstacles == obstacles(decoder)
    before = sorted(tmp_path.rglob("*"))
    rowwise = find_checkpoint(run, "newest")
    rowwise.state["config"]["precision"]["recipe"] = "rowwise"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octavo.trainer.export.find_checkpoint", lambda *_: rowwise)
        with pytest.raises(ValueError, match="blocks of 128x128, and recipe 'rowwise' has none"):
            export_checkpoint(run, tmp_path / "rowwise", "newest", "fp8")
    assert sorted(tmp_path.rglob("*")) == before


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
