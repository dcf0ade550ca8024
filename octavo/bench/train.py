"""`octavo bench train`: a training step of a model's shape on this GPU, and the other passes over the same tokens.

    step              forward, loss, backward, optimiser step, re-quantisation, of one packed batch
    reference         forward without a gradient: old and reference log-probabilities
    shadow            forward on BF16 weights cast from the masters
    weight update     re-quantisation alone: what synchronises the rollout

Weights are random. Masters and moments take the first of FORMATS that fits the card beside the activations.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import PretrainedConfig

from octavo.bench.measure import require_cuda
from octavo.bench.rollout import random_decoder
from octavo.kernels.device import require_kernels
from octavo.models.config import DecoderConfig
from octavo.models.decoder import Decoder
from octavo.numerics.recipe import Recipe
from octavo.rl.batch import MiniBatch, pack
from octavo.rl.loss_clipped import PPOClip
from octavo.rl.losses import ClipBounds, reduce_loss
from octavo.rl.policy_loss import policy_losses
from octavo.rollout.engine import Completion
from octavo.trainer.memory import FRAGMENTATION, GIB, LIBRARY_BYTES, binary_size
from octavo.trainer.memory_held import count_parameters, forward_bytes, linears, master_bytes, moment_bytes
from octavo.trainer.memory_passes import DecoderPass
from octavo.trainer.optimizer import Optimizer, OptimizerConfig
from octavo.trainer.policy import packed_logprobs

BOUNDS = ClipBounds(low=0.8, high=1.28)


@dataclass(frozen=True, kw_only=True)
class TrainFormats:
    """What a step holds."""

    optimizer: OptimizerConfig
    """Whose formats masters and moments have."""
    recompute_layers: bool = False
    """As `trainer.recompute_layers`."""

    def __str__(self) -> str:
        text = f"{self.optimizer.master_format} masters, {self.optimizer.state_format} moments"
        return f"{text}, layers again" if self.recompute_layers else text


FORMATS = (
    TrainFormats(optimizer=OptimizerConfig()),
    TrainFormats(optimizer=OptimizerConfig(state_format="int8")),
    TrainFormats(optimizer=OptimizerConfig(state_format="int8", master_format="bf16")),
    TrainFormats(optimizer=OptimizerConfig(state_format="int8", master_format="bf16"), recompute_layers=True),
)
"""From most to fewest bytes."""


@dataclass(frozen=True, kw_only=True)
class TrainSpeed:
    """One packed batch; times are medians, in milliseconds."""

    tokens: int
    """T, in sequences of equal length."""
    sequence_tokens: int
    """Of each sequence; all but the first are scored."""
    formats: str
    """Of masters and moments."""
    step_ms: float
    reference_ms: float
    shadow_ms: float
    weight_update_ms: float
    flops: float
    """Of the model in a step: `model_flops`."""
    peak_gib: float
    """Most memory of tensors in a step; 0 on a CPU."""

    @property
    def tok_s(self) -> float:
        """Tokens trained on a second."""
        return self.tokens / self.step_ms * 1e3

    @property
    def tflop_s(self) -> float:
        """The model's, whatever is computed twice."""
        return self.flops / self.step_ms / 1e9

    @property
    def reference_tok_s(self) -> float:
        """Tokens a second of the forward without a gradient."""
        return self.tokens / self.reference_ms * 1e3


def train_speeds(
    config: DecoderConfig, hf_config: PretrainedConfig, recipe: Recipe, batches: Sequence[tuple[int, int]]
) -> list[TrainSpeed]:
    """A step of every batch (tokens, tokens of a sequence) with random weights.

    Raises:
        ValueError: no GPU, one without the kernels, a recipe without a backward, or nothing that fits.
    """
    require_cuda("octavo bench train")
    require_kernels("cuda", recipe.high_precision)
    if recipe.forward_only:
        raise ValueError(f"recipe {recipe.name!r} has no backward; take block128, or another that trains")
    check_length(config, max(sequence_tokens for _, sequence_tokens in batches), "--sequence-tokens or --tokens")
    found = []
    for tokens, sequence_tokens in batches:
        formats = formats_that_fit(config, recipe, tokens, torch.cuda.mem_get_info()[0])
        found.append(bench_train(config, hf_config, recipe, tokens, sequence_tokens, formats))
        gc.collect()
        torch.cuda.empty_cache()
    return found


