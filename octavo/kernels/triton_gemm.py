"""Back end `triton`: products whose sum over K has one order, whatever the number of rows.

    block    X 1x128 and W 128x128, both E4M3    each K block's raw products in FP32, times both scales, added in turn
    bf16     both BF16                           one FP32 sum
    w8a16    X BF16, W 128x128                   as bf16, with bf16(q * scale) for W

Few rows go to `kernels.decode_gemm`, or to the kernel here where this triton has no Gluon; then the weight stands on
the left of the tensor core's product, so that a tile is as narrow as the batch (SWAP). A row's bits are the same
either way, and those of cuBLASLt (`kernels.agreement`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.kernels.decode_gemm import MAX_ROWS, Kind, decode_product
from octavo.kernels.triton_shim import HAS_GLUON, require_triton, tl, triton, triton_module


@dataclass(frozen=True)
class Tiles:
    """How a product is cut up. Frozen: nothing is tuned at run time, so nothing changes between two runs."""

    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    num_warps: int
    swap: bool = False


def tiles_for(kind: Kind, M: int) -> Tiles:
    """The tiles for M rows."""
    if M <= MAX_ROWS:
        block_m = max(16, triton.next_power_of_2(M))
        return Tiles(block_m, 64, 64 if kind == "bf16" else 128, 4 if kind == "block" else 3, 4, swap=True)
    if kind == "block":
        return Tiles(128, 128, 128, 4, 8)
    return Tiles(256, 128, 64, 3, 8) if kind == "bf16" else Tiles(128, 128, 128, 3, 8)


def triton_product(
    kind: Kind,
    x: Tensor,
    w: Tensor,
    x_scale: Tensor | None,
    w_scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """X [M, K] . W [N, K]^T + bias -> [M, N], rounded once to bf16 or fp32.

    Args:
        kind: of the operands; `row`, both E4M3 with a scale per row, for at most 128 rows and with Gluon.
        x, w: bf16 or e4m3, K contiguous, a row's bytes a multiple of 16.
        x_scale: [M, ceil(K / 128)] fp32 with strides (1, any), where x is e4m3.
        w_scale: [ceil(N / 128), ceil(K / 128)] fp32, where w is e4m3.
        bias: [N] bf16, or None.
        dtype: of the result.
    """
    require_triton("a matrix product")
    M, K = x.shape
    N = w.shape[0]
    if M * N == 0:
        return torch.empty(M, N, dtype=dtype, device=x.device)
    if M <= MAX_ROWS and HAS_GLUON:
        if kind == "block" and x_scale is not None:
            x_scale = _by_four(x_scale)
        return decode_product(kind, x, w, x_scale, w_scale, bias, dtype)
    assert kind != "row", f"{M} rows with a scale each, Gluon: {HAS_GLUON}"
    y = torch.empty(M, N, dtype=dtype, device=x.device)
    tiles = tiles_for(kind, M)
    descriptor = triton_module("tools.tensor_descriptor").TensorDescriptor.from_tensor
    _product_kernel[(triton.cdiv(M, tiles.block_m) * triton.cdiv(N, tiles.block_n),)](
        descriptor(x, [tiles.block_m, tiles.block_k]),
        descriptor(w, [tiles.block_n, tiles.block_k]),
        y,
        y if bias is None else bias,
        y if x_scale is None else x_scale,
        y if w_scale is None else w_scale,
        M,
        N,
        K,
        0 if x_scale is None else x_scale.stride(1),
        0 if w_scale is None else w_scale.stride(0),
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_K=tiles.block_k,
        GROUP=8,
        STAGES=tiles.num_stages,
        SWAP=tiles.swap,
        KIND=kind,
        BIAS=bias is not None,
        num_warps=tiles.num_warps,
    )
    return y


def _by_four(scale: Tensor) -> Tensor:
    """[M, B] whose columns begin at multiples of 16 bytes, as TMA wants them."""
    if scale.stride(0) == 1 and scale.stride(1) % 4 == 0 and scale.data_ptr() % 16 == 0:
        return scale
    M, B = scale.shape
    return scale.new_zeros(B, -(-M // 4) * 4).T[:M].copy_(scale)


@triton.jit
def _product_kernel(
    x_desc,
    w_desc,
    y_ptr,
    bias_ptr,
    x_scale_ptr,
    w_scale_ptr,
    M,
    N,
    K,
    stride_x_scale,
    stride_w_scale,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    SWAP: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr,
):
    """One program a tile [BLOCK_M, BLOCK_N], or its transpose under SWAP; beyond the matrices TMA reads zeros."""
    tile_m, tile_n = _tile(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP)
    first_m, first_n = tile_m * BLOCK_M, tile_n * BLOCK_N
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    for block in tl.range(0, tl.cdiv(K, BLOCK_K), num_stages=STAGES):
        x = x_desc.load([first_m, block * BLOCK_K])
        w = w_desc.load([first_n, block * BLOCK_K])
        if KIND != "bf16":
            w_scale = tl.load(w_scale_ptr + (first_n // 128) * stride_w_scale + block)
        if KIND == "w8a16":
            w = (w.to(tl.float32) * w_scale).to(tl.bfloat16)
        if KIND == "block":
            x_scale = tl.load(x_scale_ptr + block * stride_x_scale + m, mask=m < M, other=0.0)
            scale = x_scale * w_scale
            if SWAP:
                acc = tl.fma(tl.dot(w, x.T), tl.broadcast_to(scale[None, :], acc.shape), acc)
            else:
                acc = tl.fma(tl.dot(x, w.T), tl.broadcast_to(scale[:, None], acc.shape), acc)
        else:
            acc = tl.dot(w, x.T, acc) if SWAP else tl.dot(x, w.T, acc)
    if SWAP:
        if BIAS:
            acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
        at = y_ptr + m[None, :].to(tl.int64) * N + n[:, None]
        tl.store(at, acc.to(y_ptr.dtype.element_ty), mask=(m[None, :] < M) & (n[:, None] < N))
    else:
        if BIAS:
            acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        at = y_ptr + m[:, None].to(tl.int64) * N + n[None, :]
        tl.store(at, acc.to(y_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def _tile(program, num_m, num_n, GROUP: tl.constexpr):
    """Tiles in bands of GROUP along M, so that programs which run together share rows and weights in the L2 cache."""
    band = program // (GROUP * num_n)
    size = tl.minimum(num_m - band * GROUP, GROUP)
    return band * GROUP + program % (GROUP * num_n) % size, program % (GROUP * num_n) // size


def decode_weight(q: Tensor, scale: Tensor, width: int) -> Tensor:
    """q [N, K] e4m3 of a weight by blocks, scale [ceil(N / 128), ceil(K / 128)] fp32 -> bf16(q * scale) [N, width]."""
    require_triton("an FP8 weight in BF16")
    N, K = q.shape
    w = torch.empty(N, K, dtype=torch.bfloat16, device=q.device)
    _decode_weight_kernel[(triton.cdiv(K, 128), triton.cdiv(N, 32))](q, scale, w, N, K, scale.stride(0), num_warps=4)
    return w[:, :width].contiguous()


@triton.jit
def _decode_weight_kernel(q_ptr, scale_ptr, w_ptr, N, K, stride_scale):
    """One program for 32 rows of a block."""
    n = tl.program_id(1) * 32 + tl.arange(0, 32)
    k = tl.program_id(0) * 128 + tl.arange(0, 128)
    at, inside = n[:, None].to(tl.int64) * K + k[None, :], (n[:, None] < N) & (k[None, :] < K)
    scale = tl.load(scale_ptr + (tl.program_id(1) // 4) * stride_scale + tl.program_id(0))
    q = tl.load(q_ptr + at, mask=inside, other=0.0)
    tl.store(w_ptr + at, (q.to(tl.float32) * scale).to(tl.bfloat16), mask=inside)
