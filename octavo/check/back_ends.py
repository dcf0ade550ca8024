"""Whether the kernels of decoding and of training give the same bits, for every linear layer of a model on this GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from octavo.bench.gemm import linears_of
from octavo.check.rows import Row
from octavo.kernels import agreement
from octavo.models.config import DecoderConfig
from octavo.numerics.fp8 import BLOCK_1X128
from octavo.numerics.recipe import Recipe


def back_end_rows(shape: DecoderConfig, recipe: Recipe, device: torch.device) -> Iterator[Row]:
    """A row for each linear of a decoder layer; equality is proved anew here, as a run proves it."""
    for name, (in_features, projections) in linears_of(shape).items():
        N, K = sum(projections.values()), in_features
        if recipe.fprop.left is None:
            K = _filled(in_features, 8)
            equal, library = agreement.bf16_agrees(N, K, device), "cuBLAS"
        elif recipe.fprop.left == BLOCK_1X128:
            N, K = sum(_filled(width, 128) for width in projections.values()), _filled(in_features, 128)
            equal, library = agreement.blocks_agree(N, K, device), "cuBLASLt"
        else:
            K = _filled(in_features, 16)
            equal, library = agreement.rows_agree(N, K, device), "cuBLASLt"
        alone = library if recipe.fprop.left not in (None, BLOCK_1X128) else "triton"
        yield _row(f"{name} {N} x {K}", equal, library, alone)


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
