"""The precision flow as tables on the console: a row per group of modules that are alike."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from octavo.numerics.precision_flow import Edge, Graph, Phase, PrecisionFlow, Role, lines
from octavo.report.flow_rows import flow_rows

COLOURS = {"e4m3": "green", "fp16": "magenta", "bf16": "default", "fp32": "cyan"}
"""Of a tensor's format, as the console names them."""
PIPED_WIDTH = 120
"""Characters in a line where the output is a file or a pipe."""
PASSES: dict[Phase, str] = {"fprop": "FProp", "dgrad": "DGrad", "wgrad": "WGrad", "saved": "saved"}
"""Phases that a table shows, and how it calls them."""
BETWEEN = ("Y", "dX", "dQ", "dK", "dV")
"""Tensors between modules, which the line above a table tells for all of them."""


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
    titles: dict[Role, str] = {"train": f"train, and FProp of {', '.join(sharing)}"}
    if found:
        titles = {"rollout": "rollout", **titles}
    parts: list[RenderableType] = []
    for role, title in titles.items():
        parts += [Text(f"{title}: {summary(flow.graph(role))}", "bold"), graph_table(flow.graph(role))]
    if found:
        allowed = "as precision.allow_mismatch allows" if allow_mismatch else "which octavo train refuses"
        parts.append(_list(f"Rollout / training differ, {allowed}:", found))
    else:
        parts.append(Text("Rollout and training are one forward: no edge differs.\n"))
    parts.append(_list("Not FP8:", kept_lines(flow)))
    formats = dict.fromkeys(edge.format for node in flow.graph("export").nodes for edge in node.edges)
    parts.append(Text(f"Export: model/ in {', '.join(formats)}, every master rounded once."))
    return parts


def summary(graph: Graph) -> str:
    """What a table leaves out, because it is the same for all modules."""
    edges = [edge for node in graph.nodes for edge in node.edges]
    between = ", ".join(dict.fromkeys(edge.format for edge in edges if edge.tensor in BETWEEN))
    owned = ", ".join(dict.fromkeys(edge.format for edge in edges if edge.phase in ("master", "gradient")))
    note = f"; masters and gradients {owned}" if owned else ""
    return f"recipe {graph.recipe}; between modules {between}{note}"


def graph_table(graph: Graph) -> Table:
    """One graph: of each group of modules a line per pass that it takes part in."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold underline")
    for heading in ("layers", "module", "pass", "tensors", "kernel"):
        table.add_column(heading, no_wrap=heading not in ("tensors", "kernel"))
    for row in flow_rows(graph.nodes):
        names = [row.layers, row.modules.replace(", ", "\n")]
        for phase, heading in PASSES.items():
            shown = [edge for edge in row.nodes[0].edges if edge.phase == phase]
            tensors = _tensors(shown)
            if tensors:
                kernels = dict.fromkeys(edge.kernel for edge in shown if edge.kernel)
                table.add_row(*names, heading, tensors, "\n".join(kernels))
                names = ["", ""]
        table.add_row()
    return table


def kept_lines(flow: PrecisionFlow) -> list[str]:
    """What is not FP8 and why, in training and, where it is another forward, in the rollout: a line per reason."""
    roles: dict[str, list[str]] = {}
    for role in ("train", "rollout") if flow.differences() else ("train",):
        reasons: dict[str, dict[str, list[str]]] = {}
        for row in flow_rows(flow.graph(role).nodes):
            reasons.setdefault(row.nodes[0].kept, {}).setdefault(row.layers, []).append(row.modules)
        for reason, layers in reasons.items():
            names = (f"{f'layers {i}: ' if i else ''}{', '.join(modules)}" for i, modules in layers.items())
            if reason:
                roles.setdefault(f"{reason}: {'; '.join(names)}", []).append(role)
    return [f"{', '.join(found)}: {line}" for line, found in roles.items()]


def _tensors(edges: Sequence[Edge]) -> Text:
    """A line per format, coloured by it."""
    formats: dict[tuple[str, str], list[str]] = {}
    for edge in edges:
        if edge.tensor not in BETWEEN or edge.phase == "saved":
            formats.setdefault((edge.text(), COLOURS[edge.format]), []).append(edge.tensor)
    return Text("\n").join(Text(f"{' '.join(names)} {text}", style) for (text, style), names in formats.items())


def _list(title: str, items: Sequence[str]) -> Text:
    return Text("\n".join([title, *(f"  {item}" for item in items), ""]))
