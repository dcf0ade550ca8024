"""Result files of measurements: what was measured, where, at which commit and by which command."""

from __future__ import annotations

import datetime
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import torch

from octavo.trainer.files import write_whole

RESULTS = Path("benchmarks/results")
UNKNOWN = "unknown"
"""In place of a commit."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure."""

    case: str
    """`<protocol>/<model shape>/<recipe>`."""
    metric: str
    """tok_s, tflop_s, bandwidth_share, speedup_vs_bf16, us, ..."""
    value: float
    """In `unit`."""
    unit: str
    """Of the value."""
    goal: float | None = None
    """None where there is none."""
    better: Literal["higher", "lower"] = "higher"
    """Which way is good."""
    note: str = ""
    """Second run, peers, what else matters."""

    @property
    def met(self) -> bool:
        """Whether the goal is reached; True without one."""
        if self.goal is None:
            return True
        return self.value >= self.goal if self.better == "higher" else self.value <= self.goal

    def line(self) -> str:
        """For a terminal."""
        goal = "" if self.goal is None else f"goal {self.goal:g}: {'met' if self.met else 'missed'}"
        value = f"{self.value:.3f}" if abs(self.value) >= 0.01 or not self.value else f"{self.value:.2e}"
        return f"{self.case:46} {self.metric:16} {value:>10} {self.unit:14} {goal:18} {self.note}".rstrip()


class Results:
    """The figures of one benchmark as they come: each is printed, and the file holds all so far.

    Args:
        name, command: of the benchmark.
        resume: keep what a file that is there holds of the same commit and device, and the commands that measured it.

    Raises:
        ValueError: a file of that name is there, and is no result file.
    """

    def __init__(self, name: str, command: str, resume: bool = False) -> None:
        self.name, self.command = name, command
        self.rows: list[Row] = []
        if resume:
            self._go_on()

    def _go_on(self) -> None:
        path = next((path for path in (result_path(self.name), RESULTS / f"{self.name}.json") if path.exists()), None)
        if path is None:
            return
        rows = list(read_results(path).values())
        found = json.loads(path.read_text())
        if found.get("commit") == _commit() != UNKNOWN and found.get("device") == _device():
            self.rows = rows
            self.command = "; ".join(dict.fromkeys([*found.get("command", "").split("; "), self.command]))

    def has(self, case: str) -> bool:
        """Whether a case has a figure."""
        return any(row.case == case for row in self.rows)

    def add(self, row: Row) -> None:
        """Print a figure and write benchmarks/results/NAME.json, or NAME.json under $OUT if that is set.

        One of the same case and metric that is there already is replaced.
        """
        self.rows = [each for each in self.rows if (each.case, each.metric) != (row.case, row.metric)] + [row]
        print(row.line(), flush=True)
        write_results(self.name, self.command, self.rows)


def result_path(name: str) -> Path:
    """benchmarks/results/NAME.json, or NAME.json under $OUT if that is set."""
    return (Path(os.environ["OUT"]) if "OUT" in os.environ else RESULTS) / f"{name}.json"


def write_results(name: str, command: str, rows: list[Row]) -> Path:
    """Leave benchmarks/results/NAME.json, or NAME.json under $OUT if that is set; whole, or as it was before."""
    result = {
        "device": _device(),
        "torch": torch.__version__,
        "triton": importlib.metadata.version("triton") if importlib.util.find_spec("triton") else None,
        "commit": _commit(),
        "command": command,
        "date": datetime.date.today().isoformat(),
        "rows": [asdict(row) for row in rows],
    }
    path = result_path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(result, indent=1) + "\n")
    return path


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


@lru_cache(maxsize=1)
def _commit() -> str:
    if commit := os.environ.get("OCTAVO_COMMIT"):
        return commit
    if shutil.which("git") is None:
        return UNKNOWN
    git = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return git.stdout.strip() or UNKNOWN


def read_results(path: Path) -> dict[str, Row]:
    """The rows of a result file by case and metric.

    Raises:
        ValueError: not a result file.
    """
    try:
        rows: dict[str, Row] = {}
        for row in (Row(**fields) for fields in json.loads(path.read_text())["rows"]):
            name = f"{row.case} {row.metric}"
            if name in rows or not isinstance(row.value, int | float):
                raise ValueError(f"{name!r} is there twice" if name in rows else f"{name!r} has value {row.value!r}")
            rows[name] = row
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no result file of a benchmark: {type(error).__name__}: {error}") from error
    return rows


def compare(left: Path, right: Path) -> list[tuple[str, str, str, str]]:
    """Rows of two result files side by side: case and metric, the two values, the second over the first.

    Raises:
        ValueError: one is no result file.
    """
    first, second = read_results(left), read_results(right)
    table = []
    for key in [*first, *(key for key in second if key not in first)]:
        values = [f"{rows[key].value:.4g} {rows[key].unit}" if key in rows else "-" for rows in (first, second)]
        ratio = ""
        if key in first and key in second and first[key].unit == second[key].unit and first[key].value:
            change = second[key].value / first[key].value
            worse = change < 0.97 if first[key].better == "higher" else change > 1.03
            ratio = f"{change:.3f}{' worse' if worse else ''}"
        table.append((key, values[0], values[1], ratio))
    return table
