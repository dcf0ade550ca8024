"""`octavo bench step`: a whole GRPO step of a model's shape on this GPU, phase by phase, beside what each must take.

    rollout          completions of a forced length, by the engine    weights, keys and values read once a decode step
    old_logprobs     a packed forward of all of them                  2 FLOPs for each weight and token
    reference        the same of a frozen model                       likewise
    shadow           two of the last mini-batch, in BF16              likewise, at BF16's rate
    update           forward, loss, backward, optimiser steps         6 FLOPs, and the bytes of the optimiser
    weight_update    re-quantisation after each of them               masters read, bytes written

Products are taken to run at the rate of the model's largest linear layer, bytes at the copy speed, both measured in the
same run. A run calibrates once in `CALIBRATION_INTERVAL` steps, and the step's total counts that part of the shadow's
seconds. Weights are random, and the step is the second: the first, a short one, compiles and captures. A long one can
be sampled (`bench.step_sampled`).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import perf_counter

import torch
from transformers import PretrainedConfig

from octavo.bench.gemm import linears_of, random_linear
from octavo.bench.measure import copy_speed, milliseconds, require_cuda
from octavo.bench.rollout import random_decoder, step_bytes
from octavo.bench.step_plan import StepWork, cache_tokens, formats_beside, step_peak_bytes, token_bytes
from octavo.bench.train import TrainFormats, accumulate, check_length, model_flops, wait
from octavo.kernels.device import require_kernels
from octavo.models.config import DecoderConfig
from octavo.models.decoder import Decoder
from octavo.numerics.recipe import Recipe, get_recipe
from octavo.rl.batch import Microbatch, MiniBatch, pack
from octavo.rl.calibration_config import CalibrationConfig
from octavo.rollout.engine import Engine, EngineConfig
from octavo.rollout.lent_memory import expand_segments
from octavo.rollout.sampler import SamplingConfig
from octavo.trainer.memory_held import count_parameters, forward_bytes, master_bytes, moment_bytes
from octavo.trainer.optimizer import Optimizer
from octavo.trainer.policy import packed_logprobs

PHASES = ("rollout", "old_logprobs", "reference", "shadow", "update", "weight_update")
CALIBRATION_INTERVAL = CalibrationConfig.interval
"""Steps from one shadow phase to the next."""
WARM_UP_TOKENS = 16
"""Of a completion in the first step."""
RunStep = Callable[[StepWork, Engine, Decoder, Optimizer], dict[str, float]]
"""Phase -> seconds of a step of the policy of an engine, a frozen reference and an optimiser."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What the device does at best; FLOP/s of the largest linear layer, casts included."""

    copy_gb_s: float
    forward_tflop_s: float
    """Of the recipe, without a gradient."""
    bf16_tflop_s: float
    """Likewise in BF16."""
    train_tflop_s: float
    """Of the recipe's forward and backward."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """A step in steady state, in seconds."""

    work: StepWork
    formats: str
    """Of masters and moments."""
    batch_invariant: bool
    """Of the recipe, whose rollout's log-probabilities may then be the old ones."""
    at_once: int
    """Sequences that decode together: as many as the cache holds."""
    cache_tokens: int
    """Of the cache: what is left beside the rest, or all that the step needs."""
    peak_bytes: int
    """Most memory of tensors; 0 on a CPU."""
    planned_bytes: int
    """The same by the plan, with the cache unless it is lent."""
    measured: dict[str, float]
    """Phase -> seconds, all of the shadow's among them."""
    predicted: dict[str, float]
    """Phase -> seconds at the device's rates, likewise."""

    @property
    def seconds(self) -> float:
        """Of a step, as `step_seconds` counts them."""
        return step_seconds(self.measured)

    @property
    def calibration_share(self) -> float:
        """Of these, those of shadow passes; in [0, 1]."""
        return calibration_share(self.measured)

    @property
    def tok_s(self) -> float:
        """Sampled and trained tokens a second."""
        return self.work.num_sequences * self.work.completion_tokens / self.seconds

    @property
    def tok_s_rarely_checked(self) -> float | None:
        """The same of a step between two checks of `trainer.exactness_interval`, which takes the rollout's
        log-probabilities as the old ones; None where the recipe does not allow that."""
        if not self.batch_invariant:
            return None
        seconds = self.seconds - self.measured["old_logprobs"]
        return self.work.num_sequences * self.work.completion_tokens / seconds


@dataclass(frozen=True, eq=False)
class Trained:
    """What a step trains, and its frozen reference."""

    policy: Decoder
    reference: Decoder
    optimizer: Optimizer
    formats: TrainFormats


