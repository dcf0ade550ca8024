"""Tables of `octavo bench` for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from octavo.bench.gemm import Gain, verdict
from octavo.bench.rollout import DecodeSpeed
from octavo.bench.step import CALIBRATION_INTERVAL, PHASES, StepTime, calibration_share, step_seconds
from octavo.bench.train import TrainSpeed


def show_gains(gains: Sequence[Gain], recipe: str, console: Console) -> None:
    """Each linear's times and gain, the verdict, and the kernels that ran."""
    table = Table("linear", "work", "tokens", "BF16 us", f"{recipe} us", "gain")
    for column in table.columns[2:]:
        column.justify = "right"
    for gain in gains:
        times = f"{gain.bf16_us:,.1f}", f"{gain.recipe_us:,.1f}"
        table.add_row(gain.linear, gain.work, f"{gain.tokens:,}", *times, f"{gain.speedup:.2f}x")
    console.print(table)
    for line in verdict(gains):
        console.print(line)
    console.print("kernels that ran (by the profiler):")
    for work in dict.fromkeys(gain.work for gain in gains):
        names = dict.fromkeys(name for gain in gains if gain.work == work for name in gain.kernels)
        console.print(f"  {work}: {', '.join(names)}")


def show_decode(speeds: Sequence[DecodeSpeed], console: Console) -> None:
    """Each decode step's time beside its bound."""
    table = Table("sequences", "context", "ms a step", "bound ms", "of the bound", "tok/s")
    for column in table.columns:
        column.justify = "right"
    for s in speeds:
        shown = f"{s.step_ms:.2f}", f"{s.bound_ms:.2f}", f"{s.bandwidth_share:.0%}", f"{s.tok_s:,.0f}"
        table.add_row(f"{s.batch:,}", f"{s.context:,}", *shown)
    console.print(table)


def show_training(speeds: Sequence[TrainSpeed], console: Console) -> None:
    """Each batch's step, and the other passes over it."""
    columns = "tokens", "sequences of", "tok/s", "TFLOP/s", "ms a step", "reference", "shadow", "weight update", "GiB"
    table = Table(*columns)
    for column in table.columns:
        column.justify = "right"
    for s in speeds:
        times = (f"{ms:.1f}" for ms in (s.step_ms, s.reference_ms, s.shadow_ms, s.weight_update_ms))
        speed = f"{s.tok_s:,.0f}", f"{s.tflop_s:.0f}"
        table.add_row(f"{s.tokens:,}", f"{s.sequence_tokens:,}", *speed, *times, f"{s.peak_gib:.1f}")
    console.print(table)
    for formats in dict.fromkeys(s.formats for s in speeds):
        tokens = ", ".join(f"{s.tokens:,}" for s in speeds if s.formats == formats)
        console.print(f"{formats} with {tokens} tokens")


def show_steps(steps: Sequence[StepTime], console: Console) -> None:
    """Seconds of each phase, measured / predicted, for each length of completions; of the step, with its part of the
    shadow's."""
    lengths = [f"{step.work.completion_tokens:,} tokens" for step in steps]
    table = Table("seconds, measured / predicted", *lengths)
    for column in table.columns[1:]:
        column.justify = "right"
    for phase in PHASES:
        name = f"shadow, once in {CALIBRATION_INTERVAL} steps" if phase == "shadow" else phase
        table.add_row(name, *(f"{step.measured[phase]:.2f} / {step.predicted[phase]:.2f}" for step in steps))
    table.add_row("step", *(f"{step.seconds:.2f} / {step_seconds(step.predicted):.2f}" for step in steps))
    shares = (f"{step.calibration_share:.2%} / {calibration_share(step.predicted):.2%}" for step in steps)
    table.add_row("shadow's share of it", *shares)
    table.add_row("tok/s", *(f"{step.tok_s:,.0f}" for step in steps))
    rarely = [step.tok_s_rarely_checked for step in steps]
    table.add_row("tok/s, rarely checked", *("-" if tok_s is None else f"{tok_s:,.0f}" for tok_s in rarely))
    console.print(table)
    for length, step in zip(lengths, steps, strict=True):
        console.print(f"{length}: {step.work.num_sequences} sequences, {step.at_once} at once; {step.formats}")


def show_comparison(rows: Sequence[tuple[str, str, str, str]], names: tuple[str, str], console: Console) -> None:
    """Two result files side by side."""
    table = Table("case", *names, "second / first")
    for row in rows:
        table.add_row(*row)
    console.print(table)
