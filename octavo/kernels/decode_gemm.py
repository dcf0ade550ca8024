"""The products of decoding: X [M, K] . W [N, K]^T for at most 128 rows, near the memory's speed.

    block    X 1x128 and W 128x128, both E4M3    each K block's raw products in FP32, times both scales, added in turn
    row      both E4M3, a scale per row          one FP32 sum over K (fast accumulation), scaled at the end
    bf16     both BF16                           one FP32 sum
    w8a16    X BF16, W 128x128                   as bf16, with bf16(q * scale) for W

Reading W once is the work, so everything serves that: a warp that only issues TMA copies, four blocks of K to a stage,
three to five stages in flight, and, under programmatic dependent launch, the first stages of W fetched while the kernel
before still runs. The weight stands on the left (64 rows of the tensor core), the batch on the right (16, 32 or 64).

The sums are those of `kernels.triton_gemm` and of cuBLASLt, bit for bit. Multiplications and additions are not fused
by the compiler (`enable_fp_fusion`), only where `fma` says so.

Written in Gluon, Triton's lower language, since Triton itself waits for each product before it starts the next.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from octavo.kernels.triton_shim import gdc, gl, gluon, hopper, tma_load, triton, triton_module

Kind = Literal["block", "row", "bf16", "w8a16"]
MAX_ROWS = 128
WIDTH = 64
"""Weight rows of a tile."""
SHARED_BYTES = 212_000
"""Of a program's stages, at most."""


def decode_product(
    kind: Kind,
    x: Tensor,
    w: Tensor,
    x_scale: Tensor | None,
    w_scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """X [M, K] . W [N, K]^T + bias -> [M, N] bf16 or fp32, rounded once.

    Args:
        kind: of the operands.
        x, w: e4m3 or bf16, K contiguous, a row's bytes a multiple of 16.
        x_scale: fp32; by blocks [M, ceil(K / 128)] whose columns begin at multiples of 16 bytes; by rows [M, 1].
        w_scale: fp32; by blocks [ceil(N / 128), ceil(K / 128)]; by rows [N, 1].
        bias: [N] bf16, or None.
        dtype: of the result.
    """
    M, K = x.shape
    N = w.shape[0]
    y = torch.empty(M, N, dtype=dtype, device=x.device)
    block_m = tile_rows(M)
    num_tiles = triton.cdiv(M, block_m) * triton.cdiv(N, WIDTH)
    w_box, x_box = boxes(kind, block_m)
    _decode_kernel[(min(num_tiles, _num_processors(x.device)),)](
        _descriptor(x, x_box),
        _descriptor(w, w_box),
        _descriptor(x_scale.T, scale_box(block_m), plain=True) if kind == "block" and x_scale is not None else y,
        y,
        y if x_scale is None else x_scale,
        y if w_scale is None else w_scale,
        y if bias is None else bias,
        M,
        N,
        K,
        0 if w_scale is None else w_scale.stride(0),
        KIND=kind,
        BLOCK_M=block_m,
        STAGES=num_stages(kind, block_m),
        BIAS=bias is not None,
        num_warps=4,
        maxnreg=max_registers(kind, block_m),
        launch_pdl=True,
        enable_fp_fusion=False,
    )
    return y


def tile_rows(M: int) -> int:
    """Batch rows of a tile."""
    return min(64, max(16, triton.next_power_of_2(M)))


def boxes(kind: Kind, block_m: int) -> tuple[list[int], list[int]]:
    """What one TMA copy takes of W and of X: rows and values."""
    columns = 64 if kind == "bf16" else 128
    return [WIDTH, columns], [block_m, columns]


def scale_box(block_m: int) -> list[int]:
    """Likewise of X's scales, transposed; TMA writes to multiples of 128 bytes."""
    return [1, max(block_m, 32)]


def num_stages(kind: Kind, block_m: int) -> int:
    """As many as shared memory holds, each of four blocks."""
    (w_rows, columns), (x_rows, _) = boxes(kind, block_m)
    w_bytes, x_bytes = (1 if kind in ("block", "row", "w8a16") else 2), (1 if kind in ("block", "row") else 2)
    return min(5, SHARED_BYTES // (4 * columns * (w_rows * w_bytes + x_rows * x_bytes)))


def max_registers(kind: Kind, block_m: int) -> int:
    """Of a thread; with 128, the next kernel's first programs fit beside the last ones of this."""
    return 255 if block_m == 64 and kind in ("block", "w8a16") else 128


def _descriptor(matrix: Tensor, box: list[int], plain: bool = False) -> object:
    layout = gl.NVMMASharedLayout(0 if plain else 128, matrix.element_size() * 8, rank=2)
    return triton_module("experimental.gluon.nvidia.hopper").TensorDescriptor.from_tensor(matrix, box, layout)


@lru_cache(maxsize=8)
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@gluon.jit
def _decode_kernel(
    x_desc,
    w_desc,
    scale_desc,
    y_ptr,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    M,
    N,
    K,
    stride_w_scale,
    KIND: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    BIAS: gl.constexpr,
):
    """One program a multiprocessor, a tile [64, BLOCK_M] at a time; tiles that share weight rows are neighbours."""
    COLUMNS: gl.constexpr = w_desc.block_type.shape[1]
    num_m = gl.cdiv(M, BLOCK_M)
    num_tiles = num_m * gl.cdiv(N, 64)
    num_blocks = gl.cdiv(K, COLUMNS)
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 4, BLOCK_M, COLUMNS], x_desc.layout)
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [STAGES * 4, 64, COLUMNS], w_desc.layout)
    if KIND == "block":
        SCALES: gl.constexpr = scale_desc.block_type.shape[1]
        scales = gl.allocate_shared_memory(gl.float32, [STAGES * 4, 1, SCALES], scale_desc.layout)
    else:
        scales = x_tiles
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=1)
        hopper.mbarrier.init(empty.index(stage), count=1)
    # fmt: off
    gl.warp_specialize([
        (_multiply, (y_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, x_tiles, w_tiles, scales, full, empty, M, N,
                     stride_w_scale, num_m, num_tiles, num_blocks, KIND, BLOCK_M, STAGES, BIAS)),
        (_fetch, (x_desc, w_desc, scale_desc, x_tiles, w_tiles, scales, full, empty, num_m, num_tiles,
                  gl.cdiv(num_blocks, 4), KIND, BLOCK_M, STAGES)),
    ], [1], [32])
    # fmt: on


