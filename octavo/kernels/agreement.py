"""Whether two back ends give the same bits for a shape, on this device and with these libraries.

Exact rollout multiplies few rows with one kernel and training many with another; that is allowed only where both are
equal, and this is how that is known: random operands through both, every bit compared, at some numbers of rows. What
those leave out shows in the log-probabilities, which a run compares at every step. Kept for the process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from octavo.kernels.cast import cast_1x128, cast_128x128, cast_rows
from octavo.kernels.scaled_mm import block_product, row_product
from octavo.kernels.triton_gemm import decode_weight, triton_product
from octavo.kernels.triton_shim import HAS_GLUON

ROWS = (1, 64, 129, 1000, 4096)
"""Numbers of rows that the products by blocks are compared at."""


@lru_cache(maxsize=256)
def blocks_agree(N: int, K: int, device: torch.device, biased: bool) -> bool:
    """cuBLASLt against `triton`, both operands FP8, X by 1x128 and W [N, K] by 128x128; N, K filled up to 128s."""
    w, _, w_scale = cast_128x128(_random(N, K, device))
    bias = _random(1, N, device)[0] if biased else None
    for M in ROWS:
        x, x_scale = cast_1x128(_random(M, K, device))
        found = block_product(x, w, x_scale, w_scale, bias, torch.bfloat16)
        if not torch.equal(found, triton_product("block", x, w, x_scale, w_scale, bias, torch.bfloat16)):
            return False
    return True


@lru_cache(maxsize=256)
def rows_agree(N: int, K: int, device: torch.device, biased: bool) -> bool:
    """cuBLASLt against `triton`, both operands FP8 with a scale per row; never where this triton has no Gluon."""
    if not HAS_GLUON:
        return False
    w, w_scale = cast_rows(_random(N, K, device))
    x, x_scale = cast_rows(_random(1000, K, device))
    bias = _random(1, N, device)[0] if biased else None
    whole = row_product(x, w, x_scale, w_scale, bias, torch.bfloat16)
    return all(
        torch.equal(whole[:M], triton_product("row", x[:M], w, x_scale[:M], w_scale, bias, torch.bfloat16))
        for M in (1, 64, 128)
    )


@lru_cache(maxsize=256)
def bf16_agrees(N: int, K: int, device: torch.device) -> bool:
    """cuBLAS with 4,096 rows against `triton` with all of them and with some, in BF16 and FP32."""
    w = _random(N, K, device)
    return _cublas_agrees(w, partial(triton_product, "bf16", w=w, x_scale=None, w_scale=None))


@lru_cache(maxsize=256)
def few_bf16_agree(N: int, K: int, device: torch.device) -> bool:
    """As `bf16_agrees`, of 128 rows: for them the library may take another kernel."""
    w = _random(N, K, device)
    return _cublas_agrees(w, partial(triton_product, "bf16", w=w, x_scale=None, w_scale=None), 128)


@lru_cache(maxsize=256)
def w8a16_agrees(N: int, K: int, device: torch.device) -> bool:
    """As `bf16_agrees`, of an FP8 weight by 128x128 that cuBLAS reads decoded; N filled up to 128s, K that of X."""
    w, _, w_scale = cast_128x128(_random(N, -(-K // 128) * 128, device))
    return _cublas_agrees(
        decode_weight(w, w_scale, K), partial(triton_product, "w8a16", w=w, x_scale=None, w_scale=w_scale)
    )


def _cublas_agrees(w: Tensor, by_triton: Callable[..., Tensor], rows: int = 4096) -> bool:
    x = _random(rows, w.shape[1], w.device)
    rounded, whole = torch.mm(x, w.T), torch.mm(x, w.T, out_dtype=torch.float32)
    if not torch.equal(rounded, whole.bfloat16()):
        return False
    numbers = [M for M in (1, 64, 1000, rows) if M <= rows]
    return all(torch.equal(whole[:M], by_triton(x=x[:M], bias=None, dtype=torch.float32)) for M in numbers)


def _random(rows: int, columns: int, device: torch.device) -> Tensor:
    """BF16, rows of different size, the same every time and apart from the generators that the run uses."""
    generator = torch.Generator(device).manual_seed(rows * 1_000_003 + columns)
    size = torch.exp2(torch.randint(-3, 4, (rows, 1), generator=generator, device=device))
    return (torch.randn(rows, columns, generator=generator, device=device) * size).bfloat16()
