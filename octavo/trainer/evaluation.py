"""Accuracy on held-out problems, during training and by `octavo evaluate`, whose work survives an interruption."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from octavo.rollout.sampler import NonFiniteLogits
from octavo.trainer.config_file import differences, to_dict
from octavo.trainer.divergence import Diverged
from octavo.trainer.output import JsonLines
from octavo.trainer.progress import RolloutState, weights_fingerprint
from octavo.trainer.run import EVALUATION, EncodedProblem, Run, model_fingerprint, problems_fingerprint

DEPENDS_ON = ("seed", "device", "model", "precision", "task", "rollout", "evaluation")
"""Sections and keys of the config that a completion of the evaluation depends on."""


def evaluate(run: Run) -> dict[str, float]:
    """Sample completions of the test problems and score them. Uses the same problems and random numbers at any step.

    Leaves static activation scales and global random states as they were, so training is the same with and without.

    Args:
        run: policy, engine, task.

    Returns:
        eval/accuracy in [0, 1], its standard error over problems eval/accuracy_stderr, eval/length_mean in tokens,
        eval/truncated_share, eval/num_problems.
    """
    return accuracy_metrics(run, sample_problems(run, evaluation_problems(run)))


def evaluate_to_file(run: Run, path: Path) -> dict[str, float]:
    """As `evaluate`; writes every completion to `path`, a JSON object a line, and goes on where it was interrupted.

    Until all are there they are in `path`.partial, under a line that says what they are completions of.

    Raises:
        ValueError: `path`.partial is of another evaluation, or cannot be written.
    """
    file = JsonLines(path.with_name(path.name + ".partial"))
    header = {
        **{key: value for key, value in to_dict(run.config).items() if key in DEPENDS_ON},
        "weights": weights_fingerprint(run.policy),
        "model numbers": model_fingerprint(run),
        "problems": problems_fingerprint(run),
    }
    problems, size = evaluation_problems(run), run.config.evaluation.completions_per_problem
    try:
        rows = _read_partial(file, header, [encoded.problem.id for encoded in problems for _ in range(size)])
        done = len(rows) // size
        del rows[done * size :]
        file.replace([header, *rows])
        if done:
            run.display.line(f"going on with {file.path}: {done} of {len(problems)} problems are done")
        rows += sample_problems(run, problems[done:], first_index=done, keep=file.extend)
        JsonLines(path).replace(rows)
        file.path.unlink()
    except OSError as error:
        raise ValueError(f"--output {path} cannot be written: {error.strerror}. Make room, or give another") from error
    return accuracy_metrics(run, rows)


def evaluation_problems(run: Run) -> Sequence[EncodedProblem]:
    """The test problems that the config wants."""
    return run.test_problems[: run.config.evaluation.num_problems or None]


def sample_problems(
    run: Run,
    problems: Sequence[EncodedProblem],
    first_index: int = 0,
    keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None,
) -> list[dict[str, Any]]:
    """Completions of problems with their rewards.

    Args:
        run: policy, engine, task.
        problems: the evaluation's, from `first_index` on.
        first_index: place of the first of them, which random numbers depend on.
        keep: called with the rows of each part of the problems, as many as the engine runs at once.

    Returns:
        A row a completion: id, prompt, completion, answer, outcome, reward, finish_reason, num_tokens.

    Raises:
        Diverged: a logit is not finite.
    """
    settings = run.config.evaluation
    at_once = max(1, run.config.rollout.engine.max_sequences // settings.completions_per_problem)
    before = RolloutState.take(run.decoders)
    rows: list[dict[str, Any]] = []
    try:
        with run.display.bar("evaluate", len(problems) * settings.completions_per_problem) as advance:
            for start in range(0, len(problems), at_once):
                part = problems[start : start + at_once]
                groups = run.engine.generate(
                    [encoded.prompt for encoded in part],
                    settings.sampling,
                    max_completion_tokens=run.config.rollout.max_completion_tokens,
                    group_size=settings.completions_per_problem,
                    seed=run.seed(EVALUATION, 0),
                    first_index=first_index + start,
                    progress=run.on_step(advance),
                )
                new = [
                    {
                        "id": encoded.problem.id,
                        "prompt": run.task.prompt_text(encoded.problem),
                        "completion": (text := run.decode(completion.tokens)),
                        "answer": encoded.problem.answer,
                        "outcome": (verdict := run.task.check(encoded.problem, text)).outcome,
                        "reward": verdict.reward,
                        "finish_reason": completion.finish_reason,
                        "num_tokens": len(completion.tokens),
                    }
                    for encoded, group in zip(part, groups, strict=True)
                    for completion in group
                ]
                keep(new)
                rows += new
    except NonFiniteLogits as error:
        raise Diverged(f"evaluation ({error})", dict(run.policy.named_parameters())) from error
    finally:
        before.restore(run.decoders)
    return rows


def accuracy_metrics(run: Run, rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The metrics of `evaluate` from the rows of all problems, in order."""
    size = run.config.evaluation.completions_per_problem
    per_problem = [sum(row["reward"] for row in rows[i : i + size]) / size for i in range(0, len(rows), size)]
    mean = sum(per_problem) / len(per_problem)
    variance = sum((x - mean) ** 2 for x in per_problem) / max(1, len(per_problem) - 1)
    return {
        "eval/accuracy": mean,
        "eval/accuracy_stderr": math.sqrt(variance / len(per_problem)),
        "eval/length_mean": sum(row["num_tokens"] for row in rows) / len(rows),
        "eval/truncated_share": sum(row["finish_reason"] == "length" for row in rows) / len(rows),
        "eval/num_problems": float(len(per_problem)),
    }


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
    if found == header and [row.get("id") for row in rows] == ids[: len(rows)]:
        return rows
    if found == header:
        keys = ["its rows"]
    else:
        keys = [key for key, _, _ in differences(found, header)] if isinstance(found, dict) else ["it is none of ours"]
    raise ValueError(f"{file.path} was left by another evaluation ({', '.join(keys)}). Remove it, or give another file")
