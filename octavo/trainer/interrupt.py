"""Ctrl-C and SIGTERM: the run stops at the next point that it can resume from to the bit, and is saved there.

Such points are any moment of a rollout or an evaluation, whose samples can be drawn again, and the end of a step. The
updates of a step are not interrupted: half of them would be neither the old policy nor the new one.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequested(Exception):
    """Raised by `Interrupts.check` inside a rollout or an evaluation."""


class Interrupted(Exception):
    """The run was stopped by a signal and has been saved; the message says where and how to go on."""

    def __init__(self, message: str, signal_number: int) -> None:
        super().__init__(message)
        self.exit_code = 128 + signal_number


class Interrupts:
    """While it is entered, the first signal asks the run to stop and a second Ctrl-C stops it at once.

    Outside the main thread, where Python delivers no signal, it does nothing.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self.requested: int | None = None
        """Number of the signal that came."""

    def __enter__(self) -> Interrupts:
        in_main_thread = threading.current_thread() is threading.main_thread()
        for number in SIGNALS if in_main_thread else ():
            self._handlers[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise StopRequested if a signal came. Called where stopping loses nothing but time."""
        if self.requested is not None:
            raise StopRequested

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = number
        text = f"\n{signal.Signals(number).name}: stopping at the next resumable point; Ctrl-C again stops at once\n"
        os.write(2, text.encode())  # print() may be what was interrupted
