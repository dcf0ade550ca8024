"""One training step: rollout, rewards, advantages, several optimiser steps, calibration. One page, one verb a line."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from octavo.layers.linear import quantized_layers
from octavo.models.decoder import Decoder
from octavo.rl import calibration
from octavo.rl.advantages import estimate_advantages, subtract_kl
from octavo.rl.batch import Microbatch, MiniBatch, pack
from octavo.rl.corrections import correction_metrics, correction_weights
from octavo.rl.entropy import entropy_metrics
from octavo.rl.loss_clipped import BAPO, M2PO
from octavo.rl.losses import ClipBounds, clip_metrics, kl_estimate, reduce_loss
from octavo.rl.mismatch import amplification, mismatch_by_position, mismatch_metrics, overclip_metrics
from octavo.rl.overlong import overlong_penalty
from octavo.rl.policy_loss import chosen_bounds, dropped_tokens, fixed_bounds, policy_losses
from octavo.rollout.engine import Completion
from octavo.rollout.sampler import NonFiniteLogits
from octavo.trainer.config import TrainConfig
from octavo.trainer.divergence import Diverged, StepRecord
from octavo.trainer.optimizer import Optimizer
from octavo.trainer.policy import packed_logprobs
from octavo.trainer.progress import Progress
from octavo.trainer.run import TRAINING, EncodedProblem, Run
from octavo.trainer.scoring import Scored, Scoring, audited, scoring_faults, scoring_metrics


def train_step(
    run: Run, optimizer: Optimizer, reference: Decoder | None, progress: Progress, record: StepRecord
) -> dict[str, Any]:
    """One rollout and its optimiser steps.

    Args:
        run, optimizer, reference: what is trained, and the frozen model of the KL penalty.
        progress: its bounds and pool move when calibration is due.
        record: the clock of the step, and what to save should it fail.

    Returns:
        The step's metrics.

    Raises:
        StopRequested: during the rollout or the old log-probabilities; nothing but static scales has changed.
        Diverged: a logit, loss, gradient or weight is not finite.
    """
    config, policy, clock, step = run.config, run.policy, record.clock, record.step
    metrics: dict[str, Any] = {}
    for decoder in run.decoders:
        decoder.freeze_activation_scales_()
    with clock.phase("rollout"):
        problems = run.problems_of_step(step)  # P prompts
        record.prompts = [encoded.problem.id for encoded in problems]
        scoring = Scoring(run, run.task, problems, config.rollout.group_size, config.reward)
        completions = sample(run, problems, step, scoring.add)  # P x G, judged as they come
    with clock.phase("reward_wait"):
        scored = scoring.gather()  # P x G
    with clock.phase("rollout"):
        rewards = score(scored)  # [P, G]
        advantages, shaping = judge(config, completions, rewards)  # [P, G]
        mini_batches = batches(config, completions, advantages)  # microbatches of [T]
    metrics |= rollout_metrics(completions, rewards) | scoring_metrics(problems, scored) | shaping
    record.samples = logged_samples(run, problems, completions, scored, advantages)
    record.audited = [audited(p.problem, each) for p, group in zip(problems, scored, strict=True) for each in group]
    for fault in scoring_faults(scored):
        run.display.line(f"warning: step {step + 1}: {fault}")

    measures = shadow_wanted(config, step)
    with clock.phase("old_logprobs"):
        mini_batches = [annotate(run, reference, batch) for batch in mini_batches]  # old, ref logprobs
        metrics |= check_mismatch(run, mini_batches)
    if measures:
        with clock.phase("shadow"):
            mini_batches[-1] = annotate_shadow(run, mini_batches[-1])  # BF16 shadow, old

    with run.display.bar("update", sum(len(batch.microbatches) for batch in mini_batches)) as advance:
        for index, mini_batch in enumerate(mini_batches):
            record.mini_batch_index, record.mini_batch = index, mini_batch
            with clock.phase("update"):
                logprobs, learned = accumulate(run, mini_batch, progress.bounds, advance)  # forward, loss, backward
            if measures and mini_batch is mini_batches[-1]:
                with clock.phase("shadow"):
                    metrics |= measure_shadow(run, mini_batch, logprobs, progress, step)  # before its update
            with clock.phase("update"):
                learned |= optimizer.step()
                for decoder in run.decoders:
                    decoder.requantize_()  # the engine's bytes too
    if policy.recipe.static_activation_scale:
        metrics["precision/saturated_share"] = saturated_share(policy)
    return metrics | learned


def sample(
    run: Run,
    problems: list[EncodedProblem],
    step: int,
    on_completion: Callable[[int, int, Completion], None] | None = None,
) -> list[list[Completion]]:
    """P groups of G completions with rollout_logprobs; `on_completion` is told of each as it finishes."""
    rollout = run.config.rollout
    with run.display.bar("rollout", len(problems) * rollout.group_size) as advance:
        try:
            return run.engine.generate(
                [problem.prompt for problem in problems],
                rollout.sampling,
                max_completion_tokens=rollout.max_completion_tokens,
                group_size=rollout.group_size,
                seed=run.seed(TRAINING, step),
                progress=run.on_step(advance),
                on_completion=on_completion,
            )
        except NonFiniteLogits as error:
            raise Diverged(f"rollout ({error})", dict(run.policy.named_parameters())) from error


def score(scored: list[list[Scored]]) -> Tensor:
    """Rewards [P, G] fp32."""
    return torch.tensor([[each.reward for each in group] for group in scored])


def judge(config: TrainConfig, completions: list[list[Completion]], rewards: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Advantages [P, G] fp32 of rewards less the overlong penalty, and what that penalty was."""
    num_tokens = torch.tensor([[len(completion.tokens) for completion in group] for group in completions])
    penalty = overlong_penalty(num_tokens, config.rollout.max_completion_tokens, config.algorithm.overlong)
    shaped = rewards - penalty
    metrics = {"reward/informative_groups_share": (shaped != shaped[:, :1]).any(dim=1).float().mean().item()}
    if config.algorithm.overlong.buffer_tokens:
        metrics["reward/overlong_penalty_mean"] = penalty.mean().item()
    return estimate_advantages(shaped, num_tokens, config.algorithm.advantage), metrics


