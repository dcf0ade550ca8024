"""One configuration against this machine: does it load, is everything there, does it fit. Reads no weights."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig

from octavo.check.back_ends import back_end_rows
from octavo.check.rows import Row, Status, size_text
from octavo.models.checkpoint import weight_files
from octavo.models.config import DecoderConfig, read_config
from octavo.models.decoder import Decoder
from octavo.numerics.precision_flow import PrecisionFlow
from octavo.numerics.recipe import Recipe
from octavo.rollout.vllm_config import VLLMConfig, supported_release
from octavo.tasks.problem import Task
from octavo.tasks.prompts import encode_messages, stop_token_ids
from octavo.tasks.sandbox import refusal
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import load_config
from octavo.trainer.errors import reason
from octavo.trainer.host_memory import memory_bytes, require_room
from octavo.trainer.memory import MemoryPlan, Planner, binary_size, parts_text, planner
from octavo.trainer.memory_advice import advice, free_bytes
from octavo.trainer.memory_held import MemoryEstimate, linears
from octavo.trainer.output import RunFolder
from octavo.trainer.precision import declared_flow
from octavo.trainer.problems import evaluated_tasks, overlap_text
from octavo.trainer.run import check_vocabulary, load_generation_config, load_tokenizer, prepare_device

PROMPTS_TRIED = 200
"""Prompts of each split that are tokenised at least, evenly spread, if it has as many."""
UNUSABLE = (ValueError, OSError)
"""What a user can cause."""


def config_rows(path: str | Path, overrides: list[str]) -> Iterator[Row]:
    """Everything that `octavo train` would stop at before its first step."""
    try:
        config = load_config(TrainConfig, path, overrides)
    except UNUSABLE as error:
        yield _fail("configuration", error, "correct the key that is named")
        return
    yield _row("configuration", "OK", f"{path} loads; {config.trainer.num_steps} steps into {config.output_dir}")
    device_works = True
    try:
        prepare_device(config)
        yield _row("device", "OK", config.device)
    except UNUSABLE as error:
        device_works = False
        yield _fail("device", error, "set device=cpu, or what else the error leaves")
    plan = tokenizer = shape = None
    try:
        shape, hf_config = read_config(config.model.path)
        flow = declared_flow(config)
        yield flow_row(config, flow)
        if isinstance(config.rollout.engine, VLLMConfig):
            yield vllm_row(config.rollout.engine, config.precision.rollout_recipe(), shape)
        plan_of = planner(config)
        plan = plan_of(config)
        yield weights_row(config.model.path, shape, plan.estimate.num_parameters)
        check_modules(config, shape, hf_config, config.precision.train_recipe())
        tokenizer = load_tokenizer(config.model.path)
        yield tokenizer_row(config, tokenizer, hf_config)
    except UNUSABLE as error:
        yield _fail("model", error, "correct model.path or the key that is named")
    yield from task_rows(config, shape, tokenizer)
    yield output_row(config)
    if plan is not None:
        yield disk_row(config, plan.estimate)
        if device_works and plan.host:
            yield host_row(plan)
        if device_works:
            yield plan_row(config, plan_of) if plan.phases else memory_row(config, plan.estimate)
    if shape is not None and device_works and config.runs_kernels:
        yield from back_end_rows(shape, config.precision.rollout_recipe(), torch.device(config.device))


def flow_row(config: TrainConfig, flow: PrecisionFlow) -> Row:
    """The precision flow in one line, and whether it can be exact."""
    try:
        flow.check(config.precision.allow_mismatch)
    except UNUSABLE as error:
        return _fail("precision flow", error, "set precision.allow_mismatch=true, or make the two sides one")
    recipe = config.precision.train_recipe()
    kept = f"{recipe.high_precision}: {', '.join(recipe.keep_bf16)}" if recipe.quantizes else "nothing is FP8"
    detail = f"{recipe.name}, KV {recipe.kv_cache}, saved activations {recipe.saved_activations}; {kept}"
    if flow.differences():
        step = "make rollout and training one forward, unless this is the baseline to compare with"
        if isinstance(config.rollout.engine, VLLMConfig):
            step = "set rollout.engine.type=octavo where rollout and training must be one forward"
        return _row("precision flow", "WARN", f"{detail}; not exact: the rollout runs another forward", step)
    if not recipe.batch_invariant:
        step = "take precision.recipe=block128, or tensorwise_static for one scale per tensor"
        return _row("precision flow", "WARN", f"{detail}; not exact: its activation scales depend on the batch", step)
    return _row("precision flow", "OK", f"{detail}; exact")


def vllm_row(engine: VLLMConfig, rollout: Recipe, shape: DecoderConfig) -> Row:
    """Whether vLLM is there, can be handed weights, and takes the model's widths."""
    try:
        release = supported_release()
    except UNUSABLE as error:
        return _fail("vLLM", error, "install one of those, or set rollout.engine.type=octavo")
    if not (os.path.isdir(engine.transfer_dir) and os.access(engine.transfer_dir, os.W_OK | os.X_OK)):
        detail = f"rollout.engine.transfer_dir={engine.transfer_dir!r} is no folder that can be written"
        return _row("vLLM", "FAIL", detail, "give one, on a disk or in memory")
    size, num_gpus = engine.tensor_parallel_size, torch.cuda.device_count()
    if torch.cuda.is_available() and size > num_gpus:
        detail = f"rollout.engine.tensor_parallel_size={size}, and GPUs here: {num_gpus}"
        return _row("vLLM", "FAIL", detail, f"give {num_gpus} or fewer")
    if shape.num_heads % size:
        detail = f"rollout.engine.tensor_parallel_size={size} does not divide the model's {shape.num_heads} heads"
        return _row("vLLM", "FAIL", detail, "give a divisor")
    inner = ("q_proj", "k_proj", "gate_proj")  # all but the last part of what vLLM runs as one weight
    refused = [
        f"{name}: {rows}"
        for name, rows, _ in linears(shape)
        if rollout.quantizes and name.endswith(inner) and rows % 128 and not rollout.keeps_bf16(name)
    ]
    if refused:
        detail = f"{release} refuses FP8 weights of widths that are no multiple of 128, the first {refused[0]}"
        return _row("vLLM", "FAIL", detail, "set precision.rollout=bf16, or keep them in precision.keep_bf16")
    return _row("vLLM", "OK", release)


