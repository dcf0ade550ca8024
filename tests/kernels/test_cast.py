"""Casts: bytes and scales of `numerics.fp8.quantize`, in the layout a GEMM reads, on every device."""

import json

import pytest
import torch
from kernel_checks import REPO, WAITS_AND_LETS_START, in_another_process, interpreted, needs_triton, padded, same

from octavo.kernels.cast import (
    cast_1x128,
    cast_128x1,
    cast_128x128,
    cast_both,
    cast_rows,
)
from octavo.kernels.cast_whole import cast_columns, cast_tensor
from octavo.numerics.fp8 import (
    BLOCK_1X128,
    BLOCK_128X1,
    BLOCK_128X128,
    E4M3,
    PER_COLUMN,
    PER_ROW,
    PER_TENSOR,
    quantize,
    quantize_with_scale,
    scale_from_amax,
)

SHAPES = [(1, 16), (7, 129), (130, 300), (3, 1), (128, 128)]  # one, odd, real
CASTS = [cast_rows, cast_1x128, cast_128x1, cast_both, cast_128x128, cast_columns, cast_tensor]


def random_matrix(shape, dtype, device="cpu"):
    """Rows of very different magnitude; zeros of both signs, tiny values, a NaN and an infinity where there is room."""
    M, K = shape
    x = torch.randn(M, K) * torch.exp(torch.randn(M, 1) * 6)
    if M > 6 and K > 9:
        x[2, 5], x[2, 6], x[3], x[4] = 0.0, -0.0, 0.0, x[4] * 1e-30
        x[5, 7], x[6, 9] = torch.nan, torch.inf
    return x.to(dtype).to(device)


def check_all(x, rounding, pad_to=(1, 1)):
    """Every cast of x equals the reference, which is that of x with zeros where it is padded."""
    wide, tall = padded(x, *pad_to), padded(x, *pad_to[::-1])  # as q and as its transpose are padded
    both = cast_both(x, rounding, pad_to=pad_to)
    weight, weight_t, weight_scale = cast_128x128(x, rounding, pad_to=pad_to)
    alone, nothing, alone_scale = cast_128x128(x, rounding, transposed=False, pad_to=pad_to)
    one, one_t, one_scale = cast_tensor(x, rounding, transposed=True, pad_to=pad_to)
    columns, columns_scale = quantize(tall, BLOCK_128X1, rounding)
    whole_columns, whole_columns_scale = quantize(tall, PER_COLUMN, rounding)
    block_scale = quantize(wide, BLOCK_128X128, rounding)[1]
    block_t, tensor_t = (quantize(tall, quant_block, rounding)[0].T for quant_block in (BLOCK_128X128, PER_TENSOR))
    tensor, tensor_scale = quantize(wide, PER_TENSOR, rounding)
    found = {
        "rows": (cast_rows(x, rounding, pad_to=pad_to), quantize(wide, PER_ROW, rounding)),
        "columns": (cast_columns(x, rounding, pad_to=pad_to), (whole_columns.T, whole_columns_scale.T)),
        "1x128": (cast_1x128(x, rounding, pad_to=pad_to), quantize(wide, BLOCK_1X128, rounding)),
        "128x1": (cast_128x1(x, rounding, pad_to=pad_to), (columns.T, columns_scale.T)),
        "both, plain": (both[0], quantize(wide, BLOCK_1X128, rounding)),
        "both, transposed": (both[1], (columns.T, columns_scale.T)),
        "128x128": ((weight, weight_scale), quantize(wide, BLOCK_128X128, rounding)),
        "128x128, transposed": ((weight_t, weight_scale), (block_t, block_scale)),
        "128x128, alone": ((alone, alone_scale), (weight, block_scale)),
        "tensor": ((one, one_scale), (tensor, tensor_scale)),
        "tensor, transposed": ((one_t, one_scale), (tensor_t, tensor_scale)),
    }
    wrong = [name for name, (mine, wanted) in found.items() if not all(map(same, mine, wanted))]
    assert not wrong and nothing is None, f"{tuple(x.shape)} {x.dtype} {rounding} {pad_to}: {wrong}"
    for _, scale in (found["1x128"][0], found["128x1"][0], *both):
        assert scale.shape[1] == 1 or scale.stride(0) == 1, "a GEMM wants scales contiguous along the outer dimension"