def batches(config: TrainConfig, completions: list[list[Completion]], advantages: Tensor) -> list[MiniBatch]:
    """Mini-batches of what enters the loss.

    Raises:
        ValueError: every completion was cut off, and those are left out.
    """
    mini_batches = pack(
        completions,
        advantages,
        num_mini_batches=config.trainer.num_mini_batches,
        microbatch_tokens=config.trainer.microbatch_tokens,
        device=config.device,
        leave_out_truncated=config.algorithm.overlong.filter_truncated,
    )
    if not mini_batches:
        raise ValueError(
            f"every completion of a step was cut off at rollout.max_completion_tokens="
            f"{config.rollout.max_completion_tokens}, and algorithm.overlong.filter_truncated=true leaves none in the "
            f"loss. Raise the limit, or use filter_truncated: false"
        )
    return mini_batches


@torch.no_grad()
def annotate(run: Run, reference: Decoder | None, mini_batch: MiniBatch) -> MiniBatch:
    """Add old logprobs from an independent packed forward, and the reference's; a KL penalty in the reward."""
    kl = run.config.algorithm.kl
    temperature = run.config.rollout.sampling.temperature

    def add(microbatch: Microbatch) -> Microbatch:
        run.interrupts.check()
        old_logprobs, _ = packed_logprobs(run.policy, microbatch, temperature)
        if reference is None:
            return replace(microbatch, old_logprobs=old_logprobs)
        ref_logprobs, _ = packed_logprobs(reference, microbatch, temperature)
        advantages = microbatch.advantages
        if kl.placement == "reward":
            mask, edges = microbatch.loss_mask, microbatch.cu_seqlens
            advantages = subtract_kl(advantages, old_logprobs, ref_logprobs, mask, edges, kl.coefficient)
        return replace(microbatch, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, advantages=advantages)

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


