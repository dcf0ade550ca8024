"""What the tests of Triton kernels share: equality to the bit, padding, a process with the interpreter on."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

REPO = Path(__file__).resolve().parents[2]
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
WAITS_AND_LETS_START = ["griddepcontrol.wait", "griddepcontrol.launch_dependents"]
"""What an early kernel begins with, in this order and before any access to global memory."""


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal to the bit, or both NaN; E4M3, BF16 and FP32 are exact in FP32."""
    bits = (torch.nan_to_num(x.float(), nan=torch.inf).contiguous().view(torch.int32) for x in (found, wanted))
    return found.shape == wanted.shape and torch.equal(*bits)


def padded(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """A matrix with zeros up to multiples of rows and columns."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))


def in_another_process(*arguments, **environment) -> str:
    """What a Python process prints that can import the tests of this folder."""
    settings = {
        **os.environ,
        "PYTHONPATH": f"{REPO}:{REPO}/tests:{REPO}/tests/kernels:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    result = subprocess.run([sys.executable, *arguments], env=settings, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def interpreted(script: str) -> None:
    """Run a script whose kernels the interpreter runs, on CPU tensors, from a fixed seed."""
    in_another_process("-c", f"import torch\ntorch.manual_seed(0)\n{script}", TRITON_INTERPRET="1")
