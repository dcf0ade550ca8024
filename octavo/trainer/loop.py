"""One training step: rollout, rewards, advantages, several optimiser steps, calibration. One page, one verb a line."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from octavo.layers.linear import quantized_layers
from octavo.models.decoder import Decoder
from octavo.rl.advantages import subtract_kl
from octavo.rl.batch import Microbatch, MiniBatch
from octavo.rl.corrections import correction_metrics
from octavo.rl.entropy import entropy_metrics
from octavo.rl.gae import GAEConfig
from octavo.rl.loss_clipped import BAPO, M2PO
from octavo.rl.losses import ClipBounds, clip_metrics, kl_estimate, reduce_loss
from octavo.rl.mismatch import mismatch_by_position, mismatch_metrics
from octavo.rl.policy_loss import chosen_bounds, dropped_tokens, fixed_bounds, policy_losses
from octavo.rollout.engine import Engine
from octavo.trainer.critic import CriticLearner, judge_tokens, learn_values, warms_up
from octavo.trainer.divergence import Diverged, StepRecord
from octavo.trainer.observe import observe, observe_old
from octavo.trainer.optimizer import Optimizer
from octavo.trainer.policy import gathered_weights, packed_logprobs, weights_of
from octavo.trainer.progress import Progress
from octavo.trainer.rollout import batches, collect, judge, logged_samples, rollout_metrics
from octavo.trainer.run import Run
from octavo.trainer.scoring import audited, scoring_faults, scoring_metrics
from octavo.trainer.shadow import annotate_shadow, loss_of_shadow, measure_shadow, shadow_wanted, with_shadow


def train_step(
    run: Run,
    optimizer: Optimizer,
    reference: Decoder | None,
    progress: Progress,
    record: StepRecord,
    critic: CriticLearner | None = None,
) -> dict[str, Any]:
    """One rollout and its optimiser steps.

    Args:
        run, optimizer, reference: what is trained, and the frozen model of the KL penalty.
        progress: its bounds and pool move when calibration is due.
        record: the clock of the step, and what to save should it fail.
        critic: of PPO.

    Returns:
        The step's metrics.

    Raises:
        StopRequested: during the rollout or the old log-probabilities; nothing but static scales has changed.
        Diverged: a logit, loss, gradient or weight is not finite.
    """
    config, policy, clock, step = run.config, run.policy, record.clock, record.step
    metrics: dict[str, Any]
    for decoder in [*run.decoders, *([] if reference is None else [reference])]:
        decoder.freeze_activation_scales_()
    with clock.phase("rollout"):
        drawn, groups, metrics = collect(run, progress, record)  # P prompts, P x G completions, rewards [P, G]
        advantages = judge(config, groups)  # [P, G]
        mini_batches = batches(config, groups.completions, advantages)  # microbatches of [T]
    if isinstance(run.engine, Engine):
        run.engine.lend()  # until it samples again
    metrics |= rollout_metrics(config, drawn) | scoring_metrics(drawn.problems, drawn.scored)
    record.samples = logged_samples(run, groups, advantages)
    record.audited = audited(drawn.problems, drawn.scored)
    for fault in scoring_faults(drawn.scored):
        run.display.line(f"warning: step {step + 1}: {fault}")

    bounds = config.start_bounds() if config.calibration is None else progress.bounds
    measures = shadow_wanted(config, progress, step)
    run.reference.start_step_(step)
    checks = not is_exact(run) or step % config.trainer.exactness_interval == 0
    with clock.phase("old_logprobs"):
        mini_batches = [annotate(run, reference, batch, checks) for batch in mini_batches]  # old, ref logprobs
        if checks:
            metrics |= check_mismatch(run, mini_batches, [batch.gather("old_logprobs") for batch in mini_batches])
    if critic is not None:
        with clock.phase("critic"):
            mini_batches = judge_tokens(run, critic, mini_batches)  # values, token advantages, returns
            metrics |= learn_values(config, critic, mini_batches)
    if config.algorithm.loss_shadow != "training":
        with clock.phase("shadow"):
            mini_batches = [with_shadow(run, batch) for batch in mini_batches]  # the loss's shadow, old
    if measures:
        with clock.phase("shadow"):
            mini_batches[-1] = annotate_shadow(run, progress, mini_batches[-1], step)  # BF16 shadow, old

    observed = None
    if config.observatory.due(step):
        with clock.phase("observatory"):
            observed = observe_old(run, mini_batches[-1])  # other numerics, old

    with run.display.bar("update", sum(len(batch.microbatches) for batch in mini_batches)) as advance:
        for index, mini_batch in enumerate(mini_batches):
            record.mini_batch_index, record.mini_batch = index, mini_batch
            with clock.phase("update"):
                logprobs, learned = accumulate(run, mini_batch, bounds, advance)  # forward, loss, backward
                if not checks and index == 0:
                    metrics |= check_mismatch(run, [mini_batch], [logprobs])
            if measures and mini_batch is mini_batches[-1]:
                with clock.phase("shadow"):
                    metrics |= measure_shadow(run, mini_batch, logprobs, progress, step)  # before its update
            if observed is not None and mini_batch is mini_batches[-1]:
                with clock.phase("observatory"):
                    metrics |= observe(run, mini_batch, logprobs, observed)
            with clock.phase("update"):
                learned |= optimizer.skip() if warms_up(config, step) else optimizer.step()
                for decoder in run.decoders:
                    decoder.requantize_(optimizer.update)  # the engine's bytes too
                run.reference.follow_()
    with clock.phase("update"):
        optimizer.stow_moments()  # the next rollout has their memory
    progress.next_prompt += len(drawn.problems)
    if policy.recipe.static_activation_scale:
        metrics["precision/saturated_share"] = saturated_share(policy)
    metrics["precision/saturated_queries"] = saturated_queries(run.decoders)
    return metrics | learned


def is_exact(run: Run) -> bool:
    """Whether flow and recipe promise that the rollout's log-probabilities are training's."""
    one_forward = isinstance(run.engine, Engine) and run.engine.decoder is run.policy
    return one_forward and run.policy.recipe.batch_invariant and run.config.trainer.require_exact


@torch.no_grad()
def annotate(run: Run, reference: Decoder | None, mini_batch: MiniBatch, checks: bool = True) -> MiniBatch:
    """Add old logprobs, of an independent packed forward if it `checks`, else the rollout's; and the reference's, whose
    KL penalty may be in the reward."""
    kl = run.config.algorithm.kl
    temperature = run.config.rollout.sampling.temperature

    def add(microbatch: Microbatch) -> Microbatch:
        run.interrupts.check()
        old_logprobs = (
            packed_logprobs(run.policy, microbatch, temperature)[0] if checks else microbatch.rollout_logprobs
        )
        if reference is None:
            return replace(microbatch, old_logprobs=old_logprobs)
        ref_logprobs, _ = packed_logprobs(reference, microbatch, temperature)
        advantages = microbatch.advantages
        if kl.placement == "reward" and not isinstance(run.config.algorithm.advantage, GAEConfig):
            mask, edges = microbatch.loss_mask, microbatch.cu_seqlens
            advantages = subtract_kl(advantages, old_logprobs, ref_logprobs, mask, edges, kl.coefficient)
        return replace(microbatch, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs, advantages=advantages)

    return replace(mini_batch, microbatches=[add(microbatch) for microbatch in mini_batch.microbatches])


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
        if algorithm.loss_shadow == "training":
            token_losses = policy_losses(algorithm.loss, logprobs, microbatch, bounds, weights)
            left_out = dropped_tokens(algorithm.loss, logprobs, microbatch, bounds)
        else:
            token_losses, left_out = loss_of_shadow(run, microbatch, logprobs, bounds, weights)
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
        dropped.append(left_out)
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


def check_mismatch(run: Run, mini_batches: list[MiniBatch], trained: list[Tensor]) -> dict[str, Any]:
    """Mismatch of rollout and training over all loss tokens of these mini-batches.

    Args:
        run, mini_batches: what sampled, and what it did.
        trained: [T] fp32 each, log-probabilities by the packed forward, before an update.

    Raises:
        ValueError: it is not exactly 0 although flow and recipe promise that, and `trainer.require_exact` is set.
    """
    names = ("rollout_logprobs", "loss_mask", "completion_positions")
    rollout_logprobs, mask, places = (torch.cat([batch.gather(name) for batch in mini_batches]) for name in names)
    old = torch.cat(trained)
    metrics: dict[str, Any] = mismatch_metrics(old, rollout_logprobs, mask, run.config.algorithm.tis_cap)
    metrics |= mismatch_by_position(old[mask], rollout_logprobs[mask], places[mask])
    largest = metrics["mismatch/max_abs_logprob_diff"]
    if largest > 0.0 and is_exact(run):
        raise ValueError(
            f"rollout and training disagree by up to {largest:.3g} in a token's log-probability, under recipe "
            f"{run.policy.recipe.name!r} that promises bit-equality. The engine's bytes differ from the trainer's, or "
            f"this device sums differently. trainer.require_exact=false goes on, with importance weights as the "
            f"correction"
        )
    return metrics


def saturated_share(policy: Decoder) -> float:
    """Share of activations beyond a static scale since it was frozen."""
    layers = [layer for layer in quantized_layers(policy) if layer.quantized]
    counts = torch.stack([layer.saturation_counts for layer in layers]).sum(dim=0)
    return (counts[0] / counts[1].clamp(min=1)).item()


def saturated_queries(decoders: Sequence[Decoder]) -> int:
    """Numbers in queries that FP16 could not hold beside FP8 keys, since this was last asked."""
    count = sum(decoder.num_saturated.item() for decoder in decoders)
    for decoder in decoders:
        decoder.num_saturated.zero_()
    return int(count)
