"""The section `rollout.engine` where vLLM samples; the engine itself is in plugins/vllm, above the trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from octavo.numerics.recipe import Recipe
from octavo.rollout.sampler import SamplingConfig

SUPPORTED = ("0.24", "0.32")
"""Releases of vLLM, by major and minor number, whose workers have `reload_weights(weights_path=...)` for block FP8."""
RECIPES = ("block128", "bf16")
"""What vLLM runs of a rollout's recipes."""
MIN_TEMPERATURE = 0.01
"""vLLM raises a lower one to this, but for 0."""


@dataclass(frozen=True, kw_only=True)
class VLLMConfig:
    """vLLM in the trainer's process, which loads octavo's bytes before each rollout and multiplies by kernels of its
    own: it needs precision.allow_mismatch, and importance weights correct for it (docs/vllm.md)."""

    type_name: ClassVar[str] = "vllm"
    tensor_parallel_size: int = 1
    """GPUs that share the rollout; above 1 its workers are processes of their own."""
    gpu_memory_utilization: float = 0.4
    """Share of each of its GPUs' memory that vLLM takes, for weights and KV cache; training has the rest. On a CPU
    VLLM_CPU_KVCACHE_SPACE says how many GiB."""
    max_sequences: int = 256
    """Most sequences running at once."""
    max_prefill_tokens: int = 8192
    """Most new tokens in one step."""
    cuda_graphs: bool = True
    """Compile the model and run decode steps as CUDA graphs; starting takes a minute more."""
    transfer_dir: str = "/dev/shm"
    """Folder for the weights on their way, best in memory: room for two copies of the model as vLLM loads it."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "max_sequences", "max_prefill_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ValueError(f"gpu_memory_utilization is a share, in (0, 1]; got {self.gpu_memory_utilization}")
        if not self.transfer_dir:
            raise ValueError("transfer_dir is empty; name a folder, as /dev/shm")
        if self.max_prefill_tokens < self.max_sequences:
            raise ValueError(
                f"max_prefill_tokens={self.max_prefill_tokens} is less than max_sequences={self.max_sequences}, each "
                f"of which takes a token in a step. Raise it"
            )


def check_vllm_runs(rollout: Recipe, sampling: SamplingConfig) -> None:
    """Refuse a rollout that vLLM would run otherwise than declared.

    Raises:
        ValueError: names the key and what to use.
    """
    if rollout.name not in RECIPES:
        raise ValueError(
            f"vLLM runs the recipes {' and '.join(RECIPES)}; the rollout's is {rollout.name!r}. Use precision.rollout: "
            f"block128, whose weights are w8a16's too, or rollout.engine.type=octavo"
        )
    if 0.0 < sampling.temperature < MIN_TEMPERATURE:
        raise ValueError(
            f"vLLM raises a temperature of {sampling.temperature} to {MIN_TEMPERATURE}. Use at least that, or "
            f"rollout.engine.type=octavo"
        )


def supported_release() -> str:
    """The version of vLLM that is installed.

    Raises:
        ValueError: there is none, or it is not supported.
    """
    try:
        import vllm
    except ImportError as error:
        raise ValueError(f"vLLM cannot be imported ({error}). Install it: pip install 'octavo[vllm]'") from error
    version: str = vllm.__version__
    if ".".join(version.split(".")[:2]) not in SUPPORTED:
        raise ValueError(
            f"vLLM {version} is not supported, as its reloading of weights is not known; supported are "
            f"{', '.join(f'{known}.x' for known in SUPPORTED)}"
        )
    return version
