"""The page of `octavo report`: one HTML file that needs nothing else."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from octavo import __version__
from octavo.report import charts, line_charts
from octavo.report.charts import accuracy_curve
from octavo.report.figures import COLOURS, Chart
from octavo.report.line_charts import draw_lines
from octavo.report.observatory_charts import observatory_charts
from octavo.report.runs import Row, RunRecord, number, read_runs, setting, visible
from octavo.trainer.files import check_output, write_whole

SAMPLED_STEPS = 3
"""Last steps whose samples are shown."""
SAMPLES_A_SIDE = 3
"""Samples of a step with the highest rewards, and with the lowest."""
MAX_CHARACTERS = 20_000
"""Of a text in the page; the rest is cut off and counted."""
NOTHING = "–"


@dataclass(frozen=True, kw_only=True)
class Section:
    """Charts under one heading."""

    title: str
    charts: list[Chart]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text; the first cell of a row names it."""

    head: list[str]
    rows: list[list[str]]


@dataclass(frozen=True, kw_only=True)
class SampleTable:
    """Some samples of a run, of its last steps."""

    name: str
    total: int
    rows: list[dict[str, str]]


def write_report(folders: Sequence[Path], output: Path | None) -> Path:
    """Read the runs and write the page.

    Args:
        folders: of the runs, at least one.
        output: the page; by default RUN/report.html for one run, report.html here for several.

    Returns:
        The page.

    Raises:
        ValueError: a folder is no run, there are too many, or the page cannot be written.
    """
    if len(folders) > len(COLOURS):
        raise ValueError(f"a report has {len(COLOURS)} colours, one a run; got {len(folders)} runs. Name fewer")
    runs = read_runs(folders)
    path = output or (folders[0] if len(folders) == 1 else Path()) / "report.html"
    check_output(path)
    write_whole(path, render(runs, datetime.now(UTC)))
    return path


def render(runs: Sequence[RunRecord], now: datetime) -> str:
    """The page as HTML."""
    return template("template.html").render(
        title="octavo: " + ", ".join(run.name for run in runs),
        runs=runs,
        summary=summary(runs),
        sections=sections(runs),
        samples=[table for run in runs if (table := sample_table(run))],
        without_samples=[run.name for run in runs if not run.samples],
        resumes=[(run.name, resume_table(run)) for run in runs if run.resumes],
        differences=config_differences(runs),
        configs=[(run.name, shown(run.config_text)) for run in runs if run.config_text],
        written=f"{now:%Y-%m-%d %H:%M} UTC",
        version=__version__,
    )


