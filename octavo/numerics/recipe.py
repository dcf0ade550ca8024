"""Recipes: edge by edge, what is quantised and how. A recipe name expands to a complete, frozen config.

The three GEMMs of a linear layer y = x W^T, with tokens T, input width K and output width N:

    FProp  Y [T, N] = X [T, K]  . W [N, K]^T      reduced over K
    DGrad dX [T, K] = dY [T, N] . W [N, K]        reduced over N
    WGrad dW [N, K] = dY [T, N]^T . X [T, K]      reduced over T, in blocks of 128 tokens

Block shapes below are written for the matrix as named here (X and dY as [T, width], W as [N, K]); a scale
must be constant along the reduced dimension within a block of it, which each shape is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Literal, get_args

from octavo.numerics.fp8 import (
    BLOCK_1X128,
    BLOCK_128X1,
    BLOCK_128X128,
    PER_COLUMN,
    PER_ROW,
    PER_TENSOR,
    QuantBlock,
    ScaleRounding,
)

RecipeName = Literal[
    "bf16", "block128", "rowwise", "tensorwise", "w8a16", "tensorwise_static", "fp32", "fp8_channel", "fp8_tensor"
]
StorageFormat = Literal["bf16", "fp8", "fp32"]


@dataclass(frozen=True, kw_only=True)
class GemmRecipe:
    """Quantisation blocks of a GEMM's two operands; None keeps the operand in the high-precision format."""

    left: QuantBlock | None
    """X in FProp, dY in DGrad and WGrad."""
    right: QuantBlock | None
    """W in FProp and DGrad, X in WGrad."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One precision flow for rollout and training."""

    name: RecipeName
    """The row of the table this was expanded from."""
    fprop: GemmRecipe
    """Y = X W^T."""
    dgrad: GemmRecipe | None
    """dX = dY W; None, and then in wgrad too: the recipe runs forward only."""
    wgrad: GemmRecipe | None
    """dW = dY^T X."""
    high_precision: Literal["bf16", "fp32"] = "bf16"
    """Format of everything that is not FP8: activations between layers, lm_head, kept layers."""
    static_activation_scale: bool = False
    """The activation scale of FProp is frozen for one RL step instead of following each batch."""
    amax_margin: float = 1.25
    """A frozen activation scale covers the last step's amax times this. At least 1."""
    kv_cache: StorageFormat = "fp8"
    """Keys and values that every query sees, in training too: E4M3 with one scale per token and KV head, or
    the high-precision format."""
    saved_activations: StorageFormat | None = "fp8"
    """What a linear layer keeps of X for WGrad: the E4M3 operand itself, or X in the high-precision format; None in a
    forward-only recipe."""
    keep_bf16: tuple[str, ...] = ("lm_head", "embed_tokens")
    """Modules that are not quantised: patterns matched on whole dotted names or whole trailing parts of them,
    `down_proj`, `layers.0.mlp.down_proj`, `layers.0.*`; `gate` does not match `gate_proj`."""
    scale_rounding: ScaleRounding = "none"
    """Rounding of weight, activation and gradient scales. FP8 KV scales are always powers of two."""

    def __post_init__(self) -> None:
        if not 1.0 <= self.amax_margin < float("inf"):
            raise ValueError(f"amax_margin multiplies the last step's amax: finite, at least 1; got {self.amax_margin}")
        if self.scale_rounding not in get_args(ScaleRounding):
            raise ValueError(f"scale_rounding must be one of {get_args(ScaleRounding)}; got {self.scale_rounding!r}")
        if self.static_activation_scale and self.fprop.left != PER_TENSOR:
            raise ValueError(
                f"static_activation_scale=True does not go with recipe {self.name!r}: a frozen scale covers a whole "
                f"tensor, and its FProp quantises X by {self.fprop.left}. Use recipe 'tensorwise_static'."
            )
        allowed = ("fp32",) if self.high_precision == "fp32" else ("fp8", "bf16")
        if self.kv_cache not in allowed:
            raise ValueError(f"kv_cache must be one of {allowed} with recipe {self.name!r}; got {self.kv_cache!r}")
        for name in ("lm_head", "embed_tokens"):
            if not self.keeps_bf16(name):
                raise ValueError(
                    f"keep_bf16={list(self.keep_bf16)} leaves out {name!r}, which every recipe keeps in BF16 with "
                    f"FP32 logits. Add {name!r} to the list."
                )
        if self.dgrad is None or self.wgrad is None:
            if (self.dgrad, self.wgrad, self.saved_activations) != (None, None, None):
                raise ValueError(
                    f"recipe {self.name!r} has no backward, so dgrad, wgrad and saved_activations are all null; got "
                    f"saved_activations={self.saved_activations!r}"
                )
            return
        needs = "fp8" if self.wgrad.right is not None else self.high_precision
        if self.saved_activations not in (needs, self.high_precision):
            raise ValueError(
                f"saved_activations={self.saved_activations!r} does not go with recipe {self.name!r}: its WGrad "
                f"multiplies X in {needs}. Use {needs!r}."
            )

    @property
    def batch_invariant(self) -> bool:
        """Whether a token's numbers are independent of the other tokens in its batch. Exact rollout needs it."""
        return self.static_activation_scale or self.fprop.left != PER_TENSOR

    @property
    def forward_only(self) -> bool:
        """Whether there is no backward: what a serving engine runs, and nothing that trains."""
        return self.dgrad is None

    @property
    def quantizes(self) -> bool:
        """Whether any GEMM has an FP8 operand."""
        return self.fprop.right is not None

    def keeps_bf16(self, module_name: str) -> bool:
        """Whether `keep_bf16` names this module, by its whole dotted name or a whole trailing part of it."""
        return any(names_module(pattern, module_name) for pattern in self.keep_bf16)

    def keeps_fused(self, module_names: Sequence[str]) -> bool:
        """As `keeps_bf16`, of projections that are one weight matrix.

        Raises:
            ValueError: it keeps only some of them.
        """
        kept = [self.keeps_bf16(name) for name in module_names]
        if any(kept) and not all(kept):
            raise ValueError(
                f"keep_bf16 keeps only part of the fused projections "
                f"{[name.rpartition('.')[2] for name in module_names]} of {module_names[0].rpartition('.')[0]}; "
                f"name all of them or none"
            )
        return all(kept)


