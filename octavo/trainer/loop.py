"""The training loop: rollout, rewards, advantages, several optimiser steps, calibration. One page, one verb a line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.layers.linear import quantized_layers
from octavo.models.checkpoint import save_decoder
from octavo.models.decoder import Decoder
from octavo.rl import calibration
from octavo.rl.advantages import group_relative
from octavo.rl.batch import Microbatch, MiniBatch, pack
from octavo.rl.calibration import CalibrationStatistics
from octavo.rl.losses import clip_metrics, kl_estimate, ppo_clip, reduce_loss
from octavo.rl.mismatch import amplification, mismatch_metrics, overclip_metrics, tis_weights
from octavo.rollout.engine import Completion
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import to_dict
from octavo.trainer.evaluation import evaluate
from octavo.trainer.metrics import Display, StepClock
from octavo.trainer.optimizer import Optimizer
from octavo.trainer.policy import packed_logprobs
from octavo.trainer.run import TRAINING, EncodedProblem, Run, load_reference, load_run, make_optimizer, open_output
from octavo.trainer.trackers import Trackers


def train(config: TrainConfig, display: Display) -> Path:
    """Run the whole training.

    Returns:
        The run's folder: config.yaml, metrics.jsonl, and model/, a Hugging Face folder.
    """
    config.tracking.check()
    run = load_run(config, display)
    reference = load_reference(config)
    optimizer = make_optimizer(run)
    metrics_file = open_output(config, run.policy)
    trackers = Trackers(Path(config.output_dir), config.tracking, to_dict(config), display)
    pool: list[CalibrationStatistics] = []
    interval, num_steps = config.evaluation.interval, config.trainer.num_steps
    first = evaluate(run) if interval else {}
    if first:
        display.line(f"before training: eval {first['eval/accuracy']:.3f} of {first['eval/num_problems']:.0f} problems")
    for step in range(num_steps):
        clock = StepClock()
        metrics: dict[str, Any] = {"step": step, "policy_version": optimizer.update}
        metrics |= train_step(run, optimizer, reference, step, pool, clock)
        if interval and ((step + 1) % interval == 0 or step + 1 == num_steps):
            with clock.phase("evaluate"):
                metrics |= evaluate(run)
        if step == 0:
            metrics |= {key.replace("eval/", "eval/initial_"): value for key, value in first.items()}
        metrics |= clock.finish()
        metrics_file.append(metrics)
        trackers.log(step, metrics)
        display.step(metrics, num_steps)
    trackers.close()
    save_decoder(run.policy, Path(config.output_dir) / "model", config.model.path)
    return Path(config.output_dir)


def train_step(
    run: Run,
    optimizer: Optimizer,
    reference: Decoder | None,
    step: int,
    pool: list[CalibrationStatistics],
    clock: StepClock,
) -> dict[str, Any]:
    """One rollout and its optimiser steps. Moves `run.bounds` when calibration is due; returns the step's metrics."""
    config, policy = run.config, run.policy
    metrics: dict[str, Any] = {}
    policy.freeze_activation_scales_()
    with clock.phase("rollout"):
        problems = run.problems_of_step(step)  # P prompts
        completions = sample(run, problems, step)  # P x G
        rewards = score(run, problems, completions)  # [P, G]
        advantages = group_relative(rewards, config.algorithm.advantage)  # [P, G]
        mini_batches = pack(  # microbatches of [T]
            completions,
            advantages,
            num_mini_batches=config.trainer.num_mini_batches,
            microbatch_tokens=config.trainer.microbatch_tokens,
            device=config.device,
        )
    metrics |= rollout_metrics(completions, rewards, advantages)

    measures = shadow_wanted(config, step)
    with clock.phase("old_logprobs"):
        mini_batches = [annotate(run, reference, batch) for batch in mini_batches]  # old, ref logprobs
        metrics |= check_mismatch(run, mini_batches)
    if measures:
        with clock.phase("shadow"):
            mini_batches[-1] = annotate_shadow(run, mini_batches[-1])  # BF16 shadow, old

    metrics |= {"clip/low": run.bounds.low, "clip/high": run.bounds.high}
    with run.display.bar("update", sum(len(batch.microbatches) for batch in mini_batches)) as advance:
        for mini_batch in mini_batches:
            with clock.phase("update"):
                logprobs, learned = accumulate(run, mini_batch, advance)  # forward, loss, backward
            if measures and mini_batch is mini_batches[-1]:
                with clock.phase("shadow"):
                    metrics |= measure_shadow(run, mini_batch, logprobs, step, pool)  # before its update
            with clock.phase("update"):
                learned |= optimizer.step()
                policy.requantize_()  # the engine's bytes too
    if policy.recipe.static_activation_scale:
        metrics["precision/saturated_share"] = saturated_share(policy)
    return metrics | learned


