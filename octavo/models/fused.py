"""The decoder's layers without a gradient, in fewer kernels and to the bit: what makes X casts it, too.

    h, q = cast(norm(h + delta))       one kernel, before qkv_proj and gate_up_proj
    q = cast(swiglu(gate_up))          one kernel, before down_proj

Where a layer reads X as it is, or under a scale that is frozen or of all tokens, its norm and SwiGLU stay alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from octavo.kernels.norm import add_rms_norm_cast
from octavo.kernels.operands import FILLED, K_BLOCK, ROW_MULTIPLE, Operand
from octavo.kernels.swiglu import swiglu, swiglu_cast
from octavo.layers.attention import AttentionContext
from octavo.layers.linear import FP8Linear
from octavo.numerics.exact import block_edges
from octavo.numerics.fp8 import BLOCK_1X128, PER_ROW, QuantBlock

if TYPE_CHECKING:
    from octavo.models.decoder import Decoder, Norm

PADDING = {BLOCK_1X128: FILLED, PER_ROW: (1, ROW_MULTIPLE)}
"""Blocks of X that its maker can cast to, and how far they are filled up."""


def run_layers(decoder: Decoder, h: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext) -> Tensor:
    """All layers: embeddings [T, D] bf16 -> what the last norm reads; cos and sin [T, Dh / 2] of each position."""
    delta = None
    for block in decoder.blocks():
        h, qkv = _projected(block.qkv_proj, block.input_norm, h, delta)
        delta = block.o_proj(block.attend(qkv, cos, sin, context, decoder.num_saturated))
        h, gate_up = _projected(block.gate_up_proj, block.post_norm, h, delta)
        delta = _down(block.down_proj, gate_up)
    return h if delta is None else h + delta


def _projected(layer: FP8Linear, norm: Norm, h: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """h + delta [T, D], and the layer of its norm [T, N]."""
    block = _block_of(layer)
    if block is None:
        h = h if delta is None else h + delta
        return h, layer(norm(h))
    rounding = layer.recipe.scale_rounding
    made = add_rms_norm_cast(
        h, delta, norm.weight, norm.norm_eps, quant_block=block, rounding=rounding, pad_to=PADDING[block]
    )
    return made.h, layer.multiply(_operand(made.q, made.scale, layer, block))


def _down(layer: FP8Linear, gate_up: Tensor) -> Tensor:
    """The layer of SwiGLU [T, 2F] -> [T, D]."""
    block = _block_of(layer)
    if block is None:
        return layer(swiglu(gate_up))
    made = swiglu_cast(gate_up, quant_block=block, rounding=layer.recipe.scale_rounding, pad_to=PADDING[block])
    return layer.multiply(_operand(made.q, made.scale, layer, block))


def _block_of(layer: FP8Linear) -> QuantBlock | None:
    """The blocks of X that its maker casts for this layer; None where it makes X as it is."""
    dynamic = layer.quantized and layer.uses_kernels and not layer.recipe.static_activation_scale
    return layer.recipe.fprop.left if dynamic and layer.recipe.fprop.left in PADDING else None


def _operand(q: Tensor, scale: Tensor, layer: FP8Linear, block: QuantBlock) -> Operand:
    by_blocks = block == BLOCK_1X128
    return Operand(q, scale, block_edges(layer.in_features, K_BLOCK if by_blocks else None), by_blocks)
