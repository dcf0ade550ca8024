"""The in-process engine: prompts in, completions with rollout_logprobs out.

It owns no weights. It runs the trainer's decoder, so a re-quantisation after an optimiser step is the weight sync.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from octavo.kernels.device import runs_kernels
from octavo.kernels.triton_attention import has_kernel
from octavo.models.decoder import Decoder
from octavo.rollout import scheduler
from octavo.rollout.decode import DecodeSteps
from octavo.rollout.kv_cache import KVCache, PagedAttention
from octavo.rollout.sampler import SamplingConfig, check_finite, draw, signed
from octavo.rollout.scheduler import PromptGroup, Scheduler

Steps = tuple[list[list[int]], list[list[float]]]
"""Sampled tokens and their log-probabilities, a list a step of a value a sequence."""
MAX_GROUP_SIZE = 2**20
"""Random numbers are keyed by prompt index * this + group member, so a larger group keeps the smaller one's samples."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """octavo's own engine, in the trainer's process, on the trainer's bytes: its memory and batching, none of which
    changes a number in a completion. A name alone, as `rollout.engine: vllm`, stands for the section's type."""

    type_name: ClassVar[str] = "octavo"
    shorthand: ClassVar[str] = "type"
    page_size: int = 16
    """Tokens in a page of the KV cache."""
    kv_cache_tokens: int = 65536
    """Tokens that the KV cache holds, rounded down to whole pages."""
    max_sequences: int = 256
    """Most sequences running at once."""
    max_prefill_tokens: int = 8192
    """Most new tokens in one prefill step."""
    decode_steps: int = 4
    """Decode steps in a row before the host looks which completions have ended, where kernels run; else 1."""
    cuda_graphs: bool = True
    """Run decode steps as CUDA graphs, where kernels run."""
    lend_memory: bool = False
    """Give the KV cache's memory to training between rollouts, and take it back: larger caches and microbatches, and
    some time in each step (docs/memory.md). For a CUDA device."""

    def __post_init__(self) -> None:
        for name in ("page_size", "kv_cache_tokens", "max_sequences", "max_prefill_tokens", "decode_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if self.kv_cache_tokens < self.page_size:
            raise ValueError(f"kv_cache_tokens={self.kv_cache_tokens} is less than one page of {self.page_size} tokens")


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What the policy sampled for a prompt.

    Example: Completion(prompt=[5, 9], tokens=[7, 2], rollout_logprobs=[-0.1, -0.3], finish_reason="stop").
    """

    prompt: list[int]
    """Token ids."""
    tokens: list[int]
    """Sampled token ids; the stop token, if one was sampled, is the last and is part of the loss."""
    rollout_logprobs: list[float]
    """FP32 log-probability of each sampled token, at the sampling temperature."""
    finish_reason: str
    """"stop": a stop token was sampled. "length": cut off at the limit (truncated)."""


class RolloutEngine(Protocol):
    """What the trainer samples with: `Engine`, or another behind the same call."""

    decoder: Decoder
    """Whose bytes the engine multiplies, or loads before it samples."""
    stop_token_ids: frozenset[int]
    """Each ends a completion."""

    def generate(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingConfig,
        *,
        max_completion_tokens: int,
        group_size: int = 1,
        seed: int = 0,
        first_index: int = 0,
        progress: Callable[[int], None] | None = None,
        on_completion: Callable[[int, int, Completion], None] | None = None,
    ) -> list[list[Completion]]:
        """As `Engine.generate`."""


class Engine:
    """Generates completions with the decoder's current weights.

    Args:
        decoder: shared with the trainer.
        config: memory and batching.
        stop_token_ids: each ends a completion.
    """

    def __init__(self, decoder: Decoder, config: EngineConfig, stop_token_ids: Sequence[int]) -> None:
        self.decoder, self.config, self.stop_token_ids = decoder, config, frozenset(stop_token_ids)
        self.device = decoder.embed_tokens.device
        self.cache = KVCache(
            decoder.config,
            config.kv_cache_tokens // config.page_size,
            config.page_size,
            decoder.recipe.kv_cache,
            self.device,
            config.lend_memory,
        )
        kernels = runs_kernels(self.cache.k) and has_kernel(self.cache.k)  # the reference reads positions on the host
        self.decode_steps = config.decode_steps if kernels else 1
        self.decode = DecodeSteps(
            decoder,
            self.cache,
            stop_token_ids,
            max_sequences=config.max_sequences,
            max_tokens=decoder.max_tokens,
            max_steps=config.decode_steps,
            graphs=config.cuda_graphs and kernels,
        )
        self.num_preemptions = 0
        """Of the last `generate`."""
        self.num_sampled = 0
        """Tokens sampled since the engine was made; like the two below it grows while `generate` runs."""
        self.num_prefilled = 0
        """Tokens that prefills computed: prompts, and preempted completions again."""
        self.prefill_s = 0.0
        """Seconds that they took."""

    def lend(self) -> None:
        """Give the KV cache's memory to others until `generate` takes it back, where the config says so."""
        self.cache.lend()

    def uncounted_bytes(self) -> int:
        """Of the KV cache while it is not lent, where torch's allocator does not count them."""
        return 0 if self.cache.memory is None else self.cache.memory.mapped_bytes

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[list[int]],
        sampling: SamplingConfig,
        *,
        max_completion_tokens: int,
        group_size: int = 1,
        seed: int = 0,
        first_index: int = 0,
        skip: Container[tuple[int, int]] = (),
        progress: Callable[[int], None] | None = None,
        on_completion: Callable[[int, int, Completion], None] | None = None,
    ) -> list[list[Completion]]:
        """Sample `group_size` completions of each prompt.

        A completion depends on the weights, its prompt, the sampling rule, the seed and its place (index of the
        prompt, group member) only: not on batch order, page size, preemption, or how much fits in the cache.

        Args:
            prompts: P lists of token ids.
            sampling: how tokens are drawn.
            max_completion_tokens: completions are cut off at this length.
            group_size: G.
            seed: of the random numbers.
            first_index: index of the first prompt, when these are a part of more prompts.
            skip: (index in `prompts`, group member) of completions that are not sampled and are missing in the result.
            progress: called after every step with the number of completions that finished in it; may raise.
            on_completion: called with (index in `prompts`, group member, completion) of each as it finishes.

        Returns:
            P lists of G completions, less what was skipped.

        Raises:
            ValueError: an empty prompt, one that cannot fit or that is not of this vocabulary; logits that are not
                finite; the device does not give the KV cache's memory back.
        """
        check_request(self.decoder, prompts, max_completion_tokens, group_size)
        queue = Scheduler(
            num_pages=self.cache.num_pages,
            page_size=self.cache.page_size,
            max_sequences=self.config.max_sequences,
            max_prefill_tokens=self.config.max_prefill_tokens,
        )
        sequences = [
            [
                scheduler.Sequence((first_index + p) * MAX_GROUP_SIZE + g, group, max_completion_tokens)
                for g in range(group_size)
                if (p, g) not in skip
            ]
            for p, group in enumerate(PromptGroup(list(prompt)) for prompt in prompts)
        ]
        for group in sequences:
            for sequence in group:
                queue.add(sequence)

        def finish(finished: list[scheduler.Sequence]) -> None:
            for sequence in finished:
                queue.finish(sequence, self._reason(sequence))
                if on_completion is not None:
                    p, g = divmod(sequence.sequence_id, MAX_GROUP_SIZE)
                    on_completion(p - first_index, g, _completion(sequence))
            if progress is not None:
                progress(len(finished))

        self.cache.take_back()
        while batch := queue.schedule():
            if any(sequence.is_new for sequence in batch):
                finish(self._take(queue, batch, self._prefill(batch, sampling, seed), seed))
                continue
            for steps in self._decode(queue, batch, sampling, seed):
                finish(self._take(queue, batch, steps, seed))
        self.num_preemptions = queue.num_preemptions
        return [[_completion(sequence) for sequence in group] for group in sequences]

    def _decode(
        self, queue: Scheduler, batch: list[scheduler.Sequence], sampling: SamplingConfig, seed: int
    ) -> Iterator[Steps]:
        """Runs of decode steps until a sequence has ended or pages are short; the next starts before one is looked at.

        A sequence that turns out to have ended does no harm in the run after: its pages are given to none that is
        launched before.
        """
        runs = deque([self.decode.start(batch, queue.steps_ahead(batch, self._wanted(batch, 0)), sampling, seed)])
        while runs:
            under_way = sum(run.num_steps for run in runs)
            wanted = self._wanted(batch, under_way)
            if (
                self.decode.runs_ahead(sampling)
                and wanted > 0
                and not any(sequence.finish_reason for sequence in batch)
            ):
                if steps := queue.steps_ahead(batch, wanted, under_way):
                    runs.append(self.decode.start(batch, steps, sampling, seed, go_on=True))
            yield runs.popleft().result()

    def _wanted(self, batch: list[scheduler.Sequence], under_way: int) -> int:
        return min(self.decode_steps, max(s.longest - s.num_tokens for s in batch) - under_way)

    def _take(
        self, queue: Scheduler, batch: list[scheduler.Sequence], steps: Steps, seed: int
    ) -> list[scheduler.Sequence]:
        """Give each sequence that goes on its tokens; those that they end."""
        for sequence, tokens, logprobs in zip(batch, *(zip(*values, strict=True) for values in steps), strict=True):
            if not sequence.finish_reason:
                self._append(sequence, tokens, logprobs, seed)
        going = [sequence for sequence in batch if not sequence.finish_reason]
        queue.stored(going)
        return [sequence for sequence in going if self._reason(sequence)]

    def _prefill(self, batch: list[scheduler.Sequence], sampling: SamplingConfig, seed: int) -> Steps:
        """Run the new tokens of each sequence and sample its next one; the one step of `DecodeSteps.run`."""
        start = time.perf_counter()
        new = [sequence.tokens[sequence.num_stored :] for sequence in batch]
        num_pages = max(len(sequence.pages) for sequence in batch)
        page_table = self._tensor([s.pages + [self.cache.scratch_page] * (num_pages - len(s.pages)) for s in batch])
        first_positions = [sequence.num_stored for sequence in batch]
        context = PagedAttention(self.cache, page_table, first_positions, [len(tokens) for tokens in new])
        hidden = self.decoder(self._tensor([token for tokens in new for token in tokens]), context.positions, context)
        last = self._tensor([len(tokens) for tokens in new]).cumsum(0) - 1
        logits = self.decoder.logits(hidden[last], sampling.temperature or 1.0)
        ids, positions = ([getattr(s, name) for s in batch] for name in ("sequence_id", "num_tokens"))
        drawn = draw(logits, self._tensor([signed(seed)]), self._tensor(ids), self._tensor(positions), sampling)
        tokens, logprobs = (x.tolist() for x in drawn)  # waits for the device
        self.num_prefilled += sum(map(len, new))
        self.prefill_s += time.perf_counter() - start
        return [tokens], [logprobs]

    def _tensor(self, values: Sequence[int] | Sequence[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _append(
        self, sequence: scheduler.Sequence, tokens: Sequence[int], logprobs: Sequence[float], seed: int
    ) -> None:
        """Add sampled tokens up to the sequence's end."""
        first = sequence.num_tokens
        count = min(len(tokens), sequence.longest - first)
        if not self.stop_token_ids.isdisjoint(tokens):
            ends = (i for i, token in enumerate(tokens[:count], start=1) if token in self.stop_token_ids)
            count = next(ends, count)
        check_finite(logprobs[:count], [(seed, sequence.sequence_id, first + i) for i in range(count)])
        sequence.completion += tokens[:count]
        sequence.logprobs += logprobs[:count]
        self.num_sampled += count

    def _reason(self, sequence: scheduler.Sequence) -> str:
        """Why the sequence has ended; empty where it goes on."""
        if sequence.completion[-1] in self.stop_token_ids:
            return "stop"
        return "length" if sequence.num_tokens == sequence.longest else ""


def check_request(
    decoder: Decoder, prompts: Sequence[Sequence[int]], max_completion_tokens: int, group_size: int
) -> None:
    """Refuse what no engine of this decoder can sample.

    Raises:
        ValueError: an empty prompt, one that cannot fit or that is not of this vocabulary; a size below 1.
    """
    for name, value in (("max_completion_tokens", max_completion_tokens), ("group_size", group_size)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1; got {value}")
    check_group_size("group_size", group_size)
    vocab_size = decoder.config.vocab_size
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise ValueError(f"prompt {index} is empty: a completion needs at least one token before it")
        if min(prompt) < 0 or max(prompt) >= vocab_size:
            raise ValueError(
                f"prompt {index} has token ids from {min(prompt)} to {max(prompt)}, but the model's vocabulary is "
                f"0 to {vocab_size - 1}: is the tokenizer another model's?"
            )
        if len(prompt) + max_completion_tokens > decoder.max_tokens:
            raise ValueError(
                f"prompt {index} has {len(prompt)} tokens; with {max_completion_tokens} more it exceeds the "
                f"{decoder.max_tokens} that the decoder was made for"
            )


def check_group_size(name: str, size: int) -> None:
    """Refuse more completions of a prompt than there are random numbers for; ValueError names the key."""
    if size > MAX_GROUP_SIZE:
        raise ValueError(f"{name} is at most {MAX_GROUP_SIZE}; got {size}. Ask for fewer completions")


def _completion(sequence: scheduler.Sequence) -> Completion:
    return Completion(
        prompt=sequence.group.prompt,
        tokens=sequence.completion,
        rollout_logprobs=sequence.logprobs,
        finish_reason=sequence.finish_reason,
    )
