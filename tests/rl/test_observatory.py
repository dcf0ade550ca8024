"""The figures of the observatory against numbers worked out by hand; no packing, padding or split changes them."""

import math

import pytest
import torch

from octavo.rl.losses import ClipConfig
from octavo.rl.observatory import (
    CELLS,
    LogprobPair,
    ObservatoryConfig,
    ObservedTokens,
    answer_metrics,
    clip_matrix,
    group_metrics,
    log_ratio_std,
    overclip_shape,
    ratio_metrics,
)

CLIP = ClipConfig(clip_low=0.2, clip_high=0.28)
# Ten tokens of four answers: ratio in FP8, in BF16, advantage, entropy, answer. The last has no place in the loss.
ROWS = [
    (0.70, 0.75, -1.0, 0.005, 0),  # both clip it low
    (0.78, 0.81, -1.0, 0.020, 0),  # FP8 alone
    (0.85, 0.79, -1.0, 1.500, 0),  # BF16 alone
    (0.60, 0.95, -2.0, 2.500, 1),  # FP8 alone, in an answer of mean entropy 1.5
    (1.50, 1.40, -2.0, 0.500, 1),  # a punished token is not clipped high
    (1.30, 1.29, 1.0, 0.050, 2),  # both clip it high
    (1.35, 1.20, 1.0, 5.000, 2),  # FP8 alone
    (0.50, 0.50, 1.0, 0.200, 2),  # a rewarded token is not clipped low
    (0.10, 9.00, 0.0, 0.100, 3),  # no advantage, never clipped
    (0.10, 9.00, -5.0, 9.000, 3),
]


def tokens_of(rows, mask=None) -> ObservedTokens:
    column = [torch.tensor([row[i] for row in rows]) for i in range(5)]
    mask = torch.tensor([True] * (len(rows) - 1) + [False]) if mask is None else mask
    return ObservedTokens(loss_mask=mask, advantages=column[2], entropy=column[3], answer_index=column[4].long())


def ratios_of(rows):
    return tuple(torch.tensor([row[i] for row in rows], dtype=torch.float64) for i in (0, 1))


def pairs_of(rows) -> dict[str, LogprobPair]:
    old = torch.full((len(rows),), -1.0)
    fp8, bf16 = ratios_of(rows)
    return {
        "fp8": LogprobPair(before=old, after=old + fp8.log()),
        "bf16": LogprobPair(before=old - 0.5, after=old - 0.5 + bf16.log()),
    }


def test_clip_matrix_by_hand():
    matrix = clip_matrix(*ratios_of(ROWS), tokens_of(ROWS), CLIP)
    cells = {key: {b: n for b, n in enumerate(counts) if n} for key, counts in matrix.items()}
    assert cells == {
        "matrix_low_both": {0: 1},
        "matrix_low_fp8_only": {1: 1, 6: 1},
        "matrix_low_bf16_only": {5: 1},
        "matrix_low_neither": {4: 1},
        "matrix_high_both": {2: 1},
        "matrix_high_fp8_only": {7: 1},
        "matrix_high_bf16_only": {},
        "matrix_high_neither": {3: 1},
    }
    assert all(len(counts) == 8 for counts in matrix.values())


def test_a_ratio_on_its_bound_is_clipped():
    rows = [(0.8, 0.81, -1.0, 0.0, 0), (1.28, 1.27, 1.0, 0.0, 0), ROWS[-1]]
    shape = overclip_shape(*ratios_of(rows), tokens_of(rows), CLIP)
    assert (shape["num_clipped_fp8"], shape["num_clipped_bf16"]) == (2.0, 0.0)


def test_overclip_shape_by_hand():
    assert overclip_shape(*ratios_of(ROWS), tokens_of(ROWS), CLIP) == {
        "num_clipped_fp8": 5.0,
        "num_clipped_bf16": 3.0,
        "num_clipped_both": 2.0,
        "factor": 5 / 3,
        "agreement_of_bf16": 2 / 3,
        "agreement_of_fp8": 2 / 5,
        "low_side_share": 2 / 3,
        "high_entropy_answer_share": 1 / 2,
    }


def test_an_answer_is_uncertain_by_the_mean_of_its_own_tokens():
    """One token of 2.5 nats makes an answer of two tokens uncertain (mean 1.5), not one of three (mean 0.84)."""
    longer = [*ROWS[:5], (1.0, 1.0, -2.0, 0.02, 1), (1.0, 1.0, -2.0, 0.02, 1), ROWS[-1]]
    shape = overclip_shape(*ratios_of(longer), tokens_of(longer), CLIP)
    assert shape["high_entropy_answer_share"] == 0.0


def test_answer_metrics_by_hand():
    # mean entropies 0.5083, 1.5, 1.75, 0.1; the second is punished, the third rewarded
    assert answer_metrics(tokens_of(ROWS)) == {
        "answers/entropy_histogram": [0, 0, 0, 1, 1, 2, 0, 0],
        "answers/high_entropy_share": 1 / 2,
        "answers/high_entropy_positive_share": 1 / 2,
    }


def test_log_ratio_std_by_hand():
    before = torch.tensor([-1.0, -2.0, -3.0, 7.0])
    pair = LogprobPair(before=before, after=before + torch.tensor([0.1, 0.3, 0.2, 99.0]))
    found = log_ratio_std({"fp8": pair, "fp32": pair}, torch.tensor([1, 1, 1, 0]))
    assert found == pytest.approx({f"log_ratio_std_{n}": math.sqrt(0.02 / 3) for n in ("fp8", "fp32")}, rel=1e-6)
    assert log_ratio_std({"fp8": pair}, torch.zeros(4)) == {"log_ratio_std_fp8": 0.0}


