"""The exactness self-test: an engine's log-probabilities against an independent packed forward, float for float.

A tiny Qwen3 with random weights is built in memory. For every batch-invariant recipe it samples from a cache so small
that sequences are preempted, is compared, gets an update of all its weights, and samples and is compared again. The
negative control damages one number in the cache, or compares with weights that have moved: each must be seen.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen3Config

from octavo.check.rows import Row
from octavo.kernels.device import require_kernels
from octavo.models.config import decoder_config
from octavo.models.decoder import Decoder
from octavo.numerics.recipe import RECIPE_NAMES, Recipe, get_recipe
from octavo.rl.batch import pack
from octavo.rollout.engine import Completion, Engine, EngineConfig
from octavo.rollout.kv_cache import KVCache
from octavo.rollout.sampler import SamplingConfig
from octavo.trainer.errors import reason
from octavo.trainer.policy import packed_logprobs

VOCABULARY = 97
TEMPERATURE = 0.8
ENGINE = EngineConfig(page_size=4, kv_cache_tokens=144, max_prefill_tokens=60)
PROMPT_TOKENS = (3, 30, 68)
"""Lengths; attention adds its keys in blocks of 64, so one prompt reaches into a second block."""
COMPLETION_TOKENS = 10
GROUP_SIZE = 2

Damage = Callable[[KVCache, Tensor], None]
"""Changes one number of layer 0 in a cache, at the first of the slots [T] that were just written."""


def exactness_rows(device: str) -> Iterator[Row]:
    """Each recipe on one device, then the negative control."""
    for recipe in invariant_recipes():
        yield _row(device, f"{recipe.name}, KV {recipe.kv_cache}", partial(exactness, recipe, device))
    yield _row(device, "damage is seen", partial(control, device))


def invariant_recipes() -> list[Recipe]:
    """Every recipe that promises exactness, with each format of its KV cache."""
    plain = [get_recipe(name) for name in RECIPE_NAMES]
    formats = {"fp32": ("fp32",), "bf16": ("bf16", "fp8")}
    return [get_recipe(r.name, kv_cache=kv) for r in plain if r.batch_invariant for kv in formats[r.high_precision]]


def exactness(recipe: Recipe, device: str) -> tuple[str, str]:
    """What differs ("" if nothing), and what was compared."""
    decoder = random_decoder(recipe, device)
    num_tokens = 0
    previous: list[list[Completion]] = []
    for state in ("before", "after"):
        completions = sample(decoder)
        if completions == previous:
            return "the samples after an update are those before it: the engine does not see new weights", ""
        wrong, compared = differing(decoder, completions)
        if wrong:
            return f"{wrong} of {compared} log-probabilities differ {state} an update", ""
        num_tokens += compared
        previous = completions
        decoder.freeze_activation_scales_()
        update_(decoder)
    return "", f"rollout equals training on {num_tokens} tokens, before and after an update"


def control(device: str) -> tuple[str, str]:
    """Which damage goes unseen ("" if none), and what was tried."""
    damages: list[tuple[str, str, Damage]] = [
        ("a flipped byte of an FP8 key", "fp8", flip_key_byte),
        ("a doubled scale of an FP8 key", "fp8", double_key_scale),
        ("a flipped byte of a BF16 key", "bf16", flip_key_byte),
    ]
    for name, kv_cache, damage in damages:
        decoder = random_decoder(get_recipe("block128", kv_cache=kv_cache), device)
        wrong, _ = differing(decoder, sample(decoder, damage))
        if not wrong:
            return f"{name} was not seen", ""
    decoder = random_decoder(get_recipe("block128"), device)
    completions = sample(decoder)
    update_(decoder)
    if not differing(decoder, completions)[0]:
        return "samples of older weights were not seen", ""
    return "", f"{', '.join(name for name, _, _ in damages)}, samples of older weights"


@torch.no_grad()
def random_decoder(recipe: Recipe, device: str) -> Decoder:
    """Two ragged layers whose every part matters and whose logits spread over a few units."""
    require_kernels(device, recipe.high_precision)
    shape = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=200,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    decoder = Decoder(decoder_config(shape), shape, recipe)
    generator = torch.Generator().manual_seed(0)
    for parameter in decoder.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(noise * parameter.shape[1] ** -0.5 if parameter.ndim > 1 else 1.0 + 0.2 * noise)
    decoder.to(device)
    decoder.requantize_()
    return decoder


@torch.no_grad()
def update_(decoder: Decoder) -> None:
    """What an optimiser step does: every master moves, then the bytes are written anew."""
    generator = torch.Generator().manual_seed(1)
    for parameter in decoder.parameters():
        noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
        parameter.mul_(1.0 + 0.05 * noise)
    decoder.requantize_()


def sample(decoder: Decoder, damage: Damage | None = None) -> list[list[Completion]]:
    """Completions of prompts of random tokens, from an engine whose first write to the cache may be damaged."""
    engine = Engine(decoder, ENGINE, ())
    if damage is not None:
        engine.cache = DamagedCache(engine.cache, damage)  # type: ignore[assignment]
    draw = random.Random(0)
    prompts = [[draw.randrange(VOCABULARY) for _ in range(length)] for length in PROMPT_TOKENS]
    sampling = SamplingConfig(temperature=TEMPERATURE)
    return engine.generate(prompts, sampling, max_completion_tokens=COMPLETION_TOKENS, group_size=GROUP_SIZE)


@torch.no_grad()
def differing(decoder: Decoder, completions: list[list[Completion]]) -> tuple[int, int]:
    """How many reported log-probabilities are not the packed forward's, and how many there are."""
    device = decoder.embed_tokens.device
    advantages = torch.ones(len(completions), len(completions[0]))
    wrong = compared = 0
    for batch in pack(completions, advantages, num_mini_batches=1, microbatch_tokens=150, device=device):
        for microbatch in batch.microbatches:
            logprobs, _ = packed_logprobs(decoder, microbatch, TEMPERATURE)
            expected, reported = logprobs[microbatch.loss_mask], microbatch.rollout_logprobs[microbatch.loss_mask]
            wrong += 0 if torch.equal(expected, reported) else max(1, int((expected != reported).sum()))
            compared += len(reported)
    return wrong, compared


