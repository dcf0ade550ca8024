"""A GPU that the kernels are not for is refused in one line, before anything is read."""

import pytest
import torch

from octavo.kernels import device
from octavo.kernels.device import require_kernels
from octavo.models.checkpoint import load_decoder
from octavo.numerics.recipe import get_recipe


@pytest.fixture
def ada(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L40S")


def test_another_gpu_than_hopper_is_refused(ada):
    with pytest.raises(ValueError, match=r"for Hopper GPUs .*; NVIDIA L40S has 8.9. Use device=cpu, or precision"):
        load_decoder("no such folder", get_recipe("block128"), device="cuda")
    with pytest.raises(ValueError, match="NVIDIA L40S has 8.9"):
        require_kernels("cuda:1", "bf16")


def test_what_needs_no_kernel_is_not(ada):
    require_kernels("cuda", "fp32")
    require_kernels("cpu", "bf16")


def test_triton_is_needed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    require_kernels("cuda", "bf16")
    monkeypatch.setattr(device, "HAS_TRITON", False)
    with pytest.raises(ValueError, match="need triton, which is not installed"):
        require_kernels("cuda", "bf16")
