"""What flows where, and in which format: the graphs of rollout, old, reference, training and export.

    flow = declare_flow(decoder_modules(config), rollout=recipe, train=recipe)     numerics/flow_edges.py
    flow.check(allow_mismatch=False)            the rollout is a sub-graph of the training forward, edge by edge

A graph has a node per module and an edge per tensor that a module computes with. An edge's sources are the nodes that
the tensor comes from: none for a parameter, the node itself for what it makes. Layers are alike, so texts group them:
`model.layers.*.mlp.down_proj`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any, Literal

from octavo.numerics.fp8 import PER_COLUMN, PER_ROW, PER_TENSOR, QuantBlock

Role = Literal["rollout", "old", "reference", "train", "export"]
Phase = Literal["fprop", "dgrad", "wgrad", "saved", "master", "gradient", "export"]
Format = Literal["e4m3", "bf16", "fp16", "fp32"]
Scale = Literal["none", "fp32", "power_of_two"]
Kind = Literal["embedding", "norm", "projection", "rotary", "kv_cache", "attention", "activation", "residual", "head"]

LAYER = re.compile(r"model\.layers\.(\d+)\.")
MAX_LINES_IN_ERROR = 4
"""Groups of modules that an error names in full; the others are counted."""


@dataclass(frozen=True, kw_only=True)
class Edge:
    """A tensor that a module computes with.

    Example: Edge(phase="fprop", tensor="W", sources=(), format="e4m3", quant_block=(128, 128), scale="fp32",
    kernel="E4M3 sums").
    """

    phase: Phase
    """Where it is used: fprop, dgrad, wgrad; or kept: saved for the backward, master, gradient, export."""
    tensor: str
    """X, W, Y, dY, Q, P, ... `K^` and `V^` are keys and values as the cache gives them back."""
    sources: tuple[str, ...]
    """Nodes that it comes from; () is a parameter."""
    format: Format
    """Of what is stored and multiplied."""
    kernel: str
    """Who computes with it, and how the sum is made; empty for what comes out."""
    quant_block: QuantBlock | None = None
    """Shape that shares one scale; None where nothing is quantised."""
    scale: Scale = "none"
    """One per quantisation block, FP32 or rounded up to a power of two."""
    margin: float | None = None
    """The scale is frozen for an RL step at the last amax times this; None follows each tensor."""

    @property
    def name(self) -> str:
        """Phase and tensor: `fprop W`."""
        return f"{self.phase} {self.tensor}"

    def text(self) -> str:
        """Format, block and scale, as `edge_text` puts them."""
        return edge_text(self.format, self.quant_block, self.scale, self.margin)


@dataclass(frozen=True, kw_only=True)
class Node:
    """A module and every tensor that it computes with."""

    name: str
    """As Hugging Face names it: model.layers.3.self_attn.q_proj."""
    kind: Kind
    """What it does."""
    shape: tuple[int, ...]
    """Of its weight; () where there is none."""
    kept: str
    """Why it is not FP8; empty where it is."""
    edges: tuple[Edge, ...]
    """In the order of computation."""

    def edge(self, name: str) -> Edge:
        """The edge of a name, as `fprop W`."""
        return next(edge for edge in self.edges if edge.name == name)


@dataclass(frozen=True, kw_only=True)
class Graph:
    """What one role computes."""

    role: Role
    """Who runs it."""
    recipe: str
    """The name of its recipe."""
    nodes: tuple[Node, ...]
    """In the order of the forward pass."""

    def node(self, name: str) -> Node:
        """The node of a module."""
        return next(node for node in self.nodes if node.name == name)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """An edge that two graphs do not share."""

    role: Role
    """Of the graph it was found in."""
    node: str
    """The module."""
    edge: str
    """Phase and tensor, as `fprop W`."""
    left: str
    """The edge in the first graph; `absent` if it has none."""
    right: str
    """In the second."""


@dataclass(frozen=True, kw_only=True)
class PrecisionFlow:
    """The graphs of a run."""

    graphs: tuple[Graph, ...]
    """One per role."""

    def graph(self, role: Role) -> Graph:
        """The graph of a role."""
        return next(graph for graph in self.graphs if graph.role == role)

    def differences(self) -> list[Difference]:
        """Every edge of the forward pass that rollout and training do not share; [] means one forward."""
        return compare(self.graph("rollout"), self.graph("train"), phase="fprop")

    def check(self, allow_mismatch: bool) -> None:
        """Refuse a rollout that is no sub-graph of the training forward.

        Raises:
            ValueError: edges differ and allow_mismatch is false; the message names them.
        """
        found = lines(self.differences())
        if found and not allow_mismatch:
            raise ValueError(
                f"rollout / training would run two different forwards: {shortened(found)}. Give both the same "
                f"precision, or set precision.allow_mismatch=true: the rollout then runs its own forward, and "
                f"importance weights correct for it"
            )

    def diff(self, other: PrecisionFlow) -> list[Difference]:
        """Every edge that this flow and another do not share, in any role and phase; shapes; why a node is not FP8."""
        found = []
        for role in dict.fromkeys(graph.role for graph in (*self.graphs, *other.graphs)):
            mine, its = (
                next((graph for graph in flow.graphs if graph.role == role), Graph(role=role, recipe="", nodes=()))
                for flow in (self, other)
            )
            found += compare(mine, its) + compare_nodes(mine, its)
        return found

    def kept(self, role: Role = "train") -> dict[str, str]:
        """What is not FP8 in a role, and why: {module: reason}."""
        return {node.name: node.kept for node in self.graph(role).nodes if node.kept}

    def to_json(self) -> str:
        """JSON that does not grow with the layers: each kind of node once, and of each graph the layers made of them.

        In a node of layer i `{i}` stands for that number and `{i-1}` for the one before; fields at their default are
        left out. `from_json` gives back an equal flow.
        """
        numbers: dict[str, int] = {}
        graphs = []
        for graph in self.graphs:
            runs: list[dict[str, list[int]]] = []
            for layer, nodes in groupby(graph.nodes, key=lambda node: _layer(node.name)):
                kinds = [numbers.setdefault(_relative(json.dumps(_plain(node)), layer), len(numbers)) for node in nodes]
                if layer is None or not runs or not runs[-1]["layers"] or runs[-1]["nodes"] != kinds:
                    runs.append({"layers": [], "nodes": kinds})
                runs[-1]["layers"] += [] if layer is None else [layer]
            graphs.append(json.dumps({"role": graph.role, "recipe": graph.recipe, "nodes": runs}))
        return "".join(('{"nodes": [\n', ",\n".join(numbers), '\n], "graphs": [\n', ",\n".join(graphs), "\n]}\n"))

    @staticmethod
    def from_json(text: str) -> PrecisionFlow:
        """The flow that `to_json` wrote.

        Raises:
            ValueError: the text is no such JSON.
        """
        try:
            data = json.loads(text)
            kinds = [json.dumps(kind) for kind in data["nodes"]]
            graphs = [
                Graph(
                    role=graph["role"],
                    recipe=graph["recipe"],
                    nodes=tuple(
                        _node(json.loads(_absolute(kinds[number], layer)))
                        for run in graph["nodes"]
                        for layer in run["layers"] or [None]
                        for number in run["nodes"]
                    ),
                )
                for graph in data["graphs"]
            ]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(f"not a precision flow as octavo writes it ({type(error).__name__}: {error})") from error
        return PrecisionFlow(graphs=tuple(graphs))


def compare(left: Graph, right: Graph, phase: Phase | None = None) -> list[Difference]:
    """Edges that differ in anything, and edges of nodes that one side lacks."""
    a, b = (
        {(node.name, edge.name): edge for node in graph.nodes for edge in node.edges if phase in (None, edge.phase)}
        for graph in (left, right)
    )
    return [
        Difference(
            role=right.role,
            node=key[0],
            edge=key[1],
            left=shown(a.get(key), b.get(key)),
            right=shown(b.get(key), a.get(key)),
        )
        for key in dict.fromkeys([*a, *b])
        if a.get(key) != b.get(key)
    ]


def compare_nodes(left: Graph, right: Graph) -> list[Difference]:
    """Of nodes that both graphs have: the shapes of weights that differ, and the reasons why they are not FP8."""
    others = {node.name: node for node in right.nodes}
    return [
        Difference(role=right.role, node=node.name, edge=edge, left=mine, right=its)
        for node in left.nodes
        if (other := others.get(node.name)) is not None
        for edge, mine, its in (
            ("shape", str(node.shape), str(other.shape)),
            ("why not FP8:", node.kept or "it is", other.kept or "it is"),
        )
        if mine != its
    ]


def shown(edge: Edge | None, other: Edge | None) -> str:
    """The text of an edge beside another's; where the texts agree, with its kernel or else its sources."""
    if edge is None:
        return "absent"
    if other is None or edge.text() != other.text():
        return edge.text()
    return f"{edge.text()} [{edge.kernel if edge.kernel != other.kernel else ', '.join(edge.sources)}]"


