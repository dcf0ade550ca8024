"""A linear layer in FP8: FP32 master, one quantisation of it per optimiser step, three GEMMs.

    FProp   Y = X W^T      training, old logprobs, prefill and decode: the same bytes, the same sums
    DGrad  dX = dY W       straight through the quantisers
    WGrad  dW = dY^T X     X as it was saved, in FP8; accumulates into the FP32 master

On a CUDA device kernels multiply, on a CPU the reference. The backward need not be batch-invariant: kernels take the
fastest way there, and the reference multiplies the dequantised operands in FP32.

`FP8Linear` owns the bytes. Fused projections (q, k, v; gate, up) are one weight whose blocks restart at each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from octavo.kernels import weights
from octavo.kernels.device import runs_kernels
from octavo.kernels.gemm import product
from octavo.kernels.operands import (
    Operand,
    QuantizedMatrix,
    can_quantize_both,
    grid_operand,
    pad_tokens,
    quantize_both,
    quantize_matrix,
    quantized_operand,
    split_edges,
    values_of,
)
from octavo.layers.linear_function import LinearFunction
from octavo.numerics.fp8 import (
    E4M3,
    E4M3_MAX,
    PER_COLUMN,
    PER_ROW,
    PER_TENSOR,
    QuantBlock,
    block_amax,
    scale_from_amax,
)
from octavo.numerics.recipe import GemmRecipe, Recipe

WEIGHTS = ("weight_", "dgrad_")
"""Prefixes of the buffers that `requantize_` writes the weight to."""
SCALE_STATE = ("activation_scale", "activation_amax", "saturation_counts")
"""Buffers of a static activation scale, which the weights do not determine."""


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
        self._cache: dict[str, tuple[list[State], Any]] = {}
        self.weight_t: Tensor | None = None  # W^T for DGrad on a CUDA device, once a backward has asked for it
        self._transposed: State | None = None  # of what that is the transpose
        if self.quantized:
            self._allocate("weight_q", recipe.fprop.right)
            if recipe.dgrad is not None and recipe.dgrad.right != recipe.fprop.right:
                self._allocate("dgrad_q", recipe.dgrad.right)
        else:
            self.register_buffer("weight_hp", torch.empty(shape, dtype=self._dtype), persistent=False)
        self.register_buffer("bias_hp", torch.empty(shape[0], dtype=self._dtype) if bias else None, persistent=False)
        self.observing = True  # whether a static scale learns from what it sees: not from what is computed again
        self._scaled: State | None = None  # of the static scale when it was last seen to be a number
        if recipe.static_activation_scale:
            self.register_buffer("activation_scale", torch.full((1, 1), torch.nan), persistent=False)
            self.register_buffer("activation_amax", torch.zeros(1, 1), persistent=False)
            self.register_buffer("saturation_counts", torch.zeros(2, dtype=torch.int64), persistent=False)

    def _allocate(self, name: str, quant_block: QuantBlock | None) -> None:
        """E4M3 bytes and scales of the weight under one block shape, written in place at every re-quantisation."""
        assert quant_block is not None, name
        layout = quantize_matrix(torch.zeros(self.weight.shape), quant_block, row_splits=self.splits)
        size = self.weight.shape
        lies_transposed = quant_block == PER_COLUMN  # as DGrad's kernels read it
        q = torch.empty(size[::-1], dtype=E4M3).T if lies_transposed else torch.empty(size, dtype=E4M3)
        self.register_buffer(name, q, persistent=False)
        self.register_buffer(f"{name}_scale", torch.empty(layout.scale.shape), persistent=False)

    @torch.no_grad()
    def requantize_(self) -> None:
        """Rewrite the FP8 bytes, scales and BF16 copies from the master, in place."""
        if not self.quantized:
            self.weight_hp.copy_(self.weight)
        else:
            self._requantize()
        if self.bias is not None and self.bias_hp is not None:
            self.bias_hp.copy_(self.bias)

    def _requantize(self) -> None:
        """All bytes and scales; kernels write them where they lie, and W^T too where it is the same bytes."""
        w, rounding = self.weight.detach(), self.recipe.scale_rounding
        names = [name for name in ("weight_q", "dgrad_q") if name in self._buffers]
        blocks = [self._weight_block(name) for name in names]
        casts = [(getattr(self, name), getattr(self, f"{name}_scale")) for name in names]
        by_kernels = self.uses_kernels and weights.can_write(self.in_features, self.splits)
        if by_kernels and blocks == [PER_ROW, PER_COLUMN]:
            weights.write_rows_columns(w, self.splits, rounding, *casts)
            increment_version([*casts[0], *casts[1]])
            return
        for name, block, (q, scale) in zip(names, blocks, casts, strict=True):
            if by_kernels and block in (*weights.TRANSPOSED, PER_ROW):
                q_t = self.weight_t if name == self._dgrad_name else None
                weights.write_weight(w, self.splits, block, rounding, (q, scale), q_t)
                increment_version([q, scale])
                if q_t is not None:
                    self._transposed = _state(q)
            else:
                new = quantize_matrix(w, block, rounding, row_splits=self.splits)
                q.copy_(new.q)
                scale.copy_(new.scale)

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
                bias = None if self.bias is None else self.bias.to(self._dtype)
                return product(grid_operand(x), grid_operand(self.weight.to(self._dtype)), bias, self._dtype)
        if not torch.is_grad_enabled():  # the rollout saves nothing
            return self.fprop(x)
        return LinearFunction.apply(x, self.weight, self.bias, self)

    # What follows is called by the autograd function.

    def fprop(self, x: Tensor) -> Tensor:
        """Y = X W^T + bias, rounded once."""
        return self.multiply(self.activation_operand(x))

    def fprop_and_save(self, x: Tensor) -> tuple[Tensor, QuantizedMatrix | Tensor]:
        """Y, and X as WGrad multiplies it; on a CUDA device one cast of X makes both where it can."""
        assert self.recipe.wgrad is not None, self.recipe.name
        left, right = self.recipe.fprop.left, self.recipe.wgrad.right
        once = self.recipe.saved_activations == "fp8" and not self.recipe.static_activation_scale
        if left is not None and once and self._casts_once(x, [self.in_features], left, right):
            along, across = quantize_both(x, left, self.recipe.scale_rounding, [self.in_features])
            return self.multiply(along), across
        saved = self.save_activation(x)
        return self.fprop(x), saved

    def gradients(
        self, grad_y: Tensor, saved_x: QuantizedMatrix | Tensor | None, needs_x: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """dX = dY W, in the dtype of dY, if it is needed; dW [N, K] fp32 = dY^T X, if X was saved."""
        dgrad, wgrad = self.recipe.dgrad, self.recipe.wgrad
        assert dgrad is not None and wgrad is not None, self.recipe.name
        wanted = needs_x and saved_x is not None
        if wanted and dgrad.left is not None and self._casts_once(grad_y, self.splits, dgrad.left, wgrad.left):
            assert saved_x is not None
            along, across = quantize_both(grad_y, dgrad.left, self.recipe.scale_rounding, self.splits)
            return self.gradients_of_casts(along, across, saved_x)
        grad_x = self._dgrad(grad_y, dgrad) if needs_x else None
        if saved_x is None:
            return grad_x, None
        padded = pad_tokens(grad_y) if self.quantized and wgrad.left is not None else grad_y
        return grad_x, self._wgrad(self.gradient(padded, wgrad), saved_x)

    def gradients_of_casts(
        self, along: Operand, across: QuantizedMatrix, saved_x: QuantizedMatrix | Tensor
    ) -> tuple[Tensor, Tensor]:
        """dX and dW, by kernels, of dY as DGrad and as WGrad multiplies it."""
        return self._dgrad_product(along), self._wgrad(across, saved_x)

    def _casts_once(self, x: Tensor, splits: Sequence[int], *blocks: QuantBlock | None) -> bool:
        """Whether one cast of a matrix [T, sum of splits] serves two products, by `quantize_both`."""
        return self.quantized and self.uses_kernels and can_quantize_both(x, splits, *blocks)

    def _dgrad(self, grad_y: Tensor, recipe: GemmRecipe) -> Tensor:
        """dX = dY W, in the dtype of dY."""
        if not self.uses_kernels:
            return (values_of(self.gradient(grad_y, recipe)) @ self.backward_weight()).to(grad_y.dtype)
        if not self.quantized or recipe.left is None:
            return grad_y @ self.weight_hp
        left = quantized_operand(grad_y, recipe.left, self.recipe.scale_rounding, splits=self.splits, for_kernels=True)
        return self._dgrad_product(left)

    def _dgrad_product(self, grad_y: Operand) -> Tensor:
        return product(grad_y, self._prepared("dgrad", self._prepare_dgrad), dtype=self._dtype, backend="scaled_mm")

    def _wgrad(self, grad_y: QuantizedMatrix | Tensor, saved_x: QuantizedMatrix | Tensor) -> Tensor:
        x = self.saved(saved_x)
        if not self.uses_kernels:
            return values_of(grad_y).T @ values_of(x)
        if isinstance(grad_y, Tensor) or isinstance(x, Tensor):
            assert isinstance(grad_y, Tensor) and isinstance(x, Tensor)
            return torch.mm(grad_y.T, x, out_dtype=torch.float32)
        return product(grad_y.T.operand(), x.T.operand(), dtype=torch.float32, backend="scaled_mm")

    @property
    def uses_kernels(self) -> bool:
        """Whether products run on the tensor cores: on a CUDA device, in BF16 and FP8."""
        return runs_kernels(self.weight) and self._dtype == torch.bfloat16

    def gradient(self, grad_y: Tensor, recipe: GemmRecipe) -> QuantizedMatrix | Tensor:
        """dY [T, N] as DGrad or WGrad multiplies it."""
        if not self.quantized or recipe.left is None:
            return grad_y
        return quantize_matrix(grad_y, recipe.left, self.recipe.scale_rounding, column_splits=self.splits)

    def saved(self, saved_x: QuantizedMatrix | Tensor) -> QuantizedMatrix | Tensor:
        """What `save_activation` kept, as WGrad multiplies it."""
        assert self.recipe.wgrad is not None, self.recipe.name
        right = self.recipe.wgrad.right
        if isinstance(saved_x, Tensor) and self.quantized and right is not None:
            return quantize_matrix(pad_tokens(saved_x), right, self.recipe.scale_rounding)
        return saved_x

    def save_activation(self, x: Tensor) -> QuantizedMatrix | Tensor:
        """X in the layout and format that WGrad multiplies."""
        return self.saved(x) if self.recipe.saved_activations == "fp8" else x

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
        self.weight_t = None

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> FP8Linear:
        """Whatever moves a module; what was kept ready lies where it was."""
        self.forget_prepared()
        return super()._apply(fn, recurse)

    def weight_operand(self) -> Operand:
        """The weight prepared for FProp."""
        return self._prepared("fprop", self._prepare_fprop)

    def backward_weight(self) -> Tensor:
        """[N, K] fp32 values of the weight that DGrad multiplies."""
        if not self.quantized:
            return self.weight_hp.float()
        return self._prepared("dgrad values", lambda: self.quantized_weight(self._dgrad_name).dequantize().contiguous())

    @property
    def _dgrad_name(self) -> str:
        return "dgrad_q" if "dgrad_q" in self._buffers else "weight_q"

    def _prepared(self, role: str, prepare: Callable[[], Any]) -> Any:
        """`prepare()`, called anew only after the bytes, scales or high-precision copy were written to.

        On a GPU the result stays where it was: a CUDA graph that reads it reads the new one.
        """
        versions = [
            _state(buffer) for name, buffer in self._buffers.items() if buffer is not None and name.startswith(WEIGHTS)
        ]
        if role not in self._cache or self._cache[role][0] != versions:
            ready = prepare()
            if role in self._cache and isinstance(ready, Operand) and self.uses_kernels:
                ready = ready.written_to(self._cache[role][1])
            self._cache[role] = (versions, ready)
        return self._cache[role][1]

    def _prepare_fprop(self) -> Operand:
        if not self.quantized:
            return grid_operand(self.weight_hp)
        weight = self.quantized_weight("weight_q")
        if self.recipe.fprop.left is None and not self.uses_kernels:  # kernels round q * scale as they multiply
            return grid_operand(weight.dequantize().to(self._dtype))
        return weight.operand()

    def _prepare_dgrad(self) -> Operand:
        """W^T for kernels. Where it is the bytes of W it is kept, for `requantize_` to write along with W."""
        weight = self.quantized_weight(self._dgrad_name)
        if weight.quant_block not in weights.TRANSPOSED or not weights.can_write(self.in_features, self.splits):
            return weight.T.operand()
        if self.weight_t is None:
            self.weight_t, self._transposed = weights.room_for_transpose(weight, self.splits), None
        if self._transposed != _state(weight.q):
            weights.transpose_weight(weight, self.splits, self.weight_t)
            self._transposed = _state(weight.q)
        return weights.transposed_operand(weight, self.weight_t)

    def quantized_weight(self, name: str) -> QuantizedMatrix:
        """The FP8 bytes and scales that rollout and training multiply."""
        quant_block = self._weight_block(name)
        return QuantizedMatrix(
            getattr(self, name),
            getattr(self, f"{name}_scale"),
            split_edges(self.splits, quant_block[0]),
            split_edges([self.in_features], quant_block[1]),
            quant_block,
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
            if self.observing:
                self.activation_amax.copy_(torch.maximum(self.activation_amax, block_amax(x, PER_TENSOR)))
                self._calibrate_the_first_time()
                self.saturation_counts[0] += self._beyond_scale(x).sum()
                self.saturation_counts[1] += x.numel()
            scale = self.activation_scale
        rounding = self.recipe.scale_rounding
        return quantized_operand(x, left, rounding, scale=scale, for_kernels=self.uses_kernels)

    def _calibrate_the_first_time(self) -> None:
        """The very first batch gives its own scale. The host waits for the device only after a write to the scale."""
        if self._scaled != _state(self.activation_scale):
            if torch.isnan(self.activation_scale).all():
                self.freeze_activation_scale_()
            self._scaled = _state(self.activation_scale)

    def _beyond_scale(self, x: Tensor) -> Tensor:
        return x.float().abs() > E4M3_MAX * self.activation_scale

    def multiply(self, x: Operand) -> Tensor:
        """FProp of X as `activation_operand` makes it."""
        return product(x, self.weight_operand(), self.bias_hp, self._dtype)

    def extra_repr(self) -> str:
        precision = self.recipe.name if self.quantized else self.recipe.high_precision
        return f"{self.in_features} -> {self.projections}, bias={self.bias is not None}, {precision}"


State = tuple[int, int]
"""Address and version of a tensor: the same as long as nobody moves it or writes to it."""


def _state(tensor: Tensor) -> State:
    return tensor.data_ptr(), tensor._version


def quantized_layers(module: nn.Module) -> Sequence[FP8Linear]:
    """All FP8Linear layers inside a module."""
    return [layer for layer in module.modules() if isinstance(layer, FP8Linear)]
