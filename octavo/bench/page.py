"""Tables of `octavo bench` for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from octavo.bench.gemm import Gain, verdict


def show_gains(gains: Sequence[Gain], recipe: str, console: Console) -> None:
    """Each linear's times and gain, the verdict, and the kernels that ran."""
    table = Table("linear", "work", "tokens", "BF16 us", f"{recipe} us", "gain")
    for column in table.columns[2:]:
        column.justify = "right"
    for gain in gains:
        times = f"{gain.bf16_us:,.1f}", f"{gain.recipe_us:,.1f}"
        table.add_row(gain.linear, gain.work, f"{gain.tokens:,}", *times, f"{gain.speedup:.2f}x")
    console.print(table)
    for line in verdict(gains):
        console.print(line)
    console.print("kernels that ran (by the profiler):")
    for work in dict.fromkeys(gain.work for gain in gains):
        names = dict.fromkeys(name for gain in gains if gain.work == work for name in gain.kernels)
        console.print(f"  {work}: {', '.join(names)}")


def show_comparison(rows: Sequence[tuple[str, str, str, str]], names: tuple[str, str], console: Console) -> None:
    """Two result files side by side."""
    table = Table("case", *names, "second / first")
    for row in rows:
        table.add_row(*row)
    console.print(table)
