"""Whether the kernels of decoding and of training give the same bits, for every linear layer of a model on this GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from octavo.bench.gemm import linears_of
from octavo.check.rows import Row
from octavo.kernels import agreement
from octavo.models.config import DecoderConfig
from octavo.numerics.fp8 import BLOCK_1X128, BLOCK_128X128, QuantBlock
from octavo.numerics.recipe import Recipe


def back_end_rows(shape: DecoderConfig, recipe: Recipe, device: torch.device) -> Iterator[Row]:
    """A row for each linear of a decoder layer, and one more where some layers keep it in BF16.

    Equality is proved anew here, as a run proves it. The fp32 recipe runs on the reference, which needs no proof.
    """
    if recipe.high_precision == "fp32":
        return
    for name, (in_features, projections) in linears_of(shape).items():
        biased = shape.qkv_bias and name == "qkv_proj"
        for quantized in sorted(_quantized(shape, recipe, name, projections), reverse=True):
            blocks = (recipe.fprop.left, recipe.fprop.right) if quantized else (None, None)
            yield _linear_row(name, in_features, list(projections.values()), blocks, biased, device)


def _quantized(shape: DecoderConfig, recipe: Recipe, name: str, projections: Mapping[str, int]) -> set[bool]:
    """Whether a linear is FP8: what is found over all layers."""
    parent = "self_attn" if name in ("qkv_proj", "o_proj") else "mlp"
    paths = ([f"model.layers.{index}.{parent}.{part}" for part in projections] for index in range(shape.num_layers))
    return {recipe.quantizes and not recipe.keeps_fused(path) for path in paths}


def _linear_row(
    name: str,
    in_features: int,
    widths: Sequence[int],
    blocks: tuple[QuantBlock | None, QuantBlock | None],
    biased: bool,
    device: torch.device,
) -> Row:
    """The proof for X and W quantised by these blocks, and for the sizes that kernels see: filled up."""
    left, right = blocks
    straddles = right == BLOCK_128X128 and any(width % 128 for width in widths[:-1])
    N = sum(_filled(width, 128) if straddles else width for width in widths)
    if left is None:
        K, library, alone = _filled(in_features, 8), "cuBLAS", "triton"
        equal = (agreement.bf16_agrees if right is None else agreement.w8a16_agrees)(N, K, device)
    elif left == BLOCK_1X128:
        K, library, alone = _filled(in_features, 128), "cuBLASLt", "triton"
        equal = agreement.blocks_agree(N, K, device, biased)
    else:
        K, library, alone = _filled(in_features, 16), "cuBLASLt", "cuBLASLt"
        equal = agreement.rows_agree(N, K, device, biased)
    return _row(f"{name} {N} x {K}", equal, library, alone)


def _filled(width: int, multiple: int) -> int:
    """As operands are filled up for kernels."""
    return -(-width // multiple) * multiple


def _row(name: str, equal: bool, library: str, alone: str) -> Row:
    if equal:
        detail = f"few rows by triton and many by {library} give the same bits"
        return Row(group="back ends", name=name, status="OK", detail=detail)
    return Row(
        group="back ends",
        name=name,
        status="WARN",
        detail=f"triton and {library} differ, so {alone} multiplies every batch: exact, and slower",
        next_step="report it with the versions above if this is a Hopper GPU",
    )
