"""Which losses calibration serves, on which ratios, and at which scale.

ppo_clip           each token's ratio, at the bounds of algorithm.clip
gspo, gspo_token   each completion's ratio, one count a completion, at the loss's own offsets
cispo              each token's ratio, whatever the sign of A, at its cap; there is no low bound to balance it with
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from octavo.rl.batch import Microbatch
from octavo.rl.calibration_config import TOKEN_OFFSET, CalibrationConfig, Scale, SymmetricCalibration
from octavo.rl.loss_clipped import PPOClip
from octavo.rl.loss_likelihood import CISPO
from octavo.rl.loss_sequence import GSPO, sequence_mean
from octavo.rl.losses import ClipBounds, ClipConfig
from octavo.rl.policy_loss import LossConfig


@dataclass(frozen=True, eq=False, kw_only=True)
class Samples:
    """Loss tokens, or completions, that calibration counts."""

    ratio: Tensor
    """[N] fp32, r_fp8."""
    shadow_ratio: Tensor
    """[N] fp32, r_bf16."""
    tis_weights: Tensor
    """[N] fp32, w; of a completion the mean."""
    advantages: Tensor
    """[N] fp32, A; of a completion the mean, under cispo the size."""
    loss_mask: Tensor
    """[N] bool."""

    def tensors(self) -> dict[str, Tensor]:
        """By name, as `calibration.measure` takes them."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def joined(cls, parts: Sequence["Samples"]) -> "Samples":
        """Those of several microbatches."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def refusal(loss: LossConfig, config: CalibrationConfig) -> str:
    """Why calibration is wrong for the loss; empty where it is right."""
    if isinstance(loss, PPOClip):
        if loss.dual_clip is None:
            return ""
        return (
            f"calibration balances punished tokens at any ratio above the low bound, and algorithm.loss.dual_clip="
            f"{loss.dual_clip} drops some of them. Use calibration: null"
        )
    if isinstance(loss, GSPO):
        if not min(loss.clip_low, loss.clip_high) > 0.0:
            return (
                f"calibration scales its intervals with the offsets of algorithm.loss, and clip_low={loss.clip_low}, "
                f"clip_high={loss.clip_high} leave none. Use offsets above 0, or calibration: null"
            )
        if scale_of(loss).low_bound(config.low_min) < 0.0:
            return (
                f"calibration's low bound could fall to 1 - {(1.0 - config.low_min) / TOKEN_OFFSET:g} x "
                f"algorithm.loss.clip_low={loss.clip_low}, below 0. Use a smaller clip_low, or calibration: null"
            )
        return ""
    if isinstance(loss, CISPO):
        if not isinstance(config, SymmetricCalibration):
            return (
                f"calibration.type={getattr(config, 'type_name', '')} finds the upper bound by the balance of what "
                f"keeps its gradient, and under algorithm.loss.type=cispo every token does. Use calibration.type: "
                f"symmetric, which matches the capped share, or calibration: null"
            )
        if loss.ratio_cap == 1.0:
            return (
                "calibration scales its interval with algorithm.loss.ratio_cap - 1, which is 0. Use a cap above 1, or "
                "calibration: null"
            )
        return ""
    return (
        f"calibration moves fixed bounds on the ratio, and algorithm.loss.type={loss.type_name} has none: it chooses "
        f"its own for each mini-batch, or drops by something else. Use calibration: null"
    )


def scale_of(loss: LossConfig) -> Scale:
    """How the intervals of a CalibrationConfig, made for a token's offset of 0.2, are stretched for the loss."""
    if isinstance(loss, GSPO):
        return Scale(low=loss.clip_low / TOKEN_OFFSET, high=loss.clip_high / TOKEN_OFFSET)
    if isinstance(loss, CISPO):
        return Scale(low=None, high=(loss.ratio_cap - 1.0) / TOKEN_OFFSET)
    return Scale()


def plain_clip(loss: LossConfig, clip: ClipConfig) -> ClipConfig:
    """The offsets that BF16 would be clipped at: those of the loss, or of algorithm.clip."""
    if isinstance(loss, GSPO):
        return loss
    if isinstance(loss, CISPO):
        return ClipConfig(clip_low=0.0, clip_high=loss.ratio_cap - 1.0)
    return clip


def plain_bounds(loss: LossConfig, clip: ClipConfig) -> ClipBounds:
    """Bounds without calibration; those of algorithm.clip where the loss has none."""
    if isinstance(loss, CISPO):
        return ClipBounds(low=0.0, high=loss.ratio_cap)
    return plain_clip(loss, clip).bounds()


def samples_of(
    loss: LossConfig, batch: Microbatch, log_ratio: Tensor, shadow_log_ratio: Tensor, weights: Tensor, mask: Tensor
) -> Samples:
    """What calibration counts in a microbatch.

    Args:
        loss: a loss that is not refused.
        batch: the microbatch.
        log_ratio, shadow_log_ratio: [T] fp32, logprobs - old_logprobs of training and of the shadow.
        weights: [T] fp32, w.
        mask: [T] bool, the loss tokens to look at; under gspo all or none of a completion's.

    Returns:
        Samples of its tokens, or under gspo of its completions.
    """
    if not isinstance(loss, GSPO):
        advantages = batch.advantages.abs() if isinstance(loss, CISPO) else batch.advantages
        return Samples(
            ratio=torch.exp(log_ratio),
            shadow_ratio=torch.exp(shadow_log_ratio),
            tis_weights=weights,
            advantages=advantages,
            loss_mask=mask,
        )
    places = mask.nonzero().squeeze(1)
    index = batch.sequence_index[places]
    first = places[torch.cat([index.new_ones(1, dtype=torch.bool), index[1:] != index[:-1]])[: len(index)]]

    def each(values: Tensor) -> Tensor:
        return sequence_mean(values, mask, batch.sequence_index)[first]

    return Samples(
        ratio=torch.exp(each(log_ratio)),
        shadow_ratio=torch.exp(each(shadow_log_ratio)),
        tis_weights=each(weights),
        advantages=each(batch.advantages),
        loss_mask=torch.ones_like(first, dtype=torch.bool),
    )
