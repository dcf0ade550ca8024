"""Sends a run's metrics to where people watch them: TensorBoard's event files, Weights & Biases.

They are a copy of metrics.jsonl. One that fails is switched off with one line, and training goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from octavo.trainer.metrics import Display

EVENT_FILES, DASHBOARD = "TensorBoard (event files)", "Weights & Biases"
SHOWN_SAMPLES = 4
"""Samples of a step that TensorBoard shows."""


@dataclass(frozen=True, kw_only=True)
class TrackingConfig:
    """Where metrics go besides metrics.jsonl and TensorBoard's files in output_dir/tensorboard."""

    wandb_project: str | None = None
    """Project on Weights & Biases; null sends nothing there."""
    wandb_name: str | None = None
    """Name of the run there; null lets it choose."""

    def __post_init__(self) -> None:
        if self.wandb_name is not None and self.wandb_project is None:
            raise ValueError(f"wandb_name={self.wandb_name!r} has no wandb_project to stand in. Name one")

    def check(self) -> None:
        """Refuse what is asked for and not installed.

        Raises:
            ValueError: wandb is missing.
        """
        if self.wandb_project is None:
            return
        try:
            from wandb import init  # noqa: F401 - a folder named wandb imports too, but has none
        except ImportError as error:
            raise ValueError(
                f"tracking.wandb_project={self.wandb_project!r} wants the package wandb, which cannot be imported: "
                f"{error}. pip install wandb, or tracking.wandb_project=null"
            ) from error


class Tracker(Protocol):
    """A place that metrics go to."""

    def log(self, step: int, metrics: dict[str, Any], samples: Sequence[dict[str, Any]]) -> None:
        """Send one step."""

    def rewind(self, step: int) -> None:
        """Steps from this one on will be sent again."""

    def close(self) -> None:
        """Send what is left."""


class TensorBoard:
    """Event files: every number as a scalar, a few samples as text; lists are left to metrics.jsonl."""

    def __init__(self, folder: Path, start_step: int) -> None:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # tensorboard loads TensorFlow where it is installed
        from torch.utils.tensorboard import SummaryWriter

        def open_file(step: int) -> SummaryWriter:
            """Earlier events from this step on are hidden: a resumed run overwrites them, and a new one all.

            Files are read in the order of their names, which hold the second and then a count without leading zeros.
            """
            if any(folder.glob(f"*.tfevents.{int(time.time()):010d}.*")):
                time.sleep(1.0)
            return SummaryWriter(str(folder), purge_step=step)

        self._open = open_file
        self.writer = self._open(start_step)

    def log(self, step: int, metrics: dict[str, Any], samples: Sequence[dict[str, Any]]) -> None:
        """Write one step and flush it, so that it can be watched."""
        for key, value in numbers(metrics).items():
            self.writer.add_scalar(key, value, step)
        for place, sample in enumerate(samples[:SHOWN_SAMPLES]):
            text = f"{sample['prompt']}{sample['completion']}\n[reward {sample['reward']:g}]"
            self.writer.add_text(f"samples/{place}", "    " + text.replace("\n", "\n    "), step)  # markdown: as it is
        self.writer.flush()

    def rewind(self, step: int) -> None:
        """Hide the events from this step on."""
        self.writer.close()
        self.writer = self._open(step)

    def close(self) -> None:
        """Close the file."""
        self.writer.close()


class WandB:
    """A run on Weights & Biases."""

    def __init__(self, folder: Path, config: TrackingConfig, settings: dict[str, Any]) -> None:
        import wandb

        self.run = wandb.init(project=config.wandb_project, name=config.wandb_name, dir=str(folder), config=settings)

    def log(self, step: int, metrics: dict[str, Any], samples: Sequence[dict[str, Any]]) -> None:
        """Send the numbers of one step."""
        self.run.log(numbers(metrics), step=step)

    def rewind(self, step: int) -> None:
        """W&B keeps the first of each step; only later steps are new to it."""

    def close(self) -> None:
        """Send what is left."""
        self.run.finish()


class Trackers:
    """All trackers of a run."""

    def __init__(
        self,
        folder: Path,
        config: TrackingConfig,
        settings: dict[str, Any],
        display: Display,
        start_step: int = 0,
    ) -> None:
        """Open them.

        Args:
            folder: output_dir.
            config: what to open besides TensorBoard.
            settings: the run's config as dicts and lists.
            display: where warnings go.
            start_step: the first step that will be logged.
        """
        self.display = display
        self.active: dict[str, Tracker] = {}
        with self._guard(EVENT_FILES):
            self.active[EVENT_FILES] = TensorBoard(folder / "tensorboard", start_step)
        if config.wandb_project is not None:
            with self._guard(DASHBOARD):
                self.active[DASHBOARD] = WandB(folder, config, settings)

    def log(self, step: int, metrics: dict[str, Any], samples: Sequence[dict[str, Any]] = ()) -> None:
        """Send one step's metrics, and samples as in samples.jsonl, to every tracker that is on."""
        for name, tracker in list(self.active.items()):
            with self._guard(name):
                tracker.log(step, metrics, samples)

    def rewind(self, step: int) -> None:
        """The run goes on from before this step, which will be sent again."""
        for name, tracker in list(self.active.items()):
            with self._guard(name):
                tracker.rewind(step)

    def close(self) -> None:
        """Close every tracker that is on."""
        for name, tracker in list(self.active.items()):
            with self._guard(name):
                tracker.close()

    @contextmanager
    def _guard(self, name: str) -> Iterator[None]:
        """Whatever a tracker raises, it changes no number: it is said once, and the tracker is off."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a full disk, no network, a package that does not load
            self.active.pop(name, None)
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            self.display.line(
                f"warning: {name} is off from here on ({reason}); training goes on, metrics.jsonl is complete"
            )


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    """The metrics that are one number; `step` is the axis, not a metric."""
    return {
        key: value
        for key, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key != "step"
    }
