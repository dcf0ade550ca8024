"""The training engine of `actor.strategy=octavo`: verl's FSDP2 engine with its linear layers in FP8.

Weights are quantised once per optimiser step, and the same bytes serve verl's old and new log-probabilities, the
backward and, through `transfer`, vLLM. Attention, norms and lm_head are verl's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.model import convert_weight_keys
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.padding import no_padding_2_padding

from octavo.models.config import FAMILIES
from octavo.models.fp8_folder import SCALE
from octavo.plugins.verl.calibrating import Calibrator, during
from octavo.plugins.verl.config import EngineOptions, options_of
from octavo.plugins.verl.linear import ShardedLinear, check_vllm_takes, quantize_linears, shadowing, take_buffers, whole
from octavo.plugins.verl.transfer import stamped

STRATEGY = "octavo"
STATE_FILE = "octavo.json"
SHADOW = "octavo_shadow_log_ratio"
"""Key of a mini-batch's log r_bf16, while it is on its way to the loss."""


class Engine(FSDPEngineWithLMHead):
    """FSDP2 in FP8. Arguments are verl's.

    Raises:
        ValueError: the model, LoRA, or an option is not supported.
    """

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        self.options = options_of(EngineOptions, engine_config, "actor.fsdp_config")
        if model_config.lora_rank > 0:
            raise ValueError(
                f"actor.strategy=octavo trains whole weights, and model.lora_rank={model_config.lora_rank}. Use "
                f"actor.strategy=fsdp2, or lora_rank=0"
            )
        if (family := model_config.hf_config.model_type) not in FAMILIES:
            raise ValueError(
                f"actor.strategy=octavo trains dense models of {', '.join(FAMILIES)}; {model_config.local_path} is a "
                f"{family}. Use actor.strategy=fsdp2"
            )
        object.__setattr__(engine_config, "strategy", "fsdp2")  # what verl's engine looks for
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self.layers: dict[str, ShardedLinear] = {}
        self.policy_version = 0
        self.calibrator: Calibrator | None = None
        if self.options.calibration is not None and not engine_config.forward_only:
            calibration = self.options.calibration
            self.calibrator = Calibrator(config=calibration, bounds=calibration.start_bounds())
        self._step_began = False
        self._masters_before: list[Tensor] | None = None  # BF16, of a measured step

    def _build_module(self) -> nn.Module:
        module = super()._build_module()
        self.layers = quantize_linears(module, self.options.flow())
        if self.options.rollout_weights == "fp8":
            check_vllm_takes(self.layers)
        return module

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        put_back = take_buffers(self.layers.values())
        wrapped = super()._build_fsdp_module(module)
        put_back(get_device_id())
        return wrapped

    def _build_model_optimizer(self) -> None:
        super()._build_model_optimizer()
        self.requantize_()
        if self.rank == 0:
            options = self.options
            print(
                f"octavo: {len(self.layers)} linear layers in {options.recipe}, "
                f"scale_rounding={options.scale_rounding}, keep_bf16={list(options.keep_bf16)}, "
                f"rollout_weights={options.rollout_weights}",
                flush=True,
            )

    def requantize_(self) -> None:
        """Write the bytes of every layer from the masters; a collective call."""
        for layer in self.layers.values():
            layer.requantize_()

    def optimizer_step(self) -> float:
        """verl's update, then the only quantisation until the next one."""
        grad_norm = super().optimizer_step()
        self.requantize_()
        self.policy_version += 1
        return grad_norm

    def train_batch(self, data: TensorDict, loss_function: Callable[..., Any]) -> Any:
        """verl's update on one mini-batch; with calibration the bounds move after a step's last one."""
        calibrator = self.calibrator
        if calibrator is None:
            return super().train_batch(data, loss_function)
        is_last, began = tu.get(data, "update_lr_scheduler", default=False), self._step_began
        if not began and calibrator.measures:
            if is_last:
                raise ValueError(
                    "calibration needs ratios that differ from 1, and with one update a step every ratio is 1. Use "
                    "actor.ppo_mini_batch_size below data.train_batch_size or actor.ppo_epochs above 1"
                )
            self._masters_before = [local.to(torch.bfloat16, copy=True) for local in self._local_masters()]
        self._step_began = not is_last
        if is_last and self._masters_before is not None:
            data[SHADOW] = self._shadow_log_ratio(data)
            self._masters_before = None
        with during(calibrator):
            outputs = super().train_batch(data, loss_function)
        if is_last:
            calibration = calibrator.finish(self.get_data_parallel_group())
            outputs["metrics"] |= {name: [value] for name, value in calibration.items()}  # as of one microbatch
        return outputs

    def prepare_model_outputs(self, output: Any, *arguments: Any, **named: Any) -> Any:
        """verl's, on FP32 logits: of BF16 ones it makes BF16 log-probabilities where flash-attn is missing."""
        if output.get("logits") is not None:  # verl's fused kernels make none
            output.logits = output.logits.float()
        return super().prepare_model_outputs(output, *arguments, **named)

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        """verl's, with the microbatch's part of the shadow where the loss finds it."""
        if self.calibrator is not None:
            shadow = micro_batch.get(SHADOW, None)
            self.calibrator.shadow_log_ratio = None
            if shadow is not None and not forward_only:
                padded = no_padding_2_padding(shadow, micro_batch)
                self.calibrator.shadow_log_ratio = padded.to(get_device_id())
        return super().forward_step(micro_batch, loss_function, forward_only)

    def _shadow_log_ratio(self, data: TensorDict) -> Tensor:
        """Nested log r_bf16 of a mini-batch's tokens: the masters now over those before the step."""
        assert self._masters_before is not None
        now = self._shadow_logprobs(data)
        with self._replaced_masters(self._masters_before):
            before = self._shadow_logprobs(data)
        return torch.nested.nested_tensor_from_jagged(now.values() - before.values(), now.offsets())

    def _shadow_logprobs(self, data: TensorDict) -> Any:
        """Nested, [B, tokens] fp32."""
        with shadowing(self.layers.values()), torch.no_grad():
            output = self.forward_backward_batch(data, loss_function=None, forward_only=True)
        return output["model_output"]["log_probs"]

    def _local_masters(self) -> Iterator[Tensor]:
        for parameter in self.module.parameters():
            detached = parameter.detach()
            yield detached.to_local() if isinstance(detached, DTensor) else detached

    @contextmanager
    def _replaced_masters(self, others: list[Tensor]) -> Iterator[None]:
        """Within, forwards gather other masters; FP8 bytes stay as they are."""
        masters = list(self._local_masters())
        kept = [master.clone() for master in masters]
        try:
            self._put(masters, others)
            yield
        finally:
            self._put(masters, kept)

    @torch.no_grad()
    def _put(self, masters: list[Tensor], values: list[Tensor]) -> None:
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the root keeps what it gathered
        for master, value in zip(masters, values, strict=True):
            master.copy_(value)

    def get_per_tensor_param(self, **arguments: Any) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """The weights for the rollout engine, one at a time; in FP8 as `transfer.stamped` sends them."""
        if self.options.rollout_weights == "bf16":
            return super().get_per_tensor_param(**arguments)
        parameters = convert_weight_keys(self.module.state_dict(), self.module)
        num_tensors = len(parameters) + sum(f"{name}.weight" in parameters for name in self.layers)
        return stamped(self._rollout_tensors(parameters), num_tensors, self.policy_version), None

    def _rollout_tensors(self, parameters: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in parameters.items():
            module, _, kind = name.rpartition(".")
            layer = self.layers.get(module)
            if layer is None or kind != "weight":
                gathered = whole(parameter, get_device_id())
                assert gathered is not None
                yield name, gathered.to(torch.bfloat16) if gathered.is_floating_point() else gathered
            else:
                yield name, layer.get_buffer("weight_q")
                yield f"{module}.{SCALE}", layer.get_buffer("weight_q_scale")

    def save_checkpoint(self, local_path: str, *arguments: Any, **named: Any) -> None:
        """verl's files, and the bounds beside them, by every rank: nodes need not share a disk."""
        super().save_checkpoint(local_path, *arguments, **named)
        calibration = None if self.calibrator is None else self.calibrator.to_json()
        state = {"policy_version": self.policy_version, "calibration": calibration}
        partial = Path(local_path) / f"{STATE_FILE}.{self.rank}.partial"
        partial.write_text(json.dumps(state), encoding="utf-8")
        partial.replace(Path(local_path) / STATE_FILE)

    def load_checkpoint(self, local_path: str, *arguments: Any, **named: Any) -> None:
        """The bounds and verl's files; the bytes are made anew from the masters.

        Raises:
            ValueError: the bounds are missing or damaged.
        """
        self._take_state(Path(local_path) / STATE_FILE)
        super().load_checkpoint(local_path, *arguments, **named)
        with self.eval_mode() if self.is_param_offload_enabled else nullcontext():
            self.requantize_()

    def _take_state(self, path: Path) -> None:
        try:
            state = json.loads(path.read_text(encoding="utf-8"))
            self.policy_version = int(state.get("policy_version", 0))
            kept = state.get("calibration")
            if self.calibrator is not None and kept is not None:
                self.calibrator.load(kept)
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} cannot be read ({error!r}): the checkpoint is not of actor.strategy=octavo, or is damaged. "
                f"Write {{}} to it to go on from verl's files alone, at the start bounds"
            ) from error
        if self.calibrator is not None and kept is None and state:
            raise ValueError(
                f"{path} holds no bounds: the run that wrote it did not calibrate. Write {{}} to it to begin at the "
                f"start bounds, or leave out actor.fsdp_config.octavo.calibration"
            )


def register_engine() -> None:
    """Make `actor.strategy=octavo` known to verl.

    Raises:
        ValueError: another plug-in has taken the name.
    """
    for device in ("cuda", "cpu"):
        known = EngineRegistry._engines.get("language_model", {}).get(STRATEGY, {}).get(device, Engine)
        if known is not Engine:
            raise ValueError(f"verl already has an engine named {STRATEGY!r}: {known.__module__}. Unload that plug-in")
    registered = EngineRegistry._engines.get("language_model", {}).get(STRATEGY, {})
    missing = [device for device in ("cuda", "cpu") if device not in registered]
    if missing:
        EngineRegistry.register(model_type="language_model", backend=STRATEGY, device=missing)(Engine)
