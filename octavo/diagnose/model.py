"""Diagnosis of a model: one batch under several recipes, before and after a null change and a real optimiser step.

The completions are sampled in BF16, or given. The step is the same for every recipe, so that only their numerics
differ: one AdamW step from zero moments, on the gradient of the PPO loss in BF16 with the given advantages, or with
signs drawn at random. Such a step moves each weight by about the learning rate.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from octavo.diagnose.diagnosis import Diagnosis, Finding, findings_of
from octavo.diagnose.prompt_files import PromptRow, read_prompts
from octavo.kernels.device import Kernels
from octavo.layers.linear import quantized_layers
from octavo.models.checkpoint import load_decoder
from octavo.models.config import read_config
from octavo.models.decoder import Decoder
from octavo.numerics.recipe import Recipe, get_recipe
from octavo.rl.batch import MiniBatch, pack
from octavo.rl.entropy import entropy_metrics
from octavo.rl.loss_clipped import ppo_clip
from octavo.rl.losses import ClipConfig, reduce_loss
from octavo.rl.mismatch import mismatch_by_position, mismatch_metrics
from octavo.rl.observatory import NULL, LogprobPair, ObservedTokens, answer_metrics, ratio_metrics
from octavo.rl.observatory_modules import (
    ModuleDifference,
    first_difference,
    module_differences,
    packed_outputs,
    rollout_outputs,
)
from octavo.rollout.engine import Completion, Engine, EngineConfig
from octavo.rollout.sampler import SamplingConfig
from octavo.tasks.prompts import ChatTemplate, encode_prompt, stop_token_ids
from octavo.trainer.metrics import Display
from octavo.trainer.observe import answer_index, null_change
from octavo.trainer.optimizer import Optimizer, OptimizerConfig
from octavo.trainer.policy import packed_logprobs
from octavo.trainer.run import check_vocabulary, load_generation_config, load_tokenizer, use_device

Pass = dict[str, tuple[Tensor, Tensor]]
"""Numerics -> log-probabilities and entropy of the batch, [T] fp32 each."""

MICROBATCH_TOKENS = 2048
RUNNING_SEQUENCES = 64
"""That the KV cache has room for at once."""
COMPARED_TOKENS = 96
"""Of one sequence, whose operations are compared."""
DECODED_TOKENS = 12
"""Of those, the ones that the rollout decodes one at a time."""


@dataclass(frozen=True, kw_only=True)
class ModelDiagnosis:
    """What `octavo diagnose model` does."""

    model: str
    """Hugging Face folder or hub id."""
    prompts: Path
    """`read_prompts` says what it may hold."""
    recipes: tuple[str, ...] = ("block128", "w8a16")
    """Compared with BF16, and with each other."""
    num_prompts: int = 4
    """The first of the file."""
    group_size: int = 4
    """Completions of each, where they are sampled."""
    max_tokens: int = 32
    """Of a completion."""
    temperature: float = 1.0
    """Of the samples, and divides the logits ever after."""
    lr: float = 1e-6
    """Of the optimiser step."""
    clip: ClipConfig = ClipConfig()
    """Bounds that BF16 would use."""
    kv_cache: Literal["fp8", "bf16"] = "fp8"
    """Of every recipe but bf16 and fp32; `precision.kv_cache` of a run."""
    dither: bool = False
    """Move the masters off FP8 rounding ties, as `model.dither_masters` does."""
    fp32: bool = False
    """Compare with FP32 too."""
    seed: int = 0
    """Of samples and signs."""
    chat_template: ChatTemplate = "auto"
    """As in `encode_prompt`."""
    device: str = "cpu"
    """Where it runs."""
    kernels: Kernels = "by_device"
    """As in a run."""

    def __post_init__(self) -> None:
        for name in ("num_prompts", "group_size", "max_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if not 0.0 < self.temperature < float("inf"):
            raise ValueError(f"temperature divides the logits of both sides: finite, above 0; got {self.temperature}")
        if not 0.0 < self.lr < float("inf"):
            raise ValueError(f"lr is the learning rate of a step, finite and above 0; got {self.lr}")
        for name in self.recipes:
            self.recipe(name)
        if not set(self.recipes) - {"bf16"}:
            raise ValueError("recipes are compared with bf16: name another, as block128")

    def recipe(self, name: str) -> Recipe:
        """What a name stands for here."""
        recipe = get_recipe(name)
        return recipe if recipe.kv_cache == recipe.high_precision else replace(recipe, kv_cache=self.kv_cache)


def diagnose_model(settings: ModelDiagnosis, display: Display) -> Diagnosis:
    """Sample, step, compare.

    Raises:
        ValueError: model or prompts are missing or do not fit.
    """
    started = time.perf_counter()
    use_device(settings.device, settings.kernels)
    rows = read_prompts(settings.prompts, settings.num_prompts)
    bf16, completions = sampled(settings, rows, display)
    advantages = advantages_of(settings, rows, completions)
    (batch,) = pack(
        completions,
        advantages,
        num_mini_batches=1,
        microbatch_tokens=MICROBATCH_TOKENS,
        device=settings.device,
    )
    display.line(f"batch: {batch.num_sequences} completions, {batch.num_loss_tokens} loss tokens")
    names = [name for name in dict.fromkeys(settings.recipes) if name != "bf16"]
    decoders = {"bf16": bf16, **{name: bf16.with_recipe(settings.recipe(name)) for name in names}}
    if settings.fp32:
        decoders["fp32"] = bf16.with_recipe(get_recipe("fp32"))
    old, null, now = Pass(), Pass(), Pass()
    modules: dict[str, list[ModuleDifference]] = {}
    for name, decoder in decoders.items():
        display.line(f"{name}: before the step, and after a null change")
        old[name] = logprobs_of(decoder, batch, settings.temperature)
        with null_change(decoder):
            null[name] = logprobs_of(decoder, batch, settings.temperature)
        if name in names:
            display.line(f"{name}: every operation against BF16's, and rollout against training")
            modules |= compared_modules(decoder, bf16, batch, settings.temperature)
    display.line(f"one optimiser step in BF16, lr {settings.lr:g}")
    step_in_bf16(bf16, batch, settings)
    for name, decoder in decoders.items():
        display.line(f"{name}: after the step")
        decoder.requantize_()
        now[name] = logprobs_of(decoder, batch, settings.temperature)
    columns = {name: figures(name, old, null, now, batch, settings.clip) for name in names}
    given = rows[0].completion is not None
    facts = {
        "model": settings.model,
        "prompts": f"{settings.prompts}, the first {len(rows)}",
        "completions": f"{batch.num_sequences}, {'given' if given else 'sampled in BF16'}; "
        f"{batch.num_loss_tokens:,} tokens, temperature {settings.temperature:g}",
        "advantages": "given" if given and rows[0].advantage is not None else "+1 or -1 at random for each completion",
        "step": f"one AdamW step from zero moments in BF16, lr {settings.lr:g}",
        "keys and values": f"{settings.kv_cache} beside FP8 weights",
        "masters": "dithered" if settings.dither else "as the checkpoint has them",
        "bounds": f"[{settings.clip.bounds().low:g}, {settings.clip.bounds().high:g}]",
        "device": settings.device if settings.kernels == "by_device" else f"{settings.device}, by the reference",
        "time": f"{time.perf_counter() - started:.0f} s",
    }
    return Diagnosis(
        title=settings.model,
        facts=facts,
        columns=columns,
        findings=module_findings(modules) + findings_of(columns, "a rollout in {name}, training in bf16"),
        modules=modules,
    )


def sampled(
    settings: ModelDiagnosis, rows: Sequence[PromptRow], display: Display
) -> tuple[Decoder, list[list[Completion]]]:
    """The model in BF16, and P groups of completions, sampled or given."""
    tokenizer = load_tokenizer(settings.model)
    prompts = [encode_prompt(tokenizer, row.prompt, None, settings.chat_template) for row in rows]
    given = [row.completion for row in rows if row.completion is not None]
    answers = [tokenizer.encode(text, add_special_tokens=False)[: settings.max_tokens] for text in given]
    longest = max(map(len, prompts)) + settings.max_tokens
    limit = read_config(settings.model)[0].max_positions
    if longest > limit:
        raise ValueError(
            f"{settings.prompts}: the longest prompt has {longest - settings.max_tokens} tokens, which with "
            f"{settings.max_tokens} more exceed the model's {limit} positions. Shorten it, or lower --max-tokens"
        )
    bf16 = load_decoder(
        settings.model,
        get_recipe("bf16"),
        max_tokens=longest,
        device=settings.device,
        dither_seed=settings.seed if settings.dither else None,
    )
    check_vocabulary([*prompts, *answers], bf16.config.vocab_size, settings.model)
    if given:
        if not all(answers):
            raise ValueError(f"{settings.prompts}: completion {answers.index([]) + 1} has no token. Give it a text")
        return bf16, [
            [Completion(prompt=p, tokens=a, rollout_logprobs=[0.0] * len(a), finish_reason="stop")]
            for p, a in zip(prompts, answers, strict=True)
        ]
    stops = stop_token_ids(tokenizer, load_generation_config(settings.model), bf16.hf_config)
    engine = Engine(bf16, EngineConfig(kv_cache_tokens=max(4096, RUNNING_SEQUENCES * longest)), stops)
    with display.bar("sample", len(rows) * settings.group_size) as advance:
        return bf16, engine.generate(
            prompts,
            SamplingConfig(temperature=settings.temperature),
            max_completion_tokens=settings.max_tokens,
            group_size=settings.group_size,
            seed=settings.seed,
            progress=advance,
        )


def advantages_of(
    settings: ModelDiagnosis, rows: Sequence[PromptRow], completions: Sequence[Sequence[Completion]]
) -> Tensor:
    """[P, G] fp32: as given, or +1 and -1 at random, half of the completions each where their number is even."""
    if rows[0].advantage is not None:
        return torch.tensor([[row.advantage or 0.0] for row in rows])
    count = sum(map(len, completions))
    signs = torch.where(torch.arange(count) % 2 == 0, 1.0, -1.0)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(settings.seed))
    return signs[order].view(len(completions), -1)


@torch.no_grad()
def logprobs_of(decoder: Decoder, batch: MiniBatch, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropy of a batch, [T] fp32 each."""
    parts = [packed_logprobs(decoder, microbatch, temperature) for microbatch in batch.microbatches]
    for layer in quantized_layers(decoder):
        layer.forget_prepared()  # on a CPU eight bytes a weight, and there are several decoders
    logprobs, entropy = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropy)


