"""Prompts of `octavo generate`: a line of text each, or rows with `prompt` or `messages`; bad ones are named."""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.tasks.reader import listed
from octavo.tasks.rows import SUFFIXES, BadRow, Rows, Source, json_row

STDIN = Path("-")
OWN_KEYS = (
    *("prompt_index", "sample", "completion", "finish_reason", "num_prompt_tokens", "num_tokens", "mean_logprob"),
    *("tokens", "rollout_logprobs"),
)
"""That a row of the output has beside those of its prompt."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A row of a prompt file.

    Example: Prompt(place="line 2", fields={"prompt": "2 + 2 ="}, messages=[{"role": "user", "content": "2 + 2 ="}]).
    """

    place: str
    """Within the file, for messages to the user."""
    fields: dict[str, Any]
    """All that the row holds, which its completions carry along."""
    messages: list[dict[str, str]]
    """The conversation up to the completion."""


def read_prompts(path: Path) -> list[Prompt]:
    """All prompts of a file, in order.

    Args:
        path: `.jsonl`, `.jsonl.gz`, `.json`, `.csv` or `.parquet`: rows with a `prompt`, which is a text or a list of
            messages, or with `messages`. `-` is the standard input: such rows as JSONL if it begins with `{`, else
            text. Any other file is text, one prompt a line. Empty lines are left out.

    Raises:
        ValueError: the file cannot be read, holds no prompt, or has bad rows, the first of which are named.
    """
    name = "the standard input" if path == STDIN else str(path)
    if path != STDIN and (path.is_dir() or not path.exists()):  # a pipe is as good as a file
        raise ValueError(f"{path} is no file of prompts. Give text, a prompt a line, or JSONL with prompt or messages")
    prompts, bad = [], []
    for place, row in _rows(path):
        try:
            if isinstance(row, BadRow):
                raise row
            prompts.append(_prompt(place, row))
        except BadRow as error:
            bad.append(f"{place}: {error}")
    if bad:
        raise ValueError(f"{name} has {listed(bad)}. Correct or remove them")
    if not prompts:
        raise ValueError(f"{name} holds no prompt. Write one a line")
    return prompts


def text_prompts(texts: Sequence[str]) -> list[Prompt]:
    """Prompts of the command line; ValueError names a bad one."""
    prompts = []
    for number, text in enumerate(texts, start=1):
        try:
            prompts.append(_prompt(f"prompt {number}", {"prompt": text}))
        except BadRow as error:
            raise ValueError(f"prompt {number}: {error}. Give another") from error
    return prompts


def _rows(path: Path) -> Rows:
    if path == STDIN:
        data = sys.stdin.buffer.read()
        in_json = data.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{")
    elif path.name.endswith(SUFFIXES):
        return Source(name=str(path), file=path).rows()
    else:
        data, in_json = path.read_bytes(), False
    return _lines(data.removeprefix(codecs.BOM_UTF8), in_json)


def _lines(data: bytes, in_json: bool) -> Rows:
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            yield f"line {number}", json_row(line) if in_json else _text_row(line.removesuffix(b"\r"))


def _text_row(line: bytes) -> dict[str, str] | BadRow:
    try:
        return {"prompt": line.decode("utf-8")}
    except UnicodeDecodeError as error:
        return BadRow(f"is no UTF-8 text, byte {error.start + 1} cannot be read")


def _prompt(place: str, row: dict[str, Any]) -> Prompt:
    given = [key for key in ("prompt", "messages") if row.get(key) is not None]
    if len(given) != 1:
        keys = ", ".join(map(repr, row)) or "none"
        raise BadRow(f"wants either 'prompt' or 'messages', has {'both' if given else f'keys {keys}'}")
    taken = [key for key in OWN_KEYS if key in row]
    if taken:
        raise BadRow(f"has a key {taken[0]!r}, which its completions get. Rename it")
    value = row[given[0]]
    messages = [{"role": "user", "content": value}] if isinstance(value, str) else value
    for fault in _faults(messages):
        raise BadRow(fault)
    try:
        json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise BadRow(f"holds {error.object[error.start]!r}, half a character") from error
    except (TypeError, ValueError) as error:
        raise BadRow(f"holds what JSON does not have ({error})") from error
    return Prompt(place=place, fields=row, messages=messages)


def _faults(messages: Any) -> Iterator[str]:
    """What keeps this from being a conversation that a completion can go on with."""
    if not isinstance(messages, list) or not messages:
        yield f"wants a text, or a list of messages with role and content; got {messages!r:.60}"
        return
    for message in messages:
        is_message = isinstance(message, dict) and all(isinstance(message.get(k), str) for k in ("role", "content"))
        if not is_message:
            yield f"wants messages with a text as role and as content; got {message!r:.60}"
            return
    if messages[-1]["role"] == "assistant":
        yield "ends with a message of the assistant, which the completion is to be. Leave it out"
    if not messages[-1]["content"]:
        yield "is an empty prompt, which has no token"
