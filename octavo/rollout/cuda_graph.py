"""CUDA graphs of one function that works in buffers that stay where they are, one graph a batch size."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

WARM_UP_CALLS = 2
"""Before a capture: the first call compiles kernels and proves back ends, which a capture cannot."""


def padded_size(size: int) -> int:
    """The smallest size not below this one that has a graph: 1, 2, 4, then multiples of 8, from 64 on of 16."""
    for largest, multiple in ((1, 1), (2, 2), (4, 4), (64, 8)):
        if size <= largest:
            return -(-size // multiple) * multiple
    return -(-size // 16) * 16


class GraphedSteps:
    """A step as a CUDA graph for each batch size, captured when it is first wanted.

    A graph holds addresses, not numbers: weights that are rewritten in place are what the next replay reads.

    Args:
        step: called with a batch size; launches kernels, never waits for one.
        harmless: within it a step changes nothing that lasts.
    """

    def __init__(self, step: Callable[[int], None], harmless: Callable[[], AbstractContextManager[None]]) -> None:
        self.step, self.harmless = step, harmless
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def prepare(self, size: int) -> None:
        """Have the graph of a size."""
        if size in self._graphs:
            return
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with self.harmless():
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP_CALLS):
                    self.step(size)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph, pool=self._pool):
                self.step(size)
        self._graphs[size] = graph

    def __call__(self, size: int) -> None:
        """One step of a size that is prepared."""
        self._graphs[size].replay()
