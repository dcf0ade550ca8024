"""What an evaluation measured: estimates with intervals, outcomes, and the difference between two precisions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from octavo.tasks.verdict import Outcome
from octavo.trainer import estimates
from octavo.trainer.estimates import Estimate

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
DEPLOYED = "eval"
"""Name of the config's own precision, before the slash of its metrics."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a job measured."""

    precision: str
    benchmark: str
    per_problem: list[float]
    """Share of right completions of each problem."""
    num_completions: int
    """Of each problem."""
    pass_at: dict[int, Estimate]
    """By k: the chance that one of k completions is right."""
    outcomes: dict[str, int]
    """Completions by what their check found."""
    length_mean: float
    """In tokens."""
    truncated_share: float
    """Of completions that were cut off."""
    num_left_out: int
    """Problems of the benchmark that were not asked, because their prompts are too long."""

    @property
    def accuracy(self) -> Estimate:
        """avg@k: the mean over all completions."""
        return estimates.share(self.per_problem)


def result_of(
    precision: str, benchmark: str, rows: Sequence[dict[str, Any]], size: int, num_left_out: int = 0
) -> Result:
    """What the rows of one benchmark say, `size` of each problem."""
    right = [sum(row["outcome"] == "correct" for row in rows[i : i + size]) for i in range(0, len(rows), size)]
    ks = sorted({2**power for power in range(1, size.bit_length())} | {size}) if size > 1 else []
    return Result(
        precision=precision,
        benchmark=benchmark,
        per_problem=[count / size for count in right],
        num_completions=size,
        pass_at={k: estimates.share([estimates.pass_at(k, size, count) for count in right]) for k in ks},
        outcomes={outcome: sum(row["outcome"] == outcome for row in rows) for outcome in OUTCOMES},
        length_mean=sum(row["num_tokens"] for row in rows) / len(rows),
        truncated_share=sum(row["finish_reason"] == "length" for row in rows) / len(rows),
        num_left_out=num_left_out,
    )


def to_metrics(results: Sequence[Result]) -> dict[str, float]:
    """Numbers by name, see docs/metrics.md.

    `eval/...` is the config's own precision, `<recipe>/...` the other, `difference/...` the first minus the second. Of
    several benchmarks each has its name in the middle; without a name stands their mean, or the sum of what is counted.
    """
    metrics: dict[str, float] = {}
    for precision, own in by_precision(results).items():
        metrics |= _summary(precision, own)
        for result in own if len(own) > 1 else ():
            metrics |= _summary(f"{precision}/{result.benchmark}", [result])
    differences = paired_differences(results)
    if differences:
        metrics |= _with_interval("difference/accuracy", estimates.mean_of(list(differences.values())))
    for name, difference in differences.items() if len(differences) > 1 else ():
        metrics |= _with_interval(f"difference/{name}/accuracy", difference)
    return metrics


def by_precision(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Precision -> its results, in order."""
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.precision, []).append(result)
    return found


def paired_differences(results: Sequence[Result]) -> dict[str, Estimate]:
    """Benchmark -> accuracy under the config's own precision minus that under the other; empty without another."""
    own, *others = by_precision(results).values()
    return {
        first.benchmark: estimates.paired_difference(first.per_problem, second.per_problem)
        for other in others
        for first, second in zip(own, other, strict=True)
    }


def _summary(prefix: str, results: Sequence[Result]) -> dict[str, float]:
    """The numbers of one precision on some benchmarks."""
    count = len(results)
    num_completions = [len(result.per_problem) * result.num_completions for result in results]
    means = {
        "length_mean": sum(r.length_mean * n for r, n in zip(results, num_completions, strict=True)),
        "truncated_share": sum(r.truncated_share * n for r, n in zip(results, num_completions, strict=True)),
    }
    metrics = _with_interval(f"{prefix}/accuracy", estimates.mean_of([result.accuracy for result in results]))
    metrics[f"{prefix}/accuracy_stderr"] = math.hypot(*(estimates.stderr(r.per_problem) for r in results)) / count
    for k in results[0].pass_at:
        metrics |= _with_interval(f"{prefix}/pass_at_{k}", estimates.mean_of([r.pass_at[k] for r in results]))
    metrics |= {f"{prefix}/{name}": total / sum(num_completions) for name, total in means.items()}
    metrics |= {f"{prefix}/num_{name}": float(sum(r.outcomes[name] for r in results)) for name in OUTCOMES}
    metrics[f"{prefix}/num_problems"] = float(sum(len(result.per_problem) for result in results))
    metrics[f"{prefix}/num_left_out"] = float(sum(result.num_left_out for result in results))
    return metrics


def _with_interval(name: str, estimate: Estimate) -> dict[str, float]:
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def to_lines(results: Sequence[Result]) -> list[str]:
    """For a terminal: a line for each benchmark and precision, and one for their difference; in per cent."""
    differences = paired_differences(results)
    rows: list[tuple[str, ...]] = []
    for benchmark in dict.fromkeys(result.benchmark for result in results):
        for result in (result for result in results if result.benchmark == benchmark):
            counts = [f"{count} {outcome}" for outcome, count in result.outcomes.items() if count]
            counts += [f"{result.truncated_share:.1%} cut off"] if result.truncated_share else []
            shares = {f"avg@{result.num_completions}": result.accuracy}
            shares |= {f"pass@{k}": estimate for k, estimate in list(result.pass_at.items())[-1:]}
            rows.append(
                (
                    benchmark,
                    "as configured" if result.precision == DEPLOYED else result.precision,
                    *(f"{name} {_percent(estimate)}" for name, estimate in shares.items()),
                    f"{len(result.per_problem)} problems: {', '.join(counts)}",
                )
            )
        if benchmark in differences:
            rows.append(
                (benchmark, "difference", f"avg@{results[0].num_completions} {_percent(differences[benchmark], '+')}")
            )
    widths = [max(len(row[column]) for row in rows if column < len(row)) for column in range(max(map(len, rows)))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]
    return ["per cent, with 95 % intervals over problems:", *lines]


def _percent(estimate: Estimate, sign: str = "") -> str:
    numbers = (format(100 * number, f"{sign}.1f") for number in (estimate.value, estimate.low, estimate.high))
    return "{} [{}, {}]".format(*numbers)
