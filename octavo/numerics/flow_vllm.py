"""The declaration of a rollout by vLLM: octavo's graph under the same recipe, and what vLLM does otherwise.

As read in vLLM 0.24 and 0.32: norm gains, the rotary table and logits are BF16; an FP8 cache has the scale 1, and on
Hopper FlashAttention multiplies queries and probabilities in E4M3 beside it.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.numerics.flow_edges import COPY
from octavo.numerics.fp8 import PER_TENSOR
from octavo.numerics.precision_flow import Edge, Graph, Kind

KERNEL = "vLLM's kernel"
"""Sums in an order that is its own."""
IN_BF16: dict[Kind, str] = {"norm": "fprop W", "rotary": "fprop cos sin", "head": "fprop logits"}
"""Kind of node: its edge that is FP32 in octavo."""
IN_FP8: dict[Kind, tuple[str, ...]] = {
    "kv_cache": ("fprop K", "fprop V"),
    "attention": ("fprop Q", "fprop K^", "fprop V^", "fprop P"),
}
"""Kind of node: its edges that an FP8 cache makes E4M3."""


def vllm_graph(graph: Graph) -> Graph:
    """The graph of a rollout that `declare_graph` gives for octavo's decoder, as vLLM runs it."""
    fp8_cache = any(node.kind == "kv_cache" and not node.kept for node in graph.nodes)

    def as_run(kind: Kind, edge: Edge) -> Edge:
        if edge.kernel not in ("", COPY):
            edge = replace(edge, kernel=KERNEL)
        if edge.name == IN_BF16.get(kind):
            return replace(edge, format="bf16")
        if fp8_cache and edge.name in IN_FP8.get(kind, ()):
            return replace(edge, format="e4m3", quant_block=PER_TENSOR, scale="none")
        return edge

    nodes = tuple(replace(node, edges=tuple(as_run(node.kind, edge) for edge in node.edges)) for node in graph.nodes)
    return replace(graph, nodes=nodes)
