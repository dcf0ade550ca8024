"""The configuration of a training run: every key of the YAML file, its default and its meaning."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from octavo.numerics.fp8 import ScaleRounding
from octavo.numerics.recipe import FORWARD_ONLY, Recipe, RecipeName, StorageFormat, get_recipe
from octavo.rl.advantages import GRPOConfig, ReinforcePlusPlusConfig, RLOOConfig
from octavo.rl.calibration import CalibrationConfig
from octavo.rl.corrections import IcePop, SequenceMask, SequenceTIS
from octavo.rl.loss_clipped import BAPO, M2PO, PPOClip
from octavo.rl.loss_likelihood import CISPO, DPPOKL, DPPOTV, Reinforce
from octavo.rl.loss_sequence import GSPO, GSPOToken
from octavo.rl.losses import ClipBounds, ClipConfig, KLConfig, Reduction
from octavo.rl.overlong import OverlongConfig
from octavo.rollout.engine import EngineConfig, check_group_size
from octavo.rollout.sampler import SamplingConfig
from octavo.tasks.arithmetic import ArithmeticConfig
from octavo.tasks.datasets import DatasetConfig
from octavo.tasks.gsm8k import GSM8KConfig
from octavo.tasks.mixture import MixtureConfig
from octavo.tasks.prompts import ChatTemplate
from octavo.tasks.reasoning_gym import ReasoningGymConfig
from octavo.tasks.rewards import RewardConfig
from octavo.tasks.verifiers import VerifierConfig
from octavo.trainer.checkpoint import CheckpointConfig
from octavo.trainer.optimizer import OptimizerConfig
from octavo.trainer.trackers import TrackingConfig

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
    unchanged; fewer weights sit on FP8 rounding ties together."""


