"""Calibrated clipping against values worked out by hand and against a slow loop over tokens."""

import dataclasses
import json
import math
import re
from fractions import Fraction

import pytest
import torch

from octavo.rl.calibration import (
    Calibration,
    calibrate,
    due,
    measure,
    measured,
    statistics_from_metrics,
    to_metrics,
)
from octavo.rl.calibration_config import EventTrigger, GridCalibration
from octavo.rl.calibration_grid import GridStatistics
from octavo.rl.losses import ClipBounds, ClipConfig

CLIP = ClipConfig(clip_low=0.25, clip_high=0.25)
RANGES = {"low_min": 0.5, "low_max": 0.75, "high_min": 1.25, "high_max": 2.0, "grid_step": 0.25}
MOVES = {"start_low": 0.5, "start_high": 1.5, "max_move_low": 0.0625, "max_move_high": 0.125}
SMALL = GridCalibration(**RANGES, **MOVES, min_tokens=1, min_clipped=1)
"""Candidates 0.5, 0.75 and 1.25, 1.5, 1.75, 2.0: exact in binary, and few enough to work out by hand."""

EXAMPLE = GridStatistics(
    num_positive=40,
    num_negative=50,
    shadow_clipped_low=6,
    shadow_positive=12.0,
    shadow_negative=8.0,
    clipped_low_counts=(4, 7),
    negative_contributions=(10.0, 6.0),
    positive_contributions=(6.0, 8.0, 9.5, 11.0),
)
"""L*: |4 - 6| = 2, |7 - 6| = 1, so 0.75. H*: 12 / 8 = 1.5 is wanted; over 6.0 the candidates have 1, 1.33, 1.58,
1.83, so 1.75."""


def change(**fields):
    return dataclasses.replace(EXAMPLE, **fields)


def slow_measure(tokens, clip, config):
    """The definition, token by token. tokens: list of (r_fp8, r_bf16, w, A, in the loss)."""
    lows = [round(config.low_min + i * config.grid_step, 10) for i in range(len(config.low_grid()))]
    highs = [round(config.high_min + i * config.grid_step, 10) for i in range(len(config.high_grid()))]
    counts = {"num_positive": 0, "num_negative": 0, "shadow_clipped_low": 0}
    sums = {"shadow_positive": 0.0, "shadow_negative": 0.0}
    clipped, negatives, positives = [0] * len(lows), [0.0] * len(lows), [0.0] * len(highs)
    for r_fp8, r_bf16, w, advantage, in_loss in tokens:
        if in_loss and advantage > 0:
            counts["num_positive"] += 1
            if r_bf16 <= 1 + clip.clip_high:
                sums["shadow_positive"] += w * r_bf16 * advantage
            for i, high in enumerate(highs):
                if r_fp8 <= high:
                    positives[i] += w * r_fp8 * advantage
        elif in_loss and advantage < 0:
            counts["num_negative"] += 1
            if r_bf16 <= 1 - clip.clip_low:
                counts["shadow_clipped_low"] += 1
            if r_bf16 >= 1 - clip.clip_low:
                sums["shadow_negative"] += w * r_bf16 * abs(advantage)
            for i, low in enumerate(lows):
                if r_fp8 <= low:
                    clipped[i] += 1
                if r_fp8 >= low:
                    negatives[i] += w * r_fp8 * abs(advantage)
    names = ("clipped_low_counts", "negative_contributions", "positive_contributions")
    grids = dict(zip(names, map(tuple, (clipped, negatives, positives)), strict=True))
    return GridStatistics(**counts, **sums, **grids)


def slow_calibrate(bounds, s, config):
    """The definition with exact fractions. Returns (bounds, target)."""

    def nearest(candidates, errors, present):
        best = None
        for candidate, error in zip(candidates, errors, strict=True):
            distance = round(abs(candidate - present), 10)
            key = (error, distance, abs(candidate - 1))
            if best is None or key < best[0]:
                best = (key, candidate)
        return best[1]

    alpha_low = Fraction(s.shadow_clipped_low, s.num_negative)
    low_errors = [abs(Fraction(count, s.num_negative) - alpha_low) for count in s.clipped_low_counts]
    low = nearest(config.low_grid(), low_errors, bounds.low)
    negative = Fraction(s.negative_contributions[config.low_grid().index(low)])
    wanted = Fraction(s.shadow_positive) / Fraction(s.shadow_negative)
    high_errors = [abs(Fraction(value) / negative - wanted) for value in s.positive_contributions]
    high = nearest(config.high_grid(), high_errors, bounds.high)
    moved = []
    for bound, target, limit in ((bounds.low, low, config.max_move_low), (bounds.high, high, config.max_move_high)):
        half = (target - bound) / 2
        moved.append(bound + (limit if half > limit else -limit if half < -limit else half))
    return ClipBounds(*moved), (low, high)


