"""Entropy of the policy over a mini-batch: its mean, its tail and a histogram."""

from __future__ import annotations

import torch
from torch import Tensor

ENTROPY_EDGES = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 2.0, 4.0)
"""Lower edges of the histogram's buckets, nats; the last bucket has no upper edge."""
HIGH_ENTROPY = 1.0
"""Nats above which a token counts as uncertain; such answers are where FP8 over-clips most."""


def entropy_metrics(entropy: Tensor) -> dict[str, float | list[int]]:
    """Metrics of the policy's entropy at each loss token.

        policy/entropy                mean, in nats
        policy/entropy_p50, _p90, _p99  quantiles, in nats
        policy/entropy_above_1_share  share of tokens above HIGH_ENTROPY
        policy/entropy_histogram      tokens from each of ENTROPY_EDGES up to the next

    Args:
        entropy: [N] fp32, at least one token.
    """
    ordered = entropy.double().sort().values
    last = len(ordered) - 1
    quantiles = {f"policy/entropy_p{p}": ordered[round(p / 100 * last)].item() for p in (50, 90, 99)}
    return {
        "policy/entropy": ordered.mean().item(),
        **quantiles,
        "policy/entropy_above_1_share": (ordered > HIGH_ENTROPY).double().mean().item(),
        "policy/entropy_histogram": torch.bincount(entropy_buckets(ordered), minlength=len(ENTROPY_EDGES)).tolist(),
    }


def entropy_buckets(entropy: Tensor) -> Tensor:
    """[N] int64, the bucket of ENTROPY_EDGES that each of [N] entropies lies in."""
    edges = torch.tensor(ENTROPY_EDGES, dtype=torch.float64, device=entropy.device)
    return (torch.bucketize(entropy.double(), edges, right=True) - 1).clamp(min=0)
