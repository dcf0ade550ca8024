import threading
from decimal import Decimal

import pytest

from octavo.tasks.answers import (
    CheckNumeric,
    check_choice,
    check_exact,
    check_math,
    extract_answer,
    math_equal,
)
from octavo.tasks.answers_values import parse_number
from octavo.tasks.problem import Problem


@pytest.mark.parametrize(
    "text, expected",
    [
        ("The answer is \\boxed{72}.", "72"),
        ("#### 72", "72"),
        ("half of 48 is 24, so 48 + 24 = 72", "72"),
        ("first \\boxed{1}, no: \\boxed{2}", "2"),  # the last box counts
        ("#### 5\nso \\boxed{6}", "6"),  # a box before ####
        ("\\boxed{6}\n#### 5", "6"),
        ("#### 5\n#### 6", "6"),
        ("#### 72 dollars", "72"),
        ("####\n72", "72"),
        ("#### $1,234.50", "$1,234.50"),
        ("#### 72\nThat took 3 steps.", "72"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("10-5", "5"),  # a minus that subtracts
        ("it fell to -5 degrees", "-5"),
        ("it fell to \u22125 degrees", "-5"),
        ("a loss of -$5", "-$5"),
        ("numbers 1,2,3", "3"),  # no thousands separators
        ("it costs 70,000.", "70,000"),
        ("that is 18%.", "18%"),
        ("pi is about 3.14.", "3.14"),
        ("", None),
        ("no number at all", None),
        ("####", None),
        ("it is 72 ####  \n", None),  # announced, not given: 72 must not stand in
        ("it is 72, \\boxed{}", None),
        ("it is 72, \\boxed{7", None),  # cut off inside the box
        ("\\boxed{1} and \\boxed{2}", "1, 2"),  # one answer in two parts
        ("$\\boxed{5}$, or $\\boxed{6}$", "5, 6"),
        ("\\boxed{\\boxed{5}}", "\\boxed{5}"),
        ("\\boxed 5", "5"),
        ("\\fbox{7}", "7"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("<think>\\boxed{3}? no</think>It is \\boxed{4}.", "4"),
        ("<think>so it is 4", "4"),
        ("<answer> 12 </answer> and 13", "12"),
        ("<answer>\\boxed{12}</answer>", "12"),
        ("The answer is $\\frac{1}{2}$.", "$\\frac{1}{2}$"),
        ("The answer is x - 5.", "x - 5"),
        ("The answer is 2ab", "2ab"),
        ("Final answer: 72 clips. I hope it is correct.", "72"),
        ("The answer is $5$ and $7$.", "$5$ and $7$"),
        ("**Answer:** 3.5", "3.5"),
        ("The answer is: (1, 2)", "(1, 2)"),
        ("The answer is 5 or 6", "5 or 6"),
        ("Answer: \\(x^2\\)", "\\(x^2\\)"),
        ("Thus it equals $\\frac{3}{4}$.", "\\frac{3}{4}"),
        ("Thus $x = 3$, which is 1 more.", "1"),
        ("She pays $5 and then $72", "72"),
        ("x" * 100_000 + " so it is 9", "9"),
        ("9 is said early" + " no" * 20_000, None),
    ],
)
def test_extract_answer(text, expected):
    assert extract_answer(text) == expected


@pytest.mark.parametrize(
    "text, expected",
    [
        ("72", "72"),
        ("3.0", "3"),
        ("3.", "3"),
        (".5", "0.5"),
        ("-7", "-7"),
        ("+7", "7"),
        ("\u22127", "-7"),
        ("$18", "18"),
        ("\\$18", "18"),
        ("-$18", "-18"),
        ("$-18", "-18"),
        ("$18$", "18"),
        ("18%", "18"),
        ("18\\%", "18"),
        ("1,234,567.5", "1234567.5"),
        ("1{,}234", "1234"),
        ("**42**", "42"),
        ("007", "7"),
    ],
)
def test_parse_number_reads_one_number(text, expected):
    assert parse_number(text) == Decimal(expected)


@pytest.mark.parametrize("text", ["", "-", "$", "1,23", "1 2", "--5", "5 apples", "1/2", "x", "1e5", "NaN", "\u0665"])
def test_parse_number_refuses_what_is_not_one_number(text):
    assert parse_number(text) is None


@pytest.mark.parametrize(
    "answer, reference, expected",
    [
        ("3.0", "3", True),
        ("70,000", "70000", True),
        ("0.30", "0.3", True),
        ("0.1", "0.10000000000000000001", False),  # numbers are compared exactly
        ("-5", "5", False),
        ("\\frac{10}{2}", "5", True),
        ("\\frac{1}{2}", "0.5", True),
        ("1/2", "0.5", True),
        ("x = 5", "5", True),
        ("5 \\text{ apples}", "5", True),
        ("2x+1", "1+2x", True),
        ("\\sqrt{16}", "4", True),
        ("5 or 6", "5", False),  # hedging earns nothing
        ("5, 6", "6", False),
        ("\\{5, 6\\}", "5", False),
        ("5 \\le x", "5", False),
        ("", "5", False),
        ("}{", "5", False),
        ("\\frac{", "5", False),
        ("\x00", "5", False),
        ("(" * 200, "5", False),
        ("1" * 10_000 + "x", "5", False),
        ("+".join(["1"] * 200), "200", False),  # right, and longer than an answer may be
        ("9^{9^{9^{9}}}", "5", False),  # would run for ever if it were evaluated
        ("2^{99999999999}", "5", False),
        ("100000000!", "5", False),
    ],
)
def test_math_equal(answer, reference, expected):
    assert math_equal(answer, reference) is expected


def test_math_equal_works_outside_the_main_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(math_equal("\\frac{10}{2}", "5")))
    thread.start()
    thread.join()
    assert found == [True]


def verdict(check, answer, completion):
    answer, *accepted = answer.split("\n")
    found = check(Problem(id="0", text="?", answer=answer, accepted=tuple(accepted)), completion)
    assert found.reward == float(found.outcome == "correct")
    return found.outcome


@pytest.mark.parametrize(
    "answer, completion, outcome",
    [
        ("\\frac{1}{2}", "so we get 0.5. The answer is $\\dfrac12$.", "correct"),
        ("6630.65\n6630", "\\boxed{6630}", "correct"),
        ("1,2", "\\boxed{2} and \\boxed{1}", "correct"),
        ("5", "\\boxed{5} or \\boxed{6}", "wrong"),
        ("5", "\\boxed{6}", "wrong"),
        ("5", "\\boxed{}", "unparsable"),
        ("5", "I do not know", "unparsable"),
        ("5", "\\boxed{9^{9^{9^9}}}", "unparsable"),
        ("5", "\\boxed{\\unknown{5}}", "unparsable"),
        ("", "\\boxed{5}", "unparsable"),
    ],
)
def test_check_math(answer, completion, outcome):
    assert verdict(check_math, answer, completion) == outcome


@pytest.mark.parametrize(
    "completion, outcome",
    [
        ("B", "correct"),
        ("(B)", "correct"),
        ("b", "correct"),
        ("The answer is (B).", "correct"),
        ("A is too small, so the answer is B. Paris", "correct"),
        ("\\boxed{\\text{B}}", "correct"),
        ("\\boxed{\\textbf{(B) }5}", "correct"),
        ("**B**", "correct"),
        ("<think>A or C?</think>Answer: B", "correct"),
        ("C", "wrong"),
        ("The answer is (A) or (B).", "wrong"),
        ("A, B, C and D", "wrong"),
        ("\\boxed{BC}", "unparsable"),
        ("I cannot say", "wrong"),  # its I is a letter among the choices
        ("none of them", "unparsable"),
        ("", "unparsable"),
    ],
)
def test_check_choice(completion, outcome):
    assert verdict(check_choice, "B", completion) == outcome


@pytest.mark.parametrize(
    "answer, completion, outcome",
    [
        ("red  fox", " red fox\n", "correct"),
        ("red fox", "\\boxed{red fox}", "correct"),
        ("1/2", "\\boxed{0.5}", "wrong"),
        ("Red", "red", "wrong"),
        ("red", " ", "unparsable"),
        ("red", "\\boxed{}", "unparsable"),
    ],
)
def test_check_exact(answer, completion, outcome):
    assert verdict(check_exact, answer, completion) == outcome


@pytest.mark.parametrize(
    "answer, completion, outcome",
    [
        ("8.7 \\times 10^{8}", "\\boxed{8.75e8}", "correct"),
        ("8.7 \\times 10^{8}", "\\boxed{8.9e8}", "wrong"),
        ("100", "The answer is 101 m", "correct"),
        ("100", "The answer is 102 m", "wrong"),
        ("0", "\\boxed{0.001}", "wrong"),
        ("50", "\\boxed{1/2}", "wrong"),
        ("2\n300", "\\boxed{301}", "correct"),
        ("2", "\\boxed{x}", "unparsable"),
        ("x", "\\boxed{2}", "unparsable"),
    ],
)
def test_check_numeric(answer, completion, outcome):
    assert verdict(CheckNumeric(0.01), answer, completion) == outcome
