"""Calibration in a step: the reference's passes over the completions drawn, statistics, and the bounds' next move."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.rl import calibration
from octavo.rl.batch import Microbatch, MiniBatch, select
from octavo.rl.calibration import Calibration, Statistics
from octavo.rl.calibration_config import EventTrigger
from octavo.rl.calibration_losses import Samples, plain_clip, samples_of, scale_of
from octavo.rl.calibration_statistics import ShadowShares
from octavo.rl.calibration_trigger import look_out
from octavo.rl.losses import share
from octavo.trainer.policy import weights_of
from octavo.trainer.progress import Progress
from octavo.trainer.run import SHADOW, Run


def drawn_completions(run: Run, mini_batch: MiniBatch, step: int) -> list[Tensor]:
    """For each microbatch [N] bool: the completions that calibration looks at in a step, shadow_share of all."""
    sizes = [len(microbatch.cu_seqlens) - 1 for microbatch in mini_batch.microbatches]
    config, total = run.config.calibration, sum(sizes)
    drawn = torch.ones(total, dtype=torch.bool)
    if config is not None and config.shadow_share < 1.0:
        generator = torch.Generator().manual_seed(run.seed(SHADOW, step))
        order = torch.randperm(total, generator=generator)
        drawn[order[max(1, round(config.shadow_share * total)) :]] = False
    return list(drawn.to(run.config.device).split(sizes))


def of_drawn(microbatch: Microbatch, drawn: Tensor, logprobs: Callable[[Microbatch], Tensor]) -> Tensor:
    """[T] fp32 log-probabilities of the completions drawn, [N] bool; 0 in the others, which are not run."""
    if not drawn.any():
        return torch.zeros(len(microbatch.tokens), device=drawn.device)
    tokens = drawn[microbatch.sequence_index]
    of_some = logprobs(select(microbatch, drawn))
    return torch.zeros(len(tokens), device=of_some.device).masked_scatter(tokens, of_some)


def calibrate_step(
    run: Run, mini_batch: MiniBatch, logprobs: Tensor, on_masters: Tensor | None, progress: Progress, step: int
) -> dict[str, Any]:
    """Add the step's statistics to the pool; move the bounds where it is full.

    Args:
        run, mini_batch: the last mini-batch, before its update.
        logprobs: [T] fp32 of it, training numerics.
        on_masters: [T] fp32 of the shadow, where that is the reference; None where the reference runs on its own.
        progress: its bounds, pool and watch change.
        step: from 0.

    Returns:
        The metrics of a calibration; none before the pool is full.
    """
    config, watch = run.config.calibration, progress.watch
    assert config is not None
    draws, own = drawn_completions(run, mini_batch, step), _log_ratios(mini_batch, logprobs)
    pairs = list(zip(mini_batch.microbatches, draws, strict=True))
    masks = [part.loss_mask & drawn[part.sequence_index] for part, drawn in pairs]
    finishes, carries = watch.finishes(step, config, len(progress.pool) + 1), watch.carries(config)
    alarm, metrics = "", dict[str, Any]()
    if carries:
        assert watch.shares is not None
        statistics = watch.shares.carried_to(_statistics(run, _samples(run, mini_batch, own, own, masks)))
    else:
        if on_masters is None:
            now = [of_drawn(*pair, run.reference.now) for pair in pairs]
        else:
            now = _parts(mini_batch, on_masters)
        moved = [run.reference.log_ratio(part, each) for part, each in zip(mini_batch.microbatches, now, strict=True)]
        statistics = _statistics(run, _samples(run, mini_batch, own, moved, masks))
        if finishes and config.max_shadow_noise is not None:
            after = [of_drawn(*pair, run.reference.after_null_change) for pair in pairs]
            found = torch.cat(masks)
            noise = torch.cat(moved)[found].std(correction=0).item()
            null = (torch.cat(after) - torch.cat(now))[found].std(correction=0).item()
            metrics = {"calibration/shadow_noise": noise, "calibration/null_noise": null}
            alarm = noise_alarm(noise, null, config.max_shadow_noise)
    progress.pool.append(statistics)
    if not finishes:
        return {}
    pooled = calibration.add_up(progress.pool)
    progress.pool.clear()
    scale = scale_of(run.config.algorithm.loss)
    result = calibration.calibrate(progress.bounds, pooled, config, scale)
    if alarm:
        result = Calibration(bounds=progress.bounds, target=None, skipped=alarm)
    metrics |= calibration.to_metrics(progress.bounds, pooled, result)
    metrics |= {
        "calibration/called_by": watch.event or "interval",
        "calibration/reference": "carried" if carries else run.reference.name,
        "calibration/reference_bytes": float(run.reference.num_bytes),
        "calibration/shadow_tokens": 0.0 if carries else float(torch.cat(masks).sum()),
    }
    if scale.low is not None and pooled.num_negative:
        alpha, low = calibration.low_intervals(pooled, config, scale)
        metrics |= {"calibration/alpha_low_interval": list(alpha), "calibration/target_low_interval": list(low)}
    watch.calibrated(None if carries or result.skipped else ShadowShares.of(pooled))
    progress.bounds = result.bounds
    return metrics


def watch_step(run: Run, mini_batch: MiniBatch, logprobs: Tensor, progress: Progress) -> dict[str, Any]:
    """A step without calibration: count it and, under a trigger by events, see whether the last one still holds."""
    config = run.config.calibration
    assert config is not None
    progress.watch.since += 1
    if not isinstance(config.trigger, EventTrigger):
        return {}
    own = _log_ratios(mini_batch, logprobs)
    samples = _samples(run, mini_batch, own, own, [part.loss_mask for part in mini_batch.microbatches])
    punished = samples.loss_mask & (samples.advantages < 0)
    low_share = share(samples.ratio <= progress.bounds.low, punished, (samples.ratio[punished],))
    scale = scale_of(run.config.algorithm.loss)
    return look_out(progress.watch, progress.bounds, _statistics(run, samples), low_share, config, scale)


def noise_alarm(noise: float, null: float, most: float) -> str:
    """Why BF16 is no reference; empty where std(log r_bf16) is at most so many times that of the null line."""
    if noise <= most * null:
        return ""
    return (
        f"std(log r_bf16) is {noise:.3g}, more than max_shadow_noise={most:g} times the null line's {null:.3g}: BF16 "
        f"itself runs away"
    )


def _parts(mini_batch: MiniBatch, values: Tensor) -> list[Tensor]:
    """[T] values of a mini-batch by its microbatches."""
    return list(values.split([len(microbatch.tokens) for microbatch in mini_batch.microbatches]))


def _log_ratios(mini_batch: MiniBatch, logprobs: Tensor) -> list[Tensor]:
    """[T] log r_fp8 of each microbatch."""
    return _parts(mini_batch, logprobs - mini_batch.gather("old_logprobs"))


def _samples(
    run: Run, mini_batch: MiniBatch, log_ratios: list[Tensor], shadow_log_ratios: list[Tensor], masks: list[Tensor]
) -> Samples:
    """What calibration counts in a mini-batch."""
    loss = run.config.algorithm.loss
    rows = zip(mini_batch.microbatches, log_ratios, shadow_log_ratios, masks, strict=True)
    return Samples.joined(
        [samples_of(loss, part, mine, theirs, weights_of(run.config, part), mask) for part, mine, theirs, mask in rows]
    )


def _statistics(run: Run, samples: Samples) -> Statistics:
    algorithm, config = run.config.algorithm, run.config.calibration
    assert config is not None
    clip, scale = plain_clip(algorithm.loss, algorithm.clip), scale_of(algorithm.loss)
    return calibration.measure(**samples.tensors(), clip=clip, config=config, scale=scale)
