"""The detector: sums by hand, what gives an alarm and ends it, and how often noise alone does."""

import math
import random

import pytest

from octavo.rl.losses import ClipBounds
from octavo.trainer.progress import Progress
from octavo.trainer.watch import SIGNALS, Alarm, SignalState, WatchConfig, first_onset, observe, watch_metrics

CONFIG = WatchConfig(window=8, warmup=8)
STEADY = [1.0, 3.0, 1.0, 3.0, 1.0, 3.0, 1.0, 3.0]
"""Median 2, median distance 1: a spread of 1.4826."""


def fed(values, floor=1e-9, config=CONFIG):
    """A signal that has seen these values, and whether each gave an alarm."""
    state = SignalState()
    return state, [state.observe(value, floor, step, config) for step, value in enumerate(values)]


def test_the_sum_is_what_the_formula_says():
    state, alarms = fed([*STEADY, 2.0 + 5.0 * 1.4826, 2.0 + 4.5 * 1.4826])
    assert state.total == pytest.approx((5.0 - 2.0) + (4.5 - 2.0)) and state.onset == 8
    assert not any(alarms) and state.healthy == STEADY and len(state.waiting) == 2


def test_one_outlier_however_large_is_no_alarm_and_two_are():
    for value in (1e9, math.inf, math.nan):
        state, alarms = fed([*STEADY, value])
        assert state.total == 6.0 and alarms[-1] is False
        state, alarms = fed([*STEADY, value, value])
        assert alarms[-2:] == [False, True] and state.alarmed


def test_an_alarm_is_given_once_and_ends_at_0():
    state, alarms = fed([*STEADY, *[50.0] * 4, *[2.0] * 3])
    assert sum(alarms) == 1 and state.total == 20.0 - 3 * 2.0 and state.alarmed, (
        "the sum is held at twice the threshold"
    )
    state, alarms = fed([*STEADY, 50.0, 50.0, *[2.0] * 6, 50.0, 50.0])
    assert [step for step, alarm in enumerate(alarms) if alarm] == [9, 17]
    assert state.onset == 16 and 50.0 not in state.healthy


def test_a_level_that_lasts_for_a_window_is_the_new_one():
    state, alarms = fed([*STEADY, *[50.0] * 8, *[50.0] * 8])
    assert sum(alarms) == 1 and state.total == 0.0 and state.healthy == [50.0] * 8


def test_values_of_an_alarm_do_not_become_history():
    state, _ = fed([*STEADY, 50.0, 50.0])
    assert state.healthy == STEADY
    state.forget()
    assert (state.total, state.onset, state.alarmed, state.waiting) == (0.0, None, False, [])
    assert state.observe(50.0, 1e-9, 10, CONFIG) is False and state.total == 6.0


def test_a_steady_signal_is_held_to_its_floor():
    assert fed([2.0] * 8 + [2.19] * 4, floor=0.1)[0].total == 0.0
    assert fed([2.0] * 8 + [2.5], floor=0.1)[0].total == pytest.approx(3.0)


HEALTHY = {
    "reward/mean": 0.5,
    "overclip/low_share": 0.01,
    "overclip/high_share": 0.0,
    "policy/entropy_above_1_share": 0.05,
    "mismatch/mean_abs_logprob_diff": 0.0,
    "loss/clip_fraction": 0.01,
    "optimizer/grad_norm": 0.3,
    "policy/ratio_std": 0.1,
    "watch/weight_change": 1e-4,
    "calibration/skipped": "",
    "calibration/low": 0.7,
    "calibration/low_before": 0.7,
    "calibration/high": 1.5,
    "calibration/high_before": 1.5,
}


