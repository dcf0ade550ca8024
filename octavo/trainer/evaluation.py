"""Accuracy on held-out problems."""

from __future__ import annotations

import math
from typing import Any

from octavo.trainer.progress import RolloutState
from octavo.trainer.run import EVALUATION, Run


def evaluate(run: Run) -> dict[str, float]:
    """Sample completions of the test problems and score them. Uses the same problems and random numbers at any step.

    Args:
        run: policy, engine, task.

    Returns:
        eval/accuracy in [0, 1], its standard error over problems eval/accuracy_stderr, eval/length_mean in tokens,
        eval/truncated_share, eval/num_problems.
    """
    metrics, _ = evaluate_with_samples(run)
    return metrics


def evaluate_with_samples(run: Run) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """As `evaluate`, and every completion: problem id, prompt, completion text, reward, finish_reason.

    Leaves static activation scales and global random states as they were, so training is the same with and without.
    """
    settings = run.config.evaluation
    problems = list(run.test_problems)[: settings.num_problems or None]
    total = len(problems) * settings.completions_per_problem
    before = RolloutState.take([run.policy])
    try:
        with run.display.bar("evaluate", total) as advance:
            groups = run.engine.generate(
                [problem.prompt for problem in problems],
                settings.sampling,
                max_completion_tokens=run.config.rollout.max_completion_tokens,
                group_size=settings.completions_per_problem,
                seed=run.seed(EVALUATION, 0),
                progress=run.progress(advance),
            )
    finally:
        before.restore([run.policy])
    samples: list[dict[str, Any]] = [
        {
            "id": encoded.problem.id,
            "prompt": run.task.prompt_text(encoded.problem),
            "completion": (text := run.decode(completion.tokens)),
            "answer": encoded.problem.answer,
            "reward": run.task.score(encoded.problem, text),
            "finish_reason": completion.finish_reason,
            "num_tokens": len(completion.tokens),
        }
        for encoded, group in zip(problems, groups, strict=True)
        for completion in group
    ]
    per_problem = [
        sum(sample["reward"] for sample in samples[i : i + settings.completions_per_problem])
        / settings.completions_per_problem
        for i in range(0, total, settings.completions_per_problem)
    ]
    mean = sum(per_problem) / len(per_problem)
    variance = sum((x - mean) ** 2 for x in per_problem) / max(1, len(per_problem) - 1)
    metrics = {
        "eval/accuracy": mean,
        "eval/accuracy_stderr": math.sqrt(variance / len(per_problem)),
        "eval/length_mean": sum(sample["num_tokens"] for sample in samples) / total,
        "eval/truncated_share": sum(sample["finish_reason"] == "length" for sample in samples) / total,
        "eval/num_problems": float(len(problems)),
    }
    return metrics, samples
