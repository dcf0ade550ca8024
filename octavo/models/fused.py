"""The decoder's layers in fewer kernels, and to the bit: what makes X casts it, too.

    h, q = cast(norm(h + delta))       one kernel, before qkv_proj and gate_up_proj
    q = cast(swiglu(gate_up))          one kernel, before down_proj
    q = cast(attention)                one kernel, before o_proj, where it decodes over FP8 keys of heads of 128

Where a layer reads X as it is, or under a scale that is frozen or of all tokens, its norm and SwiGLU stay alone. With a
gradient X is cast for WGrad, too, and that is so but where one cast serves both (`models.fused_functions`).
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from octavo.kernels.norm import add_rms_norm_cast
from octavo.kernels.operands import BOTH, FILLED, ROW_MULTIPLE, can_quantize_both
from octavo.kernels.swiglu import swiglu, swiglu_cast
from octavo.layers.attention import AttentionContext
from octavo.layers.linear import FP8Linear
from octavo.models.fused_functions import NormLinear, NormMLP, cast_operand
from octavo.numerics.fp8 import BLOCK_1X128, PER_ROW, QuantBlock
from octavo.numerics.recipe import Recipe

if TYPE_CHECKING:
    from octavo.models.decoder import Block, Decoder, Norm

PADDING = {BLOCK_1X128: FILLED, PER_ROW: (1, ROW_MULTIPLE)}
"""Blocks of X that its maker can cast to, and how far they are filled up."""


def run_layers(decoder: Decoder, h: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext) -> Tensor:
    """All layers: embeddings [T, D] bf16 -> what the last norm reads; cos and sin [T, Dh / 2] of each position."""
    if not (decoder.recompute_layers and torch.is_grad_enabled()):
        return _run(decoder.blocks(), h, cos, sin, context, decoder.num_saturated)
    for block in decoder.blocks():
        h = _recomputed(block, h, cos, sin, context, decoder.num_saturated)
    return h


def _run(
    blocks: Iterable[Block], h: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext, num_saturated: Tensor
) -> Tensor:
    delta = None
    for block in blocks:
        h, qkv = _projected(block.qkv_proj, block.input_norm, h, delta)
        delta = _attended(block, qkv, cos, sin, context, num_saturated)
        gate_up, down, norm = block.gate_up_proj, block.down_proj, block.post_norm
        if torch.is_grad_enabled() and _block_of(gate_up, h) and _block_of(down, h):
            weights = norm.weight, gate_up.weight, down.weight
            h, delta = NormMLP.apply(h, delta, *weights, norm.norm_eps, gate_up, down)
        else:
            h, halves = _projected(gate_up, norm, h, delta)
            delta = _down(down, halves)
    return h if delta is None else h + delta


def _recomputed(
    block: Block, h: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext, num_saturated: Tensor
) -> Tensor:
    def run(h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # the count is no input: it changes before the backward
        return _run([block], h, cos, sin, context, num_saturated)

    return cast(
        Tensor,
        checkpoint(
            run,
            h,
            cos,
            sin,
            use_reentrant=False,
            preserve_rng_state=False,  # a forward draws nothing
            context_fn=lambda: (nullcontext(), block.recomputing()),
        ),
    )


def _projected(layer: FP8Linear, norm: Norm, h: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
    """h + delta [T, D], and the layer of its norm [T, N]."""
    block = _block_of(layer, h)
    if block is None:
        h = h if delta is None else h + delta
        return h, layer(norm(h))
    if torch.is_grad_enabled():
        parameters = norm.weight, layer.weight, layer.bias
        return cast("tuple[Tensor, Tensor]", NormLinear.apply(h, delta, *parameters, norm.norm_eps, layer))
    rounding = layer.recipe.scale_rounding
    made = add_rms_norm_cast(
        h, delta, norm.weight, norm.norm_eps, quant_block=block, rounding=rounding, pad_to=PADDING[block]
    )
    return made.h, layer.multiply(cast_operand(made.q, made.scale, [layer.in_features], block))


def _attended(
    block: Block, qkv: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext, num_saturated: Tensor
) -> Tensor:
    """The projection of attention's output, cast by attention itself where that is possible."""
    layer = block.o_proj
    if not torch.is_grad_enabled() and _block_of(layer, qkv) == BLOCK_1X128:
        heads, rounding = block.heads(qkv, cos, sin, num_saturated), layer.recipe.scale_rounding
        made = context.attend_cast(block.index, *heads, block.head_dim**-0.5, rounding)
        if made is not None:
            return layer.multiply(cast_operand(*made, [layer.in_features]))
    return layer(block.attend(qkv, cos, sin, context, num_saturated))


def _down(layer: FP8Linear, gate_up: Tensor) -> Tensor:
    """The layer of SwiGLU [T, 2F] -> [T, D]."""
    block = None if torch.is_grad_enabled() else _block_of(layer, gate_up)
    if block is None:
        return layer(swiglu(gate_up))
    made = swiglu_cast(gate_up, quant_block=block, rounding=layer.recipe.scale_rounding, pad_to=PADDING[block])
    return layer.multiply(cast_operand(made.q, made.scale, [layer.in_features], block))


def _block_of(layer: FP8Linear, tokens: Tensor) -> QuantBlock | None:
    """The blocks of X that go with its maker for this layer and as many tokens; None where X is made as it is."""
    recipe = layer.recipe
    if not (layer.quantized and layer.uses_kernels) or recipe.static_activation_scale:
        return None
    left = recipe.fprop.left
    if not torch.is_grad_enabled():
        return left if left in PADDING else None
    if left is None or not (layer.weight.requires_grad and saves_both(recipe)):
        return None
    widths = [layer.in_features], layer.splits
    fits = left == BLOCK_1X128 or all(can_quantize_both(tokens, splits, left, left[::-1]) for splits in widths)
    return left if fits else None


def saves_both(recipe: Recipe) -> bool:
    """Whether X comes in the blocks of FProp and, saved for it, in those of WGrad from one cast; and dY so, too."""
    if recipe.wgrad is None or recipe.dgrad is None or recipe.static_activation_scale:
        return False
    blocks = (recipe.fprop.left, recipe.wgrad.right), (recipe.dgrad.left, recipe.wgrad.left)
    return blocks[0] == blocks[1] and blocks[0] in BOTH and recipe.saved_activations == "fp8"
