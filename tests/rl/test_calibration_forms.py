"""Every form of calibration on synthetic ratios: what BF16 would clip is restored; what cannot be is said."""

import dataclasses
import json
import math

import pytest
import torch

from octavo.rl.calibration import (
    Calibration,
    add_up,
    calibrate,
    low_intervals,
    measure,
    statistics_from_metrics,
    to_metrics,
)
from octavo.rl.calibration_config import (
    TOKENS,
    CalibrationConfig,
    ExactCalibration,
    GridCalibration,
    Scale,
    SymmetricCalibration,
)
from octavo.rl.calibration_ladder import NUM_RUNGS, LadderStatistics
from octavo.rl.calibration_statistics import ShadowShares, wilson_interval
from octavo.rl.losses import ClipBounds, ClipConfig

CLIP = ClipConfig()
FORMS = (GridCalibration, ExactCalibration, SymmetricCalibration)
SMALL = {"min_tokens": 1, "min_clipped": 1, "max_shadow_clipped": 1.0}


def tokens(noise, seed=0, num_tokens=100_000, spread=0.1):
    """(r_fp8, r_bf16, w, A, mask): log r_bf16 normal, log r_fp8 with noise added, A standard normal."""
    generator = torch.Generator().manual_seed(seed)
    log_ratio, added, advantages = (torch.randn(num_tokens, generator=generator) for _ in range(3))
    shadow = torch.exp(spread * log_ratio)
    ratio = torch.exp(spread * log_ratio + noise * added)
    return ratio, shadow, torch.ones(num_tokens), advantages, torch.ones(num_tokens, dtype=torch.bool)


def clip_shares(ratio, advantages, bounds):
    """Shares clipped low and high, from the tensors."""
    low = (ratio <= bounds.low)[advantages < 0].double().mean().item()
    return low, (ratio > bounds.high)[advantages > 0].double().mean().item()


def balance(ratio, advantages, bounds):
    """The contribution ratio, from the tensors."""
    size = (ratio * advantages.abs()).double()
    return (
        size[(advantages > 0) & (ratio <= bounds.high)].sum() / size[(advantages < 0) & (ratio > bounds.low)].sum()
    ).item()


def settled(statistics, config, scale=TOKENS):
    """The bounds after calibrating again and again on the same tokens."""
    bounds = config.start_bounds(scale)
    for _ in range(100):
        outcome = calibrate(bounds, statistics, config, scale)
        assert outcome.skipped == ""
        bounds = outcome.bounds
    return bounds


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.2])
def test_the_exact_form_restores_the_clip_share_and_the_balance_of_bf16(noise):
    ratio, shadow, *_, advantages, mask = values = tokens(noise)
    config = ExactCalibration()
    bounds = settled(measure(*values, CLIP, config), config)
    wanted, plain = clip_shares(shadow, advantages, CLIP.bounds())[0], clip_shares(ratio, advantages, CLIP.bounds())[0]
    found = clip_shares(ratio, advantages, bounds)[0]
    target, reached = balance(shadow, advantages, CLIP.bounds()), balance(ratio, advantages, bounds)
    print(
        f"clip share: BF16 {wanted:.4f}, FP8 {plain:.4f}, calibrated {found:.4f}; balance {target:.4f}, {reached:.4f}"
    )
    assert 0.5 < bounds.low < 0.9 and 1.2 < bounds.high < 2.0, "the target lies outside, so nothing was tested"
    assert plain > 1.2 * wanted and found == pytest.approx(wanted, rel=0.02)
    assert reached == pytest.approx(target, rel=0.02)


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.2])
def test_the_grid_form_is_within_a_step_of_the_exact_one(noise):
    values = tokens(noise)
    targets = [
        calibrate(config.start_bounds(), measure(*values, CLIP, config), config).target
        for config in (GridCalibration(), ExactCalibration())
    ]
    print(targets)
    assert targets[0][0] == pytest.approx(targets[1][0], abs=0.02)
    # H* follows L*: at the grid's L* the crossing itself lies elsewhere, so it is held to the best candidate there.
    ratio, shadow, _, advantages, _ = values
    wanted = balance(shadow, advantages, CLIP.bounds())
    errors = {
        high: abs(balance(ratio, advantages, ClipBounds(low=targets[0][0], high=high)) - wanted)
        for high in GridCalibration().high_grid()
    }
    best = min(errors, key=errors.__getitem__)
    assert targets[0][1] == pytest.approx(best, abs=0.02 + 1e-9)


