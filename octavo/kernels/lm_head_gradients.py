"""The backward of `kernels.lm_head`: gradients of logits in BF16, and their two products, by chunks of the vocabulary.

    weights       = BF16(exp(logit - largest logit of its tile))       of every row and tile of 256 words
    softmax       = weights * exp(largest logit - logsumexp)           FP32
    grad of logit = BF16((onehot - softmax) * grad)

The forward keeps the weights [T, V], and the backward makes the gradients of them where they lie; or it multiplies
hidden states and weight again and rounds the same weights, chunk by chunk: less memory, one product more, the same
bits. Either rounding is by up to 2**-8, so a gradient is off by about 2**-7 of itself at most, and by what FP32 adds.
1 - softmax loses nothing: the largest logit of a tile has the weight 1 exactly, any other a softmax of 1/2 at most.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.kernels import lm_head
from octavo.kernels.e4m3 import round_bf16
from octavo.kernels.lm_head import (
    LOG2_E,
    UNFUSED,
    KeptWeights,
    chunk_columns,
    launch,
    multiply,
    num_tiles,
    place,
    store_tile,
    tile_weights,
    within_vocabulary,
)
from octavo.kernels.triton_shim import constexpr, tl, triton

MAX_KEPT_BYTES = 6 * 2**30
"""Of the weights that a forward keeps, 2 T V. 16,384 tokens of Qwen3's 151,936 words take 4.6 GiB; a microbatch of more
lives by the memory that is left, and there one product is not worth as much."""
_BLOCK_V = constexpr(lm_head.BLOCK_V)


def kept_bytes(num_rows: int, vocabulary: int) -> int:
    """What the forward of so many tokens keeps for the backward; 0 where that multiplies again."""
    kept = 2 * vocabulary + 4 * -(-vocabulary // lm_head.BLOCK_V)
    return num_rows * kept if num_rows <= most_kept(vocabulary) else 0


def most_kept(vocabulary: int) -> int:
    """Tokens whose weights a forward keeps, at most."""
    return MAX_KEPT_BYTES // (2 * vocabulary)


def gradients(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    logsumexp: Tensor,
    grad: Tensor,
    temperature: float,
    needs: Sequence[bool],
    kept: KeptWeights | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden [T, D], in bf16, and of the weight [V, D], in fp32.

    Args:
        hidden, weight, tokens, temperature: as in `softmax_sums`.
        logsumexp: [T] float64, from there.
        grad: [T] fp32, of the log-probabilities, over the temperature.
        needs: whether each of the two is wanted.
        kept: from there as well; is overwritten. None: multiply again. The bits are the same.
    """
    T, V = len(hidden), len(weight)
    grad_hidden = torch.zeros(hidden.shape, device=hidden.device) if needs[0] else None
    grad_weight = torch.zeros(weight.shape, device=hidden.device) if needs[1] else None
    columns = chunk_columns(T)
    for start in range(0, V if T else 0, columns):
        words = slice(start, start + columns)
        if kept is None:
            grad_logits = grad_logits_of(hidden, weight[words], tokens - start, logsumexp, grad, temperature)
        else:
            grad_logits = grad_logits_from(kept, start, len(weight[words]), tokens - start, logsumexp, grad)
        if grad_hidden is not None:
            torch.addmm(grad_hidden, grad_logits, weight[words], out_dtype=torch.float32, out=grad_hidden)
        if grad_weight is not None:
            torch.mm(grad_logits.T, hidden, out_dtype=torch.float32, out=grad_weight[words])
    return None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_weight


def grad_logits_of(
    hidden: Tensor, weight: Tensor, tokens: Tensor, logsumexp: Tensor, grad: Tensor, temperature: float
) -> Tensor:
    """(onehot - softmax) * grad [T, C] bf16 over the C words of `weight`, tokens counted from the first of them."""
    grad_logits = torch.empty(len(hidden), len(weight), dtype=torch.bfloat16, device=hidden.device)
    launch(_multiplied_kernel, hidden, weight, temperature, tokens, logsumexp.float(), grad, grad_logits)
    return grad_logits


