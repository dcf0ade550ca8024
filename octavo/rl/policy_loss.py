"""The policy loss of a config: which function, on which bounds, and which tokens it drops."""

import torch
from torch import Tensor

from octavo.rl.batch import Microbatch
from octavo.rl.loss_clipped import BAPO, M2PO, PPOClip, bapo_bounds, beyond, m2po_bounds, ppo_clip
from octavo.rl.loss_likelihood import CISPO, DPPOKL, DPPOTV, Reinforce, cispo, dppo, kl_dropped, reinforce, tv_dropped
from octavo.rl.loss_sequence import GSPO, GSPOToken, gspo, gspo_token, sequence_ratio
from octavo.rl.losses import ClipBounds

LossConfig = PPOClip | GSPO | GSPOToken | CISPO | BAPO | DPPOTV | DPPOKL | M2PO | Reinforce


def fixed_bounds(config: LossConfig, clip_bounds: ClipBounds) -> ClipBounds | None:
    """Bounds on the ratio that hold for every mini-batch; None where there are none, or BAPO or M2PO choose them.

    Args:
        config: the loss.
        clip_bounds: `calibration_losses.plain_bounds` or those of calibration.
    """
    return clip_bounds if isinstance(config, PPOClip | GSPO | CISPO) else None


def chosen_bounds(
    config: BAPO | M2PO, ratio: Tensor, advantages: Tensor, weights: Tensor, loss_mask: Tensor
) -> ClipBounds:
    """Bounds that BAPO or M2PO choose for a mini-batch, from all its tokens. Arguments as of `bapo_bounds`."""
    if isinstance(config, BAPO):
        return bapo_bounds(ratio, advantages, weights, loss_mask, config)
    return m2po_bounds(ratio, advantages, loss_mask, config)


def policy_losses(
    config: LossConfig, logprobs: Tensor, batch: Microbatch, bounds: ClipBounds | None, weights: Tensor
) -> Tensor:
    """The loss of each token.

    Args:
        config: the loss.
        logprobs: [T] fp32, policy in training; the only input with a gradient.
        batch: its microbatch, with old_logprobs.
        bounds: `fixed_bounds` or `chosen_bounds`; read by the losses that have bounds.
        weights: [T] fp32, of `corrections.correction_weights`.

    Returns:
        [T] fp32 loss to minimise, neither masked nor reduced.
    """
    old_logprobs, advantages = batch.old_logprobs, batch.advantages
    assert old_logprobs is not None
    if isinstance(config, Reinforce):
        return reinforce(logprobs, advantages, weights)
    if isinstance(config, CISPO):
        assert bounds is not None
        return cispo(logprobs, old_logprobs, advantages, bounds.high, weights)
    if isinstance(config, DPPOTV | DPPOKL):
        dropped = dropped_tokens(config, logprobs, batch, bounds)
        return dppo(logprobs, old_logprobs, advantages, dropped, config.ratio_cap, weights)
    assert bounds is not None
    if isinstance(config, GSPO):
        loss = gspo_token if isinstance(config, GSPOToken) else gspo
        return loss(logprobs, old_logprobs, advantages, bounds, weights, batch.loss_mask, batch.sequence_index)
    dual_clip = config.dual_clip if isinstance(config, PPOClip) else None
    return ppo_clip(logprobs, old_logprobs, advantages, bounds, weights, dual_clip)


@torch.no_grad()
def dropped_tokens(config: LossConfig, logprobs: Tensor, batch: Microbatch, bounds: ClipBounds | None) -> Tensor:
    """[T] bool: tokens that the loss gives no gradient or, under CISPO, less than their ratio. Arguments as above."""
    old_logprobs, advantages = batch.old_logprobs, batch.advantages
    assert old_logprobs is not None
    if isinstance(config, DPPOTV | DPPOKL):
        dropped = tv_dropped if isinstance(config, DPPOTV) else kl_dropped
        return dropped(logprobs, old_logprobs, advantages, config.max_decrease, config.max_increase)
    if bounds is None:
        return torch.zeros_like(batch.loss_mask)
    if isinstance(config, GSPO):
        ratio = sequence_ratio(logprobs, old_logprobs, batch.loss_mask, batch.sequence_index)
        return beyond(ratio, advantages, bounds)
    ratio = torch.exp(logprobs - old_logprobs)
    if isinstance(config, CISPO):
        return ratio > bounds.high
    return beyond(ratio, advantages, bounds, config.dual_clip if isinstance(config, PPOClip) else None)