def lines(differences: Iterable[Difference], *, roles: bool = False) -> list[str]:
    """One line per group of nodes that differ alike; what is left of each ` / ` is the left graph's.

    Example: model.layers.*.mlp.down_proj in 28 layers: fprop X e4m3 1x128 / bf16, fprop W e4m3 128x128 / bf16

    Args:
        differences: of any number of graphs.
        roles: say for each edge in which graphs it differs.
    """
    nodes: dict[str, dict[str, list[str]]] = {}
    for difference in differences:
        text = f"{difference.edge} {difference.left} / {difference.right}"
        nodes.setdefault(difference.node, {}).setdefault(text, []).append(difference.role)
    alike: dict[tuple[str, str], list[str]] = {}
    for name, texts in nodes.items():
        parts = (f"{text} ({', '.join(found)})" if roles else text for text, found in texts.items())
        alike.setdefault((group_name(name), ", ".join(parts)), []).append(name)
    groups: dict[tuple[str, int], list[str]] = {}
    for (pattern, text), names in alike.items():
        groups.setdefault((text, len(names)), []).append(pattern if len(names) > 1 else names[0])
    return [
        f"{', '.join(patterns)}{f' in {count} layers' if count > 1 else ''}: {text}"
        for (text, count), patterns in groups.items()
    ]


