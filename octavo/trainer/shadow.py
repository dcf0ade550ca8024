"""The shadow of a step: what BF16 would have done to the last mini-batch's ratios."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from octavo.rl.batch import Microbatch, MiniBatch
from octavo.rl.calibration_config import EMAReference, EventTrigger, SnapshotReference
from octavo.rl.losses import ClipBounds
from octavo.rl.mismatch import amplification, overclip_metrics
from octavo.rl.policy_loss import dropped_tokens, policy_losses
from octavo.trainer.calibrating import calibrate_step, drawn_completions, of_drawn, watch_step
from octavo.trainer.config import TrainConfig
from octavo.trainer.policy import packed_logprobs
from octavo.trainer.progress import Progress
from octavo.trainer.run import Run

UNBOUNDED = ClipBounds(low=0.0, high=torch.inf)
"""Of a loss whose clip mask comes from elsewhere."""


def shadow_wanted(config: TrainConfig, progress: Progress, step: int) -> bool:
    """Whether this step looks at the last mini-batch's ratios: calibration does, or over-clipping is reported."""
    watches = config.calibration is not None and isinstance(config.calibration.trigger, EventTrigger)
    return watches or _reported(config, progress, step) or _calibrates(config, progress, step)


def annotate_shadow(run: Run, progress: Progress, mini_batch: MiniBatch, step: int) -> MiniBatch:
    """Add old logprobs of the shadow, and of calibration's reference, as far as the step wants them."""
    config = run.config
    reported = _reported(config, progress, step)
    passes = _calibrates(config, progress, step) and not _carries(config, progress)
    same = _looks_at_all_masters(config)

    def add(microbatch: Microbatch, drawn: Tensor) -> Microbatch:
        old = microbatch.shadow_old_logprobs
        if old is None and reported:
            old = shadow_logprobs(run, microbatch)
        if not passes:
            return replace(microbatch, shadow_old_logprobs=old)
        mine = old if same else of_drawn(microbatch, drawn, run.reference.old_logprobs)
        return replace(microbatch, shadow_old_logprobs=old, reference_old_logprobs=mine)

    draws = drawn_completions(run, mini_batch, step)
    return replace(mini_batch, microbatches=[add(*pair) for pair in zip(mini_batch.microbatches, draws, strict=True)])


def measure_shadow(run: Run, mini_batch: MiniBatch, logprobs: Tensor, progress: Progress, step: int) -> dict[str, Any]:
    """Compare the last mini-batch's ratios with the shadow's; calibrate the bounds when that is called for.

    Args:
        run, mini_batch: `annotate_shadow` has seen the mini-batch; its update is to come.
        logprobs: [T] fp32 of it, training numerics.
        progress: its bounds, pool and watch change.
        step: from 0.
    """
    config, metrics = run.config, dict[str, Any]()
    shadow = None
    if _reported(config, progress, step):
        shadow = torch.cat([shadow_logprobs(run, microbatch) for microbatch in mini_batch.microbatches])
        names = ("old_logprobs", "shadow_old_logprobs", "advantages", "loss_mask")
        old, shadow_old, advantages, mask = (mini_batch.gather(name) for name in names)
        ratio, shadow_ratio = torch.exp(logprobs - old), torch.exp(shadow - shadow_old)
        metrics |= overclip_metrics(ratio, shadow_ratio, advantages, mask, config.algorithm.clip)
        metrics |= amplification(logprobs, shadow, old, shadow_old, mask)
    if config.calibration is None:
        return metrics
    if _calibrates(config, progress, step):
        on_masters = shadow if _looks_at_all_masters(config) else None
        return metrics | calibrate_step(run, mini_batch, logprobs, on_masters, progress, step)
    return metrics | watch_step(run, mini_batch, logprobs, progress)


@torch.no_grad()
def with_shadow(run: Run, mini_batch: MiniBatch) -> MiniBatch:
    """Add old logprobs of the shadow, for a loss that takes ratios from it."""
    microbatches = [replace(each, shadow_old_logprobs=shadow_logprobs(run, each)) for each in mini_batch.microbatches]
    return replace(mini_batch, microbatches=microbatches)


def shadow_logprobs(run: Run, microbatch: Microbatch) -> Tensor:
    """[T] fp32 of the shadow on the masters, without gradient."""
    return packed_logprobs(run.shadow, microbatch, run.config.rollout.sampling.temperature, shadow=True)[0]


def loss_of_shadow(
    run: Run, microbatch: Microbatch, logprobs: Tensor, bounds: ClipBounds | None, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """A loss that takes its ratio, or only its clip mask, from the shadow.

    Args:
        run: its algorithm names the shadow.
        microbatch: with shadow_old_logprobs.
        logprobs: [T] fp32, policy in training; the only input with a gradient.
        bounds: on the shadow's ratio.
        weights: [T] fp32, w.

    Returns:
        [T] fp32 loss of each token, and [T] bool, the tokens that it drops.
    """
    algorithm = run.config.algorithm
    assert microbatch.shadow_old_logprobs is not None
    moved = shadow_logprobs(run, microbatch) - microbatch.shadow_old_logprobs
    seen = replace(microbatch, old_logprobs=logprobs.detach() - moved)  # against which training's ratio is the shadow's
    dropped = dropped_tokens(algorithm.loss, logprobs, seen, bounds)
    if algorithm.ratio_from != "training":
        return policy_losses(algorithm.loss, logprobs, seen, bounds, weights), dropped
    losses = policy_losses(algorithm.loss, logprobs, microbatch, UNBOUNDED, weights)
    return torch.where(dropped, losses.detach(), losses), dropped


def _reported(config: TrainConfig, progress: Progress, step: int) -> bool:
    """Whether over-clipping is reported: at its interval, and where calibration makes the same passes anyway."""
    interval = config.trainer.shadow_interval
    if interval > 0 and (step + 1) % interval == 0:
        return True
    return _calibrates(config, progress, step) and _looks_at_all_masters(config) and not _carries(config, progress)


def _calibrates(config: TrainConfig, progress: Progress, step: int) -> bool:
    return config.calibration is not None and progress.watch.measures(step, config.calibration)


def _carries(config: TrainConfig, progress: Progress) -> bool:
    return config.calibration is not None and progress.watch.carries(config.calibration)


def _looks_at_all_masters(config: TrainConfig) -> bool:
    """Whether calibration's reference is the shadow of every token on the masters."""
    calibration = config.calibration
    if calibration is None or calibration.shadow_share < 1.0:
        return False
    return not isinstance(calibration.reference, EMAReference | SnapshotReference)
