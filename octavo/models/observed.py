"""The precision flow as live objects show it: bytes, dtypes, scale shapes, and what a probe comes out as.

Nothing here reads the declaration. What exists only inside a backward pass (dY) or for the length of an operation
(scores) leaves nothing to look at; tests hold that to the declaration instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.kernels.attention import StoredKV, probability_dtype, store_kv
from octavo.kernels.gemm import QuantizedMatrix
from octavo.layers.linear import FP8Linear
from octavo.models.decoder import Decoder
from octavo.numerics.fp8 import PER_ROW, PER_TENSOR, QuantBlock
from octavo.numerics.precision_flow import (
    Edge,
    EdgeKey,
    Format,
    Graph,
    Scale,
    differing,
    edge_text,
    lines,
    shortened,
)
from octavo.numerics.recipe import StorageFormat

FORMATS: dict[torch.dtype, Format] = {
    torch.float8_e4m3fn: "e4m3",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
}
OBSERVED = {
    "projection": ("fprop X", "fprop W", "fprop bias", "dgrad W", "saved X", "master W", "master bias"),
    "norm": ("fprop W", "master W"),
    "embedding": ("fprop W", "master W"),
    "head": ("fprop W", "master W"),
    "kv_cache": ("fprop K", "fprop V"),
    "attention": ("fprop Q", "fprop K^", "fprop V^", "fprop P"),
}
"""Kind of node: its edges that can be observed."""
PROBE_TOKENS = 130
"""More than one block of 128 tokens of WGrad."""


@dataclass(frozen=True, eq=False)
class LiveCache:
    """Keys and values as a role stores them."""

    kv_format: StorageFormat
    """That new ones are written in."""
    k: StoredKV
    """Some of them, [T, Hkv, Dh]."""
    v: StoredKV
    """Likewise."""


def packed_cache(decoder: Decoder) -> LiveCache:
    """What a training forward of this decoder makes of keys and values."""
    probe = torch.ones(1, decoder.config.num_kv_heads, decoder.config.head_dim, dtype=decoder.dtype)
    stored = store_kv(probe, decoder.recipe.kv_cache)
    return LiveCache(decoder.recipe.kv_cache, stored, stored)


def check_observed(declared: Graph, decoder: Decoder, cache: LiveCache) -> None:
    """Hold the live decoder and cache of a role to its declared graph.

    Raises:
        ValueError: names each edge, as declared and as found.
    """
    observed = observe(decoder, cache, backward=declared.role == "train")
    found = lines(differing(_observable(declared), observed, declared.role))
    if found:
        raise ValueError(
            f"precision flow of {declared.role}, declared / found: {shortened(found)}. No step was taken: something "
            f"changed the model after it was built; with nothing of yours between, report it as a bug"
        )


def observe(decoder: Decoder, cache: LiveCache, *, backward: bool) -> dict[EdgeKey, str]:
    """The edges that live objects show, {(module, edge): as `Edge.text` puts it}.

    Args:
        decoder: that the role runs.
        cache: that the role runs it with.
        backward: whether the role trains.
    """
    found: dict[EdgeKey, str] = {}

    def table(name: str, copy: Tensor, master: Tensor) -> None:
        found[name, "fprop W"] = _format(copy)
        if backward:
            found[name, "master W"] = _format(master)

    table("model.embed_tokens", decoder.embed_hp, decoder.embed_tokens)
    for index, block in enumerate(decoder.blocks()):
        layer = f"model.layers.{index}"
        norms = {
            "input_layernorm": block.input_norm,
            "self_attn.q_norm": block.q_norm,
            "self_attn.k_norm": block.k_norm,
            "post_attention_layernorm": block.post_norm,
        }
        for name, norm in norms.items():
            if norm is not None:
                table(f"{layer}.{name}", norm.weight, norm.weight)
        linears = {"self_attn": (block.qkv_proj, block.o_proj), "mlp": (block.gate_up_proj, block.down_proj)}
        for parent, parts in linears.items():
            for linear in parts:
                for name, N in linear.projections.items():
                    texts = _projection(linear, N, decoder.dtype, backward)
                    found |= {(f"{layer}.{parent}.{name}", edge): text for edge, text in texts.items()}
        for edge, stored in (("K", cache.k), ("V", cache.v)):
            found[f"{layer}.self_attn.kv_cache", f"fprop {edge}"] = _stored(stored)
            found[f"{layer}.self_attn.attention", f"fprop {edge}^"] = _format(stored.decode())
        for edge in ("Q", "P"):
            found[f"{layer}.self_attn.attention", f"fprop {edge}"] = FORMATS[probability_dtype(cache.kv_format)]
    table("model.norm", decoder.norm.weight, decoder.norm.weight)
    if decoder.lm_head is None:
        table("lm_head", decoder.embed_hp, decoder.embed_tokens)
    else:
        table("lm_head", decoder.lm_head_hp, decoder.lm_head)
    return found


def _projection(layer: FP8Linear, N: int, dtype: torch.dtype, backward: bool) -> dict[str, str]:
    """Edge: text, of one projection of N rows, from the layer's buffers and a probe."""
    probe = torch.ones(PROBE_TOKENS, layer.in_features, dtype=dtype, device=layer.weight.device)
    probe[1] = 2.0
    texts = {"fprop X": _activation(layer, probe), "fprop W": _weight(layer, "weight_q", N)}
    if layer.bias_hp is not None:
        texts["fprop bias"] = _format(layer.bias_hp)
    if not backward:
        return texts
    texts["dgrad W"] = _weight(layer, "dgrad_q" if "dgrad_q" in layer._buffers else "weight_q", N)
    saved = layer.save_activation(probe)
    if isinstance(saved, QuantizedMatrix):
        sizes = [len(saved.q)], [layer.in_features]
        texts["saved X"] = edge_text(_format(saved.q), _block(saved.scale, sizes), _rounding(saved.scale))
    else:
        texts["saved X"] = _format(saved)
    texts["master W"] = _format(layer.weight)
    if layer.bias is not None:
        texts["master bias"] = _format(layer.bias)
    return texts


