"""Which module of the decoder two numerics part at: the outputs of every operation, side by side.

Runs of one sequence: packed, as training sees it, under the recipe or as the BF16 shadow; or as the engine decodes it,
from a paged cache, a token at a time. Operations are named as in a Hugging Face folder, with a few of our own between
(rotary, attention, swiglu). Needs no change of the decoder: hooks on its modules, and a context that listens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from octavo.kernels.heads import HeadTransform, transformed
from octavo.kernels.logprobs import chosen_logprobs, sampling_weights
from octavo.kernels.norm import rms_norm
from octavo.layers.attention import AttentionContext, PackedAttention
from octavo.layers.linear import FP8Linear
from octavo.models.decoder import Decoder
from octavo.rollout.kv_cache import KVCache, PagedAttention

MAX_TOKENS = 256
"""Of the sequence that is compared: all its outputs are held at once."""
LOGPROBS = "lm_head"
"""Name of the last operation, whose output are the log-probabilities of the tokens."""

Outputs = dict[str, Tensor]
"""Operation -> its output, a row a token, in the order in which they ran."""


@dataclass(frozen=True, kw_only=True)
class ModuleDifference:
    """How far apart two outputs of one operation are."""

    module: str
    """Its name."""
    max_abs: float
    """Largest |left - right|."""
    relative: float
    """Root of sum (left - right)^2 / sum right^2; 0 where both are equal, inf where right alone is all zeros."""
    differing_share: float
    """Share of elements that are not equal."""


def module_differences(left: Outputs, right: Outputs) -> list[ModuleDifference]:
    """Every operation of two runs over the same tokens, in order; a NaN in one output alone is a difference of inf."""
    assert list(left) == list(right), (list(left), list(right))
    return [_difference(name, left[name], right[name]) for name in left]


def first_difference(differences: list[ModuleDifference]) -> ModuleDifference | None:
    """The first operation whose output differs; None where none does."""
    return next((found for found in differences if found.differing_share > 0.0), None)


def _difference(name: str, left: Tensor, right: Tensor) -> ModuleDifference:
    assert left.shape == right.shape, (name, left.shape, right.shape)
    left, right = left.double().flatten(), right.double().flatten()
    equal = (left == right) | (left.isnan() & right.isnan())
    gap = torch.where(equal, 0.0, (left - right).abs().nan_to_num(nan=torch.inf))
    error, size = gap.square().sum().sqrt().item(), right.nan_to_num(0.0, 0.0, 0.0).square().sum().sqrt().item()
    return ModuleDifference(
        module=name,
        max_abs=gap.max().item() if len(gap) else 0.0,
        relative=error / size if size else float("inf") if error else 0.0,
        differing_share=1.0 - equal.double().mean().item() if len(gap) else 0.0,
    )


@torch.no_grad()
def packed_outputs(decoder: Decoder, tokens: Tensor, temperature: float, *, shadow: bool = False) -> Outputs:
    """One sequence as training runs it.

    Args:
        decoder: under its recipe.
        tokens: [T] int64, at least two.
        temperature: divides the logits.
        shadow: BF16 on the masters instead.
    """
    positions = torch.arange(len(tokens), device=tokens.device)
    kv_format = decoder.recipe.high_precision if shadow else decoder.recipe.kv_cache
    context = PackedAttention(torch.tensor([0, len(tokens)], device=tokens.device), kv_format)
    with _listening(decoder, context) as (outputs, heard):
        hidden = decoder(tokens, positions, heard, shadow=shadow)
        outputs[LOGPROBS] = decoder.logprobs(hidden[:-1], tokens[1:], temperature)[0]
    return outputs


@torch.no_grad()
def rollout_outputs(
    decoder: Decoder, tokens: Tensor, temperature: float, *, num_prompt: int, page_size: int = 16
) -> Outputs:
    """The same sequence as the engine runs it: the prompt in one prefill, then a token at a time, from a paged cache.

    Args:
        decoder: the engine's.
        tokens: [T] int64, at least two.
        temperature: divides the logits.
        num_prompt: tokens of the prefill, from 1 to T.
        page_size: tokens in a page of the cache.
    """
    num_pages = -(-len(tokens) // page_size)
    cache = KVCache(decoder.config, num_pages, page_size, decoder.recipe.kv_cache, tokens.device)
    pages = torch.arange(num_pages, device=tokens.device)[None]
    parts: list[Outputs] = []
    for start, stop in [(0, num_prompt), *((t, t + 1) for t in range(num_prompt, len(tokens)))]:
        context = PagedAttention(cache, pages, [start], [stop - start])
        with _listening(decoder, context) as (outputs, heard):
            hidden = decoder(tokens[start:stop], context.positions, heard)
            following = tokens[start + 1 : stop + 1]
            logits = decoder.logits(hidden[: len(following)], temperature)
            outputs[LOGPROBS] = chosen_logprobs(logits, sampling_weights(logits)[1], following)
        parts.append(outputs)
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@dataclass(frozen=True, eq=False)
class _Listener:
    """An attention context that keeps what goes in and out of another."""

    context: AttentionContext
    outputs: Outputs

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, transform: HeadTransform, softmax_scale: float
    ) -> Tensor:
        name = f"model.layers.{layer}.self_attn"
        for norm, x, gain in (("q_norm", q, transform.q_gain), ("k_norm", k, transform.k_gain)):
            if gain is not None:
                self.outputs[f"{name}.{norm}"] = rms_norm(x, gain, transform.norm_eps).flatten(1)
        turned = transformed(q, k, transform, "bf16")
        self.outputs[f"{name}.rotary"] = torch.cat([x.flatten(1) for x in turned], dim=1)
        out = self.context.attend(layer, q, k, v, transform, softmax_scale)
        self.outputs[f"{name}.attention"] = out.flatten(1)
        return out

    def attend_cast(self, *arguments: Any) -> None:
        """None: what attention gives is wanted as it is."""


@contextmanager
def _listening(decoder: Decoder, context: AttentionContext) -> Iterator[tuple[Outputs, AttentionContext]]:
    """Outputs of every operation that runs inside, and the context to run it with."""
    outputs: Outputs = {}
    handles: list[RemovableHandle] = []

    def output_of(module: nn.Module, keep: Callable[[Tensor], None]) -> None:
        handles.append(module.register_forward_hook(lambda module, inputs, output: keep(output)))

    def input_of(module: nn.Module, name: str) -> None:
        handles.append(module.register_forward_pre_hook(lambda module, inputs: outputs.update({name: inputs[0]})))

    def named(name: str) -> Callable[[Tensor], None]:
        return lambda output: outputs.update({name: output.flatten(1)})

    def split(linear: FP8Linear, path: str) -> Callable[[Tensor], None]:
        names = [f"{path}.{projection}" for projection in linear.projections]
        return lambda output: outputs.update(zip(names, output.split(linear.splits, dim=1), strict=True))

    for index, block in enumerate(decoder.blocks()):
        layer = f"model.layers.{index}"
        if index == 0:
            input_of(block.input_norm, "model.embed_tokens")
        output_of(block.input_norm, named(f"{layer}.input_layernorm"))
        for linear, path in (
            (block.qkv_proj, "self_attn"),
            (block.o_proj, "self_attn"),
            (block.gate_up_proj, "mlp"),
            (block.down_proj, "mlp"),
        ):
            output_of(linear, split(linear, f"{layer}.{path}"))
        output_of(block.post_norm, named(f"{layer}.post_attention_layernorm"))
        input_of(block.down_proj, f"{layer}.mlp.swiglu")
        output_of(block, named(layer))
    output_of(decoder.norm, named("model.norm"))
    fuses, decoder.fuses = decoder.fuses, False  # each module makes its output
    try:
        yield outputs, _Listener(context, outputs)
    finally:
        decoder.fuses = fuses
        for handle in handles:
            handle.remove()
