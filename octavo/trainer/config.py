"""The configuration of a training run: every key of the YAML file, its default and its meaning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from octavo.kernels.device import Kernels
from octavo.numerics.recipe import get_recipe
from octavo.rl.advantages import GRPOConfig, ReinforcePlusPlusConfig, RLOOConfig
from octavo.rl.calibration_config import ExactCalibration, GridCalibration, SymmetricCalibration
from octavo.rl.calibration_losses import plain_bounds, refusal, scale_of
from octavo.rl.corrections import IcePop, SequenceMask, SequenceTIS
from octavo.rl.dynamic_sampling import DynamicSamplingConfig
from octavo.rl.gae import GAEConfig
from octavo.rl.loss_clipped import BAPO, M2PO, PPOClip
from octavo.rl.loss_likelihood import CISPO, DPPOKL, DPPOTV, Reinforce
from octavo.rl.loss_sequence import GSPO, GSPOToken
from octavo.rl.losses import ClipBounds, ClipConfig, KLConfig, Reduction
from octavo.rl.observatory import ObservatoryConfig
from octavo.rl.overlong import OverlongConfig
from octavo.rollout.engine import EngineConfig, check_group_size
from octavo.rollout.sampler import SamplingConfig
from octavo.rollout.vllm_config import VLLMConfig, check_vllm_runs
from octavo.tasks.arithmetic import ArithmeticConfig
from octavo.tasks.datasets import DatasetConfig
from octavo.tasks.gsm8k import GSM8KConfig
from octavo.tasks.mixture import MixtureConfig
from octavo.tasks.prompts import ChatTemplate
from octavo.tasks.reasoning_gym import ReasoningGymConfig
from octavo.tasks.rewards import RewardConfig
from octavo.tasks.verifiers import VerifierConfig
from octavo.trainer.checkpoint import CheckpointConfig
from octavo.trainer.critic_config import CriticConfig
from octavo.trainer.optimizer import OptimizerConfig
from octavo.trainer.precision_config import PrecisionConfig
from octavo.trainer.trackers import TrackingConfig
from octavo.trainer.watch import WatchConfig

RatioSource = Literal["training", "bf16_shadow", "fp32_shadow"]
"""Whose ratio a loss takes."""
MAX_COMPLETIONS = 2**20
"""Of a step; their prompts alone would take minutes to list."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy to start from."""

    path: str
    """Hugging Face folder or hub id."""
    chat_template: ChatTemplate = "auto"
    """auto: the tokenizer's chat template if it has one, else the plain text; always; never."""
    enable_thinking: bool | None = None
    """The switch of chat templates such as Qwen3's; null leaves the template's default. An error without the switch."""
    dither_masters: bool = False
    """Move each FP32 master at random (seeded) inside the interval that rounds to its BF16 value. The BF16 model is
    unchanged; fewer weights sit on FP8 rounding ties together. Worth it at learning rates near 1e-6, where the first
    FP8 step is otherwise several times the true one (LOG.md)."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """What is sampled in a step."""

    prompts_per_step: int = 16
    """P, prompts in a rollout."""
    group_size: int = 8
    """G, completions of each prompt."""
    max_prompt_tokens: int = 512
    """Longer prompts are left out of training and evaluation, and counted."""
    max_completion_tokens: int = 512
    """Completions are cut off here (finish_reason "length")."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Temperature only: truncated sampling biases the ratio."""
    engine: EngineConfig | VLLMConfig = field(default_factory=EngineConfig)
    """Who samples."""

    def __post_init__(self) -> None:
        for name in ("prompts_per_step", "group_size", "max_prompt_tokens", "max_completion_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        check_group_size("group_size", self.group_size)
        num_completions = self.prompts_per_step * self.group_size
        if num_completions > MAX_COMPLETIONS:
            raise ValueError(
                f"prompts_per_step x group_size is at most {MAX_COMPLETIONS} completions; got {num_completions}. Ask "
                f"for fewer"
            )
        if self.sampling.temperature == 0.0:
            raise ValueError("sampling.temperature=0 is greedy: a group holds one answer. Use a value above 0, as 1.0")
        neutral = SamplingConfig(temperature=self.sampling.temperature)
        for name in ("top_p", "top_k", "min_p"):
            value, wanted = getattr(self.sampling, name), getattr(neutral, name)
            if value != wanted:
                raise ValueError(
                    f"sampling.{name}={value} truncates the distribution that training takes ratios of, which biases "
                    f"them. Use {name}: {wanted} here; evaluation.sampling may truncate"
                )


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """How rewards become a loss."""

    advantage: GRPOConfig | RLOOConfig | ReinforcePlusPlusConfig | GAEConfig = field(default_factory=GRPOConfig)
    """The baseline that rewards are compared with."""
    loss: PPOClip | GSPO | GSPOToken | CISPO | BAPO | DPPOTV | DPPOKL | M2PO | Reinforce = field(
        default_factory=PPOClip
    )
    """What each token's log-probability is moved by."""
    clip: ClipConfig = field(default_factory=ClipConfig)
    """The trust region of ppo_clip in BF16: the bounds themselves, or what calibration aims at."""
    reduction: Reduction = "token_mean"
    """token_mean (DAPO), sequence_mean (GRPO) or constant (Dr.GRPO)."""
    correction: SequenceTIS | IcePop | SequenceMask | None = None
    """What else than token weights corrects for a rollout by another numerics."""
    tis_cap: float = 2.0
    """C: without a correction, importance weights are min(exp(old_logprobs - rollout_logprobs), C). At least 1."""
    ratio_from: RatioSource = "training"
    """Whose ratio the loss weighs and clips by; the gradient is training's. bf16_shadow, fp32_shadow: two more forwards
    on the masters of every token. What calibration can reach at best."""
    clip_mask_from: RatioSource = "training"
    """Whose ratio says which tokens are clipped; those that are not weigh by training's."""
    kl: KLConfig = field(default_factory=KLConfig)
    """Penalty on the distance to the model that training started from; coefficient 0 loads no reference."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    """Long and truncated completions."""
    dynamic_sampling: DynamicSamplingConfig | None = None
    """Drop groups of equal rewards and draw more prompts in their place; null trains on every group."""

    def __post_init__(self) -> None:
        if self.tis_cap < 1.0:
            raise ValueError(f"tis_cap must be at least 1; got {self.tis_cap}")
        if self.correction is not None and self.tis_cap != AlgorithmConfig.tis_cap:
            raise ValueError(
                f"tis_cap={self.tis_cap} caps the token weights that correction.type={self.correction.type_name} "
                f"replaces. Leave tis_cap out, or use correction: null"
            )
        if isinstance(self.advantage, GAEConfig) and self.dynamic_sampling is not None:
            raise ValueError(
                "dynamic_sampling drops groups of equal rewards, from which advantage.type=gae learns as well. Use "
                "dynamic_sampling: null"
            )
        if not isinstance(self.loss, PPOClip) and self.clip != ClipConfig():
            raise ValueError(
                f"clip holds the bounds of ppo_clip, and loss.type={self.loss.type_name} does not read them. Leave "
                f"clip out and set what is under loss"
            )

        if "training" not in (self.ratio_from, self.clip_mask_from):
            raise ValueError(
                f"ratio_from={self.ratio_from} takes the whole ratio from a shadow, and clip_mask_from="
                f"{self.clip_mask_from} its clip mask alone. Use one of them"
            )
        takes = PPOClip | GSPO if self.clip_mask_from != "training" else PPOClip | GSPO | CISPO
        if self.loss_shadow != "training" and not isinstance(self.loss, takes):
            raise ValueError(
                f"a ratio or clip mask from {self.loss_shadow} is for losses with fixed bounds on the ratio, and "
                f"loss.type={self.loss.type_name} has none. Use 'training'"
            )
        if self.clip_mask_from != "training" and isinstance(self.loss, PPOClip) and self.loss.dual_clip is not None:
            raise ValueError(
                f"clip_mask_from={self.clip_mask_from} leaves training's ratio without bounds, and loss.dual_clip="
                f"{self.loss.dual_clip} is one. Use ratio_from={self.clip_mask_from}, or dual_clip: null"
            )

    @property
    def loss_shadow(self) -> RatioSource:
        """The shadow that the loss takes its ratio or clip mask from; training for none."""
        return self.ratio_from if self.clip_mask_from == "training" else self.clip_mask_from


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Accuracy on held-out problems."""

    interval: int = 10
    """Steps between evaluations; one is made before step 0 and one after the last. 0 makes none."""
    num_problems: int = 256
    """The first of the test problems, of each set; 0 takes all."""
    sets: tuple[DatasetConfig, ...] = ()
    """Benchmarks in place of the task's own test problems: names of presets, or sections as a task of type dataset has.
    eval/accuracy is then the mean over them."""
    drop_overlap: bool = False
    """Leave training problems out that are evaluated too, by their letters and digits; otherwise they are a warning."""
    completions_per_problem: int = 1
    """Accuracy is the mean over them."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """May truncate; temperature 0 is greedy."""

    def __post_init__(self) -> None:
        for name, least in (("interval", 0), ("num_problems", 0), ("completions_per_problem", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")
        check_group_size("completions_per_problem", self.completions_per_problem)


@dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    """The loop."""

    num_steps: int = 100
    """Rollouts."""
    num_mini_batches: int = 2
    """Optimiser steps per rollout; divides prompts_per_step."""
    microbatch_tokens: int = 8192
    """Most packed tokens in one forward and backward pass."""
    recompute_layers: bool = False
    """Keep only each layer's input for the backward pass and compute the layer again there, and on a GPU lm_head's
    logits: less memory, about a third more time, the same bits."""
    shadow_interval: int = 20
    """Steps between BF16 shadow passes, which measure over-clipping; calibration makes its own. 0 makes none."""
    require_exact: bool = True
    """Stop when rollout_logprobs and the trainer's differ by a bit under a batch-invariant recipe."""
    exactness_interval: int = 1
    """Steps from one forward that checks all of the rollout's log-probabilities to the next. Between them old_logprobs
    are the rollout's, and the first mini-batch's own forward checks its share. Above 1 only with require_exact."""
    logged_samples: int = 4
    """Completions of each step that are written to samples.jsonl."""

    def __post_init__(self) -> None:
        counts = ("num_steps", "num_mini_batches", "microbatch_tokens", "exactness_interval")
        for name in (*counts, "shadow_interval", "logged_samples"):
            least = 1 if name in counts else 0
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A whole run."""

    output_dir: str
    """Folder of the run: config.yaml, metrics.jsonl, samples.jsonl, checkpoints/, model/."""
    overwrite: bool = False
    """Replace an earlier run in output_dir; otherwise its presence is an error, unless it is resumed."""
    seed: int = 0
    """Of the problem order, the samples and the dither."""
    device: str = "cpu"
    """Where the decoder runs, as torch names it."""
    kernels: Kernels = "by_device"
    """by_device: on a Hopper GPU kernels, on a CPU the reference; reference: it on any GPU, too, in plain torch."""
    model: ModelConfig
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    task: ArithmeticConfig | GSM8KConfig | DatasetConfig | ReasoningGymConfig | MixtureConfig
    reward: RewardConfig = field(default_factory=RewardConfig)
    verifier: VerifierConfig = field(default_factory=VerifierConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    calibration: GridCalibration | ExactCalibration | SymmetricCalibration | None = field(
        default_factory=GridCalibration
    )
    """Calibrated clipping, for ppo_clip without dual_clip, gspo and cispo; null keeps the bounds of algorithm.clip or
    of the loss."""
    critic: CriticConfig = field(default_factory=CriticConfig)
    """Of PPO, which algorithm.advantage.type=gae makes it."""
    watch: WatchConfig | None = field(default_factory=WatchConfig)
    """Early warning of a collapse, and what it leads to; null watches nothing."""
    observatory: ObservatoryConfig = field(default_factory=ObservatoryConfig)
    """What is measured of the ratio's noise, and how often; changes no training number."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        rollout, trainer = self.rollout, self.trainer
        if not self.output_dir:
            raise ValueError("output_dir is empty; name a folder, as runs/mine")
        paths = {"output_dir": self.output_dir, "model.path": self.model.path, "critic.path": self.critic.path or ""}
        if isinstance(rollout.engine, VLLMConfig):
            paths["rollout.engine.transfer_dir"] = rollout.engine.transfer_dir
        for name, path in paths.items():
            if path.startswith("~"):  # a shell leaves it so behind key=
                raise ValueError(f"{name}={path!r} would be a folder named ~ here. Write $HOME, or the whole path")
        advantage = self.algorithm.advantage
        if rollout.group_size == 1 and not isinstance(advantage, GRPOConfig | GAEConfig):
            raise ValueError(
                f"rollout.group_size=1 leaves algorithm.advantage.type={advantage.type_name} no other completion to "
                f"compare with. Use rollout.group_size >= 2, as 8"
            )
        if rollout.group_size == 1 and isinstance(advantage, GRPOConfig) and advantage.scale_by_std:
            raise ValueError(
                "rollout.group_size=1 has no standard deviation to divide by (algorithm.advantage.scale_by_std=true). "
                "Use rollout.group_size >= 2, as 8"
            )
        if rollout.group_size == 1 and self.algorithm.dynamic_sampling is not None:
            raise ValueError(
                "rollout.group_size=1 makes the rewards of a group equal, and algorithm.dynamic_sampling drops such "
                "groups. Use rollout.group_size >= 2, as 8"
            )
        if not isinstance(advantage, GAEConfig) and self.critic != CriticConfig():
            raise ValueError(
                f"critic is set, and algorithm.advantage.type={advantage.type_name} has none. Use gae, or leave it out"
            )
        if self.critic.warmup_steps >= trainer.num_steps:
            raise ValueError(
                f"critic.warmup_steps={self.critic.warmup_steps} are all of trainer.num_steps={trainer.num_steps}, and "
                f"the policy never learns. Lower it"
            )
        if self.optimizer.master_format == "bf16" and self.model.dither_masters:
            raise ValueError(
                "model.dither_masters moves masters inside their BF16 intervals, and optimizer.master_format=bf16 "
                "rounds them back. Use one of them"
            )
        for name, section, recipe in (
            ("optimizer", self.optimizer, self.precision.train_recipe()),
            ("critic.optimizer", self.critic.optimizer, get_recipe(self.critic.recipe)),
        ):
            if section.master_format == "bf16" and recipe.high_precision == "fp32":
                raise ValueError(
                    f"{name}.master_format=bf16 rounds the weights that recipe {recipe.name!r} multiplies in FP32. Use "
                    f"fp32, or another recipe"
                )
        exact = trainer.require_exact and not self.precision.allow_mismatch
        if trainer.exactness_interval > 1 and not (exact and self.precision.train_recipe().batch_invariant):
            raise ValueError(
                f"trainer.exactness_interval={trainer.exactness_interval} takes old_logprobs from the rollout, "
                f"which wants trainer.require_exact, a batch-invariant recipe and no precision.allow_mismatch. Use 1"
            )
        if rollout.prompts_per_step % trainer.num_mini_batches:
            raise ValueError(
                f"rollout.prompts_per_step={rollout.prompts_per_step} is not a multiple of "
                f"trainer.num_mini_batches={trainer.num_mini_batches}: mini-batches hold whole groups. Change either"
            )
        if self.calibration is not None and trainer.num_mini_batches == 1:
            raise ValueError(
                "calibration needs ratios that differ from 1, and with trainer.num_mini_batches=1 every ratio is 1. "
                "Use trainer.num_mini_batches >= 2, or calibration: null"
            )
        if self.calibration is not None and (reason := refusal(self.algorithm.loss, self.calibration)):
            raise ValueError(reason)
        if self.calibration is not None and self.algorithm.loss_shadow != "training":
            raise ValueError(
                f"the loss clips by {self.algorithm.loss_shadow}, whose ratios lack the noise that calibration makes "
                f"up for. Use calibration: null, or algorithm.ratio_from and clip_mask_from: training"
            )
        recipes = self.precision.rollout_recipe(), self.precision.train_recipe()
        quantizes = any(recipe.quantizes for recipe in recipes)
        if self.watch is not None and (reason := self.watch.refusal(self.calibration is not None, quantizes)):
            raise ValueError(reason)
        if self.algorithm.overlong.buffer_tokens > rollout.max_completion_tokens:
            raise ValueError(
                f"algorithm.overlong.buffer_tokens={self.algorithm.overlong.buffer_tokens} is more than "
                f"rollout.max_completion_tokens={rollout.max_completion_tokens}, before which it lies. Lower it"
            )
        if isinstance(rollout.engine, VLLMConfig):
            self._check_vllm()
            return
        if rollout.engine.lend_memory and not self.device.startswith("cuda"):
            raise ValueError(
                f"rollout.engine.lend_memory=true lends the memory of a CUDA device, and device={self.device!r} is "
                f"none. Use lend_memory=false, or device=cuda"
            )
        if self.max_tokens > rollout.engine.kv_cache_tokens // rollout.engine.page_size * rollout.engine.page_size:
            raise ValueError(
                f"rollout.engine.kv_cache_tokens={rollout.engine.kv_cache_tokens} cannot hold one sequence of "
                f"max_prompt_tokens + max_completion_tokens = {self.max_tokens} tokens. Raise it"
            )

    def _check_vllm(self) -> None:
        """Refuse what vLLM as the engine does not go with."""
        for sampling in (self.rollout.sampling, self.evaluation.sampling):
            check_vllm_runs(self.precision.rollout_recipe(), sampling)
        if not self.precision.allow_mismatch:
            raise ValueError(
                "rollout.engine.type=vllm multiplies by kernels of its own, so rollout and training are two forwards "
                "and trainer.require_exact cannot hold. Set precision.allow_mismatch=true, and importance weights "
                "correct for it; or use rollout.engine.type=octavo"
            )
        if self.device.startswith("cuda:") and self.device != "cuda:0":
            raise ValueError(
                f"rollout.engine.type=vllm takes GPUs from the first one on, and device={self.device!r} is another. "
                f"Use device=cuda, with CUDA_VISIBLE_DEVICES naming that GPU first"
            )
        if self.watch is not None and self.watch.action == "bf16_forward":
            raise ValueError(
                "watch.action=bf16_forward samples with octavo's own engine, and rollout.engine.type=vllm has none. "
                "Use another action"
            )

    def start_bounds(self) -> ClipBounds:
        """Bounds on the ratio in step 0."""
        loss = self.algorithm.loss
        if self.calibration is None:
            return plain_bounds(loss, self.algorithm.clip)
        return self.calibration.start_bounds(scale_of(loss))

    @property
    def runs_kernels(self) -> bool:
        """Whether kernels work rather than the reference."""
        return self.device.startswith("cuda") and self.kernels == "by_device"

    @property
    def max_tokens(self) -> int:
        """Longest sequence of the run."""
        return self.rollout.max_prompt_tokens + self.rollout.max_completion_tokens
