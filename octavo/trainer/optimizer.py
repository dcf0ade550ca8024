"""AdamW on the masters, gradient clipping, learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from octavo.kernels.adamw import BLOCK, FIRST, SECOND, Moment, Update, adamw_
from octavo.rollout.counter import uniform_bits
from octavo.trainer.divergence import Diverged
from octavo.trainer.offload import offload

MasterFormat = Literal["fp32", "bf16"]


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
    state_format: Literal["fp32", "int8"] = "fp32"
    """Of the moments of matrices: int8 takes 2 bytes a weight for 8. Rounded stochastically: the mean step is FP32's,
    single step sizes are noisier."""
    master_format: MasterFormat = "fp32"
    """Of the masters of matrices: bf16 takes 2 bytes a weight for 4, rounded stochastically after each update. The mean
    update is FP32's, the single weight moves by whole BF16 steps. Gradients stay FP32."""
    offload_moments: bool = False
    """Keep both moments in pinned memory of the host but for the updates, before which they are copied back: their
    memory on the GPU is then the rollout's. Changes no number, and on a CPU nothing at all."""

    def __post_init__(self) -> None:
        for name in ("lr", "adam_eps", "weight_decay", "warmup_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0; got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} is in [0, 1); got {getattr(self, name)}")
        if self.max_grad_norm <= 0.0:
            raise ValueError(f"max_grad_norm must be above 0; got {self.max_grad_norm}")

    @property
    def compact(self) -> bool:
        """Whether matrices take less than torch's AdamW makes of them."""
        return (self.state_format, self.master_format) != ("fp32", "fp32")

    def lr_at(self, update: int, num_updates: int) -> float:
        """Learning rate of an optimiser step, counted from 0, of num_updates."""
        if update < self.warmup_steps:
            return self.lr * (update + 1) / self.warmup_steps
        done = (update - self.warmup_steps) / max(1, num_updates - self.warmup_steps)
        shape = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
        return self.lr * shape[self.lr_schedule]


