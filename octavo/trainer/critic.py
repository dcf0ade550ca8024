"""PPO's critic in a step: values of the rollout, advantages from them, and the updates of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.layers.attention import PackedAttention
from octavo.models.checkpoint import load_decoder
from octavo.models.config import DecoderConfig, read_config
from octavo.models.critic import Critic
from octavo.numerics.recipe import get_recipe
from octavo.rl.batch import Microbatch, MiniBatch
from octavo.rl.gae import (
    GAEConfig,
    explained_variance,
    generalised_advantages,
    token_rewards,
    value_losses,
    whitened,
)
from octavo.trainer.config import TrainConfig
from octavo.trainer.divergence import Diverged
from octavo.trainer.optimizer import Optimizer
from octavo.trainer.run import ROUNDING, Run


@dataclass(frozen=True, kw_only=True)
class CriticLearner:
    """The critic and its optimiser."""

    critic: Critic
    optimizer: Optimizer

    def parameters(self) -> dict[str, Tensor]:
        """The masters by name, as a checkpoint holds them."""
        return {name: parameter.detach() for name, parameter in self.critic.named_parameters()}

    def restore(self, update: int, updates_left: int) -> None:
        """Go on from `update` with the masters and moments that were copied in; its decoder is not re-quantised yet."""
        self.optimizer.restore(update)
        self.optimizer.num_updates = update + updates_left


def load_critic(run: Run) -> CriticLearner | None:
    """The critic, where advantages come from one.

    Raises:
        ValueError: its model is missing, or has not the policy's vocabulary.
    """
    config = run.config
    if not isinstance(config.algorithm.advantage, GAEConfig):
        return None
    path = config.critic.path or config.model.path
    recipe = get_recipe(config.critic.recipe)
    master_format = config.critic.optimizer.master_format
    decoder = load_decoder(
        path, recipe, max_tokens=config.max_tokens, device=config.device, master_format=master_format
    )
    check_critic_vocabulary(config, decoder.config.vocab_size, run.policy.config.vocab_size)
    decoder.recompute_layers = config.trainer.recompute_layers
    critic = Critic(decoder)
    num_parameters = sum(parameter.numel() for parameter in critic.parameters())
    run.display.line(f"critic: {path}, {num_parameters / 1e6:.1f} M parameters; {recipe.name}, KV {recipe.kv_cache}")
    masters = {f"critic.{name}": parameter for name, parameter in critic.named_parameters()}
    num_updates = config.trainer.num_steps * updates_per_step(config)
    optimizer = Optimizer(masters, config.critic.optimizer, num_updates, seed=run.seed(ROUNDING, 1))
    return CriticLearner(critic=critic, optimizer=optimizer)


def check_critic_vocabulary(config: TrainConfig, size: int, policy_size: int) -> None:
    """ValueError where the critic does not know all of the policy's tokens."""
    if size < policy_size:
        raise ValueError(
            f"critic.path={config.critic.path!r} has {size} tokens, and the policy's vocabulary has {policy_size}: it "
            f"cannot read its completions. Give a model of the same tokenizer"
        )


def critic_shape(config: TrainConfig, shape: DecoderConfig) -> DecoderConfig | None:
    """Of the critic's model; None without a critic.

    Raises:
        ValueError: its config cannot be read, or its vocabulary is smaller than the policy's.
    """
    if not isinstance(config.algorithm.advantage, GAEConfig):
        return None
    found = shape if config.critic.path is None else read_config(config.critic.path)[0]
    check_critic_vocabulary(config, found.vocab_size, shape.vocab_size)
    return found


def updates_per_step(config: TrainConfig) -> int:
    """Optimiser steps of the critic on one rollout."""
    return config.trainer.num_mini_batches * config.critic.num_epochs


def warms_up(config: TrainConfig, step: int) -> bool:
    """Whether the critic alone learns in this step."""
    return isinstance(config.algorithm.advantage, GAEConfig) and step < config.critic.warmup_steps


