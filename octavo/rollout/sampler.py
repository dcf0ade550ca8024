"""Sampling by counter: a token depends on the logits, the seed, its sequence and its position, and nothing else.

The cumulative softmax weights are whole numbers (`kernels.logprobs.sampling_weights`), so inverting them is exact and
no batch order, preemption or page layout can change a sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.device import on_gpu
from octavo.kernels.lm_head import logsumexp_of
from octavo.kernels.logprobs import chosen_logprobs, sampling_weights
from octavo.kernels.sampling import draw_tokens
from octavo.rollout.counter import uniform_bits


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How tokens are drawn. Training allows only the temperature: anything else biases the ratio."""

    temperature: float = 1.0
    """Divides the logits, in rollout and in training. 0 is greedy (evaluation only)."""
    top_p: float = 1.0
    """Evaluation only: keep the likeliest tokens that together have this probability. In (0, 1]."""
    top_k: int = 0
    """Evaluation only: keep this many likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    """Evaluation only: drop tokens less likely than this times the likeliest. In [0, 1)."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < math.inf:
            raise ValueError(f"temperature is finite and at least 0 (0 is greedy); got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is in (0, 1]; got {self.top_p}")
        if self.top_k < 0:
            raise ValueError(f"top_k is at least 0 (0 keeps all tokens); got {self.top_k}")
        if not 0.0 <= self.min_p < 1.0:
            raise ValueError(f"min_p is in [0, 1); got {self.min_p}")


class NonFiniteLogits(ValueError):
    """The decoder's logits hold a NaN or an infinity."""


def sample(logits: Tensor, keys: list[tuple[int, int, int]], config: SamplingConfig) -> tuple[Tensor, Tensor]:
    """Draw one token a row.

    Args:
        logits: [B, V] fp32, already divided by the temperature (undivided if it is 0).
        keys: (seed, sequence id, position) of each row.
        config: the sampling rule.

    Returns:
        tokens [B] int64, and their log-probabilities [B] fp32 under the full distribution, before any truncation.

    Raises:
        NonFiniteLogits: those of a row are not finite.
    """
    weights, logsumexp = sampling_weights(logits)
    check_finite(logsumexp.squeeze(1).tolist(), keys)
    if config.temperature == 0.0:
        tokens = logits.argmax(dim=-1)
    else:
        cumulative = truncate(weights, config).cumsum(dim=-1)
        totals = cumulative[:, -1].tolist()
        draws = [float(uniform_bits(*key) * int(total) >> 64) for key, total in zip(keys, totals, strict=True)]
        thresholds = torch.tensor(draws, dtype=torch.float64, device=logits.device)
        tokens = torch.searchsorted(cumulative, thresholds[:, None], right=True).squeeze(1)
    return tokens, chosen_logprobs(logits, logsumexp, tokens)


def draw(
    logits: Tensor, seed: Tensor, sequence_ids: Tensor, positions: Tensor, config: SamplingConfig
) -> tuple[Tensor, Tensor]:
    """`sample` with keys in tensors; on a GPU the host waits for nothing, unless the distribution is truncated.

    Args:
        logits: [B, V] fp32, already divided by the temperature (undivided if it is 0).
        seed: [1] int64.
        sequence_ids, positions: [B] int64.
        config: the sampling rule.

    Returns:
        tokens [B] int64 and log-probabilities [B] fp32. On a GPU these are not finite where the logits are not, and
        the caller looks; elsewhere NonFiniteLogits is raised.
    """
    if looks_at_host(config) or not on_gpu(logits, "sampling"):
        keys = [(int(seed), *key) for key in zip(sequence_ids.tolist(), positions.tolist(), strict=True)]
        return sample(logits, keys, config)
    if config.temperature == 0.0:
        tokens = logits.argmax(dim=-1)
        return tokens, chosen_logprobs(logits, logsumexp_of(logits), tokens)
    return draw_tokens(logits, seed, sequence_ids, positions)


def looks_at_host(config: SamplingConfig) -> bool:
    """Whether drawing waits for the GPU: a truncated distribution does."""
    return config.temperature > 0.0 and (config.top_p < 1.0 or config.top_k > 0 or config.min_p > 0.0)


def check_finite(values: Sequence[float], keys: Sequence[tuple[int, int, int]]) -> None:
    """Refuse logits that are not finite.

    Args:
        values: logsumexp or log-probability of each row, which carries what is not finite in it.
        keys: (seed, sequence id, position) of each row.

    Raises:
        NonFiniteLogits: those of a row are not finite.
    """
    for value, (_, sequence, position) in zip(values, keys, strict=True):
        if not math.isfinite(value):
            raise NonFiniteLogits(
                f"the logits of sequence {sequence} at position {position} are not finite: the model's weights are "
                f"damaged or have diverged, or the temperature is too small"
            )


def truncate(weights: Tensor, config: SamplingConfig) -> Tensor:
    """Set the weights [B, V] of tokens that top_k, top_p or min_p drop to 0; ties at a border are kept."""
    if config.min_p > 0.0:
        weights = weights.masked_fill(weights < config.min_p * weights.amax(dim=-1, keepdim=True), 0.0)
    if config.top_k > 0:
        smallest = weights.topk(min(config.top_k, weights.shape[-1]), dim=-1).values[:, -1:]
        weights = weights.masked_fill(weights < smallest, 0.0)
    if config.top_p < 1.0:
        ordered = weights.sort(dim=-1, descending=True).values
        before = ordered.cumsum(dim=-1) - ordered
        kept = before < config.top_p * weights.sum(dim=-1, keepdim=True)
        smallest = ordered.masked_fill(~kept, torch.inf).amin(dim=-1, keepdim=True)
        weights = weights.masked_fill(weights < smallest, 0.0)
    return weights


def signed(number: int) -> int:
    """The whole number of 64 bits, with a sign, that equals this one modulo 2**64: what a tensor holds of a seed."""
    return (number + 2**63) % 2**64 - 2**63
