"""Greedy decoding against transformers, token by token.

Two BF16 implementations round differently, so their continuations part where two tokens tie. What must hold is that
each token of ours has, in transformers' FP32 logits along our own continuation, a logit so near the largest that BF16
cannot tell them apart. How near is measured there: the floor is the root mean square error that transformers' own BF16
logits have in the difference of two of the LIKELY largest logits of a place, and MARGIN is 4 of these.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.models.decoder import Decoder
from octavo.rollout.engine import Engine, EngineConfig
from octavo.rollout.sampler import SamplingConfig

NUM_TOKENS = 64
LIKELY = 8
"""Tokens of a place whose logits count for the floor."""
MARGIN = 4.0
"""Floors that a greedy token's FP32 logit may lie below the largest."""
LARGEST_FLOOR = 0.1
"""Of the logits' standard deviation: beyond it BF16 would hide a wrong token."""


class Agreement(NamedTuple):
    """Of all prompts together."""

    floor: float
    """Error of transformers' BF16 logits in a difference of two likely ones."""
    largest_gap: float
    """Most that the FP32 logit of a token of ours lies below the largest."""
    equal_share: float
    """Of our tokens, those that transformers' BF16 logits have as the largest, too."""


def check_greedy(decoder: Decoder, reference: torch.nn.Module, prompts: Sequence[list[int]]) -> Agreement:
    """Continue each prompt by NUM_TOKENS and compare.

    Args:
        decoder: under a recipe without FP8.
        reference: transformers' model of the same weights in FP32, on the same device.
        prompts: lists of token ids.
    """
    engine = Engine(decoder, EngineConfig(kv_cache_tokens=16384), ())
    sampling = SamplingConfig(temperature=0.0)
    groups = engine.generate(prompts, sampling, max_completion_tokens=NUM_TOKENS)
    continuations = [group[0].tokens for group in groups]
    assert all(len(tokens) == NUM_TOKENS for tokens in continuations)
    in_bf16 = copy.deepcopy(reference).bfloat16()
    exact, rounded = (
        torch.stack([logits_along(model, p, c) for p, c in zip(prompts, continuations, strict=True)])
        for model in (reference, in_bf16)
    )  # [P, NUM_TOKENS, V]
    ours = torch.tensor(continuations, device=exact.device)
    likely = exact.topk(LIKELY, dim=-1)
    errors = rounded.gather(-1, likely.indices) - likely.values
    floor = (2.0 * errors.var(dim=-1).mean()).sqrt().item()
    spread = exact.std(dim=-1).mean().item()
    assert 0.0 < floor < LARGEST_FLOOR * spread, f"BF16 logits are {floor:.3g} off, with a spread of {spread:.3g}"
    gaps = gap(exact, ours)
    far = (gaps > MARGIN * floor).nonzero().tolist()
    assert not far, (
        f"{len(far)} of {gaps.numel()} greedy tokens lie more than {MARGIN:g} x {floor:.3g} below the largest FP32 "
        f"logit, by up to {gaps.max().item():.3g}; the first is token {far[0][1]} of prompt {far[0][0]}"
    )
    differs = rounded.argmax(dim=-1) != ours
    ties = gap(rounded, ours)[differs]
    assert (ties <= MARGIN * floor).all(), f"transformers in BF16 prefers another token by {ties.max().item():.3g}"
    return Agreement(floor, gaps.max().item(), 1.0 - differs.double().mean().item())


def gap(logits: Tensor, tokens: Tensor) -> Tensor:
    """[P, N, V], [P, N] -> [P, N], how far each token's logit lies below the largest."""
    return logits.amax(dim=-1) - logits.gather(-1, tokens[..., None]).squeeze(-1)


@torch.no_grad()
def logits_along(model: torch.nn.Module, prompt: list[int], continuation: list[int]) -> Tensor:
    """FP32 logits [N, V] that predict each token of a continuation, from one forward over all of it."""
    device = next(model.parameters()).device
    tokens = torch.tensor([prompt + continuation[:-1]], device=device)
    return model(tokens).logits[0, len(prompt) - 1 :].float()
