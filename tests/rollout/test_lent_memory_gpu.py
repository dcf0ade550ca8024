"""Lent memory on a GPU: graphs go on over memory that was away, and torch has it meanwhile."""

import gc
import os

import pytest
import torch
from gpu_models import assert_exact, decoder_of, prompts_of, update_

from octavo.rollout.engine import Engine, EngineConfig
from octavo.rollout.lent_memory import expand_segments
from octavo.rollout.sampler import SamplingConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "PYTEST_XDIST_WORKER" in os.environ, reason="fills the GPU, and wants it alone: run this file without -n"
    ),
]
SLACK = 64 * 2**20
"""What the driver may take for itself."""


@pytest.mark.parametrize("kv_cache", ["fp8", "bf16"])
def test_graphs_sample_the_same_bits_before_and_after(kv_cache):
    decoder = decoder_of("smollm2", "block128", kv_cache=kv_cache)
    engine = Engine(decoder, EngineConfig(lend_memory=True, kv_cache_tokens=2**21, decode_steps=8), [1, 5])
    cache, prompts = engine.cache, prompts_of(40, 300)
    tensors = [x for x in (cache.k, cache.v, cache.k_scale, cache.v_scale) if x is not None]
    where, size = [x.data_ptr() for x in tensors], cache.memory.num_bytes
    assert all(x.device == decoder.embed_tokens.device for x in tensors) and size > 2**30  # two chunks or more

    def run():
        return engine.generate(prompts, SamplingConfig(temperature=0.8), max_completion_tokens=70, group_size=2)

    first = run()
    assert_exact(decoder, first, 0.8)
    graphs = dict(engine.decode._graphed[0.8]._graphs)
    for _ in range(2):
        torch.cuda.empty_cache()
        before = torch.cuda.mem_get_info()[0]
        engine.lend()
        lent = torch.cuda.mem_get_info()[0]
        assert size - SLACK <= lent - before <= size + SLACK
        filler = torch.full((lent - 2**30,), 0xFF, dtype=torch.uint8, device="cuda")  # all of it, and NaN
        assert torch.cuda.mem_get_info()[0] < 2**30 + SLACK
        assert_exact(decoder, first, 0.8)  # training's forward while it is lent
        with pytest.raises(ValueError, match=rf"the KV cache wants {size} bytes"):
            run()
        assert engine.uncounted_bytes() == 0
        del filler
        assert run() == first and [x.data_ptr() for x in tensors] == where
    assert graphs and engine.decode._graphed[0.8]._graphs == graphs, "replayed, not captured anew"
    update_(decoder, 1)
    engine.lend()
    other = run()
    assert other != first
    assert_exact(decoder, other, 0.8)


def test_pages_between_tensors_go_back():
    """A large tensor that is gone, and a small one in the midst of what torch keeps of it."""
    expand_segments()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    large = torch.empty(4 * 2**30, dtype=torch.uint8, device="cuda")
    del large
    several = [torch.empty(32 * 2**20, dtype=torch.uint8, device="cuda") for _ in range(64)]
    middle = several[31]
    assert torch.cuda.mem_get_info()[0] < before - 2**30
    del several
    torch.cuda.empty_cache()
    pages = 3 * 20 * 2**20  # that 32 MiB may lie in
    assert torch.cuda.mem_get_info()[0] >= before - pages - SLACK and middle.numel() == 32 * 2**20


def test_what_an_engine_had_goes_back_with_it():
    decoder = decoder_of("smollm2", "block128", kv_cache="fp8")
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    for lends in (False, True):
        engine = Engine(decoder, EngineConfig(lend_memory=True, kv_cache_tokens=2**21), [1])
        assert torch.cuda.mem_get_info()[0] < before - 2**30
        if lends:
            engine.lend()
        del engine
        gc.collect()
        torch.cuda.empty_cache()
        assert torch.cuda.mem_get_info()[0] >= before - SLACK
