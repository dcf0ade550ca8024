"""What a run shows: one console line a step, progress bars, seconds and bytes by phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class StepClock:
    """Seconds spent in the phases of one step, and on a CUDA device the most bytes that tensors took.

    Args:
        device: where the step runs.
        uncounted_bytes: what tensors take beside those that torch's allocator counts; the same throughout a phase, from
            its first tensor on.
    """

    def __init__(self, device: str = "cpu", uncounted_bytes: Callable[[], int] = lambda: 0) -> None:
        self.started = time.perf_counter()
        self.device, self.uncounted_bytes = torch.device(device), uncounted_bytes
        self.metrics: dict[str, float] = {}
        self._open: list[str] = []
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside to `time/<name>_s`; its most bytes are `memory/<name>_gib`."""
        self._note_peak()
        self._open.append(name)
        start = time.perf_counter()
        yield
        key = f"time/{name}_s"
        self.metrics[key] = self.metrics.get(key, 0.0) + time.perf_counter() - start
        self._note_peak()
        self._open.pop()

    def finish(self) -> dict[str, float]:
        """All phases, and `time/step_s`; on a CUDA device `memory/held_gib`, what is left after the step."""
        self._note_peak()
        if self.device.type == "cuda":
            held = torch.cuda.memory_allocated(self.device) + self.uncounted_bytes()
            self.metrics["memory/held_gib"] = held / 2**30
        return {**self.metrics, "time/step_s": time.perf_counter() - self.started}

    def _note_peak(self) -> None:
        """The most bytes since this was last asked: of the step, and of every phase that is open."""
        if self.device.type != "cuda":
            return
        gib = (torch.cuda.max_memory_allocated(self.device) + self.uncounted_bytes()) / 2**30
        torch.cuda.reset_peak_memory_stats(self.device)
        for name in ("peak", *self._open):
            key = f"memory/{name}_gib"
            self.metrics[key] = max(self.metrics.get(key, 0.0), gib)


class Display:
    """The console: a line a step, and bars for rollout and update while they run on a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)

    def line(self, text: str) -> None:
        """Print one line. Where none can be, as into a file on a full disk, the work goes on without."""
        with suppress(OSError, SystemExit):  # rich would exit when the reader of a pipe is gone
            self.console.print(text, markup=False)

    @contextmanager
    def bar(self, name: str, total: int) -> Iterator[Any]:
        """A progress bar that disappears when done; yields advance(count)."""
        columns = (TextColumn("{task.description:>8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        disabled = not self.console.is_terminal
        with Progress(*columns, console=self.console, transient=True, disable=disabled) as progress:
            task = progress.add_task(name, total=total)
            yield lambda count: progress.advance(task, count)

    def step(self, metrics: dict[str, Any], num_steps: int) -> None:
        """The line of one step."""
        parts = [
            f"step {metrics['step'] + 1:>4}/{num_steps}",
            f"reward {metrics['reward/mean']:.3f}",
            f"length {metrics['completion/length_mean']:.1f}",
            f"entropy {metrics['policy/entropy']:.3f}",
            f"mismatch {metrics['mismatch/max_abs_logprob_diff']:.3g}",
        ]
        if "clip/low" in metrics:
            low, high = metrics["clip/low"], metrics["clip/high"]
            digits = 2 if high - low > 0.05 else 5  # bounds of a sequence's ratio lie close to 1
            parts.append(f"clip [{low:.{digits}f}, {high:.{digits}f}]")
        parts.append(f"clipped {metrics['loss/clip_fraction']:.1%}")
        if "overclip/low_share" in metrics:
            parts.append(f"overclip {metrics['overclip/low_share']:.1%}")
        parts.append(f"{metrics['time/step_s']:.1f} s")
        if "eval/accuracy" in metrics:
            parts.append(f"eval {metrics['eval/accuracy']:.3f}")
        self.line("  ".join(parts))
