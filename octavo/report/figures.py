"""Draws the figures of a page: axes in, inline SVG out. Text and grid take the page's colours, light or dark.

Names of runs and keys stand in the page, never in a drawing: they may hold anything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import StringIO
from typing import Any

import numpy as np
from numpy.typing import NDArray

COLOURS = ("#3f83f8", "#e8750a", "#16a34a", "#db4b97", "#9061f9", "#0ea5a8", "#b7950b", "#e02424", "#8b6b4f", "#7a869a")
"""Of runs, or of a single run's measures; each can be told from white and from near black."""
DASHES = ("", "5 2", "1.5 1.5", "7 2 1.5 2", "3 1", "9 3 3 3")
"""Of measures, where colours stand for runs: lengths of dash and gap."""
MAX_POINTS = 400
"""Bins of a drawn line; more points are thinned to each bin's smallest and largest."""
MAX_COLUMNS = 60
"""Bins of steps in stacked bars and heat maps."""
FEW_POINTS = 12
"""A line of so few points marks each."""

_TEXT, _GRID = "#010203", "#010204"  # stand-ins that no drawing uses otherwise
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 9.0,
    "text.color": _TEXT,
    "axes.labelcolor": _TEXT,
    "axes.edgecolor": _GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _GRID,
    "ytick.color": _GRID,
    "xtick.labelcolor": _TEXT,
    "ytick.labelcolor": _TEXT,
    "lines.linewidth": 1.5,
    "lines.markersize": 3.5,
}


@dataclass(frozen=True, kw_only=True)
class LegendEntry:
    """One sample and what it stands for: a line, or a sign."""

    label: str
    colour: str
    """CSS; currentColor where it is the text's."""
    dash: str = ""
    sign: str = ""
    """A character in place of the line."""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A drawing."""

    svg: str
    label: str = ""
    """The run it shows, where each run has its own."""


@dataclass(kw_only=True)
class Chart:
    """What the page shows of one question: pictures with a caption, or why there are none."""

    title: str
    caption: str
    """One sentence: what is drawn, and its unit."""
    pictures: list[Picture] = field(default_factory=list)
    legend: list[LegendEntry] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Sentences beneath it."""
    details: list[str] = field(default_factory=list)
    """More sentences, folded away."""
    absent: str = ""
    """Why nothing is drawn."""


@contextmanager
def drawing(chart: Chart, label: str = "") -> Iterator[Any]:
    """Axes to draw on, 5 inches wide, flatter where a label tells them from others; then the chart has the picture."""
    import matplotlib
    from matplotlib.figure import Figure

    salt = f"{chart.title}/{len(chart.pictures)}"  # ids that no other picture of the page has
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": salt}):
        figure = Figure(figsize=(5.0, 1.8 if label else 2.6), layout="constrained")
        axes = figure.add_subplot()
        yield axes
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    chart.pictures.append(Picture(svg=_inline(text.getvalue(), chart.title), label=label))


def step_axis(axes: Any, label: str = "step") -> None:
    """Whole numbers along x."""
    from matplotlib.ticker import MaxNLocator

    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))


def value_axis(axes: Any, unit: str, *, from_zero: bool = True) -> None:
    """Values along y, by default from 0 where none is negative; the unit `share` in per cent."""
    if from_zero and axes.dataLim.y0 >= 0.0:
        axes.set_ylim(0.0, 1.05 * axes.dataLim.y1 or 0.01)
    if unit == "share":
        axes.yaxis.set_major_formatter(lambda value, place: f"{100 * value:.4g}%")
    else:
        axes.yaxis.set_major_formatter(lambda value, place: f"{value:.4g}")
        axes.set_ylabel(unit)


