"""What a run holds in memory from its first step to its last, in bytes, by arithmetic on the model's shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from octavo.kernels.adamw import BLOCK
from octavo.models.config import DecoderConfig
from octavo.numerics.recipe import Recipe, get_recipe
from octavo.rl.calibration_config import EMAReference, SnapshotReference
from octavo.rollout.engine import EngineConfig
from octavo.trainer.config import TrainConfig
from octavo.trainer.memory_passes import DecoderPass

OPERAND_BYTES = 8
"""The reference multiplies weights in float64 and keeps them ready from one optimiser step to the next. Kernels on a
GPU read the stored bytes, or a copy with whole blocks, and for the backward a transposed one."""
FORMAT_BYTES = {"fp8": 1, "bf16": 2, "fp32": 4}
OF_POLICY, OF_CRITIC = "AdamW", "the critic's AdamW"
"""Moments, in a plan."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of everything whose size does not depend on the batch. Activations, logits and sampling come on top."""

    num_parameters: int
    """Of the policy, tied weights once."""
    num_critic_parameters: int
    """Of a critic; 0 without one."""
    model_bytes: int
    """model/ as written at the end."""
    parts: dict[str, int]
    """What for -> bytes."""

    @property
    def total_bytes(self) -> int:
        """All parts together."""
        return sum(self.parts.values())


def estimate_memory(
    config: TrainConfig, shape: DecoderConfig, two_forwards: bool, critic_shape: DecoderConfig | None = None
) -> MemoryEstimate:
    """The estimate for one policy, its optimiser, its KV cache and what else the run holds: reference, shadow, critic.

    Args:
        config: of the run.
        shape: of the model.
        two_forwards: the rollout has bytes of its own, as its precision is not training's.
        critic_shape: of the critic's model, where there is one.
    """
    train, rollout = config.precision.train_recipe(), config.precision.rollout_recipe()
    num_parameters = count_parameters(shape)
    on_gpu = config.runs_kernels
    forward = forward_bytes(shape, train, on_gpu)
    masters = master_bytes(shape, config.optimizer.master_format)
    parts = {
        f"{config.optimizer.master_format.upper()} masters": masters,
        "gradients": 4 * num_parameters,
        OF_POLICY: moment_bytes(shape, config.optimizer.state_format),
        f"{train.name} bytes": forward.stored,
        "operands": forward.operands + forward.head + forward.backward,
        **engine_bytes(config, shape, rollout),
    }
    if two_forwards:
        twin = forward_bytes(shape, rollout, on_gpu)
        parts["the rollout's own bytes"] = twin.stored + twin.operands + twin.head
    if config.algorithm.kl.coefficient > 0.0:
        parts["reference model"] = forward.stored + forward.operands + forward.head
    if config.calibration is not None and isinstance(config.calibration.reference, EMAReference | SnapshotReference):
        copy = forward_bytes(shape, get_recipe("bf16"), on_gpu)
        parts["calibration's reference"] = 4 * num_parameters + copy.stored
    if config.algorithm.loss_shadow == "fp32_shadow":
        twin = forward_bytes(shape, get_recipe("fp32"), on_gpu)
        parts["FP32 shadow"] = twin.stored + twin.head  # which reads the masters, and keeps none of them ready
    if config.watch is not None and config.watch.action == "bf16_forward":
        bf16 = get_recipe("bf16")
        twin = forward_bytes(shape, bf16, on_gpu)
        rescue = twin.stored + twin.operands + twin.head + sum(engine_bytes(config, shape, bf16).values())
        parts["rescue in BF16"] = rescue
    num_critic_parameters = 0
    if critic_shape is not None:
        critic_shape = replace(critic_shape, tied_embeddings=True)  # its lm_head is dropped
        num_critic_parameters = count_parameters(critic_shape) + critic_shape.hidden_size + 1
        critic = forward_bytes(critic_shape, get_recipe(config.critic.recipe), on_gpu)
        prepared = critic.operands + critic.backward  # its head is no lm_head
        formats, vector = config.critic.optimizer, num_critic_parameters - count_parameters(critic_shape)
        learned = master_bytes(critic_shape, formats.master_format) + critic_moment_bytes(config, critic_shape)
        parts["critic"] = learned + 4 * num_critic_parameters + 4 * vector + critic.stored + prepared
    high = FORMAT_BYTES[train.high_precision]
    return MemoryEstimate(
        num_parameters=num_parameters,
        num_critic_parameters=num_critic_parameters,
        model_bytes=num_parameters * high,
        parts=parts,
    )


