"""The table of answers in answer_cases.txt, and what cannot be read at all."""

from pathlib import Path

import pytest

from octavo.tasks.answers_compare import MAX_ANSWER_CHARS, compare_answers

LINES = (Path(__file__).parent / "answer_cases.txt").read_text(encoding="utf-8").splitlines()
CASES = [line for line in LINES if line and not line.startswith("# ")]
UNREADABLE = [
    ("", "5"),
    ("   ", "5"),
    ("}{", "5"),
    ("\\frac{", "5"),
    ("\x00", "5"),
    ("(" * 200, "5"),
    ("1" * 10_000 + "x", "5"),
    ("$$", "5"),
    ("+".join(["1"] * 200), "200"),
    ("9^{9^{9^{9}}}", "5"),
    ("2^{99999999999}", "5"),
    ("100000000!", "5"),
    ("(3!)!!", "5"),
    ("\\binom{10^9}{10^8}", "5"),
    ("\\binom{1000000000}{500000000}", "5"),
    ("x^{x^{x^{x}}}", "5"),
    ("\\gcd(4,2)", "1"),
    ("\\undefined{3}", "3"),
    ("\\left(", "5"),
    ("???", "5"),
    ("\\", "5"),
    ("{" * 3000, "5"),
    ("\\frac" * 500, "5"),
    ("\U0001f600", "5"),
    ("__import__('os')", "5"),
    ("9" * (MAX_ANSWER_CHARS + 1), "9"),
    ("5", ""),
    ("\\sqrt", "5"),
    ("\\int", "5"),
    ("(" * 2000 + "5" + ")" * 2000, "5"),
    ("[" * 50, "5"),
]


def split_case(line):
    """A line of the table: "answer == reference" or "answer != reference"."""
    sign = " == " if " == " in line else " != "
    answer, reference = line.split(sign)
    for name, character in (("\\u200b", "\u200b"), ("\\u00a0", "\u00a0"), ("\\u2009", "\u2009")):
        answer = answer.replace(name, character)
    return answer, reference, "equal" if sign == " == " else "different"


def test_there_are_three_hundred_cases():
    assert len(set(CASES)) + len(UNREADABLE) >= 300
    assert len([line for line in CASES if " != " in line]) >= 80


@pytest.mark.parametrize("line", CASES)
def test_compare(line):
    answer, reference, expected = split_case(line)
    assert compare_answers(answer, reference) == (expected, "")


@pytest.mark.parametrize("answer, reference", UNREADABLE, ids=lambda text: repr(text[:20]))
def test_what_cannot_be_read_is_neither_equal_nor_different(answer, reference):
    equality, why = compare_answers(answer, reference)
    assert equality == "unreadable" and why
