"""lm_head on a GPU, by tiles of the vocabulary: what `kernels.logprobs` needs of FP32 logits, which are not held.

A logit is one chain of BF16 products over ascending K, whatever the tile. A tile of 256 words sums its weights as
integers of 2**-23 below its own largest logit; the sums of tiles, rounded to multiples of 2**-34 below the row's
largest logit, are whole numbers again and add exactly. So no batch, tile shape or order changes a bit of a logsumexp,
and that of stored logits (`logsumexp_of`, for the sampler) is that of `softmax_sums` (for training).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from octavo.kernels.e4m3 import round_bf16
from octavo.kernels.early_launch import begin, early_launch
from octavo.kernels.triton_shim import INTERPRETED, constexpr, require_triton, tl, triton

GRAD_LOGITS_PER_CHUNK = 2**27
"""Gradients of logits that a backward pass multiplies at once, in BF16: 256 MiB."""
MIN_GRAD_COLUMNS = 2048
"""Words of such a chunk, however many tokens there are."""
KeptWeights = tuple[Tensor, Tensor]
"""[T * V] bf16, the softmax weights of every tile relative to its largest logit, a matrix [T, words] for each of the
backward's chunks, one after the other; and those logits, [tiles, T] fp32."""
BLOCK_V = 256
"""Words of a vocabulary tile."""
BLOCK_K = 64
UNFUSED = {"enable_fp_fusion": False}
"""A product and a difference fused into one instruction would not give the bits of a logit that was stored between."""
_BLOCK_V, _BLOCK_K = constexpr(BLOCK_V), constexpr(BLOCK_K)
_ROW_BLOCKS = constexpr(16)
"""Row blocks that sweep the vocabulary together, so that L2 serves them."""
LOG2_E = constexpr(1.4426950408889634)
_ONE_BITS = constexpr(0x3F800000)
"""1.0 in FP32."""
_LOWEST = constexpr(-3.4028234663852886e38)
"""Stands for words beyond the vocabulary; minus infinity times a weight of 0 would be NaN."""
_CURE = constexpr(INTERPRETED)
"""Triton's interpreter multiplies the raw bits of BF16, and takes seconds for a reduction that is not its own."""


def softmax_sums(
    hidden: Tensor, weight: Tensor, tokens: Tensor, temperature: float, keep: bool = False
) -> tuple[Tensor, Tensor, Tensor, KeptWeights | None]:
    """What log-probabilities need, in 12 bytes a token and tile.

    Args:
        hidden: [T, D] bf16.
        weight: [V, D] bf16.
        tokens: [T] int64, the chosen ones.
        temperature: divides the logits: a product with its FP32 reciprocal.
        keep: what the backward makes gradients of, so that it need not multiply again (`kernels.lm_head_gradients`).

    Returns:
        chosen logits [T] fp32, NaN for a token beyond the vocabulary; logsumexp [T] float64; entropy [T] fp32; and
        what is kept, if anything.
    """
    T, V = len(hidden), len(weight)
    chosen = torch.full((T,), torch.nan, device=hidden.device)
    kept = torch.empty(T * V, dtype=torch.bfloat16, device=hidden.device) if keep else None
    sums = _empty_sums(T, V, hidden.device)
    if T:
        weights, columns = chosen if kept is None else kept, chunk_columns(T)
        launch(_sums_kernel, hidden, weight, temperature, tokens, chosen, *sums, weights, columns, KEEP=keep)
    return chosen, *combined(*sums), None if kept is None else (kept, sums[0])