def step_in_bf16(bf16: Decoder, batch: MiniBatch, settings: ModelDiagnosis) -> None:
    """Move the masters by one AdamW step on the PPO loss, whose ratios are all 1."""
    for microbatch in batch.microbatches:
        logprobs, _ = packed_logprobs(bf16, microbatch, settings.temperature)
        ones = torch.ones_like(logprobs)
        losses = ppo_clip(logprobs, logprobs.detach(), microbatch.advantages, settings.clip.bounds(), ones)
        reduce_loss(
            losses,
            microbatch.loss_mask,
            microbatch.sequence_index,
            "token_mean",
            num_loss_tokens=batch.num_loss_tokens,
            num_sequences=batch.num_sequences,
            max_completion_tokens=settings.max_tokens,
        ).backward()
    Optimizer(dict(bf16.named_parameters()), OptimizerConfig(lr=settings.lr), num_updates=1).step()
    bf16.requantize_()


def compared_modules(
    decoder: Decoder, bf16: Decoder, batch: MiniBatch, temperature: float
) -> dict[str, list[ModuleDifference]]:
    """Every operation on the first sequence: the recipe against BF16, and its rollout against its training."""
    microbatch = batch.microbatches[0]
    size = min(int(microbatch.cu_seqlens[1]), COMPARED_TOKENS)
    tokens, name = microbatch.tokens[:size], decoder.recipe.name
    training = packed_outputs(decoder, tokens, temperature)
    num_prompt = max(1, size - DECODED_TOKENS)
    rollout = rollout_outputs(decoder, tokens, temperature, num_prompt=num_prompt)
    return {
        f"{name} / bf16": module_differences(training, packed_outputs(bf16, tokens, temperature)),
        f"{name}: rollout / training": module_differences(rollout, training),
    }


