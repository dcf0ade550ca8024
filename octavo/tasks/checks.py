"""The checks that a data set names: how a completion is judged, and which verdicts need no process of their own."""

from collections.abc import Callable

from octavo.tasks.answers import check_choice, check_exact, check_math, check_numbers
from octavo.tasks.arithmetic import check_arithmetic
from octavo.tasks.code import check_code
from octavo.tasks.mixing import CheckByTask
from octavo.tasks.presets import CheckName
from octavo.tasks.problem import Problem
from octavo.tasks.verdict import Verdict

Check = Callable[[Problem, str], Verdict]

CHECKS: dict[CheckName, Check] = {
    "math": check_math,
    "exact": check_exact,
    "multiple_choice": check_choice,
    "code": check_code,
}
QUICK: dict[Check, Callable[[Problem, str], Verdict | None]] = {
    check_math: check_numbers,
    check_exact: check_exact,
    check_arithmetic: check_arithmetic,
}
"""Those that take linear time, whatever the completion is; `check_math` does where only numbers are compared."""


def check_quickly(check: Check, problem: Problem, completion_text: str) -> Verdict | None:
    """The check's verdict where that can neither hang nor crash; None where it is for a `VerifierPool`."""
    if isinstance(check, CheckByTask):
        check = check.of(problem)
    quick = QUICK.get(check)
    return None if quick is None else quick(problem, completion_text)