@pytest.mark.parametrize("noise", [0.05, 0.1, 0.2])
def test_the_symmetric_form_clips_as_many_as_bf16_in_its_balance(noise):
    ratio, shadow, _, advantages, _ = values = tokens(noise)
    config = SymmetricCalibration()
    bounds = settled(measure(*values, CLIP, config), config)
    punished, rewarded = int((advantages < 0).sum()), int((advantages > 0).sum())

    def total(of, at):
        low, high = clip_shares(of, advantages, at)
        return low * punished + high * rewarded

    wanted, found = total(shadow, CLIP.bounds()), total(ratio, bounds)
    print(f"tokens clipped: BF16 {wanted:.0f}, FP8 {total(ratio, CLIP.bounds()):.0f}, calibrated {found:.0f}")
    assert total(ratio, CLIP.bounds()) > 1.2 * wanted and found == pytest.approx(wanted, rel=0.02)
    assert balance(ratio, advantages, bounds) == pytest.approx(balance(shadow, advantages, CLIP.bounds()), rel=0.02)


def by_search(values, form):
    """Targets by trying every token's ratio, from the definition: none of the rungs."""
    ratio, shadow, _, advantages, _ = (x.double() for x in values)
    lows, highs = ratio[advantages < 0].sort().values, ratio[advantages > 0].sort().values
    num_low = int((shadow <= 0.8)[advantages < 0].sum())
    num_high = int((shadow > 1.28)[advantages > 0].sum())
    wanted = balance(shadow, advantages, CLIP.bounds())

    def off(low, high):
        size = ratio * advantages.abs()
        positive = size[(advantages > 0) & (ratio <= high)].sum()
        return abs(positive - wanted * size[(advantages < 0) & (ratio > low)].sum()).item()

    if form is ExactCalibration:
        low = lows[num_low - 1]
        return low.item(), min(highs.tolist(), key=lambda high: off(low, high))
    pairs = [
        (lows[num_low + k - 1].item(), highs[len(highs) - num_high + k - 1].item())
        for k in range(1 - num_low, num_high + 1)
    ]
    return min(pairs, key=lambda pair: off(*pair))


@pytest.mark.parametrize("form", [ExactCalibration, SymmetricCalibration])
@pytest.mark.parametrize("seed", range(4))
def test_forms_without_a_grid_equal_a_search_over_every_token(form, seed):
    values = tokens(0.1, seed=seed, num_tokens=3000)
    # Wide ranges, so that no target is clamped, and with them rungs that are few ratios wide.
    config = form(**SMALL, low_min=0.3, low_max=1.0, high_min=1.0, high_max=2.5, start_high=1.8)
    target = calibrate(config.start_bounds(), measure(*values, CLIP, config), config).target
    wanted = by_search(values, form)
    print(target, wanted)
    assert 0 <= target[0] - wanted[0] <= 0.7 / NUM_RUNGS + 1e-9
    # H is at the token whose contribution crosses, or just below the next one: the same tokens are kept.
    kept, kept_wanted = ((values[0][values[3] > 0] <= high + 1e-9).sum() for high in (target[1], wanted[1]))
    assert abs(int(kept) - int(kept_wanted)) <= 1


def test_exact_by_hand():
    # Two of five punished tokens are clipped by BF16, so L* is the second smallest FP8 ratio, 0.7: 0.9 + 1 + 1 = 2.9 is
    # kept. BF16 keeps 1.2 + 1 of A > 0 and 0.9 + 1 + 1 of A < 0, so rewarded ones should contribute 2.2: 1.1 + 1.25.
    rows = [
        (0.6, 0.7, -1.0),
        (0.7, 0.7, -1.0),
        (0.9, 0.9, -1.0),
        (1.0, 1.0, -1.0),
        (1.0, 1.0, -1.0),
        (1.1, 1.0, 1.0),
        (1.25, 1.2, 1.0),
        (1.5, 1.3, 1.0),
        (3.0, 2.0, 1.0),
    ]
    ratio, shadow, advantages = torch.tensor(rows).T.contiguous()
    config = ExactCalibration(**SMALL)
    statistics = measure(ratio, shadow, torch.ones(9), advantages, torch.ones(9), CLIP, config)
    low, high = calibrate(config.start_bounds(), statistics, config).target
    assert 0.7 <= low <= 0.7 + 0.4 / NUM_RUNGS and 1.25 <= high <= 1.25 + 0.8 / NUM_RUNGS
    assert statistics.low_rungs[0] < statistics.low_rungs[1] and statistics.low_rungs[-1] == NUM_RUNGS + 1
    assert statistics.shadow_clipped_high == 2


