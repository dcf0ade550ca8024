"""The products of decoding: X 1x128 [M, K] . W 128x128 [N, K]^T for at most 128 rows, near the memory's speed.

Reading W once is the work, so everything serves that: a warp that only issues TMA copies, four blocks of K to a stage,
three to five stages in flight, and, under programmatic dependent launch, the first stages of W fetched while the kernel
before still runs. The weight stands on the left (64 rows of the tensor core), the batch on the right (16, 32 or 64).

The sums are those of `kernels.triton_gemm` and of cuBLASLt, bit for bit: raw products of a K block in FP32, times both
scales, added in ascending K.

Written in Gluon, Triton's lower language, since Triton itself waits for each product before it starts the next.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from octavo.kernels.triton_shim import gdc, gl, gluon, hopper, tma_load, triton, triton_module

MAX_ROWS = 128
BLOCKS = 4
"""K blocks of a stage."""
STAGES = {16: 5, 32: 4, 64: 3}
"""By the rows of a tile, as many as shared memory holds."""
WIDTH = 64
"""Weight rows of a tile."""


def decode_product(
    x: Tensor, w: Tensor, x_scale: Tensor, w_scale: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """X [M, K] . W [N, K]^T + bias -> [M, N] bf16 or fp32, rounded once.

    Args:
        x, w: e4m3, K contiguous and a multiple of 16.
        x_scale: [M, ceil(K / 128)] fp32 with strides (1, a multiple of 4).
        w_scale: [ceil(N / 128), ceil(K / 128)] fp32.
        bias: [N] bf16, or None.
        dtype: of the result.
    """
    M, K = x.shape
    N = w.shape[0]
    y = torch.empty(M, N, dtype=dtype, device=x.device)
    block_m = min(64, max(16, triton.next_power_of_2(M)))
    num_tiles = triton.cdiv(M, block_m) * triton.cdiv(N, WIDTH)
    descriptor = triton_module("experimental.gluon.nvidia.hopper").TensorDescriptor.from_tensor
    bytes_layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    scale_layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    _decode_kernel[(min(num_tiles, _num_processors(x.device)),)](
        descriptor(x, [block_m, 128], bytes_layout),
        descriptor(w, [WIDTH, 128], bytes_layout),
        descriptor(x_scale.T, [1, max(block_m, 32)], scale_layout),  # TMA writes to multiples of 128 bytes
        y,
        w_scale,
        y if bias is None else bias,
        M,
        N,
        K,
        w_scale.stride(0),
        BLOCK_M=block_m,
        STAGES=STAGES[block_m],
        BIAS=bias is not None,
        num_warps=4,
        maxnreg=max_registers(block_m),
        launch_pdl=True,
    )
    return y


def max_registers(block_m: int) -> int:
    """Of a thread; with 128, the next kernel's first programs fit beside the last ones of this."""
    return 128 if block_m < 64 else 255


