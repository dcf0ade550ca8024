"""octavo's policy losses that verl lacks, with verl's arguments: tensors [B, L] of a microbatch, 0 where it pads.

    calibrated   clipped surrogate at bounds that calibration moves                 octavo's engine
    bapo         bounds that let rewarded tokens contribute their share             any engine
    m2po         bounds that hold the second moment of the log-ratio in a budget    any engine
    gspo_token   a completion's ratio, the gradient of each token                   any engine

verl hands a loss one microbatch of one rank; bapo and m2po choose their bounds from that.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, agg_loss, register_policy_loss

from octavo.plugins.verl.calibrating import current
from octavo.plugins.verl.config import options_of
from octavo.rl.loss_clipped import BAPO, M2PO, bapo_bounds, beyond, m2po_bounds, ppo_clip
from octavo.rl.loss_sequence import GSPOToken, gspo_token, sequence_ratio
from octavo.rl.losses import ClipBounds, ClipConfig, clip_metrics

Result = tuple[Tensor, dict[str, float]]
"""The loss that is differentiated, and what verl logs of it."""


def calibrated(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Result:
    """`ppo_clip` at the bounds of the engine's calibration; actor.clip_ratio_low and _high are the plain bounds."""
    calibrator, weights = current(), _weights(log_prob, rollout_is_weights)
    clip = ClipConfig(clip_low=config.clip_ratio_low, clip_high=config.clip_ratio_high)
    calibrator.observe(log_prob - old_log_prob, weights, advantages, response_mask, clip)
    losses = ppo_clip(log_prob, old_log_prob, advantages, calibrator.bounds, weights)
    ratio = _ratio(old_log_prob, log_prob)
    dropped = beyond(ratio, advantages, calibrator.bounds)
    return _reduced(losses, ratio, dropped, calibrator.bounds, advantages, response_mask, loss_agg_mode, config)


def bapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Result:
    """`ppo_clip` at the bounds that BAPO chooses for the microbatch."""
    options = options_of(BAPO, config.policy_loss, "actor.policy_loss")
    ratio, weights = _ratio(old_log_prob, log_prob), _weights(log_prob, rollout_is_weights)
    bounds = bapo_bounds(ratio, advantages, weights, response_mask, options)
    losses, dropped = ppo_clip(log_prob, old_log_prob, advantages, bounds, weights), beyond(ratio, advantages, bounds)
    return _reduced(losses, ratio, dropped, bounds, advantages, response_mask, loss_agg_mode, config)


def m2po(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Result:
    """`ppo_clip` at the bounds that M2PO chooses for the microbatch."""
    options = options_of(M2PO, config.policy_loss, "actor.policy_loss")
    ratio, weights = _ratio(old_log_prob, log_prob), _weights(log_prob, rollout_is_weights)
    bounds = m2po_bounds(ratio, advantages, response_mask, options)
    losses, dropped = ppo_clip(log_prob, old_log_prob, advantages, bounds, weights), beyond(ratio, advantages, bounds)
    return _reduced(losses, ratio, dropped, bounds, advantages, response_mask, loss_agg_mode, config)


def gspo_token_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> Result:
    """GSPO-token; its offsets are those of the section `octavo`, not actor.clip_ratio."""
    bounds = options_of(GSPOToken, config.policy_loss, "actor.policy_loss").bounds()
    rows, width = log_prob.shape
    row = torch.arange(rows, device=log_prob.device).repeat_interleave(width)
    new, old, each = log_prob.flatten(), old_log_prob.flatten(), advantages.flatten()
    mask, weights = response_mask.flatten(), _weights(log_prob, rollout_is_weights).flatten()
    losses = gspo_token(new, old, each, bounds, weights, mask, row).view(rows, width)
    ratio = sequence_ratio(new.detach(), old, mask, row).view(rows, width)
    dropped = beyond(ratio, advantages, bounds)
    return _reduced(losses, ratio, dropped, bounds, advantages, response_mask, loss_agg_mode, config)


def _ratio(old_log_prob: Tensor, log_prob: Tensor) -> Tensor:
    return torch.exp(log_prob.detach() - old_log_prob)


def _weights(log_prob: Tensor, rollout_is_weights: Tensor | None) -> Tensor:
    return torch.ones_like(log_prob) if rollout_is_weights is None else rollout_is_weights


def _reduced(
    losses: Tensor,
    ratio: Tensor,
    dropped: Tensor,
    bounds: ClipBounds,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: Any,
) -> Result:
    """verl's reduction over the whole batch, and the metrics under verl's names."""
    loss = agg_loss(loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **config.global_batch_info)
    clipped = clip_metrics(dropped, ratio, advantages, response_mask)
    log_ratio = torch.log(ratio[response_mask.bool()])
    return loss, {
        "actor/pg_clipfrac": clipped["loss/clip_fraction"],
        "actor/pg_clipfrac_low": clipped["loss/clip_fraction_low"],
        "actor/pg_clipfrac_high": clipped["loss/clip_fraction_high"],
        "actor/ppo_kl": -log_ratio.mean().item() if len(log_ratio) else 0.0,
        "actor/clip_low": bounds.low,
        "actor/clip_high": bounds.high,
    }


LOSSES: dict[str, Callable[..., Result]] = {
    "calibrated": calibrated,
    "bapo": bapo,
    "m2po": m2po,
    "gspo_token": gspo_token_loss,
}
"""By the name that `actor.policy_loss.loss_mode` gives."""


def register_losses() -> None:
    """Put the losses into verl's registry, which lets a later one replace an earlier one without a word.

    Raises:
        ValueError: a name is taken.
    """
    taken = [name for name, loss in LOSSES.items() if POLICY_LOSS_REGISTRY.get(name, loss) is not loss]
    if taken:
        raise ValueError(
            f"verl already has policy losses named {', '.join(taken)}, and octavo replaces none. Unload the plug-in "
            f"that brought them, or octavo's with VERL_USE_EXTERNAL_PLUGINS"
        )
    for name, loss in LOSSES.items():
        register_policy_loss(name)(loss)
