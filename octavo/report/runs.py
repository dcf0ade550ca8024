"""Reads the folder that a run left or is still writing. What is damaged is left out, counted and said in `notes`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

Row = dict[str, Any]
LARGEST = 1e100
"""Numbers beyond it count as infinite, as the sums that a figure needs would be."""
LAST_STEP = 2**53
"""A step beyond it is damage."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """A metric over the steps that have it."""

    steps: list[int]
    values: list[float]
    """Finite."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """A run as its files tell it."""

    folder: Path
    name: str
    """Tells it from the other runs of the report."""
    config: dict[str, Any]
    """config.yaml; {} where it is missing or damaged."""
    config_text: str
    """config.yaml as it is."""
    lines: list[Row]
    """metrics.jsonl, one a step, ascending; `step` is an int."""
    samples: list[Row]
    """samples.jsonl; `step` is an int."""
    resumes: list[Row]
    """resumes.jsonl."""
    has_model: bool
    """Whether model/ is there, which a run writes when it ends."""
    last_written_s: float | None
    """When metrics.jsonl was last written, seconds since 1970."""
    notes: list[str]
    """What is wrong with its files, a sentence each."""

    @property
    def num_steps(self) -> int | None:
        """Steps that the config asks for."""
        value = setting(self.config, "trainer.num_steps")
        return value if type(value) is int else None

    @property
    def steps_done(self) -> int:
        """Steps up to the last line's."""
        return self.lines[-1]["step"] + 1 if self.lines else 0

    @property
    def finished(self) -> bool:
        """Whether all steps are done and the model is written."""
        return self.has_model and self.num_steps is not None and self.steps_done >= self.num_steps

    @property
    def rescues(self) -> list[int]:
        """First step after each rescue: a calibration or BF16 steps that an alarm led to, or a rollback."""
        found, rollbacks = [], 0.0
        for line in self.lines:
            before, rollbacks = rollbacks, number(line.get("rescue/rollbacks")) or 0.0
            if rollbacks > before:
                found.append(line["step"])
            if line.get("rescue/action") in ("recalibrate", "bf16_forward"):
                found.append(line["step"] + 1)
        return found

    def series(self, key: str) -> Series:
        """The finite values of a metric; empty where no line has it."""
        found = [(line["step"], value) for line in self.lines if (value := number(line.get(key))) is not None]
        return Series(steps=[step for step, _ in found], values=[value for _, value in found])

    def num_broken(self, key: str) -> int:
        """Steps on which a metric, or an item of it, is NaN or infinite."""
        return sum(_broken(line.get(key)) for line in self.lines)

    def lists(self, key: str) -> list[tuple[int, list[float | None]]]:
        """Steps and values of a metric that is a list; an item that is no finite number is None."""
        return [
            (line["step"], [number(item) for item in line[key]])
            for line in self.lines
            if isinstance(line.get(key), list)
        ]


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """Read each folder.

    Raises:
        ValueError: one is no run, or is given twice.
    """
    resolved = [folder.resolve() for folder in folders]
    for folder in folders:
        if resolved.count(folder.resolve()) > 1:
            raise ValueError(f"{folder} is given twice. Name each run once")
    names = [folder.name for folder in resolved]
    return [
        read_run(folder, name if names.count(name) == 1 else str(folder))
        for folder, name in zip(folders, names, strict=True)
    ]


def read_run(folder: Path, name: str) -> RunRecord:
    """Read a run's folder.

    Raises:
        ValueError: it holds neither config.yaml nor metrics.jsonl.
    """
    metrics_file = folder / "metrics.jsonl"
    if not metrics_file.is_file() and not (folder / "config.yaml").is_file():
        came = "a folder without them" if folder.is_dir() else "a file" if folder.exists() else "nothing there"
        raise ValueError(
            f"{folder} is no run: wanted a folder with metrics.jsonl or config.yaml, got {came}. Give the output_dir "
            f"of an octavo train"
        )
    notes: list[str] = []
    config, config_text = _read_config(folder / "config.yaml", notes)
    lines = _latest(_read_rows(metrics_file, notes, missing_is_damage=True), metrics_file.name, notes)
    notes += _not_finite(lines)
    samples_file = folder / "samples.jsonl"
    return RunRecord(
        folder=folder,
        name=visible(name),
        config=config,
        config_text=config_text,
        lines=lines,
        samples=_latest(_read_rows(samples_file, notes), samples_file.name, notes, several_a_step=True),
        resumes=_read_rows(folder / "resumes.jsonl", notes),
        has_model=(folder / "model").is_dir(),
        last_written_s=metrics_file.stat().st_mtime if metrics_file.is_file() else None,
        notes=notes,
    )


