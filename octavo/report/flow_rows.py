"""Modules of a precision flow that are alike, put together: over layers, then neighbours such as q, k and v."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from octavo.numerics.precision_flow import Node, group_name


@dataclass(frozen=True, kw_only=True)
class Row:
    """Nodes whose tensors have the same formats, kernels and reasons."""

    names: tuple[str, ...]
    """model.layers.*.self_attn.q_proj, ...; the layers are written out where the others are of another kind."""
    nodes: tuple[Node, ...]
    """All of them."""


def flow_rows(nodes: Iterable[Node]) -> list[Row]:
    """Rows in the order of the forward pass."""
    groups: dict[tuple[str, Node], list[Node]] = {}
    for node in nodes:
        groups.setdefault((group_name(node.name), kind_of(node)), []).append(node)
    patterns = [pattern for pattern, _ in groups]
    merged: list[tuple[Node, list[str], list[Node]]] = []
    for (pattern, kind), group in groups.items():
        if patterns.count(pattern) > 1:
            pattern = pattern.replace("*", number_ranges([int(node.name.split(".")[2]) for node in group]))
        if merged and merged[-1][0] == kind:
            merged[-1][1].append(pattern)
            merged[-1][2].extend(group)
        else:
            merged.append((kind, [pattern], group))
    return [Row(names=tuple(names), nodes=tuple(group)) for _, names, group in merged]


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
