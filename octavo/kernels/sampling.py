"""A token a row drawn on the GPU that holds the logits, by counter: the host learns of it when it looks.

A draw goes by tiles of the vocabulary, with the whole numbers that make up the row's logsumexp (`kernels.lm_head`):
64 random bits choose a tile, 64 more a word in it, each by inverting cumulative weights that are summed exactly. So a
token depends on its row of logits and on (seed, sequence, position), and on nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels import lm_head
from octavo.kernels.early_launch import begin, early_launch
from octavo.kernels.triton_shim import constexpr, tl, triton

_BLOCK_V = constexpr(lm_head.BLOCK_V)
_LOWEST = constexpr(-3.4028234663852886e38)
_LOG2_E = constexpr(1.4426950408889634)


def draw_tokens(logits: Tensor, seed: Tensor, sequence_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Draw one token a row from its softmax.

    Args:
        logits: [T, V] fp32, already divided by the temperature.
        seed: [1] int64.
        sequence_ids, positions: [T] int64; with the seed they key the random numbers.

    Returns:
        tokens [T] int64, and their log-probabilities [T] fp32, with the bits that training computes from these logits;
        not finite where the row is not, whose token is then any.
    """
    (T, V), logits = logits.shape, logits.contiguous()
    tokens = torch.empty(T, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(T, device=logits.device)
    if T:
        sums = lm_head.sums_of(logits)
        logsumexp, _ = lm_head.combined(*sums)
        num_tiles = len(sums[0])
        _draw_kernel[(T,)](
            logits, *sums[:2], logsumexp, seed, sequence_ids, positions, tokens, logprobs, T, V, num_tiles,
            TILES=triton.next_power_of_2(num_tiles), num_warps=4, **lm_head.UNFUSED, **early_launch(logits),
        )  # fmt: skip
    return tokens, logprobs


@triton.jit(do_not_specialize=["T"])
def _draw_kernel(
    logits_ptr, largest_ptr, weights_ptr, logsumexp_ptr, seed_ptr, sequence_ptr, position_ptr, tokens_ptr, logprobs_ptr,
    T, V, num_tiles, TILES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The token of one row: its tile, then the word in it."""
    begin(EARLY)
    row = tl.program_id(0)
    tiles = tl.arange(0, TILES)
    inside = tiles < num_tiles
    at = tiles.to(tl.int64) * T + row
    largest = tl.load(largest_ptr + at, mask=inside, other=_LOWEST)
    units = tl.load(weights_ptr + at, mask=inside, other=0).to(tl.uint32, bitcast=True)
    share = tl.exp(largest.to(tl.float64) - tl.max(largest, axis=0).to(tl.float64))
    weights = tl.floor(share * units.to(tl.float64) * 2048.0 + 0.5).to(tl.int64)  # as in lm_head's _combine_kernel

    bits = _mixed(tl.zeros([], tl.uint64), tl.load(seed_ptr))
    bits = _mixed(bits, tl.load(sequence_ptr + row))
    bits = _mixed(bits, tl.load(position_ptr + row))
    tile = tl.minimum(_index(weights, bits), num_tiles - 1)  # the bound is for weights that are not finite

    words = tile * _BLOCK_V + tl.arange(0, _BLOCK_V)
    logits = tl.load(logits_ptr + row.to(tl.int64) * V + words, mask=words < V, other=_LOWEST)
    below = tl.exp2((logits - tl.max(logits, axis=0)) * _LOG2_E)
    weights = (below * 1099511627776.0).to(tl.int64)  # units of 2**-40
    word = tile * _BLOCK_V + _index(weights, _mixed(bits, tl.zeros([], tl.int64)))
    word = tl.minimum(word, V - 1)
    chosen = tl.load(logits_ptr + row.to(tl.int64) * V + word)
    tl.store(tokens_ptr + row, word.to(tl.int64))
    tl.store(logprobs_ptr + row, (chosen.to(tl.float64) - tl.load(logsumexp_ptr + row)).to(tl.float32))


@triton.jit
def _index(weights, bits):
    """Place of floor(bits / 2**64 * total) among the cumulative weights, whole numbers below 2**63."""
    cumulative = tl.cumsum(weights, axis=0)
    total = tl.sum(weights, axis=0).to(tl.uint64)
    threshold = tl.umulhi(bits, total).to(tl.int64)
    return tl.sum((cumulative <= threshold).to(tl.int32), axis=0)


@triton.jit
def _mixed(state, number):
    """The next state of SplitMix64 (Steele et al. 2014) after a number is added to it by exclusive or."""
    x = (state ^ number.to(tl.uint64, bitcast=True)) + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)
