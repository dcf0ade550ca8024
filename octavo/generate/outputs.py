"""Where completions go: to the terminal, as JSONL to the standard output, or into a file."""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

from octavo.generate.completion_file import CompletionFile
from octavo.generate.generation import Generator
from octavo.trainer.interrupt import Interrupted, Interrupts, StopRequested


def print_completions(generator: Generator, as_json: bool) -> None:
    """Print completions as they finish, a JSON object a line; or, as text, all at the end and in order.

    Raises:
        Interrupted: by a signal; what was finished is printed.
    """
    rows: list[dict[str, Any]] = []
    with Interrupts() as interrupts:
        try:
            meter = generator.sample(_print_json if as_json else rows.append, interrupts)
        except StopRequested:
            raise _stopped(interrupts, "") from None
        finally:
            for row in sorted(rows, key=lambda row: (row["prompt_index"], row["sample"])):
                prompt = generator.prompts[row["prompt_index"]].messages[-1]["content"]
                print(f"{prompt}{row['completion']}")
                print(f"  [{row['num_tokens']} tokens, {row['finish_reason']}, mean logprob {row['mean_logprob']:.3f}]")
    generator.display.line(f"done: {meter.summary()}")


def write_completions(generator: Generator, file: CompletionFile) -> None:
    """Sample what an open file does not hold yet, each row written as it finishes; then bring them in order.

    Raises:
        Interrupted: by a signal; says how to go on.
    """
    total = len(generator.prompts) * generator.settings.group_size
    if file.done:
        generator.display.line(f"going on with {file.path}: {len(file.done):,} of {total:,} completions are there")
    with Interrupts() as interrupts:
        try:
            meter = generator.sample(file.add, interrupts, file.done)
        except StopRequested:
            where = f", {len(file.done):,} of {total:,} completions are in {file.path}"
            raise _stopped(interrupts, f"{where}; the same command with --resume goes on") from None
        file.sort()
    generator.display.line(f"done: {meter.summary()}; {file.path}")


def _print_json(row: dict[str, Any]) -> None:
    """In UTF-8 whatever the locale is: an escape of Python's would be no JSON."""
    sys.stdout.buffer.write(f"{json.dumps(row, ensure_ascii=False)}\n".encode())
    sys.stdout.buffer.flush()


def _stopped(interrupts: Interrupts, text: str) -> Interrupted:
    assert interrupts.requested is not None
    return Interrupted(f"stopped by {signal.Signals(interrupts.requested).name}{text}", interrupts.requested)
