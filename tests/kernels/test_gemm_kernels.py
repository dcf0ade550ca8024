"""The kernels of matrix products without a GPU: compiled for Hopper, and run by Triton's interpreter."""

import importlib.util
import json

import pytest
from test_cast import REPO, in_another_process

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


@needs_triton
def test_every_product_compiles_for_hopper_onto_its_tensor_cores():
    found = json.loads(in_another_process(REPO / "tests/kernels/gemm_aot.py"))
    assert len(found) == 24
    for name, counts in found.items():
        kind = name.split()[-2]
        inputs = "e4m3.e4m3" if kind in ("block", "row") else "bf16.bf16"
        assert counts["wgmma.mma_async"] == counts[inputs] > 0 and counts[".local"] == 0, (name, counts)
        assert counts["cp.async.bulk.tensor"] > 0, (name, counts)
        assert (counts["griddepcontrol.wait"] > 0) == name.startswith("decode"), (name, counts)


INTERPRETED = """
import torch
from octavo.kernels import triton_gemm
from octavo.kernels.gemm import gemm
from octavo.kernels.operands import quantize_matrix
from octavo.numerics.fp8 import BLOCK_1X128, BLOCK_128X128

triton_gemm.HAS_GLUON = False  # the interpreter runs plain Triton
torch.manual_seed(0)
for M, N, K in ((1, 128, 128), (20, 200, 256), (150, 72, 384)):
    x, w, bias = torch.randn(M, K), torch.randn(N, K), torch.randn(N).bfloat16()
    left, right = quantize_matrix(x, BLOCK_1X128), quantize_matrix(w, BLOCK_128X128)
    exact = gemm(left.operand(), right.operand()) + bias.double()
    scale = left.scale.T.contiguous().T
    got = triton_gemm.triton_product("block", left.q, right.q, scale, right.scale, None, torch.float32) + bias
    assert got.shape == (M, N) and exact.abs().max() > 1
    assert (got.double() - exact).abs().max() < 1e-5 * exact.abs().max(), (M, N, K)
    decoded = triton_gemm.decode_weight(right.q, right.scale, K)
    assert torch.allclose(decoded.float(), right.dequantize(), rtol=2.0**-7, atol=0.0)  # it cuts BF16 off
    part = triton_gemm.decode_weight(right.q, right.scale, K - 56)
    assert part.is_contiguous() and torch.equal(part, decoded[:, : K - 56])
    right.scale[0, 0] *= 2.0
    other = triton_gemm.triton_product("block", left.q, right.q, scale, right.scale, None, torch.float32)
    assert (other + bias - got).abs()[:, :128].amax() > 0.01
"""


@needs_triton
def test_a_product_by_blocks_in_the_interpreter_is_the_reference():
    in_another_process("-c", INTERPRETED, TRITON_INTERPRET="1")


@pytest.mark.parametrize("kind", ["block", "row", "bf16", "w8a16"])
def test_stages_fit_in_the_shared_memory_of_a_multiprocessor(kind):
    from octavo.kernels import decode_gemm

    for rows in (16, 32, 64):
        (w_rows, columns), (x_rows, x_columns) = decode_gemm.boxes(kind, rows)
        assert columns == x_columns and decode_gemm.num_stages(kind, rows) >= 2
        w_bytes, x_bytes = {"block": (1, 1), "row": (1, 1), "bf16": (2, 2), "w8a16": (1, 2)}[kind]
        stage = 4 * columns * (w_rows * w_bytes + x_rows * x_bytes) + 4 * 4 * max(rows, 32)
        assert decode_gemm.num_stages(kind, rows) * stage + 256 <= 227 * 1024


def test_kernels_import_without_triton():
    script = (
        "import importlib.util as u, sys\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name.split('.')[0] == 'triton' else find(name, *rest)\n"
        "sys.modules['triton'] = None\n"
        "from octavo.kernels import decode_gemm, gemm, triton_gemm, triton_shim\n"
        "assert not triton_shim.HAS_TRITON and not triton_shim.HAS_GLUON\n"
        "import torch\n"
        "try:\n"
        "    triton_gemm.triton_product('bf16', torch.ones(1, 8), torch.ones(1, 8), None, None, None, torch.float32)\n"
        "except ValueError as error:\n"
        "    assert 'needs triton, which is not installed' in str(error), error\n"
        "else:\n"
        "    sys.exit('no error')\n"
    )
    in_another_process("-c", script)


def test_what_compute_sanitizer_watches_runs():
    assert "every kernel ran on cpu" in in_another_process(REPO / "tests/kernels/small_shapes.py", "cpu")
