"""AdamW on the FP32 masters, gradient clipping, learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from octavo.trainer.divergence import Diverged


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019)."""

    lr: float = 1e-6
    """Peak learning rate."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.999
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled, on matrices only."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after the warm-up; linear and cosine end at 0."""
    warmup_steps: int = 0
    """Optimiser steps over which the learning rate rises from 0."""

    def __post_init__(self) -> None:
        for name in ("lr", "adam_eps", "weight_decay", "warmup_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0; got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} is in [0, 1); got {getattr(self, name)}")
        if self.max_grad_norm <= 0.0:
            raise ValueError(f"max_grad_norm must be above 0; got {self.max_grad_norm}")

    def lr_at(self, update: int, num_updates: int) -> float:
        """Learning rate of an optimiser step, counted from 0, of num_updates."""
        if update < self.warmup_steps:
            return self.lr * (update + 1) / self.warmup_steps
        done = (update - self.warmup_steps) / max(1, num_updates - self.warmup_steps)
        shape = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
        return self.lr * shape[self.lr_schedule]


class Optimizer:
    """One AdamW over all masters.

    Args:
        parameters: {name: FP32 master}.
        config: the rule.
        num_updates: optimiser steps of the whole run, for the schedule.
        fused: one kernel, which holds no temporary tensors; the last bits are its own.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, num_updates: int, fused: bool = False
    ) -> None:
        self.config, self.num_updates, self.update, self.fused = config, num_updates, 0, fused
        self.parameters = dict(parameters)
        matrices = [p for p in self.parameters.values() if p.ndim > 1]
        vectors = [p for p in self.parameters.values() if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        betas = (config.beta1, config.beta2)
        self.adamw = torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=fused)

    def step(self) -> dict[str, float]:
        """Clip the gradients, update the masters, clear the gradients.

        Returns:
            optimizer/grad_norm before clipping, and optimizer/lr.

        Raises:
            Diverged: a gradient is not finite, and no master has been touched; or a master no longer is.
        """
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        norm = nn.utils.get_total_norm(gradients.values())
        if not torch.isfinite(norm):
            raise Diverged(f"gradient of optimiser step {self.update}", gradients)
        nn.utils.clip_grads_with_norm_(self.parameters.values(), self.config.max_grad_norm, norm)
        lr = self.config.lr_at(self.update, self.num_updates)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        if not math.isfinite(self.weight_norm()):
            raise Diverged(f"weight after optimiser step {self.update}", self.parameters)
        self.adamw.zero_grad(set_to_none=True)
        self.update += 1
        return {"optimizer/grad_norm": norm.item(), "optimizer/lr": lr}

    def skip(self) -> dict[str, float]:
        """Clear the gradients and leave the masters as they are. Returns the metrics of a step with a rate of 0."""
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters.values() if p.grad is not None])
        self.adamw.zero_grad(set_to_none=True)
        return {"optimizer/grad_norm": norm.item(), "optimizer/lr": 0.0}

    def weight_norm(self) -> float:
        """Of all masters together."""
        return nn.utils.get_total_norm([parameter.detach() for parameter in self.parameters.values()]).item()

    def restore(self, update: int) -> None:
        """Go on from `update`, with the masters and moments that were copied in; gradients of a broken step go."""
        self.update = update
        self.adamw.zero_grad(set_to_none=True)

    def moments(self) -> dict[str, Tensor]:
        """The live moments and step counts of AdamW, as `NAME.exp_avg`, `NAME.exp_avg_sq`, `NAME.step`.

        Before the first update they are made here, as the zeros that AdamW starts from.
        """
        for parameter in self.parameters.values():
            state = self.adamw.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if self.fused else "cpu")
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return {
            f"{name}.{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.adamw.state[parameter].items()
        }
