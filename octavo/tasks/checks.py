"""The checks that a data set names: how a completion is judged."""

from collections.abc import Callable

from octavo.tasks.answers import check_choice, check_exact, check_math
from octavo.tasks.code import check_code
from octavo.tasks.presets import CheckName
from octavo.tasks.problem import Problem
from octavo.tasks.verdict import Verdict

CHECKS: dict[CheckName, Callable[[Problem, str], Verdict]] = {
    "math": check_math,
    "exact": check_exact,
    "multiple_choice": check_choice,
    "code": check_code,
}
