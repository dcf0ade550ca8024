"""The BF16 shadow of a step: what the masters would have done to the last mini-batch's ratios, and bounds from that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from octavo.rl import calibration
from octavo.rl.batch import Microbatch, MiniBatch
from octavo.rl.mismatch import amplification, overclip_metrics
from octavo.trainer.config import TrainConfig
from octavo.trainer.policy import gathered_weights, packed_logprobs
from octavo.trainer.progress import Progress
from octavo.trainer.run import Run


def shadow_wanted(config: TrainConfig, step: int) -> bool:
    """Whether this step runs the BF16 shadow: calibration measures, or over-clipping is to be reported."""
    interval = config.trainer.shadow_interval
    reported = interval > 0 and (step + 1) % interval == 0
    return reported or (config.calibration is not None and calibration.measured(step, config.calibration))


def annotate_shadow(run: Run, mini_batch: MiniBatch) -> MiniBatch:
    """Add the BF16 shadow's old logprobs."""
    return replace(
        mini_batch,
        microbatches=[
            replace(microbatch, shadow_old_logprobs=_shadow_logprobs(run, microbatch))
            for microbatch in mini_batch.microbatches
        ],
    )


def measure_shadow(run: Run, mini_batch: MiniBatch, logprobs: Tensor, progress: Progress, step: int) -> dict[str, Any]:
    """Compare the last mini-batch's ratios with the BF16 shadow's; calibrate the bounds when that is due."""
    config = run.config
    shadow = torch.cat([_shadow_logprobs(run, microbatch) for microbatch in mini_batch.microbatches])
    names = ("old_logprobs", "shadow_old_logprobs", "advantages", "loss_mask")
    old, shadow_old, advantages, mask = (mini_batch.gather(name) for name in names)
    ratio, shadow_ratio = torch.exp(logprobs - old), torch.exp(shadow - shadow_old)
    metrics: dict[str, Any] = overclip_metrics(ratio, shadow_ratio, advantages, mask, config.algorithm.clip)
    metrics |= amplification(logprobs, shadow, old, shadow_old, mask)
    if config.calibration is None or not calibration.measured(step, config.calibration):
        return metrics
    weights = gathered_weights(config, mini_batch)
    progress.pool.append(
        calibration.measure(ratio, shadow_ratio, weights, advantages, mask, config.algorithm.clip, config.calibration)
    )
    if calibration.due(step, config.calibration):
        statistics = sum(progress.pool[1:], progress.pool[0])
        result = calibration.calibrate(progress.bounds, statistics, config.calibration)
        metrics |= calibration.to_metrics(progress.bounds, statistics, result)
        progress.bounds = result.bounds
        progress.pool.clear()
    return metrics


def _shadow_logprobs(run: Run, microbatch: Microbatch) -> Tensor:
    return packed_logprobs(run.policy, microbatch, run.config.rollout.sampling.temperature, shadow=True)[0]
