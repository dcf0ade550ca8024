"""Decode steps in a row for one batch of sequences, in buffers that stay where they are.

Several steps run before the host looks: each takes the token that the one before it sampled. A sequence that ends in
between computes its last token again until then, which changes nothing. The next run of steps may be launched before
the host has looked at the last. Where a step lies in a CUDA graph
(`rollout.cuda_graph`), the batch is padded to a size that has one with copies of its first sequence, which compute and
write what that does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.decode_step import advance_
from octavo.kernels.triton_attention import has_kernel
from octavo.layers.linear import SCALE_STATE, quantized_layers
from octavo.models.decoder import Decoder
from octavo.rollout.cuda_graph import GraphedSteps, padded_size
from octavo.rollout.kv_cache import KVCache, PagedAttention
from octavo.rollout.sampler import SamplingConfig, draw, looks_at_host, signed
from octavo.rollout.scheduler import Sequence as Running

Step = Callable[[int], None]
"""One decode step of the first so many rows."""


class DecodeBuffers:
    """What decode steps read and write, a row a sequence.

    Args:
        cache: whose pages the sequences hold.
        max_sequences: rows.
        max_tokens: of the longest sequence.
        max_steps: most steps in a row, of two runs under way.
    """

    def __init__(self, cache: KVCache, max_sequences: int, max_tokens: int, max_steps: int) -> None:
        device, self.scratch_page = cache.k.device, cache.scratch_page
        num_pages = -(-max_tokens // cache.page_size)
        self.page_table = torch.full((max_sequences, num_pages), self.scratch_page, dtype=torch.int32, device=device)
        """[B, pages] int32, pages of each sequence in order."""
        self._pages = np.full(self.page_table.shape, self.scratch_page, dtype=np.int32)
        self._known: list[list[int]] = [[] for _ in range(max_sequences)]
        self._columns = torch.zeros(5, max_sequences, dtype=torch.int64, device=device)
        self.tokens, self.positions, self.last_positions, self.sequence_ids, self.order = self._columns
        """[B] int64 each: the last token of each sequence, which the next step runs; its position; the position of the
        last token that the sequence may have; the key of the random numbers; and rows, those of most tokens first."""
        self.running = torch.zeros(max_sequences, dtype=torch.bool, device=device)
        """[B] bool, whether the sequence goes on."""
        self.seed = torch.zeros(1, dtype=torch.int64, device=device)
        """[1] int64."""
        self.step = torch.zeros(1, dtype=torch.int64, device=device)
        """[1] int64, row of `sampled` of the next step."""
        self.sampled = torch.zeros(2 * max_steps, max_sequences, dtype=torch.int64, device=device)
        """[2 * steps, B] int64, tokens in the order of the steps, of one run and of the next."""
        self.logprobs = torch.zeros(2 * max_steps, max_sequences, device=device)
        """[2 * steps, B] fp32, their log-probabilities."""

    def clear(self) -> None:
        """No sequence: a step now writes to the scratch page."""
        self.page_table.fill_(self.scratch_page)
        for buffer in (self.tokens, self.positions, self.last_positions, self.running, self.step):
            buffer.zero_()
        torch.arange(len(self.order), out=self.order)

    def fill(self, sequences: Sequence[Running], seed: int, size: int) -> None:
        """Put sequences into the first rows, and copies of the first into those up to `size`."""
        rows = self.fill_pages(sequences, size)
        order = sorted(range(size), key=lambda row: -rows[row].num_tokens)
        values = [
            (s.last_token, s.num_tokens - 1, s.longest - 1, s.sequence_id, row)
            for s, row in zip(rows, order, strict=True)
        ]
        self._columns[:, :size] = torch.tensor(values).T
        self.running[:size] = True
        self.seed.fill_(signed(seed))

    def fill_pages(self, sequences: Sequence[Running], size: int) -> list[Running]:
        """Put the pages of sequences into the first rows, and of the first into those up to `size`; whose they are."""
        rows = [*sequences, *[sequences[0]] * (size - len(sequences))]
        for row, sequence in enumerate(rows):  # a row mostly holds the same pages as before, and some more
            pages, known = sequence.pages, self._known[row]
            start = len(known) if pages[: len(known)] == known else 0
            if start < len(pages):
                self._pages[row, start : len(pages)] = pages[start:]
            self._known[row] = pages[:]
        longest = max(len(sequence.pages) for sequence in rows)
        table = torch.from_numpy(self._pages[:size, :longest])
        if self.page_table.device.type == "cuda":
            table = table.pin_memory()  # else the host would wait for the steps under way
        self.page_table[:size, :longest].copy_(table, non_blocking=True)
        return rows


@dataclass(frozen=True, eq=False)
class Run:
    """Decode steps that were launched."""

    num_steps: int
    _tokens: Tensor
    _logprobs: Tensor
    _done: torch.cuda.Event | None

    def result(self) -> tuple[list[list[int]], list[list[float]]]:
        """Tokens and log-probabilities, a list a step of a value a sequence; waits until they are there."""
        if self._done is not None:
            self._done.synchronize()
        return self._tokens.tolist(), self._logprobs.tolist()


class DecodeSteps:
    """Runs decode steps of a decoder, as CUDA graphs where they are wanted.

    Args:
        decoder: what is run.
        cache: of its keys and values.
        stop_token_ids: each ends a sequence.
        max_sequences, max_tokens, max_steps: as for `DecodeBuffers`.
        graphs: run steps as CUDA graphs; the numbers are the same without.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        stop_token_ids: Sequence[int],
        *,
        max_sequences: int,
        max_tokens: int,
        max_steps: int,
        graphs: bool,
    ) -> None:
        self.decoder, self.cache, self.graphs, self.max_steps = decoder, cache, graphs, max_steps
        self._first_row = 0
        rows = padded_size(max_sequences) if graphs else max_sequences
        self.buffers = DecodeBuffers(cache, rows, max_tokens, max_steps)
        self.stop_tokens = torch.tensor(sorted(stop_token_ids), dtype=torch.int64, device=cache.k.device)
        self._graphed: dict[float, GraphedSteps] = {}

    def run(
        self, sequences: Sequence[Running], num_steps: int, sampling: SamplingConfig, seed: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """The result of `start`."""
        return self.start(sequences, num_steps, sampling, seed).result()

    @torch.no_grad()
    def start(
        self,
        sequences: Sequence[Running],
        num_steps: int,
        sampling: SamplingConfig,
        seed: int,
        *,
        go_on: bool = False,
    ) -> Run:
        """Have `num_steps` tokens sampled for each sequence; what follows a sequence's end is to be ignored.

        Args:
            sequences: with pages for their tokens so far and `num_steps - 1` more, or up to their end.
            num_steps: at most `max_steps`.
            sampling: how tokens are drawn.
            seed: of the random numbers.
            go_on: after the run before, of the same sequences, of which no more than one may not have been looked at.

        Raises:
            NonFiniteLogits: those of a sequence that had not ended are not finite.
        """
        step, size = self._step_of(sampling), len(sequences)
        if self.runs_ahead(sampling):
            if sampling.temperature not in self._graphed:
                self._graphed[sampling.temperature] = GraphedSteps(step, self._harmless)
            step, size = self._graphed[sampling.temperature], padded_size(size)
            step.prepare(size)
        buffers, n = self.buffers, len(sequences)
        if go_on:
            buffers.fill_pages(sequences, size)
        else:
            buffers.fill(sequences, seed, size)
        self._first_row = self.max_steps - self._first_row  # the other half
        buffers.step.fill_(self._first_row)
        for _ in range(num_steps):
            step(size)
        rows = slice(self._first_row, self._first_row + num_steps)
        tokens, logprobs = (_on_its_way(x[rows, :n]) for x in (buffers.sampled, buffers.logprobs))
        done = torch.cuda.Event() if buffers.tokens.device.type == "cuda" else None
        if done is not None:
            done.record()
        return Run(num_steps, tokens, logprobs, done)

    def runs_ahead(self, sampling: SamplingConfig) -> bool:
        """Whether `start` returns before its steps are done."""
        return self.graphs and not looks_at_host(sampling)

    @contextmanager
    def _harmless(self) -> Iterator[None]:
        """Steps in here write to the scratch page alone, and static activation scales do not learn from them."""
        state = [
            buffer
            for layer in quantized_layers(self.decoder)
            for name, buffer in layer.named_buffers()
            if name in SCALE_STATE
        ]
        before = [buffer.clone() for buffer in state]
        self.buffers.clear()
        try:
            yield
        finally:
            self.buffers.clear()
            for buffer, value in zip(state, before, strict=True):
                buffer.copy_(value)

    def _step_of(self, sampling: SamplingConfig) -> Step:
        buffers = self.buffers

        def step(size: int) -> None:
            tokens, positions, running = (x[:size] for x in (buffers.tokens, buffers.positions, buffers.running))
            context = PagedAttention.decode(self.cache, buffers.page_table[:size], positions, buffers.order[:size])
            hidden = self.decoder(tokens, positions, context)
            logits = self.decoder.logits(hidden, sampling.temperature or 1.0)
            drawn, logprobs = draw(logits, buffers.seed, buffers.sequence_ids[:size], positions + 1, sampling)
            if has_kernel(self.cache.k):
                kept = buffers.step, buffers.sampled, buffers.logprobs, tokens, positions
                advance_(drawn, logprobs, self.stop_tokens, *kept, buffers.last_positions[:size], running)
                return
            buffers.sampled[:, :size].index_copy_(0, buffers.step, drawn[None])
            buffers.logprobs[:, :size].index_copy_(0, buffers.step, logprobs[None])
            buffers.step += 1
            ended = (drawn[:, None] == self.stop_tokens).any(dim=1) | (positions + 1 >= buffers.last_positions[:size])
            running &= ~ended
            tokens.copy_(torch.where(running, drawn, tokens))
            positions += running

        return step


def _on_its_way(x: Tensor) -> Tensor:
    """x on the host, once its device has come so far."""
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=x.device.type == "cuda").copy_(x, non_blocking=True)
