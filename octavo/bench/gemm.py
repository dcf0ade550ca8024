"""`octavo bench gemm`: what FP8 gains in the linear layers of a model on this GPU, before anybody trains with it.

Each linear of a decoder layer runs under the recipe and under BF16, casts included: forward and backward at a training
batch, forward alone at decode batches with cold weights. The kernels that ran are named by the profiler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from octavo.bench.measure import kernel_names, microseconds_each, milliseconds, require_cuda
from octavo.kernels.device import require_kernels
from octavo.layers.linear import FP8Linear
from octavo.models.config import DecoderConfig
from octavo.numerics.recipe import Recipe, get_recipe

COLD_BYTES = 300e6
"""Weights that follow each other in a decode measurement; several times the L2 cache."""


@dataclass(frozen=True, kw_only=True)
class Gain:
    """One linear at one batch, under BF16 and under a recipe."""

    linear: str
    """qkv_proj, o_proj, gate_up_proj or down_proj."""
    work: str
    """`train` (forward and backward) or `decode` (forward)."""
    tokens: int
    """Rows of the batch."""
    bf16_us: float
    """Time under BF16, microseconds."""
    recipe_us: float
    """Time under the recipe, casts included, microseconds."""
    kernels: tuple[str, ...]
    """That ran under the recipe, without repeats."""

    @property
    def speedup(self) -> float:
        """Of the recipe over BF16."""
        return self.bf16_us / self.recipe_us


def linears_of(config: DecoderConfig) -> dict[str, tuple[int, dict[str, int]]]:
    """Name -> in_features, widths of the fused projections, of a decoder layer."""
    D, F, query = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    key = config.num_kv_heads * config.head_dim
    return {
        "qkv_proj": (D, {"q_proj": query, "k_proj": key, "v_proj": key}),
        "o_proj": (query, {"o_proj": D}),
        "gate_up_proj": (D, {"gate_proj": F, "up_proj": F}),
        "down_proj": (F, {"down_proj": D}),
    }


def random_linear(in_features: int, projections: dict[str, int], recipe: Recipe) -> FP8Linear:
    """A layer on the GPU with random weights, ready to run."""
    with torch.device("cuda"):
        layer = FP8Linear(in_features, projections, bias=False, recipe=recipe, path="model.layers.0")
        torch.nn.init.normal_(layer.weight, std=0.02)
    layer.requantize_()
    return layer


def bench_gemm(
    config: DecoderConfig, recipe: Recipe, train_tokens: int, decode_tokens: Sequence[int]
) -> Iterator[Gain]:
    """Measure every linear of the model's decoder layer.

    Args:
        config: the model's shape.
        recipe: compared with BF16.
        train_tokens: of a training batch; 0 leaves training out.
        decode_tokens: batches of decoding.

    Raises:
        ValueError: no CUDA device, or one that the kernels are not for; the recipe has no FP8, or no backward and
            training was asked for.
    """
    require_cuda("octavo bench gemm")
    require_kernels("cuda", recipe.high_precision)
    if not recipe.quantizes:
        raise ValueError(f"recipe {recipe.name!r} has no FP8 to compare with BF16; take block128, or another that has")
    if train_tokens and recipe.forward_only:
        raise ValueError(f"recipe {recipe.name!r} has no backward; ask for --train-tokens 0, or a recipe that trains")
    for name, (in_features, projections) in linears_of(config).items():
        bf16, other = (random_linear(in_features, projections, r) for r in (get_recipe("bf16"), recipe))
        if train_tokens:
            times = [train_milliseconds(layer, train_tokens) * 1e3 for layer in (bf16, other)]
            yield _gain(name, "train", train_tokens, times, kernel_names(partial(train_once, other, train_tokens)))
        for tokens in decode_tokens:
            times = [decode_microseconds(layer, tokens) for layer in (bf16, other)]
            x = torch.randn(tokens, in_features, device="cuda").bfloat16()
            with torch.no_grad():
                kernels = kernel_names(partial(other, x))
            yield _gain(name, "decode", tokens, times, kernels)


def train_milliseconds(layer: FP8Linear, tokens: int) -> float:
    """Forward and backward of a batch [tokens, K], casts included."""
    x, grad_y = _batch(layer, tokens)
    return milliseconds(lambda: layer(x).backward(grad_y), leaves=(x, layer.weight))


def train_once(layer: FP8Linear, tokens: int) -> None:
    """Forward and backward."""
    x, grad_y = _batch(layer, tokens)
    layer(x).backward(grad_y)


@torch.no_grad()
def decode_microseconds(layer: FP8Linear, tokens: int) -> float:
    """Forward of a batch [tokens, K] whose weights come from memory, cast of X included."""
    weight_bytes = layer.weight.numel() * (1 if layer.quantized else 2)
    copies = [random_linear(layer.in_features, layer.projections, layer.recipe) for _ in range(_copies(weight_bytes))]
    x = torch.randn(tokens, layer.in_features, device="cuda").bfloat16()
    return microseconds_each([partial(copy, x) for copy in copies])


def verdict(gains: Sequence[Gain]) -> list[str]:
    """What the figures say, a sentence for each kind of work and batch."""
    lines = []
    for work, tokens in dict.fromkeys((gain.work, gain.tokens) for gain in gains):
        some = [gain for gain in gains if (gain.work, gain.tokens) == (work, tokens)]
        speedup = sum(gain.bf16_us for gain in some) / sum(gain.recipe_us for gain in some)
        slow = [gain.linear for gain in some if gain.speedup < 1.0]
        what = f"{'training' if work == 'train' else 'decoding'} with {tokens:,} tokens"
        if speedup < 1.02:
            lines.append(f"{what}: FP8 will not help here, {speedup:.2f}x BF16 over the four linears")
        else:
            but = f"; slower in {', '.join(slow)}" if slow else ""
            lines.append(f"{what}: {speedup:.2f}x BF16 over the four linears{but}")
    return lines


def _gain(linear: str, work: str, tokens: int, times: list[float], kernels: list[str]) -> Gain:
    names = tuple(dict.fromkeys(kernels))
    return Gain(linear=linear, work=work, tokens=tokens, bf16_us=times[0], recipe_us=times[1], kernels=names)


def _batch(layer: FP8Linear, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """X with a gradient, and dY."""
    x = torch.randn(tokens, layer.in_features, device="cuda").bfloat16().requires_grad_()
    return x, torch.randn(tokens, sum(layer.splits), device="cuda").bfloat16()


def _copies(weight_bytes: int) -> int:
    return max(2, min(64, int(COLD_BYTES // weight_bytes)))
