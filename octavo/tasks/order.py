"""Which training problem comes when. The cursor is the number of problems drawn so far, so resuming needs no state."""

import random
from collections.abc import Sequence
from functools import lru_cache

from octavo.rollout.counter import uniform_bits


class ProblemOrder:
    """An endless order of problems: each epoch is shuffled anew from the seed, and holds a problem at most once.

    With weights, an epoch holds of each part as many problems as its weight says, as large as it can be; the parts go
    on through their own shuffled problems from epoch to epoch, so that each of those has its turn.
    """

    def __init__(self, part_sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        """Problems are numbered through the parts, from 0.

        Args:
            part_sizes: problems in each part; one part without weights.
            weights: share of each part, up to a factor; empty takes every problem once an epoch.
            seed: of the shuffles.
        """
        self.seed = seed
        self.part_sizes = list(part_sizes)
        self.starts = [sum(part_sizes[:part]) for part in range(len(part_sizes))]
        self.counts = list(part_sizes)
        """Problems of each part in an epoch."""
        if weights:
            epoch_size = min(size / weight for size, weight in zip(part_sizes, weights, strict=True))
            self.counts = [max(1, round(epoch_size * weight)) for weight in weights]
        self.weighted = bool(weights)

    def problem(self, place: int) -> int:
        """Number of the problem at a place, both from 0."""
        epoch, position = divmod(place, sum(self.counts))
        slot = _permutation(sum(self.counts), self.seed, epoch)[position]
        if not self.weighted:
            return slot
        part = 0
        while slot >= self.counts[part]:
            slot -= self.counts[part]
            part += 1
        turn, drawn = divmod(epoch * self.counts[part] + slot, self.part_sizes[part])
        seed = uniform_bits(self.seed, part, turn)
        return self.starts[part] + _permutation(self.part_sizes[part], seed, turn)[drawn]


@lru_cache(maxsize=32)
def _permutation(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(size))
    random.Random(uniform_bits(seed, epoch, size)).shuffle(order)
    return tuple(order)
