"""kernels=reference on a GPU: a run in plain torch, exact too, as on a card that the kernels are not for."""

import os

import pytest
import torch
from training_runs import read_lines, run, tiny_config

from octavo.kernels import triton_shim
from octavo.kernels.device import choose_kernels

pytestmark = pytest.mark.gpu


@pytest.fixture
def another_card(monkeypatch):
    """One that is no Hopper, on a machine without triton: any kernel that is launched all the same raises."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    monkeypatch.setattr(triton_shim, "HAS_TRITON", False)
    yield
    choose_kernels("by_device")


@pytest.mark.parametrize(
    "recipe, kv_cache, products",
    [
        ("block128", "fp8", "FP8 simulated by exact sums on cuda"),
        ("w8a16", "fp8", "FP8 simulated by exact sums on cuda"),
        ("bf16", "bf16", "exact sums on cuda"),
    ],
)
def test_two_steps_are_exact_without_a_kernel(recipe, kv_cache, products, another_card, tmp_path):
    changes = {"kernels": "reference", "trainer__num_steps": 2, "evaluation__interval": 2}
    precision = {"recipe": recipe, "kv_cache": kv_cache}
    printed = run(tiny_config(tmp_path / "run", device="cuda", precision=precision, **changes))
    assert products in printed, printed
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    assert [line["mismatch/max_abs_logprob_diff"] for line in lines] == [0.0, 0.0]
    assert all(line["policy/ratio_std"] > 0.0 and line["optimizer/grad_norm"] > 0.0 for line in lines)


def test_the_fp32_recipe_needs_no_choice(tmp_path):
    changes = {"precision__recipe": "fp32", "trainer__num_steps": 2, "evaluation__interval": 2}
    run(tiny_config(tmp_path / "run", device="cuda", **changes))
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    assert [line["mismatch/max_abs_logprob_diff"] for line in lines] == [0.0, 0.0]


def test_the_card_is_named_without_the_choice(another_card, tmp_path):
    with pytest.raises(ValueError, match=r"has 8\.9\. Use kernels=reference") as caught:
        run(tiny_config(tmp_path / "run", device="cuda"))
    assert torch.cuda.get_device_name() in str(caught.value) and not os.path.exists(tmp_path / "run/metrics.jsonl")
