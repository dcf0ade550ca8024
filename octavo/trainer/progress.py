"""Where a run stands: what it needs, beside its config, to go on as if it had never stopped.

The problem order is keyed by the seed and every sample by (seed, step). What else moves is here, in the masters, in the
optimiser's moments and in the static activation scales.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from octavo import __version__
from octavo.layers.linear import SCALE_STATE, quantized_layers
from octavo.models.decoder import Decoder
from octavo.rl.calibration import Statistics, read_statistics
from octavo.rl.calibration_trigger import Watch
from octavo.rl.losses import ClipBounds
from octavo.trainer.watch import SignalState, first_onset


@dataclass(kw_only=True)
class Progress:
    """What moves from step to step and is no tensor. Changes only when a step's last update is done."""

    bounds: ClipBounds
    """Of the ratio; calibrated clipping moves them."""
    next_step: int = 0
    """Steps done."""
    next_prompt: int = 0
    """Training problems drawn; place of the next in the order of all epochs."""
    pool: list[Statistics] = field(default_factory=list)
    """Statistics measured since the last calibration."""
    watch: Watch = field(default_factory=Watch)
    """What calls the next calibration."""
    first_evaluation: dict[str, float] = field(default_factory=dict)
    """Metrics before step 0; empty until they are measured, or without evaluation."""
    best_accuracy: float = -1.0
    """Highest evaluation accuracy after a step."""
    best_checkpoint: str | None = None
    """Name of the checkpoint that had it."""
    pending: dict[str, Any] | None = None
    """`metrics` and `samples` of the step before `next_step`, while its evaluation is to come and they wait for it."""
    signals: dict[str, SignalState] = field(default_factory=dict)
    """Early warning: what is known of each signal."""
    weight_norm: float | None = None
    """Of the masters when the last step was watched."""
    bf16_steps_left: int = 0
    """Steps for which rollout and training still run in BF16."""
    rollbacks: int = 0
    """Rollbacks behind this state; each goes on with other random numbers."""

    def to_json(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers; `from_json` gives back an equal Progress."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Progress:
        """The inverse of `to_json`, also after JSON turned tuples into lists."""
        values = {entry.name: data[entry.name] for entry in fields(cls) if entry.name in data}  # an older run's too
        values["bounds"] = ClipBounds(**values["bounds"])
        values["pool"] = [read_statistics(item) for item in values["pool"]]
        values["watch"] = Watch.from_json(data["watch"]) if "watch" in data else Watch()
        values["signals"] = {name: SignalState(**state) for name, state in values.get("signals", {}).items()}
        return cls(**values)

    @property
    def sound_steps(self) -> int:
        """Steps done before any signal was off, as far as is known now."""
        onset = first_onset(self.signals)
        return self.next_step if onset is None else onset


@dataclass(frozen=True, kw_only=True)
class RolloutState:
    """What a rollout changes: put back after an interrupted one, and after every evaluation."""

    scales: dict[str, Tensor]
    random_states: dict[str, Any]

    @classmethod
    def take(cls, decoders: list[Decoder]) -> RolloutState:
        """Copies of the static scales and of the states of the global generators."""
        scales = {name: buffer.clone() for name, buffer in static_scales(decoders).items()}
        return cls(scales=scales, random_states=random_states_to_json())

    def restore(self, decoders: list[Decoder]) -> None:
        """Put everything back."""
        for name, buffer in static_scales(decoders).items():
            buffer.copy_(self.scales[name])
        restore_random_states(self.random_states)


def static_scales(decoders: list[Decoder]) -> dict[str, Tensor]:
    """The live buffers of static activation scales by name; empty under other recipes."""
    return {
        f"{d}.{index}.{name}": layer.get_buffer(name)
        for d, decoder in enumerate(decoders)
        for index, layer in enumerate(quantized_layers(decoder))
        if layer.recipe.static_activation_scale
        for name in SCALE_STATE
    }


def random_states_to_json() -> dict[str, Any]:
    """States of the global generators, which only a user's own reward may draw from."""
    version, numbers, gauss = random.getstate()
    of_numpy = np.random.get_state(legacy=False)
    of_numpy["state"]["key"] = of_numpy["state"]["key"].tolist()
    return {
        "python": [version, list(numbers), gauss],
        "numpy": of_numpy,
        "torch": torch.get_rng_state().tolist(),
    }


def restore_random_states(data: Mapping[str, Any]) -> None:
    """The inverse of `random_states_to_json`."""
    version, numbers, gauss = data["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(data["numpy"])
    torch.set_rng_state(torch.tensor(data["torch"], dtype=torch.uint8))


def environment(device: str) -> dict[str, str]:
    """What a bit may depend on besides config, data and weights."""
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "CPU"
    return {
        "octavo": __version__,
        "torch": torch.__version__,
        "device": f"{device}, {name}",
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
    }


READ = ("weight_", "bias_", "embed_hp", "lm_head_hp")
"""How names of buffers begin that masters are cast to."""


def weights_fingerprint(module: nn.Module) -> str:
    """Hash of all parameters' names, shapes and bits; where there are no masters, of what forwards read of them."""
    named: dict[str, Tensor] = dict(module.named_parameters())
    if any(parameter.numel() == 0 for parameter in named.values()):
        named |= {name: x for name, x in module.named_buffers() if name.rpartition(".")[2].startswith(READ)}
    return tensors_fingerprint(named.items())


def tensors_fingerprint(named: Iterable[tuple[str, Tensor]]) -> str:
    """Hash of names, shapes and bits."""
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
