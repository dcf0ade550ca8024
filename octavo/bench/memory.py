"""A run's memory plan beside what its steps take."""

from __future__ import annotations

import gc
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import Qwen3Config

from octavo.models.checkpoint import save_decoder
from octavo.models.config import decoder_config
from octavo.models.decoder import Decoder
from octavo.numerics.recipe import get_recipe
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import from_dict
from octavo.trainer.memory import GIB, MemoryPlan, planner
from octavo.trainer.metrics import Display
from octavo.trainer.train import train


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run that is over, and its plan."""

    plan: MemoryPlan
    measured: dict[str, float]
    """Phase of the clock -> GiB, the most of all steps. `peak` is of whole steps, `held` of what is left after one."""
    reserved: float
    """GiB that the allocator holds at the end, at least as much as the peak."""
    beside: float
    """GiB of the device that are used and not the allocator's."""

    @property
    def planned(self) -> dict[str, float]:
        """The same of the plan."""
        sizes = self.plan.totals | {"peak": self.plan.peak[1], "held": sum(self.plan.held.values())}
        sizes["update"] = max(sizes["update"], sizes.pop("optimizer"))  # one phase of the clock
        return {name: size / GIB for name, size in sizes.items() if name in self.measured}

    def off(self, phase: str) -> float:
        """By how much of the measurement the plan is above it."""
        return self.planned[phase] / self.measured[phase] - 1.0

    def table(self) -> str:
        """Every phase, and the parts that it is planned from."""
        lines = [
            f"{name:14} planned {planned:8.3f} GiB, measured {self.measured[name]:8.3f} GiB, {self.off(name):+.1%}"
            for name, planned in self.planned.items()
        ]
        for name, parts in {"held": self.plan.held, **self.plan.phases}.items():
            lines += [f"  {name:12} {part:28} {size / GIB:8.3f} GiB" for part, size in parts.items()]
        beside = f"{self.beside:.3f} GiB of the device beside it, planned {self.plan.reserve / GIB:.3f}"
        lines.append(f"the allocator holds {self.reserved:.3f} GiB; {beside}")
        return "\n".join(lines)


@torch.no_grad()
def random_model(path: Path, source: Path, widths: Mapping[str, Any]) -> Path:
    """A Qwen3 with random weights in a Hugging Face folder, for sequences of 1,024 tokens.

    Args:
        path: the folder to make.
        source: model folder whose tokenizer it gets.
        widths: keys of its config.json.
    """
    hf_config = Qwen3Config(**widths, max_position_embeddings=1024, eos_token_id=0, tie_word_embeddings=True)
    decoder = Decoder(decoder_config(hf_config), hf_config, get_recipe("bf16"))
    for parameter in decoder.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=0.02)
    save_decoder(decoder, path, source)
    return path


def full_run(model: Path, folder: Path, precision: Mapping[str, Any], recompute: bool = False) -> TrainConfig:
    """Three steps on a CUDA device with full microbatches, as a plan takes them to be: random weights hardly ever end a
    completion before its limit."""
    return from_dict(
        TrainConfig,
        {
            "output_dir": str(folder),
            "device": "cuda",
            "model": {"path": str(model)},
            "task": {"type": "arithmetic", "num_train": 64, "num_test": 8},
            "precision": dict(precision),
            "rollout": {
                "prompts_per_step": 8,
                "group_size": 8,
                "max_prompt_tokens": 16,
                "max_completion_tokens": 1008,
                "engine": {"max_sequences": 64},
            },
            "trainer": {"num_steps": 3, "recompute_layers": recompute, "shadow_interval": 1},
            "evaluation": {"interval": 0},
            "overwrite": True,
            "checkpoint": {"interval": 0, "keep_best": False},
            "watch": None,
        },
        "a full run",
    )


def train_beside_plan(config: TrainConfig) -> PlannedRun:
    """Plan a run on a CUDA device, and train; what the device held before is not counted."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated() / GIB
    plan = planner(config)(config)
    with open(f"{config.output_dir}.log", "w") as log:
        train(config, Display(Console(file=log)))
    measured: dict[str, float] = {}
    for line in (Path(config.output_dir) / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        for key, value in json.loads(line).items():
            if key.startswith("memory/") and key != "memory/planned_gib":
                name = key.removeprefix("memory/").removesuffix("_gib")
                measured[name] = max(measured.get(name, 0.0), value - before)
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    beside = total - free - reserved
    return PlannedRun(plan=plan, measured=measured, reserved=reserved / GIB, beside=beside / GIB)