def check_length(config: DecoderConfig, tokens: int, options: str) -> None:
    """ValueError where the model has fewer positions than a sequence; names the options that make it shorter."""
    if tokens > config.max_positions:
        raise ValueError(
            f"sequences of {tokens} tokens were asked for, and the model has {config.max_positions} positions. Give "
            f"fewer {options}"
        )


def bench_train(
    config: DecoderConfig,
    hf_config: PretrainedConfig,
    recipe: Recipe,
    tokens: int,
    sequence_tokens: int,
    formats: TrainFormats,
    device: str = "cuda",
    calls: int = 5,
) -> TrainSpeed:
    """A step of one batch, in formats that fit."""
    batch = random_batch(config.vocab_size, tokens, sequence_tokens, device)
    decoder = random_decoder(config, hf_config, recipe, sequence_tokens, device, masters=True)
    if formats.optimizer.master_format == "bf16":
        decoder.round_masters_()
    decoder.recompute_layers = formats.recompute_layers
    return time_passes(decoder, batch, formats, calls)


def time_passes(decoder: Decoder, batch: MiniBatch, formats: TrainFormats, calls: int = 5) -> TrainSpeed:
    """Time a step and the other passes of a decoder on a batch of one microbatch."""
    (microbatch,) = batch.microbatches
    device = microbatch.tokens.device
    optimizer = Optimizer(dict(decoder.named_parameters()), formats.optimizer, 1000, fused=device.type == "cuda")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    step_ms = wall_milliseconds(partial(train_once, decoder, optimizer, batch), device, calls)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    with torch.no_grad():
        reference, shadow = (
            wall_milliseconds(partial(packed_logprobs, decoder, microbatch, 1.0, shadow=shadow), device, calls)
            for shadow in (False, True)
        )
    lengths = microbatch.cu_seqlens.diff().tolist()
    return TrainSpeed(
        tokens=sum(lengths),
        sequence_tokens=lengths[0],
        formats=str(formats),
        step_ms=step_ms,
        reference_ms=reference,
        shadow_ms=shadow,
        weight_update_ms=wall_milliseconds(decoder.requantize_, device, calls),
        flops=model_flops(decoder.config, lengths, batch.num_loss_tokens),
        peak_gib=peak / GIB,
    )


def train_once(decoder: Decoder, optimizer: Optimizer, batch: MiniBatch) -> None:
    """Forward, PPO loss, backward, optimiser step, re-quantisation."""
    accumulate(decoder, batch)
    optimizer.step()
    decoder.requantize_()


def accumulate(decoder: Decoder, batch: MiniBatch) -> None:
    """Forward, PPO loss and backward of every microbatch; without old log-probabilities every ratio is 1."""
    for microbatch in batch.microbatches:
        logprobs, _ = packed_logprobs(decoder, microbatch, 1.0)
        if microbatch.old_logprobs is None:
            microbatch = replace(microbatch, old_logprobs=logprobs.detach())
        losses = policy_losses(PPOClip(), logprobs, microbatch, BOUNDS, torch.ones_like(logprobs))
        reduce_loss(
            losses,
            microbatch.loss_mask,
            microbatch.sequence_index,
            "token_mean",
            num_loss_tokens=batch.num_loss_tokens,
            num_sequences=batch.num_sequences,
            max_completion_tokens=len(microbatch.tokens),
        ).backward()