def random_tokens(seed, num_tokens):
    """Values on a dyadic lattice, so that float64 sums are exact and ratios fall on bounds, 0.5 and 0.75 say."""
    generator = torch.Generator().manual_seed(seed)

    def lattice(values, unit):
        return (values / unit).round() * unit

    def normal():
        return torch.randn(num_tokens, generator=generator, dtype=torch.float64)

    log_ratio = 0.15 * normal()
    shadow_ratio = lattice(log_ratio.exp(), 1 / 64).clamp(min=0)
    ratio = lattice((log_ratio + 0.25 * normal()).exp(), 1 / 64).clamp(min=0)
    weights = lattice((0.2 * normal()).exp().clamp(max=2.0), 1 / 64)
    advantages = lattice(normal(), 1 / 8)  # some are 0
    mask = torch.rand(num_tokens, generator=generator) < 0.9
    return ratio, shadow_ratio, weights, advantages, mask


@pytest.mark.parametrize("config", [GridCalibration(), SMALL], ids=["default", "small"])
@pytest.mark.parametrize("seed", range(5))
def test_random_tokens_equal_the_definition(seed, config):
    tensors = random_tokens(seed, num_tokens=4000)
    config = dataclasses.replace(config, min_tokens=1000, min_clipped=10)
    found = measure(*tensors, CLIP, config)
    wanted = slow_measure(list(zip(*(x.tolist() for x in tensors), strict=True)), CLIP, config)
    assert found == wanted
    assert found.shadow_clipped_low > 40 and found.num_positive + found.num_negative < int(tensors[-1].sum())

    bounds = config.start_bounds()
    for _ in range(30):  # repeated on the same tokens, so that both the limit and the half step are seen
        calibration = calibrate(bounds, found, config)
        assert calibration.skipped == ""
        assert (calibration.bounds, calibration.target) == slow_calibrate(bounds, wanted, config)
        bounds = calibration.bounds
    assert bounds.low == pytest.approx(calibration.target[0], abs=1e-6)
    assert bounds.high == pytest.approx(calibration.target[1], abs=1e-6)


def test_random_statistics_equal_the_definition():
    # Statistics that no tokens would give, with many ties: targets all over the grids.
    generator = torch.Generator().manual_seed(0)
    config, targets = dataclasses.replace(GridCalibration(), min_tokens=1, min_clipped=0), set()

    def numbers(count, smallest, largest):
        return tuple(torch.randint(smallest, largest, (count,), generator=generator).tolist())

    for _ in range(300):
        statistics = GridStatistics(
            num_positive=64,
            num_negative=64,
            shadow_clipped_low=numbers(1, 0, 8)[0],
            shadow_positive=float(numbers(1, 0, 16)[0]),
            shadow_negative=4.0,
            clipped_low_counts=numbers(21, 0, 8),
            negative_contributions=tuple(2.0**k for k in numbers(21, 0, 4)),
            positive_contributions=tuple(float(k) for k in numbers(41, 0, 16)),
        )
        low, high = numbers(1, 50, 91)[0] / 100, numbers(1, 120, 201)[0] / 100
        calibration = calibrate(ClipBounds(low=low, high=high), statistics, config)
        wanted = slow_calibrate(ClipBounds(low=low, high=high), statistics, config)
        assert (calibration.bounds, calibration.target) == wanted
        targets.add(calibration.target)
    assert len(targets) > 100


def test_measure_by_hand():
    # In fp32, as in training. Bounds of the shadow: 0.75 and 1.25, themselves kept and, if low, clipped as well.
    #      r_fp8  r_bf16   w     A
    rows = [
        (0.50, 0.75, 1.0, -1.0),  # shadow clipped and kept 0.75; fp8 at L 0.5: clipped and kept 0.5
        (0.75, 0.50, 2.0, -2.0),  # shadow clipped; fp8 clipped at 0.75, kept at both: 2 * 0.75 * 2 = 3
        (1.50, 1.00, 0.5, -4.0),  # shadow kept 0.5 * 1 * 4 = 2; fp8 kept 0.5 * 1.5 * 4 = 3
        (1.25, 1.25, 1.0, 1.0),  # shadow kept 1.25; fp8 kept from H 1.25 on: 1.25
        (1.75, 1.50, 1.0, 2.0),  # shadow dropped; fp8 kept from H 1.75 on: 3.5
        (3.00, 0.50, 2.0, 2.0),  # shadow kept 2 * 0.5 * 2 = 2; fp8 dropped everywhere
        (0.10, 0.10, 1.0, 0.0),  # no advantage
    ]
    ratio, shadow_ratio, weights, advantages = torch.tensor([*rows, (math.nan,) * 4]).T.contiguous()
    mask = torch.tensor([1, 1, 1, 1, 1, 1, 1, 0])
    assert measure(ratio, shadow_ratio, weights, advantages, mask, CLIP, SMALL) == GridStatistics(
        num_positive=3,
        num_negative=3,
        shadow_clipped_low=2,
        shadow_positive=1.25 + 2.0,
        shadow_negative=0.75 + 2.0,
        clipped_low_counts=(1, 2),
        negative_contributions=(0.5 + 3.0 + 3.0, 3.0 + 3.0),
        positive_contributions=(1.25, 1.25, 1.25 + 3.5, 1.25 + 3.5),
    )


