"""How far and how fast: a bar on a terminal, a line now and then elsewhere, and a summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from octavo.rollout.engine import Engine
from octavo.trainer.metrics import Display

LINE_INTERVAL_S = 10.0
"""Between lines where there is no terminal."""


class Meter:
    """Of an engine's work.

    Args:
        engine: made for this work alone.
        display: on the error channel.
        total: completions to sample.
    """

    def __init__(self, engine: Engine, display: Display, total: int) -> None:
        self.engine, self.display, self.total = engine, display, total
        self.num_finished = self.num_preemptions = 0
        self._start = time.perf_counter()

    @property
    def speed(self) -> str:
        """Sampled tokens a second, prompts and start-up included."""
        return f"{self.engine.num_sampled / (time.perf_counter() - self._start):,.0f} tok/s"

    @contextmanager
    def running(self) -> Iterator[Callable[[int], None]]:
        """Yields what is told, after every step, how many completions finished in it."""
        if not self.display.console.is_terminal:
            yield self._lines()
            return
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
        times = (TimeElapsedColumn(), TimeRemainingColumn())
        console = self.display.console
        with Progress(*columns, *times, console=console, transient=True, redirect_stdout=False) as progress:
            task = progress.add_task("generate", total=self.total, speed="")

            def advance(count: int) -> None:
                self.num_finished += count
                progress.update(task, advance=count, speed=self.speed)

            yield advance

    def _lines(self) -> Callable[[int], None]:
        last = self._start

        def advance(count: int) -> None:
            nonlocal last
            self.num_finished += count
            if time.perf_counter() - last >= LINE_INTERVAL_S:
                last = time.perf_counter()
                sampled = f"{self.engine.num_sampled:,} tokens"
                self.display.line(f"{self.num_finished:,} of {self.total:,} completions, {sampled}, {self.speed}")

        return advance

    def summary(self) -> str:
        """One line."""
        engine, seconds = self.engine, time.perf_counter() - self._start
        prompts = engine.num_prefilled / engine.prefill_s if engine.prefill_s else 0.0
        return (
            f"{self.num_finished:,} completions, {engine.num_sampled:,} tokens in {seconds:.1f} s: {self.speed}; "
            f"prompts, {engine.num_prefilled:,} tokens in {engine.prefill_s:.1f} s: {prompts:,.0f} tok/s; "
            f"{self.num_preemptions:,} preemptions"
        )
