"""How far apart two numerics of one policy are: rollout against training, FP8 against its BF16 shadow.

Every metric is computed in float64 over the loss tokens. A NaN among them makes the metrics that depend
on it NaN. Standard deviations divide by N, so that one token gives 0.
"""

import math

import torch
from torch import Tensor

from octavo.rl.losses import ClipConfig, kl_estimate, loss_tokens, share

ROLLOUT_RATIO_BAND = (0.8, 1.2)
"""Rollout ratios outside this closed interval count towards mismatch/outside_share."""


def check_cap(cap: float) -> None:
    """ValueError where a cap on importance weights is below 1."""
    if not cap >= 1.0:
        raise ValueError(
            f"cap is the largest importance weight and must be at least 1, or tokens without any mismatch "
            f"would lose weight; got {cap}. The usual value is 2.0."
        )


def tis_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, cap: float = 2.0) -> Tensor:
    """Truncated importance weights min(exp(old_logprobs - rollout_logprobs), cap).

    They correct the loss for tokens that another numerics sampled. Truncation as in Ionides (2008),
    "Truncated Importance Sampling"; exactly 1 where the two log-probabilities are equal.

    Args:
        old_logprobs: [T] fp32, training numerics, weights before this step's updates.
        rollout_logprobs: [T] fp32, reported by the engine that sampled.
        cap: largest weight, at least 1.

    Returns:
        [T] fp32, without gradient.

    Raises:
        ValueError: cap is below 1.
    """
    check_cap(cap)
    return torch.exp(old_logprobs.detach() - rollout_logprobs.detach()).clamp(max=cap)


def mismatch_metrics(
    old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor, cap: float = 2.0
) -> dict[str, float]:
    """Distance between the engine that sampled and the training numerics, with d = old - rollout.

        mismatch/max_abs_logprob_diff   max |d|, in nats
        mismatch/mean_abs_logprob_diff  mean |d|, in nats
        mismatch/std_logprob_diff       standard deviation of d, in nats
        mismatch/kl_k1                  KL(sampler || old) from the sampler's tokens, mean of -d, in nats
        mismatch/kl_k3                  the same, mean of exp(d) - 1 - d, in nats, never negative
        mismatch/outside_share          share of tokens with a rollout ratio outside ROLLOUT_RATIO_BAND
        mismatch/tis_weight_mean        mean of min(rollout ratio, cap)
        mismatch/tis_capped_share       share of tokens with a rollout ratio above cap
        mismatch/num_tokens             loss tokens

    Args:
        old_logprobs: [T] fp32, training numerics, weights before this step's updates.
        rollout_logprobs: [T] fp32, reported by the engine that sampled.
        loss_mask: [T] bool or 0/1, 1 where a token enters the loss.
        cap: largest importance weight, at least 1.

    Returns:
        The metrics above. Without loss tokens those of an exact rollout: weight mean 1.0, the others 0.0.

    Raises:
        ValueError: cap is below 1.
    """
    check_cap(cap)
    old, rollout = loss_tokens(loss_mask, old_logprobs, rollout_logprobs)
    num_tokens = old.numel()
    if num_tokens == 0:
        old = rollout = old_logprobs.new_zeros(1, dtype=torch.float64)
    diff = old - rollout
    rollout_ratio = torch.exp(diff)
    inside_low, inside_high = ROLLOUT_RATIO_BAND
    outside = (rollout_ratio < inside_low) | (rollout_ratio > inside_high)
    everything = torch.ones_like(outside)
    return {
        "mismatch/max_abs_logprob_diff": diff.abs().max().item(),
        "mismatch/mean_abs_logprob_diff": diff.abs().mean().item(),
        "mismatch/std_logprob_diff": diff.std(correction=0).item(),
        "mismatch/kl_k1": kl_estimate(rollout, old, "k1").mean().item(),
        "mismatch/kl_k3": kl_estimate(rollout, old, "k3").mean().item(),
        "mismatch/outside_share": share(outside, everything, (diff,)),
        "mismatch/tis_weight_mean": tis_weights(old, rollout, cap).mean().item(),
        "mismatch/tis_capped_share": share(rollout_ratio > cap, everything, (diff,)),
        "mismatch/num_tokens": float(num_tokens),
    }


def mismatch_by_position(
    old_logprobs: Tensor, rollout_logprobs: Tensor, completion_positions: Tensor
) -> dict[str, list[float | None]]:
    """The mismatch along a completion; it grows with the position where two numerics drift apart.

        mismatch/max_abs_by_position   max |old - rollout|, in nats, of positions 0, 1-2, 3-6, 7-14, ...
        mismatch/mean_abs_by_position  mean of the same

    Bucket b covers positions 2^b - 1 to 2^(b+1) - 2; one without tokens is None.

    Args:
        old_logprobs, rollout_logprobs: [N] fp32 of the loss tokens.
        completion_positions: [N] int64, place in the completion, from 0.
    """
    diff = (old_logprobs.double() - rollout_logprobs.double()).abs()
    bucket = torch.frexp(completion_positions.double() + 1.0).exponent - 1  # floor of log2
    num_buckets = int(bucket.max()) + 1 if len(bucket) else 0
    parts = [diff[bucket == b] for b in range(num_buckets)]
    return {
        "mismatch/max_abs_by_position": [part.max().item() if len(part) else None for part in parts],
        "mismatch/mean_abs_by_position": [part.mean().item() if len(part) else None for part in parts],
    }