def test_statistics_of_parts_add_up_to_those_of_the_whole():
    tensors = random_tokens(seed=7, num_tokens=1000)
    whole = measure(*tensors, CLIP, SMALL)
    parts = [measure(*(x[start:stop] for x in tensors), CLIP, SMALL) for start, stop in ((0, 300), (300, 1000))]
    assert parts[0] + parts[1] == whole and parts[0] != whole


def test_statistics_of_two_grids_do_not_add_up():
    tensors = random_tokens(seed=7, num_tokens=10)
    with pytest.raises(ValueError, match="clipped_low_counts .* one grid; got 2 and 21 values"):
        measure(*tensors, CLIP, SMALL) + measure(*tensors, CLIP, GridCalibration())
    with pytest.raises(ValueError, match="grids of config, 21 low and 41 high"):
        calibrate(GridCalibration().start_bounds(), EXAMPLE, GridCalibration())


def test_statistics_are_plain_numbers():
    statistics = measure(*random_tokens(seed=7, num_tokens=10), CLIP, SMALL)
    for field in dataclasses.fields(statistics):
        value = getattr(statistics, field.name)
        kinds = {type(item) for item in value} if isinstance(value, tuple) else {type(value)}
        assert kinds == ({int} if field.name.startswith(("num", "shadow_cl", "clipped")) else {float}), field.name


def test_bounds_move_half_of_the_way():
    # Low 0.6875 -> 0.75: half of the way is 0.03125. High 1.5625 -> 1.75: half is 0.09375. Both below the limits.
    calibration = calibrate(ClipBounds(low=0.6875, high=1.5625), EXAMPLE, SMALL)
    assert calibration == Calibration(bounds=ClipBounds(low=0.71875, high=1.65625), target=(0.75, 1.75), skipped="")


def test_moves_are_limited_upwards_and_downwards():
    # Low 0.5 -> 0.75: half is 0.125, the limit 0.0625. High 1.25 -> 1.75: half is 0.25, the limit 0.125.
    assert calibrate(ClipBounds(low=0.5, high=1.25), EXAMPLE, SMALL).bounds == ClipBounds(low=0.5625, high=1.375)
    # Counts (6, 9): L* = 0.5. Over 10.0 contributions of 15 for H = 1.25 match 1.5: H* = 1.25.
    down = change(clipped_low_counts=(6, 9), positive_contributions=(15.0, 16.0, 17.0, 18.0))
    calibration = calibrate(ClipBounds(low=0.75, high=2.0), down, SMALL)
    assert calibration.target == (0.5, 1.25)
    assert calibration.bounds == ClipBounds(low=0.6875, high=1.875)


def test_the_high_target_uses_contributions_at_the_low_target():
    # With L* = 0.75 the ratios are those over 6.0. Over 10.0 they would be 0.6, 0.8, 0.95, 1.1, and 2.0 would win.
    assert calibrate(ClipBounds(low=0.5, high=1.5), EXAMPLE, SMALL).target == (0.75, 1.75)


def test_targets_at_the_ends_of_the_range_hold_bounds_inside_it():
    # FP8 clips too much and too little at every candidate, and no H brings enough or few enough contributions.
    too_much = change(clipped_low_counts=(20, 30), positive_contributions=(1.0, 2.0, 3.0, 4.0))
    too_little = change(clipped_low_counts=(1, 2), positive_contributions=(50.0, 60.0, 70.0, 80.0))
    for statistics, wanted in ((too_much, (0.5, 2.0)), (too_little, (0.75, 1.25))):
        bounds = ClipBounds(low=0.625, high=1.5)
        for _ in range(80):
            calibration = calibrate(bounds, statistics, SMALL)
            bounds = calibration.bounds
            assert calibration.target == wanted
            assert 0.5 <= bounds.low <= 0.75 and 1.25 <= bounds.high <= 2.0
        assert (bounds.low, bounds.high) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("present, nearest", [(0.5, 0.5), (0.55, 0.5), (0.7, 0.75), (0.75, 0.75)])
