"""A sample of benchmarks/answers.py: the answers of the real data sets in many forms, and in each other's places."""

import pytest
from answer_cases import SETS, check_values, problems_of, rewritten, right_cases, shuffled_cases

from octavo.tasks import answers_compare


@pytest.mark.parametrize("name", SETS)
def test_answers_of_the_real_sets(name, data_dir, monkeypatch):
    monkeypatch.setenv("OCTAVO_DATA", str(data_dir))
    monkeypatch.setattr(answers_compare, "same_text", answers_compare.same_text)  # check_values replaces it
    problems = problems_of(name, rows=12)
    cases = [*(case for problem in problems for case in right_cases(problem)), *shuffled_cases(problems)]
    found = [check_values(case.problem, case.completion) for case in cases]
    wrong = [
        (case.form, case.completion, case.problem.answer, verdict)
        for case, verdict in zip(cases, found, strict=True)
        if (verdict.outcome == "correct") != case.expected
    ]
    assert not wrong, wrong
    assert sum(case.expected for case in cases) >= 4 * len(problems)


@pytest.mark.parametrize(
    "answer, other",
    [
        ("\\frac{1}{2}", "\\dfrac{1}{2}"),
        ("0.25", "\\frac{025}{100}"),
        ("12345", "12{,}345"),
        ("-7", "x = -7.0"),
        ("\\left(1,2\\right)", "\\left( 1,2 \\right)"),
        ("x+1", "x + 1"),
        ("2x+1", "2x + 1"),
        ("90^\\circ", "90^{\\circ}"),
    ],
)
def test_rewritten_is_another_text(answer, other):
    assert rewritten(answer) == other