@lru_cache(maxsize=8)
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@gluon.jit
def _decode_kernel(
    x_desc,
    w_desc,
    scale_desc,
    y_ptr,
    w_scale_ptr,
    bias_ptr,
    M,
    N,
    K,
    stride_w_scale,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    BIAS: gl.constexpr,
):
    """One program a multiprocessor, a tile [64, BLOCK_M] at a time; tiles that share weight rows are neighbours."""
    num_m = gl.cdiv(M, BLOCK_M)
    num_tiles = num_m * gl.cdiv(N, 64)
    num_blocks = gl.cdiv(K, 128)
    x_tiles = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 4, BLOCK_M, 128], x_desc.layout)
    w_tiles = gl.allocate_shared_memory(w_desc.dtype, [STAGES * 4, 64, 128], w_desc.layout)
    scales = gl.allocate_shared_memory(gl.float32, [STAGES * 4, 1, scale_desc.block_type.shape[1]], scale_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], hopper.mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        hopper.mbarrier.init(full.index(stage), count=1)
        hopper.mbarrier.init(empty.index(stage), count=1)
    # fmt: off
    gl.warp_specialize([
        (_multiply, (y_ptr, w_scale_ptr, bias_ptr, x_tiles, w_tiles, scales, full, empty, M, N, stride_w_scale,
                     num_m, num_tiles, num_blocks, BLOCK_M, STAGES, BIAS)),
        (_fetch, (x_desc, w_desc, scale_desc, x_tiles, w_tiles, scales, full, empty, num_m, num_tiles,
                  gl.cdiv(num_blocks, 4), BLOCK_M, STAGES)),
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
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One warp: fills stages. Weights do not depend on the kernel before; X does, hence the wait between."""
    BYTES: gl.constexpr = 4 * (BLOCK_M * 128 + 64 * 128 + scale_desc.block_type.nbytes)
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
            _fetch_x(x_desc, scale_desc, x_tiles, scales, full.index(i), i, m, block)
    for i in range(STAGES, count):
        stage = i % STAGES
        tile = first + i // num_steps * programs
        block = i % num_steps * 4
        hopper.mbarrier.wait(empty.index(stage), (i // STAGES & 1) ^ 1)
        hopper.mbarrier.expect(full.index(stage), BYTES)
        _fetch_w(w_desc, w_tiles, full.index(stage), stage, tile // num_m * 64, block)
        _fetch_x(x_desc, scale_desc, x_tiles, scales, full.index(stage), stage, tile % num_m * BLOCK_M, block)


@gluon.jit
def _fetch_w(w_desc, w_tiles, barrier, stage, n, block):
    for j in gl.static_range(4):
        tma_load(w_desc, [n, (block + j) * 128], barrier, w_tiles.index(stage * 4 + j))


@gluon.jit
def _fetch_x(x_desc, scale_desc, x_tiles, scales, barrier, stage, m, block):
    for j in gl.static_range(4):
        tma_load(x_desc, [m, (block + j) * 128], barrier, x_tiles.index(stage * 4 + j))
        tma_load(scale_desc, [block + j, m], barrier, scales.index(stage * 4 + j))


@gluon.jit
def _multiply(
    y_ptr,
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
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    BIAS: gl.constexpr,
):
    """Four warps: four products at a time in the tensor cores, each added when it is done.

    A product gets the registers of the one before it, and `acc` passes through each wait, so that no other instruction
    touches the registers of a product in flight; ptxas would make them run one by one.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 32]
    )
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
            s0 = gl.load(w_scale_at + block)
            s1 = gl.load(w_scale_at + block + 1, mask=block + 1 < num_blocks, other=0.0)
            s2 = gl.load(w_scale_at + block + 2, mask=block + 2 < num_blocks, other=0.0)
            s3 = gl.load(w_scale_at + block + 3, mask=block + 3 < num_blocks, other=0.0)
            stage = i % STAGES
            hopper.mbarrier.wait(full.index(stage), i // STAGES & 1)
            p0 = _start(x_tiles, w_tiles, stage * 4, p0)
            p1 = _start(x_tiles, w_tiles, stage * 4 + 1, p1)
            p2 = _start(x_tiles, w_tiles, stage * 4 + 2, p2)
            p3 = _start(x_tiles, w_tiles, stage * 4 + 3, p3)
            p0 = hopper.warpgroup_mma_wait(num_outstanding=3, deps=[p0])
            acc = _add(acc, p0, scales.index(stage * 4), s0, BLOCK_M, layout)
            p1, acc = hopper.warpgroup_mma_wait(num_outstanding=2, deps=[p1, acc])
            acc = _add(acc, p1, scales.index(stage * 4 + 1), s1, BLOCK_M, layout)
            p2, acc = hopper.warpgroup_mma_wait(num_outstanding=1, deps=[p2, acc])
            acc = _add(acc, p2, scales.index(stage * 4 + 2), s2, BLOCK_M, layout)
            p3, acc = hopper.warpgroup_mma_wait(num_outstanding=0, deps=[p3, acc])
            acc = _add(acc, p3, scales.index(stage * 4 + 3), s3, BLOCK_M, layout)
            hopper.mbarrier.arrive(empty.index(stage), count=1)
            i += 1
        out: gl.constexpr = gl.BlockedLayout([2, 1], [16, 2], [2, 2], [0, 1])
        y = gl.convert_layout(acc, out)
        n = first_n + gl.arange(0, 64, gl.SliceLayout(1, out))
        m = first_m + gl.arange(0, BLOCK_M, gl.SliceLayout(0, out))
        if BIAS:
            y += gl.load(bias_ptr + n, mask=n < N, other=0.0).to(gl.float32).expand_dims(1)
        at = y_ptr + m.to(gl.int64).expand_dims(0) * N + n.expand_dims(1)
        gl.store(at, y.to(y_ptr.dtype.element_ty), mask=(n < N).expand_dims(1) & (m < M).expand_dims(0))


@gluon.jit
def _start(x_tiles, w_tiles, index, part):
    """W . X^T of one K block, left to run."""
    x = x_tiles.index(index).permute((1, 0))
    return hopper.warpgroup_mma(w_tiles.index(index), x, part, use_acc=False, is_async=True)


@gluon.jit
def _add(acc, part, scale_row, w_scale, BLOCK_M: gl.constexpr, layout: gl.constexpr):
    """acc + part * (x_scale * w_scale)."""
    row = scale_row.reshape((scale_row.shape[1],)).slice(0, BLOCK_M)
    scale = row.load(gl.SliceLayout(0, layout)) * w_scale
    return gl.fma(part, scale.expand_dims(0).broadcast_to([64, BLOCK_M]), acc)
