"""A GRPO step of `bench.step` in a tenth of its time: each phase from samples of what it repeats.

A decode step slows down evenly as its context grows, so steps are timed at a few contexts and added up between; prompts
are prefilled as in a step. Of the training phases the first microbatches of one mini-batch run, and the time goes by
tokens; optimiser step and re-quantisation are timed alone and count for each mini-batch.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import perf_counter

import torch

from octavo.bench.rollout import decode_milliseconds, fill_
from octavo.bench.step import with_old_logprobs
from octavo.bench.step_plan import StepWork
from octavo.bench.train import accumulate, wait
from octavo.models.decoder import Decoder
from octavo.rl.batch import MiniBatch, pack
from octavo.rollout.engine import Completion, Engine
from octavo.rollout.sampler import SamplingConfig
from octavo.trainer.optimizer import Optimizer
from octavo.trainer.policy import packed_logprobs

CONTEXTS = 5
"""At which decode steps are timed, the first and the last among them."""
MICROBATCHES = 2
"""Of a mini-batch, at most."""
CALLS = 2
"""Of which the mean counts, after one that compiles and allocates."""


def sampled_step(work: StepWork, engine: Engine, reference: Decoder, optimizer: Optimizer) -> dict[str, float]:
    """Phase -> seconds, as `run_step`; the masters move by a few optimiser steps.

    Raises:
        ValueError: completions are too short to sample.
    """
    least = (CALLS + 2) * engine.decode_steps
    if work.completion_tokens < least:
        raise ValueError(
            f"decode steps are sampled {least} tokens at a time, and completions have {work.completion_tokens}. "
            "Measure a whole step: leave out --sampled"
        )
    engine.lend()
    policy, seconds = engine.decoder, partial(mean_seconds, device=engine.device)
    batch = random_mini_batch(work, engine)
    few = replace(batch, microbatches=batch.microbatches[:MICROBATCHES])
    each = num_tokens(batch) / num_tokens(few)  # the time of a mini-batch in that of a few microbatches
    all_of_them = each * work.num_mini_batches
    old = seconds(lambda: with_old_logprobs(policy, few)) * all_of_them
    frozen = seconds(lambda: with_old_logprobs(reference, few)) * all_of_them
    shadow = seconds(lambda: shadow_forward(policy, few)) * 2 * each
    update, optimize, weights = [], [], []
    for _ in range(1 + CALLS):  # gradients begin anew after each optimiser step
        update.append(once(lambda: accumulate(policy, few), engine.device))
        optimize.append(once(optimizer.step, engine.device))
        weights.append(once(policy.requantize_, engine.device))
    update_s, optimize_s, weights_s = (statistics.mean(times[1:]) for times in (update, optimize, weights))
    return {
        "rollout": rollout_seconds(work, engine),
        "old_logprobs": old,
        "reference": frozen,
        "shadow": shadow,
        "update": update_s * all_of_them + optimize_s * work.num_mini_batches,
        "weight_update": weights_s * work.num_mini_batches,
    }


def rollout_seconds(work: StepWork, engine: Engine) -> float:
    """Prefill of every prompt, and the decode steps of rounds of as many sequences as the cache holds."""
    vocab_size, at_once = engine.decoder.config.vocab_size, engine.config.max_sequences
    prompts = torch.randint(vocab_size, (work.num_prompts, work.prompt_tokens)).tolist()
    prefill = partial(engine.generate, prompts, SamplingConfig(), max_completion_tokens=1, group_size=work.group_size)
    seconds = mean_seconds(prefill, device=engine.device)
    seconds += once(partial(hand_over, engine), engine.device)
    fill_(engine.cache)
    rounds, rest = divmod(work.num_sequences, at_once)
    last = work.longest - (CALLS + 2) * engine.decode_steps
    contexts = torch.linspace(work.prompt_tokens, last, CONTEXTS).long().tolist()
    for batch, times in ((at_once, rounds), (rest, 1)):
        if batch and times:
            steps = [decode_milliseconds(engine, batch, context, CALLS) for context in contexts]
            mean = torch.tensor(steps).unfold(0, 2, 1).mean().item()  # of straight lines between the contexts
            seconds += times * work.completion_tokens * mean / 1e3
    return seconds


def hand_over(engine: Engine) -> None:
    """The cache's memory to training and back, where it is lent."""
    engine.lend()
    engine.cache.take_back()


@torch.no_grad()
def shadow_forward(decoder: Decoder, batch: MiniBatch) -> None:
    """One shadow pass."""
    for microbatch in batch.microbatches:
        packed_logprobs(decoder, microbatch, 1.0, shadow=True)


def random_mini_batch(work: StepWork, engine: Engine) -> MiniBatch:
    """One mini-batch of random completions of the forced length, with old log-probabilities of 0."""
    rng, vocab_size = random.Random(0), engine.decoder.config.vocab_size
    num_groups = work.num_prompts // work.num_mini_batches

    def ids(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    def completion(prompt: list[int]) -> Completion:
        count = work.completion_tokens
        return Completion(prompt=prompt, tokens=ids(count), rollout_logprobs=[0.0] * count, finish_reason="length")

    groups = [[completion(prompt)] * work.group_size for prompt in (ids(work.prompt_tokens) for _ in range(num_groups))]
    signs = 1.0 - 2.0 * (torch.arange(num_groups * work.group_size) % 2)
    (batch,) = pack(
        groups,
        signs.view(num_groups, work.group_size),
        num_mini_batches=1,
        microbatch_tokens=work.microbatch_tokens,
        device=engine.device,
    )
    return batch


def num_tokens(batch: MiniBatch) -> int:
    """Packed in all microbatches."""
    return sum(len(microbatch.tokens) for microbatch in batch.microbatches)


def mean_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of a few calls after one."""
    return statistics.mean([once(call, device) for _ in range(1 + CALLS)][1:])


def once(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call, until the device has done it."""
    wait(device)
    start = perf_counter()
    call()
    wait(device)
    return perf_counter() - start