def grad_logits_from(
    kept: KeptWeights, start: int, num_words: int, tokens: Tensor, logsumexp: Tensor, grad: Tensor
) -> Tensor:
    """The same of the chunk of `num_words` words from `start` on, in the place of its weights."""
    T, (weights, largest) = len(tokens), kept
    chunk = weights[T * start : T * (start + num_words)].view(T, num_words)
    largest = largest[start // lm_head.BLOCK_V :]
    grid, options = (triton.cdiv(num_words, lm_head.BLOCK_V), triton.cdiv(T, 16)), {"num_warps": 4, **UNFUSED}
    _kept_kernel[grid](chunk, largest, T, num_words, tokens, logsumexp.float(), grad, BLOCK_T=16, **options)
    return chunk


@triton.jit(do_not_specialize=["T"])
def _multiplied_kernel(
    hidden, weight, T, V, D, inverse_temperature, tokens_ptr, logsumexp_ptr, grad_ptr, grad_logits_ptr,
    BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Gradients of the logits of V words, tokens counted from the first of them."""
    for tile in tl.range(tl.program_id(0), num_tiles(T, V, BLOCK_T), tl.num_programs(0), flatten=True):
        row_block, vocabulary_tile = place(tile, T, V, BLOCK_T)
        rows = row_block * BLOCK_T + tl.arange(0, BLOCK_T)
        words = vocabulary_tile * _BLOCK_V + tl.arange(0, _BLOCK_V)
        logits = multiply(hidden, weight, row_block, vocabulary_tile, D, BLOCK_T) * inverse_temperature
        largest, _, weights = tile_weights(within_vocabulary(logits, words, vocabulary_tile, V))
        grad_logits = _gradients(round_bf16(weights), largest, rows, words, T, tokens_ptr, logsumexp_ptr, grad_ptr)
        store_tile(grad_logits_ptr, grad_logits, row_block, vocabulary_tile, T, V, BLOCK_T)


@triton.jit(do_not_specialize=["T"])
def _kept_kernel(chunk_ptr, largest_ptr, T, V, tokens_ptr, logsumexp_ptr, grad_ptr, BLOCK_T: tl.constexpr):
    """The same of kept weights, in their place. One program for BLOCK_T rows of a tile."""
    vocabulary_tile, row_block = tl.program_id(0), tl.program_id(1)
    rows = row_block * BLOCK_T + tl.arange(0, BLOCK_T)
    words = vocabulary_tile * _BLOCK_V + tl.arange(0, _BLOCK_V)
    inside = (rows[:, None] < T) & (words[None, :] < V)
    at = rows[:, None].to(tl.int64) * V + words[None, :]
    weights = tl.load(chunk_ptr + at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.load(largest_ptr + vocabulary_tile.to(tl.int64) * T + rows, mask=rows < T, other=0.0)
    grad_logits = _gradients(weights, largest, rows, words, T, tokens_ptr, logsumexp_ptr, grad_ptr)
    store_tile(chunk_ptr, grad_logits, row_block, vocabulary_tile, T, V, BLOCK_T)


@triton.jit
def _gradients(weights, largest, rows, words, T, tokens_ptr, logsumexp_ptr, grad_ptr):
    """(onehot - softmax) * grad of a tile in BF16's numbers, from weights in BF16's numbers."""
    token = tl.load(tokens_ptr + rows, mask=rows < T, other=-1).to(tl.int32)  # 64 bits would spill
    logsumexp = tl.load(logsumexp_ptr + rows, mask=rows < T, other=0.0)
    grad = tl.load(grad_ptr + rows, mask=rows < T, other=0.0)
    share = tl.exp2((largest - logsumexp) * LOG2_E)
    p = weights * share[:, None]
    return round_bf16(tl.where(words[None, :] == token[:, None], 1.0 - p, -p) * grad[:, None])
