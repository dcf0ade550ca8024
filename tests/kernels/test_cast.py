"""Casts: bytes and scales of `numerics.fp8.quantize`, in the layout a GEMM reads, on every device."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from octavo.kernels.cast import cast_1x128, cast_128x1, cast_128x128, cast_both, cast_rows
from octavo.numerics.fp8 import BLOCK_1X128, BLOCK_128X1, BLOCK_128X128, PER_ROW, quantize, scale_from_amax

REPO = Path(__file__).resolve().parents[2]
SHAPES = [(1, 16), (7, 129), (130, 300), (3, 1), (128, 128)]  # one, odd, real
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal to the bit, or both NaN; E4M3 and FP32 are exact in FP32."""
    bits = (torch.nan_to_num(x.float(), nan=torch.inf).contiguous().view(torch.int32) for x in (found, wanted))
    return found.shape == wanted.shape and torch.equal(*bits)


def random_matrix(shape, dtype, device="cpu"):
    """Rows of very different magnitude; zeros, tiny values, a NaN and an infinity where there is room."""
    M, K = shape
    x = torch.randn(M, K) * torch.exp(torch.randn(M, 1) * 6)
    if M > 6 and K > 9:
        x[2, 5], x[3], x[4] = 0.0, 0.0, x[4] * 1e-30
        x[5, 7], x[6, 9] = torch.nan, torch.inf
    return x.to(dtype).to(device)


def check_all(x, rounding):
    """Every cast of x equals the reference."""
    rows, rows_scale = quantize(x, PER_ROW, rounding)
    plain, plain_scale = quantize(x, BLOCK_1X128, rounding)
    columns, columns_scale = quantize(x, BLOCK_128X1, rounding)
    block, block_scale = quantize(x, BLOCK_128X128, rounding)
    both = cast_both(x, rounding)
    weight, weight_t, weight_scale = cast_128x128(x, rounding)
    found = {
        "rows": (cast_rows(x, rounding), (rows, rows_scale)),
        "1x128": (cast_1x128(x, rounding), (plain, plain_scale)),
        "128x1": (cast_128x1(x, rounding), (columns.T, columns_scale.T)),
        "both, plain": (both[0], (plain, plain_scale)),
        "both, transposed": (both[1], (columns.T, columns_scale.T)),
        "128x128": ((weight, weight_scale), (block, block_scale)),
        "128x128, transposed": ((weight_t, weight_scale), (block.T, block_scale)),
    }
    wrong = [name for name, (mine, wanted) in found.items() if not all(map(same, mine, wanted))]
    assert not wrong, f"{tuple(x.shape)} {x.dtype} {rounding}: {wrong}"
    for _, scale in (found["1x128"][0], found["128x1"][0], *both):
        assert scale.shape[1] == 1 or scale.stride(0) == 1, "a GEMM wants scales contiguous along the outer dimension"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rounding", ["none", "power_of_two"])
def test_casts_on_a_cpu_are_the_reference(shape, rounding):
    check_all(random_matrix(shape, torch.bfloat16), rounding)


@pytest.mark.parametrize("cast", [cast_rows, cast_1x128, cast_128x1, cast_both, cast_128x128])
def test_what_is_no_row_major_matrix_is_refused(cast):
    for x in (torch.zeros(4), torch.zeros(4, 4, dtype=torch.int32), torch.zeros(8, 4).T):
        with pytest.raises(ValueError, match=f"{cast.__name__} wants a floating-point matrix"):
            cast(x)


def in_another_process(*arguments, **environment):
    settings = {
        **os.environ,
        "PYTHONPATH": f"{REPO}:{REPO}/tests/kernels:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    result = subprocess.run([sys.executable, *arguments], env=settings, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@needs_triton
def test_every_kernel_compiles_for_hopper_and_casts_in_hardware():
    found = json.loads(in_another_process(REPO / "tests/kernels/cast_aot.py"))
    assert len(found) == 20
    for name, counts in found.items():
        assert counts["cvt.rn.satfinite.e4m3x2.f32"] > 0 and counts[".local"] == 0, (name, counts)


@needs_triton
def test_kernels_in_the_interpreter_equal_the_reference():
    script = "from test_cast import *\ntorch.manual_seed(0)\n" + "\n".join(
        f"check_all(torch.nan_to_num(random_matrix({shape}, torch.{dtype}), posinf=1.0), '{rounding}')"
        for shape in SHAPES
        for dtype in ("float32", "bfloat16")
        for rounding in ("none", "power_of_two")
    )
    in_another_process("-c", script, TRITON_INTERPRET="1")  # NaN and infinity are the GPU's to check


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (300, 576), (128, 4096), (1000, 4100), (4096, 12288)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rounding", ["none", "power_of_two"])
def test_casts_on_a_gpu_equal_the_reference(shape, dtype, rounding):
    x = random_matrix(shape, dtype, "cuda")
    check_all(x, rounding)
    check_all(x[:, : max(1, shape[1] // 2)], rounding)  # rows that lie further apart than they are long


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