def step_seconds(phases: Mapping[str, float]) -> float:
    """Of a step, the mean of a run: all phases, the shadow once in `CALIBRATION_INTERVAL` steps."""
    return sum(phases.values()) - phases["shadow"] + phases["shadow"] / CALIBRATION_INTERVAL


def calibration_share(phases: Mapping[str, float]) -> float:
    """Of a step's seconds, those of shadow passes; in [0, 1]."""
    return phases["shadow"] / CALIBRATION_INTERVAL / step_seconds(phases)


def step_times(
    config: DecoderConfig,
    hf_config: PretrainedConfig,
    recipe: Recipe,
    works: Sequence[StepWork],
    run: RunStep | None = None,
) -> Iterator[StepTime]:
    """Steps on this GPU, whole or as `run` has them; with one kind of masters and moments for all of them.

    Raises:
        ValueError: no GPU, one without the kernels, a recipe without a backward, or a step that does not fit.
    """
    require_cuda("octavo bench step")
    require_kernels("cuda", recipe.high_precision)
    if recipe.forward_only:
        raise ValueError(f"recipe {recipe.name!r} has no backward; take block128, or another that trains")
    longest = max(works, key=lambda work: work.longest)
    check_length(config, longest.longest, "--prompt-tokens or --completion-tokens")
    free = torch.cuda.mem_get_info()[0]
    formats = formats_beside(config, recipe, works, free)
    if any(work.lends_memory for work in works):
        expand_segments()  # before anything is measured, whose segments would stay
    rates = device_rates(config, recipe, longest.microbatch_tokens)
    models = build(config, hf_config, recipe, formats, longest.longest)
    for work in works:
        yield bench_step(models, work, rates, cache_tokens(config, recipe, work, formats, free), run)
        gc.collect()  # an engine and its graphs hold each other
        torch.cuda.empty_cache()


def build(
    config: DecoderConfig,
    hf_config: PretrainedConfig,
    recipe: Recipe,
    formats: TrainFormats,
    max_tokens: int,
    device: str = "cuda",
) -> Trained:
    """With random weights, for sequences of so many tokens."""
    policy = random_decoder(config, hf_config, recipe, max_tokens, device, masters=True)
    if formats.optimizer.master_format == "bf16":
        policy.round_masters_()
    policy.recompute_layers = formats.recompute_layers
    reference = random_decoder(config, hf_config, recipe, max_tokens, device)
    optimizer = Optimizer(dict(policy.named_parameters()), formats.optimizer, 1000, fused=device == "cuda")
    return Trained(policy, reference, optimizer, formats)


