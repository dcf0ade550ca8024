"""Several tasks as one."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from octavo.tasks.problem import Problem, Task
from octavo.tasks.verdict import Verdict


@dataclass(frozen=True)
class CheckByTask:
    """Each problem is checked as the task that it comes from does."""

    checks: tuple[tuple[str, Callable[[Problem, str], Verdict]], ...]

    def __call__(self, problem: Problem, completion_text: str) -> Verdict:
        """The verdict of the problem's own task."""
        return self.of(problem)(problem, completion_text)

    def of(self, problem: Problem) -> Callable[[Problem, str], Verdict]:
        """The check of the problem's own task."""
        return dict(self.checks)[problem.task]


def mix(name: str, tasks: Sequence[Task], weights: Sequence[float] = ()) -> Task:
    """One task of the problems of several.

    Args:
        name: of the whole.
        tasks: the parts, each with a name of its own.
        weights: share of the prompts that each part gets, up to a factor; empty takes every problem equally often.

    Raises:
        ValueError: two parts have one name.
    """
    twice = [part for part, count in Counter(task.name for task in tasks).items() if count > 1]
    if twice:
        raise ValueError(
            f"the parts of a mixture want names of their own, and {twice[0]!r} comes twice. Set `name` in one of them"
        )
    parts = [
        replace(
            task,
            train=[replace(problem, task=task.name) for problem in task.train],
            test=[replace(problem, task=task.name) for problem in task.test],
        )
        for task in tasks
    ]
    return Task(
        name=name,
        source="; ".join(f"{part.name}: {part.source}" for part in parts),
        train=[problem for part in parts for problem in part.train],
        test=[problem for part in parts for problem in part.test],
        check=CheckByTask(tuple((part.name, part.check) for part in parts)),
        notes=[note for part in parts for note in part.notes],
        parts=parts,
        weights=weights,
    )
