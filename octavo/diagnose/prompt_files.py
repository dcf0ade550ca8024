"""Prompts to diagnose a model with: a text file of one prompt a line, or JSONL that may hold completions too."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PromptRow:
    """A prompt, and what was answered where the file says so.

    Example: PromptRow(prompt="2 + 2 =", completion=" 4", advantage=1.0).
    """

    prompt: str
    """The user's message, or the text that a base model continues."""
    completion: str | None = None
    """None where it is to be sampled."""
    advantage: float | None = None
    """Of the completion; None for a sign at random."""


def read_prompts(path: Path, num_prompts: int) -> list[PromptRow]:
    """The first rows of a prompt file.

    Args:
        path: `.jsonl` or `.json` holds objects with `prompt`, and, in all rows or in none, `completion`; `advantage`
            may stand beside it. Any other file is text, one prompt a line. Empty lines are left out.
        num_prompts: at most so many rows.

    Raises:
        ValueError: the file cannot be read, or a line is not as it should be; names the line.
    """
    rows: list[PromptRow] = []
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip() and len(rows) < num_prompts:
            where = f"{path}, line {number}"
            rows.append(_row(line, where) if path.suffix in (".jsonl", ".json") else PromptRow(prompt=line.strip()))
            if (rows[-1].completion is None) != (rows[0].completion is None):
                raise ValueError(
                    f"{where}: some rows have a completion and some have none. Give all of them one, or none"
                )
    if len({row.advantage is None for row in rows}) > 1:
        raise ValueError(f"{path}: some rows have an advantage and some have none. Give all of them one, or none")
    if not rows:
        raise ValueError(f"{path} holds no prompt. Write one a line")
    return rows


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text: byte {error.start} cannot be read. Give text or JSONL") from error


def _row(line: str, where: str) -> PromptRow:
    row = parse_object(line, where)
    unknown = row.keys() - {"prompt", "completion", "advantage"}
    if unknown:
        raise ValueError(
            f"{where}: keys are prompt, completion and advantage; got {', '.join(sorted(map(repr, unknown)))}"
        )
    for key in ("prompt", "completion"):
        value = row.get(key, "" if key == "prompt" else None)
        if (key == "prompt" or value is not None) and not (isinstance(value, str) and value):
            raise ValueError(f"{where}: {key} is a text with at least one character; got {row.get(key)!r}")
    advantage = row.get("advantage")
    if advantage is not None and (type(advantage) not in (int, float) or not math.isfinite(advantage)):
        raise ValueError(f"{where}: advantage is a finite number; got {advantage!r}")
    if advantage is not None and row.get("completion") is None:
        raise ValueError(f"{where}: advantage belongs to a completion, and there is none. Add it, or leave both out")
    return PromptRow(**row)


def parse_object(line: str | bytes, where: str) -> dict[str, Any]:
    """The JSON object of a line; ValueError names where it is."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is no JSON: {' '.join(str(error).split())}. Write one object a line") from error
    if not isinstance(row, dict):
        raise ValueError(f"{where} is no JSON object but {type(row).__name__}. Write one object a line")
    return row