def test_ties_of_the_low_target_go_to_the_nearest(present, nearest):
    tied = change(clipped_low_counts=(5, 7))  # |5 - 6| = |7 - 6|
    assert calibrate(ClipBounds(low=present, high=1.5), tied, SMALL).target[0] == nearest


@pytest.mark.parametrize("present, nearest", [(1.25, 1.25), (1.4, 1.5), (1.7, 1.75), (1.9, 1.75)])
def test_ties_of_the_high_target_go_to_the_nearest(present, nearest):
    # Over 6.0 with 1.5 wanted: 9 is exact. Three candidates are, as when no token has a ratio between them.
    tied = change(positive_contributions=(9.0, 9.0, 9.0, 12.0))
    assert calibrate(ClipBounds(low=0.5, high=present), tied, SMALL).target[1] == nearest


def test_equally_near_ties_go_to_the_tighter_bound():
    tied = change(clipped_low_counts=(6, 6), negative_contributions=(6.0, 6.0), positive_contributions=(9.0,) * 4)
    assert calibrate(ClipBounds(low=0.625, high=1.625), tied, SMALL).target == (0.75, 1.5)
    # On the default grid 0.7 - 0.68 is smaller than 0.72 - 0.7 by a rounding; the distances are the same all the same.
    config = GridCalibration(min_tokens=1, min_clipped=1)
    lows, highs = config.low_grid(), config.high_grid()
    assert 0.7 - 0.68 < 0.72 - 0.7
    tied = change(
        clipped_low_counts=tuple(6 if low in (0.68, 0.72) else 20 for low in lows),
        negative_contributions=(6.0,) * 21,
        positive_contributions=tuple(9.0 if high in (1.78, 1.82) else 50.0 for high in highs),
    )
    assert calibrate(ClipBounds(low=0.7, high=1.8), tied, config).target == (0.72, 1.78)


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({"num_positive": 19}, "19 positive-advantage tokens, min_tokens is 20"),
        ({"num_negative": 19}, "19 negative-advantage tokens, min_tokens is 20"),
        ({"shadow_clipped_low": 4}, "BF16 clips 4 of 50 negative-advantage tokens, min_clipped is 5"),
        ({"shadow_negative": 0.0}, "denominator of 0: .* r_bf16 >= 1 - clip_low, of 50"),
        ({"negative_contributions": (10.0, 0.0)}, "denominator of 0: .* r_fp8 >= 0.75, of 50"),
        ({"shadow_positive": math.nan}, "shadow_positive has 1 of 1 sums that are not finite, the first nan"),
        ({"shadow_negative": math.inf}, "shadow_negative has 1 of 1 .* the first inf"),
        ({"negative_contributions": (math.inf, 6.0)}, "negative_contributions has 1 of 2 .* the first inf"),
        ({"positive_contributions": (1.0, math.nan, 2.0, math.nan)}, "positive_contributions has 2 of 4 "),
    ],
)
def test_skips_leave_the_bounds_alone_and_say_why(fields, reason):
    config = dataclasses.replace(SMALL, min_tokens=20, min_clipped=5)
    bounds = ClipBounds(low=0.5625, high=1.3)
    enough = change(num_positive=20, num_negative=20, shadow_clipped_low=5)  # the thresholds themselves
    assert calibrate(bounds, EXAMPLE, config).skipped == calibrate(bounds, enough, config).skipped == ""
    calibration = calibrate(bounds, change(**fields), config)
    assert calibration.bounds == bounds and calibration.target is None
    assert re.search(reason, calibration.skipped), calibration.skipped


def test_a_denominator_of_zero_at_another_candidate_does_not_matter():
    assert calibrate(SMALL.start_bounds(), change(negative_contributions=(0.0, 6.0)), SMALL).target == (0.75, 1.75)


@pytest.mark.parametrize("position", range(4))
def test_a_nan_in_any_input_is_skipped_and_not_left_out(position):
    tensors = list(random_tokens(seed=3, num_tokens=4000))
    assert calibrate(SMALL.start_bounds(), measure(*tensors, CLIP, SMALL), SMALL).skipped == ""
    loss_token = int(tensors[-1].nonzero()[0])
    tensors[position][loss_token] = math.nan
    calibration = calibrate(SMALL.start_bounds(), measure(*tensors, CLIP, SMALL), SMALL)
    assert "not finite, the first nan" in calibration.skipped


