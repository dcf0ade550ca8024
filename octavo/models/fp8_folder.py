"""Block-FP8 weights in Hugging Face folders (`quant_method: fp8`), as transformers and vLLM read them.

    NAME.weight            [N, K] e4m3
    NAME.weight_scale_inv  [ceil(N / 128), ceil(K / 128)] fp32, which multiplies

These are the bytes and scales that the engine multiplies, so what is exported is what the rollout ran. Embedding, head,
norms, biases and what `keep_bf16` names stay BF16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.layers.linear import FP8Linear
from octavo.models.config import FP8_FORMAT
from octavo.models.decoder import Decoder
from octavo.numerics.fp8 import BLOCK_128X128

SCALE = "weight_scale_inv"
BLOCK = 128


@dataclass(frozen=True, eq=False)
class StoredWeight:
    """One projection's FP8 weight."""

    q: Tensor
    """[N, K] e4m3."""
    scale: Tensor
    """[ceil(N / 128), ceil(K / 128)] fp32."""

    def values(self) -> Tensor:
        """[N, K] fp32."""
        rows, columns = self.q.shape
        wide = self.scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
        return self.q.float() * wide


def stored_weights(decoder: Decoder) -> dict[str, StoredWeight]:
    """{name of a projection: views of its bytes and scales} of every quantised one.

    Raises:
        ValueError: the recipe has other blocks, or quantises nothing.
    """
    recipe = decoder.recipe
    if recipe.fprop.right != BLOCK_128X128:
        raise ValueError(
            f"FP8 folders hold weights in blocks of 128x128, and recipe {recipe.name!r} has none. Write BF16, or run "
            f"with block128 or w8a16"
        )
    found = {}
    for name, layer, rows, blocks in _projections(decoder):
        if layer.quantized:
            q, scale = layer.get_buffer("weight_q"), layer.get_buffer("weight_q_scale")
            found[name] = StoredWeight(q[rows], scale[blocks])
    return found


def quantization_config(decoder: Decoder) -> dict[str, Any]:
    """What config.json says of the folder."""
    kept = [name for name, layer, _, _ in _projections(decoder) if not layer.quantized]
    return FP8_FORMAT | {"modules_to_not_convert": ["lm_head", *kept]}


def checked(path: str, name: str, q: Tensor | None, scale: Tensor | None, shape: torch.Size) -> StoredWeight:
    """A weight as read from a folder, for a projection of this shape.

    Raises:
        ValueError: half of it is missing, a shape or format is another, or a value is not finite.
    """
    if q is None or scale is None:
        missing = f"{name}.weight in E4M3" if q is None else f"{name}.{SCALE}"
        raise ValueError(f"{path} is incomplete: {missing} is missing")
    wanted = torch.Size(math.ceil(size / BLOCK) for size in shape)
    if q.shape != shape or scale.shape != wanted or not scale.is_floating_point():
        raise ValueError(
            f"{path}: {name} has an FP8 weight {tuple(q.shape)} with {scale.dtype} scales {tuple(scale.shape)}; the "
            f"config wants {tuple(shape)} with scales {tuple(wanted)}"
        )
    weight = StoredWeight(q, scale.float())
    if not (torch.isfinite(q.float()).all() and torch.isfinite(weight.scale).all() and (weight.scale > 0.0).all()):
        raise ValueError(
            f"{path}: {name} has FP8 values that are not finite, or scales that are not above 0; the file is damaged"
        )
    return weight


@torch.no_grad()
def put_bytes_(decoder: Decoder, weights: Mapping[str, StoredWeight]) -> None:
    """Write stored bytes and scales where the decoder's recipe has the same blocks; elsewhere the masters' stay.

    Another quantiser's largest code need not be 448, so its bytes are not those of its values quantised again.
    """
    if decoder.recipe.fprop.right != BLOCK_128X128:
        return
    for name, layer, rows, blocks in _projections(decoder):
        if layer.quantized and name in weights:
            layer.get_buffer("weight_q")[rows] = weights[name].q.to(layer.weight.device)
            layer.get_buffer("weight_q_scale")[blocks] = weights[name].scale.to(layer.weight.device)


def obstacles(decoder: Decoder) -> dict[str, list[str]]:
    """For which projections another reader of an FP8 folder fails; {"vLLM": ["NAME: width", ...], "transformers": ...}.

    vLLM (0.24, without tensor parallelism) runs q, k, v and gate, up as one weight and refuses a part but the last that
    does not end at a block's edge. transformers (5.24, where it decodes to BF16, as on a CPU) takes all blocks of a
    side as equally wide, and so reads another width than a multiple of 128 wrongly, or refuses it.
    """
    vllm, transformers = [], []
    for layer, names in _fused(decoder) if decoder.recipe.quantizes else ():
        parts = list(zip(names, layer.splits, strict=True)) if layer.quantized else []
        vllm += [f"{name}: {width}" for name, width in parts[:-1] if width % BLOCK]
        transformers += [
            f"{name}: {width} x {layer.in_features}"
            for name, width in parts
            if any(size > BLOCK and size % BLOCK for size in (width, layer.in_features))
        ]
    return {"vLLM": vllm, "transformers": transformers}


def _fused(decoder: Decoder) -> Iterator[tuple[FP8Linear, list[str]]]:
    """Every linear layer and the names of its projections on disk."""
    for index, block in enumerate(decoder.blocks()):
        for parent, layers in (
            ("self_attn", (block.qkv_proj, block.o_proj)),
            ("mlp", (block.gate_up_proj, block.down_proj)),
        ):
            for layer in layers:
                yield layer, [f"model.layers.{index}.{parent}.{name}" for name in layer.projections]


def _projections(decoder: Decoder) -> Iterator[tuple[str, FP8Linear, slice, slice]]:
    """Name on disk, layer, and the projection's rows of the weight and of its blocks' scales."""
    for layer, names in _fused(decoder):
        row = block = 0
        for name, width in zip(names, layer.splits, strict=True):
            blocks = -(-width // BLOCK)
            yield name, layer, slice(row, row + width), slice(block, block + blocks)
            row, block = row + width, block + blocks
