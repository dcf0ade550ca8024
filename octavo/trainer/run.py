"""Setting up a run: everything that can fail for want of a file or a key fails here, before the first step."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, GenerationConfig

from octavo.kernels.device import Kernels, choose_kernels, require_kernels, runs_kernels
from octavo.models.checkpoint import load_decoder, weight_files
from octavo.models.decoder import Decoder, drop_masters_
from octavo.models.observed import check_observed, packed_cache
from octavo.numerics.precision_flow import PrecisionFlow
from octavo.numerics.recipe import get_recipe
from octavo.rollout.counter import uniform_bits
from octavo.rollout.engine import Engine, EngineConfig, RolloutEngine
from octavo.rollout.lent_memory import expand_segments
from octavo.tasks.checks import modules_of
from octavo.tasks.problem import Task
from octavo.tasks.prompts import stop_token_ids
from octavo.tasks.rewards import has_function
from octavo.tasks.sandbox import refusal
from octavo.tasks.verdict import Verdict
from octavo.tasks.verifiers import VerifierPool
from octavo.trainer.config import TrainConfig
from octavo.trainer.errors import reason
from octavo.trainer.interrupt import Interrupts
from octavo.trainer.memory_held import memory_moves
from octavo.trainer.metrics import Display
from octavo.trainer.optimizer import Optimizer
from octavo.trainer.precision import check_live, declared_flow, flow_lines, rollout_shares_bytes
from octavo.trainer.problems import Benchmark, EncodedProblem, load_problems, problem_order
from octavo.trainer.reference import Reference
from octavo.trainer.reward_model import RewardModel

TRAINING, EVALUATION, SHADOW, ROLLBACK, ROUNDING = 0, 1, 2, 3, 4
"""Streams of random numbers."""
VLLMFactory = Callable[[TrainConfig, Decoder, Sequence[int], Callable[[str], None]], RolloutEngine]
"""Starts vLLM on a decoder's weights, with what ends a completion, and says so in a line:
`octavo.plugins.vllm.VLLMEngine`."""


@dataclass(kw_only=True)
class Run:
    """What training and evaluation work with. Its fields stay; only what the policy and the engine hold changes."""

    config: TrainConfig
    flow: PrecisionFlow
    task: Task
    tokenizer: Any
    train_problems: Sequence[EncodedProblem]
    benchmarks: Sequence[Benchmark]
    """The sets that are evaluated; a task without test problems may have none."""
    policy: Decoder
    engine: RolloutEngine
    shadow: Decoder
    """The policy, whose masters are multiplied in BF16, or a decoder that multiplies them in FP32."""
    reference: Reference
    """What stands for BF16 when bounds are calibrated."""
    display: Display
    verifiers: VerifierPool
    """Where completions are checked; whoever made the run closes it."""
    interrupts: Interrupts = field(default_factory=Interrupts)
    """Asked during rollout and evaluation whether to stop."""

    def on_step(self, advance: Callable[[int], None]) -> Callable[[int], None]:
        """For Engine.generate: moves the bar, and raises StopRequested when the run was asked to stop."""

        def after_step(num_finished: int) -> None:
            advance(num_finished)
            self.interrupts.check()

        return after_step

    @property
    def decoders(self) -> list[Decoder]:
        """All that read the masters: the policy and, where rollout or shadow are another forward, their own."""
        return list(dict.fromkeys([self.policy, self.engine.decoder, self.shadow]))

    @cached_property
    def reward_model(self) -> RewardModel | None:
        """The model of the reward, if the config wants one; read when it is asked for."""
        config = self.config.reward.model
        return None if config is None else RewardModel(config, self.config.device)

    def seed(self, stream: int, step: int, rollbacks: int = 0) -> int:
        """Of the engine's random numbers in one step."""
        return uniform_bits(self.training_seed(rollbacks), stream, step)

    def training_seed(self, rollbacks: int) -> int:
        """The run's seed, and after each rollback another."""
        return uniform_bits(self.config.seed, ROLLBACK, rollbacks) if rollbacks else self.config.seed

    def problems(self, place: int, count: int, rollbacks: int = 0) -> list[EncodedProblem]:
        """Training problems from a place in the order of all epochs on; each epoch is a new permutation."""
        order = problem_order(self.task, self.train_problems, self.training_seed(rollbacks))
        return [self.train_problems[order.problem(i)] for i in range(place, place + count)]

    def check_problems(self) -> None:
        """Refuse a training for which there are no problems.

        Raises:
            ValueError: there are none to train on, or none for the evaluations that the config wants.
        """
        self.problems(0, 1)
        if self.config.evaluation.interval and not self.benchmarks:
            raise ValueError(
                f"task {self.task.name!r} has no problems to evaluate on. Give evaluation.sets, as [math500], or "
                f"evaluation.interval=0"
            )

    def check_rewards(self) -> None:
        """Load what the reward is made of, before there is anything to lose.

        Raises:
            ValueError: the function or the model of the reward cannot be loaded.
        """
        python = self.config.reward.python
        if python is not None:
            found = self.verifiers.submit(has_function, python.function).result()
            if isinstance(found, Verdict):
                raise ValueError(f"reward.python.function={python.function!r} cannot be loaded: {found.detail}")
        _ = self.reward_model

    def decode(self, tokens: list[int]) -> str:
        """Text of a completion, without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)


def load_run(config: TrainConfig, display: Display, vllm: VLLMFactory | None = None) -> Run:
    """Read task, tokenizer and model, and start what samples.

    Args:
        config: of the run.
        display: where it is shown.
        vllm: starts vLLM, where the config wants it.

    Raises:
        ValueError: something is missing or does not fit; one line says what, and what to do.
    """
    prepare_device(config)
    flow = declared_flow(config)
    flow.check(config.precision.allow_mismatch)
    tokenizer = load_tokenizer(config.model.path)
    task, train_problems, benchmarks = load_problems(config, tokenizer, display)
    if memory_moves(config):
        expand_segments()
    policy = load_decoder(
        config.model.path,
        config.precision.train_recipe(),
        max_tokens=config.max_tokens,
        dither_seed=config.seed if config.model.dither_masters else None,
        device=config.device,
        master_format=config.optimizer.master_format,
    )
    policy.recompute_layers = config.trainer.recompute_layers
    display.line(describe(policy))
    folder = Path(config.model.path)
    if folder.is_dir() and (others := weight_files(folder)[1]):
        display.line(f"left aside, as they are no part of the model: {', '.join(map(str, others))}")
    prompts = [each.prompt for problems in (train_problems, *(b.problems for b in benchmarks)) for each in problems]
    check_vocabulary(prompts, policy.config.vocab_size, config.model.path)
    stops = stop_token_ids(tokenizer, load_generation_config(config.model.path), policy.hf_config)
    shares = rollout_shares_bytes(config, flow)
    sampler = policy if shares else policy.with_recipe(config.precision.rollout_recipe())
    engine = make_engine(config, sampler, stops, display, vllm)
    check_live(flow, policy, engine)
    if isinstance(engine, Engine):
        engine.lend()  # what is loaded next may take more than it keeps
    for line in flow_lines(flow):
        display.line(line)
    checks = [task.check, *(benchmark.task.check for benchmark in benchmarks)]
    modules = [name for check in checks for name in modules_of(check)]
    modules += [config.reward.python.function] if config.reward.python else []
    verifiers = VerifierPool(config.verifier, list(dict.fromkeys(modules)))
    if any(each.problem.tests for problems in (train_problems, *(b.problems for b in benchmarks)) for each in problems):
        check_isolation(config, verifiers, display)
    in_fp32 = config.algorithm.loss_shadow == "fp32_shadow"
    return Run(
        config=config,
        flow=flow,
        task=task,
        tokenizer=tokenizer,
        train_problems=train_problems,
        benchmarks=benchmarks,
        policy=policy,
        engine=engine,
        shadow=policy.with_recipe(get_recipe("fp32")) if in_fp32 else policy,
        reference=Reference(policy, config.calibration, config.rollout.sampling.temperature),
        display=display,
        verifiers=verifiers,
    )


def make_engine(
    config: TrainConfig, decoder: Decoder, stop_token_ids: Sequence[int], display: Display, vllm: VLLMFactory | None
) -> RolloutEngine:
    """What samples.

    Raises:
        ValueError: vLLM is wanted, and nothing given that starts it; or it does not start.
    """
    if isinstance(config.rollout.engine, EngineConfig):
        return Engine(decoder, config.rollout.engine, stop_token_ids)
    if vllm is None:
        raise ValueError(
            "rollout.engine.type=vllm is a plug-in, which the octavo command hands in. Call "
            "train(config, display, vllm=octavo.plugins.vllm.VLLMEngine), or use rollout.engine.type=octavo"
        )
    engine = vllm(config, decoder, stop_token_ids, display.line)
    algorithm = config.algorithm
    correction = f"min(exp(old - rollout), {algorithm.tis_cap:g})"
    if algorithm.correction is not None:
        correction = algorithm.correction.type_name
    display.line(
        f"rollout: two forwards, so trainer.require_exact does not hold; weights of {correction} correct for the "
        f"mismatch. vLLM's sums may change with the batch, and then a resumed run samples other completions"
    )
    return engine


def check_isolation(config: TrainConfig, verifiers: VerifierPool, display: Display) -> None:
    """Refuse to run programs of completions where they cannot be cut off from the machine, unless that is allowed.

    Raises:
        ValueError: as said.
    """
    why = verifiers.submit(refusal).result()
    if isinstance(why, Verdict):
        why = why.detail
    if why is None:
        return
    if not config.verifier.allow_unisolated:
        raise ValueError(
            f"programs in completions cannot be isolated here ({why}), and the task has tests that run them. Use a "
            f"machine or container that allows user namespaces, or verifier.allow_unisolated=true where they may touch "
            f"all that you may"
        )
    display.line(f"warning: programs in completions run without isolation ({why}); they can reach files and network")


def prepare_device(config: TrainConfig) -> None:
    """Use the run's device and choice of kernels.

    Raises:
        ValueError: torch does not have it, or kernels were chosen that do not run on it.
    """
    use_device(config.device, config.kernels)
    for recipe in (config.precision.train_recipe(), config.precision.rollout_recipe()):
        require_kernels(config.device, recipe.high_precision)


def use_device(name: str, kernels: Kernels = "by_device") -> None:
    """Make a device the one that kernels run on, if they are to; refuse one that torch does not know or does not have.

    Raises:
        ValueError: names it and what there is.
    """
    try:
        device = torch.device(name)
        usable = device.type != "meta" and torch.zeros(1, device=device).item() == 0.0
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0].removesuffix(".")
        raise ValueError(
            f"device={name!r} cannot be used here: {why}. Use cpu, or cuda where there is a GPU"
        ) from error
    if not usable:
        raise ValueError(f"device={name!r} holds no numbers. Use cpu, or cuda where there is a GPU")
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    choose_kernels(kernels)


def check_vocabulary(prompts: Sequence[Sequence[int]], vocab_size: int, path: str) -> None:
    """Refuse a tokenizer whose tokens the model does not have.

    Raises:
        ValueError: a prompt holds such a token.
    """
    largest = max(max(prompt) for prompt in prompts)
    if largest >= vocab_size:
        raise ValueError(
            f"the tokenizer of model.path={path!r} gives token id {largest}, but the model's vocabulary is 0 to "
            f"{vocab_size - 1}. Put the model's own tokenizer files there"
        )


def describe(policy: Decoder) -> str:
    """One line: the model, its precision flow and where it runs."""
    config, recipe = policy.config, policy.recipe
    num_parameters = sum(parameter.numel() for parameter in policy.parameters())
    kept = "nothing is FP8" if not recipe.quantizes else f"{recipe.high_precision}: {', '.join(recipe.keep_bf16)}"
    device = policy.embed_tokens.device
    kernels = runs_kernels(policy.embed_tokens) and recipe.high_precision == "bf16"
    simulated = "FP8 simulated by exact sums on" if recipe.quantizes else "exact sums on"
    products = "products on the tensor cores of" if kernels else simulated
    return (
        f"policy: {config.family}, {num_parameters / 1e6:.1f} M parameters; {recipe.name}, KV {recipe.kv_cache}, "
        f"{kept}; {products} {device}"
    )


def in_bf16(run: Run) -> Run:
    """The run with rollout and training both in BF16, on the same masters, between plain bounds.

    Its decoder re-quantises itself alone; re-quantise the others when the run is back with them.
    """
    policy = run.policy.with_recipe(get_recipe("bf16"))
    if isinstance(run.engine, Engine):
        run.engine.lend()  # one KV cache at a time
    engine = make_engine(run.config, policy, tuple(run.engine.stop_token_ids), run.display, vllm=None)
    shadow = policy if run.shadow is run.policy else run.shadow
    return replace(run, config=replace(run.config, calibration=None), policy=policy, engine=engine, shadow=shadow)


def make_optimizer(run: Run) -> Optimizer:
    """AdamW over all masters of the policy."""
    trainer = run.config.trainer
    num_updates = policy_steps(run.config) * trainer.num_mini_batches
    parameters = dict(run.policy.named_parameters())
    fused = all(parameter.is_cuda for parameter in parameters.values())
    return Optimizer(parameters, run.config.optimizer, num_updates, fused, run.seed(ROUNDING, 0))


def policy_steps(config: TrainConfig, done: int = 0) -> int:
    """Steps after the first `done` in which the policy learns: all but the critic's warm-up."""
    return config.trainer.num_steps - max(done, config.critic.warmup_steps)


