"""How often noise alone gives an alarm, and how soon a shift does, for one signal at the default settings.

    python benchmarks/watch.py        writes benchmarks/results/watch.json; a minute on one CPU thread

Series of 600 steps, 200 of each kind. A shift comes at step 100 of 160, in standard deviations of normal noise.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator

from octavo.bench.results import Results, Row
from octavo.trainer.watch import SignalState, WatchConfig

NUM_SERIES, NUM_STEPS = 200, 600


def normal(rng: random.Random) -> Iterator[float]:
    """Independent steps."""
    while True:
        yield rng.gauss(0.0, 1.0)


def student(rng: random.Random) -> Iterator[float]:
    """Student's t with 3 degrees of freedom: heavy tails."""
    while True:
        chi2 = sum(rng.gauss(0.0, 1.0) ** 2 for _ in range(3))
        yield rng.gauss(0.0, 1.0) / math.sqrt(chi2 / 3)


def correlated(rho: float) -> Callable[[random.Random], Iterator[float]]:
    """Each step correlates with the one before by rho."""

    def series(rng: random.Random) -> Iterator[float]:
        value = rng.gauss(0.0, 1.0)
        while True:
            yield value
            value = rho * value + math.sqrt(1.0 - rho**2) * rng.gauss(0.0, 1.0)

    return series


def drifting(rng: random.Random) -> Iterator[float]:
    """A mean that rises by one standard deviation in 30 steps, all the time."""
    for step, value in enumerate(normal(rng)):
        yield value + step / 30


KINDS = {
    "normal": normal,
    "heavy tails": student,
    "correlated 0.5": correlated(0.5),
    "correlated 0.8": correlated(0.8),
    "drifting": drifting,
}


def alarms(kind: Callable[[random.Random], Iterator[float]], number: int) -> int:
    """Alarms in one series."""
    state, noise, config = SignalState(), kind(random.Random(number)), WatchConfig()
    return sum(state.observe(next(noise), 1e-9, step, config) for step in range(NUM_STEPS))


def delay(shift: float, number: int) -> int:
    """Steps from a shift to its alarm, the shifted step itself included; 60 where there is none."""
    state, noise, config = SignalState(), normal(random.Random(number)), WatchConfig()
    for step in range(160):
        risen = state.observe(next(noise) + shift * (step >= 100), 1e-9, step, config)
        if risen and step >= 100:
            return step - 99
    return 60


def main() -> None:
    """Every kind of noise, then every shift."""
    results = Results("watch", "python benchmarks/watch.py")
    for name, kind in KINDS.items():
        rate = 1000 * sum(alarms(kind, number) for number in range(NUM_SERIES)) / (NUM_SERIES * NUM_STEPS)
        results.add(Row(case=f"noise/{name}", metric="alarms", value=rate, unit="per 1000 steps", better="lower"))
    for shift in (3.0, 5.0, 8.0):
        steps = [delay(shift, number) for number in range(NUM_SERIES)]
        note = f"none within 60 steps: {steps.count(60)} of {NUM_SERIES}"
        row = Row(case=f"shift/{shift:g}", metric="delay", value=statistics.median(steps), unit="steps", note=note)
        results.add(row)


if __name__ == "__main__":
    main()