class LogAxis:
    """A logarithmic y axis that shows exact zeros too: on a line of their own at the bottom, labelled 0."""

    def __init__(self, values: Iterable[float]) -> None:
        """Room for these values, at least one of them above 0."""
        values = list(values)
        positive = [value for value in values if value > 0.0]
        self.lowest, self.highest = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
        self.has_zero = len(positive) < len(values)
        self.zero = 10.0 ** (self.lowest - 1)

    def place(self, values: Iterable[float]) -> list[float]:
        """Where values are drawn."""
        return [value if value > 0.0 else self.zero for value in values]

    def apply(self, axes: Any) -> None:
        """Scale, ticks and limits of the axes."""
        from matplotlib.ticker import NullLocator

        highest = max(self.highest, self.lowest + 1)
        every = max(1, (highest - self.lowest) // 6)
        powers = list(range(self.lowest, highest + 1, every))
        ticks = {10.0**power: f"1e{power}" if power else "1" for power in powers}
        if self.has_zero:
            ticks = {self.zero: "0", **ticks}
            axes.axhline(math.sqrt(self.zero * 10.0**self.lowest), color=_GRID, linewidth=1.0, linestyle=(0, (1, 2)))
        axes.set_yscale("log")
        axes.set_yticks(list(ticks), labels=list(ticks.values()))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_ylim(min(ticks) / 1.8, 10.0**highest * 1.3)


def line_style(colour: str, dash: str) -> dict[str, Any]:
    """Keyword arguments of a plot."""
    lengths = tuple(float(length) for length in dash.split())
    return {"color": colour, "linestyle": (0, lengths) if lengths else "-"}


def draw_line(
    axes: Any,
    x: Sequence[int],
    y: Sequence[float],
    style: dict[str, Any],
    *,
    smooth: bool = False,
    faint: bool = True,
) -> None:
    """A line; with `smooth` its running mean over a tenth of the points, and, if `faint`, the line itself behind it."""
    window = len(x) // 10 | 1
    if not smooth or window == 1:
        axes.plot(*thinned(x, y), marker="o" if len(x) <= FEW_POINTS else "", **style)
        return
    if faint:
        axes.plot(*thinned(x, y), color=style["color"], linewidth=0.8, alpha=0.35)
    axes.plot(*thinned(x, running_mean(y, window)), **style)


def running_mean(values: Sequence[float], window: int) -> NDArray[np.float64]:
    """Mean over the window round each value, [N] float64; fewer values at the ends. window is odd."""
    kernel = np.ones(window)
    sums = np.convolve(np.asarray(values, dtype=np.float64), kernel)
    counts = np.convolve(np.ones(len(values)), kernel)
    half = window // 2
    return (sums / counts)[half : half + len(values)]


def thinned(x: Sequence[int], y: Sequence[float] | NDArray[np.float64]) -> tuple[list[int], list[float]]:
    """At most 2 x MAX_POINTS of the points: of each bin of neighbours the smallest and the largest, in their order."""
    if len(x) <= 2 * MAX_POINTS:
        return list(x), [float(value) for value in y]
    kept: list[int] = []
    for places in np.array_split(np.arange(len(x)), MAX_POINTS):
        within = np.asarray(y)[places]
        kept += sorted({int(places[within.argmin()]), int(places[within.argmax()])})
    return [x[place] for place in kept], [float(y[place]) for place in kept]


def binned(steps: Sequence[int], rows: NDArray[np.float64]) -> tuple[list[float], NDArray[np.float64]]:
    """Means over bins of equal width, at most MAX_COLUMNS of them.

    Args:
        steps: N, ascending.
        rows: [N, K] float64, finite.

    Returns:
        The edges of C bins, C + 1 of them, and [C, K] means; NaN where a bin has no step.
    """
    first, last = steps[0], steps[-1]
    num_columns = min(MAX_COLUMNS, last - first + 1)
    width = math.ceil((last - first + 1) / num_columns)
    num_columns = math.ceil((last - first + 1) / width)
    means = np.full((num_columns, rows.shape[1]), np.nan)
    column = (np.asarray(steps) - first) // width
    for index in np.unique(column):
        means[index] = rows[column == index].mean(axis=0)
    return [first - 0.5 + index * width for index in range(num_columns + 1)], means


def _inline(svg: str, title: str) -> str:
    """A whole SVG document -> an element of the page that takes its colours and its width."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (width|height)="[^"]*pt"', "", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = svg.replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)
    return svg.replace(_TEXT, "currentColor").replace(_GRID, "var(--grid)")
