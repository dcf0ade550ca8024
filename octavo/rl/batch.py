"""Completions packed end to end into microbatches of [T] tokens, no padding.

Every [T] tensor is aligned with `tokens`: logprobs[t] is the log-probability of tokens[t] given what precedes it in its
sequence, loss_mask[t] says whether tokens[t] was sampled by the policy. Prompt tokens carry zeros.
Completions that are left out of the loss are not packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import torch
from torch import Tensor

from octavo.rollout.engine import Completion


@dataclass(frozen=True, eq=False, kw_only=True)
class Microbatch:
    """Whole sequences of one forward and backward pass."""

    tokens: Tensor
    """[T] int64."""
    positions: Tensor
    """[T] int64, from 0 in each sequence."""
    cu_seqlens: Tensor
    """[N + 1] int64 sequence boundaries, from 0 to T."""
    sequence_index: Tensor
    """[T] int64, 0 to N - 1."""
    loss_mask: Tensor
    """[T] bool, True where the policy sampled the token."""
    advantages: Tensor
    """[T] fp32, constant along a completion unless a critic gives them or a KL penalty is in the reward."""
    rollout_logprobs: Tensor
    """[T] fp32, reported by the engine."""
    old_logprobs: Tensor | None = None
    """[T] fp32, an independent packed forward with the weights that sampled."""
    ref_logprobs: Tensor | None = None
    """[T] fp32 of the reference model, when a KL penalty wants it."""
    values: Tensor | None = None
    """[T] fp32, the critic's before its updates, of the state that a token was sampled in."""
    returns: Tensor | None = None
    """[T] fp32, what the critic is trained towards."""
    shadow_old_logprobs: Tensor | None = None
    """[T] fp32 of the shadow with the weights that sampled, when measured or when the loss wants it."""
    reference_old_logprobs: Tensor | None = None
    """[T] fp32 of calibration's reference before the step's updates, 0 in completions that it does not look at."""

    @property
    def completion_positions(self) -> Tensor:
        """[T] int64, place of each token in its completion, from 0; negative in the prompt."""
        num_prompt = torch.bincount(self.sequence_index[~self.loss_mask], minlength=len(self.cu_seqlens) - 1)
        return self.positions - num_prompt[self.sequence_index]

    def to(self, device: torch.device | str) -> Microbatch:
        """The same microbatch on another device."""
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: x.to(device) for name, x in tensors.items() if x is not None})


@dataclass(frozen=True, eq=False, kw_only=True)
class MiniBatch:
    """The sequences of one optimiser step."""

    microbatches: list[Microbatch]
    """Their losses add up to the mini-batch's."""
    num_loss_tokens: int
    """Sampled tokens."""
    num_sequences: int
    """Completions."""

    def gather(self, name: str) -> Tensor:
        """A [T] tensor of every microbatch, end to end."""
        return torch.cat([getattr(microbatch, name) for microbatch in self.microbatches])