def test_group_metrics_by_hand():
    rewards = torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 1.0], [-1.0, -1.0], [0.5, 0.5]])
    assert group_metrics(rewards) == {"reward/all_right_groups_share": 0.4, "reward/all_wrong_groups_share": 0.4}


def test_every_figure_of_a_change_and_the_same_keys_for_the_null_change():
    metrics = ratio_metrics(pairs_of(ROWS), tokens_of(ROWS), CLIP)
    assert metrics["observed/low_share"] == 2 / 5 and metrics["observed/high_share"] == 1 / 3
    log_noise = torch.tensor([math.log(row[0] / row[1]) for row in ROWS[:-1]])
    assert metrics["observed/log_ratio_std_diff"] == pytest.approx(log_noise.std(correction=0).item(), rel=1e-5)
    fp8, bf16 = (torch.tensor([row[i] for row in ROWS[:-1]]).double() for i in (0, 1))
    nmae_ratio = ((fp8 - bf16).abs().sum() / bf16.sum()).item()
    p_fp8, p_bf16 = fp8 * math.exp(-1.0), bf16 * math.exp(-1.5)
    nmae_probability = ((p_fp8 - p_bf16).abs().sum() / p_bf16.sum()).item()
    assert metrics["observed/nmae_ratio"] == pytest.approx(nmae_ratio, rel=1e-5)
    assert metrics["observed/amplification"] == pytest.approx(nmae_ratio / nmae_probability, rel=1e-5)
    null = ratio_metrics(pairs_of(ROWS), tokens_of(ROWS), CLIP, "null")
    assert list(null.values()) == list(metrics.values()) and len(null) == len(metrics)
    assert null["null/matrix_low_both"] == metrics["observed/matrix_low_both"] and "null/log_ratio_std_bf16" in null


def test_nothing_to_share_is_none_and_nan_is_not_hidden():
    calm = [(1.0, 1.0, -1.0, 0.1, 0), (1.0, 1.0, 1.0, 0.1, 1), ROWS[-1]]
    shape = overclip_shape(*ratios_of(calm), tokens_of(calm), CLIP)
    assert {key for key, value in shape.items() if value is None} == {
        "factor",
        "agreement_of_bf16",
        "agreement_of_fp8",
        "low_side_share",
        "high_entropy_answer_share",
    }
    assert answer_metrics(tokens_of(calm))["answers/high_entropy_positive_share"] is None
    broken = [(math.nan, *ROWS[0][1:]), *ROWS[1:]]
    assert set(clip_matrix(*ratios_of(broken), tokens_of(broken), CLIP).values()) == {None}
    assert math.isnan(overclip_shape(*ratios_of(broken), tokens_of(broken), CLIP)["low_side_share"])


def test_without_loss_tokens_nothing_is_counted():
    mask = torch.zeros(len(ROWS), dtype=torch.bool)
    metrics = ratio_metrics(pairs_of(ROWS), tokens_of(ROWS, mask), CLIP) | answer_metrics(tokens_of(ROWS, mask))
    counts = [sum(metrics[f"observed/matrix_{side}_{cell}"]) for side in ("low", "high") for cell in CELLS]
    assert counts == [0] * 8 and metrics["observed/num_clipped_fp8"] == 0.0 and metrics["observed/factor"] is None
    assert metrics["answers/entropy_histogram"] == [0] * 8 and metrics["answers/high_entropy_share"] == 0.0


def arrangements():
    """The same answers: behind padding of junk, in another order, numbered otherwise."""
    generator = torch.Generator().manual_seed(1)
    rows = [
        (float(r), float(r * s), a, float(e), answer)
        for answer, a in enumerate((-1.0, 0.7, -0.3, 1.2, 0.0))
        for r, s, e in zip(
            torch.exp(0.4 * torch.randn(30, generator=generator)),
            torch.exp(0.3 * torch.randn(30, generator=generator)),
            2.0 * torch.rand(30, generator=generator),
            strict=True,
        )
    ]
    junk = (50.0, 0.01, -9.0, 7.0, 1)
    padded, padding = [], []
    for place, row in enumerate(rows):
        padded += [junk, row] if place % 3 == 0 else [row]
        padding += [False, True] if place % 3 == 0 else [True]
    other = sorted(rows, key=lambda row: -row[4])
    renumbered = [(*row[:4], 9 - 2 * row[4]) for row in other]
    whole = torch.ones(len(rows), dtype=torch.bool)
    return [(rows, whole), (padded, torch.tensor(padding)), (other, whole), (renumbered, whole)]


def test_padding_order_and_numbering_change_nothing():
    results = []
    for rows, mask in arrangements():
        tokens = tokens_of(rows, mask)
        results.append(ratio_metrics(pairs_of(rows), tokens, CLIP) | answer_metrics(tokens))
    first = results[0]
    assert first["observed/num_clipped_fp8"] > first["observed/num_clipped_both"] > 0
    assert 0.0 < first["answers/high_entropy_share"] < 1.0
    for other in results[1:]:
        for key, value in first.items():
            expected = value if isinstance(value, list) else pytest.approx(value, rel=1e-10)
            assert other[key] == expected, key


def test_observed_steps():
    assert [step for step in range(10) if ObservatoryConfig(interval=4).due(step)] == [3, 7]
    assert not any(ObservatoryConfig(interval=0).due(step) for step in range(10))
    with pytest.raises(ValueError, match="at least 0"):
        ObservatoryConfig(interval=-1)
