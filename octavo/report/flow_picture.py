"""The precision flow as a picture: one decoder block and the head, a column per role, tensors coloured by format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from octavo.numerics.precision_flow import Edge, Graph, Node, PrecisionFlow, block_text
from octavo.report.flow_rows import Row, flow_rows, kind_of

COLOURS = {"e4m3": "#8fd18f", "fp16": "#d7b5e8", "bf16": "#dddddd", "fp32": "#9fc8ee"}
"""Of a tensor's format."""
DIFFERS = "#d62728"
"""Outline of a module whose forward differs between rollout and training."""
PHASES = {
    "FProp": ("fprop",),
    "DGrad": ("dgrad",),
    "WGrad": ("wgrad",),
    "saved": ("saved",),
    "master, gradient": ("master", "gradient"),
    "written": ("export",),
}
"""Column inside a role: phases shown there."""
CHIP, ROW, GAP, LABEL = 0.62, 0.62, 0.28, 2.9
"""Inches: width of a tensor, height of a module's row, space between columns, width of the names."""


def draw_flow(flow: PrecisionFlow, path: Path, title: str) -> None:
    """Draw the flow.

    Args:
        flow: of a run.
        path: to write, .svg or .png.
        title: what the picture is of.

    Raises:
        ValueError: another kind of file.
    """
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"--picture {path} is neither .svg nor .png. Name it like flow.svg")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    layer, num_alike, num_layers = usual_layer(flow)
    rows = picture_rows(flow.graph("train"), layer)
    differing = {difference.node for difference in flow.differences()}
    columns = [(graph, _sections(graph, rows)) for graph in flow.graphs]
    width = LABEL + sum(CHIP * sum(sections.values()) + GAP * (1 + len(sections)) for _, sections in columns)
    height = ROW * (len(rows) + 2.2)
    figure, axes = pyplot.subplots(figsize=(width, height))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    note = "" if num_alike == num_layers else f" ({num_alike} of {num_layers} layers are alike; the table has all)"
    axes.text(0.1, 0.25, f"{title}: layer {layer} and the head{note}", fontsize=13, weight="bold", va="center")
    _legend(axes, bool(differing))
    for place, row in enumerate(rows):
        axes.text(0.1, ROW * (place + 2.5), row.modules, fontsize=9, va="center")
    x = LABEL
    for graph, sections in columns:
        recipe = "" if graph.role == "export" else f" ({graph.recipe})"
        axes.text(x, ROW * 1.25, graph.role + recipe, fontsize=11, weight="bold", va="center")
        nodes = {node.name: node for node in graph.nodes}
        for section, num_chips in sections.items():
            axes.text(x, ROW * 1.7, section, fontsize=8, style="italic", va="center")
            for place, row in enumerate(rows):
                edges = _edges(nodes.get(row.nodes[0].name), section)
                compared = section == "FProp" and graph.role in ("rollout", "train")
                differs = compared and any(node.name in differing for node in row.nodes)
                _box(axes, x, ROW * (place + 2), edges, differs)
                if section == "FProp" and place + 1 < len(rows):
                    middle = x + CHIP / 2
                    axes.annotate(
                        "", (middle, ROW * (place + 3) + 0.08), (middle, ROW * (place + 3) - 0.08), arrowprops=_ARROW
                    )
            x += CHIP * num_chips + GAP
        x += GAP
    figure.savefig(path, dpi=110, bbox_inches="tight")
    pyplot.close(figure)


_ARROW = {"arrowstyle": "->", "color": "#666666", "linewidth": 0.8}


def usual_layer(flow: PrecisionFlow) -> tuple[int, int, int]:
    """The first layer of the commonest kind, how many are of that kind, and how many there are."""
    kinds: dict[int, list[Any]] = {}
    for graph in flow.graphs:
        for node in graph.nodes:
            if node.name.startswith("model.layers."):
                index, name = node.name.removeprefix("model.layers.").split(".", 1)
                kinds.setdefault(int(index), []).append((graph.role, name, kind_of(node)))
    counts = Counter(tuple(kind) for kind in kinds.values())
    kind, num_alike = counts.most_common(1)[0]
    return next(index for index, other in kinds.items() if tuple(other) == kind), num_alike, len(kinds)


def picture_rows(graph: Graph, layer: int) -> list[Row]:
    """Modules of a layer, of the embedding and of the head."""
    here = f"model.layers.{layer}."
    return flow_rows(node for node in graph.nodes if node.name.startswith(here) or "layers." not in node.name)


def _sections(graph: Graph, rows: Sequence[Row]) -> dict[str, int]:
    """Columns of a role, and the most tensors that a row has in each."""
    shown = {node.name for row in rows for node in row.nodes}
    nodes = [node for node in graph.nodes if node.name in shown]
    sizes = {section: max(len(_edges(node, section)) for node in nodes) for section in PHASES}
    return {section: size for section, size in sizes.items() if size}


def _edges(node: Node | None, section: str) -> list[Edge]:
    return [] if node is None else [edge for edge in node.edges if edge.phase in PHASES[section]]


def _box(axes: Any, x: float, y: float, edges: Sequence[Edge], differs: bool) -> None:
    """A module's tensors side by side, in one box."""
    from matplotlib.patches import Rectangle

    if not edges:
        return
    top, height = y + 0.1, ROW - 0.2
    for place, edge in enumerate(edges):
        left = x + CHIP * place
        axes.add_patch(Rectangle((left, top), CHIP, height, facecolor=COLOURS[edge.format], edgecolor="white"))
        detail = edge.format if edge.quant_block is None else block_text(edge.quant_block)
        detail = "frozen" if edge.margin is not None else detail
        axes.text(left + CHIP / 2, top + height * 0.3, edge.tensor, fontsize=7, ha="center", va="center", weight="bold")
        axes.text(left + CHIP / 2, top + height * 0.72, detail, fontsize=6.5, ha="center", va="center")
    colour, linewidth = (DIFFERS, 2.0) if differs else ("#444444", 0.8)
    width = CHIP * len(edges)
    axes.add_patch(Rectangle((x, top), width, height, fill=False, edgecolor=colour, linewidth=linewidth))


def _legend(axes: Any, differs: bool) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(facecolor=colour, label=name) for name, colour in COLOURS.items()]
    if differs:
        patches.append(Patch(fill=False, edgecolor=DIFFERS, linewidth=2.0, label="rollout and training differ"))
    axes.legend(handles=patches, loc="upper right", ncols=len(patches), frameon=False, fontsize=9)
