"""Completions of prompts by the rollout's engine: the same numbers as in training, for any number of prompts."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch

from octavo import __version__
from octavo.generate.engine_size import Demand, engine_config
from octavo.generate.meter import Meter
from octavo.generate.prompt_files import Prompt
from octavo.kernels.device import Kernels, runs_kernels
from octavo.models.checkpoint import load_decoder
from octavo.models.config import read_config
from octavo.models.decoder import Decoder
from octavo.numerics.recipe import Recipe
from octavo.rollout.engine import Completion, Engine, check_group_size
from octavo.rollout.sampler import SamplingConfig, looks_at_host
from octavo.tasks.prompts import ChatTemplate, encode_messages, stop_token_ids
from octavo.trainer.interrupt import Interrupts
from octavo.trainer.memory import binary_size
from octavo.trainer.memory_advice import free_bytes
from octavo.trainer.memory_held import kv_token_bytes
from octavo.trainer.metrics import Display
from octavo.trainer.progress import tensors_fingerprint
from octavo.trainer.run import check_vocabulary, load_generation_config, load_tokenizer, use_device

COMPLETIONS_PER_CALL = 16
"""Times as many as run at once are handed to the engine together: it keeps them all until the last is finished."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What `octavo generate` does with each prompt."""

    model: str
    """Hugging Face folder or hub id."""
    recipe: Recipe
    """The precision flow."""
    sampling: SamplingConfig
    """How tokens are drawn."""
    max_tokens: int = 128
    """Completions are cut off here."""
    group_size: int = 1
    """Completions of each prompt."""
    seed: int = 0
    """Of the random numbers."""
    chat_template: ChatTemplate = "auto"
    """As in `encode_messages`."""
    logprobs: bool = False
    """Rows have tokens and rollout_logprobs."""
    device: str = "cpu"
    """Where it runs."""
    kernels: Kernels = "by_device"
    """As in a run."""
    kv_cache_tokens: int | None = None
    """Of the engine; None for what fits."""
    max_sequences: int | None = None
    """Of the engine; None for what is usual."""

    def __post_init__(self) -> None:
        for name in ("max_tokens", "group_size", "kv_cache_tokens", "max_sequences"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1; got {value}")
        check_group_size("group_size", self.group_size)


class Generator:
    """A model that is ready to sample completions of some prompts.

    Args:
        settings: what to do with each.
        prompts: P of them.
        display: on the error channel.
        fingerprint: have `identity` hold a hash of the weights, which takes a while.

    Raises:
        ValueError: the model is missing or does not fit, or a prompt has no token or too many, and is named.
    """

    def __init__(self, settings: Settings, prompts: Sequence[Prompt], display: Display, fingerprint: bool) -> None:
        self.settings, self.prompts, self.display = settings, prompts, display
        use_device(settings.device, settings.kernels)
        limit = read_config(settings.model)[0].max_positions
        self.tokenizer = load_tokenizer(settings.model)
        self.encoded = [self._encode(prompt, limit) for prompt in prompts]
        longest = max(map(len, self.encoded)) + settings.max_tokens
        decoder = _load(settings, longest)
        check_vocabulary(self.encoded, decoder.config.vocab_size, settings.model)
        stops = stop_token_ids(self.tokenizer, load_generation_config(settings.model), decoder.hf_config)
        recipe = settings.recipe
        self.identity = {
            "octavo": __version__,
            "model": settings.model,
            "weights": _fingerprint(decoder) if fingerprint else None,
            "rope": dict(decoder.hf_config.rope_parameters),
            "stop_token_ids": sorted(stops),
            "recipe": recipe.name,
            "kv_cache": recipe.kv_cache,
            "device": torch.device(settings.device).type,
            "kernels": settings.kernels,
            "sampling": asdict(settings.sampling),
            "max_tokens": settings.max_tokens,
            "seed": settings.seed,
            "chat_template": settings.chat_template,
            "logprobs": settings.logprobs,
        }
        """All that a completion depends on beside its prompt."""
        demand = Demand(
            num_completions=len(prompts) * settings.group_size,
            longest=longest,
            truncates=looks_at_host(settings.sampling),
            kv_cache_tokens=settings.kv_cache_tokens,
            max_sequences=settings.max_sequences,
        )
        planned = runs_kernels(decoder.embed_tokens) and recipe.high_precision == "bf16"
        free = free_bytes(settings.device) if planned else None
        config = engine_config(demand, decoder.config, recipe, free)
        self.engine = Engine(decoder, config, stops)
        size = binary_size(config.kv_cache_tokens * kv_token_bytes(decoder.config, recipe))
        display.line(
            f"{decoder.config.family}, {recipe.name} on {settings.device}: {len(prompts):,} prompts x "
            f"{settings.group_size}; KV cache ({recipe.kv_cache}) of {config.kv_cache_tokens:,} tokens, {size}; up to "
            f"{config.max_sequences} sequences at once"
        )

    def sample(
        self, on_row: Callable[[dict[str, Any]], None], interrupts: Interrupts, done: Container[tuple[int, int]] = ()
    ) -> Meter:
        """Sample all completions.

        Args:
            on_row: called with the row of each as it finishes.
            interrupts: asked after every step whether to stop.
            done: (prompt, sample) that are left out.

        Returns:
            What it took.

        Raises:
            StopRequested: by `interrupts`.
        """
        settings, size = self.settings, self.settings.group_size
        missing = [sum((p, g) not in done for g in range(size)) for p in range(len(self.prompts))]
        meter = Meter(self.engine, self.display, sum(missing))
        at_once = COMPLETIONS_PER_CALL * self.engine.config.max_sequences
        with meter.running() as advance:

            def after_step(num_finished: int) -> None:
                advance(num_finished)
                interrupts.check()

            for start, stop in _parts(missing, at_once):
                self.engine.generate(
                    self.encoded[start:stop],
                    settings.sampling,
                    max_completion_tokens=settings.max_tokens,
                    group_size=size,
                    seed=settings.seed,
                    first_index=start,
                    skip={(p - start, g) for p in range(start, stop) for g in range(size) if (p, g) in done},
                    progress=after_step,
                    on_completion=partial(self._finished, on_row, start),
                )
                meter.num_preemptions += self.engine.num_preemptions
        return meter

    def _encode(self, prompt: Prompt, limit: int) -> list[int]:
        try:
            tokens = encode_messages(self.tokenizer, prompt.messages, self.settings.chat_template)
        except ValueError as error:
            raise ValueError(f"{prompt.place}: {error}") from error
        if len(tokens) + self.settings.max_tokens > limit:
            raise ValueError(
                f"{prompt.place} has {len(tokens)} tokens, which with --max-tokens {self.settings.max_tokens} exceed "
                f"the model's {limit} positions. Shorten it, or lower --max-tokens"
            )
        return tokens

    def _finished(
        self, on_row: Callable[[dict[str, Any]], None], start: int, p: int, sample: int, completion: Completion
    ) -> None:
        on_row(self._row(start + p, sample, completion))

    def _row(self, index: int, sample: int, completion: Completion) -> dict[str, Any]:
        num_tokens, logprobs = len(completion.tokens), completion.rollout_logprobs
        row = self.prompts[index].fields | {
            "prompt_index": index,
            "sample": sample,
            "completion": self.tokenizer.decode(completion.tokens, skip_special_tokens=True),
            "finish_reason": completion.finish_reason,
            "num_prompt_tokens": len(completion.prompt),
            "num_tokens": num_tokens,
            "mean_logprob": sum(logprobs) / num_tokens,
        }
        return row | {"tokens": completion.tokens, "rollout_logprobs": logprobs} if self.settings.logprobs else row


def _load(settings: Settings, longest: int) -> Decoder:
    """The model, able to sample and no more; ValueError where a GPU has no room for it."""
    try:
        return load_decoder(settings.model, settings.recipe, max_tokens=longest, device=settings.device, masters=False)
    except torch.OutOfMemoryError as error:
        raise ValueError(
            f"the weights of {settings.model!r} under recipe {settings.recipe.name!r} do not fit on {settings.device}: "
            f"{str(error).splitlines()[0]} Free the GPU, or take a smaller model or an FP8 recipe"
        ) from error


def _fingerprint(decoder: Decoder) -> str:
    """Hash of what the forward reads of the weights."""
    made = ("cos", "sin", "num_saturated")  # of other things
    stored = ((name, buffer) for name, buffer in decoder.named_buffers() if name not in made)
    gains = ((name, parameter) for name, parameter in decoder.named_parameters() if parameter.ndim == 1)
    return tensors_fingerprint(chain(stored, gains))


def _parts(missing: Sequence[int], at_once: int) -> list[tuple[int, int]]:
    """[start, stop) of neighbouring prompts that together miss at least so many completions, or are the last."""
    parts, start, count = [], 0, 0
    for index, number in enumerate(missing, start=1):
        count += number
        if count >= at_once or (count and index == len(missing)):
            parts.append((start, index))
            start, count = index, 0
    return parts