def check_modules(config: TrainConfig, shape: DecoderConfig, hf_config: PretrainedConfig, recipe: Recipe) -> None:
    """Build a decoder with the model's names and hardly any width: its checks of names, rope and lengths are real.

    Raises:
        ValueError: of those checks.
    """
    thin = replace(
        shape, vocab_size=2, hidden_size=2, intermediate_size=2, num_heads=1, num_kv_heads=1, head_dim=shape.head_dim
    )
    Decoder(thin, hf_config, recipe, max_tokens=config.max_tokens)


def weights_row(path: str, shape: DecoderConfig, num_parameters: int) -> Row:
    """The headers of the weight files; their contents are not read."""
    about = f"{shape.family}, {num_parameters / 1e6:.1f} M parameters"
    folder = Path(path)
    if not folder.is_dir():
        return _row("model", "OK", f"{about}, from the hub; its weights are fetched when training starts")
    step = "fetch the folder again, or convert its weights to safetensors"
    try:
        files, others = weight_files(folder)
    except UNUSABLE as error:
        return _fail("model", error, step)
    found = 0
    for file in files:
        try:
            with safe_open(file, framework="pt") as reader:
                found += sum(math.prod(reader.get_slice(name).get_shape()) for name in reader.keys())
        except (SafetensorError, OSError) as error:
            return _row("model", "FAIL", f"{file} cannot be read: {reason(error)}", step)
    if found < num_parameters:
        return _row("model", "FAIL", f"{about}, of which the files hold {found / 1e6:.1f} M", step)
    size = size_text(sum(file.stat().st_size for file in files))
    aside = f"; left aside: {', '.join(file.name for file in others)}" if others else ""
    return _row("model", "OK", f"{about} in {size} of safetensors{aside}")


def tokenizer_row(config: TrainConfig, tokenizer: Any, hf_config: PretrainedConfig) -> Row:
    """The chat template and the tokens that end a completion.

    Raises:
        ValueError: no token does.
    """
    stops = stop_token_ids(tokenizer, load_generation_config(config.model.path), hf_config)
    template = "has a chat template" if tokenizer.chat_template else "has no chat template"
    tokens = ", ".join(f"{tokenizer.convert_ids_to_tokens(stop)} ({stop})" for stop in stops)
    return _row("tokenizer", "OK", f"{template}; completions stop at {tokens}")


def task_rows(config: TrainConfig, shape: DecoderConfig | None, tokenizer: Any) -> Iterator[Row]:
    """The task's problems, those that are evaluated, and whether their prompts fit."""
    try:
        task = config.task.build()
        sets = evaluated_tasks(config, task)
    except UNUSABLE as error:
        yield _fail("task", error, "correct the task section, or evaluation.sets")
        return
    num_test = sum(len(each.test) for each in sets)
    counts = f"{task.name} from {task.source}: {len(task.train)} training, {num_test} test problems"
    if not task.train or (config.evaluation.interval and not num_test):
        step = "name splits for both, give evaluation.sets, or set evaluation.interval=0"
        yield _row("task", "FAIL", counts, step)
        return
    yield _row("task", "OK", counts)
    notes = dict.fromkeys(note for each in (task, *sets) for note in each.notes)
    for note in notes:
        yield _row("task", "WARN", note, "correct the rows")
    both = overlap_text(task.train, [problem for each in sets for problem in each.test])
    if both and not config.evaluation.drop_overlap:
        yield _row("task", "WARN", both, "set evaluation.drop_overlap=true, which leaves them out of training")
    if any(problem.tests for each in (task, *sets) for problem in (*each.train, *each.test)):
        yield sandbox_row(config, refusal())
    if shape is not None and tokenizer is not None:
        yield prompts_row(config, task, sets, shape, tokenizer)


