"""From a checkpoint to a model folder: the best one of a run, or the newest of a run that was stopped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octavo.models.checkpoint import WeightFormat, load_decoder, save_decoder
from octavo.models.fp8_folder import obstacles
from octavo.trainer.checkpoint import Checkpoint, list_checkpoints, newest_checkpoint, read_checkpoint
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import from_dict


@dataclass(frozen=True, kw_only=True)
class Export:
    """What was written."""

    checkpoint: Path
    """That it came from."""
    obstacles: dict[str, list[str]]
    """Other readers of an FP8 folder, and the projections for which they fail; empty for BF16."""


def export_checkpoint(run_folder: Path, output: Path, which: str = "best", weights: WeightFormat = "bf16") -> Export:
    """Write the policy of a checkpoint as a Hugging Face folder, in BF16 as the end of a run would.

    Args:
        run_folder: output_dir of a run.
        output: folder to make; it must not be there yet.
        which: "best" (the highest evaluation accuracy), "newest" that is whole, or a name such as step_000020.
        weights: "fp8" writes the bytes that the rollout ran, in blocks of 128x128.

    Raises:
        ValueError: no such run or checkpoint, it is damaged, the model it started from is gone, or output is there; the
            rollout's recipe has other blocks.
    """
    if output.exists():
        raise ValueError(f"{output} is there already. Give a folder that is to be made")
    checkpoint = find_checkpoint(run_folder, which)
    config = from_dict(TrainConfig, checkpoint.state["config"], f"{checkpoint.path}/state.json")
    recipe, master_format = config.precision.rollout_recipe(), config.optimizer.master_format
    decoder = load_decoder(config.model.path, recipe, master_format=master_format)
    checkpoint.copy_into("policy", {name: parameter.detach() for name, parameter in decoder.named_parameters()})
    if checkpoint.state["policy_version"]:  # the bytes of the first version are as they were loaded
        decoder.requantize_()
    save_decoder(decoder, output, config.model.path, weights=weights)
    return Export(checkpoint=checkpoint.path, obstacles=obstacles(decoder) if weights == "fp8" else {})


def find_checkpoint(run_folder: Path, which: str) -> Checkpoint:
    """A whole checkpoint of a run, as `export_checkpoint` names it.

    Raises:
        ValueError: there is none.
    """
    names = [path.name for path in list_checkpoints(run_folder)]
    if not names:
        raise ValueError(f"{run_folder} holds no checkpoint. Give the output_dir of a run")
    newest, _ = newest_checkpoint(run_folder)
    assert newest is not None
    if which == "newest":
        return newest
    name = newest.state["progress"]["best_checkpoint"] if which == "best" else which
    if name is None:
        raise ValueError(f"{run_folder} has no best checkpoint: no evaluation came after a step. Take newest")
    if name not in names:
        raise ValueError(f"{run_folder} has no checkpoint {name!r}; there are {', '.join(names)}")
    return read_checkpoint(newest.path.with_name(name))
