"""The memory plan of a run on one CUDA device: bytes by phase, by arithmetic, before anything is allocated.

    held           weights, moments, KV cache, ...                  at all times
    rollout        + a prefill, or a decode step
    old_logprobs   + a forward of a microbatch
    shadow         + gradients, a forward with weights cast from the masters
    critic         + the critic's gradients and activations
    update         + gradients, activations of a microbatch, what its backward holds at its widest moment
    optimizer      + gradients

With `rollout.engine.lend_memory` the KV cache is the rollout's alone. With `optimizer.offload_moments` AdamW's moments
are held from a step's first update to its last alone. The phases do not coincide, so the peak is the largest. A
microbatch is taken to be full, of as many scored tokens as take most (lm_head keeps more for fewer of them), and
completions to be as long as they may be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from octavo.kernels import spread_attention
from octavo.kernels.operands import TOKEN_BLOCK
from octavo.models.config import DecoderConfig, read_config
from octavo.numerics.recipe import Recipe, get_recipe
from octavo.rl.gae import GAEConfig
from octavo.rollout.cuda_graph import padded_size
from octavo.rollout.engine import EngineConfig
from octavo.rollout.sampler import looks_at_host
from octavo.trainer.config import TrainConfig
from octavo.trainer.critic import critic_shape
from octavo.trainer.memory_held import (
    OF_CRITIC,
    OF_POLICY,
    MemoryEstimate,
    estimate_memory,
    kv_cache_bytes,
    offloaded_bytes,
)
from octavo.trainer.memory_linear import FP32
from octavo.trainer.memory_passes import DecoderPass, scored_counts
from octavo.trainer.precision import declared_flow, rollout_shares_bytes

GIB = 2**30
WORKSPACE_BYTES = 32 * 2**20
"""Of cuBLAS on Hopper, for each thread and stream that multiplies."""
GRAPH_ROWS = 128
"""Decode steps of more rows multiply by cuBLAS, in a workspace for each CUDA graph."""
TRUNCATION_BYTES = 42
"""Of sampling with top_p, top_k and min_p, a logit."""
BATCH_BYTES = 37
"""Of a packed token: ids, positions, sequence, mask, advantage, two log-probabilities; each more takes FP32."""
LIBRARY_BYTES = GIB
"""Kernels, that CUDA loads as they are first used."""
FRAGMENTATION = 0.05
"""Share of the peak that the caching allocator holds beyond it."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What a run takes of its device."""

    estimate: MemoryEstimate
    """Parameters, the model as written, and what does not depend on the batch."""
    held: dict[str, int] = field(default_factory=dict)
    """What for -> bytes, at all times."""
    phases: dict[str, dict[str, int]] = field(default_factory=dict)
    """Phase -> what for -> bytes beside `held`. Empty where activations are not planned: on a CPU, in FP32."""
    reserve: int = LIBRARY_BYTES
    """Bytes of the device that no tensor takes: kernels, memory of CUDA graphs. The allocator's come on top."""
    host: dict[str, int] = field(default_factory=dict)
    """What for -> bytes of the host's memory that are pinned for it."""

    @property
    def totals(self) -> dict[str, int]:
        """Phase -> bytes of all tensors."""
        held = sum(self.held.values())
        return {name: held + sum(parts.values()) for name, parts in self.phases.items()}

    @property
    def peak(self) -> tuple[str, int]:
        """The phase that takes most, and its bytes."""
        totals = self.totals
        name = max(totals, key=totals.__getitem__)
        return name, totals[name]

    @property
    def needed_bytes(self) -> int:
        """Of the device, at the peak."""
        return math.ceil(self.peak[1] * (1 + FRAGMENTATION)) + self.reserve

    def metrics(self) -> dict[str, float]:
        """memory/planned_gib."""
        return {"memory/planned_gib": self.peak[1] / GIB} if self.phases else {}

    def lines(self) -> list[str]:
        """For a user; none where activations are not planned."""
        if not self.phases:
            return []
        name, peak = self.peak
        phases = ", ".join(f"{phase} {binary_size(size)}" for phase, size in self.totals.items())
        return [
            f"memory plan: {binary_size(peak)} at the peak, in {name} ({phases})",
            f"  at all times {binary_size(sum(self.held.values()))}: {parts_text(self.held)}; in {name} also "
            f"{parts_text(self.phases[name])}",
            *([f"  pinned in the host's memory: {parts_text(self.host)}"] if self.host else []),
        ]