def names_module(pattern: str, module_name: str) -> bool:
    """Whether a `keep_bf16` pattern names a module: its whole dotted name, or whole trailing parts of it."""
    parts = module_name.split(".")
    return any(fnmatchcase(".".join(parts[start:]), pattern) for start in range(len(parts)))


_NONE = GemmRecipe(left=None, right=None)
_BLOCK_DGRAD = GemmRecipe(left=BLOCK_1X128, right=BLOCK_128X128)
_BLOCK_WGRAD = GemmRecipe(left=BLOCK_128X1, right=BLOCK_128X1)
_TENSORWISE = GemmRecipe(left=PER_TENSOR, right=PER_TENSOR)

_RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="bf16", fprop=_NONE, dgrad=_NONE, wgrad=_NONE, kv_cache="bf16", saved_activations="bf16"),
        Recipe(
            name="block128",
            fprop=GemmRecipe(left=BLOCK_1X128, right=BLOCK_128X128),
            dgrad=_BLOCK_DGRAD,
            wgrad=_BLOCK_WGRAD,
        ),
        Recipe(
            name="rowwise",
            fprop=GemmRecipe(left=PER_ROW, right=PER_ROW),
            dgrad=GemmRecipe(left=PER_ROW, right=PER_COLUMN),
            wgrad=GemmRecipe(left=PER_COLUMN, right=PER_COLUMN),
        ),
        Recipe(name="tensorwise", fprop=_TENSORWISE, dgrad=_TENSORWISE, wgrad=_TENSORWISE),
        Recipe(
            name="w8a16",
            fprop=GemmRecipe(left=None, right=BLOCK_128X128),
            dgrad=_BLOCK_DGRAD,
            wgrad=_BLOCK_WGRAD,
        ),
        Recipe(
            name="tensorwise_static",
            fprop=_TENSORWISE,
            dgrad=_TENSORWISE,
            wgrad=_TENSORWISE,
            static_activation_scale=True,
        ),
        Recipe(
            name="fp32",
            fprop=_NONE,
            dgrad=_NONE,
            wgrad=_NONE,
            high_precision="fp32",
            kv_cache="fp32",
            saved_activations="fp32",
        ),
        Recipe(
            name="fp8_channel",
            fprop=GemmRecipe(left=PER_ROW, right=PER_ROW),
            dgrad=None,
            wgrad=None,
            kv_cache="bf16",
            saved_activations=None,
        ),
        Recipe(name="fp8_tensor", fprop=_TENSORWISE, dgrad=None, wgrad=None, kv_cache="bf16", saved_activations=None),
    )
}

RECIPE_NAMES = tuple(name for name, recipe in _RECIPES.items() if not recipe.forward_only)
"""Recipes that train."""
FORWARD_ONLY = {"fp8_channel": "rowwise", "fp8_tensor": "tensorwise"}
"""What serving engines run, X per token and W per output channel, or both per tensor, KV in BF16: for the rollout
alone. Beside each the recipe whose FProp is the same and which trains."""


def get_recipe(name: str, **changes: object) -> Recipe:
    """The complete config of a named recipe, with some of its fields changed.

    Args:
        name: one of RECIPE_NAMES or FORWARD_ONLY. `fp32` quantises nothing and rounds nothing to BF16; it is for parity
            tests.
        changes: fields of `Recipe` to replace, such as kv_cache="bf16".

    Raises:
        ValueError: no such recipe, or a change that does not go with it.
    """
    if name not in _RECIPES:
        raise ValueError(f"recipe {name!r} does not exist; choose one of {', '.join(_RECIPES)}")
    return replace(_RECIPES[name], **changes)  # type: ignore[arg-type]
