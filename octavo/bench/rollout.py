"""`octavo bench rollout`: decode steps of a model's shape on this GPU, beside the bound that its memory sets.

    bound = (weights + keys and values of every sequence, each read once a step) / copy speed of the GPU

Weights are random. A step is the engine's own: graphs, sampling and the host's look every `decode_steps` included.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from transformers import PretrainedConfig

from octavo.bench.measure import copy_speed, kernel_milliseconds, require_cuda
from octavo.kernels.device import require_kernels
from octavo.kernels.early_launch import one_after_another
from octavo.layers.linear import quantized_layers
from octavo.models.config import DecoderConfig
from octavo.models.decoder import Block, Decoder, drop_masters_
from octavo.numerics.recipe import Recipe
from octavo.rollout.engine import Engine, EngineConfig
from octavo.rollout.kv_cache import KVCache
from octavo.rollout.sampler import SamplingConfig
from octavo.rollout.scheduler import PromptGroup
from octavo.rollout.scheduler import Sequence as Running
from octavo.trainer.memory_held import forward_bytes

NEW_TOKENS = 128
"""Of each sequence, for which there is room while its steps are measured."""


@dataclass(frozen=True, kw_only=True)
class DecodeSpeed:
    """One decode step of a batch, all of whose sequences have the same context."""

    batch: int
    """Sequences."""
    context: int
    """Tokens before the step, of each."""
    step_ms: float
    """Median over calls of several steps."""
    bound_ms: float
    """At the copy speed."""

    @property
    def tok_s(self) -> float:
        """Tokens of all sequences a second."""
        return self.batch / self.step_ms * 1e3

    @property
    def bandwidth_share(self) -> float:
        """Of the bound."""
        return self.bound_ms / self.step_ms


def decode_speeds(
    config: DecoderConfig,
    hf_config: PretrainedConfig,
    recipe: Recipe,
    batches: Sequence[int],
    contexts: Sequence[int],
) -> list[DecodeSpeed]:
    """Every batch at every context, with random weights.

    Raises:
        ValueError: no GPU, one without the kernels, a context beyond the model's positions, or weights or keys and
            values that do not fit.
    """
    require_cuda("octavo bench rollout")
    require_kernels("cuda", recipe.high_precision)
    longest = max(contexts) + NEW_TOKENS
    if longest > config.max_positions:
        raise ValueError(
            f"a context of {max(contexts)} tokens and {NEW_TOKENS} to decode are more than the model's "
            f"{config.max_positions} positions. Give a --context of at most {config.max_positions - NEW_TOKENS}"
        )
    try:
        decoder = random_decoder(config, hf_config, recipe, longest)
    except torch.OutOfMemoryError as error:
        gigabytes = forward_bytes(config, recipe, on_gpu=True).stored / 1e9
        raise ValueError(
            f"the weights take {gigabytes:.0f} GB in {recipe.name}, which this GPU did not give. Take a smaller model"
        ) from error
    num_tokens, free = max(batches) * longest, torch.cuda.mem_get_info()[0]
    if max(batches) > max_batch(decoder, longest, free):
        raise ValueError(
            f"the keys and values of {max(batches)} sequences of {longest} tokens do not fit into the {free / 1e9:.0f} "
            f"GB that the weights leave. Give a smaller --batch or --context, or --kv-cache fp8"
        )
    engine_config = EngineConfig(kv_cache_tokens=num_tokens, max_sequences=max(batches))
    pairs = [(batch, context) for context in contexts for batch in batches]
    return bench_decode(decoder, pairs, copy_speed(), engine_config)


@torch.no_grad()
def random_decoder(
    config: DecoderConfig,
    hf_config: PretrainedConfig,
    recipe: Recipe,
    max_tokens: int,
    device: str = "cuda",
    masters: bool = False,
) -> Decoder:
    """A decoder with random weights; without the masters of its matrices it can sample, and no more.

    Then masters are there of one layer at a time, so a model fits whose masters together would not.
    """
    with torch.device(device):
        decoder = Decoder(replace(config, num_layers=0), hf_config, recipe, max_tokens=max_tokens)
        _fill(decoder)
        decoder.requantize_() if masters else decoder.quantize_onto_(device)
        for index in range(config.num_layers):
            block = Block(config, recipe, index)
            _fill(block)
            for layer in quantized_layers(block):
                layer.requantize_()
            if not masters:
                drop_masters_(block)
            decoder.layers.append(block)
    decoder.config = config
    torch.cuda.empty_cache()  # what is left is what the device says
    return decoder


def _fill(module: nn.Module) -> None:
    for name, parameter in module.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)


def step_bytes(decoder: Decoder, batch: int, context: int) -> int:
    """What a decode step must read: weights and lm_head once, keys and values of every sequence."""
    weights = sum(
        buffer.nbytes
        for layer in quantized_layers(decoder)
        for name, buffer in layer.named_buffers()
        if name.startswith("weight_")
    )
    config, recipe = decoder.config, decoder.recipe
    head = (decoder.embed_hp if decoder.lm_head is None else decoder.lm_head_hp).nbytes
    row = config.head_dim + 4 if recipe.kv_cache == "fp8" else 2 * config.head_dim
    return weights + head + 2 * config.num_layers * config.num_kv_heads * row * batch * context


def max_batch(decoder: Decoder, context: int, free_bytes: int) -> int:
    """Most sequences of a context whose keys and values fit into free memory."""
    return free_bytes // (step_bytes(decoder, 1, context) - step_bytes(decoder, 0, context))


def bench_decode(
    decoder: Decoder, batches: Sequence[tuple[int, int]], copy_gb_s: float, engine_config: EngineConfig, calls: int = 5
) -> list[DecodeSpeed]:
    """Time decode steps for each (batch, context)."""
    engine = filled_engine(decoder, engine_config)
    found = []
    for batch, context in batches:
        bound = step_bytes(decoder, batch, context) / copy_gb_s / 1e6
        step_ms = decode_milliseconds(engine, batch, context, calls)
        found.append(DecodeSpeed(batch=batch, context=context, step_ms=step_ms, bound_ms=bound))
    return found


def decode_milliseconds(engine: Engine, batch: int, context: int, calls: int = 5) -> float:
    """Median time of a decode step on what the cache holds; the context grows by a few tokens meanwhile."""
    sequences = running(engine, batch, context, (calls + 2) * engine.decode_steps)
    start = partial(engine.decode.start, sequences, engine.decode_steps, SamplingConfig(), 0)
    start().result()  # compiles, captures
    times, run = [], start()
    for _ in range(calls):
        since = time.perf_counter()
        following = start(go_on=True)  # as the engine does
        run.result()
        run = following
        times.append((time.perf_counter() - since) * 1e3 / engine.decode_steps)
    run.result()
    return statistics.median(times)


def decode_kernels(decoder: Decoder, batch: int, context: int, engine_config: EngineConfig) -> dict[str, float]:
    """Kernel -> milliseconds of a decode step whose kernels start one after another, longest first."""
    engine = filled_engine(decoder, engine_config)
    sequences = running(engine, batch, context, 4 * engine.decode_steps)
    run = partial(engine.decode.run, sequences, engine.decode_steps, SamplingConfig(), 0)
    with one_after_another():
        return {name: ms / engine.decode_steps for name, ms in kernel_milliseconds(run).items()}


@torch.no_grad()
def filled_engine(decoder: Decoder, config: EngineConfig) -> Engine:
    """An engine that never stops a completion, whose cache holds random keys and values."""
    engine = Engine(decoder, config, [])
    fill_(engine.cache)
    return engine


def fill_(cache: KVCache) -> None:
    """Random keys and values in all slots."""
    for values, scale in ((cache.k, cache.k_scale), (cache.v, cache.v_scale)):
        for layer in values:  # a layer at a time: a cache may fill the card
            if scale is None:
                layer.normal_()
            else:
                layer.view(torch.uint8).random_(0, 0x60)
        if scale is not None:
            scale.fill_(2.0**-5)


def running(engine: Engine, batch: int, context: int, num_new: int) -> list[Running]:
    """Sequences of random tokens that hold pages for `context` of them and for new ones, in random order."""
    rng = random.Random(0)
    size = engine.cache.page_size
    each = -(-(context + num_new) // size)
    pages = rng.sample(range(engine.cache.num_pages), each * batch)
    vocab = engine.decoder.config.vocab_size
    return [
        Running(
            i,
            PromptGroup([rng.randrange(vocab) for _ in range(context)]),
            num_new,
            pages=pages[i * each : (i + 1) * each],
            num_stored=context - 1,
        )
        for i in range(batch)
    ]
