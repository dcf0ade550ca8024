"""Checks of the sampler's kernel that hold in Triton's interpreter and on a GPU."""

import math

import torch

from octavo.kernels import lm_head
from octavo.kernels.logprobs import chosen_logprobs
from octavo.kernels.sampling import draw_tokens
from octavo.rollout.sampler import SamplingConfig, draw, uniform_bits


def keys_of(num_rows, device, seed=-5):
    ids = torch.arange(num_rows, device=device) * 2**20 + 3
    return torch.tensor([seed], device=device), ids, torch.arange(num_rows, device=device) % 40


def bits_after(bits):
    """The second draw of a row: SplitMix64 once more."""
    mask = 2**64 - 1
    x = (bits + 0x9E3779B97F4A7C15) & mask
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def place(weights, bits):
    """The first whose cumulative weight is above floor(bits / 2**64 * total), in Python's whole numbers."""
    threshold, below = bits * sum(weights) >> 64, 0
    for index, weight in enumerate(weights):
        below += weight
        if below > threshold:
            return index
    raise AssertionError("no weight")


def check_draws(device, num_rows=12, vocabulary=700):
    """Tokens are where whole numbers put them; log-probabilities have training's bits; rows do not see each other."""
    logits = (
        torch.randn(num_rows, vocabulary, device=device) * torch.linspace(0.1, 6.0, num_rows, device=device)[:, None]
    )
    seed, ids, positions = keys_of(num_rows, device)
    tokens, logprobs = draw_tokens(logits, seed, ids, positions)
    largest, units, _ = (x.cpu() for x in lm_head.sums_of(logits))
    for row in range(num_rows):
        tops = largest[:, row].double()
        share = torch.exp(tops - tops.max()) * (units[:, row].long() & 0xFFFFFFFF).double()
        bits = uniform_bits(-5, int(ids[row]), int(positions[row]))
        tile = place([math.floor(x * 2048.0 + 0.5) for x in share.tolist()], bits)
        assert int(tokens[row]) // lm_head.BLOCK_V == tile
        words = logits[row, tile * lm_head.BLOCK_V : (tile + 1) * lm_head.BLOCK_V]
        weights = torch.exp2((words - words.max()) * 1.4426950408889634).tolist()
        if device == "cpu":  # a GPU's exp2 differs in the last bits, which may move a border
            assert int(tokens[row]) % lm_head.BLOCK_V == place([int(x * 2**40) for x in weights], bits_after(bits))
    assert len(set(tokens.tolist())) > num_rows // 2
    assert torch.equal(logprobs, chosen_logprobs(logits, lm_head.logsumexp_of(logits), tokens))
    order = torch.randperm(num_rows, device=device)[: num_rows // 2 + 1]
    some, some_logprobs = draw_tokens(logits[order], seed, ids[order], positions[order])
    assert torch.equal(some, tokens[order]) and torch.equal(some_logprobs, logprobs[order])


def check_frequencies(device, count, vocabulary):
    """Chi square of tokens against the softmax: within five standard deviations of its mean."""
    logits = torch.randn(vocabulary, device=device)
    seed, ids, positions = keys_of(count, device)
    tokens, _ = draw_tokens(logits.expand(count, -1), seed, ids, positions)
    expected = torch.softmax(logits.double(), dim=0) * count
    counts = torch.bincount(tokens, minlength=vocabulary)
    rare = expected < 5.0  # together, as one class
    classes = [(counts[~rare], expected[~rare]), (counts[rare].sum()[None], expected[rare].sum()[None])]
    statistic = sum((((n - e) ** 2) / e).sum().item() for n, e in classes if len(e) and e.min() > 0)
    freedom = int((~rare).sum())
    assert freedom > 20
    assert abs(statistic - freedom) < 5.0 * math.sqrt(2.0 * freedom), (statistic, freedom)


def check_edges(device):
    """A certain word at either end and beside a tile's border; words of no probability; what is not finite."""
    vocabulary = 2 * lm_head.BLOCK_V + 1
    certain = [0, lm_head.BLOCK_V - 1, lm_head.BLOCK_V, vocabulary - 1]
    logits = torch.full((len(certain), vocabulary), -torch.inf, device=device)
    logits[range(len(certain)), certain] = 2.0
    tokens, logprobs = draw_tokens(logits, *keys_of(len(certain), device))
    assert tokens.tolist() == certain and logprobs.tolist() == [0.0] * len(certain)
    broken = torch.zeros(4, vocabulary, device=device)
    broken[1, 300], broken[2, 5], broken[3] = torch.nan, torch.inf, -torch.inf
    tokens, logprobs = draw_tokens(broken, *keys_of(4, device))
    assert torch.isfinite(logprobs).tolist() == [True, False, False, False]
    assert tokens.min() >= 0 and tokens.max() < vocabulary
    none, _ = draw_tokens(logits[:0], *keys_of(0, device))
    assert none.shape == (0,)


def check_greedy(device):
    """Temperature 0 takes the largest logit, the first of equals, and reports training's log-probability."""
    logits = torch.randn(6, 600, device=device)
    logits[3, [10, 400]] = 9.0
    tokens, logprobs = draw(logits, *keys_of(6, device), SamplingConfig(temperature=0.0))
    assert tokens[3] == 10 and torch.equal(tokens, logits.argmax(dim=1))
    assert torch.equal(logprobs, chosen_logprobs(logits, lm_head.logsumexp_of(logits), tokens))