def accumulate(run: Run, mini_batch: MiniBatch, clip: ClipBounds, advance: Any) -> tuple[Tensor, dict[str, Any]]:
    """Forward, loss and backward of every microbatch.

    Args:
        run, mini_batch: what is trained, and on what.
        clip: bounds of ppo_clip.
        advance: told of each microbatch that is done.

    Returns:
        logprobs of the mini-batch before its update, [T] fp32 without gradient, and the loss metrics.

    Raises:
        Diverged: the loss of a microbatch is not finite.
    """
    algorithm, rollout = run.config.algorithm, run.config.rollout
    bounds = bounds_of(run, mini_batch, clip)
    total_loss, total_kl, parts, entropies, dropped = 0.0, 0.0, [], [], []
    for index, microbatch in enumerate(mini_batch.microbatches):
        logprobs, entropy = packed_logprobs(run.policy, microbatch, rollout.sampling.temperature)
        weights = weights_of(run.config, microbatch)
        token_losses = policy_losses(algorithm.loss, logprobs, microbatch, bounds, weights)
        if microbatch.ref_logprobs is not None:
            kl = kl_estimate(logprobs, microbatch.ref_logprobs, algorithm.kl.estimator)
            total_kl += kl.detach()[microbatch.loss_mask].sum().item()
            if algorithm.kl.placement == "loss":
                token_losses = token_losses + algorithm.kl.coefficient * kl
        loss = reduce_loss(
            token_losses,
            microbatch.loss_mask,
            microbatch.sequence_index,
            algorithm.reduction,
            num_loss_tokens=mini_batch.num_loss_tokens,
            num_sequences=mini_batch.num_sequences,
            max_completion_tokens=rollout.max_completion_tokens,
        )
        total_loss += loss.item()
        if not math.isfinite(total_loss):
            tensors = {f.name: x for f in fields(microbatch) if (x := getattr(microbatch, f.name)) is not None}
            raise Diverged(f"loss of microbatch {index}", {"logprobs": logprobs, "entropy": entropy, **tensors})
        loss.backward()
        parts.append(logprobs.detach())
        entropies.append(entropy)
        dropped.append(dropped_tokens(algorithm.loss, logprobs, microbatch, bounds))
        advance(1)
    logprobs = torch.cat(parts)
    ratio = torch.exp(logprobs - mini_batch.gather("old_logprobs"))
    mask = mini_batch.gather("loss_mask")
    metrics = {
        "loss/policy": total_loss,
        **entropy_metrics(torch.cat(entropies)[mask]),
        "policy/ratio_std": ratio[mask].std(correction=0).item(),
        **clip_metrics(torch.cat(dropped), ratio, mini_batch.gather("advantages"), mask),
    }
    if bounds is not None:
        metrics |= {"clip/low": bounds.low, "clip/high": bounds.high}
    if algorithm.correction is not None:
        metrics |= correction_metrics(gathered_weights(run.config, mini_batch), mask)
    if mini_batch.microbatches[0].ref_logprobs is not None:
        metrics["loss/kl"] = total_kl / mini_batch.num_loss_tokens
    return logprobs, metrics


@torch.no_grad()
def bounds_of(run: Run, mini_batch: MiniBatch, clip: ClipBounds) -> ClipBounds | None:
    """Bounds of the loss for this mini-batch. BAPO and M2PO choose theirs from a forward over all of it."""
    loss, temperature = run.config.algorithm.loss, run.config.rollout.sampling.temperature
    if not isinstance(loss, BAPO | M2PO):
        return fixed_bounds(loss, clip)
    logprobs = [packed_logprobs(run.policy, microbatch, temperature)[0] for microbatch in mini_batch.microbatches]
    ratio = torch.exp(torch.cat(logprobs) - mini_batch.gather("old_logprobs"))
    advantages, mask = mini_batch.gather("advantages"), mini_batch.gather("loss_mask")
    return chosen_bounds(loss, ratio, advantages, gathered_weights(run.config, mini_batch), mask)


def weights_of(config: TrainConfig, microbatch: Microbatch) -> Tensor:
    """[T] weights that correct for the mismatch of rollout and training."""
    old, rollout_logprobs = microbatch.old_logprobs, microbatch.rollout_logprobs
    assert old is not None
    mask, index, algorithm = microbatch.loss_mask, microbatch.sequence_index, config.algorithm
    return correction_weights(old, rollout_logprobs, mask, index, algorithm.correction, algorithm.tis_cap)


