"""What a step of `bench.step` does, and what of the device it holds: the rest is for keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.bench.train import FORMATS, TrainFormats
from octavo.kernels.operands import TOKEN_BLOCK
from octavo.models.config import DecoderConfig
from octavo.numerics.recipe import Recipe
from octavo.rollout.engine import EngineConfig
from octavo.trainer.memory import FRAGMENTATION, LIBRARY_BYTES, binary_size, rollout_bytes
from octavo.trainer.memory_held import count_parameters, forward_bytes, master_bytes, moment_bytes
from octavo.trainer.memory_passes import DecoderPass, scored_counts

CACHE_SHARE = 0.95
"""Of the bytes that are left for keys and values."""
PAGE_SIZE = EngineConfig.page_size


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """What a step does."""

    completion_tokens: int
    """Of each completion."""
    prompt_tokens: int = 512
    num_prompts: int = 8
    group_size: int = 8
    num_mini_batches: int = 4
    microbatch_tokens: int = 8192
    lends_memory: bool = False
    """The cache's memory goes to training between rollouts (`rollout.engine.lend_memory`)."""

    def __post_init__(self) -> None:
        if self.num_prompts % self.num_mini_batches:
            raise ValueError(
                f"{self.num_prompts} prompts do not make up {self.num_mini_batches} mini-batches of whole groups. Give "
                f"a multiple"
            )

    @property
    def num_sequences(self) -> int:
        """Completions."""
        return self.num_prompts * self.group_size

    @property
    def longest(self) -> int:
        """Tokens of a sequence."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def longest_in_pages(self) -> int:
        """Tokens of the pages of a sequence."""
        return -(-self.longest // PAGE_SIZE) * PAGE_SIZE


def formats_beside(config: DecoderConfig, recipe: Recipe, works: Sequence[StepWork], free_bytes: int) -> TrainFormats:
    """The formats beside which the cache holds the largest share of every step's sequences; of equals the first.

    Raises:
        ValueError: for one of the steps it holds none.
    """

    def at_once(formats: TrainFormats, work: StepWork) -> int:
        return cache_tokens(config, recipe, work, formats, free_bytes) // work.longest_in_pages

    def worst(formats: TrainFormats) -> tuple[float, StepWork]:
        return min(((at_once(formats, work) / work.num_sequences, work) for work in works), key=lambda pair: pair[0])

    formats = max(FORMATS, key=lambda formats: worst(formats)[0])
    share, work = worst(formats)
    if not share:
        raise ValueError(
            f"the keys and values of one sequence of {work.longest} tokens do not fit beside the step into "
            f"{binary_size(free_bytes)}. Give fewer --completion-tokens, --kv-cache fp8, or a smaller model"
        )
    return formats


def cache_tokens(config: DecoderConfig, recipe: Recipe, work: StepWork, formats: TrainFormats, free_bytes: int) -> int:
    """Of the cache beside a step in these formats, and no more than the step needs."""
    step = step_peak_bytes(config, recipe, work, formats)
    beside = _held_bytes(config, recipe, formats) + _sampling_bytes(config, recipe, work) if work.lends_memory else step
    if int(step * (1 + FRAGMENTATION)) + LIBRARY_BYTES > free_bytes:
        return 0
    left = free_bytes - int(beside * (1 + FRAGMENTATION)) - LIBRARY_BYTES
    fitting = int(max(0, left) * CACHE_SHARE / token_bytes(config, recipe))
    return min(fitting, work.num_sequences * work.longest_in_pages)


def step_peak_bytes(config: DecoderConfig, recipe: Recipe, work: StepWork, formats: TrainFormats) -> int:
    """The most that training holds in a step, its reference and shadow pass among it, as a run's plan counts it."""
    each = max(1, work.microbatch_tokens // work.longest)  # sequences of a microbatch
    several = work.num_sequences // work.num_mini_batches > each
    num_tokens = -(-each * work.longest // TOKEN_BLOCK) * TOKEN_BLOCK
    passes = [
        DecoderPass(
            shape=config,
            recipe=recipe,
            num_tokens=num_tokens,
            num_scored=num_scored,
            longest=work.longest,
            recompute=formats.recompute_layers,
        )
        for num_scored in scored_counts(num_tokens, config.vocab_size)
    ]
    gradients = 4 * count_parameters(config)
    update = max(one.update(accumulated=several) for one in passes) + gradients * several
    return _held_bytes(config, recipe, formats) + max(update, gradients + passes[0].forward(shadow=True))


def _held_bytes(config: DecoderConfig, recipe: Recipe, formats: TrainFormats) -> int:
    """All the time: masters, moments, what forward and backward read, and the reference."""
    held = forward_bytes(config, recipe, on_gpu=True)
    masters = master_bytes(config, formats.optimizer.master_format)
    forward = held.stored + held.operands + held.head
    return masters + moment_bytes(config, formats.optimizer.state_format) + 2 * forward + held.backward


def _sampling_bytes(config: DecoderConfig, recipe: Recipe, work: StepWork) -> int:
    """Beside that, while prompts run or steps decode."""
    rows, tokens = work.num_sequences, EngineConfig.max_prefill_tokens
    return max(rollout_bytes(config, recipe, rows, tokens, work.longest, truncates=False))


def token_bytes(config: DecoderConfig, recipe: Recipe) -> int:
    """Of a token in the cache."""
    row = config.head_dim + 4 if recipe.kv_cache == "fp8" else 2 * config.head_dim
    return 2 * config.num_layers * config.num_kv_heads * row
