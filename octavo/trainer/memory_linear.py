"""What a linear layer holds on a CUDA device in forward and backward, tensor by tensor, without running it.

The order is that of layers/linear.py and kernels/: what is allocated there is taken here, and freed where it is freed
there. Token counts are taken to be odd, as packed batches are: then every operand is filled up to whole blocks in a
copy. What torch's own kernels use inside is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from octavo.kernels.gemm import CUBLAS_ROWS
from octavo.layers.linear import WGRAD_TOKEN_MULTIPLE
from octavo.numerics.fp8 import BLOCK_128X128, PER_COLUMN, QuantBlock
from octavo.numerics.recipe import Recipe

BF16, FP32, INT64 = 2, 4, 8
"""Bytes of a number."""


class Ledger:
    """Bytes held now, and the most that were held at once."""

    def __init__(self) -> None:
        self.held = self.most = 0

    def take(self, size: int) -> None:
        """An allocation."""
        self.held += size
        self.most = max(self.most, self.held)

    def free(self, size: int) -> None:
        """The end of one."""
        self.held -= size

    @contextmanager
    def holding(self, size: int) -> Iterator[None]:
        """An allocation that ends with the block."""
        self.take(size)
        yield
        self.free(size)

    def touch(self, size: int) -> None:
        """An allocation that ends at once."""
        self.take(size)
        self.free(size)


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
    def padded_tokens(self) -> int:
        """T filled up for WGrad."""
        return _up(self.num_tokens, WGRAD_TOKEN_MULTIPLE)

    @property
    def filled_rows(self) -> int:
        """N of the weight as FProp reads it: projections filled up to whole blocks of 128 x 128."""
        if not self.quantized or self.recipe.fprop.right != BLOCK_128X128:
            return self.out_features
        return sum(_up(split, 128) for split in self.splits)

    @property
    def forward_copy(self) -> int:
        """Bytes of the weight filled up for FProp's kernel; 0 where that reads the stored ones."""
        K, rows = self.in_features, self.filled_rows
        multiple = 128 if self.recipe.fprop.right == BLOCK_128X128 else 16
        return rows * _up(K, multiple) * (self.quantized and (rows != self.out_features or K % multiple != 0))

    @property
    def backward_copy(self) -> int:
        """Bytes of the transposed weight that DGrad's kernel reads."""
        if not self.quantized or self.recipe.dgrad is None:
            return 0
        K, N = self.in_features, self.out_features
        if self.recipe.dgrad.right != BLOCK_128X128:
            return K * sum(_up(split, 16) for split in self.splits)
        kept = N * K * (self.filled_rows == N and K % 16 == 0 and K % 128 != 0)  # written with W, and filled up too
        return kept + _up(K, 128) * self.filled_rows

    @property
    def keeps_x(self) -> bool:
        """Whether the backward reads X itself, not a cast of it."""
        wgrad = self.recipe.wgrad
        return not self.quantized or wgrad is None or wgrad.right is None or self.recipe.saved_activations != "fp8"

    @property
    def mask(self) -> int:
        """Bytes of the mask of what a static scale cuts off."""
        return self.num_tokens * self.in_features * (self.quantized and self.recipe.static_activation_scale)

    @property
    def saved(self) -> int:
        """Bytes kept for the backward beside X: its cast for WGrad, the mask."""
        if self.keeps_x:
            return self.mask
        assert self.recipe.wgrad is not None
        return self.mask + cast_bytes(self.padded_tokens, self.in_features, self.recipe.wgrad.right)

    def forward(self, ledger: Ledger, *, grad: bool, shadow: bool = False) -> None:
        """X is held before; after it Y too, and with `grad` what is saved."""
        T, K, N = self.num_tokens, self.in_features, self.out_features
        left, filled = self.recipe.fprop.left, _up(K, 128)
        if grad and self.quantized:
            if self.mask:
                ledger.touch(2 * FP32 * T * K)  # |x| in FP32
                ledger.take(self.mask)
            if not self.keeps_x:
                with ledger.holding(BF16 * self.padded_tokens * K):
                    ledger.take(self.saved - self.mask)
        operands = 0
        if shadow:
            operands = BF16 * N * K  # the weight cast from the master
        elif self.quantized and left is None and T >= CUBLAS_ROWS:
            operands = BF16 * self.filled_rows * (K if K == filled else filled + K)  # the weight decoded
        elif self.quantized and left is not None:
            if self.recipe.static_activation_scale:
                ledger.touch(2 * FP32 * T * K)  # |x| again, where saturation is counted
            num_copies = 2 if left[1] != 128 or K == filled else 3
            operands = num_copies * cast_bytes(T, filled, left)
        with ledger.holding(operands):
            ledger.take(BF16 * T * (N if shadow else self.filled_rows))
            if self.bias and left is None and not shadow:
                ledger.touch(2 * FP32 * min(T, CUBLAS_ROWS) * N)
        if not shadow and self.filled_rows != N:  # Y without the rows that fill up blocks
            ledger.take(BF16 * T * N)
            ledger.free(BF16 * T * self.filled_rows)

    def backward(self, ledger: Ledger, *, accumulated: bool) -> None:
        """dY is held before and after; after it dX too, and unless `accumulated` dW; what was saved is free."""
        T, K, N = self.num_tokens, self.in_features, self.out_features
        pieces = len(self.splits)
        if not self.quantized:
            ledger.take(BF16 * T * K)
            grad_y = 0
        else:
            assert self.recipe.dgrad is not None and self.recipe.wgrad is not None
            along, across = self.recipe.dgrad.left, self.recipe.wgrad.left
            by_blocks = across is not None and across[0] == 128
            q = cast_bytes(T, N, along)
            if pieces > 1 and not by_blocks:
                ledger.touch(2 * q)  # each projection's, and all side by side
            with ledger.holding(2 * q):
                ledger.take(BF16 * T * K)
            rows = self.padded_tokens
            q, x = cast_bytes(rows, N, across), cast_bytes(rows, K, self.recipe.wgrad.right)
            if self.keeps_x:
                with ledger.holding(BF16 * rows * N + q):
                    ledger.touch(BF16 * rows * K + x)
            copies = 0
            if not by_blocks:  # each projection's, and all side by side; per tensor transposed in copies
                ledger.touch(BF16 * rows * N + (2 * q if pieces > 1 else q))
                copies = (q + x) * (across != PER_COLUMN)
            grad_y = BF16 * rows * N + q + copies + x * self.keeps_x
        weight = FP32 * N * K
        with ledger.holding(grad_y):
            ledger.take(weight)
        if self.mask:
            ledger.touch(BF16 * T * K)  # dX without what was cut off
        if self.bias:
            ledger.touch(FP32 * T * N)
        if accumulated:
            ledger.free(weight)
        ledger.free(self.saved)


def cast_bytes(rows: int, columns: int, block: QuantBlock | None) -> int:
    """An E4M3 matrix and its scales."""
    assert block is not None
    if 128 in block:
        return rows * columns + FP32 * (rows * columns // 128)
    return rows * columns + FP32 * (rows if block[0] == 1 else columns if block[1] == 1 else 1)


def _up(size: int, multiple: int) -> int:
    return max(1, -(-size // multiple)) * multiple