def random_batch(vocab_size: int, tokens: int, sequence_tokens: int, device: str) -> MiniBatch:
    """Sequences of random ids, all of them completions but the first token; advantages of 1 and -1 in turn.

    Raises:
        ValueError: sequences of that length do not make up the tokens.
    """
    if sequence_tokens < 2 or tokens % sequence_tokens:
        raise ValueError(
            f"{tokens} tokens are no whole number of sequences of {sequence_tokens}, or those have fewer than 2. Give "
            f"a --sequence-tokens that divides --tokens"
        )
    ids = torch.randint(vocab_size, (tokens // sequence_tokens, sequence_tokens)).tolist()
    zeros = [0.0] * (sequence_tokens - 1)
    completions = [
        [Completion(prompt=row[:1], tokens=row[1:], rollout_logprobs=zeros, finish_reason="length")] for row in ids
    ]
    advantages = torch.tensor([[1.0 - 2.0 * (index % 2)] for index in range(len(ids))])
    (batch,) = pack(completions, advantages, num_mini_batches=1, microbatch_tokens=tokens, device=device)
    return batch


def wall_milliseconds(call: Callable[[], object], device: torch.device, calls: int) -> float:
    """Median time of a call that takes milliseconds, after two that compile and allocate."""
    times = []
    for _ in range(2 + calls):
        wait(device)
        start = time.perf_counter()
        call()
        wait(device)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[2:])


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def model_flops(config: DecoderConfig, lengths: Sequence[int], num_scored: int) -> float:
    """Floating-point operations that a step on packed sequences asks for.

    Six for each weight of a product and token it is multiplied with, 2 forward and 4 backward (Kaplan et al.,
    arXiv:2001.08361), lm_head for scored tokens alone; and of attention 12 x layers x heads x head width for each query
    and key (PaLM, arXiv:2204.02311, appendix B), of which a causal mask leaves half. Whatever is computed twice, norms,
    casts and the optimiser are not counted.

    Args:
        config: the shape.
        lengths: tokens of each sequence.
        num_scored: tokens with a log-probability.
    """
    weights = sum(rows * columns for _, rows, columns in linears(config))
    head = config.vocab_size * config.hidden_size
    pairs = sum(length**2 for length in lengths) / 2
    attention = 12 * config.num_layers * config.num_heads * config.head_dim * pairs
    return 6.0 * (weights * sum(lengths) + head * num_scored) + attention


def needed_bytes(config: DecoderConfig, recipe: Recipe, tokens: int, formats: TrainFormats) -> int:
    """Of a GPU for a step on one microbatch, as the memory plan of a run counts them."""
    held = forward_bytes(config, recipe, on_gpu=True)
    passes = DecoderPass(
        shape=config, recipe=recipe, num_tokens=tokens, num_scored=tokens, recompute=formats.recompute_layers
    )
    at_all_times = (
        master_bytes(config, formats.optimizer.master_format)
        + moment_bytes(config, formats.optimizer.state_format)
        + held.stored
        + held.operands
        + held.head
        + held.backward
    )
    most = max(passes.update(accumulated=False), passes.forward(shadow=True), 4 * count_parameters(config))
    return int((at_all_times + most) * (1 + FRAGMENTATION)) + LIBRARY_BYTES


def formats_that_fit(config: DecoderConfig, recipe: Recipe, tokens: int, free_bytes: int) -> TrainFormats:
    """The first of FORMATS whose step fits.

    Raises:
        ValueError: none does.
    """
    for formats in FORMATS:
        if needed_bytes(config, recipe, tokens, formats) <= free_bytes:
            return formats
    least = needed_bytes(config, recipe, tokens, FORMATS[-1])
    raise ValueError(
        f"a step on {tokens} tokens needs {binary_size(least)} at the least ({FORMATS[-1]}), and "
        f"{binary_size(free_bytes)} are free. Give fewer --tokens, or a smaller model"
    )
