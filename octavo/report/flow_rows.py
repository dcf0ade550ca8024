"""Modules of a precision flow that are alike, put together: over layers, then neighbours such as q, k and v."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from octavo.numerics.precision_flow import Node, group_name


@dataclass(frozen=True, kw_only=True)
class Row:
    """Nodes whose tensors have the same formats, kernels and reasons."""

    layers: str
    """Numbers of their layers, as 0,2-35; empty outside the layers."""
    modules: str
    """self_attn.q_proj, k_proj, v_proj"""
    nodes: tuple[Node, ...]
    """All of them."""


def flow_rows(nodes: Iterable[Node]) -> list[Row]:
    """Rows in the order of the forward pass; neighbours share theirs if they are alike in every layer."""
    patterns: dict[str, dict[Node, list[Node]]] = {}
    for node in nodes:
        patterns.setdefault(group_name(node.name), {}).setdefault(kind_of(node), []).append(node)
    runs: list[list[str]] = []
    for pattern, kinds in patterns.items():
        if runs and _layers(patterns[runs[-1][0]]) == _layers(kinds):
            runs[-1].append(pattern)
        else:
            runs.append([pattern])
    rows = []
    for run in runs:
        first, *others = (pattern.removeprefix("model.layers.*.") for pattern in run)
        modules = ", ".join([first, *(name.removeprefix(first.rpartition(".")[0] + ".") for name in others)])
        for kind, numbers in _layers(patterns[run[0]]).items():
            alike = tuple(node for pattern in run for node in patterns[pattern][kind])
            rows.append(Row(layers=number_ranges(numbers), modules=modules, nodes=alike))
    return rows


def _layers(kinds: dict[Node, list[Node]]) -> dict[Node, list[int]]:
    """The layers that each kind of a module is in."""
    return {
        kind: [int(node.name.split(".")[2]) for node in nodes if node.name.startswith("model.layers.")]
        for kind, nodes in kinds.items()
    }


def kind_of(node: Node) -> Node:
    """A node without its name, shape and sources: equal for modules that are alike."""
    return replace(node, name="", shape=(), edges=tuple(replace(edge, sources=()) for edge in node.edges))


def number_ranges(numbers: list[int]) -> str:
    """[0, 2, 3, 4] -> 0,2-4"""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