def bench_step(
    models: Trained, work: StepWork, rates: Rates, num_cache_tokens: int, run: RunStep | None = None
) -> StepTime:
    """A step with a cache of so many tokens."""
    policy, on_gpu = models.policy, models.policy.embed_tokens.is_cuda
    at_once = min(work.num_sequences, num_cache_tokens // work.longest_in_pages)
    engine_config = EngineConfig(kv_cache_tokens=num_cache_tokens, max_sequences=at_once, lend_memory=work.lends_memory)
    engine = Engine(policy, engine_config, [])
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    measured = (run or whole_step)(work, engine, models.reference, models.optimizer)
    planned = step_peak_bytes(policy.config, policy.recipe, work, models.formats)
    if not work.lends_memory:  # which torch does not count
        planned += num_cache_tokens * token_bytes(policy.config, policy.recipe)
    return StepTime(
        work=work,
        formats=str(models.formats),
        batch_invariant=policy.recipe.batch_invariant,
        at_once=at_once,
        cache_tokens=num_cache_tokens,
        peak_bytes=torch.cuda.max_memory_allocated() if on_gpu else 0,
        planned_bytes=planned,
        measured=measured,
        predicted=predicted_seconds(policy, work, rates, models.formats, at_once),
    )


def whole_step(work: StepWork, engine: Engine, reference: Decoder, optimizer: Optimizer) -> dict[str, float]:
    """A step after a short one, which compiles and captures; phase -> seconds."""
    run_step(replace(work, completion_tokens=min(work.completion_tokens, WARM_UP_TOKENS)), engine, reference, optimizer)
    return run_step(work, engine, reference, optimizer)


def run_step(work: StepWork, engine: Engine, reference: Decoder, optimizer: Optimizer) -> dict[str, float]:
    """One step that calibrates; phase -> seconds."""
    policy, device = engine.decoder, engine.device
    times = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def timed(phase: str) -> Iterator[None]:
        wait(device)
        start = perf_counter()
        yield
        wait(device)
        times[phase] += perf_counter() - start

    prompts = torch.randint(policy.config.vocab_size, (work.num_prompts, work.prompt_tokens)).tolist()
    with timed("rollout"):
        completions = engine.generate(
            prompts, SamplingConfig(), max_completion_tokens=work.completion_tokens, group_size=work.group_size
        )
        engine.lend()
    signs = 1.0 - 2.0 * (torch.arange(work.num_sequences) % 2)
    mini_batches = pack(
        completions,
        signs.view(work.num_prompts, work.group_size),
        num_mini_batches=work.num_mini_batches,
        microbatch_tokens=work.microbatch_tokens,
        device=device,
    )
    with timed("old_logprobs"):
        mini_batches = [with_old_logprobs(policy, batch) for batch in mini_batches]
    with timed("reference"):
        for batch in mini_batches:
            with_old_logprobs(reference, batch)
    for index, batch in enumerate(mini_batches):
        last = index == len(mini_batches) - 1
        if last:
            with timed("shadow"):
                for microbatch in batch.microbatches:
                    packed_logprobs(policy, microbatch, 1.0, shadow=True)
        with timed("update"):
            accumulate(policy, batch)
        if last:
            with timed("shadow"):
                for microbatch in batch.microbatches:
                    packed_logprobs(policy, microbatch, 1.0, shadow=True)
        with timed("update"):
            optimizer.step()
        with timed("weight_update"):
            policy.requantize_()
    return times


@torch.no_grad()
def with_old_logprobs(decoder: Decoder, batch: MiniBatch) -> MiniBatch:
    """The mini-batch with old log-probabilities of a packed forward."""

    def add(microbatch: Microbatch) -> Microbatch:
        return replace(microbatch, old_logprobs=packed_logprobs(decoder, microbatch, 1.0)[0])

    return replace(batch, microbatches=[add(microbatch) for microbatch in batch.microbatches])


def predicted_seconds(
    decoder: Decoder, work: StepWork, rates: Rates, formats: TrainFormats, at_once: int
) -> dict[str, float]:
    """Phase -> seconds at the device's rates, by arithmetic; all of the shadow's."""
    config, bytes_s = decoder.config, rates.copy_gb_s * 1e9
    rounds = -(-work.num_sequences // at_once)
    halfway = step_bytes(decoder, at_once, work.prompt_tokens + work.completion_tokens // 2)
    prefill = model_flops(config, [work.prompt_tokens] * work.num_prompts, work.num_prompts) / 3
    flops = model_flops(
        config, [work.longest] * work.num_sequences, work.num_sequences * work.completion_tokens
    )  # a third of them forward
    masters = master_bytes(config, formats.optimizer.master_format)
    moments = moment_bytes(config, formats.optimizer.state_format)
    gradients = 4 * count_parameters(config)
    passes = 2 if formats.optimizer.compact else 4  # norm and step; torch's AdamW has them clipped in between
    optimizer_bytes = 2 * (masters + moments) + passes * gradients
    held = forward_bytes(config, decoder.recipe, on_gpu=True)
    rewritten = masters + held.stored + held.operands + held.backward
    forward = flops / 3 / rates.forward_tflop_s / 1e12
    return {
        "rollout": rounds * work.completion_tokens * halfway / bytes_s + prefill / rates.forward_tflop_s / 1e12,
        "old_logprobs": forward,
        "reference": forward,
        "shadow": 2 * flops / 3 / work.num_mini_batches / rates.bf16_tflop_s / 1e12,
        "update": flops / rates.train_tflop_s / 1e12 + work.num_mini_batches * optimizer_bytes / bytes_s,
        "weight_update": work.num_mini_batches * rewritten / bytes_s,
    }


def device_rates(config: DecoderConfig, recipe: Recipe, tokens: int) -> Rates:
    """Measured on the GPU, on gate and up at a microbatch."""
    in_features, projections = linears_of(config)["gate_up_proj"]
    flops = 2 * tokens * in_features * sum(projections.values())

    def forward(recipe: Recipe) -> float:
        layer = random_linear(in_features, projections, recipe)
        with torch.no_grad():
            return flops / milliseconds(lambda: layer(x)) / 1e9

    x = torch.randn(tokens, in_features, device="cuda").bfloat16().requires_grad_()
    grad_y = torch.randn(tokens, sum(projections.values()), device="cuda").bfloat16()
    layer = random_linear(in_features, projections, recipe)
    train_ms = milliseconds(lambda: layer(x).backward(grad_y), leaves=(x, layer.weight))
    return Rates(
        copy_gb_s=copy_speed(),
        forward_tflop_s=forward(recipe),
        bf16_tflop_s=forward(get_recipe("bf16")),
        train_tflop_s=3 * flops / train_ms / 1e9,
    )
