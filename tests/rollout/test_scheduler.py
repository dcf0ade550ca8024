"""Continuous batching over pages: invariants under random workloads, and small cases worked out by hand."""

import random
from collections import Counter

import pytest

from octavo.rollout.scheduler import PromptGroup, Scheduler, Sequence


class Simulation:
    """Runs a scheduler as the engine does, with a dictionary for a KV cache, and checks every step.

    A slot holds the whole prefix that its key and value would depend on, so reading a slot that was overwritten, never
    written, or written for another prompt cannot go unnoticed.
    """

    def __init__(
        self, scheduler: Scheduler, rng: random.Random, stop_share: float = 0.05, decode_steps: int = 1
    ) -> None:
        self.scheduler, self.rng, self.stop_share = scheduler, rng, stop_share
        self.decode_steps, self.num_steps = decode_steps, 0
        self.slots: dict[int, tuple[int, ...]] = {}
        self.sequences: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.batches: list[list[int]] = []
        self.num_computed = self.num_evictions = self.max_running = 0
        self.was_prefill = False

    def add_group(self, prompt: list[int], group_size: int, max_completion_tokens: int) -> list[Sequence]:
        group = PromptGroup(prompt)
        members = [Sequence(len(self.sequences) + g, group, max_completion_tokens) for g in range(group_size)]
        for sequence in members:
            self.scheduler.add(sequence)
            self.sequences.append(sequence)
        return members

    def step(self) -> bool:
        queue = self.scheduler
        waiting, oldest, num_preemptions = list(queue.waiting), queue.running[:1], queue.num_preemptions
        held_before = {id(s.group) for s in waiting if s.group.pages is not None}
        batch = queue.schedule()
        if not batch:
            return False
        self.batches.append([sequence.sequence_id for sequence in batch])
        self.num_evictions += sum(id(group) in held_before and group.pages is None for group in self._groups())
        self._check_order(waiting, oldest, batch)
        assert not self.was_prefill or queue.num_preemptions == num_preemptions, "preempts what was just admitted"
        self.was_prefill = batch[0] in waiting
        self._check_pages(batch)
        self.max_running = max(self.max_running, len(queue.running))
        decodes = not any(sequence.is_new for sequence in batch)
        steps = queue.steps_ahead(batch, self.decode_steps) if decodes else 1
        assert 1 <= steps <= self.decode_steps
        self.num_steps += steps
        reasons = {sequence: self._sample(sequence, steps) for sequence in batch}
        queue.stored(batch)
        for sequence, reason in reasons.items():
            assert sequence.num_stored == len(sequence.tokens) - 1
            assert len(sequence.pages) <= -(-sequence.longest // queue.page_size)
            if reason:
                queue.finish(sequence, reason)
                self.finished.append(sequence)
        return True

    def _sample(self, sequence: Sequence, steps: int) -> str:
        """Tokens of so many steps, or up to the end of the sequence; why it ended."""
        for _ in range(steps):
            self._compute(sequence)
            sequence.num_stored = len(sequence.tokens)
            sequence.completion.append(self.rng.randrange(50))
            if self.rng.random() < self.stop_share:
                return "stop"
            if len(sequence.completion) == sequence.max_completion_tokens:
                return "length"
        return ""

    def run(self) -> None:
        limit = 20 * sum(s.max_completion_tokens for s in self.sequences) + 100
        while self.step():
            assert len(self.batches) < limit, "no progress"
        queue = self.scheduler
        assert len(self.finished) == len(self.sequences), "a sequence was forgotten"
        assert all(s.finish_reason and not s.pages for s in self.sequences)
        assert not queue.waiting and not queue.running
        assert queue.allocator.num_free == queue.num_pages, "pages leak"
        assert all(group.pages is None and group.num_unfinished == 0 for group in self._groups())

    def _groups(self) -> list[PromptGroup]:
        return list({id(s.group): s.group for s in self.sequences}.values())

    def _check_order(self, waiting: list[Sequence], oldest: list[Sequence], batch: list[Sequence]) -> None:
        """First come, first served; whoever has run longest keeps running."""
        queue = self.scheduler
        admitted = [s for s in batch if s in waiting]
        if admitted:
            assert admitted == batch, "a step is a prefill or a decode"
            last = waiting.index(admitted[-1])
            for passed in (s for s in waiting[:last] if s not in admitted):
                assert any(s.group is passed.group for s in admitted), "passed over without waiting for its prompt"
            num_new = sum(len(s.tokens) - s.num_stored for s in batch)
            assert len(batch) == 1 or num_new <= queue.max_prefill_tokens
        else:
            assert batch == queue.running
            assert all(len(s.tokens) - s.num_stored == 1 for s in batch)
        assert len(queue.running) <= queue.max_sequences
        assert queue.running[:1] == (oldest or batch[:1]), "the oldest sequence was preempted"
        assert not set(map(id, queue.running)) & set(map(id, queue.waiting))

    def _check_pages(self, batch: list[Sequence]) -> None:
        """Reference counts are the holders; what is written has one holder; what is shared is the same prompt."""
        queue = self.scheduler
        holders = Counter(page for s in queue.running for page in s.pages)
        assert all(not s.pages and s.num_stored == 0 for s in queue.waiting)
        by_group = Counter(page for group in self._groups() for page in group.pages or [])
        assert max(by_group.values(), default=1) == 1, "two prompts hold one page"
        assert queue.allocator.num_free == queue.num_pages - len(holders.keys() | by_group.keys())
        for sequence in queue.running:
            assert len(sequence.pages) == len(set(sequence.pages))
            assert len(sequence.pages) * queue.page_size >= sequence.num_stored
            for index, page in enumerate(sequence.pages):
                if holders[page] + by_group[page] > 1:
                    assert sequence.group.pages is not None and sequence.group.pages[index] == page
                    assert (index + 1) * queue.page_size < len(sequence.group.prompt), "not a whole page of the prompt"
        for sequence in batch:
            assert len(sequence.pages) * queue.page_size >= len(sequence.tokens)
            for position in range(sequence.num_stored, len(sequence.tokens)):
                page = sequence.pages[position // queue.page_size]
                assert holders[page] + by_group[page] == 1, "a shared page is written"

    def _compute(self, sequence: Sequence) -> None:
        size, tokens = self.scheduler.page_size, sequence.tokens
        slots = [sequence.pages[position // size] * size + position % size for position in range(len(tokens))]
        assert sequence.num_stored < len(tokens), "nothing to sample from"
        for position in range(sequence.num_stored):
            assert self.slots.get(slots[position]) == tuple(tokens[: position + 1]), "reads what is not its own"
        for position in range(sequence.num_stored, len(tokens)):
            self.slots[slots[position]] = tuple(tokens[: position + 1])
        self.num_computed += len(tokens) - sequence.num_stored


def make(num_pages=100, page_size=4, max_sequences=64, max_prefill_tokens=4096, stop_share=0.0, seed=0):
    scheduler = Scheduler(
        num_pages=num_pages, page_size=page_size, max_sequences=max_sequences, max_prefill_tokens=max_prefill_tokens
    )
    return Simulation(scheduler, random.Random(seed), stop_share)


def prompt_of(length, start=0):
    return [start + i for i in range(length)]


def test_random_workloads_keep_every_invariant():
    preemptions = evictions = tight = 0
    for seed in range(300):
        rng = random.Random(seed)
        page_size = rng.choice([1, 2, 4, 7, 16])
        longest = rng.choice([8, 40])
        max_completion = rng.randint(1, 30)
        room = rng.choice([0, 1, 3, 30])  # pages beyond what the longest sequence needs
        simulation = make(
            num_pages=-(-(longest + max_completion) // page_size) + room,
            page_size=page_size,
            max_sequences=rng.choice([1, 2, 5, 64]),
            max_prefill_tokens=rng.choice([1, 10, 60, 4096]),
            stop_share=rng.choice([0.0, 0.1]),
            seed=seed,
        )
        for _ in range(rng.randint(1, 8)):
            prompt = [rng.randrange(50) for _ in range(rng.randint(1, longest))]
            simulation.add_group(prompt, rng.randint(1, 5), rng.randint(1, max_completion))
        simulation.run()
        preemptions += simulation.scheduler.num_preemptions
        evictions += simulation.num_evictions
        tight += room == 0
    print(f"{preemptions} preemptions, {evictions} evicted prompts, {tight} caches without a page to spare")
    assert preemptions > 100 and evictions > 30 and tight > 20


def test_sequences_added_while_others_run_are_served():
    simulation = make(num_pages=20, seed=1)
    simulation.add_group(prompt_of(10), 3, 12)
    for round_ in range(5):
        for _ in range(4):
            simulation.step()
        simulation.add_group(prompt_of(5 + round_), 2, 9)
    simulation.run()
    assert len(simulation.finished) == 13


def test_a_prompt_is_computed_once_and_its_whole_pages_are_shared():
    # 11 tokens in pages of 4: pages 0 and 1 are whole and shared, tokens 8 to 10 are computed by each of 5.
    simulation = make(max_sequences=5)
    members = simulation.add_group(prompt_of(11), 5, 3)
    assert simulation.step()
    assert simulation.batches == [[0]], "the others wait for the first"
    assert simulation.num_computed == 11
    assert simulation.step()
    assert simulation.batches[1] == [1, 2, 3, 4]
    assert simulation.num_computed == 11 + 4 * 3
    shared = members[0].group.pages
    assert len(shared) == 2
    assert all(s.pages[:2] == shared for s in members)
    used = 100 - simulation.scheduler.allocator.num_free
    assert used == 2 + 5 * 1  # 12 tokens are 3 pages: unshared it would be 15
    simulation.run()


@pytest.mark.parametrize("length, whole_pages", [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_the_last_prompt_token_is_never_shared(length, whole_pages):
    # Its hidden state is needed to sample, so a page that ends with it is everybody's own.
    simulation = make()
    (first, _) = simulation.add_group(prompt_of(length), 2, 2)
    simulation.step()
    assert first.group.pages is not None and len(first.group.pages) == whole_pages
    simulation.step()
    assert simulation.num_computed == length + (length - 4 * whole_pages)
    simulation.run()


def test_prefill_stops_at_max_prefill_tokens_and_lets_one_long_prompt_through():
    simulation = make(max_prefill_tokens=20)
    for length in (12, 8, 1, 30, 5, 5):
        simulation.add_group(prompt_of(length), 1, 2)
    simulation.run()
    assert simulation.batches[:4] == [[0, 1], [2], [3], [4, 5]]  # 12 + 8 = 20 fits, 1 + 30 does not


def test_max_sequences_bounds_what_runs():
    simulation = make(max_sequences=3)
    for _ in range(7):
        simulation.add_group(prompt_of(3), 1, 4)
    simulation.run()
    assert simulation.max_running == 3


def test_the_last_admitted_is_preempted_and_comes_back_first():
    # 6 pages of 2. Two prompts of 3 with up to 6 more: 5 pages each at the end.
    simulation = make(num_pages=6, page_size=2)
    first, second = (simulation.add_group(prompt_of(3, start), 1, 6)[0] for start in (0, 10))
    third = simulation.add_group(prompt_of(3, 20), 1, 1)[0]
    preempted_at = None
    while simulation.step():
        if simulation.scheduler.num_preemptions and preempted_at is None:
            preempted_at = len(simulation.batches)
            assert simulation.scheduler.waiting[0] is second
            assert second.completion and not second.pages
    assert preempted_at is not None
    assert simulation.finished[0] is first
    assert simulation.finished.index(second) < simulation.finished.index(third)
    simulation.run()


def test_idle_prompts_are_forgotten_before_anybody_is_preempted():
    # The cache holds one running sequence at its longest and two prompt pages more.
    simulation = make(num_pages=7, page_size=4, max_sequences=1)
    simulation.add_group(prompt_of(9), 2, 16)  # shares 2 pages with its second member
    simulation.add_group(prompt_of(9, 100), 1, 16)
    simulation.run()
    assert simulation.scheduler.num_preemptions == 0


def test_what_can_never_fit_is_refused_with_the_way_out():
    scheduler = make(num_pages=5, page_size=4).scheduler
    group = PromptGroup(prompt_of(13))
    scheduler.add(Sequence(0, group, 7))  # 20 tokens, 5 pages
    with pytest.raises(ValueError, match=r"up to 21 tokens needs 6 pages of 4, .* has 5; raise .*kv_cache_tokens"):
        scheduler.add(Sequence(1, group, 8))
    assert len(scheduler.waiting) == 1 and group.num_unfinished == 1


def test_a_cache_of_exactly_one_sequence_runs_a_group_one_by_one():
    simulation = make(num_pages=5, page_size=4)
    simulation.add_group(prompt_of(13), 3, 7)
    simulation.add_group(prompt_of(13, 50), 2, 7)
    simulation.run()
    assert [s.sequence_id for s in simulation.finished] == [0, 1, 2, 3, 4]
    assert all(len(s.completion) == 7 and s.finish_reason == "length" for s in simulation.finished)