def sample(run: Run, problems: list[EncodedProblem], step: int) -> list[list[Completion]]:
    """P groups of G completions with rollout_logprobs."""
    rollout = run.config.rollout
    with run.display.bar("rollout", len(problems) * rollout.group_size) as advance:
        return run.engine.generate(
            [problem.prompt for problem in problems],
            rollout.sampling,
            max_completion_tokens=rollout.max_completion_tokens,
            group_size=rollout.group_size,
            seed=run.seed(TRAINING, step),
            progress=advance,
        )


def score(run: Run, problems: list[EncodedProblem], completions: list[list[Completion]]) -> Tensor:
    """Rewards [P, G] fp32."""
    return torch.tensor(
        [
            [run.task.score(encoded.problem, run.decode(completion.tokens)) for completion in group]
            for encoded, group in zip(problems, completions, strict=True)
        ]
    )


@torch.no_grad()
def annotate(run: Run, reference: Decoder | None, mini_batch: MiniBatch) -> MiniBatch:
    """Add old logprobs from an independent packed forward, and the reference's."""
    temperature = run.config.rollout.sampling.temperature

    def add(microbatch: Microbatch) -> Microbatch:
        old_logprobs, _ = packed_logprobs(run.policy, microbatch, temperature)
        ref_logprobs = None if reference is None else packed_logprobs(reference, microbatch, temperature)[0]
        return replace(microbatch, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs)

    return replace(mini_batch, microbatches=[add(microbatch) for microbatch in mini_batch.microbatches])


def annotate_shadow(run: Run, mini_batch: MiniBatch) -> MiniBatch:
    """Add the BF16 shadow's old logprobs."""
    return replace(
        mini_batch,
        microbatches=[
            replace(microbatch, shadow_old_logprobs=_shadow_logprobs(run, microbatch))
            for microbatch in mini_batch.microbatches
        ],
    )


def accumulate(run: Run, mini_batch: MiniBatch, advance: Any) -> tuple[Tensor, dict[str, float]]:
    """Forward, loss and backward of every microbatch.

    Returns:
        logprobs of the mini-batch before its update, [T] fp32 without gradient, and the loss metrics.
    """
    algorithm, rollout = run.config.algorithm, run.config.rollout
    total_loss, total_entropy, total_kl, parts = 0.0, 0.0, 0.0, []
    for microbatch in mini_batch.microbatches:
        logprobs, entropy = packed_logprobs(run.policy, microbatch, rollout.sampling.temperature)
        old_logprobs = microbatch.old_logprobs
        assert old_logprobs is not None
        weights = tis_weights(old_logprobs, microbatch.rollout_logprobs, algorithm.tis_cap)
        token_losses = ppo_clip(logprobs, old_logprobs, microbatch.advantages, run.bounds, weights)
        if microbatch.ref_logprobs is not None:
            kl = kl_estimate(logprobs, microbatch.ref_logprobs, algorithm.kl.estimator)
            token_losses = token_losses + algorithm.kl.coefficient * kl
            total_kl += kl.detach()[microbatch.loss_mask].sum().item()
        loss = reduce_loss(
            token_losses,
            microbatch.loss_mask,
            microbatch.sequence_index,
            algorithm.reduction,
            num_loss_tokens=mini_batch.num_loss_tokens,
            num_sequences=mini_batch.num_sequences,
            max_completion_tokens=rollout.max_completion_tokens,
        )
        loss.backward()
        total_loss += loss.item()
        total_entropy += entropy.sum().item()
        parts.append(logprobs.detach())
        advance(1)
    logprobs = torch.cat(parts)
    ratio = torch.exp(logprobs - mini_batch.gather("old_logprobs"))
    mask = mini_batch.gather("loss_mask")
    metrics = {
        "loss/policy": total_loss,
        "policy/entropy": total_entropy / mini_batch.num_loss_tokens,
        "policy/ratio_std": ratio[mask].std(correction=0).item(),
        **clip_metrics(ratio, mini_batch.gather("advantages"), mask, run.bounds),
    }
    if mini_batch.microbatches[0].ref_logprobs is not None:
        metrics["loss/kl"] = total_kl / mini_batch.num_loss_tokens
    return logprobs, metrics