class CompactAdamW:
    """AdamW on matrices in the formats of a config, by `kernels.adamw`.

    Args:
        matrices: {name: master}.
        config: the rule and the formats.
        seed: of the stochastic rounding, with the update and the matrix's place among them.
    """

    def __init__(self, matrices: Mapping[str, nn.Parameter], config: OptimizerConfig, seed: int) -> None:
        self.matrices, self.config, self.seed = dict(matrices), config, seed
        self.moments = {name: (self._zeros(p, FIRST[0]), self._zeros(p, SECOND[0])) for name, p in matrices.items()}

    def _zeros(self, master: Tensor, code_type: torch.dtype) -> Moment:
        if self.config.state_format == "fp32":
            return Moment(torch.zeros(master.shape, device=master.device))
        codes = torch.zeros(master.shape, dtype=code_type, device=master.device)
        return Moment(codes, torch.zeros(-(-master.numel() // BLOCK), device=master.device))

    @torch.no_grad()
    def step(self, lr: float, number: int, clip: Tensor) -> Tensor:
        """Update every master that has a gradient.

        Args:
            lr: learning rate.
            number: of the optimiser step, from 1.
            clip: [] fp32, multiplies the gradients.

        Returns:
            [] int32, 0 while all of these masters are finite.
        """
        config = self.config
        update = Update(
            number=number,
            lr=lr,
            beta1=config.beta1,
            beta2=config.beta2,
            adam_eps=config.adam_eps,
            weight_decay=config.weight_decay,
            clip=clip,
            broken=torch.zeros((), dtype=torch.int32, device=clip.device),
        )
        for index, (name, master) in enumerate(self.matrices.items()):
            if master.grad is not None:
                adamw_(master, master.grad, *self.moments[name], update, uniform_bits(self.seed, number, index))
        return update.broken

    def tensors(self) -> dict[str, Tensor]:
        """The live moments: `NAME.exp_avg`, `NAME.exp_avg_sq`, and of codes `NAME.exp_avg_scale`, ..."""
        found = {}
        for name, moments in self.moments.items():
            for key, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
                found[f"{name}.{key}"] = moment.values
                if moment.scale is not None:
                    found[f"{name}.{key}_scale"] = moment.scale
        return found


class Optimizer:
    """One AdamW over all masters.

    Args:
        parameters: {name: master}, matrices in the config's format and vectors in FP32.
        config: the rule.
        num_updates: optimiser steps of the whole run, for the schedule.
        fused: one kernel, which holds no temporary tensors; the last bits are its own.
        seed: of stochastic rounding.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        num_updates: int,
        fused: bool = False,
        seed: int = 0,
    ) -> None:
        self.config, self.num_updates, self.update, self.fused = config, num_updates, 0, fused
        self.parameters = dict(parameters)
        matrices = {name: p for name, p in self.parameters.items() if p.ndim > 1}
        vectors = [p for p in self.parameters.values() if p.ndim <= 1]
        self.compact = CompactAdamW(matrices if config.compact else {}, config, seed)
        self.by_torch = {name: p for name, p in self.parameters.items() if name not in self.compact.matrices}
        groups = [
            {"params": [] if config.compact else list(matrices.values()), "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        betas = (config.beta1, config.beta2)
        self.adamw = torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, fused=fused)
        self.offloaded = None
        if config.offload_moments:
            self.offloaded = offload({name: x for name, x in self.moments().items() if not name.endswith(".step")})

    def step(self) -> dict[str, float]:
        """Clip the gradients, update the masters, clear the gradients.

        Returns:
            optimizer/grad_norm before clipping, and optimizer/lr.

        Raises:
            Diverged: a gradient is not finite, and no master has been touched; or a master no longer is.
        """
        gradients = {name: p.grad for name, p in self.parameters.items() if p.grad is not None}
        norm = nn.utils.get_total_norm(gradients.values())
        grad_norm = norm.item()
        if not math.isfinite(grad_norm):
            raise Diverged(f"gradient of optimiser step {self.update}", gradients)
        nn.utils.clip_grads_with_norm_(self.by_torch.values(), self.config.max_grad_norm, norm)
        clip = (self.config.max_grad_norm / (norm.float() + 1e-6)).clamp(max=1.0)  # as torch has it
        lr = self.config.lr_at(self.update, self.num_updates)
        for group in self.adamw.param_groups:
            group["lr"] = lr
        if self.offloaded is not None:
            self.offloaded.to_device()
        self.adamw.step()
        broken = self.compact.step(lr, self.update + 1, clip)
        if broken.logical_or(~self._norm(self.by_torch).isfinite()):  # one wait for the device
            raise Diverged(f"weight after optimiser step {self.update}", self.parameters)
        self._clear_gradients()
        self.update += 1
        return {"optimizer/grad_norm": grad_norm, "optimizer/lr": lr}

    def skip(self) -> dict[str, float]:
        """Clear the gradients and leave the masters as they are. Returns the metrics of a step with a rate of 0."""
        norm = nn.utils.get_total_norm([p.grad for p in self.parameters.values() if p.grad is not None])
        self._clear_gradients()
        return {"optimizer/grad_norm": norm.item(), "optimizer/lr": 0.0}

    def stow_moments(self) -> None:
        """A step's updates are over: where the config says so, the moments go to the host, until `step` needs them."""
        if self.offloaded is not None:
            self.offloaded.to_host()

    def _clear_gradients(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def weight_norm(self) -> float:
        """Of all masters together."""
        return self._norm(self.parameters).item()

    def _norm(self, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        masters = [parameter.detach() for parameter in parameters.values()]
        if self.config.master_format == "bf16":  # whose norms torch would round to BF16
            masters = [torch.linalg.vector_norm(master, dtype=torch.float32) for master in masters]
        return nn.utils.get_total_norm(masters)

    def restore(self, update: int) -> None:
        """Go on from `update`, with the masters and moments that were copied in; gradients of a broken step go."""
        self.update = update
        self._clear_gradients()
        self.stow_moments()

    def moments(self) -> dict[str, Tensor]:
        """The live moments and step counts of AdamW, as `NAME.exp_avg`, `NAME.exp_avg_sq`, `NAME.step`.

        On the device or the host, wherever they lie now; the same bytes in either place.
        Before the first update torch's are made here, as the zeros that AdamW starts from. Those of `CompactAdamW` have
        scales in place of a step.
        """
        for parameter in self.by_torch.values():
            state = self.adamw.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if self.fused else "cpu")
                for name in ("exp_avg", "exp_avg_sq"):
                    state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return {
            f"{name}.{key}": value
            for name, parameter in self.by_torch.items()
            for key, value in self.adamw.state[parameter].items()
        } | self.compact.tensors()
