"""The checks that a data set names: how a completion is judged, and which verdicts need no process of their own."""

from collections.abc import Callable

from octavo.tasks.answers import check_choice, check_exact, check_math, check_numbers
from octavo.tasks.arithmetic import check_arithmetic
from octavo.tasks.code import check_code
from octavo.tasks.mixing import CheckByTask
from octavo.tasks.presets import CheckName
from octavo.tasks.problem import Problem
from octavo.tasks.reasoning_gym import ReasoningGymCheck
from octavo.tasks.verdict import Verdict
from octavo.tasks.verifiers import SYMBOLIC

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


def modules_of(check: Check) -> tuple[str, ...]:
    """What a check loads that takes as long as a check may, for a `VerifierPool` to load beforehand."""
    if isinstance(check, CheckByTask):
        return tuple(sorted({name for _, part in check.checks for name in modules_of(part)}))
    if isinstance(check, ReasoningGymCheck):
        return ("reasoning_gym",)
    return (SYMBOLIC,) if check is check_math else ()


def check_quickly(check: Check, problem: Problem, completion_text: str) -> Verdict | None:
    """The check's verdict where that can neither hang nor crash; None where it is for a `VerifierPool`."""
    if isinstance(check, CheckByTask):
        check = check.of(problem)
    quick = QUICK.get(check)
    return None if quick is None else quick(problem, completion_text)
