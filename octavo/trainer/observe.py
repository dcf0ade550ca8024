"""The observatory in a run: the last mini-batch in other numerics, and after a null change. No training number changes.

Each observation is whole and its own: beside the training forward that there is anyway it runs two of the BF16 shadow,
with `fp32` two in FP32, and with `null_line` one more in each numerics.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from octavo.models.decoder import Decoder, Norm
from octavo.numerics.recipe import get_recipe
from octavo.rl.batch import MiniBatch
from octavo.rl.observatory import NULL, LogprobPair, ObservedTokens, answer_metrics, ratio_metrics
from octavo.rl.observatory_modules import MAX_TOKENS, first_difference, module_differences, packed_outputs
from octavo.trainer.policy import packed_logprobs
from octavo.trainer.progress import static_scales
from octavo.trainer.run import Run

NULL_GAINS = 8
"""Norm gains that a null change moves, spread evenly over the norms of the decoder."""


@torch.no_grad()
def observe_old(run: Run, mini_batch: MiniBatch) -> dict[str, Tensor]:
    """Log-probabilities before the step's first update, [T] fp32, by the numerics beside training's."""
    with scales_kept(run.decoders):
        return {name: forward(mini_batch)[0] for name, forward in _forwards(run).items() if name != "fp8"}


@torch.no_grad()
def observe(run: Run, mini_batch: MiniBatch, logprobs: Tensor, old: dict[str, Tensor]) -> dict[str, Any]:
    """The figures of a mini-batch before its update.

    Args:
        run, mini_batch: what is trained, and on what.
        logprobs: [T] fp32, policy in training.
        old: of `observe_old`.
    """
    config, clip = run.config.observatory, run.config.algorithm.clip
    before = {"fp8": mini_batch.gather("old_logprobs"), **old}
    with scales_kept(run.decoders):
        forwards = _forwards(run)
        now = {"fp8": logprobs}
        now["bf16"], entropy = forwards["bf16"](mini_batch)
        if "fp32" in old:
            now["fp32"], _ = forwards["fp32"](mini_batch)
        tokens = ObservedTokens(
            loss_mask=mini_batch.gather("loss_mask"),
            advantages=mini_batch.gather("advantages"),
            entropy=entropy,
            answer_index=answer_index(mini_batch),
        )
        pairs = {name: LogprobPair(before=before[name], after=now[name]) for name in before}
        metrics = ratio_metrics(pairs, tokens, clip) | answer_metrics(tokens)
        if config.null_line:
            with null_change(run.policy):
                nulls = {name: LogprobPair(before=now[name], after=forwards[name](mini_batch)[0]) for name in now}
            metrics |= ratio_metrics(nulls, tokens, clip, NULL)
        if config.modules:
            metrics |= module_metrics(run, mini_batch)
    return metrics


def module_metrics(run: Run, mini_batch: MiniBatch) -> dict[str, Any]:
    """Where the recipe parts from BF16, on the first sequence of a mini-batch.

    modules/first_differing    name of the first operation whose output differs from the BF16 shadow's, "" for none
    modules/error_by_layer     of each decoder layer's output, root of sum (recipe - bf16)^2 / sum bf16^2; a list
    """
    microbatch, temperature = mini_batch.microbatches[0], run.config.rollout.sampling.temperature
    tokens = microbatch.tokens[: min(int(microbatch.cu_seqlens[1]), MAX_TOKENS)]
    recipe, shadow = (packed_outputs(run.policy, tokens, temperature, shadow=shadow) for shadow in (False, True))
    differences = module_differences(recipe, shadow)
    first = first_difference(differences)
    layers = {f"model.layers.{index}" for index in range(run.policy.config.num_layers)}
    return {
        "modules/first_differing": "" if first is None else first.module,
        "modules/error_by_layer": [found.relative for found in differences if found.module in layers],
    }


def answer_index(mini_batch: MiniBatch) -> Tensor:
    """[T] int64, a number for each completion of a mini-batch."""
    parts, num_before = [], 0
    for microbatch in mini_batch.microbatches:
        parts.append(microbatch.sequence_index + num_before)
        num_before += len(microbatch.cu_seqlens) - 1
    return torch.cat(parts)


@contextmanager
def null_change(decoder: Decoder) -> Iterator[None]:
    """Inside, NULL_GAINS norm gains are one BF16 step larger; afterwards they have their bits again.

    Every decoder over the same masters sees it. A change too small to mean anything: what it does to a ratio is noise.
    """
    gains = [module.weight for module in decoder.modules() if isinstance(module, Norm)]
    places = [(gains[i * len(gains) // NULL_GAINS], i) for i in range(NULL_GAINS)]
    before = [gain.detach().clone() for gain in gains]
    with torch.no_grad():
        for gain, i in places:
            element = gain[i * len(gain) // NULL_GAINS :][:1]
            element += 2.0 ** (torch.frexp(element).exponent - 8)  # BF16 keeps 8 bits
    try:
        yield
    finally:
        with torch.no_grad():
            for gain, kept in zip(gains, before, strict=True):
                gain.copy_(kept)


@contextmanager
def scales_kept(decoders: list[Decoder]) -> Iterator[None]:
    """Static activation scales learn nothing from the forwards inside."""
    before = {name: buffer.clone() for name, buffer in static_scales(decoders).items()}
    try:
        yield
    finally:
        for name, buffer in static_scales(decoders).items():
            buffer.copy_(before[name])


def _forwards(run: Run) -> dict[str, Any]:
    """Numerics -> mini-batch -> log-probabilities and entropy, [T] fp32 each, with the masters as they are now."""
    temperature = run.config.rollout.sampling.temperature

    def over(decoder: Decoder, *, shadow: bool = False) -> Any:
        def forward(mini_batch: MiniBatch) -> tuple[Tensor, Tensor]:
            parts = [packed_logprobs(decoder, m, temperature, shadow=shadow) for m in mini_batch.microbatches]
            logprobs, entropy = zip(*parts, strict=True)
            return torch.cat(logprobs), torch.cat(entropy)

        return forward

    forwards = {"fp8": over(run.policy), "bf16": over(run.policy, shadow=True)}
    if run.config.observatory.fp32:
        forwards["fp32"] = over(run.policy.with_recipe(get_recipe("fp32")))
    return forwards