def module_findings(modules: dict[str, list[ModuleDifference]]) -> list[Finding]:
    """Rollout and training of a recipe that part, and where."""
    found = []
    for name, differences in modules.items():
        first = first_difference(differences)
        if first is not None and name.endswith("rollout / training"):
            recipe = name.partition(":")[0]
            do = (
                "Its result depends on the batch: use a batch-invariant recipe."
                if not get_recipe(recipe).batch_invariant
                else "This device sums otherwise in decode: octavo check says more; do not train with it here."
            )
            says = f"{name}: {first.module} is the first operation that differs, by up to {first.max_abs:.3g}."
            found.append(Finding(says=says, do=do))
    return found


def figures(name: str, old: Pass, null: Pass, now: Pass, batch: MiniBatch, clip: ClipConfig) -> dict[str, Any]:
    """The metrics of a recipe: the step, the null change, and what a rollout in it would be to training in BF16."""
    mask, positions = batch.gather("loss_mask"), batch.gather("completion_positions")
    tokens = ObservedTokens(
        loss_mask=mask,
        advantages=batch.gather("advantages"),
        entropy=now["bf16"][1],
        answer_index=answer_index(batch),
    )
    numerics = {"fp8": name, "bf16": "bf16", **({"fp32": "fp32"} if "fp32" in old else {})}
    nulls, steps = (
        {key: LogprobPair(before=old[n][0], after=after[n][0]) for key, n in numerics.items()} for after in (null, now)
    )
    bf16, chosen = old["bf16"][0], old[name][0]
    return {
        "num_tokens": batch.num_loss_tokens,
        **mismatch_metrics(bf16, chosen, mask),
        **mismatch_by_position(bf16[mask], chosen[mask], positions[mask]),
        **ratio_metrics(steps, tokens, clip),
        **ratio_metrics(nulls, tokens, clip, NULL),
        **entropy_metrics(old[name][1][mask]),
        **answer_metrics(tokens),
    }
