"""A linear layer in FP8: FP32 master, one quantisation of it per optimiser step, three GEMMs.

    FProp   Y = X W^T      training, old logprobs, prefill and decode: the same bytes, the same exact sums
    DGrad  dX = dY W       straight through the quantisers
    WGrad  dW = dY^T X     X as it was saved, in FP8; accumulates into the FP32 master

The backward need not be batch-invariant: the reference multiplies the dequantised operands in FP32.

`FP8Linear` owns the bytes. Fused projections (q, k, v; gate, up) are one weight whose blocks restart at each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.kernels.gemm import Operand, QuantizedMatrix, gemm, grid_operand, quantize_matrix, split_edges
from octavo.numerics.fp8 import E4M3, E4M3_MAX, PER_TENSOR, QuantBlock, block_amax, scale_from_amax
from octavo.numerics.recipe import GemmRecipe, Recipe

WEIGHTS = ("weight_", "dgrad_")
"""Prefixes of the buffers that `requantize_` writes the weight to."""
SCALE_STATE = ("activation_scale", "activation_amax", "saturation_counts")
"""Buffers of a static activation scale, which the weights do not determine."""
WGRAD_TOKEN_MULTIPLE = 128
"""Token counts are padded with zeros to a multiple of this for WGrad."""


class FP8Linear(nn.Module):
    """y = x W^T + bias under a recipe.

    Args:
        in_features: K.
        projections: {name: width} of the fused projections, in order; their widths sum to N.
        bias: whether there is a bias [N].
        recipe: the precision flow. The layer stays in high precision when `recipe.keep_bf16` names it.
        path: dotted name of the parent module, for `keep_bf16` and messages.

    Raises:
        ValueError: `keep_bf16` names only some of the fused projections.
    """

    # Buffers; which of them exist depends on the recipe.
    weight_hp: Tensor
    bias_hp: Tensor | None
    activation_scale: Tensor
    activation_amax: Tensor
    saturation_counts: Tensor

    def __init__(self, in_features: int, projections: dict[str, int], *, bias: bool, recipe: Recipe, path: str) -> None:
        super().__init__()
        self.in_features, self.projections, self.recipe = in_features, projections, recipe
        self.splits = list(projections.values())
        kept = recipe.keeps_fused([f"{path}.{name}" for name in projections])
        self.quantized = recipe.quantizes and not kept
        shape = (sum(self.splits), in_features)
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(shape[0])) if bias else None
        self._dtype = getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[recipe.high_precision])
        self._cache: dict[str, tuple[list[tuple[int, int]], Any]] = {}
        if self.quantized:
            self._allocate("weight_q", recipe.fprop.right)
            if recipe.dgrad is not None and recipe.dgrad.right != recipe.fprop.right:
                self._allocate("dgrad_q", recipe.dgrad.right)
        else:
            self.register_buffer("weight_hp", torch.empty(shape, dtype=self._dtype), persistent=False)
        self.register_buffer("bias_hp", torch.empty(shape[0], dtype=self._dtype) if bias else None, persistent=False)
        if recipe.static_activation_scale:
            self.register_buffer("activation_scale", torch.full((1, 1), torch.nan), persistent=False)
            self.register_buffer("activation_amax", torch.zeros(1, 1), persistent=False)
            self.register_buffer("saturation_counts", torch.zeros(2, dtype=torch.int64), persistent=False)

    def _allocate(self, name: str, quant_block: QuantBlock | None) -> None:
        """E4M3 bytes and scales of the weight under one block shape, written in place at every re-quantisation."""
        assert quant_block is not None, name
        empty = torch.zeros(self.weight.shape)
        layout = quantize_matrix(empty, quant_block, row_splits=self.splits)
        self.register_buffer(name, torch.empty(self.weight.shape, dtype=E4M3), persistent=False)
        self.register_buffer(f"{name}_scale", torch.empty(layout.scale.shape), persistent=False)

    @torch.no_grad()
    def requantize_(self) -> None:
        """Rewrite the FP8 bytes, scales and BF16 copies from the master, in place."""
        if not self.quantized:
            self.weight_hp.copy_(self.weight)
        else:
            for name in ("weight_q", "dgrad_q"):
                if name in self._buffers:
                    new = quantize_matrix(
                        self.weight, self._weight_block(name), self.recipe.scale_rounding, row_splits=self.splits
                    )
                    getattr(self, name).copy_(new.q)
                    getattr(self, f"{name}_scale").copy_(new.scale)
        if self.bias is not None and self.bias_hp is not None:
            self.bias_hp.copy_(self.bias)

    @torch.no_grad()
    def freeze_activation_scale_(self) -> None:
        """Set the static activation scale, [1, 1] fp32: the amax seen since the last call, times the recipe's margin.

        Raises:
            ValueError: that amax is 0 or not finite.
        """
        amax = self.activation_amax * self.recipe.amax_margin
        if not amax.isfinite() or amax == 0.0:
            raise ValueError(
                f"the activations that {list(self.projections)} saw since the last step have amax "
                f"{self.activation_amax.item()}, which gives no static scale: the run has broken, or saw no token. "
                f"Look for the first odd value in metrics.jsonl, or use recipe block128"
            )
        self.activation_scale.copy_(scale_from_amax(amax, self.recipe.scale_rounding))
        self.activation_amax.zero_()
        self.saturation_counts.zero_()

    def forward(self, x: Tensor, *, shadow: bool = False) -> Tensor:
        """x [T, K] -> [T, N] in the high-precision format.

        Args:
            x: bf16 (fp32 under the fp32 recipe).
            shadow: multiply the high-precision weight cast from the master instead: the BF16 reference of every FP8
                diagnosis. Carries no gradient.
        """
        if shadow:
            with torch.no_grad():
                return self._round(gemm(grid_operand(x), grid_operand(self.weight.to(self._dtype))), cast_bias=True)
        if not torch.is_grad_enabled():  # the rollout saves nothing
            return self.fprop(x)
        return _Linear.apply(x, self.weight, self.bias, self)

    # What follows is called by the autograd function.

    def fprop(self, x: Tensor) -> Tensor:
        """Y = X W^T + bias, rounded once."""
        return self._round(gemm(self.activation_operand(x), self.weight_operand()))

    def dgrad(self, grad_y: Tensor) -> Tensor:
        """dX = dY W, rounded once to the dtype of dY."""
        assert self.recipe.dgrad is not None, self.recipe.name
        return (self.gradient_values(grad_y, self.recipe.dgrad) @ self.backward_weight()).to(grad_y.dtype)

    def wgrad(self, grad_y: Tensor, saved_x: QuantizedMatrix | Tensor) -> Tensor:
        """dW [N, K] fp32 = dY^T X, tokens in blocks of 128."""
        assert self.recipe.wgrad is not None, self.recipe.name
        if self.quantized and self.recipe.wgrad.left is not None:
            grad_y = pad_tokens(grad_y)
        return self.gradient_values(grad_y, self.recipe.wgrad).T @ self.saved_values(saved_x)

    def gradient_values(self, grad_y: Tensor, recipe: GemmRecipe) -> Tensor:
        """dY [T, N] as DGrad or WGrad multiplies it, fp32."""
        if not self.quantized or recipe.left is None:
            return grad_y.float()
        return quantize_matrix(grad_y, recipe.left, self.recipe.scale_rounding, column_splits=self.splits).dequantize()

    def saved_values(self, saved_x: QuantizedMatrix | Tensor) -> Tensor:
        """What `save_activation` kept, as WGrad multiplies it, fp32."""
        assert self.recipe.wgrad is not None, self.recipe.name
        right = self.recipe.wgrad.right
        if isinstance(saved_x, Tensor) and self.quantized and right is not None:
            saved_x = quantize_matrix(pad_tokens(saved_x), right, self.recipe.scale_rounding)
        return saved_x.float() if isinstance(saved_x, Tensor) else saved_x.dequantize()

    def save_activation(self, x: Tensor) -> QuantizedMatrix | Tensor:
        """X in the layout and format that WGrad multiplies."""
        assert self.recipe.wgrad is not None, self.recipe.name
        right = self.recipe.wgrad.right
        if self.quantized and right is not None and self.recipe.saved_activations == "fp8":
            return quantize_matrix(pad_tokens(x), right, self.recipe.scale_rounding)
        return x

    def saturated(self, x: Tensor) -> Tensor | None:
        """[T, K] bool where a static scale clips X, whose gradient is 0 there; None under dynamic scales."""
        if not (self.quantized and self.recipe.static_activation_scale):
            return None
        return self._beyond_scale(x)

    def stored_weight(self) -> Tensor | None:
        """The bytes that FProp reads, [N, K]; None where the layer has none of the format that it is set to."""
        return self._buffers.get("weight_q" if self.quantized else "weight_hp")

    def forget_prepared(self) -> None:
        """Drop the operands that are kept ready; the next product makes them anew."""
        self._cache.clear()

    def weight_operand(self) -> Operand:
        """The weight prepared for FProp."""
        return self._prepared("fprop", self._prepare_fprop)

    def backward_weight(self) -> Tensor:
        """[N, K] fp32 values of the weight that DGrad multiplies."""
        if not self.quantized:
            return self.weight_hp.float()
        name = "dgrad_q" if "dgrad_q" in self._buffers else "weight_q"
        return self._prepared("dgrad", lambda: self.quantized_weight(name).dequantize())

    def _prepared(self, role: str, prepare: Callable[[], Any]) -> Any:
        """`prepare()`, called anew only after the bytes, scales or high-precision copy were written to."""
        versions = [
            (buffer.data_ptr(), buffer._version)
            for name, buffer in self._buffers.items()
            if buffer is not None and name.startswith(WEIGHTS)
        ]
        if role not in self._cache or self._cache[role][0] != versions:
            self._cache[role] = (versions, prepare())
        return self._cache[role][1]

    def _prepare_fprop(self) -> Operand:
        if not self.quantized:
            return grid_operand(self.weight_hp)
        weight = self.quantized_weight("weight_q")
        if self.recipe.fprop.left is None:  # FP8 weight, BF16 activation: multiply bf16(q * scale)
            return grid_operand(weight.dequantize().to(self._dtype))
        return weight.operand()

    def quantized_weight(self, name: str) -> QuantizedMatrix:
        """The FP8 bytes and scales that rollout and training multiply."""
        quant_block = self._weight_block(name)
        return QuantizedMatrix(
            getattr(self, name),
            getattr(self, f"{name}_scale"),
            split_edges(self.splits, quant_block[0]),
            split_edges([self.in_features], quant_block[1]),
        )

    def _weight_block(self, name: str) -> QuantBlock:
        gemm_recipe = self.recipe.dgrad if name == "dgrad_q" else self.recipe.fprop
        assert gemm_recipe is not None and gemm_recipe.right is not None, (name, self.recipe.name)
        return gemm_recipe.right

    def activation_operand(self, x: Tensor) -> Operand:
        """X [T, K] as FProp multiplies it. A static scale learns from it what the next one will be."""
        left = self.recipe.fprop.left
        if not self.quantized or left is None:
            return grid_operand(x)
        scale = None
        if self.recipe.static_activation_scale:
            self.activation_amax.copy_(torch.maximum(self.activation_amax, block_amax(x, PER_TENSOR)))
            if torch.isnan(self.activation_scale).all():  # the very first batch calibrates itself
                self.freeze_activation_scale_()
            scale = self.activation_scale
            self.saturation_counts += torch.tensor([int(self._beyond_scale(x).sum()), x.numel()], device=x.device)
        return quantize_matrix(x, left, self.recipe.scale_rounding, scale=scale).operand()

    def _beyond_scale(self, x: Tensor) -> Tensor:
        return x.float().abs() > E4M3_MAX * self.activation_scale

    def _round(self, y: Tensor, cast_bias: bool = False) -> Tensor:
        """Add the bias, then round the FP32 sum to the activation format."""
        bias = self.bias.to(self._dtype) if cast_bias and self.bias is not None else self.bias_hp
        if bias is not None:
            y = y + bias
        return y.float().to(self._dtype)

    def extra_repr(self) -> str:
        precision = self.recipe.name if self.quantized else self.recipe.high_precision
        return f"{self.in_features} -> {self.projections}, bias={self.bias is not None}, {precision}"


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: FP8Linear) -> Tensor:
        ctx.layer, ctx.saved_x, ctx.saturated = layer, None, None
        if ctx.needs_input_grad[1]:
            ctx.saved_x = layer.save_activation(x)
        if ctx.needs_input_grad[0]:
            ctx.saturated = layer.saturated(x)
        return layer.fprop(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        grad_y, layer = grads[0], ctx.layer
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_x = layer.dgrad(grad_y) if needs_x else None
        if grad_x is not None and ctx.saturated is not None:
            grad_x = grad_x.masked_fill(ctx.saturated, 0.0)
        grad_weight = layer.wgrad(grad_y, ctx.saved_x) if needs_weight else None
        grad_bias = grad_y.float().sum(dim=0) if needs_bias else None
        return grad_x, grad_weight, grad_bias, None


def pad_tokens(x: Tensor) -> Tensor:
    """[T, K] -> [ceil(T / 128) * 128, K], at least one block of 128, zeros at the end."""
    blocks = max(1, -(-len(x) // WGRAD_TOKEN_MULTIPLE))
    return nn.functional.pad(x, (0, 0, 0, blocks * WGRAD_TOKEN_MULTIPLE - len(x)))


def quantized_layers(module: nn.Module) -> Sequence[FP8Linear]:
    """All FP8Linear layers inside a module."""
    return [layer for layer in module.modules() if isinstance(layer, FP8Linear)]
