"""Memory under addresses that stay: over a driver that works in the host's memory, with faults at each of its calls."""

import ctypes
import gc
import re

import pytest
import torch
from fake_driver import OUT_OF_MEMORY, STALE, pretend_driver
from tiny_models import random_prompts, tiny_config, tiny_decoder

from octavo.numerics.fp8 import E4M3
from octavo.numerics.recipe import get_recipe
from octavo.rollout import lent_memory
from octavo.rollout.engine import Engine, EngineConfig
from octavo.rollout.lent_memory import LentMemory, expand_segments, tensor_bytes
from octavo.rollout.sampler import SamplingConfig

CUDA = torch.device("cuda", 0)


@pytest.fixture
def driver(monkeypatch):
    monkeypatch.setattr(lent_memory, "CHUNK_BYTES", 10_000)  # 12,288 whole pages
    yield from pretend_driver(monkeypatch)


def tensors_of(cache):
    return [x for x in (cache.k, cache.v, cache.k_scale, cache.v_scale) if x is not None]


def test_structures_lie_as_the_driver_reads_them():
    properties, access = lent_memory.Properties, lent_memory.Access
    assert ctypes.sizeof(properties) == 32 and ctypes.sizeof(access) == 12
    assert [getattr(properties, name).offset for name, _ in properties._fields_] == [0, 4, 8, 16, 24]
    assert access.flags.offset == 8


def test_tensors_share_the_memory_one_after_another(driver):
    wanted = [((3, 50, 7), E4M3), ((100,), torch.float32), ((2, 9), torch.bfloat16)]
    assert [tensor_bytes(*each) for each in wanted] == [1536, 512, 512]
    memory = LentMemory(30_000, CUDA)
    assert memory.num_bytes == memory.mapped_bytes == 32_768
    assert list(driver.mapped.values()) == [12_288, 12_288, 8_192] and not driver.handles
    tensors = [memory.tensor(*each) for each in wanted]
    assert [(tuple(x.shape), x.dtype) for x in tensors] == wanted
    first = min(driver.mapped)
    assert [x.data_ptr() - first for x in tensors] == [0, 1536, 2048] and first in driver.accessible
    tensors[1].fill_(2.5)
    assert (tensors[0].view(torch.uint8) == STALE).all() and (tensors[1] == 2.5).all()
    assert (ctypes.c_float * 100).from_address(first + 1536)[99] == 2.5
    with pytest.raises(AssertionError, match="does not fit"):
        memory.tensor((40_000,), torch.int8)


def test_lending_gives_all_of_it_and_keeps_the_addresses(driver):
    memory = LentMemory(30_000, CUDA)
    x = memory.tensor((30_000,), torch.int8)
    where, free = x.data_ptr(), driver.free
    driver.calls.clear()
    memory.lend()
    assert driver.calls == ["synchronize"] + ["cuMemUnmap"] * 3
    assert driver.free == free + 32_768 and memory.mapped_bytes == 0 and not driver.mapped
    memory.lend()
    assert len(driver.calls) == 4, "once"
    assert memory.take_back() and not memory.take_back()
    assert driver.calls[4:] == [
        "empty_cache",
        *["cuMemCreate", "cuMemMap", "cuMemRelease"] * 3,
        "cuMemSetAccess",
    ]
    assert x.data_ptr() == where and driver.free == free and (x == STALE).all()


@pytest.mark.parametrize(
    "name, count", [("cuMemCreate", 1), ("cuMemCreate", 3), ("cuMemMap", 1), ("cuMemMap", 3), ("cuMemSetAccess", 1)]
)
@pytest.mark.parametrize("code", [OUT_OF_MEMORY, 801])
def test_what_fails_leaves_nothing_half_mapped(name, count, code, driver):
    memory = LentMemory(30_000, CUDA)
    x = memory.tensor((100,), torch.float32)
    memory.lend()
    driver.calls.clear()
    free, driver.faults = driver.free, {(name, count): code}
    wanted = "32768 bytes .* Lower" if code == OUT_OF_MEMORY else f"{name}: operation not supported .801.. Set it to"
    with pytest.raises(ValueError, match=wanted):
        memory.take_back()
    assert not driver.mapped and not driver.handles and driver.free == free
    driver.faults.clear()
    assert memory.take_back()
    x.fill_(1.0)
    assert memory.mapped_bytes == 32_768


def test_what_is_missing_is_named_in_bytes(driver):
    memory = LentMemory(30_000, CUDA)
    memory.lend()
    driver.free = 25_000
    with pytest.raises(ValueError) as caught:
        memory.take_back()
    message = str(caught.value)
    assert message.startswith("the KV cache wants 32768 bytes (0.00 GiB) of cuda:0, where 25000 (0.00 GiB) are free")
    assert "2.00 GiB lie unused between torch's tensors" in message and "\n" not in message
    assert re.search(r"Lower rollout\.engine\.kv_cache_tokens; with PYTORCH_CUDA_ALLOC_CONF=", message)


