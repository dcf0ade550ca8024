"""The sampler's kernel in Triton's interpreter; test_lm_head.py compiles it for Hopper."""

import importlib.util

import pytest
from test_lm_head import in_another_process


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernel_in_the_interpreter():
    script = """
import warnings
from sampling_checks import *
warnings.simplefilter("ignore")  # NumPy's, of NaN and of the random numbers' products
torch.manual_seed(0)
check_draws("cpu")
check_edges("cpu")
check_greedy("cpu")
"""
    in_another_process("-c", script, TRITON_INTERPRET="1")