class DamagedCache:
    """A KV cache that damages its first write."""

    def __init__(self, cache: KVCache, damage: Damage) -> None:
        self.cache, self.damage = cache, damage
        self.done = False

    def __getattr__(self, name: str) -> object:
        return getattr(self.cache, name)

    def write(self, layer: int, slot_mapping: Tensor, *heads: Any) -> Tensor:
        """As KVCache.write."""
        q = self.cache.write(layer, slot_mapping, *heads)
        if not self.done:
            self.damage(self.cache, slot_mapping)
            self.done = True
        return q


def flip_key_byte(cache: KVCache, slots: Tensor) -> None:
    """Turn the sign of the largest number of one key: the highest bit of one byte."""
    key = cache.k[0, slots[0], 0]
    size = key.element_size()
    key.view(torch.uint8)[int(key.float().abs().argmax()) * size + size - 1] ^= 0x80  # little-endian


def double_key_scale(cache: KVCache, slots: Tensor) -> None:
    """Double the scale of one key."""
    assert cache.k_scale is not None
    cache.k_scale[0, slots[0], 0] *= 2.0


def _row(device: str, name: str, test: Callable[[], tuple[str, str]]) -> Row:
    try:
        error, detail = test()
    except (RuntimeError, ValueError) as broken:
        error, detail = reason(broken), ""
    if error:
        step = "do not train with it here: report it with the versions above; trainer.require_exact stops such a run"
        return Row(group=f"numbers on {device}", name=name, status="FAIL", detail=error, next_step=step)
    return Row(group=f"numbers on {device}", name=name, status="OK", detail=detail)
