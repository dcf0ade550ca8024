"""audit.jsonl: the newest completions of each outcome, so that somebody can see what the checks took for what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from octavo.trainer.files import write_whole


class Audit:
    """The file, replaced whole at every step.

    Args:
        path: audit.jsonl.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, step: int, rows: list[dict[str, Any]], per_outcome: int) -> None:
        """Put a step's rows in, and keep the newest of each outcome.

        Args:
            step: theirs; rows of it and of later steps, from before an interruption, give way.
            rows: with `outcome`.
            per_outcome: how many are kept; 0 keeps no file.

        Raises:
            ValueError: the file cannot be written.
        """
        if per_outcome == 0:
            return
        kept: dict[str, list[dict[str, Any]]] = {}
        for row in [*(row for row in self._read() if row["step"] < step), *({"step": step, **row} for row in rows)]:
            kept.setdefault(row["outcome"], []).append(row)
        newest = [row for found in kept.values() for row in found[-per_outcome:]]
        newest.sort(key=lambda row: row["step"])
        write_whole(self.path, "".join(json.dumps(row) + "\n" for row in newest))

    def _read(self) -> list[dict[str, Any]]:
        try:
            return [json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError):  # not there yet, or damaged: it is only for looking at
            return []
