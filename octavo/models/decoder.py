"""The one dense decoder: training, old logprobs, prefill and decode all run this file.

    h = embed(tokens)
    h = h + o_proj(attention(rotary(qk_norm(qkv_proj(norm(h))))))     each block
    h = h + down_proj(swiglu(gate_up_proj(norm(h))))
    logprobs(norm(h), tokens)                                         lm_head in BF16, logits in FP32

Activations between layers are BF16 (FP32 under the fp32 recipe), tokens are packed: [T], no padding. Where keys and
values live is the caller's business (`AttentionContext`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from octavo.kernels.heads import HeadTransform
from octavo.kernels.logprobs import logits_from_hidden, token_logprobs
from octavo.kernels.norm import rms_norm
from octavo.kernels.operands import Operand, grid_operand
from octavo.kernels.swiglu import swiglu
from octavo.layers.attention import AttentionContext
from octavo.layers.linear import FP8Linear, quantized_layers
from octavo.layers.rotary import rotary_table
from octavo.models.config import DecoderConfig
from octavo.models.fused import run_layers
from octavo.models.modules import decoder_modules
from octavo.numerics.flow_edges import check_kept
from octavo.numerics.recipe import Recipe


class Norm(nn.Module):
    """RMSNorm with an FP32 gain [D]."""

    def __init__(self, width: int, norm_eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.norm_eps = norm_eps

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D] -> [..., D], same dtype."""
        return rms_norm(x, self.weight, self.norm_eps)


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: DecoderConfig, recipe: Recipe, index: int) -> None:
        super().__init__()
        D, F, H, Hkv, Dh = (
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        self.index, self.num_heads, self.num_kv_heads, self.head_dim = index, H, Hkv, Dh
        self.norm_eps = config.norm_eps
        attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"
        self.input_norm = Norm(D, config.norm_eps)
        self.qkv_proj = FP8Linear(
            D,
            {"q_proj": H * Dh, "k_proj": Hkv * Dh, "v_proj": Hkv * Dh},
            bias=config.qkv_bias,
            recipe=recipe,
            path=attention,
        )
        self.q_norm = Norm(Dh, config.norm_eps) if config.qk_norm else None
        self.k_norm = Norm(Dh, config.norm_eps) if config.qk_norm else None
        self.o_proj = FP8Linear(H * Dh, {"o_proj": D}, bias=False, recipe=recipe, path=attention)
        self.post_norm = Norm(D, config.norm_eps)
        self.gate_up_proj = FP8Linear(D, {"gate_proj": F, "up_proj": F}, bias=False, recipe=recipe, path=mlp)
        self.down_proj = FP8Linear(F, {"down_proj": D}, bias=False, recipe=recipe, path=mlp)

    @contextmanager
    def recomputing(self) -> Iterator[None]:
        """What runs in here has run before."""
        layers = quantized_layers(self)
        for layer in layers:
            layer.observing = False
        try:
            yield
        finally:
            for layer in layers:
                layer.observing = True

    def forward(
        self, h: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext, num_saturated: Tensor, shadow: bool
    ) -> Tensor:
        """h [T, D] -> [T, D]; cos and sin [T, Dh / 2] of each token's position."""
        qkv = self.qkv_proj(self.input_norm(h), shadow=shadow)
        h = h + self.o_proj(self.attend(qkv, cos, sin, context, num_saturated), shadow=shadow)
        return h + self.down_proj(swiglu(self.gate_up_proj(self.post_norm(h), shadow=shadow)), shadow=shadow)

    def attend(self, qkv: Tensor, cos: Tensor, sin: Tensor, context: AttentionContext, num_saturated: Tensor) -> Tensor:
        """qkv [T, (H + 2 Hkv) * Dh] as projected -> [T, H * Dh]."""
        return context.attend(self.index, *self.heads(qkv, cos, sin, num_saturated), self.head_dim**-0.5).flatten(1)

    def heads(
        self, qkv: Tensor, cos: Tensor, sin: Tensor, num_saturated: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, HeadTransform]:
        """q [T, H, Dh], k and v [T, Hkv, Dh] as projected, and what becomes of q and k."""
        q, k, v = (x.unflatten(1, (-1, self.head_dim)) for x in qkv.split(self.qkv_proj.splits, dim=1))
        q_gain, k_gain = (None if norm is None else norm.weight for norm in (self.q_norm, self.k_norm))
        counter = num_saturated if self.qkv_proj.observing else torch.zeros_like(num_saturated)
        return q, k, v, HeadTransform(cos, sin, q_gain, k_gain, self.norm_eps, counter)


class Decoder(nn.Module):
    """A dense decoder whose parameters are masters, FP32 unless they were rounded, and whose forward reads the recipe's
    bytes.

    Args:
        config: the shape.
        hf_config: the transformers config, for rope parameters and for writing the model back.
        recipe: the precision flow.
        max_tokens: longest sequence that will be run; the rotary table is made once, for this length.

    Raises:
        ValueError: `keep_bf16` names a module that does not exist, max_tokens is beyond the model's positions.
    """

    cos: Tensor
    sin: Tensor
    num_saturated: Tensor
    embed_hp: Tensor
    lm_head_hp: Tensor

    def __init__(
        self, config: DecoderConfig, hf_config: PretrainedConfig, recipe: Recipe, *, max_tokens: int | None = None
    ) -> None:
        super().__init__()
        max_tokens = max_tokens or config.max_positions
        if max_tokens > config.max_positions:
            raise ValueError(
                f"sequences of up to {max_tokens} tokens were asked for, but the model has "
                f"{config.max_positions} positions; lower rollout.max_prompt_tokens or rollout.max_completion_tokens"
            )
        check_kept(decoder_modules(config), recipe)
        self.config, self.hf_config, self.recipe, self.max_tokens = config, hf_config, recipe, max_tokens
        self.dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[recipe.high_precision]
        self.embed_tokens = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(Block(config, recipe, index) for index in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.norm_eps)
        self.lm_head = None if config.tied_embeddings else nn.Parameter(torch.empty_like(self.embed_tokens))
        self.register_buffer("embed_hp", torch.empty_like(self.embed_tokens, dtype=self.dtype), persistent=False)
        if self.lm_head is not None:
            self.register_buffer("lm_head_hp", torch.empty_like(self.embed_hp), persistent=False)
        cos, sin = rotary_table(hf_config, config.head_dim, max_tokens)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.register_buffer("num_saturated", torch.zeros(1, dtype=torch.int64), persistent=False)
        self._head: tuple[tuple[int, int], Operand] | None = None
        self.policy_version = 0
        """Optimiser steps in the bytes that the forward reads."""
        self.fuses = True
        """Run in fewer kernels (`models.fused`). False calls every module for an output of its own, and none again."""
        self.recompute_layers = False
        """Keep only each layer's input for the backward, and compute it and the logits again there: the same bits."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Decoder:
        """Whatever moves a module; the head that was kept ready lies where it was."""
        self._head = None
        return super()._apply(fn, recurse)

    def blocks(self) -> Iterator[Block]:
        """The decoder layers, in order."""
        for block in self.layers:
            assert isinstance(block, Block)
            yield block

    def with_recipe(self, recipe: Recipe) -> Decoder:
        """A second decoder over the same masters, with bytes of its own under another recipe.

        Re-quantise both after each optimiser step.
        """
        twin = Decoder(self.config, self.hf_config, recipe, max_tokens=self.max_tokens)
        for name, parameter in self.named_parameters():
            parent, _, leaf = name.rpartition(".")
            setattr(twin.get_submodule(parent), leaf, parameter)
        twin.recompute_layers = self.recompute_layers
        twin.to(self.embed_tokens.device)
        twin.requantize_(self.policy_version)
        return twin

    @torch.no_grad()
    def requantize_(self, policy_version: int | None = None) -> None:
        """Rewrite every byte that the forward reads from the masters, in place. Call after each optimiser step.

        Args:
            policy_version: optimiser steps in the masters; None counts one more. An engine that has weights of its own
                loads them anew when it changes.
        """
        self.policy_version = self.policy_version + 1 if policy_version is None else policy_version
        for layer in quantized_layers(self):
            layer.requantize_()
        self._copy_vocabulary_()

    def _copy_vocabulary_(self) -> None:
        self.embed_hp.copy_(self.embed_tokens)
        if self.lm_head is not None:
            self.lm_head_hp.copy_(self.lm_head)

    @torch.no_grad()
    def quantize_onto_(self, device: torch.device | str) -> None:
        """Move to a device what samples, and no more: the masters of one layer at a time come along, and none stay."""
        for block in self.blocks():
            block.to(device)
            for layer in quantized_layers(block):
                layer.requantize_()
            drop_masters_(block)
        self.to(device)
        self._copy_vocabulary_()
        drop_masters_(self)

    def round_masters_(self) -> None:
        """Keep matrices in BF16 from here on, in half the memory; their gradients, and vectors, stay FP32."""
        for parameter in self.parameters():
            if parameter.ndim > 1:
                parameter.data = parameter.data.bfloat16()
                parameter.grad_dtype = torch.float32

    def freeze_activation_scales_(self) -> None:
        """Start an RL step under static activation scales; nothing to do under other recipes."""
        if self.recipe.static_activation_scale:
            for layer in quantized_layers(self):
                if layer.quantized and layer.activation_amax != 0.0:
                    layer.freeze_activation_scale_()

    def forward(self, tokens: Tensor, positions: Tensor, context: AttentionContext, *, shadow: bool = False) -> Tensor:
        """Hidden states after the last norm.

        Args:
            tokens, positions: [T] int64; positions count from 0 within each sequence.
            context: keeps and reads keys and values.
            shadow: multiply BF16 weights cast from the masters (BF16 reference; no gradient).

        Returns:
            [T, D] in the high-precision format; row t predicts the token after t.
        """
        h = _embed(self.embed_tokens, self.embed_hp, tokens)
        cos, sin = self.cos[positions], self.sin[positions]
        if self.fuses and not shadow and len(tokens):
            return self.norm(run_layers(self, h, cos, sin, context))
        for block in self.blocks():
            h = block(h, cos, sin, context, self.num_saturated, shadow)
        return self.norm(h)

    def logits(self, hidden: Tensor, temperature: float = 1.0) -> Tensor:
        """[T, D] -> [T, V] fp32, divided by the temperature."""
        return logits_from_hidden(hidden, self._head_operand(), temperature)

    def logprobs(self, hidden: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probability of tokens [T] given the hidden states [T, D] that predict them, and entropy, [T] fp32."""
        weight = self.embed_tokens if self.lm_head is None else self.lm_head
        return token_logprobs(hidden, weight, self._head_operand(), tokens, temperature, self.recompute_layers)

    def _head_operand(self) -> Operand:
        source = self.embed_hp if self.lm_head is None else self.lm_head_hp
        state = (source.data_ptr(), source._version)  # the address too: a copied module counts anew
        if self._head is None or self._head[0] != state:
            self._head = (state, grid_operand(source))
        return self._head[1]


def drop_masters_(module: nn.Module) -> None:
    """Keep of the matrices only what a forward without a gradient reads."""
    for parameter in module.parameters():
        if parameter.ndim > 1:
            parameter.data = parameter.data.new_empty(0)


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, master: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.shape = master.shape
        return rows[tokens]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (tokens,) = ctx.saved_tensors
        grad = torch.zeros(ctx.shape, dtype=torch.float32, device=tokens.device)
        if grad.is_cuda:  # sorts first: index_add_ there adds a token's rows in whatever order threads come
            return grad.index_put_((tokens,), grads[0].float(), accumulate=True), None, None
        return grad.index_add_(0, tokens, grads[0].float()), None, None


def _embed(master: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Rows of the BF16 copy; the gradient, in FP32, goes to the master."""
    return _Embed.apply(master, rows, tokens)