@dataclass(frozen=True, kw_only=True)
class SidePrecision:
    """What one side of the flow does otherwise; null is as `precision` says. A recipe's name stands for the section."""

    shorthand: ClassVar[str] = "recipe"
    recipe: RecipeName | None = None
    """One of precision.recipe's, and for the rollout also fp8_channel or fp8_tensor, as serving engines run them."""
    kv_cache: StorageFormat | None = None
    """fp8 or bf16."""
    saved_activations: StorageFormat | None = None
    """fp8 or bf16, for training only: the rollout saves nothing."""
    keep_bf16: tuple[str, ...] | None = None
    """Replaces the list of `precision`."""
    scale_rounding: ScaleRounding | None = None
    """none or power_of_two."""
    amax_margin: float | None = None
    """tensorwise_static only."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """One precision flow for rollout, old logprobs and training. What is null is as the recipe says."""

    recipe: RecipeName = "block128"
    """bf16, block128, rowwise, tensorwise, w8a16, tensorwise_static or fp32."""
    kv_cache: StorageFormat | None = None
    """fp8 or bf16: keys and values as every query sees them."""
    saved_activations: StorageFormat | None = None
    """fp8 or bf16: what linear layers keep for the backward pass."""
    keep_bf16: tuple[str, ...] | None = None
    """Modules that are not quantised, matched on whole names; lm_head and embed_tokens are always among them."""
    scale_rounding: ScaleRounding = "none"
    """power_of_two rounds all scales up."""
    amax_margin: float = 1.25
    """tensorwise_static only: room above the last step's amax."""
    rollout: SidePrecision = field(default_factory=SidePrecision)
    """What the engine does otherwise than training. Any difference needs allow_mismatch."""
    train: SidePrecision = field(default_factory=SidePrecision)
    """What training, old and reference logprobs do otherwise than the rollout."""
    allow_mismatch: bool = False
    """Let the rollout run another forward than training, from the same masters; importance weights correct for it."""

    def __post_init__(self) -> None:
        for key, recipe in (("recipe", self.recipe), ("train.recipe", self.train.recipe)):
            if recipe in FORWARD_ONLY:
                raise ValueError(
                    f"{key}={recipe!r} runs forward only and cannot train. Use {key}={FORWARD_ONLY[recipe]}, or "
                    f"rollout.recipe={recipe} for the rollout alone"
                )
        if self.rollout.saved_activations is not None:
            raise ValueError("rollout.saved_activations is set, but a rollout saves none. Use train.saved_activations")
        self.rollout_recipe()
        self.train_recipe()

    def rollout_recipe(self) -> Recipe:
        """The complete recipe of the engine, which saves no activations whatever training saves."""
        return self._expand("rollout", self.rollout, saved_activations=None)

    def train_recipe(self) -> Recipe:
        """The complete recipe of training, of old and of reference logprobs."""
        return self._expand("train", self.train)

    def _expand(self, name: str, side: SidePrecision, **left_out: None) -> Recipe:
        own = {key: value for key, value in vars(side).items() if value is not None}
        chosen = {key: getattr(self, key) for key in vars(side)} | own | left_out
        changes = {key: value for key, value in chosen.items() if value is not None}
        if "keep_bf16" in changes:
            changes["keep_bf16"] = tuple(dict.fromkeys(("lm_head", "embed_tokens", *changes["keep_bf16"])))
        try:
            return get_recipe(changes.pop("recipe"), **changes)
        except ValueError as error:
            raise ValueError(f"{name}: {error}" if own else str(error)) from error


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
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Memory and batching."""

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

    advantage: GRPOConfig | RLOOConfig | ReinforcePlusPlusConfig = field(default_factory=GRPOConfig)
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
    kl: KLConfig = field(default_factory=KLConfig)
    """Penalty on the distance to the model that training started from; coefficient 0 loads no reference."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    """Long and truncated completions."""

    def __post_init__(self) -> None:
        if self.tis_cap < 1.0:
            raise ValueError(f"tis_cap must be at least 1; got {self.tis_cap}")
        if self.correction is not None and self.tis_cap != AlgorithmConfig.tis_cap:
            raise ValueError(
                f"tis_cap={self.tis_cap} caps the token weights that correction.type={self.correction.type_name} "
                f"replaces. Leave tis_cap out, or use correction: null"
            )
        if not isinstance(self.loss, PPOClip) and self.clip != ClipConfig():
            raise ValueError(
                f"clip holds the bounds of ppo_clip, and loss.type={self.loss.type_name} does not read them. Leave "
                f"clip out and set what is under loss"
            )

    def calibration_refusal(self) -> str:
        """Why calibrated clipping is wrong for the loss; empty where it is right."""
        if not isinstance(self.loss, PPOClip):
            return (
                f"calibration moves the bounds of ppo_clip, at which a token's ratio loses its gradient, and "
                f"algorithm.loss.type={self.loss.type_name} has no such bounds to move"
            )
        if self.loss.dual_clip is not None:
            return (
                f"calibration balances punished tokens at any ratio above the low bound, and "
                f"algorithm.loss.dual_clip={self.loss.dual_clip} drops some of them"
            )
        return ""


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
    shadow_interval: int = 20
    """Steps between BF16 shadow passes, which measure over-clipping; calibration makes its own. 0 makes none."""
    require_exact: bool = True
    """Stop when rollout_logprobs and the trainer's differ by a bit under a batch-invariant recipe."""
    logged_samples: int = 4
    """Completions of each step that are written to samples.jsonl."""

    def __post_init__(self) -> None:
        for name in ("num_steps", "num_mini_batches", "microbatch_tokens", "shadow_interval", "logged_samples"):
            least = 0 if name in ("shadow_interval", "logged_samples") else 1
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
    model: ModelConfig
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    task: ArithmeticConfig | GSM8KConfig | DatasetConfig | ReasoningGymConfig | MixtureConfig
    reward: RewardConfig = field(default_factory=RewardConfig)
    verifier: VerifierConfig = field(default_factory=VerifierConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    calibration: CalibrationConfig | None = field(default_factory=CalibrationConfig)
    """Calibrated clipping, for ppo_clip without dual_clip; null keeps the bounds of algorithm.clip."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)

    def __post_init__(self) -> None:
        rollout, trainer = self.rollout, self.trainer
        if not self.output_dir:
            raise ValueError("output_dir is empty; name a folder, as runs/mine")
        for name, path in (("output_dir", self.output_dir), ("model.path", self.model.path)):
            if path.startswith("~"):  # a shell leaves it so behind key=
                raise ValueError(f"{name}={path!r} would be a folder named ~ here. Write $HOME, or the whole path")
        advantage = self.algorithm.advantage
        if rollout.group_size == 1 and not isinstance(advantage, GRPOConfig):
            raise ValueError(
                f"rollout.group_size=1 leaves algorithm.advantage.type={advantage.type_name} no other completion to "
                f"compare with. Use rollout.group_size >= 2, as 8"
            )
        if rollout.group_size == 1 and isinstance(advantage, GRPOConfig) and advantage.scale_by_std:
            raise ValueError(
                "rollout.group_size=1 has no standard deviation to divide by (algorithm.advantage.scale_by_std=true). "
                "Use rollout.group_size >= 2, as 8"
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
        if self.calibration is not None and (refusal := self.algorithm.calibration_refusal()):
            raise ValueError(f"{refusal}. Use calibration: null")
        if self.algorithm.overlong.buffer_tokens > rollout.max_completion_tokens:
            raise ValueError(
                f"algorithm.overlong.buffer_tokens={self.algorithm.overlong.buffer_tokens} is more than "
                f"rollout.max_completion_tokens={rollout.max_completion_tokens}, before which it lies. Lower it"
            )
        longest = rollout.max_prompt_tokens + rollout.max_completion_tokens
        if longest > rollout.engine.kv_cache_tokens // rollout.engine.page_size * rollout.engine.page_size:
            raise ValueError(
                f"rollout.engine.kv_cache_tokens={rollout.engine.kv_cache_tokens} cannot hold one sequence of "
                f"max_prompt_tokens + max_completion_tokens = {longest} tokens. Raise it"
            )

    def start_bounds(self) -> ClipBounds:
        """Bounds of ppo_clip in step 0."""
        return self.algorithm.clip.bounds() if self.calibration is None else self.calibration.start_bounds()

    @property
    def max_tokens(self) -> int:
        """Longest sequence of the run."""
        return self.rollout.max_prompt_tokens + self.rollout.max_completion_tokens