@pytest.mark.parametrize(
    "value, other, given",
    [
        (None, None, ["expandable_segments:True"]),
        ("", None, ["expandable_segments:True"]),
        ("max_split_size_mb:512", None, ["max_split_size_mb:512,expandable_segments:True"]),
        ("roundup_power2_divisions:[256:1,>:4]", "", ["roundup_power2_divisions:[256:1,>:4],expandable_segments:True"]),
        ("max_split_size_mb:512,expandable_segments:False", None, []),
        ("expandable_segments:True", "max_split_size_mb:512", []),
    ],
)
@pytest.mark.parametrize(
    "names", [("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"), ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
)
def test_segments_are_expandable_and_what_else_the_environment_says_stays(value, other, given, names, monkeypatch):
    settings = []
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", settings.append)
    for name, text in zip(names, (value, other), strict=True):
        monkeypatch.delenv(name, raising=False)
        if text is not None:
            monkeypatch.setenv(name, text)
    expand_segments()
    assert settings == given


@pytest.mark.parametrize("given", ["", "max_split_size_mb:512", "garbage_collection_threshold:0.8,backend:native"])
def test_torch_takes_the_settings_without_a_word(given, monkeypatch, recwarn):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", given)
    expand_segments()
    assert not recwarn.list


@pytest.mark.parametrize(
    "name, code", [("cuMemGetAllocationGranularity", 801), ("cuMemAddressReserve", 2), ("cuMemCreate", 2)]
)
def test_a_memory_that_cannot_be_made_leaves_nothing(name, code, driver):
    driver.faults[name, 1] = code
    with pytest.raises(ValueError, match="Set it to false" if code == 801 else "the KV cache wants 32768 bytes"):
        LentMemory(30_000, CUDA)
    gc.collect()
    assert not driver.reserved and not driver.mapped


@pytest.mark.parametrize("lent", [True, False])
def test_it_is_freed_with_its_last_tensor(lent, driver):
    memory = LentMemory(30_000, CUDA)
    x, free = memory.tensor((10,), torch.float32), driver.free
    if lent:
        memory.lend()
    driver.calls.clear()
    del memory
    gc.collect()
    assert len(driver.reserved) == 1 and not driver.calls
    del x
    gc.collect()
    assert not driver.reserved and not driver.mapped and driver.free == free + 32_768
    assert ("synchronize" in driver.calls) != lent, "a graph may be under way, which no wait may interrupt"


def test_no_driver_and_no_gpu_are_said(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    lent_memory.cuda_driver.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(ValueError, match=r"needs NVIDIA's driver.*libcuda\.so\.1: cannot open.*Set it to false"):
        lent_memory.cuda_driver()
    decoder = tiny_decoder(tiny_config("qwen3"), get_recipe("block128"))
    with pytest.raises(ValueError, match="lends the memory of a CUDA device, and the model is on cpu"):
        Engine(decoder, EngineConfig(lend_memory=True), ())


@pytest.mark.parametrize("kv_cache", ["fp8", "bf16"])
def test_rollouts_before_and_after_have_the_same_bits(kv_cache, driver):
    decoder = tiny_decoder(tiny_config("qwen3"), get_recipe("block128", kv_cache=kv_cache))
    settings = {"page_size": 4, "kv_cache_tokens": 80}  # sequences are preempted
    plain, engine = (Engine(decoder, EngineConfig(lend_memory=lends, **settings), (3,)) for lends in (False, True))
    assert plain.uncounted_bytes() == 0 < engine.uncounted_bytes() == engine.cache.memory.num_bytes
    tensors = tensors_of(engine.cache)
    where = [x.data_ptr() for x in tensors]

    def run(engine):
        return engine.generate(random_prompts(10, 4), SamplingConfig(), max_completion_tokens=20, group_size=2)

    expected = run(plain)
    for _ in range(2):
        assert run(engine) == expected and engine.num_preemptions > 0
        engine.lend()
        assert engine.uncounted_bytes() == 0 and not driver.mapped
    engine.cache.take_back()
    assert [x.data_ptr() for x in tensors] == where
    for found, new in zip(tensors, tensors_of(plain.cache), strict=True):
        assert found.shape == new.shape and found.dtype == new.dtype
    assert all((x.view(torch.uint8) == 0).all() for x in tensors[:2]), "as new"
    assert all((x == 1.0).all() for x in tensors[2:])


def test_an_engine_that_gets_no_memory_says_so_and_samples_when_there_is_some(driver):
    decoder = tiny_decoder(tiny_config("qwen3"), get_recipe("block128"))
    engine = Engine(decoder, EngineConfig(page_size=4, kv_cache_tokens=400, lend_memory=True), ())

    def run():
        return engine.generate([[5, 6]], SamplingConfig(), max_completion_tokens=5)

    first = run()
    engine.lend()
    free, driver.free = driver.free, 100
    with pytest.raises(ValueError, match=r"the KV cache wants \d+ bytes"):
        run()
    driver.free = free
    assert run() == first


def test_without_lending_no_driver_is_loaded(monkeypatch):
    monkeypatch.setattr(lent_memory, "cuda_driver", None)  # a call would be a TypeError
    engine = Engine(tiny_decoder(tiny_config("qwen3"), get_recipe("block128")), EngineConfig(kv_cache_tokens=64), ())
    engine.lend()
    assert engine.generate([[5, 6]], SamplingConfig(), max_completion_tokens=5)
    assert engine.cache.memory is None
