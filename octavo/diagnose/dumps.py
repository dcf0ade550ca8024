"""Log-probabilities that another framework dumped: Parquet or JSONL, a row a completion.

docs/diagnose.md is the schema. Names of verl's tensors stand for ours.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.diagnose.prompt_files import parse_object

LOGPROBS = (
    "rollout_logprobs",
    "old_logprobs",
    "logprobs",
    "shadow_old_logprobs",
    "shadow_logprobs",
    "null_logprobs",
    "shadow_null_logprobs",
)
"""Lists, a log-probability of each completion token."""
TOKEN_COLUMNS = (*LOGPROBS, "advantages", "entropy", "response_mask")
"""Lists, a number of each completion token; all of a row are equally long. `advantages` may be one number instead."""
ALIASES = {
    "rollout_log_probs": "rollout_logprobs",
    "old_log_probs": "old_logprobs",
    "log_probs": "logprobs",
    "log_prob": "logprobs",
    "entropys": "entropy",
    "loss_mask": "response_mask",
    "advantage": "advantages",
    "score": "reward",
    "uid": "group",
}
"""How verl calls a column, or how one may be written, and what it is."""
KNOWN = (*TOKEN_COLUMNS, "reward", "group", "step")
MOST_ABOVE_ZERO = 1e-3
"""Nats that rounding may put a log-probability above 0."""
LAST_STEP = 2**53
"""A step beyond it is damage."""
SUFFIXES = (".jsonl", ".parquet")


@dataclass(frozen=True, eq=False, kw_only=True)
class Dump:
    """The loss tokens of all completions end to end."""

    columns: dict[str, Tensor]
    """Name of TOKEN_COLUMNS -> [N] float64, the columns that are there; without response_mask."""
    answer_index: Tensor
    """[N] int64, the completion of each token."""
    positions: Tensor
    """[N] int64, place in the completion, from 0; masked tokens count."""
    step: Tensor
    """[N] int64; 0 where the file says nothing."""
    answers: list[dict[str, Any]]
    """`step`, and `group` and `reward` where they are there, of each completion."""
    ignored: list[str]
    """Columns that are not read."""

    def of_step(self, step: int) -> Dump:
        """The part of one step."""
        mask = self.step == step
        return Dump(
            columns={name: column[mask] for name, column in self.columns.items()},
            answer_index=self.answer_index[mask],
            positions=self.positions[mask],
            step=self.step[mask],
            answers=[answer for answer in self.answers if answer["step"] == step],
            ignored=self.ignored,
        )


def read_dump(paths: Sequence[Path]) -> Dump:
    """Read files, or the `.jsonl` and `.parquet` files of folders.

    Raises:
        ValueError: there is none, one cannot be read, or a row is not as the schema says; names file and row.
    """
    parts: dict[str, list[Tensor]] = {}
    index, positions, steps = [], [], []
    answers: list[dict[str, Any]] = []
    columns: tuple[str, ...] | None = None
    ignored: dict[str, None] = {}
    for where, row in _rows(_files(paths)):
        known = _known(row, where)
        ignored |= dict.fromkeys(key for key in row if ALIASES.get(key, key) not in KNOWN)
        present = tuple(name for name in KNOWN if name in known)
        if columns is not None and present != columns:
            odd = ", ".join(sorted(set(present) ^ set(columns)))
            raise ValueError(
                f"{where}: every row has the same columns; {odd} is in some rows only. Write it in all, or none"
            )
        columns = present
        tokens, mask = _tokens(known, where)
        for name, values in tokens.items():
            parts.setdefault(name, []).append(values[mask])
        index.append(torch.full((int(mask.sum()),), len(answers)))
        positions.append(torch.arange(len(mask))[mask])
        step = _number(known.get("step", 0), "step", where)
        if step != int(step) or not 0 <= step <= LAST_STEP:
            raise ValueError(f"{where}: step is a whole number, at least 0; got {step:g}")
        steps.append(torch.full_like(index[-1], int(step)))
        if type(known.get("group", "")) not in (str, int, float):
            raise ValueError(f"{where}: group is a text or a number; got {type(known['group']).__name__}")
        answers.append(
            {"step": int(step), **{name: known[name] for name in ("group",) if name in known}}
            | ({"reward": _number(known["reward"], "reward", where)} if "reward" in known else {})
        )
    if not answers:
        raise ValueError(f"{', '.join(map(str, paths))}: no row. Give dumps with a row a completion")
    return Dump(
        columns={name: torch.cat(values) for name, values in parts.items()},
        answer_index=torch.cat(index),
        positions=torch.cat(positions),
        step=torch.cat(steps),
        answers=answers,
        ignored=list(ignored),
    )


def _files(paths: Sequence[Path]) -> list[Path]:
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = [file for file in path.iterdir() if file.suffix in SUFFIXES]
            if not found:
                raise ValueError(
                    f"{path} holds no file ending in {' or '.join(SUFFIXES)}. Name the folder of the dumps"
                )
            files += sorted(found, key=lambda file: [(len(d), d) for d in re.split(r"(\d+)", file.name)])  # 9 before 10
        elif path.suffix not in SUFFIXES:
            raise ValueError(f"{path} is no dump: wanted a file ending in {' or '.join(SUFFIXES)}, or a folder of them")
        else:
            files.append(path)
    return files


def _rows(files: Sequence[Path]) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in files:
        if file.suffix == ".parquet":
            yield from _parquet_rows(file)
            continue
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield f"{file}, line {number}", parse_object(line, f"{file}, line {number}")


def _parquet_rows(file: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ValueError(f"{file}: reading Parquet needs pyarrow. pip install pyarrow, or write JSONL") from error
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as parquet:
            for batch in parquet.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}, row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{file} cannot be read as Parquet after row {number}: {why}. Write it again") from error


def _known(row: dict[str, Any], where: str) -> dict[str, Any]:
    """The columns that are read, under our names; null is as if it were not there."""
    known: dict[str, Any] = {}
    for key, value in row.items():
        name = ALIASES.get(key, key)
        if name in KNOWN and value is not None:
            if name in known:
                raise ValueError(f"{where}: {name} is there twice, under another name too ({key}). Leave one out")
            known[name] = value
    if not any(name in known for name in LOGPROBS):
        verl = {"input", "output", "gts"} <= row.keys()
        hint = (
            "verl's trainer.rollout_data_dir writes texts and scores only; docs/diagnose.md has the lines that add them"
            if verl
            else "docs/diagnose.md is the schema"
        )
        columns = ", ".join(sorted(map(str, row))) or "none"
        raise ValueError(f"{where}: no log-probabilities; its columns are {columns}. {hint}")
    return known


def _tokens(known: dict[str, Any], where: str) -> tuple[dict[str, Tensor], Tensor]:
    """Per-token columns of a row [L] float64, and [L] bool, which of its tokens are in the loss."""
    lists = {name: known[name] for name in TOKEN_COLUMNS if name in known}
    constant = None
    if "advantages" in lists and not isinstance(lists["advantages"], list):
        constant = _number(lists.pop("advantages"), "advantages", where)
    tokens = {name: _list(value, name, where) for name, value in lists.items()}
    if constant is not None:
        tokens["advantages"] = torch.full_like(next(iter(tokens.values())), constant)
    lengths = {name: len(values) for name, values in tokens.items()}
    if len(set(lengths.values())) > 1:
        said = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"{where}: the lists of a row are equally long, a number a completion token; got {said}")
    mask = tokens.pop("response_mask", None)
    if mask is None:
        mask = torch.ones(next(iter(lengths.values())), dtype=torch.float64)
    if not ((mask == 0) | (mask == 1)).all():
        raise ValueError(f"{where}: response_mask holds 0 and 1; got {mask[(mask != 0) & (mask != 1)][0].item():g}")
    for name, values in tokens.items():
        wrong = ~values.isfinite() | (values > MOST_ABOVE_ZERO if name in LOGPROBS else torch.zeros_like(mask).bool())
        wrong &= mask == 1
        if wrong.any():
            place = int(wrong.nonzero()[0, 0])
            wanted = "finite number" + (", at most 0 as log-probabilities are" if name in LOGPROBS else "")
            raise ValueError(f"{where}: {name}[{place}] is {values[place].item():g}; wanted a {wanted}. Drop the row")
    return tokens, mask == 1


def _list(value: Any, name: str, where: str) -> Tensor:
    if not isinstance(value, list):
        raise ValueError(f"{where}: {name} is a list with a number a completion token; got {type(value).__name__}")
    for place, item in enumerate(value):
        if not isinstance(item, int | float):
            raise ValueError(f"{where}: {name}[{place}] is no number but {item!r:.60}")
    try:
        return torch.tensor([float(item) for item in value], dtype=torch.float64)
    except OverflowError as error:
        raise ValueError(f"{where}: {name} holds a whole number too large for a float") from error


def _number(value: Any, name: str, where: str) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{where}: {name} is a finite number; got {value!r:.60}")
    return float(value)