def sandbox_row(config: TrainConfig, why: str | None) -> Row:
    """Whether programs of completions can be cut off from this machine; `why` not."""
    if why is None:
        return _row("sandbox", "OK", "programs run without network, files and rights")
    if config.verifier.allow_unisolated:
        return _row("sandbox", "WARN", f"programs run without isolation: {why}", "use a machine with user namespaces")
    return _row("sandbox", "FAIL", why, "use a machine with user namespaces, or set verifier.allow_unisolated=true")


def prompts_row(config: TrainConfig, task: Task, sets: list[Task], shape: DecoderConfig, tokenizer: Any) -> Row:
    """Some prompts of each split against the model's vocabulary and rollout.max_prompt_tokens."""
    prompts = []
    for owner, problems in ((task, task.train), *((each, each.test) for each in sets)):
        for problem in problems[:: max(1, len(problems) // PROMPTS_TRIED)]:
            model = config.model
            try:
                messages = owner.messages(problem)
                prompts.append(encode_messages(tokenizer, messages, model.chat_template, model.enable_thinking))
            except UNUSABLE as error:
                return _fail("prompts", error, "set model.chat_template=auto, or drop the problem")
    try:
        check_vocabulary(prompts, shape.vocab_size, config.model.path)
    except ValueError as error:
        return _fail("prompts", error, "fetch the model's own tokenizer files")
    lengths, limit = [len(prompt) for prompt in prompts], config.rollout.max_prompt_tokens
    num_long = sum(length > limit for length in lengths)
    detail = f"of {len(lengths)} tried, the longest has {max(lengths)} tokens; rollout.max_prompt_tokens={limit}"
    if num_long == 0:
        return _row("prompts", "OK", detail)
    step = f"set rollout.max_prompt_tokens={max(lengths)}; longer prompts are left out"
    return _row("prompts", "FAIL" if num_long == len(lengths) else "WARN", f"{num_long} are too long: {detail}", step)


def output_row(config: TrainConfig) -> Row:
    """Whether output_dir is free and can be written."""
    with RunFolder(config.output_dir) as folder:
        try:
            folder.check(config)
        except UNUSABLE as error:
            return _fail("output_dir", error, "give another output_dir, overwrite=true, or train with --resume")
        present = _nearest_folder(folder.path)
        if not present.is_dir() or not os.access(present, os.W_OK):
            return _row("output_dir", "FAIL", f"{present} cannot be written", "give an output_dir that can be made")
        state = "its run is replaced" if folder.holds_run else "free"
        return _row("output_dir", "OK", f"{folder.path}: {state}")


def disk_row(config: TrainConfig, estimate: MemoryEstimate) -> Row:
    """Room for the checkpoints and the trained model."""
    try:
        num_parameters = estimate.num_parameters + estimate.num_critic_parameters
        sizes = RunFolder(config.output_dir).check_room(config, num_parameters, estimate.model_bytes)
    except UNUSABLE as error:
        return _fail("disk", error, "make room, lower checkpoint.keep_last, or give an output_dir on another disk")
    return _row("disk", "OK", sizes)


def memory_row(config: TrainConfig, estimate: MemoryEstimate) -> Row:
    """What the run holds at all times, against what is free; where activations are not planned."""
    on_gpu = torch.device(config.device).type == "cuda"
    free = free_bytes(config.device) if on_gpu else memory_bytes()[0]
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in estimate.parts.items())
    detail = f"{size_text(estimate.total_bytes)} and activations, of {size_text(free)} free ({parts})"
    step = "take a smaller model or another device, or lower rollout.engine.kv_cache_tokens"
    if estimate.total_bytes > free:
        return _row("memory for the run", "FAIL", detail, step)
    if estimate.total_bytes > 0.8 * free:
        return _row("memory for the run", "WARN", detail, f"{step}: activations have little room")
    return _row("memory for the run", "OK", detail)


def plan_row(config: TrainConfig, plan_of: Planner) -> Row:
    """The run's memory plan against what is free on its CUDA device."""
    plan, free = plan_of(config), free_bytes(config.device)
    plan_text = " ".join(line.strip() for line in plan.lines())
    detail = f"{binary_size(plan.needed_bytes)} of {binary_size(free)} free; {plan_text}"
    if plan.needed_bytes > free:
        return _row("memory for the run", "FAIL", detail, advice(config, free, plan_of))
    return _row("memory for the run", "OK", detail)


def host_row(plan: MemoryPlan) -> Row:
    """Room in the host's memory for moments that lie there."""
    try:
        require_room(plan.host)
    except UNUSABLE as error:
        return _fail("pinned memory", error, "set offload_moments=false, or do as the error says")
    return _row("pinned memory", "OK", f"{parts_text(plan.host)} of the host's {binary_size(memory_bytes()[0])} free")


def _nearest_folder(path: Path) -> Path:
    """The path itself or the nearest part of it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _fail(name: str, error: Exception, next_step: str) -> Row:
    return _row(name, "FAIL", reason(error), next_step)


def _row(name: str, status: Status, detail: str, next_step: str = "") -> Row:
    return Row(group="config", name=name, status=status, detail=detail, next_step=next_step)
