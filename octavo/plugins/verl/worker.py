"""verl's extension of a vLLM worker, which loads FP8 weights as they come instead of quantising BF16 ones.

    +actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=octavo.plugins.verl.worker.WorkerExtension

verl's own quantises what it is sent, whatever its type, and so would quantise FP8 codes as if they were values.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from verl.utils.vllm.vllm_quant_utils import is_fp8_weight, is_quantized_model
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from octavo.models.fp8_folder import SCALE
from octavo.numerics.fp8 import E4M3
from octavo.plugins.verl.transfer import Arrival
from octavo.plugins.vllm.scales import check_kept


class WorkerExtension(vLLMColocateWorkerExtension):
    """Receives streams of `transfer.stamped`."""

    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Load the weights of one version.

        Raises:
            ValueError: they are for another model, or did not arrive whole.
        """
        if not is_quantized_model(self.model_runner.vllm_config):
            raise ValueError(
                "octavo sends FP8 weights, and this vLLM runs BF16: set actor_rollout_ref.rollout.quantization=fp8, or "
                "actor.fsdp_config.octavo.rollout_weights=bf16 with verl's own worker_extension_cls"
            )
        self._arrival = Arrival()
        super().update_weights_from_ipc(peft_config, base_sync_done, use_shm)
        if not self._arrival.complete:
            raise ValueError(
                f"weights of policy_version {self._arrival.policy_version} stopped before their last tensor"
            )

    def _update_weights(self, weights: Sequence[tuple[str, Tensor]], peft_config: Any, base_sync_done: bool) -> None:
        """One bucket of verl's transfer."""
        taken = self._arrival.take(weights)
        model = self.model_runner.model
        for name, tensor in taken:
            if name.endswith(SCALE):
                check_kept(name, tensor)
            if name.endswith(".weight") and is_fp8_weight(name, model) != (tensor.dtype == E4M3):
                raise ValueError(
                    f"{name} came in {tensor.dtype}, and vLLM holds it in {'FP8' if tensor.dtype != E4M3 else 'BF16'}: "
                    f"name the same modules in actor.fsdp_config.octavo.keep_bf16 as in the ignored_layers of "
                    f"rollout.engine_kwargs.vllm.hf_overrides"
                )
        parameters = [parameter for parameter in model.parameters() if hasattr(parameter, "subclass_type")]
        plain = [type(parameter) for parameter in parameters]
        for parameter in parameters:  # vLLM's loaders ask for the class that processing took off
            parameter.__class__ = parameter.subclass_type
        try:
            model.load_weights(iter(taken))
        finally:
            for parameter, its_class in zip(parameters, plain, strict=True):
                parameter.__class__ = its_class