@gluon.jit
def _fetch(
    x_desc,
    w_desc,
    scale_desc,
    x_tiles,
    w_tiles,
    scales,
    full,
    empty,
    num_m,
    num_tiles,
    num_steps,
    KIND: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warp: fills stages, W before the wait and X after it.

    What wrote W lets no kernel start before its own end, so that end has come; X may be of a kernel still at work, one
    of these or of `kernels.early_launch`. A wait is over when that kernel, and with it the one it waited for, is:
    nothing overtakes two.
    """
    BYTES: gl.constexpr = 4 * (x_desc.block_type.nbytes + w_desc.block_type.nbytes) + (
        4 * scale_desc.block_type.nbytes if KIND == "block" else 0
    )
    first, programs = gl.program_id(0), gl.num_programs(0)
    count = gl.cdiv(num_tiles - first, programs) * num_steps
    for i in gl.static_range(STAGES):
        if i < count:
            hopper.mbarrier.expect(full.index(i), BYTES)
            tile = first + i // num_steps * programs
            _fetch_w(w_desc, w_tiles, full.index(i), i, tile // num_m * 64, i % num_steps * 4)
    gdc.gdc_wait()
    for i in gl.static_range(STAGES):
        if i < count:
            tile = first + i // num_steps * programs
            m, block = tile % num_m * BLOCK_M, i % num_steps * 4
            _fetch_x(x_desc, scale_desc, x_tiles, scales, full.index(i), i, m, block, KIND)
    for i in range(STAGES, count):
        stage = i % STAGES
        tile = first + i // num_steps * programs
        m, block = tile % num_m * BLOCK_M, i % num_steps * 4
        hopper.mbarrier.wait(empty.index(stage), (i // STAGES & 1) ^ 1)
        hopper.mbarrier.expect(full.index(stage), BYTES)
        _fetch_w(w_desc, w_tiles, full.index(stage), stage, tile // num_m * 64, block)
        _fetch_x(x_desc, scale_desc, x_tiles, scales, full.index(stage), stage, m, block, KIND)


@gluon.jit
def _fetch_w(w_desc, w_tiles, barrier, stage, n, block):
    for j in gl.static_range(4):
        k = (block + j) * w_desc.block_type.shape[1]
        tma_load(w_desc, [n, k], barrier, w_tiles.index(stage * 4 + j))


@gluon.jit
def _fetch_x(x_desc, scale_desc, x_tiles, scales, barrier, stage, m, block, KIND: gl.constexpr):
    for j in gl.static_range(4):
        tma_load(x_desc, [m, (block + j) * x_desc.block_type.shape[1]], barrier, x_tiles.index(stage * 4 + j))
        if KIND == "block":
            tma_load(scale_desc, [block + j, m], barrier, scales.index(stage * 4 + j))


@gluon.jit
def _multiply(
    y_ptr,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    x_tiles,
    w_tiles,
    scales,
    full,
    empty,
    M,
    N,
    stride_w_scale,
    num_m,
    num_tiles,
    num_blocks,
    KIND: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    BIAS: gl.constexpr,
):
    """Four warps: a tile of Y^T from start to end."""
    K_STEP: gl.constexpr = 32 if w_tiles.dtype.primitive_bitwidth == 8 and KIND != "w8a16" else 16
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, K_STEP])
    gdc.gdc_launch_dependents()
    i = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        first_m, first_n = tile % num_m * BLOCK_M, tile // num_m * 64
        w_scale_at = w_scale_ptr + first_n // 128 * stride_w_scale
        acc = gl.zeros([64, BLOCK_M], gl.float32, layout)
        p0 = acc
        p1 = acc
        p2 = acc
        p3 = acc
        for block in range(0, num_blocks, 4):
            stage = i % STAGES
            if KIND == "block" or KIND == "w8a16":
                s0 = gl.load(w_scale_at + block)
                s1 = gl.load(w_scale_at + block + 1, mask=block + 1 < num_blocks, other=0.0)
                s2 = gl.load(w_scale_at + block + 2, mask=block + 2 < num_blocks, other=0.0)
                s3 = gl.load(w_scale_at + block + 3, mask=block + 3 < num_blocks, other=0.0)
            hopper.mbarrier.wait(full.index(stage), i // STAGES & 1)
            if KIND == "block":
                acc, p0, p1, p2, p3 = _four_parts(
                    acc, p0, p1, p2, p3, s0, s1, s2, s3, x_tiles, w_tiles, scales, stage, BLOCK_M, layout
                )
            elif KIND == "w8a16":
                acc = _four_decoded(acc, s0, s1, s2, s3, x_tiles, w_tiles, stage, layout)
            else:
                acc = _four_in_one(acc, x_tiles, w_tiles, stage)
            hopper.mbarrier.arrive(empty.index(stage), count=1)
            i += 1
        out: gl.constexpr = gl.BlockedLayout([2, 1], [16, 2], [2, 2], [0, 1])
        y = gl.convert_layout(acc, out)
        n = first_n + gl.arange(0, 64, gl.SliceLayout(1, out))
        m = first_m + gl.arange(0, BLOCK_M, gl.SliceLayout(0, out))
        if KIND == "row":
            y = y * gl.load(w_scale_ptr + n, mask=n < N, other=0.0).expand_dims(1)
            y = y * gl.load(x_scale_ptr + m, mask=m < M, other=0.0).expand_dims(0)
        if BIAS:
            y += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32).expand_dims(1)
        at = y_ptr + m.to(gl.int64).expand_dims(0) * N + n.expand_dims(1)
        gl.store(at, y.to(y_ptr.dtype.element_ty), mask=(n < N).expand_dims(1) & (m < M).expand_dims(0))


@gluon.jit
def _four_parts(
    acc, p0, p1, p2, p3, s0, s1, s2, s3, x_tiles, w_tiles, scales, stage, BLOCK_M: gl.constexpr, layout: gl.constexpr
):
    """Four products at a time in the tensor cores, each added when it is done.

    A product gets the registers of the one before it, and `acc` passes through each wait, so that no other instruction
    touches the registers of a product in flight; ptxas would make them run one by one.
    """
    p0 = _start(x_tiles, w_tiles, stage * 4, p0, False)
    p1 = _start(x_tiles, w_tiles, stage * 4 + 1, p1, False)
    p2 = _start(x_tiles, w_tiles, stage * 4 + 2, p2, False)
    p3 = _start(x_tiles, w_tiles, stage * 4 + 3, p3, False)
    p0 = hopper.warpgroup_mma_wait(num_outstanding=3, deps=[p0])
    acc = _add(acc, p0, scales.index(stage * 4), s0, BLOCK_M, layout)
    p1, acc = hopper.warpgroup_mma_wait(num_outstanding=2, deps=[p1, acc])
    acc = _add(acc, p1, scales.index(stage * 4 + 1), s1, BLOCK_M, layout)
    p2, acc = hopper.warpgroup_mma_wait(num_outstanding=1, deps=[p2, acc])
    acc = _add(acc, p2, scales.index(stage * 4 + 2), s2, BLOCK_M, layout)
    p3, acc = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[p3, acc])
    acc = _add(acc, p3, scales.index(stage * 4 + 3), s3, BLOCK_M, layout)
    return acc, p0, p1, p2, p3


@gluon.jit
def _add(acc, part, scale_row, w_scale, BLOCK_M: gl.constexpr, layout: gl.constexpr):
    """acc + part * (x_scale * w_scale)."""
    row = scale_row.reshape((scale_row.shape[1],)).slice(0, BLOCK_M)
    scale = row.load(gl.SliceLayout(0, layout)) * w_scale
    return gl.fma(part, scale.expand_dims(0).broadcast_to([64, BLOCK_M]), acc)


@gluon.jit
def _four_in_one(acc, x_tiles, w_tiles, stage):
    """Four blocks of K added to one sum inside the tensor cores."""
    acc = _start(x_tiles, w_tiles, stage * 4, acc, True)
    acc = _start(x_tiles, w_tiles, stage * 4 + 1, acc, True)
    acc = _start(x_tiles, w_tiles, stage * 4 + 2, acc, True)
    acc = _start(x_tiles, w_tiles, stage * 4 + 3, acc, True)
    return hopper.warpgroup_mma_wait(num_outstanding=0, deps=[acc])


@gluon.jit
def _start(x_tiles, w_tiles, index, acc, ADD: gl.constexpr):
    """W . X^T of one block, left to run."""
    x = x_tiles.index(index).permute((1, 0))
    return hopper.warpgroup_mma(w_tiles.index(index), x, acc, use_acc=ADD, is_async=True)


@gluon.jit
def _four_decoded(acc, s0, s1, s2, s3, x_tiles, w_tiles, stage, layout: gl.constexpr):
    """Four blocks of K of a weight that is decoded in registers, the next one while a product runs."""
    w0 = _decoded(w_tiles, stage * 4, s0, layout)
    acc = _start_decoded(x_tiles, w0, stage * 4, acc)
    w1 = _decoded(w_tiles, stage * 4 + 1, s1, layout)
    acc = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    acc = _start_decoded(x_tiles, w1, stage * 4 + 1, acc)
    w2 = _decoded(w_tiles, stage * 4 + 2, s2, layout)
    acc = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    acc = _start_decoded(x_tiles, w2, stage * 4 + 2, acc)
    w3 = _decoded(w_tiles, stage * 4 + 3, s3, layout)
    acc = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[acc])
    acc = _start_decoded(x_tiles, w3, stage * 4 + 3, acc)
    return hopper.warpgroup_mma_wait(num_outstanding=0, deps=[acc])


@gluon.jit
def _decoded(w_tiles, index, scale, layout: gl.constexpr):
    """bf16(q * scale) of a block, as the left side of a product."""
    q = w_tiles.index(index).load(gl.DotOperandLayout(operand_index=0, parent=layout, k_width=2))
    return (q.to(gl.float32) * scale).to(gl.bfloat16)


@gluon.jit
def _start_decoded(x_tiles, w, index, acc):
    return hopper.warpgroup_mma(w, x_tiles.index(index).permute((1, 0)), acc, use_acc=True, is_async=True)
