"""Worked examples before a problem, never the problem itself."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.tasks.problem import Example, Problem, same_problem_key
from octavo.tasks.reader import ProblemReader
from octavo.tasks.rows import find_source


@dataclass(frozen=True, kw_only=True)
class FewShotConfig:
    """Examples that stand before every problem: turns of a chat, or plain text with blank lines between."""

    num_examples: int = 0
    """How many; 0 shows none."""
    path: str | None = None
    """A file with rows as the data set has them; null takes them from the training problems."""
    seed: int = 0
    """Chooses which; the same for all problems, except that a problem is never its own example."""

    def __post_init__(self) -> None:
        if self.num_examples < 0:
            raise ValueError(f"num_examples is at least 0; got {self.num_examples}")
        if self.path is not None and self.num_examples == 0:
            raise ValueError(f"path={self.path!r} holds examples, and num_examples=0 shows none. Raise num_examples")

    def examples(self, reader: ProblemReader, train: Sequence[Problem], is_code: bool) -> tuple[Example, ...]:
        """The examples and one more, which steps in where a problem would be its own example.

        Args:
            reader: of the data set, for rows of `path`.
            train: its training problems, where there is no `path`.
            is_code: whether an answer is a program.

        Raises:
            ValueError: there are too few.
        """
        if self.num_examples == 0:
            return ()
        pool = train if self.path is None else reader.problems(find_source(self.path, ("train",)), "few_shot")
        distinct = list({same_problem_key(problem): problem for problem in pool}.values())
        if len(distinct) < self.num_examples:
            source = "training problems" if self.path is None else self.path
            raise ValueError(
                f"few_shot.num_examples={self.num_examples} wants as many different problems; the {source} have "
                f"{len(distinct)}. Ask for fewer, or name a file in few_shot.path"
            )
        random.Random(self.seed).shuffle(distinct)
        shown = distinct[: self.num_examples + 1]
        return tuple(Example(problem=problem, answer=worked_answer(problem, is_code)) for problem in shown)


def worked_answer(problem: Problem, is_code: bool) -> str:
    """What a good completion would say: the solution if there is one, then the answer where a check looks for it."""
    if is_code:
        return f"```python\n{problem.answer.strip()}\n```"
    boxed = f"\\boxed{{{problem.answer}}}"
    if boxed in problem.solution:
        return problem.solution
    return f"{problem.solution}\nThe answer is {boxed}.".strip()