def gathered_weights(config: TrainConfig, mini_batch: MiniBatch) -> Tensor:
    """The same of every microbatch, end to end."""
    return torch.cat([weights_of(config, microbatch) for microbatch in mini_batch.microbatches])


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


def shadow_wanted(config: TrainConfig, step: int) -> bool:
    """Whether this step runs the BF16 shadow: calibration measures, or over-clipping is to be reported."""
    interval = config.trainer.shadow_interval
    reported = interval > 0 and (step + 1) % interval == 0
    return reported or (config.calibration is not None and calibration.measured(step, config.calibration))


def check_mismatch(run: Run, mini_batches: list[MiniBatch]) -> dict[str, Any]:
    """Mismatch of rollout and training over all loss tokens.

    Raises:
        ValueError: it is not exactly 0 although flow and recipe promise that, and `trainer.require_exact` is set.
    """
    names = ("old_logprobs", "rollout_logprobs", "loss_mask", "completion_positions")
    gathered = (torch.cat([batch.gather(name) for batch in mini_batches]) for name in names)
    old, rollout_logprobs, mask, places = gathered
    metrics: dict[str, Any] = mismatch_metrics(old, rollout_logprobs, mask, run.config.algorithm.tis_cap)
    metrics |= mismatch_by_position(old[mask], rollout_logprobs[mask], places[mask])
    largest = metrics["mismatch/max_abs_logprob_diff"]
    recipe, one_forward = run.policy.recipe, run.engine.decoder is run.policy
    if largest > 0.0 and one_forward and recipe.batch_invariant and run.config.trainer.require_exact:
        raise ValueError(
            f"rollout and training disagree by up to {largest:.3g} in a token's log-probability, under recipe "
            f"{recipe.name!r} that promises bit-equality. The engine's bytes differ from the trainer's, or this "
            f"device sums differently. trainer.require_exact=false goes on, with importance weights as the correction"
        )
    return metrics


def rollout_metrics(completions: list[list[Completion]], rewards: Tensor) -> dict[str, Any]:
    """Rewards and completions of a rollout."""
    flat = [completion for group in completions for completion in group]
    lengths = torch.tensor([float(len(completion.tokens)) for completion in flat])
    return {
        "reward/mean": rewards.mean().item(),
        "reward/std": rewards.std(correction=0).item(),
        "completion/length_mean": lengths.mean().item(),
        "completion/length_p90": lengths.quantile(0.9).item(),
        "completion/length_max": lengths.max().item(),
        "completion/truncated_share": sum(c.finish_reason == "length" for c in flat) / len(flat),
        "rollout/num_tokens": lengths.sum().item(),
    }


def logged_samples(
    run: Run,
    problems: list[EncodedProblem],
    completions: list[list[Completion]],
    scored: list[list[Scored]],
    advantages: Tensor,
) -> list[dict[str, Any]]:
    """Rows of samples.jsonl: the first completion of each prompt, then the second, as many as the config wants."""
    count = min(run.config.trainer.logged_samples, len(problems) * len(completions[0]))
    places = [(index % len(problems), index // len(problems)) for index in range(count)]
    return [
        {
            "id": problems[p].problem.id,
            "prompt": run.task.prompt_text(problems[p].problem),
            "completion": scored[p][g].text,
            "answer": problems[p].problem.answer,
            "outcome": scored[p][g].verdict.outcome,
            "reward": scored[p][g].reward,
            "advantage": advantages[p, g].item(),
            "finish_reason": completions[p][g].finish_reason,
            "num_tokens": len(completions[p][g].tokens),
            "mean_logprob": sum(completions[p][g].rollout_logprobs) / len(completions[p][g].tokens),
        }
        for p, g in places
    ]


def saturated_share(policy: Decoder) -> float:
    """Share of activations beyond a static scale since it was frozen."""
    layers = [layer for layer in quantized_layers(policy) if layer.quantized]
    counts = torch.stack([layer.saturation_counts for layer in layers]).sum(dim=0)
    return (counts[0] / counts[1].clamp(min=1)).item()


def _shadow_logprobs(run: Run, microbatch: Microbatch) -> Tensor:
    return packed_logprobs(run.policy, microbatch, run.config.rollout.sampling.temperature, shadow=True)[0]
