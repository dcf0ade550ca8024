"""Judging completions while the engine still samples the others: verdicts and rewards, in processes of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, TimeoutError
from dataclasses import dataclass
from typing import Any, get_args

from octavo.rollout.engine import Completion
from octavo.tasks.checks import check_quickly
from octavo.tasks.problem import Task
from octavo.tasks.rewards import RewardConfig, format_score, python_score
from octavo.tasks.verdict import Outcome, Verdict
from octavo.trainer.problems import EncodedProblem
from octavo.trainer.run import Run

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
POLL_S = 0.2
"""Between two looks at whether the run is asked to stop."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """A completion, judged."""

    text: str
    """Without special tokens."""
    verdict: Verdict
    """Of the task's check."""
    parts: dict[str, float | Verdict]
    """Each part of the reward by its name; a Verdict says why there is none, and counts as 0."""
    reward: float
    """The weighted sum."""


class Scoring:
    """Of the completions of some problems, each judged as soon as it is there.

    Args:
        run: its pool, tokenizer and reward model.
        task: whose check is asked.
        problems: P of them.
        group_size: G, completions of each.
        reward: parts of the reward; None is the check alone.
    """

    def __init__(
        self,
        run: Run,
        task: Task,
        problems: Sequence[EncodedProblem],
        group_size: int,
        reward: RewardConfig | None = None,
    ) -> None:
        self.run, self.task, self.problems, self.group_size = run, task, problems, group_size
        self.reward = reward or RewardConfig()
        self._texts: dict[tuple[int, int], str] = {}
        self._parts: dict[tuple[int, int], dict[str, Future[Any]]] = {}

    def add(self, p: int, g: int, completion: Completion) -> None:
        """Have the completion g of problem p judged; returns at once."""
        problem, text = self.problems[p].problem, self.run.decode(completion.tokens)
        submit = self.run.verifiers.submit
        self._texts[p, g] = text
        quick = check_quickly(self.task.check, problem, text)
        parts = {"check": submit(self.task.check, problem, text) if quick is None else _done(quick)}
        if self.reward.format is not None:
            parts["format"] = submit(format_score, self.reward.format.pattern, text)
        if self.reward.python is not None:
            prompt = self.task.prompt_text(problem)
            parts["python"] = submit(python_score, self.reward.python.function, prompt, text, problem.answer)
        self._parts[p, g] = parts

    def gather(self) -> list[list[Scored]]:
        """P groups of G judged completions, waiting for those that are still judged.

        Raises:
            StopRequested: while waiting; nothing is lost but time.
        """
        places = [(p, g) for p in range(len(self.problems)) for g in range(self.group_size)]
        found = {place: {name: self._wait(part) for name, part in self._parts[place].items()} for place in places}
        if self.run.reward_model is not None and self.reward.model is not None:
            conversations = [self._conversation(place) for place in places]
            for place, score in zip(places, self.run.reward_model.scores(conversations), strict=True):
                found[place]["model"] = score
        scored = [self._scored(self._texts[place], found[place]) for place in places]
        return [scored[start : start + self.group_size] for start in range(0, len(scored), self.group_size)]

    def _wait(self, part: Future[Any]) -> Any:
        while True:
            self.run.interrupts.check()
            try:
                return part.result(timeout=POLL_S)
            except TimeoutError:
                continue

    def _conversation(self, place: tuple[int, int]) -> list[dict[str, str]]:
        messages = self.task.messages(self.problems[place[0]].problem)
        return [*messages, {"role": "assistant", "content": self._texts[place]}]

    def _scored(self, text: str, found: dict[str, Any]) -> Scored:
        verdict = found["check"]
        parts = {**found, "check": verdict.reward}
        weights = self.reward.weights()
        values = {name: 0.0 if isinstance(part, Verdict) else float(part) for name, part in parts.items()}
        return Scored(
            text=text,
            verdict=verdict,
            parts=parts,
            reward=sum(weights[name] * value for name, value in values.items()),
        )


def _done(verdict: Verdict) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(verdict)
    return future


def scoring_metrics(problems: Sequence[EncodedProblem], scored: list[list[Scored]]) -> dict[str, float]:
    """What the checks found, and rewards by task and by part, see docs/metrics.md."""
    flat = [each for group in scored for each in group]
    counts = Counter(each.verdict.outcome for each in flat)
    metrics = {f"verify/{outcome}_share": counts[outcome] / len(flat) for outcome in OUTCOMES}
    by_task: dict[str, list[float]] = {}
    for encoded, group in zip(problems, scored, strict=True):
        by_task.setdefault(encoded.problem.task, []).extend(each.reward for each in group)
    if len(by_task) > 1:
        metrics |= {f"reward/{name}/mean": sum(rewards) / len(rewards) for name, rewards in by_task.items()}
    for name in flat[0].parts if len(flat[0].parts) > 1 else ():
        values = [each.parts[name] for each in flat]
        metrics[f"reward/{name}_mean"] = sum(value for value in values if isinstance(value, float)) / len(flat)
        metrics[f"reward/{name}_failed_share"] = sum(isinstance(value, Verdict) for value in values) / len(flat)
    return metrics


def scoring_faults(scored: list[list[Scored]]) -> list[str]:
    """A line for the check and for each part of the reward that failed instead of judging: how often, and why first."""
    flat = [each for group in scored for each in group]
    faults = {"the check": [each.verdict for each in flat if each.verdict.outcome == "crashed"]}
    for name in flat[0].parts:
        faults[f"reward.{name}"] = [part for each in flat if isinstance(part := each.parts[name], Verdict)]
    return [
        f"{name} failed for {len(found)} of {len(flat)} completions, which counts as 0: {found[0].detail}"
        for name, found in faults.items()
        if found
    ]


def audited(problems: Sequence[EncodedProblem], scored: list[list[Scored]]) -> list[dict[str, Any]]:
    """A row of each completion for whoever audits the checks."""
    return [
        {
            "outcome": each.verdict.outcome,
            "detail": each.verdict.detail,
            "task": encoded.problem.task,
            "id": encoded.problem.id,
            "answer": encoded.problem.answer,
            "completion": each.text,
            "reward": each.reward,
        }
        for encoded, group in zip(problems, scored, strict=True)
        for each in group
    ]