def measure_shadow(
    run: Run, mini_batch: MiniBatch, logprobs: Tensor, step: int, pool: list[CalibrationStatistics]
) -> dict[str, Any]:
    """Compare the last mini-batch's ratios with the BF16 shadow's; calibrate the bounds when that is due."""
    config = run.config
    shadow = torch.cat([_shadow_logprobs(run, microbatch) for microbatch in mini_batch.microbatches])
    names = ("old_logprobs", "shadow_old_logprobs", "advantages", "loss_mask", "rollout_logprobs")
    old, shadow_old, advantages, mask, rollout_logprobs = (mini_batch.gather(name) for name in names)
    ratio, shadow_ratio = torch.exp(logprobs - old), torch.exp(shadow - shadow_old)
    metrics: dict[str, Any] = overclip_metrics(ratio, shadow_ratio, advantages, mask, config.algorithm.clip)
    metrics |= amplification(logprobs, shadow, old, shadow_old, mask)
    if config.calibration is None or not calibration.measured(step, config.calibration):
        return metrics
    weights = tis_weights(old, rollout_logprobs, config.algorithm.tis_cap)
    pool.append(
        calibration.measure(ratio, shadow_ratio, weights, advantages, mask, config.algorithm.clip, config.calibration)
    )
    if calibration.due(step, config.calibration):
        statistics = sum(pool[1:], pool[0])
        result = calibration.calibrate(run.bounds, statistics, config.calibration)
        metrics |= calibration.to_metrics(run.bounds, statistics, result)
        run.bounds = result.bounds
        pool.clear()
    return metrics


def shadow_wanted(config: TrainConfig, step: int) -> bool:
    """Whether this step runs the BF16 shadow: calibration measures, or over-clipping is to be reported."""
    interval = config.trainer.shadow_interval
    reported = interval > 0 and (step + 1) % interval == 0
    return reported or (config.calibration is not None and calibration.measured(step, config.calibration))


def check_mismatch(run: Run, mini_batches: list[MiniBatch]) -> dict[str, Any]:
    """Mismatch of rollout and training over all loss tokens.

    Raises:
        ValueError: it is not exactly 0 although the recipe promises that, and `trainer.require_exact` is set.
    """
    names = ("old_logprobs", "rollout_logprobs", "loss_mask")
    old, rollout_logprobs, mask = (torch.cat([batch.gather(name) for batch in mini_batches]) for name in names)
    metrics: dict[str, Any] = mismatch_metrics(old, rollout_logprobs, mask, run.config.algorithm.tis_cap)
    largest = metrics["mismatch/max_abs_logprob_diff"]
    recipe = run.policy.recipe
    if largest != 0.0 and recipe.batch_invariant and run.config.trainer.require_exact:
        raise ValueError(
            f"rollout and training disagree by up to {largest:.3g} in a token's log-probability, under recipe "
            f"{recipe.name!r} that promises bit-equality. The engine's bytes differ from the trainer's, or this "
            f"device sums differently. trainer.require_exact=false goes on, with importance weights as the correction"
        )
    return metrics


def rollout_metrics(completions: list[list[Completion]], rewards: Tensor, advantages: Tensor) -> dict[str, Any]:
    """Rewards and completions of a rollout."""
    flat = [completion for group in completions for completion in group]
    lengths = torch.tensor([float(len(completion.tokens)) for completion in flat])
    return {
        "reward/mean": rewards.mean().item(),
        "reward/std": rewards.std(correction=0).item(),
        "reward/informative_groups_share": (advantages != 0).any(dim=1).float().mean().item(),
        "completion/length_mean": lengths.mean().item(),
        "completion/length_max": lengths.max().item(),
        "completion/truncated_share": sum(c.finish_reason == "length" for c in flat) / len(flat),
    }


def saturated_share(policy: Decoder) -> float:
    """Share of activations beyond a static scale since it was frozen."""
    layers = [layer for layer in quantized_layers(policy) if layer.quantized]
    counts = torch.stack([layer.saturation_counts for layer in layers]).sum(dim=0)
    return (counts[0] / counts[1].clamp(min=1)).item()


def _shadow_logprobs(run: Run, microbatch: Microbatch) -> Tensor:
    return packed_logprobs(run.policy, microbatch, run.config.rollout.sampling.temperature, shadow=True)[0]