def chunk_columns(num_rows: int) -> int:
    """Words of the vocabulary that the backward of so many tokens multiplies at once; whole tiles."""
    return max(GRAD_LOGITS_PER_CHUNK // max(num_rows, 1) // BLOCK_V * BLOCK_V, MIN_GRAD_COLUMNS)


def logits_of(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    """[T, D] bf16, [V, D] bf16 -> [T, V] fp32, those that `softmax_sums` sees."""
    logits = torch.empty(len(hidden), len(weight), device=hidden.device)
    if len(hidden):
        launch(_logits_kernel, hidden, weight, temperature, logits, persistent=False, **early_launch(hidden))
    return logits


def logsumexp_of(logits: Tensor) -> Tensor:
    """[T, V] fp32 -> [T, 1] float64, with the bits of `softmax_sums`."""
    return combined(*sums_of(logits))[0][:, None]


def sums_of(logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Stored logits [T, V] fp32 -> largest logits, weights and moments of each tile, [tiles, T]."""
    require_triton("sampling")
    T, V = logits.shape
    sums = _empty_sums(T, V, logits.device)
    if T:
        grid = (triton.cdiv(T, 4), triton.cdiv(V, BLOCK_V))
        _row_sums_kernel[grid](
            logits.contiguous(), T, V, *sums, BLOCK_T=4, num_warps=4, **UNFUSED, **early_launch(logits)
        )
    return sums


def configuration(num_rows: int) -> tuple[int, int, int]:
    """Rows of a tile, warps, pipeline stages of the kernels that multiply. The bits are the same for any."""
    return (64, 4, 5) if num_rows <= 64 else (128, 8, 4)


def launch(
    kernel: Any,
    hidden: Tensor,
    weight: Tensor,
    temperature: float,
    *arguments: Tensor | int,
    persistent: bool = True,
    **options: Any,
) -> None:
    """Run a kernel that multiplies: a program for each multiprocessor, or else for each tile."""
    require_triton("lm_head")
    from triton.tools.tensor_descriptor import TensorDescriptor

    (T, D), V = hidden.shape, len(weight)
    if D % 8 != 0:
        raise ValueError(f"lm_head on a GPU reads rows of 16 bytes, so the hidden size is a multiple of 8; got {D}")
    block_t, num_warps, num_stages = configuration(T)
    num_programs = triton.cdiv(T, block_t) * triton.cdiv(V, BLOCK_V)
    if persistent and hidden.is_cuda:
        num_programs = min(num_programs, torch.cuda.get_device_properties(hidden.device).multi_processor_count)
    kernel[(num_programs,)](
        TensorDescriptor.from_tensor(hidden.contiguous(), [block_t, BLOCK_K]),
        TensorDescriptor.from_tensor(weight.contiguous(), [BLOCK_V, BLOCK_K]),
        T,
        V,
        D,
        1.0 / temperature,
        *arguments,
        BLOCK_T=block_t,
        num_warps=num_warps,
        num_stages=num_stages,
        **UNFUSED,
        **options,
    )


def _empty_sums(T: int, V: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Largest logits, weights and moments, [tiles, T]."""
    num_tiles = -(-V // BLOCK_V)
    largest = torch.empty(num_tiles, T, device=device)
    return largest, torch.empty_like(largest, dtype=torch.int32), torch.empty_like(largest)


def combined(largest: Tensor, weights: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of tiles [tiles, T] -> logsumexp [T] float64, entropy [T] fp32."""
    num_tiles, T = largest.shape
    logsumexp = torch.empty(T, dtype=torch.float64, device=largest.device)
    entropy = torch.empty(T, device=largest.device)
    if T:
        _combine_kernel[(triton.cdiv(T, 8),)](
            largest,
            weights,
            moments,
            logsumexp,
            entropy,
            T,
            num_tiles,
            ROWS=8,
            TILES=256,
            num_warps=8,
            **UNFUSED,
            **early_launch(logsumexp),
        )
    return logsumexp, entropy


@triton.jit(do_not_specialize=["T"])
def _sums_kernel(
    hidden, weight, T, V, D, inverse_temperature, tokens_ptr, chosen_ptr, largest_ptr, weights_ptr, moments_ptr,
    kept_ptr, columns, BLOCK_T: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Softmax sums of every row and tile, and each row's chosen logit from the tile that holds it."""
    for tile in tl.range(tl.program_id(0), num_tiles(T, V, BLOCK_T), tl.num_programs(0), flatten=True):
        row_block, vocabulary_tile = place(tile, T, V, BLOCK_T)
        rows = row_block * BLOCK_T + tl.arange(0, BLOCK_T)
        words = vocabulary_tile * _BLOCK_V + tl.arange(0, _BLOCK_V)
        logits = multiply(hidden, weight, row_block, vocabulary_tile, D, BLOCK_T) * inverse_temperature
        token = tl.load(tokens_ptr + rows, mask=rows < T, other=-1).to(tl.int32)  # 64 bits would spill
        here = (token >= vocabulary_tile * _BLOCK_V) & (token < tl.minimum((vocabulary_tile + 1) * _BLOCK_V, V))
        if tl.max(here.to(tl.int32), axis=0) > 0:
            chosen = tl.sum(tl.where(words[None, :] == token[:, None], logits, 0.0), axis=1)
            tl.store(chosen_ptr + rows, chosen, mask=here)
        largest, below, weights = tile_weights(within_vocabulary(logits, words, vocabulary_tile, V))
        _store_sums(largest, below, weights, rows, vocabulary_tile, T, largest_ptr, weights_ptr, moments_ptr)
        if KEEP:
            first = vocabulary_tile * _BLOCK_V // columns * columns
            chunk_ptr, chunk_tile = kept_ptr + first.to(tl.int64) * T, vocabulary_tile - first // _BLOCK_V
            store_tile(
                chunk_ptr, round_bf16(weights), row_block, chunk_tile, T, tl.minimum(columns, V - first), BLOCK_T
            )


@triton.jit(do_not_specialize=["T"])
def _logits_kernel(
    hidden, weight, T, V, D, inverse_temperature, logits_ptr, BLOCK_T: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """A tile of logits [T, V]. One a program: to store it takes the shared memory that a next tile would fill."""
    begin(EARLY)
    row_block, vocabulary_tile = place(tl.program_id(0), T, V, BLOCK_T)
    logits = multiply(hidden, weight, row_block, vocabulary_tile, D, BLOCK_T) * inverse_temperature
    store_tile(logits_ptr, logits, row_block, vocabulary_tile, T, V, BLOCK_T)


@triton.jit(do_not_specialize=["T"])
def _row_sums_kernel(
    logits_ptr, T, V, largest_ptr, weights_ptr, moments_ptr, BLOCK_T: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Softmax sums of stored logits, a program for BLOCK_T rows of a tile."""
    begin(EARLY)
    rows = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    vocabulary_tile = tl.program_id(1)
    words = vocabulary_tile * _BLOCK_V + tl.arange(0, _BLOCK_V)
    at = rows[:, None].to(tl.int64) * V + words[None, :]
    logits = tl.load(logits_ptr + at, mask=(rows[:, None] < T) & (words[None, :] < V), other=_LOWEST)
    largest, below, weights = tile_weights(logits)
    _store_sums(largest, below, weights, rows, vocabulary_tile, T, largest_ptr, weights_ptr, moments_ptr)


@triton.jit(do_not_specialize=["T"])
def _combine_kernel(
    largest_ptr, weights_ptr, moments_ptr, logsumexp_ptr, entropy_ptr, T, num_tiles,
    ROWS: tl.constexpr, TILES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Sums of tiles into those of rows: weights as float64 whole numbers, multiples of 2**-34 below the largest."""
    begin(EARLY)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    largest = tl.full([ROWS], _LOWEST, tl.float32)
    for first in range(0, num_tiles, TILES):
        at, inside = _tiles_of_rows(first, rows, T, num_tiles, TILES)
        tiles = tl.load(largest_ptr + at, mask=inside, other=_LOWEST)
        largest = tl.maximum(largest, tl.max(tiles, axis=0))  # drops NaN, which the weights below keep
    total = tl.zeros([ROWS], tl.float64)
    moment = tl.zeros([ROWS], tl.float64)
    for first in range(0, num_tiles, TILES):
        at, inside = _tiles_of_rows(first, rows, T, num_tiles, TILES)
        tiles = tl.load(largest_ptr + at, mask=inside, other=_LOWEST)
        units = tl.load(weights_ptr + at, mask=inside, other=0).to(tl.uint32, bitcast=True)
        moments = tl.load(moments_ptr + at, mask=inside, other=0.0)
        below = tiles.to(tl.float64) - largest[None, :].to(tl.float64)
        share = tl.exp(below)
        weights = tl.floor(share * units.to(tl.float64) * 2048.0 + 0.5)
        total += tl.sum(weights, axis=0)
        moment += tl.sum(weights * below + share * moments.to(tl.float64) * 17179869184.0, axis=0)
    above = tl.log(total * (1.0 / 17179869184.0))
    tl.store(logsumexp_ptr + rows, largest.to(tl.float64) + above, mask=rows < T)
    tl.store(entropy_ptr + rows, (above - moment / total).to(tl.float32), mask=rows < T)


@triton.jit
def _tiles_of_rows(first, rows, T, num_tiles, TILES: tl.constexpr):
    tiles = first + tl.arange(0, TILES)
    return tiles[:, None].to(tl.int64) * T + rows[None, :], (tiles[:, None] < num_tiles) & (rows[None, :] < T)


@triton.jit
def num_tiles(T, V, BLOCK_T: tl.constexpr):
    """Of BLOCK_T rows and a vocabulary tile each."""
    return tl.cdiv(T, BLOCK_T) * tl.cdiv(V, _BLOCK_V)


@triton.jit
def place(tile, T, V, BLOCK_T: tl.constexpr):
    """Row block and vocabulary tile of the tile-th: a group of row blocks sweeps the vocabulary, then the next."""
    tiles_per_group = _ROW_BLOCKS * tl.cdiv(V, _BLOCK_V)
    first = tile // tiles_per_group * _ROW_BLOCKS
    size = tl.minimum(tl.cdiv(T, BLOCK_T) - first, _ROW_BLOCKS)
    within = tile % tiles_per_group
    return first + within % size, within // size


@triton.jit
def multiply(hidden, weight, row_block, vocabulary_tile, D, BLOCK_T: tl.constexpr):
    """hidden . W^T of a tile [BLOCK_T, _BLOCK_V] fp32, ascending K; zeros beyond either matrix."""
    product = tl.zeros([BLOCK_T, _BLOCK_V], tl.float32)
    for k in range(0, D, _BLOCK_K):
        x = hidden.load([row_block * BLOCK_T, k])
        w = weight.load([vocabulary_tile * _BLOCK_V, k])
        if _CURE:
            x, w = x.to(tl.float32), w.to(tl.float32)
        product = tl.dot(x, w.T, product)
    return product


@triton.jit
def store_tile(ptr, values, row_block, vocabulary_tile, T, V, BLOCK_T: tl.constexpr):
    """What lies within [T, V], in the dtype of the memory."""
    rows = row_block * BLOCK_T + tl.arange(0, BLOCK_T)
    words = vocabulary_tile * _BLOCK_V + tl.arange(0, _BLOCK_V)
    at = rows[:, None].to(tl.int64) * V + words[None, :]
    tl.store(ptr + at, values.to(ptr.dtype.element_ty), mask=(rows[:, None] < T) & (words[None, :] < V))


@triton.jit
def within_vocabulary(logits, words, vocabulary_tile, V):
    """Logits of a tile, the lowest number for words beyond the vocabulary."""
    if (vocabulary_tile + 1) * _BLOCK_V > V:
        logits = tl.where(words[None, :] < V, logits, _LOWEST)
    return logits


@triton.jit
def tile_weights(logits):
    """Of each row of a tile: largest logit, logit - largest, exp of that."""
    if _CURE:
        spoilt = tl.max((logits != logits).to(tl.int32), axis=1) > 0
        largest = tl.where(spoilt, float("nan"), tl.max(logits, axis=1))
    else:
        largest = tl.reduce(logits, 1, _larger)
    below = logits - largest[:, None]
    return largest, below, tl.exp2(below * LOG2_E)


@triton.jit
def _store_sums(largest, below, weights, rows, vocabulary_tile, T, largest_ptr, weights_ptr, moments_ptr):
    """Of each row: largest logit, weights in units of 2**-23, sum of weight * difference to the largest."""
    at = vocabulary_tile.to(tl.int64) * T + rows
    tl.store(largest_ptr + at, largest, mask=rows < T)
    tl.store(moments_ptr + at, tl.sum(weights * below, axis=1), mask=rows < T)  # first: fewer registers spill
    units = (weights + 1.0).to(tl.int32, bitcast=True) - _ONE_BITS  # numbers in [1, 2] are multiples of 2**-23
    tl.store(weights_ptr + at, tl.sum(units, axis=1), mask=rows < T)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