def number(value: object) -> float | None:
    """A finite float that can be drawn, up to LARGEST; None for anything else."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if -LARGEST <= value <= LARGEST else None  # no NaN lies between


def _broken(value: object) -> bool:
    if isinstance(value, list):
        return any(map(_broken, value))
    return isinstance(value, float) and number(value) is None


def setting(config: dict[str, Any], key: str) -> Any:
    """The value of a dotted key; None where there is none."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def visible(text: str) -> str:
    """Text that any page can hold, all of it seen.

    Control characters become their pictures (U+2400 ...), those that turn the writing direction their numbers, lone
    surrogates U+FFFD.
    """
    signs: dict[int, str | int] = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
    signs |= {0x7F: 0x2421} | {code: f"<U+{code:04X}>" for code in (*range(0x202A, 0x202F), *range(0x2066, 0x206A))}
    return text.translate(signs).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _read_config(path: Path, notes: list[str]) -> tuple[dict[str, Any], str]:
    if not path.is_file():
        notes.append("config.yaml is missing.")
        return {}, ""
    text = path.read_bytes().decode("utf-8", "replace")
    try:
        config = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        notes.append(f"config.yaml is damaged: {' '.join(str(error).split())}.")
        return {}, text
    if not isinstance(config, dict):
        notes.append("config.yaml is damaged: it holds no keys.")
        return {}, text
    return config, text


def _read_rows(path: Path, notes: list[str], *, missing_is_damage: bool = False) -> list[Row]:
    """The JSON objects of a file, a line each. A last line without its newline is still being written."""
    if not path.is_file():
        if missing_is_damage:
            notes.append(f"{path.name} is missing.")
        return []
    *whole, last = path.read_bytes().split(b"\n")
    rows = [row for line in whole if line.strip() and (row := _parse(line)) is not None]
    num_damaged = sum(bool(line.strip()) for line in whole) - len(rows)
    if num_damaged:
        notes.append(f"{path.name}: {_count(num_damaged, 'line')} left out, no JSON object.")
    if last.strip():
        row = _parse(last)
        if row is None:
            notes.append(f"{path.name}: the last line is half written and left out.")
        else:
            rows.append(row)
    if not rows and missing_is_damage:
        notes.append(f"{path.name} holds no step.")
    return rows


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _latest(rows: list[Row], name: str, notes: list[str], *, several_a_step: bool = False) -> list[Row]:
    """Rows in the order of their steps. A step that comes again was resumed from: it replaces what was at or after it.

    Rows of one step follow each other where a step has several.
    """
    kept: list[Row] = []
    num_without, num_replaced = 0, 0
    for row in rows:
        step = row.get("step")
        if type(step) is not int or not 0 <= step <= LAST_STEP:
            num_without += 1
            continue
        if kept and (kept[-1]["step"] > step or kept[-1]["step"] == step and not several_a_step):
            before = len(kept)
            kept = [earlier for earlier in kept if earlier["step"] < step]
            num_replaced += before - len(kept)
        kept.append(row)
    if num_without:
        notes.append(f"{name}: {_count(num_without, 'line')} left out, without a step.")
    if num_replaced:
        notes.append(f"{name}: {_count(num_replaced, 'line')} replaced by steps that were run again.")
    return kept


def _not_finite(lines: list[Row]) -> list[str]:
    """One sentence on the metrics that are NaN or infinite, where there are any."""
    counts = Counter(key for line in lines for key, value in line.items() if _broken(value))
    if not counts:
        return []
    keys = ", ".join(f"{key} ({_count(count, 'step')})" for key, count in counts.items())
    return [f"NaN or infinite, left out of the figures: {keys}."]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("s" if number != 1 else "")
