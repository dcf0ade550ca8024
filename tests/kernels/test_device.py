"""A GPU that the kernels are not for is refused in one line, before anything is read; the reference runs on it."""

from functools import partial

import pytest
import torch
from tiny_models import lay_end_to_end, random_prompts, tiny_config, tiny_decoder
from training_runs import tiny_config as tiny_run

from octavo.kernels import device
from octavo.kernels.device import choose_kernels, require_kernels
from octavo.layers.attention import PackedAttention
from octavo.models.checkpoint import load_decoder
from octavo.numerics.recipe import get_recipe
from octavo.rollout.engine import Engine, EngineConfig
from octavo.rollout.sampler import SamplingConfig
from octavo.trainer.metrics import Display
from octavo.trainer.run import load_run, use_device


@pytest.fixture(autouse=True)
def by_device():
    """The choice is the process's."""
    yield
    choose_kernels("by_device")


@pytest.fixture
def ada(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L40S")


def test_another_gpu_than_hopper_is_refused(ada):
    with pytest.raises(ValueError, match=r"for Hopper GPUs .*; NVIDIA L40S has 8.9. Use kernels=ref.*device=cpu, or"):
        load_decoder("no such folder", get_recipe("block128"), device="cuda")
    with pytest.raises(ValueError, match="NVIDIA L40S has 8.9"):
        require_kernels("cuda:1", "bf16")


TWO_FLOWS = {"train": "fp32", "rollout": "bf16", "allow_mismatch": True}


@pytest.mark.parametrize("recipe", [{"recipe": "block128"}, TWO_FLOWS])
def test_a_run_on_it_stops_before_anything_is_read(recipe, ada, tmp_path, monkeypatch):
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    config = tiny_run(tmp_path / "run", device="cuda", model={"path": "no such folder"}, precision=recipe)
    with pytest.raises(ValueError, match="NVIDIA L40S has 8.9. Use kernels=reference, .*, device=cpu, or"):
        load_run(config, Display())


def test_what_needs_no_kernel_is_not(ada):
    require_kernels("cuda", "fp32")
    require_kernels("cpu", "bf16")
    choose_kernels("reference")
    require_kernels("cuda:1", "bf16")


class OnGPU(torch.Tensor):
    """On a CPU, and says otherwise, as all that is computed from it."""

    is_cuda = True


def put_on_gpu(module):
    """A decoder or a cache that says so."""
    for owner in module.modules() if isinstance(module, torch.nn.Module) else [module]:
        parameters = getattr(owner, "_parameters", {})
        for name, value in parameters.items():
            if value is not None:
                parameters[name] = torch.nn.Parameter(value.detach().as_subclass(OnGPU))
        tensors = getattr(owner, "_buffers", owner.__dict__)
        for name, value in tensors.items():
            if isinstance(value, torch.Tensor):
                tensors[name] = value.as_subclass(OnGPU)
    return module


def one_step(decoder, kind):
    """Completions, and log-probabilities of random tokens with the gradients of all weights."""
    engine = Engine(decoder, EngineConfig(page_size=4, kv_cache_tokens=256), [])
    if kind is OnGPU:
        put_on_gpu(engine.cache)
    sampled = engine.generate(random_prompts(1, 2), SamplingConfig(temperature=0.8), max_completion_tokens=4)
    tokens, positions, boundaries = (x.as_subclass(kind) for x in lay_end_to_end(random_prompts(0, 3)))
    hidden = decoder(tokens, positions, PackedAttention(boundaries, decoder.recipe.kv_cache))
    logprobs, entropy = decoder.logprobs(hidden, tokens, 0.8)
    assert hidden.is_cuda == (kind is OnGPU)
    logprobs.sum().backward()
    return sampled, [logprobs.detach(), entropy, *(parameter.grad for parameter in decoder.parameters())]


@pytest.mark.parametrize("recipe", ["block128", "w8a16", "rowwise", "tensorwise_static", "bf16"])
def test_the_reference_works_on_a_gpu_where_it_is_chosen(recipe, monkeypatch):
    make = partial(tiny_decoder, tiny_config("qwen3"), get_recipe(recipe, kv_cache="fp8"))
    expected, numbers = one_step(make(), torch.Tensor)
    choose_kernels("reference")
    decoder = put_on_gpu(make())
    decoder.requantize_()
    found, others = one_step(decoder, OnGPU)
    assert found == expected
    assert all(torch.equal(x, y) and y.abs().sum() > 0 for x, y in zip(others, numbers, strict=True))
    choose_kernels("by_device")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises((RuntimeError, ValueError), match="driver|[Tt]riton"):  # a kernel was launched
        one_step(put_on_gpu(make()), OnGPU)


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
