"""What FP8 does to the trust region: who is clipped and who would be, how noisy the ratio is, and the null line.

Three numerics see the same tokens before and after a change of the weights: `fp8` is training's, whatever its recipe,
`bf16` the shadow on the masters, `fp32` a forward without any rounding to BF16. The change is the step's, or the null
change, a few norm gains moved by one BF16 step: what that alone does to a figure is its null line.

Every metric is computed in float64 over the loss tokens. A share of nothing is None; a NaN among the tokens makes the
metrics that depend on it NaN. Padding, packing and the split into microbatches change none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.rl.entropy import ENTROPY_EDGES, HIGH_ENTROPY, entropy_buckets
from octavo.rl.losses import ClipConfig, loss_tokens, share
from octavo.rl.mismatch import amplification, overclip_metrics

CELLS = ("both", "fp8_only", "bf16_only", "neither")
"""Of the clip matrix: who clips a token."""
STEP, NULL = "observed", "null"
"""Areas of `ratio_metrics`: the step's change of the weights, and the null change."""


@dataclass(frozen=True, kw_only=True)
class ObservatoryConfig:
    """A closer look at the ratio on some steps: at the last mini-batch, before its update."""

    interval: int = 20
    """Steps between observations; each runs the BF16 shadow twice. 0 makes none."""
    null_line: bool = True
    """Also measure a null change, a few norm gains moved by one BF16 step: one more forward in each numerics."""
    fp32: bool = False
    """Also measure in FP32: two more forwards, and FP32 copies of all weights while they run."""
    modules: bool = False
    """Also compare each module's output with BF16's, on one sequence of at most 256 tokens."""

    def __post_init__(self) -> None:
        if self.interval < 0:
            raise ValueError(f"interval is a number of steps, at least 0 (0 observes none); got {self.interval}")

    def due(self, step: int) -> bool:
        """Whether a step, counted from 0, is observed."""
        return self.interval > 0 and (step + 1) % self.interval == 0


@dataclass(frozen=True, eq=False, kw_only=True)
class LogprobPair:
    """Log-probabilities of the same tokens by one numerics, before and after a change of the weights."""

    before: Tensor
    """[T] fp32."""
    after: Tensor
    """[T] fp32."""

    @property
    def log_ratio(self) -> Tensor:
        """[T] float64, after - before."""
        return self.after.detach().double() - self.before.detach().double()


@dataclass(frozen=True, eq=False, kw_only=True)
class ObservedTokens:
    """What the tokens are, whatever the numerics."""

    loss_mask: Tensor
    """[T] bool or 0/1, 1 where a token enters the loss."""
    advantages: Tensor
    """[T] fp32."""
    entropy: Tensor
    """[T] fp32, of the BF16 shadow after the change, in nats."""
    answer_index: Tensor
    """[T] int64, which completion a token belongs to; at least 0 where loss_mask is 1."""


def ratio_metrics(
    pairs: Mapping[str, LogprobPair], tokens: ObservedTokens, clip: ClipConfig, area: str = STEP
) -> dict[str, Any]:
    """Every figure of one change of the weights: those of the next three functions, overclip_metrics and amplification.

    Args:
        pairs: "fp8" and "bf16", and "fp32" where it was measured.
        tokens: what they are.
        clip: offsets from a ratio of 1, those a BF16 run would use.
        area: STEP or NULL; stands before every key, also those that have another elsewhere, as overclip/low_share.
    """
    fp8, bf16 = pairs["fp8"], pairs["bf16"]
    ratio, shadow_ratio = torch.exp(fp8.log_ratio), torch.exp(bf16.log_ratio)
    metrics: dict[str, Any] = {
        **log_ratio_std(pairs, tokens.loss_mask),
        **overclip_metrics(ratio, shadow_ratio, tokens.advantages, tokens.loss_mask, clip),
        **overclip_shape(ratio, shadow_ratio, tokens, clip),
        **clip_matrix(ratio, shadow_ratio, tokens, clip),
        **amplification(fp8.after, bf16.after, fp8.before, bf16.before, tokens.loss_mask),
    }
    return {f"{area}/{key.rpartition('/')[2]}": value for key, value in metrics.items()}


