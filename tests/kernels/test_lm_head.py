"""The kernels of lm_head without a GPU: compiled for Hopper, and their numbers in Triton's interpreter."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_checks import WAITS_AND_LETS_START
from lm_head_checks import as_operand, problem

from octavo.kernels.logprobs import token_logprobs

REPO = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def in_another_process(*arguments, **environment):
    paths = f"{REPO}:{REPO}/tests/kernels:{os.environ.get('PYTHONPATH', '')}"
    settings = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment}
    result = subprocess.run([sys.executable, *arguments], env=settings, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


@needs_triton
def test_every_kernel_compiles_for_hopper():
    found = json.loads(in_another_process(REPO / "tests/kernels/lm_head_aot.py"))
    assert len(found) == 9
    for name, counts in found.items():
        multiplies = name.startswith(("_sums", "_logits", "_grad"))
        assert (counts["wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16"] > 0) == multiplies, (name, counts)
        assert (counts["cp.async.bulk.tensor"] > 0) == multiplies, (name, counts)
        assert counts["shared"] <= 227 * 1024, (name, counts)  # of a multiprocessor of an H100 or H200
        assert counts[".local"] == 0 and counts["stack"] <= 128, (name, counts)  # some words, once a tile; no tile
        early = name.startswith(("_logits", "_row_sums", "_combine", "_draw"))
        assert (counts["first"][:2] == WAITS_AND_LETS_START) == early, (name, counts)
        # A logit is rounded before anything is taken from it, as one that was stored is.
        assert counts["fma.rn.f32"] == 0, (name, counts)


@needs_triton
def test_kernels_in_the_interpreter():
    script = """
from lm_head_checks import *
torch.manual_seed(0)
few, many = problem(5, 72, 700), problem(66, 128, 300)
for given, temperature in ((few, 1.0), (few, 0.8), (many, 0.8)):
    check_values(*given, temperature)
    for start in (0, 256):
        check_grad_logits(*given, temperature, start, limit=4.0)  # the interpreter cuts off instead of rounding
hidden, weight, tokens = many
whole, some = (
    token_logprobs(hidden[rows], weight.float(), as_operand(weight), tokens[rows], 0.8)[0]
    for rows in (slice(66), slice(3))
)
assert torch.equal(some, whole[:3])
check_edges('cpu')
"""
    in_another_process("-c", script, TRITON_INTERPRET="1")  # NaN and infinity are the GPU's to check


@needs_triton
def test_a_hidden_size_that_rows_of_16_bytes_do_not_divide_is_refused():
    hidden, weight, tokens = problem(2, 20, 300)
    with pytest.raises(ValueError, match="hidden size is a multiple of 8; got 20"):
        token_logprobs(hidden, weight.float(), as_operand(weight), tokens, 1.0)
