"""A GPU that the kernels are not for is refused in one line, before anything is read."""

import pytest
import torch

from octavo.kernels import device
from octavo.kernels.device import require_kernels
from octavo.models.checkpoint import load_decoder
from octavo.numerics.recipe import get_recipe
from octavo.trainer.run import use_device


@pytest.fixture
def ada(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
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


def test_without_a_gpu_there_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device='cuda:1' cannot be used here: torch sees no GPU. Use device=cpu"):
        load_decoder("no such folder", get_recipe("block128"), device="cuda:1")


@pytest.fixture
def hopper(monkeypatch):
    """Two of them."""
    current = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.__setitem__(0, torch.device(device).index))


def test_triton_launches_on_the_current_device(hopper, monkeypatch):
    with pytest.raises(ValueError, match=r"current device, cuda:0, and 'cuda:1' .* torch.cuda.set_device\(1\) first"):
        load_decoder("no such folder", get_recipe("block128"), device="cuda:1")
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    for name in ("cuda:1", "cuda"):
        use_device(name)
        require_kernels(name, "bf16")
        assert torch.cuda.current_device() == 1


def test_triton_is_needed(hopper, monkeypatch):
    require_kernels("cuda", "bf16")
    monkeypatch.setattr(device, "HAS_TRITON", False)
    with pytest.raises(ValueError, match="need triton, which is not installed"):
        require_kernels("cuda", "bf16")
