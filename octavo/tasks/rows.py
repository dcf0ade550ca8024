"""Rows of a data set as they stand in a file, a folder or on the hub, each with its place, the damaged ones too."""

import codecs
import csv
import gzip
import io
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".csv")
"""Of the files that are read, and the order in which a folder is searched."""


class BadRow(ValueError):
    """A row that makes no problem; the message says why, without its place."""


Rows = Iterator[tuple[str, dict | BadRow]]
"""Place within the source, as "line 3", and the row there."""


def take(row: Any, path: str) -> Any:
    """The value at a dotted path, e.g. "reward_model.ground_truth" or "prompt.-1.content".

    Raises:
        BadRow: there is none.
    """
    value = row
    for key in path.split("."):
        try:
            value = value[int(key)] if isinstance(value, list) else value[key]
        except (KeyError, IndexError, ValueError, TypeError):
            keys = ", ".join(map(repr, row)) or "none"
            raise BadRow(f"wants {path!r}; its keys are {keys}") from None
    return value


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where one split is read from."""

    name: str
    """For messages: the file, or the hub's data set and split."""
    file: Path | None
    """A local file; None reads the hub."""
    hub: str = ""
    """Data set on the hub, owner/name."""
    hub_config: str | None = None
    """Its configuration; None is its only or default one."""
    split: str = ""
    """Its split."""

    def rows(self) -> Rows:
        """Every row, in order; blank lines are none.

        Raises:
            ValueError: the source as a whole cannot be read; the message names it.
        """
        return _hub_rows(self) if self.file is None else _file_rows(self.file)


def find_source(path: str, splits: tuple[str, ...], hub_config: str | None = None) -> Source:
    """The file, or the split on the hub, that `path` and a split mean.

    Args:
        path: a file; a folder with a file for each split; or a data set on the hub, for which a folder of its name in
            $OCTAVO_DATA (default ../shared/data) stands in.
        splits: names that the split may have as a file in a folder, the first found; the last is its name on the hub.
        hub_config: configuration of the data set on the hub.
    """
    local = Path(path).expanduser()
    on_hub = re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path) is not None
    if on_hub and not local.exists() and (data_folder() / local.name).is_dir():
        local = data_folder() / local.name
    if local.is_file():
        return Source(name=str(local), file=local)
    if local.is_dir():
        file = _split_file(local, splits)
        return Source(name=str(file), file=file)
    if not on_hub:
        raise ValueError(
            f"path={path!r} wants a file ({', '.join(SUFFIXES)}), a folder with {splits[0]}.jsonl or the like, or a "
            f"hub data set such as 'openai/gsm8k'; there is no such file or folder, nor is it such a name. Correct it"
        )
    return Source(name=f"the hub's {path}, {splits[-1]}", file=None, hub=path, hub_config=hub_config, split=splits[-1])


def data_folder() -> Path:
    """Where data sets lie that are named without a folder: $OCTAVO_DATA, else ../shared/data."""
    return Path(os.environ.get("OCTAVO_DATA", "../shared/data"))


def _split_file(folder: Path, splits: tuple[str, ...]) -> Path:
    for split in splits:
        for suffix in SUFFIXES:
            if (file := folder / f"{split}{suffix}").is_file():
                return file
    present = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
    raise ValueError(
        f"path={str(folder)!r} wants {splits[0]}.jsonl in that folder (or {', '.join(SUFFIXES[1:])}); it holds "
        f"{present}. Add the file, or name another folder or split"
    )


def _file_rows(file: Path) -> Rows:
    if not file.name.endswith(SUFFIXES):
        raise ValueError(f"{file} has an ending that is not read; known: {', '.join(SUFFIXES)}. Convert the file")
    try:
        if file.suffix == ".parquet":
            yield from _parquet_rows(file)
            return
        with (gzip.open if file.suffix == ".gz" else open)(file, "rb") as data:
            if file.suffix == ".csv":
                with io.TextIOWrapper(data, encoding="utf-8-sig", newline="") as text:
                    yield from _csv_rows(file, text)
            elif file.suffix == ".json":
                yield from _json_rows(file, data.read())
            else:
                for number, line in enumerate(data, start=1):
                    if line.strip():
                        yield f"line {number}", json_row(line.removeprefix(codecs.BOM_UTF8))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())}. Fetch it again") from error


def json_row(line: bytes) -> dict | BadRow:
    """The object in a line of JSONL."""
    try:
        row = json.loads(line.decode("utf-8"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:  # ValueError: also no UTF-8, or a number of too many digits
        return BadRow(f"not JSON ({_why(error)})")
    return row if isinstance(row, dict) else BadRow(f"wants a JSON object, got {type(row).__name__}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if twice := [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]:
        raise ValueError(f"the key {twice[0]!r} is there twice")
    return dict(pairs)


def _why(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return error.msg if isinstance(error, json.JSONDecodeError) else str(error).partition(";")[0]


def _json_rows(file: Path, text: bytes) -> Rows:
    try:
        rows = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        way_out = "Correct it, or name it .jsonl if it has a row a line"
        raise ValueError(f"{file} is not JSON ({_why(error)}). {way_out}") from error
    if not isinstance(rows, list):
        raise ValueError(f"{file} wants a list of objects, got {type(rows).__name__}. Correct it")
    for index, row in enumerate(rows):
        yield f"row {index}", row if isinstance(row, dict) else BadRow(f"wants an object, got {type(row).__name__}")


def _csv_rows(file: Path, text: Iterator[str]) -> Rows:
    csv.field_size_limit(sys.maxsize)
    reader = csv.DictReader(text, strict=True)
    try:
        if twice := [name for name, count in Counter(reader.fieldnames or ()).items() if count > 1]:
            raise ValueError(f"{file} has two columns {twice[0]!r}. Rename one")
        for row in reader:
            extra = row.pop(None, None)
            fault = BadRow(f"wants {len(reader.fieldnames or ())} cells, as the first line has")
            yield f"line {reader.line_num}", fault if extra is not None or None in row.values() else row
    except csv.Error as error:
        raise ValueError(f"{file}, line {reader.line_num}: not CSV ({error}). Correct the line") from error


def _parquet_rows(file: Path) -> Rows:
    load_dataset = _load_dataset(f"{file} is read by")
    try:
        rows = load_dataset("parquet", data_files=str(file), split="train", streaming=True)
        for index, row in enumerate(rows):
            yield f"row {index}", row
    except Exception as error:  # pyarrow has errors of its own, and datasets wraps them as it likes
        raise ValueError(f"{file} cannot be read as Parquet: {' '.join(str(error).split())}. Fetch it again") from error


def _hub_rows(source: Source) -> Rows:
    load_dataset = _load_dataset(f"{source.hub!r} is no folder here, so it is read from the hub by")
    try:
        rows = load_dataset(source.hub, source.hub_config, split=source.split)
    except Exception as error:  # network, hub and builder errors have no common base
        raise ValueError(
            f"{source.hub!r} is no file or folder here, and the hub did not give split {source.split!r} of "
            f"configuration {source.hub_config!r} ({' '.join(str(error).split())}). Correct the name, or fetch it"
        ) from error
    for index, row in enumerate(rows):
        yield f"row {index}", row


def _load_dataset(what: str):  # type: ignore[no-untyped-def]
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise ValueError(
            f"{what} the package datasets, which is not installed. Run `pip install datasets`, or give a .jsonl file"
        ) from error
    return load_dataset
