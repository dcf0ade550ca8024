"""A loss, gradient or weight that is not finite stops the run, and what is needed to see why is saved first.

RUN/failure/diagnosis.json       step, where, which tensors, how many values of each are not finite
RUN/failure/batch.safetensors    the mini-batch: tokens, masks, advantages, log-probabilities of each microbatch
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from octavo.rl.batch import MiniBatch
from octavo.trainer.metrics import StepClock

FOLDER = "failure"


class Diverged(ValueError):
    """Something that must be finite is not.

    Args:
        where: what was computed, such as "loss of microbatch 3".
        tensors: {name: tensor} to look at; those with a value that is not finite are listed.
    """

    def __init__(self, where: str, tensors: Mapping[str, Tensor]) -> None:
        broken = [Broken.of(name, tensor) for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]
        if broken:
            first = f"the first of {len(broken)} tensors is {broken[0].name}"
        else:  # what was made of them overflowed
            amaxes = {name: tensor.abs().max().item() for name, tensor in tensors.items() if tensor.is_floating_point()}
            largest = max(amaxes, key=amaxes.__getitem__)
            first = f"each of {len(tensors)} tensors is, the largest value is {amaxes[largest]:.3g} in {largest}"
        super().__init__(f"the {where} is not finite; {first}")
        self.where, self.broken = where, broken


class Diagnosed(ValueError):
    """A step that diverged, and where its diagnosis is."""


@dataclass(frozen=True, kw_only=True)
class Broken:
    """A tensor with values that are not finite."""

    name: str
    shape: tuple[int, ...]
    num_nan: int
    num_inf: int
    finite_amax: float
    """Largest finite magnitude; 0 when there is none."""

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Broken:
        finite = tensor[torch.isfinite(tensor)]
        return cls(
            name=name,
            shape=tuple(tensor.shape),
            num_nan=int(torch.isnan(tensor).sum()),
            num_inf=int(torch.isinf(tensor).sum()),
            finite_amax=finite.abs().max().item() if finite.numel() else 0.0,
        )


@dataclass(kw_only=True)
class StepRecord:
    """What a step has at hand when it fails; the step fills it in as it goes."""

    step: int
    mini_batch_index: int | None = None
    mini_batch: MiniBatch | None = None
    prompts: list[str] = field(default_factory=list)
    """Ids of the step's problems."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Rows for samples.jsonl."""
    audited: list[dict[str, Any]] = field(default_factory=list)
    """Rows for audit.jsonl."""
    clock: StepClock = field(default_factory=StepClock)


def save_diagnosis(run_folder: Path, error: Diverged, record: StepRecord, context: Mapping[str, Any]) -> Diagnosed:
    """Write RUN/failure, replacing an earlier one.

    Args:
        run_folder: the run's folder.
        error: what happened.
        record: where it happened, with the batch.
        context: more numbers for diagnosis.json, such as the bounds.

    Returns:
        The error to raise: one line that says what broke, where the diagnosis is and what to do.
    """
    folder = run_folder / FOLDER
    place = f"step {record.step}"
    if record.mini_batch_index is not None:
        place += f", mini-batch {record.mini_batch_index}"
    advice = "Checkpoints are as they were: lower optimizer.lr and go on from one with --resume --allow-changes"
    diagnosis = {
        "step": record.step,
        "mini_batch": record.mini_batch_index,
        "where": error.where,
        "broken": [asdict(item) for item in error.broken],
        "prompts": record.prompts,
        **context,
    }
    try:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if record.mini_batch is not None:
            save_file(_tensors(record.mini_batch), folder / "batch.safetensors")
        (folder / "diagnosis.json").write_text(json.dumps(diagnosis, indent=1), encoding="utf-8")
    except (OSError, SafetensorError) as problem:
        return Diagnosed(f"{place}: {error}. {folder} could not be written ({problem}). {advice}")
    return Diagnosed(f"{place}: {error}. The batch and the diagnosis are in {folder}. {advice}")


def _tensors(mini_batch: MiniBatch) -> dict[str, Tensor]:
    return {
        f"microbatch_{index}.{entry.name}": tensor.detach().cpu().contiguous().clone()  # no two share memory
        for index, microbatch in enumerate(mini_batch.microbatches)
        for entry in fields(microbatch)
        if (tensor := getattr(microbatch, entry.name)) is not None
    }