def _nmae(value: Tensor, truth: Tensor) -> float:
    """Normalised mean absolute error, mean |value - truth| / mean |truth|; 0.0 for no tokens.

    value, truth: [N] float64. Infinite when truth is all zeros and value is not.
    """
    error, size = (value - truth).abs().sum().item(), truth.abs().sum().item()
    return _quotient(error, size)


def _quotient(numerator: float, denominator: float) -> float:
    """numerator / denominator, both at least 0 or NaN; 0 / 0 is 0, as there is no error to speak of."""
    if denominator == 0.0:
        return numerator if numerator == 0.0 or math.isnan(numerator) else math.inf
    return numerator / denominator


def overclip_metrics(
    ratio: Tensor, shadow_ratio: Tensor, advantages: Tensor, loss_mask: Tensor, clip: ClipConfig
) -> dict[str, float]:
    """Which tokens FP8 clips that BF16 would not, at the bounds 1 - clip_low and 1 + clip_high.

    A token is clipped low when A < 0 and r <= 1 - clip_low, high when A > 0 and r >= 1 + clip_high.

        overclip/low_share            clipped low by FP8 and not by BF16, over negative-advantage tokens
        overclip/high_share           clipped high by FP8 and not by BF16, over positive-advantage tokens
        overclip/clip_low_share_fp8   clipped low by FP8, over negative-advantage tokens
        overclip/clip_low_share_bf16  clipped low by BF16, over negative-advantage tokens
        overclip/clip_high_share_fp8  clipped high by FP8, over positive-advantage tokens
        overclip/clip_high_share_bf16 clipped high by BF16, over positive-advantage tokens
        overclip/agreement            clipped by both, over tokens clipped by either; 1.0 when none is
        overclip/ratio_nmae           mean |r_fp8 - r_bf16| / mean |r_bf16|
        overclip/log_ratio_std_diff   standard deviation of log r_fp8 - log r_bf16, in nats

    Shares are in [0, 1] and 0.0 over an empty denominator.

    Args:
        ratio: [T] fp32, r_fp8, training numerics.
        shadow_ratio: [T] fp32, r_bf16, from shadow logprobs of theta and of old.
        advantages: [T] fp32.
        loss_mask: [T] bool or 0/1, 1 where a token enters the loss.
        clip: ClipConfig, offsets from a ratio of 1, those a BF16 run would use.

    Returns:
        The metrics above.
    """
    ratio, shadow_ratio, advantages = loss_tokens(loss_mask, ratio, shadow_ratio, advantages)
    sources = (ratio, shadow_ratio, advantages)
    negative, positive = advantages < 0, advantages > 0
    bounds = clip.bounds()
    low, shadow_low = (negative & (r <= bounds.low) for r in (ratio, shadow_ratio))
    high, shadow_high = (positive & (r >= bounds.high) for r in (ratio, shadow_ratio))
    clipped, shadow_clipped = low | high, shadow_low | shadow_high
    log_diff = torch.log(ratio) - torch.log(shadow_ratio)
    return {
        "overclip/low_share": share(low & ~shadow_low, negative, sources),
        "overclip/high_share": share(high & ~shadow_high, positive, sources),
        "overclip/clip_low_share_fp8": share(low, negative, sources),
        "overclip/clip_low_share_bf16": share(shadow_low, negative, sources),
        "overclip/clip_high_share_fp8": share(high, positive, sources),
        "overclip/clip_high_share_bf16": share(shadow_high, positive, sources),
        "overclip/agreement": share(clipped & shadow_clipped, clipped | shadow_clipped, sources, empty=1.0),
        "overclip/ratio_nmae": _nmae(ratio, shadow_ratio),
        "overclip/log_ratio_std_diff": log_diff.std(correction=0).item() if log_diff.numel() else 0.0,
    }


def amplification(
    logprobs: Tensor, shadow_logprobs: Tensor, old_logprobs: Tensor, shadow_old_logprobs: Tensor, loss_mask: Tensor
) -> dict[str, float]:
    """How much larger the FP8 noise is in the ratio than in the probability it is made from.

        noise/nmae_probability  mean |p_fp8 - p_bf16| / mean p_bf16, p the probability of theta
        noise/nmae_ratio        mean |r_fp8 - r_bf16| / mean r_bf16
        noise/amplification     nmae_ratio / nmae_probability; 0.0 when both are 0

    Args:
        logprobs: [T] fp32, policy in training.
        shadow_logprobs: [T] fp32, the same weights, BF16 shadow forward.
        old_logprobs: [T] fp32, training numerics, weights before this step's updates.
        shadow_old_logprobs: [T] fp32, the same weights, BF16 shadow forward.
        loss_mask: [T] bool or 0/1, 1 where a token enters the loss.

    Returns:
        The metrics above, without unit. All 0.0 without loss tokens.
    """
    theta, shadow_theta, old, shadow_old = loss_tokens(
        loss_mask, logprobs, shadow_logprobs, old_logprobs, shadow_old_logprobs
    )
    nmae_probability = _nmae(torch.exp(theta), torch.exp(shadow_theta))
    nmae_ratio = _nmae(torch.exp(theta - old), torch.exp(shadow_theta - shadow_old))
    return {
        "noise/nmae_probability": nmae_probability,
        "noise/nmae_ratio": nmae_ratio,
        "noise/amplification": _quotient(nmae_ratio, nmae_probability),
    }
