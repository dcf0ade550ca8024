"""Calibrated clipping between verl's engine and its policy loss, which share no state but what runs around a call.

engine    before a step's first update    keeps a BF16 copy of the masters, if the step is measured
          before its last one             runs the shadow on that copy and on the masters
          around each mini-batch          `during(calibrator)`
loss      each microbatch                 reads the bounds, and has the calibrator measure its ratios
engine    after the last update           `finish`: adds up over all ranks, moves the bounds
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from octavo.rl import calibration
from octavo.rl.calibration import Config, Statistics
from octavo.rl.losses import ClipBounds, ClipConfig

_CURRENT: ContextVar[Calibrator] = ContextVar("calibrator")


@dataclass(kw_only=True)
class Calibrator:
    """The bounds, the same on every rank, and what the next ones are computed from."""

    config: Config
    """When to calibrate, where bounds may lie, how fast they move."""
    bounds: ClipBounds
    """The present ones."""
    step: int = 0
    """verl's steps so far."""
    pool: list[Statistics] = field(default_factory=list)
    """Of earlier measured steps, over all ranks."""
    parts: list[Statistics] = field(default_factory=list)
    """Of this step's last mini-batch, this rank's microbatches."""
    shadow_log_ratio: Tensor | None = None
    """[B, L] log r_bf16 of the microbatch in work; None where it is not measured."""

    @property
    def measures(self) -> bool:
        """Whether statistics are gathered in this step."""
        return calibration.measured(self.step, self.config)

    def observe(
        self, log_ratio: Tensor, weights: Tensor, advantages: Tensor, loss_mask: Tensor, clip: ClipConfig
    ) -> None:
        """Measure a microbatch, if it is due. Tensors are [B, L] as verl pads them; clip, the plain bounds."""
        if self.shadow_log_ratio is not None:
            ratios = (log_ratio.detach().exp(), self.shadow_log_ratio.exp())
            self.parts.append(calibration.measure(*ratios, weights, advantages, loss_mask, clip, self.config))

    def finish(self, group: Any) -> dict[str, float]:
        """End a step: pool what was measured on all ranks of a process group, and move the bounds when due.

        Returns:
            Metrics of a calibration; none on other steps.

        Raises:
            ValueError: the step was to be measured, and no loss has.
        """
        measured, due = self.measures, calibration.due(self.step, self.config)
        self.step, self.shadow_log_ratio = self.step + 1, None
        if not measured:
            return {}
        gathered: list[Any] = [None] * torch.distributed.get_world_size(group)
        torch.distributed.all_gather_object(gathered, self.parts, group=group)
        parts = [part for rank in gathered for part in rank]
        if not parts:
            raise ValueError(
                "calibration is on, but the policy loss does not calibrate: set "
                "actor.policy_loss.loss_mode=calibrated, or leave out actor.fsdp_config.octavo.calibration"
            )
        self.pool.append(calibration.add_up(parts))
        self.parts = []
        if not due:
            return {}
        before, pooled = self.bounds, calibration.add_up(self.pool)
        self.pool = []
        result = calibration.calibrate(before, pooled, self.config)
        self.bounds = result.bounds
        if result.skipped and torch.distributed.get_rank() == 0:
            print(f"octavo: step {self.step}: calibration skipped: {result.skipped}", flush=True)
        numbers = calibration.to_metrics(before, pooled, result)
        shown = {name: float(x) for name, x in numbers.items() if isinstance(x, int | float)}
        return shown | {"calibration/is_skipped": float(bool(result.skipped))}

    def to_json(self) -> dict[str, Any]:
        """What a checkpoint keeps, between steps."""
        return {
            "step": self.step,
            "bounds": asdict(self.bounds),
            "pool": [asdict(statistics) for statistics in self.pool],
        }

    def load(self, data: dict[str, Any]) -> None:
        """Take up what `to_json` gave."""
        self.step, self.bounds = data["step"], ClipBounds(**data["bounds"])
        self.pool = [calibration.read_statistics(statistics) for statistics in data["pool"]]


@contextmanager
def during(calibrator: Calibrator) -> Iterator[None]:
    """Within, `current` is this calibrator."""
    token = _CURRENT.set(calibrator)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current() -> Calibrator:
    """The calibrator of the engine that runs the loss.

    Raises:
        ValueError: it has none.
    """
    calibrator = _CURRENT.get(None)
    if calibrator is None:
        raise ValueError(
            "policy loss 'calibrated' takes its bounds from the engine: set actor.strategy=octavo and "
            "actor.fsdp_config.octavo.calibration, as docs/verl.md shows"
        )
    return calibrator