def template(name: str, folder: Path | None = None) -> jinja2.Template:
    """A page's template, which may lie in a folder of its own and be made of the parts that lie here."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*filter(None, [folder]), Path(__file__).parent]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["svg"] = Markup
    return environment.get_template(name)


def sections(runs: Sequence[RunRecord]) -> list[Section]:
    """All charts, in the order of the page."""
    return [
        Section(
            title="Learning",
            charts=[
                draw_lines(line_charts.REWARD, runs),
                charts.accuracy(runs),
                draw_lines(line_charts.INFORMATIVE, runs),
                draw_lines(line_charts.EQUAL_GROUPS, runs),
                draw_lines(line_charts.LOSS, runs),
            ],
        ),
        Section(
            title="Entropy and length",
            charts=[
                draw_lines(line_charts.ENTROPY, runs),
                draw_lines(line_charts.UNCERTAIN, runs),
                charts.entropy_heat_map(runs),
                draw_lines(line_charts.LENGTH, runs),
                draw_lines(line_charts.TRUNCATED, runs),
            ],
        ),
        Section(
            title="Rollout against training",
            charts=[charts.mismatch_by_step(runs), charts.mismatch_by_position(runs)],
        ),
        Section(
            title="Trust region",
            charts=[
                charts.bounds(runs),
                draw_lines(line_charts.WATCH, runs),
                draw_lines(line_charts.CLIPPED, runs),
                draw_lines(line_charts.OVERCLIP_LOW, runs),
                draw_lines(line_charts.OVERCLIP_HIGH, runs),
                draw_lines(line_charts.RATIO_STD, runs),
                draw_lines(line_charts.KL, runs),
            ],
        ),
        Section(title="Observatory", charts=observatory_charts(runs)),
        Section(
            title="Optimiser and time",
            charts=[
                draw_lines(line_charts.GRAD_NORM, runs),
                draw_lines(line_charts.LR, runs),
                charts.time_by_phase(runs),
            ],
        ),
    ]


def summary(runs: Sequence[RunRecord]) -> Table:
    """What there is to say of a run in a few words, a column a run."""
    columns = [summary_of(run) for run in runs]
    return Table(
        head=["", *(run.name for run in runs)],
        rows=[[label, *(column[label] for column in columns)] for label in columns[0]],
    )


def summary_of(run: RunRecord) -> dict[str, str]:
    """Label -> value, the same labels for every run."""
    rewards, curve = run.series("reward/mean"), accuracy_curve(run)
    times = run.series("time/step_s").values
    tokens = run.series("rollout/num_tokens").values or run.series("mismatch/num_tokens").values
    recipe, kv_cache = (setting(run.config, f"precision.{key}") for key in ("recipe", "kv_cache"))
    status = "finished" if run.finished else "running or stopped"
    if run.last_written_s is not None and not run.finished:
        status += f", last step written {datetime.fromtimestamp(run.last_written_s, UTC):%Y-%m-%d %H:%M} UTC"
    return {
        "model": plain(setting(run.config, "model.path")),
        "task": plain(setting(run.config, "task.type")),
        "recipe": plain(recipe) + (f", KV cache {plain(kv_cache)}" if kv_cache is not None else ""),
        "engine": plain(setting(run.config, "rollout.engine.type") or "octavo"),
        "steps": f"{run.steps_done} of {run.num_steps or '?'}",
        "status": status,
        "reward, last": plain(rewards.values[-1]) if rewards.values else NOTHING,
        "reward, best": best(rewards.values, [f"step {step}" for step in rewards.steps]),
        "accuracy, last": f"{curve[-1][1]:.3f} ± {curve[-1][2]:.3f}" if curve else NOTHING,
        "accuracy, best": best([value for _, value, _ in curve], [f"after {done} steps" for done, _, _ in curve]),
        "largest mismatch": mismatch_of(run),
        "tokens sampled": f"{sum(tokens):,.0f}" if tokens else NOTHING,
        "time, all steps": duration(sum(times)) if times else NOTHING,
        "time, median step": duration(statistics.median(times)) if times else NOTHING,
        "resumes": str(len(run.resumes)),
    }


def mismatch_of(run: RunRecord) -> str:
    """The largest mismatch of all steps; one that is no number is not passed over."""
    key = "mismatch/max_abs_logprob_diff"
    values, num_broken = run.series(key).values, run.num_broken(key)
    if num_broken:
        return f"NaN or infinite on {num_broken} of {len(values) + num_broken} steps"
    if not values:
        return NOTHING
    return f"{max(values):.3g} nats" if max(values) else "exactly 0"


def best(values: Sequence[float], places: Sequence[str]) -> str:
    """The largest value and where it was reached first."""
    if not values:
        return NOTHING
    return f"{plain(max(values))} ({places[values.index(max(values))]})"


def sample_table(run: RunRecord) -> SampleTable | None:
    """Samples of the last steps, newest first: of each step those with the highest rewards and the lowest."""
    steps = sorted({row["step"] for row in run.samples})[-SAMPLED_STEPS:]
    rows: list[Row] = []
    for step in reversed(steps):
        of_step = sorted(
            (row for row in run.samples if row["step"] == step),
            key=lambda row: -math.inf if (reward := number(row.get("reward"))) is None else reward,
            reverse=True,
        )
        rows += of_step[:SAMPLES_A_SIDE] + of_step[SAMPLES_A_SIDE:][-SAMPLES_A_SIDE:]
    if not rows:
        return None
    keys = ("step", "prompt", "completion", "answer", "reward", "advantage", "finish_reason", "num_tokens")
    return SampleTable(
        name=run.name,
        total=len(run.samples),
        rows=[{key: shown(plain(row.get(key))) for key in keys} for row in rows],
    )


def resume_table(run: RunRecord) -> Table:
    """When the run was taken up again, and what had changed."""
    return Table(
        head=["step", "time", "changes", "message"],
        rows=[[shown(plain(row.get(key))) for key in ("step", "time", "changes", "message")] for row in run.resumes],
    )


def config_differences(runs: Sequence[RunRecord]) -> Table:
    """Dotted keys whose values differ between the runs whose config is there."""
    known = [run for run in runs if run.config]
    flat = [flatten(run.config) for run in known]
    keys = dict.fromkeys(key for config in flat for key in config)
    rows = [[key, *(config.get(key, NOTHING) for config in flat)] for key in keys]
    return Table(
        head=["key", *(run.name for run in known)],
        rows=[[visible(cell) for cell in row] for row in rows if len(set(row[1:])) > 1],
    )


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """{"a": {"b": 1}} -> {"a.b": "1"}."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return flat


def plain(value: object) -> str:
    """A value as a person writes it."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join(plain(item) for item in value)
    return str(value)


def duration(seconds: float) -> str:
    """Seconds -> 2.9 s, 4 min 10 s, 3 h 5 min."""
    if seconds < 60.0:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def shown(text: str) -> str:
    """Text that a page can hold, and not too much of it."""
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]} … ({len(text) - MAX_CHARACTERS:,} characters more)"
    return visible(text)
