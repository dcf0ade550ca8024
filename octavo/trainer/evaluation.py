"""Accuracy on held-out problems, during training and by `octavo evaluate`, whose work survives an interruption."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from octavo.numerics.recipe import Recipe, get_recipe
from octavo.rollout.engine import Engine, EngineConfig, RolloutEngine
from octavo.rollout.sampler import NonFiniteLogits
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import differences, to_dict
from octavo.trainer.divergence import Diverged
from octavo.trainer.evaluation_result import DEPLOYED, Result, result_of, to_lines, to_metrics
from octavo.trainer.metrics import Display
from octavo.trainer.output import JsonLines
from octavo.trainer.problems import Benchmark, EncodedProblem
from octavo.trainer.progress import RolloutState, weights_fingerprint
from octavo.trainer.run import EVALUATION, Run, VLLMFactory, load_run, model_fingerprint, problems_fingerprint
from octavo.trainer.scoring import Scoring

DEPENDS_ON = ("seed", "device", "kernels", "model", "precision", "task", "rollout", "evaluation")
"""Sections and keys of the config that a completion of the evaluation depends on."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One benchmark under one precision."""

    precision: str
    """`eval` for the config's own, else a recipe."""
    engine: RolloutEngine
    benchmark: Benchmark
    problems: Sequence[EncodedProblem]
    """Those of the benchmark that the config wants."""
    seed: int
    """Of the random numbers; the same under every precision, whatever else is evaluated."""


def evaluate(run: Run) -> dict[str, float]:
    """Sample completions of the test problems and check them. Uses the same problems and random numbers at any step.

    Leaves static activation scales and global random states as they were, so training is the same with and without.

    Returns:
        See `to_metrics`.

    Raises:
        ValueError: there is nothing to evaluate on.
    """
    return to_metrics(measure(run))


def run_evaluation(
    config: TrainConfig, output: Path | None, compare: str | None, vllm: VLLMFactory | None = None
) -> dict[str, float]:
    """All of `octavo evaluate`: see `measure` and `load_run`; shows the table on the error channel."""
    other = None if compare is None else get_recipe(compare)
    if other is not None and not isinstance(config.rollout.engine, EngineConfig):
        raise ValueError(
            f"--compare {compare} runs octavo's own engine, whose kernels would be compared as well. Use "
            f"rollout.engine.type=octavo"
        )
    display = Display(Console(stderr=True, highlight=False, soft_wrap=True))
    run = load_run(config, display, vllm)
    with closing(run.verifiers):
        results = measure(run, output, other)
    for line in to_lines(results):
        display.line(line)
    return to_metrics(results)


def measure(run: Run, output: Path | None = None, compare: Recipe | None = None) -> list[Result]:
    """As `evaluate`, with what else `octavo evaluate` can do.

    Args:
        run: policy, engine, task.
        output: write every completion there, a JSON object a line, and go on where it was interrupted. Until all are
            there they are in `output`.partial, under a line that says what they are completions of.
        compare: a recipe under which everything is measured once more, from the same masters.

    Returns:
        A result for each benchmark, under the config's own precision and then under the other.

    Raises:
        ValueError: there is nothing to evaluate on; `output`.partial is of another evaluation, or cannot be written.
    """
    jobs = make_jobs(run, compare)
    rows = sample_jobs(run, jobs) if output is None else _rows_by_file(run, jobs, output)
    size, results = run.config.evaluation.completions_per_problem, []
    for job in jobs:
        mine, rows = rows[: len(job.problems) * size], rows[len(job.problems) * size :]
        benchmark = job.benchmark
        results.append(result_of(job.precision, benchmark.name, mine, size, benchmark.num_left_out))
    return results


def make_jobs(run: Run, compare: Recipe | None = None) -> list[Job]:
    """What is measured, in order."""
    if not run.benchmarks:
        raise ValueError(f"task {run.task.name!r} has no problems to evaluate on. Give evaluation.sets, as [math500]")
    engines = {DEPLOYED: run.engine}
    if compare is not None:
        settings = run.config.rollout.engine
        assert isinstance(settings, EngineConfig), settings
        decoder = run.policy.with_recipe(compare)
        engines[compare.name] = Engine(decoder, settings, sorted(run.engine.stop_token_ids))
    own_test = not (run.config.evaluation.sets or run.task.parts)
    return [
        Job(
            precision=precision,
            engine=engine,
            benchmark=benchmark,
            problems=benchmark.problems[: run.config.evaluation.num_problems or None],
            seed=run.seed(EVALUATION, 0 if own_test else zlib.crc32(benchmark.name.encode())),
        )
        for precision, engine in engines.items()
        for benchmark in run.benchmarks
    ]


