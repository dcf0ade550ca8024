"""What is shown while completions are sampled, and at the end."""

import io
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from octavo.generate import meter
from octavo.generate.meter import Meter
from octavo.trainer.metrics import Display


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test sets."""
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr(meter.time, "perf_counter", lambda: now.s)
    return now


def watched(terminal):
    engine = SimpleNamespace(num_sampled=0, num_prefilled=0, prefill_s=0.0)
    shown = io.StringIO()
    display = Display(Console(file=shown, force_terminal=terminal, width=150, highlight=False, soft_wrap=True))
    return Meter(engine, display, 2000), engine, shown


def test_without_a_terminal_a_line_now_and_then(clock):
    found, engine, shown = watched(terminal=False)
    with found.running() as advance:
        for seconds in (4.0, 9.9, 10.0, 19.0, 20.5):
            clock.s, engine.num_sampled = 100.0 + seconds, int(1000 * seconds)
            advance(300)
    assert shown.getvalue().splitlines() == [
        "900 of 2,000 completions, 10,000 tokens, 1,000 tok/s",
        "1,500 of 2,000 completions, 20,500 tokens, 1,000 tok/s",
    ]


def test_on_a_terminal_a_bar_that_leaves_the_output_alone(clock):
    found, engine, shown = watched(terminal=True)
    before = sys.stdout
    with found.running() as advance:
        clock.s, engine.num_sampled = 102.0, 5000
        advance(500)
        assert sys.stdout is before
    assert "500/2000" in shown.getvalue() and "2,500 tok/s" in shown.getvalue()


def test_the_summary_adds_up(clock):
    found, engine, _ = watched(terminal=False)
    with found.running() as advance:
        advance(7)
    clock.s, engine.num_sampled, engine.num_prefilled, engine.prefill_s = 104.0, 1000, 6000, 1.5
    found.num_preemptions = 3
    assert found.summary() == (
        "7 completions, 1,000 tokens in 4.0 s: 250 tok/s; prompts, 6,000 tokens in 1.5 s: 4,000 tok/s; 3 preemptions"
    )
