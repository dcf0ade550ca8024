"""The numbers that a declared graph says, worked out from its edges, the masters and the tokens; no layer is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tiny_models import masters_by_name
from torch import Tensor

from octavo.kernels.attention import attend
from octavo.kernels.gemm import gemm
from octavo.kernels.heads import rotate
from octavo.kernels.norm import rms_norm
from octavo.kernels.operands import grid_operand
from octavo.kernels.swiglu import swiglu
from octavo.models.decoder import Decoder
from octavo.numerics.exact import block_edges, block_matmul
from octavo.numerics.fp8 import block_amax, dequantize, expand_scale, quantize_with_scale, scale_from_amax
from octavo.numerics.precision_flow import Edge, Graph, Node

DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn}


def quantized(edge: Edge, x: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes [M, K] and block scales, as the edge says."""
    assert edge.format == "e4m3" and edge.quant_block is not None, edge
    amax = block_amax(x, edge.quant_block) * (edge.margin or 1.0)
    scale = scale_from_amax(amax, {"fp32": "none", "power_of_two": "power_of_two"}[edge.scale])
    return quantize_with_scale(x, scale, edge.quant_block), scale


def decoded(edge: Edge, x: Tensor) -> Tensor:
    """x [M, K] after the edge: FP32 values of its codes, or x in its format."""
    if edge.quant_block is None:
        return x.to(DTYPE[edge.format])
    return dequantize(*quantized(edge, x), edge.quant_block)


def linear(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """FProp of a projection."""
    X, W, Y = (node.edge(f"fprop {tensor}") for tensor in ("X", "W", "Y"))
    assert X.kernel == W.kernel
    if X.kernel == "E4M3 sums":
        edges = block_edges(x.shape[1], X.quant_block[1])
        (q, q_scale), (w, w_scale) = quantized(X, x), quantized(W, weight)
        blocks = len(edges) - 1
        scales = (
            expand_scale(scale, (len(codes), blocks), (edge.quant_block[0], 1))
            for codes, scale, edge in ((q, q_scale, X), (w, w_scale, W))
        )
        y = block_matmul(q.double(), w.double(), *scales, edges)
    else:
        assert X.kernel == "ordered sums" and X.quant_block is None
        y = gemm(grid_operand(decoded(X, x)), grid_operand(decoded(W, weight).to(DTYPE[X.format])))
    if bias is not None:
        y = y + bias.to(DTYPE[node.edge("fprop bias").format])
    return y.float().to(DTYPE[Y.format])


def forward(graph: Graph, decoder: Decoder, tokens: Tensor, positions: Tensor, cu_seqlens: Tensor) -> dict[str, Tensor]:
    """{module: what comes out of it}: [T, ...]; rotary and KV cache give two tensors side by side."""
    masters, Dh, eps = masters_by_name(decoder), decoder.config.head_dim, decoder.config.norm_eps
    out: dict[str, Tensor] = {}

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, Dh)) if x.shape[-1] != Dh or x.ndim == 2 else x

    def compute(node: Node) -> Tensor:
        edges = {edge.name: edge for edge in node.edges}
        weight, bias = (masters.get(f"{node.name}.{kind}") for kind in ("weight", "bias"))
        if node.kind == "embedding":
            return decoded(edges["fprop W"], weight)[tokens]
        if node.kind == "head":
            source = edges["fprop W"].sources
            weight = masters[f"{source[0]}.weight"] if source else weight
            hidden = out[edges["fprop X"].sources[0]]
            return gemm(grid_operand(hidden), grid_operand(decoded(edges["fprop W"], weight))).float()
        read = [
            out[edge.sources[0]]
            for edge in node.edges
            if edge.phase == "fprop" and edge.sources[:1] not in ((), (node.name,))
        ]
        if node.kind == "norm":
            x = heads(read[0]) if len(weight) == Dh else read[0]
            return rms_norm(x, decoded(edges["fprop W"], weight), eps)
        if node.kind == "projection":
            return linear(node, read[0].flatten(1), weight, bias)
        if node.kind == "rotary":
            q, k = (rotate(heads(x), decoder.cos[positions], decoder.sin[positions]) for x in read)
            return torch.cat([q, k], dim=1)
        if node.kind == "kv_cache":
            Hkv = decoder.config.num_kv_heads
            pair = ((edges["fprop K"], read[0][:, -Hkv:]), (edges["fprop V"], heads(read[1])))
            return torch.cat([decoded(edge, x.flatten(0, 1)).view(x.shape) for edge, x in pair], dim=1)
        if node.kind == "attention":
            q = read[0][:, : decoder.config.num_heads]
            k, v = (
                x.to(DTYPE[edges[f"fprop {n}^"].format]) for n, x in zip("KV", read[1].chunk(2, dim=1), strict=True)
            )
            pieces = []
            for start, stop in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
                each = (x[None, start:stop] for x in (q, k, v))
                rows = torch.arange(stop - start)[None]
                pieces.append(attend(*each, rows, Dh**-0.5, DTYPE[edges["fprop P"].format])[0])
            return torch.cat(pieces).flatten(1)
        if node.kind == "activation":
            return swiglu(torch.cat(read, dim=1))
        assert node.kind == "residual", node
        return read[0] + read[1]

    for node in graph.nodes:
        out[node.name] = compute(node)
        for edge in node.edges:
            if edge.phase == "fprop" and edge.sources == (node.name,) and edge.tensor in ("Y", "logits"):
                assert out[node.name].dtype == DTYPE[edge.format], (node.name, edge, out[node.name].dtype)
            if edge.phase == "fprop" and edge.sources and edge.tensor in ("X", "h", "K", "V", "gate", "up"):
                came = out[edge.sources[0]].dtype
                assert edge.format == "e4m3" or came == DTYPE[edge.format], (node.name, edge, came)
    return out


def backward(
    nodes: Sequence[Node], masters: dict[str, Tensor], x: Tensor, grad_y: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dX, dW and d bias of fused projections, as their DGrad and WGrad edges say."""
    widths = [node.shape[0] for node in nodes]

    def each(name: str, tensors: Sequence[Tensor], dim: int) -> Tensor:
        pairs = zip(nodes, tensors, strict=True)
        return torch.cat([decoded(node.edge(name), tensor).float() for node, tensor in pairs], dim=dim)

    pad: Callable[[Tensor], Tensor] = lambda t: torch.nn.functional.pad(t, (0, 0, 0, -len(t) % 128))  # noqa: E731
    padded = pad if nodes[0].edge("wgrad X").quant_block is not None else (lambda t: t)
    weights = [masters[f"{node.name}.weight"] for node in nodes]
    grad_x = each("dgrad dY", grad_y.split(widths, dim=1), 1) @ each("dgrad W", weights, 0)
    left = each("wgrad dY", padded(grad_y).split(widths, dim=1), 1)
    right = decoded(nodes[0].edge("wgrad X"), padded(x)).float()
    return grad_x.to(DTYPE[nodes[0].edge("dgrad dX").format]), left.T @ right, grad_y.float().sum(dim=0)
