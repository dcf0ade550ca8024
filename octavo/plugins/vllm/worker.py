"""What runs in the process of each of vLLM's workers."""

from __future__ import annotations

from typing import Any


class WorkerExtension:
    """An extension of a vLLM worker: `LLM(worker_extension_cls="octavo.plugins.vllm.worker.WorkerExtension")`."""

    model_runner: Any
    reload_weights: Any

    def octavo_layers(self) -> dict[str, tuple[bool, str]]:
        """{name of a linear layer: whether its weight is FP8, the class that multiplies it}."""
        from vllm.model_executor.layers.linear import LinearBase

        found = {}
        for name, layer in self.model_runner.model.named_modules():
            if isinstance(layer, LinearBase):
                kernel = getattr(layer.quant_method, "fp8_linear", layer.quant_method)
                found[name] = ("float8" in str(layer.weight.dtype), type(kernel).__name__)
        return found

    def octavo_reload(self, folder: str) -> None:
        """`reload_weights`, and the head after it: on a CPU vLLM multiplies a copy, which it leaves where the head is
        tied to the embedding, as no weight of the folder is the head's."""
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        self.reload_weights(weights_path=folder)
        for layer in self.model_runner.model.modules():
            if isinstance(layer, ParallelLMHead):
                layer.quant_method.process_weights_after_loading(layer)
