"""The precision flow as tables on the console: a row per group of modules that are alike."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import Literal

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from octavo.numerics.precision_flow import Edge, Graph, Node, PrecisionFlow, lines
from octavo.report.flow_rows import Row, flow_rows

COLOURS = {"e4m3": "green", "fp16": "magenta", "bf16": "default", "fp32": "cyan"}
"""Of a tensor's format, as the console names them."""
PIPED_WIDTH = 170
"""Characters in a line where the output is a file or a pipe."""
BETWEEN = ("Y", "dX", "dQ", "dK", "dV")
"""Tensors between modules, which a table's title tells for all of them."""


def print_flow(flow: PrecisionFlow, allow_mismatch: bool) -> None:
    """Print `flow_report`, wide enough to be read where the output is no terminal."""
    piped = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    console = Console(highlight=False, width=PIPED_WIDTH if piped else None)
    for part in flow_report(flow, allow_mismatch):
        console.print(part, soft_wrap=isinstance(part, Text))


def flow_report(flow: PrecisionFlow, allow_mismatch: bool) -> list[RenderableType]:
    """Training, the rollout where it is another forward, the export; how they differ, what is not FP8 and why."""
    found = lines(flow.differences())
    forward_roles = ("old", "reference") if found else ("rollout", "old", "reference")
    sharing = [graph.role for graph in flow.graphs if graph.role in forward_roles]
    parts: list[RenderableType] = []
    if found:
        parts.append(graph_table(flow.graph("rollout"), "rollout"))
    parts.append(graph_table(flow.graph("train"), f"train, and FProp of {', '.join(sharing)}"))
    if found:
        allowed = "as precision.allow_mismatch allows" if allow_mismatch else "which octavo train refuses"
        parts.append(_list(f"Rollout / training differ, {allowed}:", found))
    else:
        parts.append(Text("Rollout and training are one forward: no edge differs.\n"))
    parts.append(_list("Not FP8:", kept_lines(flow)))
    formats = dict.fromkeys(edge.format for node in flow.graph("export").nodes for edge in node.edges)
    parts.append(Text(f"Export: model/ in {', '.join(formats)}, every FP32 master rounded once."))
    return parts


def graph_table(graph: Graph, title: str) -> Table:
    """One graph; the columns of the backward only where it has one."""
    between = ", ".join(dict.fromkeys(edge.format for edge in _edges(graph.nodes) if edge.tensor in BETWEEN))
    owned = dict.fromkeys(edge.format for edge in _edges(graph.nodes) if edge.phase in ("master", "gradient"))
    note = f"; masters and gradients {', '.join(owned)}" if owned else ""
    table = Table(
        title=f"{title}: recipe {graph.recipe}; between modules {between}{note}", title_justify="left", show_lines=True
    )
    backward = ("DGrad", "WGrad", "saved") if owned else ()
    for heading in ("module", "count", "FProp X", "FProp W", *backward, "kernel", "why not FP8"):
        justify: Literal["left", "right"] = "right" if heading == "count" else "left"
        table.add_column(heading, overflow="fold", justify=justify, no_wrap=heading == "module")
    for row in flow_rows(graph.nodes):
        node = row.nodes[0]
        cells = [_names(row), Text(str(len(row.nodes))), *(_cell(edges) for edges in _forward(node))]
        cells += [_cell([edge for edge in node.edges if edge.phase == heading.lower()]) for heading in backward]
        kernels = dict.fromkeys(edge.kernel for edge in node.edges if edge.phase in ("fprop", "dgrad") and edge.kernel)
        table.add_row(*cells, Text("\n".join(kernels)), Text(node.kept))
    return table


def kept_lines(flow: PrecisionFlow) -> list[str]:
    """What is not FP8 and why, in training and, where it is another forward, in the rollout: a line per reason."""
    roles: dict[tuple[str, str], list[str]] = {}
    for role in ("train", "rollout") if flow.differences() else ("train",):
        reasons: dict[str, list[str]] = {}
        for row in flow_rows(flow.graph(role).nodes):
            reasons.setdefault(row.nodes[0].kept, []).extend(row.names)
        for reason, names in reasons.items():
            if reason:
                roles.setdefault((reason, ", ".join(names)), []).append(role)
    return [f"{', '.join(found)}: {reason}: {names}" for (reason, names), found in roles.items()]


def _edges(nodes: Iterable[Node]) -> list[Edge]:
    return [edge for node in nodes for edge in node.edges]


def _forward(node: Node) -> tuple[list[Edge], list[Edge]]:
    """What a module reads and makes in the forward, and what it owns."""
    forward = [edge for edge in node.edges if edge.phase == "fprop"]
    owned = [edge for edge in forward if not edge.sources or edge.tensor == "W"]
    return [edge for edge in forward if edge not in owned], owned


def _names(row: Row) -> Text:
    """The first name whole, of the others what is new."""
    first, *others = row.names
    parent = first.rpartition(".")[0]
    return Text("\n".join([first, *(f"  {name.removeprefix(f'{parent}.')}" for name in others)]))


def _cell(edges: Sequence[Edge]) -> Text:
    """A line per format, coloured by it; the heading names a single X or W."""
    formats: dict[tuple[str, str], list[str]] = {}
    for edge in edges:
        if edge.tensor not in BETWEEN or edge.phase == "saved":
            formats.setdefault((edge.text(), COLOURS[edge.format]), []).append(edge.tensor)
    plain = [list(names) for names in formats.values()] in ([["X"]], [["W"]])
    parts = [Text(text if plain else f"{' '.join(names)} {text}", style) for (text, style), names in formats.items()]
    return Text("\n").join(parts)


def _list(title: str, items: Sequence[str]) -> Text:
    return Text("\n".join([title, *(f"  {item}" for item in items), ""]))