Planner = Callable[[TrainConfig], MemoryPlan]
"""Gives the plan of a config."""


def planner(config: TrainConfig) -> Planner:
    """For this config, and others with its models: reads their config.json once.

    Raises:
        ValueError: it is missing or not supported, or does not fit the configuration.
    """
    shape, _ = read_config(config.model.path)
    two_forwards = not rollout_shares_bytes(config, declared_flow(config))
    of_critic = critic_shape(config, shape)
    return lambda config: plan_memory(config, shape, two_forwards, of_critic)


def plan_memory(
    config: TrainConfig, shape: DecoderConfig, two_forwards: bool, of_critic: DecoderConfig | None = None
) -> MemoryPlan:
    """Arguments as of `estimate_memory`."""
    estimate = estimate_memory(config, shape, two_forwards, of_critic)
    recipes = [config.precision.train_recipe(), config.precision.rollout_recipe(), get_recipe(config.critic.recipe)]
    host = offloaded_bytes(config, shape, of_critic)
    if not config.runs_kernels or any(recipe.high_precision == "fp32" for recipe in recipes):
        return MemoryPlan(estimate=estimate, host=host)  # there the reference multiplies, in float64
    counts = TokenCounts.of(config)
    held = {name: size for name, size in estimate.parts.items() if name != "gradients" and size}
    if of_critic is not None:
        held["critic"] -= FP32 * estimate.num_critic_parameters
    held["packed batch"] = counts.in_step * _batch_bytes(config)
    held["rotary table"] = FP32 * config.max_tokens * shape.head_dim
    held["cuBLAS workspaces"] = workspace_bytes(0, cuda_graphs=False)
    rollout, reserve, engine = {}, LIBRARY_BYTES, config.rollout.engine
    if isinstance(engine, EngineConfig):
        held["page table"] = FP32 * padded_size(engine.max_sequences) * -(-config.max_tokens // engine.page_size)
        held["cuBLAS workspaces"] = workspace_bytes(counts.running, engine.cuda_graphs)
        truncates = config.evaluation.interval > 0 and looks_at_host(config.evaluation.sampling)
        recipe = config.precision.rollout_recipe()
        prefill, decode = rollout_bytes(shape, recipe, counts.running, counts.prefill, config.max_tokens, truncates)
        rollout = {"prefill": prefill} if prefill > decode else {"decode": decode}
        reserve += decode * engine.cuda_graphs
        if engine.lend_memory:
            lent = [held.pop("KV cache")]
            if "rescue in BF16" in held:  # whose steps lend the other cache
                lent.append(kv_cache_bytes(engine, shape, get_recipe("bf16")))
                held["rescue in BF16"] -= lent[-1]
            rollout["KV cache"] = max(lent)
    phases = {"rollout": rollout, **_passes(config, shape, of_critic, counts, estimate)}
    _offload(config, host, held, phases)
    return MemoryPlan(estimate=estimate, held=held, phases=phases, reserve=reserve, host=host)


def _offload(
    config: TrainConfig, host: dict[str, int], held: dict[str, int], phases: dict[str, dict[str, int]]
) -> None:
    """Take moments that lie on the host out of what is held at all times, into the phases that have them back."""
    if OF_POLICY in host:
        size = held.pop(OF_POLICY)
        several = config.trainer.num_mini_batches > 1  # whose later passes come after the first update
        for phase in ("shadow", "update", "optimizer") if several else ("optimizer",):
            if phase in phases:
                phases[phase] = {**phases[phase], OF_POLICY: size}
    if OF_CRITIC in host:
        held["critic"] -= host[OF_CRITIC]
        phases["critic"][OF_CRITIC] = host[OF_CRITIC]


def rollout_bytes(
    shape: DecoderConfig, recipe: Recipe, rows: int, prefill_tokens: int, longest: int, truncates: bool
) -> tuple[int, int]:
    """Bytes of the largest prefill, and of the largest decode step.

    Args:
        shape, recipe: of the decoder.
        rows: sequences of a decode step, as many as a prefill may have.
        prefill_tokens: new tokens of a prefill.
        longest: tokens of a sequence, at most.
        truncates: sampling leaves tokens out, by top_p, top_k or min_p.
    """
    few = max(1, min(rows, spread_attention.MAX_PROGRAMS // shape.num_kv_heads))  # whose attention is spread
    prefill, decode, of_few = (
        DecoderPass(shape=shape, recipe=recipe, num_tokens=num_tokens, num_scored=scored, paged=True).forward()
        for num_tokens, scored in ((prefill_tokens, rows), (rows, rows), (few, few))
    )
    decode += truncates * TRUNCATION_BYTES * rows * shape.vocab_size
    heads = shape.num_heads, shape.num_kv_heads
    return prefill, max(decode, of_few + spread_attention.workspace_bytes(few, *heads, longest))


def workspace_bytes(running: int, cuda_graphs: bool) -> int:
    """Of cuBLAS, for decode steps of up to `running` rows."""
    num_graphs = max(0, running - GRAPH_ROWS) // (padded_size(GRAPH_ROWS + 1) - GRAPH_ROWS)
    return WORKSPACE_BYTES * (2 + num_graphs * cuda_graphs)


def _passes(
    config: TrainConfig,
    shape: DecoderConfig,
    of_critic: DecoderConfig | None,
    counts: TokenCounts,
    estimate: MemoryEstimate,
) -> dict[str, dict[str, int]]:
    """The phases in which packed microbatches run."""
    recipes, T = [config.precision.train_recipe()], -(-counts.microbatch // TOKEN_BLOCK) * TOKEN_BLOCK  # filled up
    if config.watch is not None and config.watch.action == "bf16_forward":
        recipes.append(get_recipe("bf16"))
    recompute, longest = config.trainer.recompute_layers, config.max_tokens
    policies = [
        DecoderPass(shape=shape, recipe=recipe, num_tokens=T, num_scored=scored, longest=longest, recompute=recompute)
        for recipe in recipes
        for scored in scored_counts(T, shape.vocab_size)
    ]
    gradients = {"gradients": FP32 * estimate.num_parameters}
    phases = {"old_logprobs": {"forward": max(policy.forward() for policy in policies)}}
    if of_critic is not None:
        critic = DecoderPass(
            shape=replace(of_critic, tied_embeddings=True),  # its lm_head is dropped
            recipe=get_recipe(config.critic.recipe),
            num_tokens=T,
            num_scored=0,
            longest=longest,
            recompute=recompute,
        )
        head = 2 * FP32 * T * of_critic.hidden_size  # its input in FP32, and the gradient of that
        phases["critic"] = {
            "gradients": FP32 * estimate.num_critic_parameters,
            "saved activations": critic.saved_bytes,
            "backward": critic.update(accumulated=True) - critic.saved_bytes + head,
        }
    shadow, reads_shadow = policies[0].forward(shadow=True), config.algorithm.loss_shadow != "training"
    if config.calibration is not None or config.trainer.shadow_interval or reads_shadow:
        phases["shadow"] = {**gradients, "forward": shadow}
    several = counts.in_mini_batch > counts.microbatch
    widest = max(policies, key=lambda policy: policy.update(accumulated=several))
    backward = widest.update(accumulated=several) - widest.saved_bytes
    phases["update"] = {
        **(gradients if several else {}),  # of a single microbatch they grow as activations go
        "saved activations": widest.saved_bytes,
        "backward": max(backward, shadow) if reads_shadow else backward,  # its forward is between the two
    }
    phases["optimizer"] = gradients
    return phases


@dataclass(frozen=True, kw_only=True)
class TokenCounts:
    """The most that a step has of each."""

    running: int
    """Rows of a decode step."""
    prefill: int
    """New tokens of a prefill."""
    in_step: int
    """Packed tokens, prompts included."""
    in_mini_batch: int
    """Of them in one mini-batch."""
    microbatch: int
    """Of them in one forward and backward."""

    @classmethod
    def of(cls, config: TrainConfig) -> TokenCounts:
        """Of a run."""
        rollout, longest = config.rollout, config.max_tokens
        running, prefill = _sampled_at_once(config)
        groups = -(-rollout.prompts_per_step // config.trainer.num_mini_batches)
        in_mini_batch = groups * rollout.group_size * longest
        return cls(
            running=running,
            prefill=prefill,
            in_step=rollout.prompts_per_step * rollout.group_size * longest,
            in_mini_batch=in_mini_batch,
            microbatch=min(in_mini_batch, max(config.trainer.microbatch_tokens, longest)),
        )


def _sampled_at_once(config: TrainConfig) -> tuple[int, int]:
    """Rows of a decode step and new tokens of a prefill; none where vLLM samples, within its share."""
    rollout, evaluation, engine, longest = config.rollout, config.evaluation, config.rollout.engine, config.max_tokens
    if not isinstance(engine, EngineConfig):
        return 0, 0
    num_prompts, num_sequences = rollout.prompts_per_step, rollout.prompts_per_step * rollout.group_size
    if evaluation.interval:
        num_problems = evaluation.num_problems or engine.max_sequences
        num_prompts = max(num_prompts, num_problems)
        num_sequences = max(num_sequences, num_problems * evaluation.completions_per_problem)
    running = min(engine.max_sequences, num_sequences)
    rest = min(rollout.max_prompt_tokens, engine.page_size)  # of a prompt whose whole pages the group shares
    prompts = min(num_prompts, running) * rollout.max_prompt_tokens + running * rest
    if running * longest > engine.kv_cache_tokens:  # sequences are preempted, and computed anew
        prompts = running * longest
    return padded_size(running), min(prompts, max(engine.max_prefill_tokens, longest))


def _batch_bytes(config: TrainConfig) -> int:
    """Of a packed token."""
    more = [
        config.algorithm.kl.coefficient > 0.0,  # ref_logprobs
        *(isinstance(config.algorithm.advantage, GAEConfig),) * 2,  # values, returns
        *(config.calibration is not None,) * 2,  # the shadow's and the reference's old_logprobs
    ]
    return BATCH_BYTES + FP32 * sum(more)


def offload_lines(config: TrainConfig) -> list[str]:
    """For a user: what of AdamW's moments lies on the host, or that `offload_moments` moves none.

    Raises:
        ValueError: a model's config.json is missing or not supported.
    """
    if not (config.optimizer.offload_moments or config.critic.optimizer.offload_moments):
        return []
    shape, _ = read_config(config.model.path)
    host = offloaded_bytes(config, shape, critic_shape(config, shape))
    if host:
        return [f"offload_moments: pinned in the host's memory but for updates: {parts_text(host)}"]
    return [f"offload_moments=true moves nothing on device={config.device!r}: there are no moments on a GPU"]


def parts_text(parts: dict[str, int]) -> str:
    """Largest first."""
    return ", ".join(f"{name} {binary_size(size)}" for name, size in sorted(parts.items(), key=lambda part: -part[1]))


def binary_size(num_bytes: float) -> str:
    """A size for people: 34.1 MiB, 12.34 GiB."""
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / 2**20:.1f} MiB"
