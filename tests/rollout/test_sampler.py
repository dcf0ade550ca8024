"""Sampling by counter: frequencies, truncation, and independence of everything but the key."""

import math

import pytest
import torch

from octavo.kernels.logprobs import sampling_weights
from octavo.rollout import sampler
from octavo.rollout.sampler import SamplingConfig, sample, truncate, uniform_bits

VOCAB = 50


def make_logits(rows=1, spread=1.5, seed=0):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


def chi_square(counts, probabilities):
    expected = probabilities.double() * counts.sum()
    assert expected.min() >= 5.0, "too few expected samples for the statistic"
    return ((counts.double() - expected) ** 2 / expected).sum().item()


# The random numbers.


def test_uniform_bits_golden_values():
    # SplitMix64 as published: the first output of seed 0 and of seed 1234567.
    first_of_0, first_of_1234567 = 0xE220A8397B1DCDAF, 6457827717110365317
    assert uniform_bits(1234567, first_of_1234567, first_of_0) == first_of_0
    assert uniform_bits(1234567, first_of_1234567, first_of_0 ^ 1234567) == first_of_1234567
    assert uniform_bits(0, first_of_0, first_of_0 ^ 1234567) == first_of_1234567


@pytest.mark.parametrize(
    "key, bits",
    [  # computed once with NumPy's uint64 arithmetic
        ((0, 0, 0), 0x238275BC38FCBE91),
        ((1, 2, 3), 0xD0734750FDE362B3),
        ((3, 2, 1), 0xD62A7F6E291FEF64),
        ((2**64 - 1, 2**63, 4096), 0x2BA64B65CD58CECD),
        ((-1, 2**63, 4096), 0x2BA64B65CD58CECD),
    ],
)
def test_uniform_bits_keeps_its_values(key, bits):
    assert uniform_bits(*key) == bits


def test_a_seed_keeps_its_bits_in_a_tensor():
    for seed in (0, 5, -5, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 2**64 + 7):
        held = torch.tensor([sampler.signed(seed)])
        assert uniform_bits(int(held), 3, 4) == uniform_bits(seed, 3, 4)
    assert sampler.signed(2**64 - 1) == -1 and sampler.signed(2**63) == -(2**63)


def test_uniform_bits_are_distinct_and_even():
    keys = [(seed, sequence, position) for seed in range(8) for sequence in range(60) for position in range(100)]
    values = [uniform_bits(*key) for key in keys]
    assert len(set(values)) == len(values)
    assert len({value >> 24 for value in values}) == len(values)  # 48000 of 2^40: 0.001 collisions expected
    for bit in range(64):
        share = sum(value >> bit & 1 for value in values) / len(values)
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(len(values)), f"bit {bit}: {share}"
    # Neighbours along each part of the key differ in half of their bits.
    for step in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        flips = [
            (uniform_bits(*key) ^ uniform_bits(*(a + b for a, b in zip(key, step, strict=True)))).bit_count()
            for key in keys[:2000]
        ]
        assert abs(sum(flips) / len(flips) - 32.0) < 5 * 4.0 / math.sqrt(len(flips))


# Frequencies.


@pytest.mark.parametrize("varying", ["seed", "sequence", "position"])
def test_frequencies_of_20000_samples_match_the_softmax(varying):
    logits = make_logits(spread=1.0)
    probabilities = logits[0].double().softmax(dim=-1)
    count = 20_000
    keys = {
        "seed": [(i, 3, 7) for i in range(count)],
        "sequence": [(11, i, 7) for i in range(count)],
        "position": [(11, 3, i) for i in range(count)],
    }[varying]
    tokens, logprobs = sample(logits.expand(count, VOCAB), keys, SamplingConfig())
    statistic, freedom = chi_square(torch.bincount(tokens, minlength=VOCAB), probabilities), VOCAB - 1
    print(f"{varying}: chi square {statistic:.1f} with {freedom} degrees of freedom")
    # Mean freedom, variance 2 freedom: five standard deviations on either side.
    assert abs(statistic - freedom) < 5.0 * math.sqrt(2.0 * freedom)
    torch.testing.assert_close(logprobs.double(), probabilities.log()[tokens], rtol=0, atol=1e-6)