def load_reference(config: TrainConfig) -> Decoder | None:
    """The frozen model that training started from, when a KL penalty needs it: its own bytes, and no masters."""
    if config.algorithm.kl.coefficient == 0.0:
        return None
    reference = load_decoder(
        config.model.path,
        config.precision.train_recipe(),
        max_tokens=config.max_tokens,
        dither_seed=config.seed if config.model.dither_masters else None,
        device=config.device,
        master_format=config.optimizer.master_format,
    )
    check_observed(declared_flow(config).graph("reference"), reference, packed_cache(reference))
    drop_masters_(reference)
    return reference.requires_grad_(False)


def problems_fingerprint(run: Run) -> str:
    """Hash of every prompt's tokens and every answer, in order."""
    digest = hashlib.sha256()
    for problems in (run.train_problems, *(benchmark.problems for benchmark in run.benchmarks)):
        digest.update(f"{len(problems)} problems\n".encode())
        for encoded in problems:
            digest.update(f"{encoded.problem.id} {encoded.prompt} {encoded.problem.answer!r}\n".encode())
    return digest.hexdigest()


def model_fingerprint(run: Run) -> str:
    """Hash of what the model's numbers depend on beside its weights and the config, and of what ends a completion."""
    policy, rope = run.policy, run.policy.hf_config.rope_parameters
    text = f"{policy.config} {sorted(rope.items())} {sorted(run.engine.stop_token_ids)}"
    return hashlib.sha256(text.encode()).hexdigest()


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a Hugging Face folder or hub id.

    Raises:
        ValueError: there is none.
    """
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # its files may hold anything, and transformers raises as much
        why = reason(error).removesuffix(".")
        raise ValueError(
            f"model.path={path!r} has no tokenizer that transformers can read: {why}. Fetch its files again"
        ) from error


def load_generation_config(path: str) -> GenerationConfig | None:
    """generation_config.json if the model has one.

    Raises:
        ValueError: there is one, and it cannot be read.
    """
    try:
        return GenerationConfig.from_pretrained(path)
    except Exception as error:  # the file may hold anything, and transformers raises as much
        missing = not (Path(path) / "generation_config.json").exists()
        if isinstance(error, OSError) and (missing or not Path(path).is_dir()):
            return None
        why = reason(error).removesuffix(".")
        raise ValueError(
            f"{path}/generation_config.json cannot be read, and it may name stop tokens: {why}. Fetch it again"
        ) from error