def sample_jobs(
    run: Run,
    jobs: Sequence[Job],
    num_done: int = 0,
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Completions of the problems of all jobs with their verdicts.

    Args:
        run: config, tokenizer, display.
        jobs: in order.
        num_done: problems to leave out at the beginning.
        keep: called with the rows of each part of the problems, as many as the engine runs at once.

    Returns:
        A row a completion: precision, set, id, prompt, completion, answer, outcome, detail, reward, finish_reason,
        num_tokens.

    Raises:
        Diverged: a logit is not finite.
    """
    size = run.config.evaluation.completions_per_problem
    decoders = list(dict.fromkeys([*run.decoders, *(job.engine.decoder for job in jobs)]))
    before = RolloutState.take(decoders)
    rows: list[dict[str, Any]] = []
    num_left = sum(len(job.problems) for job in jobs) - num_done
    engines = {job.engine for job in jobs if isinstance(job.engine, Engine)}
    try:
        with run.display.bar("evaluate", num_left * size) as advance:
            for job in jobs:
                for engine in engines - {job.engine}:
                    engine.lend()  # one KV cache at a time
                skipped = min(num_done, len(job.problems))
                num_done -= skipped
                rows += _sample(run, job, skipped, keep, advance)
    except NonFiniteLogits as error:
        raise Diverged(f"evaluation ({error})", dict(run.policy.named_parameters())) from error
    finally:
        before.restore(decoders)
    return rows


def _sample(
    run: Run, job: Job, skipped: int, keep: Callable[[list[dict[str, Any]]], None], advance: Any
) -> list[dict[str, Any]]:
    """As `sample_jobs`, of one job without its first `skipped` problems."""
    settings, task = run.config.evaluation, job.benchmark.task
    at_once = max(1, run.config.rollout.engine.max_sequences // settings.completions_per_problem)
    rows: list[dict[str, Any]] = []
    for start in range(skipped, len(job.problems), at_once):
        part = job.problems[start : start + at_once]
        scoring = Scoring(run, task, part, settings.completions_per_problem)
        groups = job.engine.generate(
            [encoded.prompt for encoded in part],
            settings.sampling,
            max_completion_tokens=run.config.rollout.max_completion_tokens,
            group_size=settings.completions_per_problem,
            seed=job.seed,
            first_index=start,
            progress=run.on_step(advance),
            on_completion=scoring.add,
        )
        new = [
            {
                "precision": job.precision,
                "set": job.benchmark.name,
                "id": encoded.problem.id,
                "prompt": task.prompt_text(encoded.problem),
                "completion": scored.text,
                "answer": encoded.problem.answer,
                "outcome": scored.verdict.outcome,
                "detail": scored.verdict.detail,
                "reward": scored.verdict.reward,
                "finish_reason": completion.finish_reason,
                "num_tokens": len(completion.tokens),
            }
            for encoded, group, judged in zip(part, groups, scoring.gather(), strict=True)
            for completion, scored in zip(group, judged, strict=True)
        ]
        keep(new)
        rows += new
    return rows


def _rows_by_file(run: Run, jobs: Sequence[Job], path: Path) -> list[dict[str, Any]]:
    """As `sample_jobs`, of what is not in `path`.partial yet; leaves all of it in `path`."""
    file = JsonLines(path.with_name(path.name + ".partial"))
    header = {
        **{key: value for key, value in to_dict(run.config).items() if key in DEPENDS_ON},
        "verifier": {key: getattr(run.config.verifier, key) for key in ("timeout_s", "memory_mb", "allow_unisolated")},
        "precisions": list(dict.fromkeys(job.precision for job in jobs)),
        "weights": weights_fingerprint(run.policy),
        "model numbers": model_fingerprint(run),
        "problems": problems_fingerprint(run),
    }
    size = run.config.evaluation.completions_per_problem
    ids = [encoded.problem.id for job in jobs for encoded in job.problems for _ in range(size)]
    try:
        rows = _read_partial(file, header, ids)
        num_done = len(rows) // size
        del rows[num_done * size :]
        file.replace([header, *rows])
        if num_done:
            run.display.line(f"going on with {file.path}: {num_done} of {len(ids) // size} problems are done")
        rows += sample_jobs(run, jobs, num_done, keep=file.extend)
        JsonLines(path).replace(rows)
        file.path.unlink()
    except OSError as error:
        raise ValueError(f"--output {path} cannot be written: {error.strerror}. Make room, or give another") from error
    return rows


def _read_partial(file: JsonLines, header: dict[str, Any], ids: list[str]) -> list[dict[str, Any]]:
    """Rows of an interrupted evaluation with this header; a last line that was cut off is dropped.

    Args:
        file: `path`.partial.
        header: what the rows must be of.
        ids: of the problem of every row.

    Raises:
        ValueError: the file is of another evaluation, or of none.
    """
    if not file.path.exists():
        return []
    lines = file.path.read_bytes().split(b"\n")[:-1]
    try:
        found, *rows = [json.loads(line) for line in lines] or [None]
    except ValueError:
        found, rows = None, []
    if found == header and [row.get("id") for row in rows if isinstance(row, dict)] == ids[: len(rows)]:
        return rows
    if found == header:
        keys = ["its rows"]
    else:
        keys = [key for key, _, _ in differences(found, header)] if isinstance(found, dict) else ["it is none of ours"]
    raise ValueError(f"{file.path} was left by another evaluation ({', '.join(keys)}). Remove it, or give another file")
