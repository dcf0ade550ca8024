"""The file of completions: rows as they finish, whole lines whatever happens, in the order of the prompts at the end.

Beside it stands FILE.settings.json, which says what the completions are of.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from octavo.generate.prompt_files import Prompt
from octavo.tasks.rows import BadRow, json_row
from octavo.trainer.config_file import differences
from octavo.trainer.files import check_output, write_whole
from octavo.trainer.output import JsonLines

Place = tuple[int, int]
"""Index of a prompt, and which of its completions."""


class CompletionFile:
    """Rows of completions on disk; closed when the process ends, however it ends.

    Args:
        path: the file.
        resume: go on with what is there; else it must not be there.

    Raises:
        ValueError: it is there, though not to be gone on with, or could not be written.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        check_output(path)
        self.path = path
        self.settings = path.with_name(path.name + ".settings.json")
        check_output(self.settings)
        if self._holds_rows and not resume:
            raise ValueError(f"{path} is there already. Go on with it by --resume, or give another file")
        if self._holds_rows and not self.settings.exists():
            raise ValueError(
                f"{self.settings} is not there, which says what {path} holds completions of. Give another file"
            )
        self.done: set[Place] = set()
        """What the file holds."""
        self._lines = JsonLines(path)
        self._lock: int | None = None

    @property
    def _holds_rows(self) -> bool:
        return self.path.exists() and self.path.stat().st_size > 0

    def open(self, settings: dict[str, Any], prompts: Sequence[Prompt], group_size: int) -> None:
        """Read what is there, and be ready for more.

        Args:
            settings: all that a completion depends on beside its prompt.
            prompts: P, in order.
            group_size: G.

        Raises:
            ValueError: what is there is of other settings or prompts; another process writes it; the disk refuses.
        """
        try:
            self._lock = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{self.path} is being written by another octavo process. Wait for it") from error
        except OSError as error:
            raise self._refused(error) from error
        if not self._holds_rows:
            write_whole(self.settings, json.dumps(settings, indent=1, ensure_ascii=False) + "\n")
            return
        self._check_settings(settings)
        self._lines.cut(self.path.stat().st_size)
        for number, row in enumerate(self._rows(), start=1):
            self.done.add(self._place(f"{self.path}, line {number}", row, prompts, group_size))

    def add(self, row: dict[str, Any]) -> None:
        """Write a row.

        Raises:
            ValueError: the disk refuses; the file ends with a whole line as before.
        """
        try:
            self._lines.extend([row])
        except OSError as error:
            raise self._refused(error) from error
        self.done.add((row["prompt_index"], row["sample"]))

    def sort(self) -> None:
        """Bring the rows into the order of the prompts, whole or not at all.

        Raises:
            ValueError: the disk refuses; the file is complete, in the order in which completions finished.
        """
        offsets: list[tuple[Place, int, int]] = []
        start = 0
        with self.path.open("rb") as file:
            for line in file:
                row = json.loads(line)
                offsets.append(((row["prompt_index"], row["sample"]), start, len(line)))
                start += len(line)
            if offsets == sorted(offsets):
                return
            ordered = self.path.with_name(self.path.name + ".new")
            try:
                with ordered.open("wb") as target:
                    for _, start, size in sorted(offsets):
                        file.seek(start)
                        target.write(file.read(size))
                    target.flush()
                    os.fsync(target.fileno())
                ordered.replace(self.path)
            except OSError as error:
                ordered.unlink(missing_ok=True)
                raise self._refused(error) from error

    def close(self) -> None:
        """Let other processes write it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _refused(self, error: OSError) -> ValueError:
        return ValueError(
            f"--output {self.path} cannot be written: {error.strerror}. Make room; the same command with --resume goes "
            f"on"
        )

    def _check_settings(self, settings: dict[str, Any]) -> None:
        try:
            found = json.loads(self.settings.read_bytes())
        except ValueError as error:
            raise ValueError(f"{self.settings} is damaged: {error}. Give another --output") from error
        changed = [f"{key}: {old} -> {new}" for key, old, new in differences(found, json.loads(json.dumps(settings)))]
        if changed:
            raise ValueError(
                f"{self.path} holds completions of other settings ({'; '.join(changed)}). Give those, or another file"
            )

    def _rows(self) -> Iterator[dict[str, Any] | BadRow]:
        with self.path.open("rb") as file:
            for line in file:
                yield json_row(line)

    def _place(self, where: str, row: dict[str, Any] | BadRow, prompts: Sequence[Prompt], group_size: int) -> Place:
        place = (-1, -1) if isinstance(row, BadRow) else (row.get("prompt_index"), row.get("sample"))
        index, sample = (number if type(number) is int else -1 for number in place)
        if isinstance(row, BadRow) or index < 0 or sample < 0 or "completion" not in row:
            fault = "is no row of octavo generate"
        elif index >= len(prompts) or any(row.get(key) != value for key, value in prompts[index].fields.items()):
            fault = f"is of another prompt than number {index} now"
        elif sample >= group_size:
            fault = f"is completion {sample} of its prompt, beyond --group-size {group_size}"
        elif (index, sample) in self.done:
            fault = f"is completion {sample} of prompt {index}, which is there already"
        else:
            return index, sample
        raise ValueError(f"{where} {fault}. Remove the line, or give another --output")