@pytest.mark.parametrize("form", FORMS)
def test_targets_outside_the_intervals_end_at_their_ends(form):
    ratio, shadow, ones, advantages, mask = tokens(0.02, num_tokens=20_000)
    config = form()
    for changed, end in ((ratio.pow(20), 0.5), (ratio.pow(0.05), 0.9)):
        if form is GridCalibration and end == 0.9:
            continue  # at every candidate FP8 clips nothing, and ties go to the present bound
        statistics = measure(changed, shadow, ones, advantages, mask, CLIP, config)
        target = calibrate(config.start_bounds(), statistics, config).target
        assert target[0] == end and 1.2 <= target[1] <= 2.0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "case, reason",
    [
        ("all positive", "0 negative-advantage tokens"),
        ("all negative", "0 positive-advantage tokens"),
        ("all equal", "0 positive-advantage tokens"),
        ("empty", "0 positive-advantage tokens"),
        ("one NaN", "not finite, the first nan"),
        ("BF16 ran away", "BF16 itself clips"),
    ],
)
def test_degenerate_batches_leave_the_bounds_alone_and_say_why(form, case, reason):
    ratio, shadow, ones, advantages, mask = tokens(0.1, num_tokens=20_000)
    if case == "all positive":
        advantages = advantages.abs() + 0.1
    elif case == "all negative":
        advantages = -advantages.abs() - 0.1
    elif case == "all equal":
        advantages = torch.zeros_like(advantages)
    elif case == "empty":
        mask = torch.zeros_like(mask)
    elif case == "one NaN":
        ratio[7] = math.nan
    else:
        shadow = shadow.pow(40)
    config, bounds = form(), ClipBounds(low=0.61, high=1.77)
    statistics = measure(ratio, shadow, ones, advantages, mask, CLIP, config)
    outcome = calibrate(bounds, statistics, config)
    assert outcome == Calibration(bounds=bounds, target=None, skipped=outcome.skipped)
    assert reason in outcome.skipped
    record = json.loads(json.dumps(to_metrics(bounds, statistics, outcome)))  # a NaN survives too
    assert calibrate(*statistics_from_metrics(record, config), config) == outcome


@pytest.mark.parametrize("form", [ExactCalibration, SymmetricCalibration])
def test_parts_add_up_and_metrics_give_the_same_bounds(form):
    values, config = tokens(0.1, num_tokens=20_000), form()
    whole = measure(*values, CLIP, config)
    edges = ((0, 1), (1, 9000), (9000, 9000), (9000, 20_000))
    parts = [measure(*(x[start:stop] for x in values), CLIP, config) for start, stop in edges]
    together = add_up(parts)
    for field in dataclasses.fields(LadderStatistics):
        mine, theirs = getattr(together, field.name), getattr(whole, field.name)
        assert mine == pytest.approx(theirs, rel=1e-12), field.name
    before = ClipBounds(low=1 / 1.7, high=1.7)
    outcome = calibrate(before, whole, config)
    record = json.loads(json.dumps(to_metrics(before, whole, outcome)))
    assert statistics_from_metrics(record, config) == (before, whole)
    assert calibrate(*statistics_from_metrics(record, config), config) == outcome and outcome.skipped == ""


def test_a_form_refuses_the_statistics_of_another():
    statistics = measure(*tokens(0.1, num_tokens=100), CLIP, GridCalibration())
    with pytest.raises(ValueError, match="ExactCalibration, LadderStatistics; got GridStatistics"):
        calibrate(ClipBounds(low=0.6, high=1.8), statistics, ExactCalibration())


def test_the_symmetric_form_asks_for_clipped_tokens_on_both_sides():
    ratio, shadow, ones, advantages, mask = tokens(0.1, num_tokens=20_000)
    shadow = torch.where(advantages > 0, shadow.clamp(max=1.1), shadow)
    config = SymmetricCalibration()
    statistics = measure(ratio, shadow, ones, advantages, mask, CLIP, config)
    outcome = calibrate(config.start_bounds(), statistics, config)
    assert outcome.skipped.startswith("BF16 clips 0 of") and "positive-advantage" in outcome.skipped


def test_a_cap_alone_caps_the_share_that_bf16_does():
    ratio, shadow, ones, advantages, mask = tokens(0.1, num_tokens=50_000)
    config, scale = SymmetricCalibration(), Scale(low=None, high=1.0)
    plain = ClipConfig(clip_low=0.0, clip_high=0.2)
    statistics = measure(ratio, shadow, ones, advantages.abs(), mask, plain, config, scale)
    bounds = settled(statistics, config, scale)
    assert bounds.low == 0.0
    assert (ratio > bounds.high).sum() == pytest.approx(int((shadow > 1.2).sum()), rel=0.02)