def test_successive_positions_are_independent():
    # Four equal tokens: pairs of neighbours along a sequence and across sequences are uniform over 16.
    config = SamplingConfig()
    for shift in ((0, 1), (1, 0)):
        keys = [(5, i // 100 * (1 + shift[0]), i % 100 * (1 + shift[1])) for i in range(20_000)]
        neighbours = [(seed, sequence + shift[0], position + shift[1]) for seed, sequence, position in keys]
        logits = torch.zeros(len(keys), 4)
        first, second = sample(logits, keys, config)[0], sample(logits, neighbours, config)[0]
        statistic = chi_square(torch.bincount(first * 4 + second, minlength=16), torch.full((16,), 1 / 16))
        assert abs(statistic - 15) < 5.0 * math.sqrt(30)


def test_a_draw_inverts_the_cumulative_weights_exactly():
    # Weights 1 : 1 : 2 (in units of the largest, 1/2 : 1/2 : 1), so the quarters of [0, 2^64) map to 0, 1, 2, 2.
    logits = torch.tensor([[0.0, 0.0, math.log(2.0)]])
    for sequence in range(400):
        token = sample(logits, [(9, sequence, 1)], SamplingConfig())[0].item()
        quarter = uniform_bits(9, sequence, 1) >> 62
        assert token == [0, 1, 2, 2][quarter]


def test_every_border_between_two_tokens_is_where_the_weights_put_it(monkeypatch):
    # With whole weights w of total W, the smallest 64 bits that give token i are ceil(2^64 (w_0 + .. + w_{i-1}) / W).
    logits = make_logits(spread=4.0)
    logits[0, [0, 20, VOCAB - 1]] = -200.0  # no weight at either end or between
    weights = [int(w) for w in sampling_weights(logits)[0][0].tolist()]
    total, below = sum(weights), 0
    assert weights[0] == weights[20] == weights[-1] == 0 and min(w for w in weights if w) < total >> 20
    for token, weight in enumerate(weights):
        if not weight:
            continue
        first = -(-(below << 64) // total)
        below += weight
        last = -(-(below << 64) // total) - 1
        for bits in (first, (first + last) // 2, last):
            monkeypatch.setattr(sampler, "uniform_bits", lambda *_, bits=bits: bits)
            assert sample(logits, [(0, 0, 0)], SamplingConfig())[0].item() == token
    assert last == 2**64 - 1


def test_tokens_without_weight_are_never_drawn():
    logits = torch.full((1, VOCAB), -200.0)
    logits[0, [7, 30]] = 0.0
    tokens, logprobs = sample(logits.expand(2000, VOCAB), [(0, i, 0) for i in range(2000)], SamplingConfig())
    assert set(tokens.tolist()) == {7, 30}
    assert abs((tokens == 7).float().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(2000)
    assert (logprobs == -torch.tensor(2.0).double().log().float()).all()


# Independence of the batch.


@pytest.mark.parametrize(
    "config", [SamplingConfig(), SamplingConfig(top_p=0.8, top_k=20, min_p=0.01), SamplingConfig(temperature=0.0)]
)
def test_a_row_gives_the_same_token_whatever_is_beside_it(config):
    logits, keys = make_logits(64), [(3, 5 * i, 100 - i) for i in range(64)]
    tokens, logprobs = sample(logits, keys, config)
    order = torch.randperm(64)
    shuffled = sample(logits[order], [keys[i] for i in order], config)
    assert torch.equal(shuffled[0], tokens[order]) and torch.equal(shuffled[1], logprobs[order])
    for i in range(64):
        alone = sample(logits[i : i + 1], keys[i : i + 1], config)
        beside = sample(torch.stack([logits[i], logits[(i + 1) % 64] * 50.0]), [keys[i], (0, 0, 0)], config)
        assert alone[0].item() == beside[0][0].item() == tokens[i].item()
        assert alone[1].item() == beside[1][0].item() == logprobs[i].item()
    if config.temperature:
        assert tokens.unique().numel() > 15
        others = sample(logits, [(4, sequence, position) for _, sequence, position in keys], config)[0]
        assert (others != tokens).float().mean() > 0.5, "the seed does not matter"


# Truncation.


def reference_kept(logits, config):
    """Which tokens may be drawn, one row at a time, in plain Python."""
    kept = []
    for row in logits.double().softmax(dim=-1).tolist():
        allowed = {i: p for i, p in enumerate(row) if p >= config.min_p * max(row)}
        if config.top_k:
            border = sorted(allowed.values(), reverse=True)[: config.top_k][-1]
            allowed = {i: p for i, p in allowed.items() if p >= border}
        total, running, nucleus = sum(allowed.values()), 0.0, {}
        for i, p in sorted(allowed.items(), key=lambda item: -item[1]):
            if running >= config.top_p * total:
                break
            nucleus[i] = p
            running += p
        kept.append(set(nucleus))
    return kept


@pytest.mark.parametrize(
    "config",
    [
        SamplingConfig(top_p=0.9),
        SamplingConfig(top_p=0.3),
        SamplingConfig(top_p=1e-6),
        SamplingConfig(top_k=1),
        SamplingConfig(top_k=7),
        SamplingConfig(top_k=1000),
        SamplingConfig(min_p=0.05),
        SamplingConfig(min_p=0.999),
        SamplingConfig(top_p=0.7, top_k=10),
        SamplingConfig(top_p=0.95, top_k=30, min_p=0.02),
    ],
)
def test_truncation_keeps_what_the_reference_keeps(config):
    logits = make_logits(40)
    wanted = reference_kept(logits, config)
    weights = torch.exp(logits.double() - logits.double().amax(dim=-1, keepdim=True))
    left = truncate(weights, config)
    assert [set(row.nonzero().flatten().tolist()) for row in left] == wanted
    assert torch.equal(left[left > 0], weights[left > 0]), "kept weights are unchanged"
    sizes = {len(row) for row in wanted}
    assert max(sizes) < VOCAB or config.top_k == 1000

    tokens, logprobs = sample(logits.repeat(50, 1), [(1, i, 0) for i in range(2000)], config)
    assert all(token in wanted[i % 40] for i, token in enumerate(tokens.tolist()))
    # The log-probability is that of the whole distribution.
    full = logits.double().log_softmax(dim=-1).repeat(50, 1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(logprobs.double(), full, rtol=0, atol=1e-6)


def test_truncated_frequencies_are_renormalised():
    config = SamplingConfig(top_p=0.8, top_k=12)
    logits = make_logits(seed=3)
    (kept,) = reference_kept(logits, config)
    probabilities = torch.zeros(VOCAB, dtype=torch.float64)
    for i in kept:
        probabilities[i] = logits[0].double().softmax(dim=-1)[i]
    probabilities /= probabilities.sum()
    tokens, _ = sample(logits.expand(20_000, VOCAB), [(2, i, 0) for i in range(20_000)], config)
    counts = torch.bincount(tokens, minlength=VOCAB)
    index = sorted(kept)
    statistic, freedom = chi_square(counts[index], probabilities[index]), len(kept) - 1
    assert counts.sum() == counts[index].sum()
    assert 3 <= freedom and abs(statistic - freedom) < 5.0 * math.sqrt(2.0 * freedom)


def test_ties_at_a_border_are_kept():
    logits = torch.tensor([[2.0, 1.0, 1.0, 1.0, 0.0]])
    weights = torch.exp(logits.double() - 2.0)
    assert truncate(weights, SamplingConfig(top_k=2))[0].nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert truncate(weights, SamplingConfig(top_p=0.5))[0].nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert truncate(weights, SamplingConfig(top_k=1))[0].nonzero().flatten().tolist() == [0]


def test_greedy_takes_the_first_largest_and_reports_its_logprob():
    logits = make_logits(30)
    logits[4, 11] = logits[4, 33] = 20.0
    tokens, logprobs = sample(logits, [(0, 0, 0)] * 30, SamplingConfig(temperature=0.0, top_p=0.1))
    assert tokens[4] == 11
    for row, token, logprob in zip(logits.double(), tokens.tolist(), logprobs.tolist(), strict=True):
        assert row[token] == row.max()
        assert abs(row.log_softmax(dim=-1)[token].item() - logprob) < 1e-6


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_named(bad, temperature):
    logits = make_logits(3)
    logits[1, 7] = bad
    with pytest.raises(ValueError, match=r"logits of sequence 42 at position 17 are not finite"):
        sample(logits, [(0, 41, 16), (0, 42, 17), (0, 43, 18)], SamplingConfig(temperature=temperature))


def test_a_token_ruled_out_by_minus_infinity_is_no_error():
    logits = torch.tensor([[0.0, -math.inf]])
    tokens, logprobs = sample(logits.expand(50, 2), [(0, i, 0) for i in range(50)], SamplingConfig())
    assert tokens.tolist() == [0] * 50 and logprobs.tolist() == [0.0] * 50


@pytest.mark.parametrize(
    "field, value",
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("top_k", -1),
        ("min_p", -0.1),
        ("min_p", 1.0),
        ("min_p", math.nan),
    ],
)
def test_settings_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingConfig(**{field: value})
