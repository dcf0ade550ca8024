"""What a linear layer holds on a CUDA device in forward and backward, tensor by tensor, without running it.

The order is that of layers/linear.py and kernels/: what is allocated there is taken here, and freed where it is freed
there. A packed batch is a multiple of 128 tokens. What torch's own kernels use inside is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from octavo.kernels.gemm import CUBLAS_ROWS, FEW_ROWS
from octavo.kernels.operands import K_BLOCK, ROW_MULTIPLE
from octavo.numerics.fp8 import BLOCK_1X128, BLOCK_128X128, PER_COLUMN, PER_TENSOR, QuantBlock
from octavo.numerics.recipe import Recipe

BF16, FP32, INT64 = 2, 4, 8
"""Bytes of a number."""


class Ledger:
    """Bytes held now, and the most that were held at once."""

    def __init__(self) -> None:
        self.held = self.most = 0

    def take(self, size: int, *, when: bool = True) -> None:
        """An allocation."""
        self.held += size if when else 0
        self.most = max(self.most, self.held)

    def free(self, size: int, *, when: bool = True) -> None:
        """The end of one."""
        self.held -= size if when else 0

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """An allocation that ends with the block."""
        self.take(size)
        yield
        self.free(size)

    def touch(self, size: int, *, when: bool = True) -> None:
        """An allocation that ends at once."""
        self.take(size, when=when)
        self.free(size, when=when)


@dataclass(frozen=True, kw_only=True)
class LinearPass:
    """A linear layer on X [T, K]."""

    num_tokens: int
    """T."""
    in_features: int
    """K."""
    splits: tuple[int, ...]
    """Widths of the fused projections, N together."""
    quantized: bool
    """Whether the recipe's GEMMs run in FP8 here."""
    bias: bool
    recipe: Recipe

    @property
    def out_features(self) -> int:
        """N."""
        return sum(self.splits)

    @property
    def filled_rows(self) -> int:
        """N of the weight as FProp reads it: projections before the last filled up to whole blocks of 128 x 128."""
        if self.recipe.fprop.right != BLOCK_128X128 or not self.quantized or _whole(self.splits[:-1]):
            return self.out_features
        return sum(_up(split, K_BLOCK) for split in self.splits)

    @property
    def forward_copy(self) -> int:
        """Bytes of the weight filled up for FProp's kernel; 0 where that reads the stored ones."""
        K, rows = self.in_features, self.filled_rows
        multiple = K_BLOCK if self.recipe.fprop.right == BLOCK_128X128 else ROW_MULTIPLE
        is_stored = not self.quantized or (rows == self.out_features and K % multiple == 0)
        return 0 if is_stored else rows * _up(K, multiple)

    @property
    def backward_copy(self) -> int:
        """Bytes of the transposed weight that DGrad's kernel reads; 0 where the stored one lies so."""
        if not self.quantized or self.recipe.dgrad is None:
            return 0
        right = self.recipe.dgrad.right
        if right == PER_COLUMN and all(split % ROW_MULTIPLE == 0 for split in self.splits):
            return 0
        multiple = K_BLOCK if right == BLOCK_128X128 else ROW_MULTIPLE
        return self.in_features * sum(_up(split, multiple) for split in self.splits)

    @property
    def keeps_x(self) -> bool:
        """Whether the backward reads X itself, not a cast of it."""
        wgrad = self.recipe.wgrad
        return not self.quantized or wgrad is None or wgrad.right is None or self.recipe.saved_activations != "fp8"

    @property
    def mask(self) -> int:
        """Bytes of the mask of what a static scale cuts off."""
        static = self.quantized and self.recipe.static_activation_scale
        return self.num_tokens * self.in_features if static else 0

    @property
    def saved(self) -> int:
        """Bytes kept for the backward beside X: its cast for WGrad, the mask."""
        if self.keeps_x:
            return self.mask
        assert self.recipe.wgrad is not None
        return self.mask + cast_bytes(self.num_tokens, self.in_features, self.recipe.wgrad.right)

    @property
    def gradient(self) -> int:
        """Bytes of dW."""
        return FP32 * self.out_features * self.in_features

    @property
    def casts_both(self) -> bool:
        """Whether X, and dY, are of widths that one cast makes ready for both of their products."""
        left = self.recipe.fprop.left
        return left == BLOCK_1X128 or (_both_ways(left, (self.in_features,)) and _both_ways(left, self.splits))

    @property
    def _casts_x_once(self) -> bool:
        """Whether one cast of X serves FProp and WGrad."""
        left, static = self.recipe.fprop.left, self.recipe.static_activation_scale
        return not self.keeps_x and not static and _both_ways(left, (self.in_features,))

    def forward(
        self, ledger: Ledger, *, grad: bool, shadow: bool = False, again: bool = False, made_of: int = 0
    ) -> None:
        """X is held before; after it Y too, and with `grad` what is saved. A static scale learns nothing `again`. What
        the casts are made of ends before Y."""
        T, K, N = self.num_tokens, self.in_features, self.out_features
        left = self.recipe.fprop.left
        if grad and self.quantized:
            if self.mask:
                ledger.touch(2 * FP32 * T * K)  # |x| in FP32
                ledger.take(self.mask)
            ledger.take(self.saved - self.mask)
        operands = 0
        if shadow:
            operands = BF16 * N * K  # the weight cast from the master
        elif self.quantized and left is None and T >= CUBLAS_ROWS:
            filled = _up(K, K_BLOCK)
            operands = BF16 * self.filled_rows * (K if K == filled else filled + K)  # the weight decoded
        elif self.quantized and left is not None:
            if self.recipe.static_activation_scale and not again:
                ledger.touch(2 * FP32 * T * K)  # |x| once more, where saturation is counted
            operands = self.operand_bytes
        with ledger.holding(operands):
            ledger.free(made_of)
            self.multiply(ledger, shadow=shadow)

    @property
    def operand_bytes(self) -> int:
        """X cast for FProp."""
        T, left = self.num_tokens, self.recipe.fprop.left
        cast = cast_bytes(T, _up(self.in_features, K_BLOCK) if left == BLOCK_1X128 else self.in_features, left)
        rows_are_full = T % ROW_MULTIPLE == 0 or T <= FEW_ROWS
        return cast if rows_are_full else 2 * cast

    def multiply(self, ledger: Ledger, *, shadow: bool = False) -> None:
        """The operands are held before; after it Y too."""
        T, N, rows = self.num_tokens, self.out_features, self.out_features if shadow else self.filled_rows
        ledger.take(BF16 * T * rows)
        keeps_bf16 = shadow or not self.quantized or self.recipe.fprop.left is None
        if self.bias and keeps_bf16 and T >= CUBLAS_ROWS:
            ledger.touch(2 * FP32 * CUBLAS_ROWS * N)  # to which the bias is added; fewer rows are Triton's
        if rows != N:  # Y without the rows that fill up blocks
            ledger.take(BF16 * T * N)
            ledger.free(BF16 * T * rows)

    def backward(self, ledger: Ledger, *, accumulated: bool) -> None:
        """dY is held before and after; after it dX too, and unless `accumulated` dW; what was saved is free."""
        T, K, N = self.num_tokens, self.in_features, self.out_features
        grad_x = BF16 * T * K
        if not self.quantized:
            ledger.take(grad_x)
            ledger.take(self.gradient)
        else:
            assert self.recipe.dgrad is not None and self.recipe.wgrad is not None
            along, across = self.recipe.dgrad.left, self.recipe.wgrad.left
            width = sum(_up(split, K_BLOCK) for split in self.splits) if along == BLOCK_1X128 else N
            once, side_by_side = _both_ways(along, self.splits), len(self.splits) > 1 and along != BLOCK_1X128
            q, q_t = cast_bytes(T, width, along), cast_bytes(T, N, across)
            if side_by_side and not once:  # each projection's, and all in one
                ledger.touch(2 * q)
            with ledger.holding(q + q_t if once else q):
                if side_by_side and not _whole(self.splits):  # a product each, added up in FP32
                    ledger.touch(3 * FP32 * T * K + (T + K) * self.splits[-1])
                ledger.take(grad_x)
                if once:
                    self._weight_gradient(ledger, 0)
            if not once:
                if side_by_side:
                    ledger.touch(2 * q_t)
                self._weight_gradient(ledger, 2 * q_t if across == PER_TENSOR else q_t)  # transposed in a copy
        if self.mask:
            ledger.touch(grad_x)  # without what was cut off
        if self.bias:
            ledger.touch(FP32 * T * N)
        if accumulated:
            ledger.free(self.gradient)
        ledger.free(self.saved)

    def backward_of_casts(self, ledger: Ledger, *, made_of: int) -> None:
        """dY comes in its two casts, in place of what they are made of; dX and dW are held after it."""
        assert self.recipe.dgrad is not None and self.recipe.wgrad is not None
        T, width = self.num_tokens, sum(_up(split, K_BLOCK) for split in self.splits)
        along = cast_bytes(T, width, self.recipe.dgrad.left)
        with ledger.holding(along + cast_bytes(T, self.out_features, self.recipe.wgrad.left)):
            ledger.free(made_of)
            ledger.take(BF16 * T * self.in_features)
            self._weight_gradient(ledger, 0)
        ledger.free(self.saved)

    def _weight_gradient(self, ledger: Ledger, grad_y: int) -> None:
        """dW is held after it, and beside it while it is made: dY, and X where it is cast or transposed here."""
        assert self.recipe.wgrad is not None
        T, K, right = self.num_tokens, self.in_features, self.recipe.wgrad.right
        x = cast_bytes(T, K, right) if self.keeps_x else 0
        x += T * K if right == PER_TENSOR and not self._casts_x_once else 0
        with ledger.holding(grad_y + x):
            ledger.take(self.gradient)


def _both_ways(along: QuantBlock | None, splits: Sequence[int]) -> bool:
    """Whether one cast serves a product along the columns and one across: `operands.can_quantize_both`."""
    alone = len(splits) == 1 and splits[0] % ROW_MULTIPLE == 0
    return along is not None and (alone or _whole(splits))


def cast_bytes(rows: int, columns: int, block: QuantBlock | None) -> int:
    """An E4M3 matrix and its scales."""
    assert block is not None
    if 128 in block:
        return rows * columns + FP32 * (rows * columns // 128)
    return rows * columns + FP32 * (rows if block[0] == 1 else columns if block[1] == 1 else 1)


def _up(size: int, multiple: int) -> int:
    return max(1, -(-size // multiple)) * multiple


def _whole(splits: Sequence[int]) -> bool:
    return all(split % K_BLOCK == 0 for split in splits)