@pytest.mark.parametrize("form", FORMS)
def test_intervals_scale_with_the_offsets_of_a_sequence_ratio(form):
    # The same ratios drawn together a thousandfold: targets, limits and starts are drawn together alike.
    config, scale, factor = form(), Scale(low=1e-3, high=2e-3), 1e-3
    ratio, shadow, ones, advantages, mask = (x.double() if x.is_floating_point() else x for x in tokens(0.1))
    wanted = calibrate(config.start_bounds(), measure(ratio, shadow, ones, advantages, mask, CLIP, config), config)
    near = torch.where(advantages < 0, 1 + (ratio - 1) * factor, 1 + (ratio - 1) * 2e-3)
    near_shadow = torch.where(advantages < 0, 1 + (shadow - 1) * factor, 1 + (shadow - 1) * 2e-3)
    # Weights keep each contribution what it was, so that the balance is the same.
    values = (near, near_shadow, ratio / near, advantages, mask)
    clip = ClipConfig(clip_low=0.2e-3, clip_high=0.28 * 2e-3)
    start = config.start_bounds(scale)
    assert (start.low, start.high) == pytest.approx((1 - 0.4e-3, 1 + 1.6e-3), abs=1e-12)
    found = calibrate(start, measure(*values, clip, config, scale), config, scale)
    assert (found.target[0] - 1) / 1e-3 == pytest.approx(wanted.target[0] - 1, abs=1e-3)
    assert (found.bounds.low - 1) / 1e-3 == pytest.approx(wanted.bounds.low - 1, abs=1e-3)
    high = (found.target[1] - 1) / 2e-3
    assert high == pytest.approx(wanted.target[1] - 1, abs=0.04), "r_bf16 contributes a little otherwise"


def test_wilson_interval_by_hand():
    # z = 1.96: centre (0.1 + 3.84 / 200) / 1.0384 = 0.1148, half 1.96 sqrt(9e-4 + 9.6e-5) / 1.0384 = 0.0596.
    low, high = wilson_interval(10, 100, 0.95)
    assert (low, high) == pytest.approx((0.0552, 0.1744), abs=1e-4)
    assert wilson_interval(0, 50, 0.95)[0] == 0.0 and wilson_interval(50, 50, 0.95)[1] == 1.0


@pytest.mark.parametrize("form", [GridCalibration, ExactCalibration])
def test_intervals_hold_what_all_tokens_give(form):
    # 200 samples of 4,000 tokens: alpha_low and L* of the whole are in their 90 % intervals at least that often.
    config = form(confidence=0.9, **SMALL)
    ratio, shadow, ones, advantages, mask = tokens(0.2, num_tokens=800_000)
    whole = measure(ratio, shadow, ones, advantages, mask, CLIP, config)
    alpha, low = whole.shadow_clipped_low / whole.num_negative, calibrate(ClipBounds(low=0.6, high=1.8), whole, config)
    held, step = torch.zeros(2), 0.02 if form is GridCalibration else 0.0
    for start in range(0, 800_000, 4000):
        part = [x[start : start + 4000] for x in (ratio, shadow, ones, advantages, mask)]
        share, bound = low_intervals(measure(*part, CLIP, config), config)
        held += torch.tensor([share[0] <= alpha <= share[1], bound[0] - step <= low.target[0] <= bound[1] + step])
    print(f"{form.__name__}: alpha_low held {held[0] / 200:.3f}, L* held {held[1] / 200:.3f}")
    assert 0.84 <= held[0] / 200 <= 0.96 and held[1] / 200 >= 0.9


@pytest.mark.parametrize("form", FORMS)
def test_shares_are_carried_to_other_ratios(form):
    config: CalibrationConfig = form(**SMALL)
    values, bounds = tokens(0.1, num_tokens=20_000), ClipBounds(low=0.7, high=1.5)
    statistics = measure(*values, CLIP, config)
    ratio, _, *rest = tokens(0.1, num_tokens=20_000)
    blind = measure(ratio, torch.ones_like(ratio), *rest, CLIP, config)  # no shadow: it clips nothing
    carried = ShadowShares.of(statistics).carried_to(blind)
    assert blind.shadow_clipped_low == 0 and carried.shadow_clipped_low == pytest.approx(statistics.shadow_clipped_low)
    assert calibrate(bounds, carried, config).target == pytest.approx(calibrate(bounds, statistics, config).target)