def log_ratio_std(pairs: Mapping[str, LogprobPair], loss_mask: Tensor) -> dict[str, float]:
    """How wide the ratio is spread in each numerics.

    Returns:
        log_ratio_std_NAME of each pair: standard deviation of log r = after - before, in nats; 0.0 of no tokens.
    """
    metrics = {}
    for name, pair in pairs.items():
        (log_ratio,) = loss_tokens(loss_mask, pair.log_ratio)
        metrics[f"log_ratio_std_{name}"] = log_ratio.std(correction=0).item() if log_ratio.numel() else 0.0
    return metrics


@dataclass(frozen=True, eq=False)
class _Clipped:
    """Loss tokens that each numerics clips, [N] bool: low where A < 0 and r <= 1 - clip_low, high mirrored."""

    low: Tensor
    high: Tensor
    shadow_low: Tensor
    shadow_high: Tensor


def _clipped(ratio: Tensor, shadow_ratio: Tensor, advantages: Tensor, clip: ClipConfig) -> _Clipped:
    bounds = clip.bounds()
    low, shadow_low = ((advantages < 0) & (r <= bounds.low) for r in (ratio, shadow_ratio))
    high, shadow_high = ((advantages > 0) & (r >= bounds.high) for r in (ratio, shadow_ratio))
    return _Clipped(low, high, shadow_low, shadow_high)


def clip_matrix(
    ratio: Tensor, shadow_ratio: Tensor, tokens: ObservedTokens, clip: ClipConfig
) -> dict[str, list[int] | None]:
    """Counts of tokens by who clips them and by entropy; each a list over the buckets of ENTROPY_EDGES.

        matrix_low_both, matrix_low_fp8_only, matrix_low_bf16_only, matrix_low_neither       A < 0, at 1 - clip_low
        matrix_high_both, matrix_high_fp8_only, matrix_high_bf16_only, matrix_high_neither   A > 0, at 1 + clip_high

    A punished token is clipped low or not at all, a rewarded one high or not at all, so the sign of A is the side.
    Tokens with A = 0 are in neither. All None when a loss token has a NaN.

    Args:
        ratio, shadow_ratio: [T], r_fp8 and r_bf16.
        tokens: what they are.
        clip: offsets from a ratio of 1.
    """
    sources = loss_tokens(tokens.loss_mask, ratio, shadow_ratio, tokens.advantages, tokens.entropy)
    keys = [(side, cell) for side in ("low", "high") for cell in CELLS]
    if any(bool(torch.isnan(source).any()) for source in sources):
        return {f"matrix_{side}_{cell}": None for side, cell in keys}
    ratio, shadow_ratio, advantages, entropy = sources
    clipped, bucket = _clipped(ratio, shadow_ratio, advantages, clip), entropy_buckets(entropy)
    by_side = {
        "low": (clipped.low, clipped.shadow_low, advantages < 0),
        "high": (clipped.high, clipped.shadow_high, advantages > 0),
    }
    metrics: dict[str, list[int] | None] = {}
    for side, (fp8, bf16, population) in by_side.items():
        cells = (fp8 & bf16, fp8 & ~bf16, ~fp8 & bf16, ~fp8 & ~bf16 & population)
        for cell, chosen in zip(CELLS, cells, strict=True):
            counts = torch.bincount(bucket[chosen], minlength=len(ENTROPY_EDGES))
            metrics[f"matrix_{side}_{cell}"] = counts.tolist()
    return metrics