def test_an_infinite_ratio_counts_only_where_it_is_kept():
    ratio, shadow_ratio, weights, advantages, _ = random_tokens(seed=3, num_tokens=4000)
    mask = torch.ones(4000)
    for sign, skipped in ((1, False), (-1, True)):  # above every H for A > 0, but above every L for A < 0
        overflowing = ratio.clone()
        overflowing[int((sign * advantages > 0).nonzero()[0])] = math.inf
        statistics = measure(overflowing, shadow_ratio, weights, advantages, mask, CLIP, SMALL)
        assert bool(calibrate(SMALL.start_bounds(), statistics, SMALL).skipped) == skipped


@pytest.mark.parametrize("num_tokens", [4000, 10])  # the second is skipped
def test_metrics_survive_json_and_give_the_same_bounds_exactly(num_tokens):
    config = GridCalibration()
    tensors = [x.float() if x.is_floating_point() else x for x in random_tokens(seed=11, num_tokens=num_tokens)]
    tensors[0] *= 1.01  # off the lattice: sums with all their digits
    statistics = measure(*tensors, ClipConfig(), config)
    before = ClipBounds(low=1 / 1.7, high=1.7)
    calibration = calibrate(before, statistics, config)
    record = json.loads(json.dumps(to_metrics(before, statistics, calibration) | {"loss/mean": 1.0}))

    restored_before, restored = statistics_from_metrics(record, config)
    assert (restored_before, restored) == (before, statistics)
    assert calibrate(restored_before, restored, config) == calibration
    assert (calibration.skipped == "") == (num_tokens == 4000) == (calibration.bounds != before)
    assert (record["calibration/low"], record["calibration/high"]) == (calibration.bounds.low, calibration.bounds.high)
    assert (record["calibration/target_low"], record["calibration/target_high"]) == (calibration.target or (None, None))
    assert record["calibration/skipped"] == calibration.skipped


def test_metrics_of_another_step_are_refused():
    with pytest.raises(ValueError, match=r"calibration/\{low_before, .*positive_contributions\}; got \['loss/mean'\]"):
        statistics_from_metrics({"loss/mean": 1.0}, SMALL)


def test_default_grids():
    config = GridCalibration()
    assert config.low_grid() == tuple(k / 100 for k in range(50, 91, 2))
    assert config.high_grid() == tuple(k / 100 for k in range(120, 201, 2))
    assert config.start_bounds() == ClipBounds(low=0.6, high=1.8)


def test_schedule():
    config = GridCalibration(interval=5, pooled_steps=2)
    assert [step for step in range(15) if due(step, config)] == [4, 9, 14]
    assert [step for step in range(15) if measured(step, config)] == [3, 4, 8, 9, 13, 14]
    assert [step for step in range(45) if measured(step, GridCalibration())] == [19, 39]
    assert all(measured(step, GridCalibration(interval=3, pooled_steps=3)) for step in range(9))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"interval": 0, "pooled_steps": 1}, "interval is a number of steps"),
        ({"low_min": -0.1}, "low_min=-0.1"),
        ({"low_max": 1.1}, "low_max=1.1"),
        ({"high_min": 0.9}, "high_min=0.9"),
        ({"high_max": 1.0}, "high_max=1.0"),
        ({"high_max": math.inf}, "high_max=inf"),
        ({"start_low": 0.4}, r"start_low lies in \[0.5, 0.9\].*got 0.4"),
        ({"start_high": 2.1}, r"start_high lies in \[1.2, 2.0\].*got 2.1"),
        ({"grid_step": 0.0}, "grid_step is the distance"),
        ({"grid_step": 0.03}, "grid_step must divide low_max - low_min = 0.4; got 0.03.* low_max that fits is 0.89"),
        ({"high_max": 2.01}, "high_max that fits is 2"),
        ({"max_move_low": 0.0}, "max_move_low"),
        ({"max_move_high": math.nan}, "max_move_high"),
        ({"min_tokens": 0}, "min_tokens"),
        ({"min_clipped": -1}, "min_clipped"),
        ({"pooled_steps": 0}, "pooled_steps"),
        ({"pooled_steps": 21}, r"pooled_steps lies in \[1, interval\] = \[1, 20\]; got 21"),
        ({"trigger": EventTrigger(min_interval=21)}, r"min_interval is at most interval=20, .* got 21"),
    ],
)
def test_calibration_config_is_checked(fields, message):
    with pytest.raises(ValueError, match=message):
        GridCalibration(**fields)
