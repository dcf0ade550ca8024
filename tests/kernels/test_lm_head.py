"""The kernels of lm_head without a GPU: compiled for Hopper, and their numbers in Triton's interpreter."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
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
    assert len(found) == 6
    for name, counts in found.items():
        multiplies = name.startswith(("_sums", "_logits", "_grad"))
        assert (counts["wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16"] > 0) == multiplies, (name, counts)
        assert (counts["cp.async.bulk.tensor"] > 0) == multiplies, (name, counts)
        assert counts[".local"] == 0 and counts["stack"] <= 128, (name, counts)  # some words, once a tile; no tile
        # A logit is rounded before anything is taken from it, as one that was stored is.
        assert counts["fma.rn.f32"] == 0, (name, counts)


@needs_triton
def test_kernels_in_the_interpreter():
    script = """
from lm_head_checks import *
torch.manual_seed(0)
for num_tokens, width, vocabulary in ((5, 72, 700), (66, 128, 520)):
    given = problem(num_tokens, width, vocabulary)
    for temperature in (1.0, 0.8):
        check_values(*given, temperature)
    check_grad_logits(*given, 0.8, 0, limit=4.0)  # the interpreter cuts off instead of rounding
    check_grad_logits(*given, 0.8, 256, limit=4.0)
    whole = token_logprobs(given[0], given[1].float(), as_operand(given[1]), given[2], 0.8)[0]
    some = token_logprobs(given[0][2:5], given[1].float(), as_operand(given[1]), given[2][2:5], 0.8)[0]
    assert torch.equal(some, whole[2:5])
check_bad_rows(*problem(6, 64, 300))
check_edges('cpu')
"""
    in_another_process("-c", script, TRITON_INTERPRET="1")


@needs_triton
def test_a_hidden_size_that_rows_of_16_bytes_do_not_divide_is_refused():
    hidden, weight, tokens = problem(2, 20, 300)
    with pytest.raises(ValueError, match="hidden size is a multiple of 8; got 20"):
        token_logprobs(hidden, weight.float(), as_operand(weight), tokens, 1.0)
