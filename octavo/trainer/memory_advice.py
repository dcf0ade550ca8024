"""Whether a run fits its device, and else which config keys make it fit, with what each saves."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from octavo.rl.calibration_config import EMAReference, MastersReference, SnapshotReference
from octavo.rl.gae import GAEConfig
from octavo.rollout.vllm_config import VLLMConfig
from octavo.trainer.config import TrainConfig
from octavo.trainer.host_memory import memory_bytes, require_room
from octavo.trainer.memory import MemoryPlan, Planner, binary_size, parts_text, planner
from octavo.trainer.run import prepare_device

FEWEST_SEQUENCES = 16
"""Advice goes no lower: decode steps of fewer take as long."""


def planned(config: TrainConfig) -> MemoryPlan:
    """The plan of a run that fits its device.

    Raises:
        ValueError: it does not fit: what is too large, and which keys to change; or the host has no room for moments;
            or there is no such device or model, or the kernels do not run there.
    """
    prepare_device(config)
    plan_of = planner(config)
    plan = plan_of(config)
    if plan.phases:
        check_room(config, free_bytes(config.device), plan_of)
    require_room(plan.host)
    return plan


def free_bytes(device: str) -> int:
    """What this process can still take of a CUDA device."""
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def check_room(config: TrainConfig, free: int, plan_of: Planner) -> None:
    """Refuse a run that takes more than `free` bytes.

    Raises:
        ValueError: as said, with what to change.
    """
    plan = plan_of(config)
    if plan.needed_bytes <= free:
        return
    phase, peak = plan.peak
    parts = parts_text(plan.held | plan.phases[phase])
    raise ValueError(
        f"the run needs {binary_size(plan.needed_bytes)} of device={config.device!r}, where {binary_size(free)} are "
        f"free: {binary_size(peak)} of tensors at the peak, in {phase} ({parts}), and what CUDA and its allocator hold "
        f"beside them. {advice(config, free, plan_of)}"
    )


def advice(config: TrainConfig, free: int, plan_of: Planner) -> str:
    """What makes the run fit, and what each key saves alone."""
    needed = plan_of(config).needed_bytes
    chosen, least = changes_that_fit(config, free, plan_of)
    savings = []
    for key, values in options(config):
        after = {value: _needed(plan_of(with_changes(config, {key: value}))) for value in values}
        fitting = [value for value in values if after[value] <= free]
        value = chosen.get(key, (fitting or values[-1:])[0])
        if after[value] < needed:
            savings.append(f"{override(key, value)} saves {binary_size(needed - after[value])}")
    alone = f". Alone, {', '.join(savings)}" if savings else ""
    if least > free:
        return f"Nothing here makes it fit: at the least it needs {binary_size(least)}. Take a smaller model{alone}"
    return f"It fits with {' '.join(override(*change) for change in chosen.items())}{alone}"


def changes_that_fit(config: TrainConfig, free: int, plan_of: Planner) -> tuple[dict[str, Any], int]:
    """The first of `options` that together make a run fit; all that save something, where they do not.

    Returns:
        {key: value}, none of which can be left out, and the bytes that the run then needs.
    """
    chosen: dict[str, Any] = {}
    needed = plan_of(config).needed_bytes
    for key, values in options(config):
        for value in values:
            after = _needed(plan_of(with_changes(config, chosen | {key: value})))
            if needed > free and after < needed:
                chosen, needed = chosen | {key: value}, after
    for key in list(chosen):
        others = {name: value for name, value in chosen.items() if name != key}
        after = plan_of(with_changes(config, others)).needed_bytes
        if after <= free:
            chosen, needed = others, after
    return chosen, needed


def options(config: TrainConfig) -> Iterator[tuple[str, list[Any]]]:
    """Keys that can save memory, and values from mild to strong; first those that change no number."""
    trainer, longest = config.trainer, config.max_tokens
    recipe = config.precision.train_recipe()
    reference = None if config.calibration is None else config.calibration.reference
    shadow = {name: getattr(config.algorithm, name) for name in ("ratio_from", "clip_mask_from")}
    found: dict[str, Sequence[Any]] = {
        "trainer.recompute_layers": [] if trainer.recompute_layers else [True],
        "trainer.microbatch_tokens": _halves(trainer.microbatch_tokens, longest),
        **{f"rollout.engine.{name}": values for name, values in _engine_options(config).items()},
        **{f"{name}.offload_moments": [True] for name in _on_device(config)},
        "precision.saved_activations": ["fp8"] if recipe.quantizes and recipe.saved_activations != "fp8" else [],
        "optimizer.state_format": ["int8"] if config.optimizer.state_format == "fp32" else [],
        "optimizer.master_format": ["bf16"] if _may_round_masters(config) else [],
        "watch.action": ["warn"] if config.watch is not None and config.watch.action == "bf16_forward" else [],
        "calibration.reference": [MastersReference()]
        if isinstance(reference, EMAReference | SnapshotReference)
        else [],
        **{f"algorithm.{name}": ["bf16_shadow"] if source == "fp32_shadow" else [] for name, source in shadow.items()},
        "algorithm.kl.coefficient": [0.0] if config.algorithm.kl.coefficient > 0.0 else [],
    }
    return ((key, list(values)) for key, values in found.items() if values)


def _needed(plan: MemoryPlan) -> int:
    """Bytes of the device; more than any has where the host has no room for what is to lie there."""
    return plan.needed_bytes if sum(plan.host.values()) <= memory_bytes()[0] else sys.maxsize


def _on_device(config: TrainConfig) -> list[str]:
    """Optimisers whose moments are on a GPU at all times."""
    found = {"optimizer": config.optimizer}
    if isinstance(config.algorithm.advantage, GAEConfig):
        found["critic.optimizer"] = config.critic.optimizer
    return [name for name, each in found.items() if config.device.startswith("cuda") and not each.offload_moments]


def _may_round_masters(config: TrainConfig) -> bool:
    in_fp32 = config.precision.train_recipe().high_precision == "fp32" or config.model.dither_masters
    return config.optimizer.master_format == "fp32" and not in_fp32


def _engine_options(config: TrainConfig) -> dict[str, list[Any]]:
    """The same of the engine's keys."""
    engine, longest = config.rollout.engine, config.max_tokens
    if isinstance(engine, VLLMConfig):  # whatever it runs, it takes its share
        share = engine.gpu_memory_utilization
        lower = [round(share * part, 3) for part in (0.75, 0.5, 0.25)]
        return {"gpu_memory_utilization": [each for each in lower if 0.0 < each < share]}
    pages = -(-longest // engine.page_size) * engine.page_size
    return {
        "lend_memory": [] if engine.lend_memory or not config.device.startswith("cuda") else [True],
        "max_prefill_tokens": _halves(engine.max_prefill_tokens, longest),
        "kv_cache_tokens": _halves(engine.kv_cache_tokens, pages),
        "max_sequences": _halves(engine.max_sequences, FEWEST_SEQUENCES),
    }


def _halves(value: int, least: int) -> list[int]:
    """A half, a quarter, ... down to `least`."""
    found = []
    while value // 2 >= least:
        value //= 2
        found.append(value)
    return found


def with_changes(config: Any, changes: Mapping[str, Any]) -> Any:
    """The config with other values under dotted keys."""
    for key, value in changes.items():
        name, _, rest = key.partition(".")
        config = replace(config, **{name: with_changes(getattr(config, name), {rest: value}) if rest else value})
    return config


def override(key: str, value: Any) -> str:
    """As on the command line: trainer.recompute_layers=true."""
    value = getattr(value, "type_name", value)
    return f"{key}={str(value).lower() if isinstance(value, bool) else value}"
