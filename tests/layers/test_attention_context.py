"""Attention inside a decoder, by its kernels: gradients of what was projected, pages, and rollout equal to training."""

import pytest
from kernel_checks import interpreted, needs_triton


@needs_triton
def test_gradients_and_pages_in_the_interpreter():
    interpreted(
        "from attention_layers import *\n"
        "check_gradients('fp8', [40, 3, 27], (4, 2, 64))\n"
        "check_gradients('bf16', [66], (3, 1, 24))\n"
        "check_cache_equals_packed('fp8', [70, 1, 2], (4, 2, 64))\n"
    )


@needs_triton
@pytest.mark.parametrize("kv_format", ["bf16", "fp8"])
def test_rollout_equals_training_in_the_interpreter(kv_format):
    interpreted(
        "import pytest\n"
        "from attention_layers import *\n"
        "with pytest.MonkeyPatch.context() as patch:\n"
        f"    check_rollout_equals_training('{kv_format}', patch)\n"
    )