def _activation(layer: FP8Linear, probe: Tensor) -> str:
    """X of FProp: the buffer of a frozen scale, else what the probe comes out as."""
    if layer.quantized and layer.recipe.static_activation_scale:
        rounding: Scale = "power_of_two" if layer.recipe.scale_rounding == "power_of_two" else "fp32"
        if layer._buffers.get("activation_scale") is None:
            return "absent"
        return edge_text("e4m3", PER_TENSOR, rounding, layer.recipe.amax_margin)
    operand = layer.activation_operand(probe)
    if operand.scale is None:
        return _format(probe)
    rows = None if operand.scale[0].equal(operand.scale[1]) else 1
    block = rows, _block_size(operand.scale.shape[1], [layer.in_features])
    return edge_text("e4m3", block, _rounding(operand.scale))


def _weight(layer: FP8Linear, name: str, N: int) -> str:
    """W from the buffers that the layer reads it from."""
    q = layer._buffers.get(name if layer.quantized else "weight_hp")
    scale = layer._buffers.get(f"{name}_scale") if layer.quantized else None
    if q is None or scale is None:
        return "absent" if q is None else _format(q)
    # One scale can be a power of two by chance; none must be otherwise where the layer rounds them.
    rounding = _rounding(scale) if layer.recipe.scale_rounding == "power_of_two" else "fp32"
    block = _block(scale, (layer.splits, [layer.in_features]))
    return edge_text(_format(q), _normal(block, (N, layer.in_features)), rounding)


def _stored(kv: StoredKV) -> str:
    if kv.scale is None:
        return _format(kv.values)
    block = PER_ROW if kv.scale.shape == kv.values.shape[:-1] else PER_TENSOR
    return edge_text(_format(kv.values), block, _rounding(kv.scale))


def _format(x: Tensor) -> str:
    return FORMATS.get(x.dtype, str(x.dtype))


def _rounding(scale: Tensor) -> Scale:
    return "power_of_two" if bool((torch.frexp(scale).mantissa == 0.5).all()) else "fp32"


def _block(scale: Tensor, sizes: tuple[Sequence[int], Sequence[int]]) -> QuantBlock:
    """The block shape that gives this shape of scales; blocks restart at each of the sizes."""
    return _block_size(scale.shape[0], sizes[0]), _block_size(scale.shape[1], sizes[1])


def _block_size(count: int, sizes: Sequence[int]) -> int | None:
    """The block of a dimension of which there are `count`; -1 where no block that octavo has gives as many."""
    for block in (None, 1, 128):
        if sum(-(-size // (block or size)) for size in sizes) == count:
            return block
    return -1


def _normal(block: QuantBlock, shape: tuple[int, int]) -> QuantBlock:
    """A block as large as the dimension is the whole dimension: scales of the same shape."""
    rows, columns = (None if size is not None and size >= n else size for size, n in zip(block, shape, strict=True))
    return rows, columns


def _observable(declared: Graph) -> dict[EdgeKey, str]:
    """The declared edges that can be observed, as `observe` puts them."""
    found = {}
    for node in declared.nodes:
        for edge in node.edges:
            if edge.name in OBSERVED.get(node.kind, ()):
                found[node.name, edge.name] = _normal_edge(edge, node.shape).text()
    return found


def _normal_edge(edge: Edge, shape: tuple[int, ...]) -> Edge:
    if edge.quant_block is None or len(shape) != 2:
        return edge
    size = shape if edge.tensor == "W" else (PROBE_TOKENS, shape[1])
    return replace(edge, quant_block=_normal(edge.quant_block, size))
