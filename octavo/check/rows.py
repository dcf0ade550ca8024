"""One finding of `octavo check`, and how findings are shown."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.text import Text

Status = Literal["OK", "WARN", "FAIL"]
COLOURS = {"OK": "green", "WARN": "yellow", "FAIL": "bold red"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A finding, e.g. Row(group="machine", name="torch", status="OK", detail="2.13.0, built for the CPU")."""

    group: str
    """machine, packages, environment, numbers on a device, or config: the heading it stands under."""
    name: str
    """What was looked at."""
    status: Status
    """OK: as it should be. WARN: works, with a drawback. FAIL: octavo, or this config, cannot work so."""
    detail: str
    """What was found, on one line."""
    next_step: str = ""
    """What to do about it; never empty for WARN and FAIL."""

    def __post_init__(self) -> None:
        assert self.status == "OK" or self.next_step, f"{self.name}: {self.status} without a next step"


def size_text(num_bytes: float) -> str:
    """A size for people: 3.6 MB, 24.2 GB."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def show(rows: Iterable[Row], console: Console) -> list[Row]:
    """Print each row as it comes, under a heading a group, and a summary; returns the rows."""
    shown: list[Row] = []
    for row in rows:
        if not shown or shown[-1].group != row.group:
            console.print(Text(row.group, style="bold"))
        console.print(Text(f"  {row.status:<4}", style=COLOURS[row.status]), Text(f" {row.name:<26} {row.detail}"))
        if row.next_step:
            console.print(Text(f"{'':<34}-> {row.next_step}", style=COLOURS[row.status]))
        shown.append(row)
    counts = {status: sum(row.status == status for row in shown) for status in COLOURS}
    console.print(Text(", ".join(f"{count} {status}" for status, count in counts.items())))
    return shown