@torch.no_grad()
def judge_tokens(run: Run, learner: CriticLearner, mini_batches: list[MiniBatch]) -> list[MiniBatch]:
    """Add values and returns, and put token advantages in place of the completions' rewards.

    Args:
        run: its config, and whether it is to stop.
        learner: the critic.
        mini_batches: with rewards as advantages, old logprobs, and the reference's under a KL penalty.

    Raises:
        StopRequested: nothing has changed.
    """
    config, kl = run.config.algorithm.advantage, run.config.algorithm.kl
    assert isinstance(config, GAEConfig)

    def judged(microbatch: Microbatch) -> Microbatch:
        run.interrupts.check()
        mask, old, ref = microbatch.loss_mask, microbatch.old_logprobs, microbatch.ref_logprobs
        assert old is not None
        values = packed_values(learner.critic, microbatch)
        penalised = ref if kl.placement == "reward" else None
        rewards = token_rewards(microbatch.advantages, old, penalised, mask, kl.coefficient)
        advantages, returns = generalised_advantages(rewards, values, mask, config)
        return replace(microbatch, values=values, returns=returns, advantages=advantages)

    batches = [replace(batch, microbatches=[judged(part) for part in batch.microbatches]) for batch in mini_batches]
    if not config.whiten:
        return batches
    parts = [part for batch in batches for part in batch.microbatches]
    advantages, mask = (torch.cat([getattr(part, name) for part in parts]) for name in ("advantages", "loss_mask"))
    pieces = iter(whitened(advantages, mask).split([len(part.tokens) for part in parts]))
    return [
        replace(batch, microbatches=[replace(part, advantages=next(pieces)) for part in batch.microbatches])
        for batch in batches
    ]


def learn_values(config: TrainConfig, learner: CriticLearner, mini_batches: list[MiniBatch]) -> dict[str, float]:
    """The critic's updates of a step.

    Returns:
        critic/explained_variance, value_mean, return_mean   before the updates, over the rollout
        critic/loss, clip_fraction, grad_norm, lr            of the last update

    Raises:
        Diverged: a loss, gradient or weight is not finite.
    """
    old, returns, mask = (
        torch.cat([batch.gather(name) for batch in mini_batches]) for name in ("values", "returns", "loss_mask")
    )
    metrics = {
        "critic/explained_variance": explained_variance(old[mask], returns[mask]),
        "critic/value_mean": old[mask].mean().item(),
        "critic/return_mean": returns[mask].mean().item(),
    }
    for _ in range(config.critic.num_epochs):
        for mini_batch in mini_batches:
            metrics |= accumulate_values(config.critic.value_clip, learner.critic, mini_batch)
            metrics |= {key.replace("optimizer/", "critic/"): x for key, x in learner.optimizer.step().items()}
            learner.critic.decoder.requantize_()
    learner.optimizer.stow_moments()
    return metrics


def accumulate_values(value_clip: float | None, critic: Critic, mini_batch: MiniBatch) -> dict[str, float]:
    """Forward, loss and backward of every microbatch, the mean over the mini-batch's loss tokens."""
    total, num_clipped = 0.0, 0
    for index, microbatch in enumerate(mini_batch.microbatches):
        mask, old, returns = microbatch.loss_mask, microbatch.values, microbatch.returns
        assert old is not None and returns is not None
        values = packed_values(critic, microbatch)
        losses = value_losses(values, old, returns, value_clip)[mask]
        loss = losses.sum() / mini_batch.num_loss_tokens
        total += loss.item()
        if not math.isfinite(total):
            tensors = {"values": values, "old values": old, "returns": returns}
            raise Diverged(f"value loss of microbatch {index}", tensors)
        loss.backward()
        num_clipped += int((losses > value_losses(values, old, returns, None)[mask]).sum())
    return {"critic/loss": total, "critic/clip_fraction": num_clipped / mini_batch.num_loss_tokens}


def packed_values(critic: Critic, microbatch: Microbatch) -> Tensor:
    """V [T] fp32 of the state that each sampled token was sampled in; 0 where loss_mask is False."""
    context = PackedAttention(microbatch.cu_seqlens, critic.decoder.recipe.kv_cache)
    values = critic(microbatch.tokens, microbatch.positions, context)
    sampled = microbatch.loss_mask.nonzero().squeeze(1)
    return torch.zeros_like(values).index_put((sampled,), values[sampled - 1])