def shortened(found: list[str]) -> str:
    """The first lines of an error, and how many there are more."""
    more = len(found) - MAX_LINES_IN_ERROR
    return "; ".join(found[:MAX_LINES_IN_ERROR]) + (f"; and {more} more groups of modules" if more > 0 else "")


def group_name(name: str) -> str:
    """model.layers.3.mlp.down_proj -> model.layers.*.mlp.down_proj"""
    return re.sub(r"\.\d+\.", ".*.", name)


def edge_text(
    format: str, quant_block: QuantBlock | None = None, scale: Scale = "none", margin: float | None = None
) -> str:
    """`e4m3 1x128`, `bf16`, `e4m3 tensor (2^n scale, frozen x1.25)`."""
    notes = ["2^n scale"] if scale == "power_of_two" else []
    if margin is not None:
        notes.append(f"frozen x{str(margin).removesuffix('.0')}")
    text = format if quant_block is None else f"{format} {block_text(quant_block)}"
    return f"{text} ({', '.join(notes)})" if notes else text


def block_text(quant_block: QuantBlock) -> str:
    """(1, 128) -> 1x128; tensor, row and column for those that take a whole dimension."""
    names = {PER_TENSOR: "tensor", PER_ROW: "row", PER_COLUMN: "column"}
    return names.get(quant_block) or "x".join("all" if size is None else str(size) for size in quant_block)


def _layer(name: str) -> int | None:
    """The layer that a node lies in."""
    found = LAYER.match(name)
    return None if found is None else int(found[1])


def _relative(text: str, layer: int | None) -> str:
    """Layers as offsets from this one, so that nodes that differ in nothing but their layer have the same text."""
    if layer is None:
        return text

    def offset(found: re.Match[str]) -> str:
        away = int(found[1]) - layer
        return f"model.layers.{{i{f'{away:+d}' if away else ''}}}."

    return LAYER.sub(offset, text)


def _absolute(text: str, layer: int | None) -> str:
    """`_relative` undone."""
    return text if layer is None else re.sub(r"\{i([+-]\d+)?\}", lambda found: str(layer + int(found[1] or 0)), text)


def _plain(item: Any) -> dict[str, Any]:
    """Node or edge -> dict, without fields at their default."""
    values = {field.name: getattr(item, field.name) for field in fields(item)}
    kept = {field.name: values[field.name] for field in fields(item) if values[field.name] != field.default}
    return kept | ({"edges": [_plain(edge) for edge in item.edges]} if isinstance(item, Node) else {})


def _node(data: dict[str, Any]) -> Node:
    return Node(**{**data, "shape": tuple(data["shape"]), "edges": tuple(_edge(edge) for edge in data["edges"])})


def _edge(data: dict[str, Any]) -> Edge:
    block = {"quant_block": tuple(data["quant_block"])} if "quant_block" in data else {}
    return Edge(**{**data, "sources": tuple(data["sources"]), **block})
