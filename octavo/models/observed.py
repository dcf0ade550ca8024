"""The precision flow as live objects show it: the numbers that the products would multiply, and what they lie in.

A weight is compared with what the declared edge makes of its master, activations and gradients with what it makes of a
probe, bit for bit: another block, another scale, stale bytes are seen whatever the object calls itself. What exists
only inside a function (scores, the output of a norm) leaves nothing to look at; tests hold that to the declaration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from octavo.kernels.attention import StoredKV, probability_dtype, store_kv
from octavo.kernels.operands import Operand, grid_operand, values_of
from octavo.layers.linear import SCALE_STATE, FP8Linear
from octavo.models.decoder import Decoder
from octavo.numerics.flow_edges import E4M3_SUMS, GRID_SUMS
from octavo.numerics.fp8 import (
    BLOCK_1X128,
    BLOCK_128X1,
    BLOCK_128X128,
    PER_COLUMN,
    PER_ROW,
    PER_TENSOR,
    block_amax,
    dequantize,
    quantize_with_scale,
    scale_from_amax,
)
from octavo.numerics.precision_flow import Difference, Edge, Format, Graph, Scale, lines, shortened, shown
from octavo.numerics.recipe import StorageFormat

DTYPES: dict[Format, torch.dtype] = {
    "e4m3": torch.float8_e4m3fn,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
BLOCKS = (PER_ROW, PER_COLUMN, PER_TENSOR, BLOCK_1X128, BLOCK_128X1, BLOCK_128X128)
SCALES: tuple[Scale, ...] = ("fp32", "power_of_two")
OBSERVED = {
    "projection": ("fprop X", "fprop W", "fprop bias", "fprop Y", "dgrad dY", "dgrad W", "wgrad dY", "wgrad X")
    + ("saved X", "master W", "master bias"),
    "norm": ("fprop W", "master W"),
    "embedding": ("fprop W", "master W"),
    "head": ("fprop W", "master W"),
    "rotary": ("fprop cos sin",),
    "kv_cache": ("fprop K", "fprop V"),
    "attention": ("fprop Q", "fprop K^", "fprop V^", "fprop P"),
}
"""Kind of node: its edges that can be observed."""
PROBE_TOKENS = 130
"""More than one block of 128 tokens of WGrad."""


@dataclass(frozen=True, eq=False)
class LiveCache:
    """What a role makes of keys and values."""

    kv_format: StorageFormat
    """That it writes."""
    k: StoredKV
    """`kv_probe` as it stored it."""
    v: StoredKV
    """Likewise."""


@dataclass(frozen=True, eq=False)
class _Found:
    """A tensor as a live object has it."""

    dtype: torch.dtype | None
    """That it lies in; None for an operand made for one product."""
    values: Tensor | None = None
    """The numbers that are multiplied, a matrix; None where only the dtype is compared."""
    source: Tensor | None = None
    """The master or probe that they were made of."""
    kernel: str | None = None
    """The sums that an operand is ready for; None where it does not tell."""


_Observation = tuple[str, str, _Found]
"""Module, edge, and what was found."""


@torch.no_grad()
def check_observed(declared: Graph, decoder: Decoder, cache: LiveCache) -> None:
    """Hold the live decoder and cache of a role to its declared graph.

    Raises:
        ValueError: names each edge, as declared and as found.
    """
    edges = {(node.name, edge.name): edge for node in declared.nodes for edge in node.edges}
    missing = {(node.name, name) for node in declared.nodes for name in OBSERVED.get(node.kind, ())} & edges.keys()
    differences = []
    for node, name, found in _observe(decoder, cache, backward=declared.role == "train"):
        missing.discard((node, name))
        texts = _texts(edges.get((node, name)), found)
        if texts is not None:
            differences.append(Difference(role=declared.role, node=node, edge=name, left=texts[0], right=texts[1]))
    for node, name in (key for key in edges if key in missing):
        text = edges[node, name].text()
        differences.append(Difference(role=declared.role, node=node, edge=name, left=text, right="absent"))
    if differences:
        raise ValueError(
            f"precision flow of {declared.role}, declared / found: {shortened(lines(differences))}. No step was taken: "
            f"something changed the model after it was built; with nothing of yours between, report it as a bug"
        )


def packed_cache(decoder: Decoder) -> LiveCache:
    """What a training forward of this decoder makes of keys and values."""
    stored = store_kv(kv_probe(decoder), decoder.recipe.kv_cache)
    return LiveCache(decoder.recipe.kv_cache, stored, stored)


def kv_probe(decoder: Decoder) -> Tensor:
    """Keys or values of two tokens, [2, Hkv, Dh]."""
    Hkv, Dh = decoder.config.num_kv_heads, decoder.config.head_dim
    return _probe(2 * Hkv, Dh, decoder.embed_hp).view(2, Hkv, Dh)


def _observe(decoder: Decoder, cache: LiveCache, *, backward: bool) -> Iterator[_Observation]:
    """Every tensor that the live objects show.

    Args:
        decoder: that the role runs.
        cache: what the role makes of keys and values.
        backward: whether the role trains.
    """

    def weight(name: str, copy: Tensor, master: Tensor) -> Iterator[_Observation]:
        yield name, "fprop W", _Found(copy.dtype, copy, master)
        if backward:
            yield name, "master W", _Found(master.dtype)

    yield from weight("model.embed_tokens", decoder.embed_hp, decoder.embed_tokens)
    kv = kv_probe(decoder).flatten(0, 1)
    for index, block in enumerate(decoder.blocks()):
        layer = f"model.layers.{index}"
        attention = f"{layer}.self_attn"
        norms = {
            f"{layer}.input_layernorm": block.input_norm,
            f"{attention}.q_norm": block.q_norm,
            f"{attention}.k_norm": block.k_norm,
            f"{layer}.post_attention_layernorm": block.post_norm,
        }
        for name, norm in norms.items():
            if norm is not None:
                yield from weight(name, norm.weight, norm.weight)
        for linear in (block.qkv_proj, block.o_proj):
            yield from _projections(attention, linear, decoder.embed_hp, backward)
        for linear in (block.gate_up_proj, block.down_proj):
            yield from _projections(f"{layer}.mlp", linear, decoder.embed_hp, backward)
        coarser = min(decoder.cos, decoder.sin, key=lambda table: table.element_size())
        yield f"{attention}.rotary", "fprop cos sin", _Found(coarser.dtype)
        for tensor, stored in (("K", cache.k), ("V", cache.v)):
            scale = 1.0 if stored.scale is None else stored.scale[..., None]
            values = (stored.values.float() * scale).flatten(0, 1)
            yield f"{attention}.kv_cache", f"fprop {tensor}", _Found(stored.values.dtype, values, kv)
            yield f"{attention}.attention", f"fprop {tensor}^", _Found(stored.decode().dtype)
        for tensor in ("Q", "P"):
            yield f"{attention}.attention", f"fprop {tensor}", _Found(probability_dtype(cache.kv_format))
    yield from weight("model.norm", decoder.norm.weight, decoder.norm.weight)
    if decoder.lm_head is None:
        yield from weight("lm_head", decoder.embed_hp, decoder.embed_tokens)
    else:
        yield from weight("lm_head", decoder.lm_head_hp, decoder.lm_head)


def _projections(parent: str, layer: object, like: Tensor, backward: bool) -> Iterator[_Observation]:
    """What the products of a layer multiply, and its masters. The layer is as it was, afterwards."""
    if not isinstance(layer, FP8Linear) or (stored := layer.stored_weight()) is None:
        return
    scales = {name: buffer.clone() for name, buffer in layer.named_buffers() if name in SCALE_STATE}
    if scales:  # as in the very first batch, whose amax sets the scale
        layer.activation_scale.fill_(torch.nan)
        layer.activation_amax.zero_()
    x, grad_y = (_probe(PROBE_TOKENS, width, like) for width in (layer.in_features, sum(layer.splits)))
    activation, weight, y = layer.activation_operand(x), layer.weight_operand(), layer.fprop(x[:1])
    stop = 0
    for projection, N in layer.projections.items():
        name, rows = f"{parent}.{projection}", slice(stop, stop := stop + N)
        master = layer.weight[rows]
        yield name, "fprop X", _Found(None, _values(activation, activation), x, _kernel(activation))
        yield name, "fprop W", _Found(stored.dtype, _values(weight, activation)[rows], master, _kernel(activation))
        yield name, "fprop Y", _Found(y.dtype)
        if layer.bias is not None and layer.bias_hp is not None:
            yield name, "fprop bias", _Found(layer.bias_hp.dtype, layer.bias_hp[rows], layer.bias[rows])
        if not backward or layer.recipe.dgrad is None or layer.recipe.wgrad is None:
            continue
        saved = layer.save_activation(x)
        saved_dtype = saved.dtype if isinstance(saved, Tensor) else saved.q.dtype
        saved_values = saved if isinstance(saved, Tensor) else saved.dequantize()
        dy = grad_y[:, rows]
        yield name, "dgrad dY", _Found(None, values_of(layer.gradient(grad_y, layer.recipe.dgrad))[:, rows], dy)
        yield name, "dgrad W", _Found(stored.dtype, layer.backward_weight()[rows], master)
        yield name, "wgrad dY", _Found(None, values_of(layer.gradient(grad_y, layer.recipe.wgrad))[:, rows], dy)
        yield name, "wgrad X", _Found(None, values_of(layer.saved(saved))[:PROBE_TOKENS], x)
        yield name, "saved X", _Found(saved_dtype, saved_values[:PROBE_TOKENS], x)
        yield name, "master W", _Found(layer.weight.dtype)
        if layer.bias is not None:
            yield name, "master bias", _Found(layer.bias.dtype)
    for buffer, kept in scales.items():
        getattr(layer, buffer).copy_(kept)
    layer.forget_prepared()


def _probe(rows: int, columns: int, like: Tensor) -> Tensor:
    """Random numbers [rows, columns] from 2^-16 to 2^6: more than E4M3 has room for, so every scale leaves its mark."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.arange(rows)[:, None] % 5 - torch.randint(16, (rows, columns), generator=generator)
    return (torch.randn(rows, columns, generator=generator) * 2.0**exponents).to(like.device, like.dtype)


