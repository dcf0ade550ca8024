"""The checks that a data set names: how a completion is judged."""

from collections.abc import Callable

from octavo.tasks.answers import extract_answer, math_equal
from octavo.tasks.presets import CheckName
from octavo.tasks.problem import Problem
from octavo.tasks.verdict import Verdict, judged


def check_math(problem: Problem, completion_text: str) -> Verdict:
    """Correct if the final answer of the completion equals the reference, or another answer that is accepted."""
    answer = extract_answer(completion_text)
    if answer is None:
        return Verdict("unparsable", 0.0, "no answer")
    return judged(any(math_equal(answer, reference) for reference in (problem.answer, *problem.accepted)))


CHECKS: dict[CheckName, Callable[[Problem, str], Verdict]] = {"math": check_math}
