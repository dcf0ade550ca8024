"""Which sequences run next: continuous batching over a fixed number of pages.

A step is either a prefill (new or preempted sequences) or a decode (one token for every running sequence, or several in
a row). The whole pages of a prompt are computed once by the first of its group and shared by the others; each sequence
computes the rest of its prompt, at least the last token, itself. When pages run out, prompts that nobody runs are
forgotten first, then the sequence admitted last is preempted: its pages go back and it is prefilled again later, bit
for bit the same.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.rollout.kv_cache import PageAllocator


@dataclass(eq=False)
class PromptGroup:
    """A prompt and the pages that hold its whole pages once its first sequence has been prefilled."""

    prompt: list[int]
    """Token ids."""
    pages: list[int] | None = None
    """Whole pages of the prompt, held by the group itself; None before the first prefill or after eviction."""
    leader: Sequence | None = None
    """The sequence that is prefilling the prompt now; the others wait for it."""
    num_unfinished: int = 0
    """Sequences of the group that still want tokens."""


@dataclass(eq=False)
class Sequence:
    """One completion in the making."""

    sequence_id: int
    """Keys the random numbers; unique in the run of the engine."""
    group: PromptGroup
    max_completion_tokens: int
    """Stop after this many."""
    completion: list[int] = field(default_factory=list)
    """Sampled token ids."""
    logprobs: list[float] = field(default_factory=list)
    """rollout_logprobs of the completion."""
    pages: list[int] = field(default_factory=list)
    """Pages in order, shared ones first."""
    num_stored: int = 0
    """Tokens whose keys and values are in the pages."""
    finish_reason: str = ""
    """"stop" or "length" once finished."""

    @property
    def tokens(self) -> list[int]:
        """Prompt and completion so far."""
        return self.group.prompt + self.completion

    @property
    def last_token(self) -> int:
        """Of those."""
        return (self.completion or self.group.prompt)[-1]

    @property
    def num_tokens(self) -> int:
        """Their number."""
        return len(self.group.prompt) + len(self.completion)

    @property
    def longest(self) -> int:
        """Tokens that it may come to have."""
        return len(self.group.prompt) + self.max_completion_tokens

    @property
    def is_new(self) -> bool:
        """Whether more than the last token is to be computed."""
        return self.num_tokens - self.num_stored > 1


@dataclass(eq=False)
class Scheduler:
    """Waiting and running sequences, and the pages they hold.

    Args:
        num_pages, page_size: the cache's.
        max_sequences: most sequences running at once.
        max_prefill_tokens: most new tokens in one prefill step (one sequence is always allowed).
    """

    num_pages: int
    page_size: int
    max_sequences: int
    max_prefill_tokens: int
    waiting: list[Sequence] = field(default_factory=list)
    running: list[Sequence] = field(default_factory=list)
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.allocator = PageAllocator(self.num_pages)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence.

        Raises:
            ValueError: it could not fit in the cache even alone.
        """
        if self._pages_for(sequence.longest) > self.num_pages:
            raise ValueError(
                f"a sequence of up to {sequence.longest} tokens needs {self._pages_for(sequence.longest)} pages of "
                f"{self.page_size}, but the KV cache has {self.num_pages}; raise rollout.engine.kv_cache_tokens or "
                f"sample less"
            )
        self.waiting.append(sequence)
        sequence.group.num_unfinished += 1

    def schedule(self) -> list[Sequence]:
        """The sequences of the next step, with pages for their tokens so far; empty when all are finished.

        Their new tokens are `tokens[num_stored:]`: more than one means that the step is a prefill.
        """
        prefill = self._admit()
        return prefill if prefill else self._grow()

    def steps_ahead(self, sequences: list[Sequence], wanted: int, under_way: int = 0) -> int:
        """Take free pages for decode steps in a row.

        Args:
            sequences: those of a decode step, as scheduled.
            wanted: most steps.
            under_way: steps that are launched, but not looked at; the first after a schedule needs no more pages.

        Returns:
            How many steps the free pages allow, at least 1 if none are under way.
        """
        for steps in range(wanted, 0 if under_way else 1, -1):
            ends = [min(s.num_tokens + under_way + steps - 1, s.longest - 1) for s in sequences]
            needed = [max(self._pages_for(end) - len(s.pages), 0) for s, end in zip(sequences, ends, strict=True)]
            if sum(needed) <= self.allocator.num_free:
                for sequence, count in zip(sequences, needed, strict=True):
                    sequence.pages += self.allocator.allocate(count)
                return steps
        return 0 if under_way else 1

    def stored(self, sequences: list[Sequence]) -> None:
        """Note that all tokens of these sequences but the last, just sampled, are computed and stored."""
        for sequence in sequences:
            sequence.num_stored = sequence.num_tokens - 1
            group = sequence.group
            if group.leader is sequence:
                group.leader = None
                group.pages = sequence.pages[: self._whole_prompt_pages(group)]
                self.allocator.share(group.pages)

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Take a sequence out and give its pages back."""
        sequence.finish_reason = reason
        self.running.remove(sequence)
        self._release(sequence)
        sequence.group.num_unfinished -= 1
        if sequence.group.num_unfinished == 0:
            self._forget(sequence.group)

    def _admit(self) -> list[Sequence]:
        """Move waiting sequences to running while there is room; a leader's group waits for it."""
        admitted: list[Sequence] = []
        num_tokens = 0
        for sequence in list(self.waiting):
            group = sequence.group
            if len(self.running) >= self.max_sequences:
                break
            if group.leader is not None:
                continue
            shared = group.pages or []
            num_new = sequence.num_tokens - len(shared) * self.page_size
            needed = self._pages_for(sequence.num_tokens + 1) - len(shared)
            if admitted and num_tokens + num_new > self.max_prefill_tokens:
                break
            # Keep a page for each running sequence, or decode would preempt what was just admitted.
            while needed + len(self.running) > self.allocator.num_free and self._forget_idle(keep=group):
                pass
            if needed + len(self.running) > self.allocator.num_free:
                break
            self.waiting.remove(sequence)
            self.allocator.share(shared)
            sequence.pages = shared + self.allocator.allocate(needed)
            sequence.num_stored = len(shared) * self.page_size
            if group.pages is None:
                group.leader = sequence
            self.running.append(sequence)
            admitted.append(sequence)
            num_tokens += num_new
        return admitted

    def _grow(self) -> list[Sequence]:
        """A page more for each running sequence that needs one, preempting from the end."""
        for sequence in list(self.running):
            needed = self._pages_for(sequence.num_tokens) - len(sequence.pages)
            if needed <= 0 or sequence not in self.running:
                continue
            while needed > self.allocator.num_free:
                if not self._forget_idle(keep=sequence.group):
                    self._preempt(self.running[-1])
                if sequence not in self.running:
                    break
            else:
                sequence.pages += self.allocator.allocate(needed)
        return list(self.running)

    def _preempt(self, sequence: Sequence) -> None:
        """Back to the front of the queue; its tokens are kept and its pages are not."""
        assert len(self.running) > 1, "the only running sequence ran out of pages: add() should have refused it"
        self.running.remove(sequence)
        self._release(sequence)
        self.waiting.insert(0, sequence)
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        self.allocator.release(sequence.pages)
        sequence.pages, sequence.num_stored = [], 0

    def _forget_idle(self, keep: PromptGroup) -> bool:
        """Give back the prompt pages of one group that has no running sequence; False when there is none."""
        busy = {id(sequence.group) for sequence in self.running} | {id(keep)}
        for sequence in reversed(self.waiting):
            if sequence.group.pages is not None and id(sequence.group) not in busy:
                self._forget(sequence.group)
                return True
        return False

    def _forget(self, group: PromptGroup) -> None:
        if group.pages is not None:
            self.allocator.release(group.pages)
            group.pages = None

    def _whole_prompt_pages(self, group: PromptGroup) -> int:
        """Pages that hold prompt tokens only, the last prompt token left out: somebody must compute it to sample."""
        return (len(group.prompt) - 1) // self.page_size

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)