def overclip_shape(
    ratio: Tensor, shadow_ratio: Tensor, tokens: ObservedTokens, clip: ClipConfig
) -> dict[str, float | None]:
    """How many more tokens FP8 clips than BF16, whether they are the same ones, and where the surplus lies.

        num_clipped_fp8, num_clipped_bf16, num_clipped_both   tokens clipped, low or high, by each and by both
        factor                    num_clipped_fp8 / num_clipped_bf16                          (papers: ~4)
        agreement_of_bf16         num_clipped_both / num_clipped_bf16
        agreement_of_fp8          num_clipped_both / num_clipped_fp8
        low_side_share            of tokens that FP8 alone clips, those clipped low           (papers: ~70 %)
        high_entropy_answer_share of tokens that FP8 alone clips low, those in high-entropy answers (~90 %)

    A high-entropy answer is a completion whose mean token entropy is above HIGH_ENTROPY = 1 nat.

    Args:
        ratio, shadow_ratio: [T], r_fp8 and r_bf16.
        tokens: what they are.
        clip: offsets from a ratio of 1.
    """
    sources = loss_tokens(tokens.loss_mask, ratio, shadow_ratio, tokens.advantages, tokens.entropy)
    clipped = _clipped(sources[0], sources[1], sources[2], clip)
    fp8, bf16 = clipped.low | clipped.high, clipped.shadow_low | clipped.shadow_high
    alone, alone_low = fp8 & ~bf16, clipped.low & ~clipped.shadow_low
    index = tokens.answer_index[tokens.loss_mask.bool()]
    uncertain = _answers(sources[3], index)[1][index] > HIGH_ENTROPY
    num_fp8, num_bf16, num_both = (float(x.sum()) for x in (fp8, bf16, fp8 & bf16))

    def share_of(event: Tensor, population: Tensor) -> float | None:
        return share(event, population, sources) if population.any() else None

    return {
        "num_clipped_fp8": num_fp8,
        "num_clipped_bf16": num_bf16,
        "num_clipped_both": num_both,
        "factor": num_fp8 / num_bf16 if num_bf16 else None,
        "agreement_of_bf16": share_of(fp8, bf16),
        "agreement_of_fp8": share_of(bf16, fp8),
        "low_side_share": share_of(alone_low, alone),
        "high_entropy_answer_share": share_of(uncertain, alone_low),
    }


def answer_metrics(tokens: ObservedTokens) -> dict[str, Any]:
    """Completions by the mean entropy of their tokens.

    answers/entropy_histogram            completions from each of ENTROPY_EDGES up to the next, by mean entropy
    answers/high_entropy_share           completions with a mean above HIGH_ENTROPY
    answers/high_entropy_positive_share  of those, the ones with a positive mean advantage         (paper: 6.64 %)
    """
    entropy, advantages = loss_tokens(tokens.loss_mask, tokens.entropy, tokens.advantages)
    counts, mean_entropy = _answers(entropy, index := tokens.answer_index[tokens.loss_mask.bool()])
    advantage = _answers(advantages, index)[1]
    mean_entropy, advantage = mean_entropy[counts > 0], advantage[counts > 0]
    if torch.isnan(mean_entropy).any() or torch.isnan(advantage).any():
        histogram = None
    else:
        histogram = torch.bincount(entropy_buckets(mean_entropy), minlength=len(ENTROPY_EDGES)).tolist()
    uncertain = mean_entropy > HIGH_ENTROPY
    positive = share(advantage > 0, uncertain, (mean_entropy, advantage)) if uncertain.any() else None
    return {
        "answers/entropy_histogram": histogram,
        "answers/high_entropy_share": share(uncertain, torch.ones_like(uncertain), (mean_entropy,)),
        "answers/high_entropy_positive_share": positive,
    }


def group_metrics(rewards: Tensor) -> dict[str, float]:
    """Prompts whose completions all have the same reward, and so teach nothing under a group baseline.

        reward/all_right_groups_share  groups of equal rewards above 0
        reward/all_wrong_groups_share  groups of equal rewards of 0 or less

    Args:
        rewards: [P, G] fp32, before any penalty on length.
    """
    equal, right = (rewards == rewards[:, :1]).all(dim=1), rewards[:, 0] > 0
    return {
        "reward/all_right_groups_share": (equal & right).double().mean().item(),
        "reward/all_wrong_groups_share": (equal & ~right).double().mean().item(),
    }


def _answers(values: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens of each completion [A] int64, and the mean of its values [A] float64; NaN where it has none."""
    counts = torch.bincount(index)
    sums = torch.bincount(index.cpu(), weights=values.cpu())  # a GPU adds in whatever order its threads come
    return counts, sums.to(counts.device) / counts