def pack(
    completions: Sequence[Sequence[Completion]],
    advantages: Tensor,
    *,
    num_mini_batches: int,
    microbatch_tokens: int,
    device: torch.device | str = "cpu",
    leave_out_truncated: bool = False,
) -> list[MiniBatch]:
    """Split P groups into mini-batches of whole groups, and each into packed microbatches.

    Args:
        completions: P groups of G.
        advantages: [P, G] fp32.
        num_mini_batches: optimiser steps of this rollout; their sizes differ by a group at most.
        microbatch_tokens: most tokens in one microbatch; a longer sequence is a microbatch of its own.
        device: where the tensors go.
        leave_out_truncated: completions cut off at the limit (finish_reason "length") stay out of the loss.

    Returns:
        The mini-batches; one that has no completion left is left out.

    Raises:
        ValueError: advantages have another shape, or a completion has no prompt or not one log-probability a token.
    """
    num_prompts = len(completions)
    sizes = [len(group) for group in completions]
    if advantages.ndim != 2 or sizes != [advantages.shape[1]] * len(advantages):
        raise ValueError(f"advantages are {tuple(advantages.shape)}, but the groups of completions have sizes {sizes}")
    for prompt_index, group in enumerate(completions):
        for completion in group:
            _check(completion, prompt_index)
    edges = [index * num_prompts // num_mini_batches for index in range(num_mini_batches + 1)]
    batches = []
    for start, stop in pairwise(edges):
        pairs = [
            (completion, advantage)
            for group, row in zip(completions[start:stop], advantages[start:stop], strict=True)
            for completion, advantage in zip(group, row.tolist(), strict=True)
            if not (leave_out_truncated and completion.finish_reason == "length")
        ]
        if not pairs:
            continue
        pairs.sort(key=lambda pair: _length(pair[0]), reverse=True)  # like lengths together: attention pads less
        batches.append(
            MiniBatch(
                microbatches=[_pack_microbatch(part).to(device) for part in _fill(pairs, microbatch_tokens)],
                num_loss_tokens=sum(len(completion.tokens) for completion, _ in pairs),
                num_sequences=len(pairs),
            )
        )
    return batches


def select(microbatch: Microbatch, kept: Tensor) -> Microbatch:
    """The microbatch of some of its sequences, kept [N] bool; their tokens stay in order."""
    lengths = microbatch.cu_seqlens.diff()[kept]
    tokens = kept[microbatch.sequence_index]
    per_token = {
        field.name: value[tokens]
        for field in fields(microbatch)
        if field.name not in ("cu_seqlens", "sequence_index") and (value := getattr(microbatch, field.name)) is not None
    }
    return replace(
        microbatch,
        **per_token,
        cu_seqlens=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        sequence_index=torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths),
    )


def _check(completion: Completion, prompt_index: int) -> None:
    """A token without a predecessor or a log-probability would silently take its neighbour's."""
    num_tokens, num_logprobs = len(completion.tokens), len(completion.rollout_logprobs)
    if not completion.prompt or num_tokens != num_logprobs:
        raise ValueError(
            f"a completion of prompt {prompt_index} has {len(completion.prompt)} prompt tokens, {num_tokens} tokens "
            f"and {num_logprobs} rollout_logprobs; it wants a prompt, and one log-probability a token"
        )


def _fill(pairs: list[tuple[Completion, float]], microbatch_tokens: int) -> list[list[tuple[Completion, float]]]:
    """Sequences in order, a new microbatch whenever the next does not fit."""
    parts: list[list[tuple[Completion, float]]] = []
    room = 0
    for pair in pairs:
        if not parts or _length(pair[0]) > room:
            parts.append([])
            room = microbatch_tokens
        parts[-1].append(pair)
        room -= _length(pair[0])
    return parts


def _pack_microbatch(pairs: list[tuple[Completion, float]]) -> Microbatch:
    lengths = torch.tensor([_length(completion) for completion, _ in pairs])
    sequence_index = torch.repeat_interleave(torch.arange(len(pairs)), lengths)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    prompt_lengths = torch.tensor([len(completion.prompt) for completion, _ in pairs])
    positions = torch.arange(len(sequence_index)) - cu_seqlens[sequence_index]
    loss_mask = positions >= prompt_lengths[sequence_index]
    rollout_logprobs = torch.zeros(len(sequence_index))
    rollout_logprobs[loss_mask] = torch.tensor([x for completion, _ in pairs for x in completion.rollout_logprobs])
    advantages = torch.tensor([advantage for _, advantage in pairs])[sequence_index]
    return Microbatch(
        tokens=torch.tensor([token for completion, _ in pairs for token in completion.prompt + completion.tokens]),
        positions=positions,
        cu_seqlens=cu_seqlens,
        sequence_index=sequence_index,
        loss_mask=loss_mask,
        advantages=torch.where(loss_mask, advantages, 0.0),
        rollout_logprobs=rollout_logprobs,
    )


def _length(completion: Completion) -> int:
    return len(completion.prompt) + len(completion.tokens)
