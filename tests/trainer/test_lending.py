"""When a run lends its KV cache's memory, and that neither this nor a stop in between changes a bit of it."""

import gc
import signal
from dataclasses import replace

import pytest
from fake_driver import pretend_driver
from training_runs import resumable, run, same_run, signal_at, tiny_config

from octavo.numerics.recipe import get_recipe
from octavo.rollout.engine import Engine
from octavo.trainer import evaluation, loop, rollout, train
from octavo.trainer import run as training_run
from octavo.trainer.interrupt import Interrupted
from octavo.trainer.metrics import Display, StepClock

NAMES = {"cuMemSetAccess": "take back", "cuMemUnmap": "lend"}


class LendingEngine(Engine):
    def __init__(self, decoder, config, stops):
        super().__init__(decoder, replace(config, lend_memory=True), stops)


@pytest.fixture
def driver(monkeypatch):
    """Engines that lend, which the config allows on a GPU alone."""
    for module in (training_run, evaluation):
        monkeypatch.setattr(module, "Engine", LendingEngine)
    yield from pretend_driver(monkeypatch)


def test_the_cache_is_there_for_sampling_alone(driver, tmp_path, monkeypatch):
    def told(owner, name):
        original = getattr(owner, name)

        def telling(*arguments, **keywords):
            driver.calls.append(name)
            return original(*arguments, **keywords)

        monkeypatch.setattr(owner, name, telling)

    for owner, name in ((train, "evaluate"), (rollout, "sample"), (loop, "annotate"), (loop, "accumulate")):
        told(owner, name)
    run(resumable(tmp_path / "run", trainer__num_steps=3))
    gc.collect()
    wanted = {"evaluate", "sample", "annotate", "accumulate", *NAMES}
    events = [NAMES.get(name, name) for name in driver.calls if name in wanted]
    events = [event for event, before in zip(events, [None, *events], strict=False) if event != before]
    step = ["lend", "annotate", "accumulate"]
    assert events == [
        *["take back", "lend"],  # as the run is loaded
        *["evaluate", "take back", "sample", *step],
        *["sample", "take back", *step, "evaluate", "take back", "lend"],
        *["sample", "take back", *step, "evaluate", "take back", "lend"],
    ]


@pytest.mark.parametrize(
    "owner, name, call",
    [
        (Engine, "_prefill", 3),  # in a rollout, with the memory
        (loop, "annotate", 3),  # in old log-probabilities, without
    ],
)
def test_a_run_that_lends_and_stops_has_the_bits_of_one_that_does_not(owner, name, call, driver, tmp_path, monkeypatch):
    config = resumable(tmp_path / "run", trainer__num_steps=2)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        signal_at(patch, owner, name, call, signal.SIGTERM)
        run(config)
    assert "resuming from" in run(config, resume=True)
    assert "cuMemUnmap" in driver.calls
    monkeypatch.setattr(training_run, "Engine", Engine)
    gc.collect()
    driver.calls.clear()
    run(replace(config, output_dir=str(tmp_path / "plain")))
    assert not driver.calls
    same_run(tmp_path / "run", tmp_path / "plain")


def test_what_an_evaluation_takes_is_looked_at_before_its_cache_is_lent(driver, tmp_path, monkeypatch):
    counted = []

    class Clock(StepClock):
        def _note_peak(self):
            if self._open == ["evaluate"]:
                counted.append((self.uncounted_bytes(), sum(driver.mapped.values())))

    monkeypatch.setattr(train, "StepClock", Clock)
    run(resumable(tmp_path / "run", trainer__num_steps=2))
    ((own, mapped),) = counted
    assert own == mapped > 0


def test_an_evaluation_of_two_precisions_has_one_cache_at_a_time(driver, tmp_path, monkeypatch):
    def telling(engine, *arguments, **keywords):
        found = generate(engine, *arguments, **keywords)
        caches.append((engine.uncounted_bytes(), sum(driver.mapped.values())))
        return found

    caches, generate = [], Engine.generate
    run = training_run.load_run(tiny_config(tmp_path / "run"), Display())
    monkeypatch.setattr(Engine, "generate", telling)
    evaluation.measure(run, compare=get_recipe("bf16"))
    assert len(caches) == 2 and all(own == mapped > 0 for own, mapped in caches)
    run.verifiers.close()


def test_a_rescue_in_bf16_has_the_only_cache(driver, tmp_path):
    first = training_run.load_run(tiny_config(tmp_path / "run"), Display())
    assert first.engine.uncounted_bytes() == 0, "lent while the rest is loaded"
    first.engine.cache.take_back()
    assert first.engine.uncounted_bytes() == sum(driver.mapped.values()) > 0
    rescue = training_run.in_bf16(first)
    assert first.engine.uncounted_bytes() == 0
    assert rescue.engine.uncounted_bytes() == sum(driver.mapped.values()) > 0
    first.verifiers.close()