def check_given_scale(x):
    """A frozen scale saturates what is beyond it and counts that."""
    scale = torch.full((1, 1), 1e-3, device=x.device)
    num_saturated = torch.full((1,), 5, device=x.device)
    q, q_t, same_scale = cast_tensor(x, scale=scale, num_saturated=num_saturated, transposed=True)
    wanted = quantize_with_scale(x, scale, PER_TENSOR)
    beyond = int((x.float().abs() > 448.0 * scale).sum())
    assert beyond > 0 and num_saturated.item() == 5 + beyond and same_scale is scale
    assert same(q, wanted) and same(q_t, wanted.T)


def check_slices(x, rounding):
    """Casts written into halves of larger tensors equal the padded ones, and leave the other half alone."""
    T, K = x.shape
    rows, columns = T + -T % 128, K + -K % 128

    def halves(M, N, blocks):
        q, scale = torch.full((M, 2 * N), 3.0).to(E4M3).to(x.device), torch.full((2 * blocks, M), 7.0, device=x.device)
        return (q[:, N:], scale.T[:, blocks:]), (q[:, :N], scale.T[:, :blocks])

    for cast, M, N, blocks in ((cast_rows, T, columns, 1), (cast_1x128, T, columns, columns // 128)):
        out, rest = halves(M, N, blocks)
        cast(x, rounding, out=out)
        assert all(map(same, out, cast(x, rounding, pad_to=(1, 128)))), (cast.__name__, tuple(x.shape))
        assert (rest[0].float() == 3.0).all() and (rest[1] == 7.0).all()
    for cast, M, N, blocks in ((cast_columns, K, rows, 1), (cast_128x1, K, rows, rows // 128)):
        out, rest = halves(M, N, blocks)
        cast(x, rounding, out=out)
        assert all(map(same, out, cast(x, rounding, pad_to=(1, 128)))), (cast.__name__, tuple(x.shape))
        assert (rest[0].float() == 3.0).all() and (rest[1] == 7.0).all()
    weight, weight_t = torch.full((2 * rows, columns), 3.0), torch.full((K, 2 * rows), 3.0)
    weight, weight_t = weight.to(E4M3).to(x.device), weight_t.to(E4M3).to(x.device)
    scale = torch.full((2 * rows // 128, columns // 128), 7.0, device=x.device)
    out = (weight[rows:], weight_t[:, rows:], scale[rows // 128 :])  # the second of two fused projections
    assert cast_128x128(x, rounding, out=out)[0] is out[0]
    wanted = cast_128x128(padded(x, 128, 128), rounding)
    assert same(out[0], wanted[0]) and same(out[1], wanted[1][:K]) and same(out[2], wanted[2])
    assert (weight[:rows].float() == 3.0).all() and (weight_t[:, :rows].float() == 3.0).all()
    assert (scale[: rows // 128] == 7.0).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rounding", ["none", "power_of_two"])
def test_casts_on_a_cpu_are_the_reference(shape, rounding):
    x = random_matrix(shape, torch.bfloat16)
    check_all(x, rounding)
    check_all(x, rounding, pad_to=(1, 128))
    check_slices(x, rounding)


def test_a_given_scale_saturates_and_counts():
    check_given_scale(random_matrix((130, 300), torch.bfloat16))


@pytest.mark.parametrize("cast", CASTS)
def test_what_is_no_row_major_matrix_is_refused(cast):
    for x in (torch.zeros(4), torch.zeros(4, 4, dtype=torch.int32), torch.zeros(8, 4).T):
        with pytest.raises(ValueError, match=f"{cast.__name__} wants a floating-point matrix"):
            cast(x)


def test_outputs_that_do_not_fit_are_refused():
    x, scale = torch.zeros(4, 16), torch.zeros(1, 4).T
    q = torch.zeros(8, 32).to(E4M3)
    for wrong in (q[:2, :16], q[:4, :12], q[:4, 4:20], q[:4, :16].float(), q.T[:4, :8]):
        with pytest.raises(ValueError, match="cast_1x128 writes into an e4m3 matrix of at least"):
            cast_1x128(x, out=(wrong, scale))
    for wrong in (torch.zeros(4, 2), torch.zeros(4, 2)[:, :1], torch.zeros(4, 1).double()):
        with pytest.raises(ValueError, match="cast_1x128 writes scales fp32"):
            cast_1x128(x, out=(q[:4, :16], wrong))
    with pytest.raises(ValueError, match="a cast and its transpose of the same number of blocks"):
        cast_128x128(x, out=(q[:4, :16], torch.zeros(16, 256).to(E4M3), torch.zeros(1, 1)))


WHOLE = {"amax", "amax of rows and columns", "columns", "rows and columns", "tensor", "tensor, given scale"}
EARLY = WHOLE | {"rows", "1x128", "norm", "sum and norm", "norm of heads", "norm 1x128", "swiglu", "swiglu 1x128"}
"""Kernels that a decode step may start early, of BF16 alone: FP32 is a weight."""


@needs_triton
def test_every_kernel_compiles_for_hopper():
    found = json.loads(in_another_process(REPO / "tests/kernels/cast_aot.py"))
    assert len(found) == 29
    plain = {"norm", "sum and norm", "norm of heads", "norm backward", "swiglu", "swiglu backward"}
    for name, counts in found.items():
        assert counts[".local"] == counts["stack"] == 0, (name, counts)
        assert counts["ld.global.v4"] + counts["ld.global.v2.b64"] > 0, (name, counts)
        casts = not name.startswith("amax") and name.removesuffix(" bf16") not in plain
        assert (counts["cvt.rn.satfinite.e4m3x2.f32"] > 0) == casts, (name, counts)
        starts = name.removesuffix(" bf16") in EARLY
        assert (counts["first"][:2] == WAITS_AND_LETS_START) == starts, (name, counts)
        assert starts or "griddepcontrol" not in str(counts["first"]), (name, counts)
    for name in ("128x1", "both", "norm 128x1", "swiglu both", "swiglu backward both"):
        assert found[f"{name} bf16"]["max.u16x2"] > 0, "two magnitudes are compared at a time"


@needs_triton
def test_kernels_in_the_interpreter_equal_the_reference():
    interpreted(
        "from test_cast import *\n"
        "for shape, dtype in ((1, 16), torch.float32), ((7, 129), torch.float32), ((130, 300), torch.bfloat16):\n"
        "    x = torch.nan_to_num(random_matrix(shape, dtype), posinf=1.0)  # those are the GPU's to check\n"
        "    check_all(x, 'none')\n"
        "    check_all(x[:5], 'power_of_two', pad_to=(1, 128))\n"
        "check_slices(x, 'none')\n"
        "check_given_scale(x)\n"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (300, 576), (1000, 4100), (4096, 12288)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_casts_on_a_gpu_equal_the_reference(shape, dtype):
    x = random_matrix(shape, dtype, "cuda")
    check_all(x, "none")
    check_all(x[:, : max(1, shape[1] // 2)], "power_of_two")  # rows that lie further apart than they are long


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(300, 576), (1024, 1000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_padded_and_sliced_casts_on_a_gpu_equal_the_reference(shape, dtype):
    x = random_matrix(shape, dtype, "cuda")
    check_all(x, "none", pad_to=(1, 128))
    check_slices(x, "none")
    check_given_scale(x)


@pytest.mark.gpu
def test_every_bf16_value_against_many_scales():
    """The quotient without a division is the correctly rounded one wherever a byte depends on it."""
    values = torch.arange(0x7F80, device="cuda", dtype=torch.int16).view(torch.bfloat16).float()
    for _ in range(200):
        amax = torch.randint(0x3000, 0x4B00, (1,), device="cuda", dtype=torch.int16).view(torch.bfloat16).float()
        amax = amax * (1 + torch.rand(1, device="cuda"))
        x = torch.cat([values[values <= amax], amax])[None]
        q, scale = cast_rows(x)
        wanted, wanted_scale = quantize(x, PER_ROW)
        assert same(scale, wanted_scale)
        assert torch.equal(q.view(torch.uint8), wanted.view(torch.uint8)), f"amax {amax.item()}"


@pytest.mark.gpu
def test_the_scale_of_every_mantissa():
    amax = (torch.arange(2**23, device="cuda", dtype=torch.int32) + 0x3F800000).view(torch.float32)[:, None]
    assert same(cast_rows(amax)[1], scale_from_amax(amax))