def count_parameters(shape: DecoderConfig) -> int:
    """Masters of a decoder, tied weights once."""
    return sum(rows * columns for _, rows, columns in linears(shape)) + _vocabulary(shape) + _vectors(shape)


def master_bytes(shape: DecoderConfig, master_format: str) -> int:
    """Of a decoder's masters: matrices in their format, vectors in FP32."""
    vectors = _vectors(shape)
    return FORMAT_BYTES[master_format] * (count_parameters(shape) - vectors) + FORMAT_BYTES["fp32"] * vectors


def moment_bytes(shape: DecoderConfig, state_format: str) -> int:
    """Of both moments of every master; codes have a scale for each block."""
    in_fp32 = 2 * FORMAT_BYTES["fp32"]
    if state_format == "fp32":
        return in_fp32 * count_parameters(shape)
    matrices = [width * inputs for width, inputs in _fused(shape)]
    matrices += [shape.vocab_size * shape.hidden_size] * (1 if shape.tied_embeddings else 2)
    blocks = sum(-(-count // BLOCK) for count in matrices)
    return 2 * sum(matrices) + in_fp32 * (blocks + _vectors(shape))


def critic_moment_bytes(config: TrainConfig, critic_shape: DecoderConfig) -> int:
    """The same of a critic, which has a vector and a number in place of lm_head."""
    decoder = moment_bytes(replace(critic_shape, tied_embeddings=True), config.critic.optimizer.state_format)
    return decoder + 2 * FORMAT_BYTES["fp32"] * (critic_shape.hidden_size + 1)


def offloaded_bytes(
    config: TrainConfig, shape: DecoderConfig, critic_shape: DecoderConfig | None = None
) -> dict[str, int]:
    """Moments that lie on the host but for updates, by whose they are; none where the run is on a CPU."""
    found: dict[str, int] = {}
    if not config.device.startswith("cuda"):
        return found
    if config.optimizer.offload_moments:
        found[OF_POLICY] = moment_bytes(shape, config.optimizer.state_format)
    if critic_shape is not None and config.critic.optimizer.offload_moments:
        found[OF_CRITIC] = critic_moment_bytes(config, critic_shape)
    return found


def memory_moves(config: TrainConfig) -> bool:
    """Whether a GPU's memory goes from one to another within a step: the KV cache's, or that of moments."""
    engine, optimizers = config.rollout.engine, (config.optimizer, config.critic.optimizer)
    lends = isinstance(engine, EngineConfig) and engine.lend_memory
    return config.device.startswith("cuda") and (lends or any(each.offload_moments for each in optimizers))


@dataclass(frozen=True, kw_only=True)
class ForwardBytes:
    """What a decoder holds beside its masters."""

    stored: int
    """FP8 bytes and high-precision copies of the weights."""
    operands: int
    """Weights of layers prepared for the forward's products."""
    head: int
    """lm_head, likewise."""
    backward: int
    """Weights prepared for the backward's."""


def forward_bytes(shape: DecoderConfig, recipe: Recipe, on_gpu: bool) -> ForwardBytes:
    """Of one decoder under a recipe."""
    high = FORMAT_BYTES[recipe.high_precision]
    linear = quantized = 0
    for path, rows, columns in linears(shape):
        linear += rows * columns
        quantized += rows * columns if recipe.quantizes and not recipe.keeps_bf16(path) else 0
    copies = 1 if recipe.dgrad is None or recipe.dgrad.right == recipe.fprop.right else 2
    stored = quantized * copies + (linear - quantized + _vocabulary(shape)) * high
    if on_gpu and recipe.high_precision == "bf16":
        layers = DecoderPass(shape=shape, recipe=recipe, num_tokens=1, num_scored=0).layers
        passes = [each for layer in layers for each in layer.linears]
        return ForwardBytes(
            stored=stored,
            operands=sum(each.forward_copy for each in passes),
            head=0,
            backward=sum(each.backward_copy for each in passes),
        )
    return ForwardBytes(
        stored=stored,
        operands=OPERAND_BYTES * linear,
        head=OPERAND_BYTES * shape.vocab_size * shape.hidden_size,
        backward=FORMAT_BYTES["fp32"] * quantized,
    )


def engine_bytes(config: TrainConfig, shape: DecoderConfig, recipe: Recipe) -> dict[str, int]:
    """What the engine holds beside the decoder's bytes. vLLM takes a share of its GPU; elsewhere its weights are known,
    and its KV cache is what VLLM_CPU_KVCACHE_SPACE makes it."""
    engine = config.rollout.engine
    if isinstance(engine, EngineConfig):
        return {"KV cache": kv_cache_bytes(engine, shape, recipe)}
    if config.device.startswith("cuda") and torch.cuda.is_available():
        total = torch.cuda.mem_get_info(torch.device(config.device))[1]
        return {"vLLM": int(engine.gpu_memory_utilization * total)}
    return {"vLLM's weights": forward_bytes(shape, recipe, on_gpu=True).stored}


def kv_cache_bytes(engine: EngineConfig, shape: DecoderConfig, recipe: Recipe) -> int:
    """Keys and values of every slot, those of the scratch page too, and the scales of an FP8 cache."""
    slots = (engine.kv_cache_tokens // engine.page_size + 1) * engine.page_size
    return slots * kv_token_bytes(shape, recipe)


def kv_token_bytes(shape: DecoderConfig, recipe: Recipe) -> int:
    """Keys and values of one token in all layers."""
    per_head = shape.head_dim * FORMAT_BYTES[recipe.kv_cache] + (4 if recipe.kv_cache == "fp8" else 0)
    return 2 * shape.num_layers * shape.num_kv_heads * per_head


def linears(shape: DecoderConfig) -> Iterator[tuple[str, int, int]]:
    """Name, output width and input width of every projection."""
    D, F = shape.hidden_size, shape.intermediate_size
    query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    for index in range(shape.num_layers):
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        yield from ((f"{attention}.q_proj", query, D), (f"{attention}.o_proj", D, query))
        yield from ((f"{attention}.{name}_proj", key, D) for name in "kv")
        yield from ((f"{mlp}.gate_proj", F, D), (f"{mlp}.up_proj", F, D), (f"{mlp}.down_proj", D, F))


def _fused(shape: DecoderConfig) -> list[tuple[int, int]]:
    """Output and input width of every matrix of the layers, as its parameter holds it."""
    D, F, query = shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_dim
    qkv = query + 2 * shape.num_kv_heads * shape.head_dim
    return [(qkv, D), (D, query), (2 * F, D), (D, F)] * shape.num_layers


def _vocabulary(shape: DecoderConfig) -> int:
    """Parameters of the embedding and of a head of its own."""
    return shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)


def _vectors(shape: DecoderConfig) -> int:
    """Parameters of norms and biases."""
    biases = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim if shape.qkv_bias else 0
    head_norms = 2 * shape.head_dim if shape.qk_norm else 0
    return shape.num_layers * (2 * shape.hidden_size + biases + head_norms) + shape.hidden_size