def _values(operand: Operand, activation: Operand) -> Tensor:
    """The numbers that an operand stands for; an FP8 weight is rounded to BF16 before it meets a BF16 activation."""
    values = operand.decode()
    return values.bfloat16() if operand.scale is not None and activation.scale is None else values


def _kernel(activation: Operand) -> str:
    return GRID_SUMS if activation.scale is None else E4M3_SUMS


def _texts(declared: Edge | None, found: _Found) -> tuple[str, str] | None:
    """The edge as declared and as found; None where they agree."""
    edge = declared or Edge(phase="fprop", tensor="", sources=(), format="fp32", kernel="")
    edge = replace(edge, kernel=found.kernel or edge.kernel)
    plain = [replace(edge, format=format, quant_block=None, scale="none", margin=None) for format in DTYPES]
    quantised = [
        replace(edge, format="e4m3", quant_block=block, scale=scale, margin=None)
        for block, scale in product(sorted(BLOCKS, key=lambda block: block != edge.quant_block), SCALES)
    ]
    match = next((other for other in (edge, *plain, *quantised) if _made_by(other, found)), None)
    if declared is not None and match == declared:
        return None
    if match is not None:
        return shown(declared, match), shown(match, declared)
    formats = [format for format, dtype in DTYPES.items() if dtype == found.dtype]
    text = "other numbers" if found.dtype is None else next(iter(formats), str(found.dtype))
    return shown(declared, None), f"{text} of other numbers" if formats == [edge.format] else text


def _made_by(edge: Edge, found: _Found) -> bool:
    """Whether the declared way gives what was found, from the same source, to the bit."""
    if found.dtype is not None and found.dtype != DTYPES[edge.format]:
        return False
    if found.values is None or found.source is None:
        return edge.quant_block is None
    if edge.quant_block is None:
        values = found.source.to(DTYPES[edge.format])
    elif found.source.ndim != 2:
        return False
    else:
        amax = block_amax(found.source, edge.quant_block) * (1.0 if edge.margin is None else edge.margin)
        scale = scale_from_amax(amax, "power_of_two" if edge.scale == "power_of_two" else "none")
        values = dequantize(quantize_with_scale(found.source, scale, edge.quant_block), scale, edge.quant_block)
    if found.kernel == GRID_SUMS:
        values = grid_operand(values.bfloat16() if edge.format == "e4m3" else values).decode()
    return torch.equal(values.to(found.values.dtype), found.values)
