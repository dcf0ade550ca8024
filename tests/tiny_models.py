"""Tiny random models: transformers' own as a reference, and decoders with given or fresh weights."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

from octavo.models.config import decoder_config
from octavo.models.decoder import Decoder
from octavo.numerics.recipe import Recipe
from octavo.rl.batch import MiniBatch, pack
from octavo.rollout.engine import Completion
from octavo.trainer.policy import packed_logprobs

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
VOCAB = 97

# Ragged on purpose: 96 and 192 columns are no whole blocks of 128, nor are 200, and kv is 64 wide.
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def tiny_config(family: str, **changes: object) -> PretrainedConfig:
    """A transformers config of two layers."""
    return CONFIGS[family](**{**SHAPE, **changes})


@torch.no_grad()
def randomize_(tensors: Iterable[tuple[str, Tensor]], seed: int) -> None:
    """Weights under which every part matters and logits spread over a few units.

    Args:
        tensors: (name on disk, tensor to fill).
    """
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors:
        noise = torch.randn(tensor.shape, generator=generator)
        if "norm" in name:
            tensor.copy_(1.0 + 0.2 * noise)
        elif name.endswith("bias"):
            tensor.copy_(0.5 * noise)
        elif "lm_head" in name or "embed" in name:
            tensor.copy_(noise * tensor.shape[1] ** -0.5)
        else:
            tensor.copy_(noise * tensor.shape[1] ** -0.5)


def tiny_transformers(config: PretrainedConfig, seed: int = 0) -> torch.nn.Module:
    """transformers' own model of a config, FP32, eager attention, random weights."""
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    randomize_(model.named_parameters(), seed)
    return model


def masters_by_name(decoder: Decoder, gradients: bool = False) -> dict[str, Tensor]:
    """Every master, or its gradient, under transformers' name; parts of fused projections are views."""

    def value(parameter: Tensor) -> Tensor:
        if not gradients:
            return parameter.data
        assert parameter.grad is not None
        return parameter.grad

    config = decoder.config
    query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found = {"model.embed_tokens.weight": value(decoder.embed_tokens), "model.norm.weight": value(decoder.norm.weight)}
    if decoder.lm_head is not None:
        found["lm_head.weight"] = value(decoder.lm_head)
    for index, block in enumerate(decoder.layers):
        layer = f"model.layers.{index}"
        found[f"{layer}.input_layernorm.weight"] = value(block.input_norm.weight)
        found[f"{layer}.post_attention_layernorm.weight"] = value(block.post_norm.weight)
        for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
            fused = value(getattr(block.qkv_proj, kind))
            found[f"{layer}.self_attn.q_proj.{kind}"] = fused[:query]
            found[f"{layer}.self_attn.k_proj.{kind}"] = fused[query : query + key]
            found[f"{layer}.self_attn.v_proj.{kind}"] = fused[query + key :]
        found[f"{layer}.self_attn.o_proj.weight"] = value(block.o_proj.weight)
        found[f"{layer}.mlp.gate_proj.weight"] = value(block.gate_up_proj.weight)[: config.intermediate_size]
        found[f"{layer}.mlp.up_proj.weight"] = value(block.gate_up_proj.weight)[config.intermediate_size :]
        found[f"{layer}.mlp.down_proj.weight"] = value(block.down_proj.weight)
        if config.qk_norm:
            found[f"{layer}.self_attn.q_norm.weight"] = value(block.q_norm.weight)
            found[f"{layer}.self_attn.k_norm.weight"] = value(block.k_norm.weight)
    return found


@torch.no_grad()
def tiny_decoder(config: PretrainedConfig, recipe: Recipe, source: torch.nn.Module | int = 0) -> Decoder:
    """A decoder with the weights of a transformers model, or random ones of a seed."""
    decoder = Decoder(decoder_config(config), config, recipe)
    masters = masters_by_name(decoder)
    if isinstance(source, int):
        randomize_(masters.items(), source)
    else:
        parameters = dict(source.named_parameters())  # tied weights once
        assert masters.keys() == parameters.keys(), masters.keys() ^ parameters.keys()
        for name, parameter in parameters.items():
            masters[name].copy_(parameter)
    decoder.requantize_()
    return decoder


@torch.no_grad()
def disturb_(decoder: Decoder, seed: int, amount: float = 0.05) -> None:
    """What an optimiser step does: every master moves, then the bytes are written anew."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in decoder.parameters():
        parameter.mul_(1.0 + amount * torch.randn(parameter.shape, generator=generator))
    decoder.requantize_()


def random_prompts(seed: int, count: int, shortest: int = 1, longest: int = 40, vocab: int = VOCAB) -> list[list[int]]:
    """Prompts of random ids and lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


def lay_end_to_end(sequences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    """tokens [T], positions [T] and cu_seqlens [N + 1] of a packed batch."""
    tokens = torch.tensor([token for sequence in sequences for token in sequence])
    positions = torch.tensor([position for sequence in sequences for position in range(len(sequence))])
    return tokens, positions, torch.tensor([0, *itertools.accumulate(map(len, sequences))])


def pack_all(
    completions: Sequence[Sequence[Completion]], *, num_mini_batches: int = 1, microbatch_tokens: int = 150
) -> list[MiniBatch]:
    """Completions packed with advantages of 1."""
    advantages = torch.ones(len(completions), len(completions[0]))
    return pack(completions, advantages, num_mini_batches=num_mini_batches, microbatch_tokens=microbatch_tokens)


@torch.no_grad()
def mismatch(decoder: Decoder, completions: Sequence[Sequence[Completion]], temperature: float) -> Tensor:
    """Independent training forward minus what the engine reported, of every sampled token; all 0.0 when exact."""
    differences = []
    for batch in pack_all(completions):
        for microbatch in batch.microbatches:
            logprobs, _ = packed_logprobs(decoder, microbatch, temperature)
            differences.append((logprobs - microbatch.rollout_logprobs)[microbatch.loss_mask])
    return torch.cat(differences)
