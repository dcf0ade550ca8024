"""The kernels of lm_head without a GPU: compiled for Hopper, and their numbers in Triton's interpreter."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_checks import WAITS_AND_LETS_START
from lm_head_checks import as_operand, problem

from octavo.kernels import lm_head, lm_head_gradients
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
    assert len(found) == 12
    for name, counts in found.items():
        multiplies = name.startswith(("_sums", "_logits", "_multiplied"))
        assert (counts["wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16"] > 0) == multiplies, (name, counts)
        assert (counts["cp.async.bulk.tensor"] > 0) == multiplies, (name, counts)
        assert counts["shared"] <= 227 * 1024, (name, counts)  # of a multiprocessor of an H100 or H200
        limit = 192 if name == "_sums_kernel, few rows, kept" else 128  # some words, once a tile; no tile
        assert counts[".local"] == 0 and counts["stack"] <= limit, (name, counts)
        wide = name.endswith("kept") or name.startswith(("_logits", "_multiplied", "_kept"))
        assert (counts["st.global.v4"] > 0) == wide, (name, counts)
        assert (counts["ld.global.v4"] > 0) == name.startswith(("_kept", "_row_sums")), (name, counts)
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
        check_grad_logits(*given, temperature, start)
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
def test_gradients_from_what_the_forward_keeps_in_the_interpreter():
    """Ragged tiles and chunks; a token beyond the vocabulary; a certain token, whose gradient is 0."""
    script = """
from lm_head_checks import *
import pytest

def mm(x, w, *, out_dtype, out):  # a CPU's has no such result
    return out.copy_(x.to(out_dtype) @ w.to(out_dtype))

def addmm(y, x, w, *, out_dtype, out):
    return out.add_(x.to(out_dtype) @ w.to(out_dtype))

torch.manual_seed(0)
monkeypatch = pytest.MonkeyPatch()
monkeypatch.setattr(torch, 'mm', mm)
monkeypatch.setattr(torch, 'addmm', addmm)
monkeypatch.setattr(lm_head, 'MIN_GRAD_COLUMNS', 512)
monkeypatch.setattr(lm_head, 'GRAD_LOGITS_PER_CHUNK', 1)
few, many = problem(5, 72, 1111), problem(66, 128, 600)
for given, temperature in ((few, 1.0), (many, 0.8)):
    check_kept_grad_logits(*given, temperature)
    with monkeypatch.context() as patch:
        check_kept_gradients(*given, temperature, patch)
hidden, weight, tokens = few
beyond = tokens.clone()
beyond[2], beyond[4] = len(weight), len(weight) + 200
assert token_logprobs(hidden, weight.float(), as_operand(weight), beyond, 1.0)[0].isnan().tolist() == [0, 0, 1, 0, 1]
check_kept_grad_logits(hidden, weight, beyond, 1.0)
hidden, weight = torch.ones(2, 8).bfloat16().requires_grad_(), torch.zeros(600, 8).bfloat16()
weight[7] = 125.0
master = weight.float().requires_grad_()
token_logprobs(hidden, master, as_operand(weight), torch.tensor([7, 599]), 1.0)[0].sum().backward()
assert hidden.grad[0].eq(0.0).all() and hidden.grad[1].eq(-125.0).all()  # of the second -1 to the certain token
assert master.grad[7].eq(-1.0).all() and master.grad[599].eq(1.0).all() and master.grad.abs().sum() == 16.0
"""
    in_another_process("-c", script, TRITON_INTERPRET="1")


def test_what_is_kept_is_bounded():
    most = lm_head_gradients.MAX_KEPT_BYTES
    assert lm_head_gradients.kept_bytes(16384, 151936) == 2 * 16384 * 151936 + 4 * 16384 * 594 < most
    assert lm_head_gradients.kept_bytes(32768, 151936) == lm_head_gradients.kept_bytes(0, 151936) == 0
    assert lm_head_gradients.kept_bytes(most // 2048, 1024) == most + 16 * (most // 2048)
    assert lm_head_gradients.kept_bytes(most // 2048 + 1, 1024) == 0


@needs_triton
def test_only_a_forward_that_wants_a_gradient_keeps_anything(monkeypatch):
    asked = []

    def softmax_sums(hidden, weight, tokens, temperature, keep):
        asked.append(keep)
        return torch.zeros(len(hidden)), torch.zeros(len(hidden), dtype=torch.float64), torch.zeros(len(hidden)), None

    monkeypatch.setattr(lm_head, "softmax_sums", softmax_sums)
    hidden, weight, tokens = problem(5, 16, 300)
    leaf, master, operand = hidden.clone().requires_grad_(), weight.float().requires_grad_(), as_operand(weight)
    for given in ((hidden, weight.float()), (leaf, weight.float()), (hidden, master)):
        token_logprobs(*given, operand, tokens, 1.0)
    token_logprobs(leaf, master, operand, tokens, 1.0, recompute=True)
    with torch.no_grad():
        token_logprobs(leaf, master, operand, tokens, 1.0)
    assert asked == [False, True, True, False, False]


@needs_triton
def test_a_hidden_size_that_rows_of_16_bytes_do_not_divide_is_refused():
    hidden, weight, tokens = problem(2, 20, 300)
    with pytest.raises(ValueError, match="hidden size is a multiple of 8; got 20"):
        token_logprobs(hidden, weight.float(), as_operand(weight), tokens, 1.0)
