"""What runs beside vLLM's worker, in its process, to say how its layers were made."""

from typing import Any


class LayerReport:
    """An extension of a vLLM worker: `LLM(worker_extension_cls="octavo.plugins.vllm.worker.LayerReport")`."""

    model_runner: Any

    def octavo_layers(self) -> dict[str, tuple[bool, str]]:
        """{name of a linear layer: whether its weight is FP8, the class that multiplies it}."""
        from vllm.model_executor.layers.linear import LinearBase

        found = {}
        for name, layer in self.model_runner.model.named_modules():
            if isinstance(layer, LinearBase):
                kernel = getattr(layer.quant_method, "fp8_linear", layer.quant_method)
                found[name] = ("float8" in str(layer.weight.dtype), type(kernel).__name__)
        return found
