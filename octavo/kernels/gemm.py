"""Matrix products of quantised and BF16 operands: one entry, named back ends.

    reference    float64, every block of K summed exactly (`numerics.exact`); any device, and what a CPU uses
    triton       kernels of ours with one order of the sum over K             all; FP8 by rows up to 128 rows
    scaled_mm    cuBLASLt                                                     FP8 by FP8
    cublas       cuBLAS                                                       BF16
    deep_gemm    DeepGEMM, where it is installed, by name only                FP8 by blocks

In the forward a row of the result does not depend on how many rows are computed with it. So few rows go to `triton`,
and many to `scaled_mm` or `cublas` only where `kernels.agreement` has found them equal to `triton`, bit for bit, on
this device and for this shape.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor

from octavo.kernels import agreement
from octavo.kernels.decode_gemm import Kind
from octavo.kernels.deep_gemm import deep_gemm_product
from octavo.kernels.operands import Operand, spread
from octavo.kernels.scaled_mm import block_product, row_product
from octavo.kernels.triton_gemm import decode_weight, triton_product
from octavo.kernels.triton_shim import HAS_GLUON
from octavo.numerics.exact import K_BLOCK, block_matmul

Backend = Literal["reference", "triton", "scaled_mm", "cublas", "deep_gemm"]
FEW_ROWS = 128
"""Up to here reading the weight is the work, and `triton` does that best ..."""
WIDE = 16384
"""... but for more than half as many rows of a weight this wide."""
CUBLAS_ROWS = 4096
"""cuBLAS gets this many rows at a time, or FEW_ROWS, and never another number: what it does with them is compared."""


def gemm(left: Operand, right: Operand) -> Tensor:
    """The reference: left [M, K] @ right [N, K]^T -> [M, N] float64, not yet rounded."""
    assert left.k_edges == right.k_edges, f"K blocks differ: {left.k_edges} and {right.k_edges}"
    assert (left.scale is None) == (right.scale is None), "one operand is FP8 and the other is not"
    return block_matmul(left.values, right.values, left.scale, right.scale, left.k_edges)


def product(
    left: Operand,
    right: Operand,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    backend: Backend | None = None,
) -> Tensor:
    """left [M, K] @ right [N, K]^T + bias [N] -> [M, N]; the bias is added in FP32 or better, and one rounding follows.

    Args:
        left, right: prepared for the same K blocks, on one device. The right one is FP8 if the left one is.
        bias: in the high-precision format, or None.
        dtype: of the result.
        backend: None chooses by the operands and M; a name insists.

    Raises:
        ValueError: the back end does not take these operands, or is not there.
    """
    assert left.k_edges == right.k_edges, f"K blocks differ: {left.k_edges} and {right.k_edges}"
    assert left.scale is None or right.scale is not None, "the left operand is FP8 and the right one is not"
    backend = backend or _backend(left, right, bias is not None)
    if (backend == "reference") != (left.values.dtype == torch.float64):
        raise ValueError(
            f"backend {backend!r} does not take operands of {left.values.dtype}: the reference multiplies float64, the "
            f"others what is prepared on a CUDA device"
        )
    if backend == "reference":
        y = gemm(left, right)
        return (y if bias is None else y + bias).float().to(dtype)
    if right.rows is not None and bias is not None:
        bias = bias.new_zeros(len(right.values)).index_copy_(0, right.rows, bias)
    if left.scale is None:
        y = _from_bf16(left.values, right, bias, dtype, backend)
    elif left.by_blocks:
        y = _by_blocks(left, right, bias, dtype, backend)
    else:
        y = _by_rows(left, right, bias, dtype, backend)
    return y if right.rows is None else y[:, right.rows]


def _backend(left: Operand, right: Operand, biased: bool) -> Backend:
    """What the contract of the forward allows and is fastest."""
    if left.values.dtype == torch.float64:
        return "reference"
    M, (N, K), device = len(left.values), right.values.shape, left.values.device
    if left.scale is None:
        rows, K = min(M, CUBLAS_ROWS), left.values.shape[1]
        if right.scale is None:
            proof = {FEW_ROWS: agreement.few_bf16_agree, CUBLAS_ROWS: agreement.bf16_agrees}.get(rows)
            return "cublas" if proof is not None and proof(N, K, device) else "triton"
        return "cublas" if rows == CUBLAS_ROWS and agreement.w8a16_agrees(N, K, device) else "triton"
    if not left.by_blocks:
        few = M <= FEW_ROWS and len(left.k_edges) == 2
        return "triton" if few and agreement.rows_agree(N, K, device, biased) else "scaled_mm"
    if right.rows_per_scale == 1:  # no weight: a gradient
        return "scaled_mm"
    many = M > (FEW_ROWS // 2 if N >= WIDE else FEW_ROWS)
    return "scaled_mm" if many and agreement.blocks_agree(N, K, device, biased) else "triton"


def _by_blocks(left: Operand, right: Operand, bias: Tensor | None, dtype: torch.dtype, backend: Backend) -> Tensor:
    """Both FP8, scales per block of 128 along K."""
    x, w, x_scale, w_scale = left.values, right.values, left.scale, right.scale
    assert x_scale is not None and w_scale is not None
    if backend == "triton" and right.rows_per_scale > 1:
        return triton_product("block", x, w, x_scale, w_scale, bias, dtype)
    if backend == "scaled_mm":
        return block_product(x, w, x_scale, w_scale, bias, dtype)
    if backend == "deep_gemm" and bias is None:
        return deep_gemm_product(x, w, x_scale, w_scale, dtype)
    raise _refused(backend, "FP8 by blocks", "scaled_mm, triton (a weight of 128 x 128), deep_gemm (no bias)")


def _by_rows(left: Operand, right: Operand, bias: Tensor | None, dtype: torch.dtype, backend: Backend) -> Tensor:
    """Both FP8, a scale per row; per row and piece of K where projections are reduced together."""
    assert left.scale is not None and right.scale is not None
    pieces = len(left.k_edges) - 1
    if backend == "triton" and pieces == 1 and len(left.values) <= FEW_ROWS and HAS_GLUON:
        return triton_product("row", left.values, right.values, left.scale, right.scale, bias, dtype)
    if backend != "scaled_mm":
        raise _refused(backend, "FP8 by rows", "scaled_mm, triton (up to 128 rows, with Gluon)")
    if pieces == 1:
        return row_product(left.values, right.values, left.scale, right.scale, bias, dtype)
    assert bias is None, "a bias of several projections reduced together"
    edges = left.k_edges
    if all(edge % K_BLOCK == 0 for edge in edges):  # a scale per piece is a scale per block that repeats
        in_blocks = [edge // K_BLOCK for edge in edges]
        x_scale, w_scale = (spread(scale.T.contiguous(), in_blocks, dim=0).T for scale in (left.scale, right.scale))
        return block_product(left.values, right.values, x_scale, w_scale, None, dtype)
    total, start = torch.zeros((), device=left.values.device), 0
    for index, (low, high) in enumerate(pairwise(edges)):
        stop = start + -(-(high - low) // 16) * 16
        x, w = left.values[:, start:stop].contiguous(), right.values[:, start:stop].contiguous()
        scales = left.scale[:, index, None], right.scale[:, index, None]
        total = total + row_product(x, w, *scales, None, torch.float32)
        start = stop
    return total.to(dtype)


def _from_bf16(x: Tensor, right: Operand, bias: Tensor | None, dtype: torch.dtype, backend: Backend) -> Tensor:
    """X in BF16; W in BF16, or FP8 by blocks of 128 x 128 and multiplied as bf16(q * scale)."""
    kind: Kind = "bf16" if right.scale is None else "w8a16"
    if backend == "triton":
        return triton_product(kind, x, right.values, None, right.scale, bias, dtype)
    if backend != "cublas":
        raise _refused(backend, "BF16 activations", "triton, cublas")
    w = right.values if right.scale is None else decode_weight(right.values, right.scale, x.shape[1])
    size = CUBLAS_ROWS if len(x) >= CUBLAS_ROWS else FEW_ROWS
    whole = len(x) // size * size
    y = torch.empty(len(x), len(w), dtype=dtype, device=x.device)
    for start in range(0, whole, size):
        rows = slice(start, start + size)
        if bias is not None or dtype != torch.bfloat16:
            part = torch.mm(x[rows], w.T, out_dtype=torch.float32)
            y[rows] = part if bias is None else part + bias
        else:
            torch.mm(x[rows], w.T, out=y[rows])
    if whole < len(x):
        y[whole:] = triton_product(kind, x[whole:], right.values, None, right.scale, bias, dtype)
    return y


def _refused(backend: str, what: str, those: str) -> ValueError:
    return ValueError(f"backend {backend!r} does not multiply {what}; these do: {those}")