@pytest.mark.parametrize(
    "name, key, value",
    [
        ("bound drift", "calibration/high", 1.7),
        ("over-clip share", "overclip/low_share", 0.5),
        ("high-entropy share", "policy/entropy_above_1_share", 0.6),
        ("mismatch", "mismatch/mean_abs_logprob_diff", 0.05),
        ("clip share", "loss/clip_fraction", 0.5),
        ("gradient norm", "optimizer/grad_norm", 3.0),
        ("ratio std", "policy/ratio_std", 2.0),
        ("weight norm", "watch/weight_change", 5e-3),
        ("reward", "reward/mean", 0.1),
    ],
)
def test_each_signal_gives_its_alarm_and_only_when_it_is_bad(name, key, value):
    assert set(SIGNALS) == {row[0] for row in _marks().args[1]}
    good = {"reward/mean": 0.9}.get(key, HEALTHY.get(f"{key}_before", 0.0 if key != "optimizer/grad_norm" else 1e-3))
    for metric, expected in ((value, [name]), (good, [])):
        states, alarms = {}, []
        for step in range(12):
            metrics = {**HEALTHY, **({key: metric} if step >= 10 else {})}
            alarms.append(observe(states, metrics, step, CONFIG))
        found = [alarm for alarm in alarms if alarm]
        assert [alarm.signals for alarm in found] == ([(name,)] if expected else [])
        if expected:
            assert found[0] == Alarm(step=11, signals=(name,), onset=10) and first_onset(states) == 10
            assert watch_metrics(states, CONFIG)["watch/signal"] == name
            assert watch_metrics(states, CONFIG)["watch/sum"] >= 1.0


def _marks():
    return test_each_signal_gives_its_alarm_and_only_when_it_is_bad.pytestmark[0]


def test_what_a_step_did_not_measure_is_passed_over():
    states = {}
    for step in range(20):
        observe(states, {"reward/mean": 0.5, "calibration/skipped": "too few"}, step, CONFIG)
    assert list(states) == ["reward"] and watch_metrics(states, CONFIG) == {"watch/sum": 0.0, "watch/signal": ""}


def test_the_state_survives_json():
    progress = Progress(bounds=ClipBounds(low=0.8, high=1.2))
    for step in range(10):
        observe(progress.signals, {**HEALTHY, "reward/mean": 0.5 - 0.2 * (step > 8)}, step, CONFIG)
    assert Progress.from_json(progress.to_json()) == progress and progress.sound_steps == 9


def false_alarms(draw, num_series=200, num_steps=300):
    """Alarms in 1,000 steps of series of noise, at the default settings."""
    config, alarms = WatchConfig(), 0
    for number in range(num_series):
        state, noise = SignalState(), draw(random.Random(number))
        alarms += sum(state.observe(next(noise), 1e-9, step, config) for step in range(num_steps))
    return 1000 * alarms / (num_series * num_steps)


def normal(rng):
    while True:
        yield rng.gauss(0.0, 1.0)


def correlated(rng, rho=0.5):
    value = 0.0
    while True:
        yield value
        value = rho * value + math.sqrt(1.0 - rho**2) * rng.gauss(0.0, 1.0)


@pytest.mark.parametrize("draw, most", [(normal, 0.05), (correlated, 0.3)])
def test_noise_alone_gives_the_alarms_that_the_documents_say(draw, most):
    assert false_alarms(draw, num_series=60) <= most


def test_a_shift_is_seen_in_the_steps_that_the_documents_say():
    delays = []
    for number in range(40):
        rng, state, config = random.Random(number), SignalState(), WatchConfig()
        for step in range(100):
            if state.observe(rng.gauss(5.0 * (step >= 60), 1.0), 1e-9, step, config) and step >= 60:
                delays.append(step - 59)
                break
    assert len(delays) == 40 and sum(delays) / len(delays) <= 5.0


@pytest.mark.parametrize(
    "keys, message",
    [
        ({"window": 7, "warmup": 7}, "window is a number of values, at least 8; got 7"),
        ({"warmup": 33}, r"warmup lies in \[8, window\] = \[8, 32\]; got 33"),
        ({"slack": 8.0}, "slack lies between 0 and 8"),
        ({"threshold": 5.9}, "threshold is at least 8 - slack = 6"),
        ({"max_rollbacks": 0}, "max_rollbacks must be at least 1; got 0"),
        ({"threshold": math.nan}, "threshold is at least"),
    ],
)
def test_settings_that_cannot_work_are_refused(keys, message):
    with pytest.raises(ValueError, match=message):
        WatchConfig(**keys)
