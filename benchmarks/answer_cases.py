"""Completions made from the real data sets' answers, for benchmarks/answers.py and the tests."""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from octavo.tasks import answers_compare
from octavo.tasks.answers import check_math
from octavo.tasks.answers_plain import key, plain
from octavo.tasks.datasets import DatasetConfig
from octavo.tasks.presets import PresetName
from octavo.tasks.problem import Problem
from octavo.tasks.verdict import Verdict

SETS: tuple[PresetName, ...] = (
    "gsm8k", "math", "math500", "aime24", "aime_1983_2023", "amc22", "olympiadbench", "minerva", "dapo_math_17k",
    "deepmath_5k", "deepscaler_math", "deepscaler_sub",
)  # fmt: skip
"""Presets of maths that are in $OCTAVO_DATA."""
FORMS = ("prose", "boxed", "hashes", "rewritten")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A completion and what it should be judged as."""

    problem: Problem
    form: str
    """One of FORMS, or shuffled."""
    completion: str
    expected: bool
    """Whether it is right."""


def problems_of(name: PresetName, rows: int | None = None) -> list[Problem]:
    """The problems of a preset, without what a check does not read; a sample of them."""
    task = DatasetConfig(preset=name).build()
    found = [
        replace(problem, text="", solution="", appendix="", task=name)
        for problem in (*task.train, *task.test)
    ]  # fmt: skip
    return found if rows is None else random.Random(name).sample(found, min(rows, len(found)))


def right_cases(problem: Problem) -> Iterator[Case]:
    """The problem's answer in every form."""
    bare = re.sub(r"(?<!\\)\$", "", problem.answer)
    completions = {
        "prose": f"We add both sides and simplify.\nSo the answer is ${bare}$.",
        "boxed": f"Hence 3 of 7 cases remain and we get $\\boxed{{{bare}}}$ as claimed.",
        "hashes": f"We halve 48.\n#### {problem.answer}",
        "rewritten": f"Thus \\boxed{{{rewritten(bare)}}}.",
    }
    for form in FORMS:
        yield Case(problem=problem, form=form, completion=completions[form], expected=True)


def shuffled_cases(problems: list[Problem]) -> Iterator[Case]:
    """Every problem with the answer of another of its set; right where the two are the same but for how they are set
    in type."""
    others = list(problems)
    random.Random(0).shuffle(others)
    for problem, other in zip(problems, others, strict=True):
        expected = any(
            key(plain(other.answer)) == key(plain(answer)) for answer in (problem.answer, *problem.accepted)
        )  # fmt: skip
        bare = re.sub(r"(?<!\\)\$", "", other.answer)
        yield Case(problem=problem, form="shuffled", completion=f"\\boxed{{{bare}}}", expected=expected)


def rewritten(answer: str) -> str:
    """The same answer, written otherwise, by rule and without looking at what it means."""
    if re.fullmatch(r"[0-9]{4,6}", answer):
        return f"{answer[:-3]}{{,}}{answer[-3:]}"
    if re.fullmatch(r"-?[0-9]{1,3}", answer):
        return f"x = {answer}.0"
    if re.fullmatch(r"-?[0-9]+\.[0-9]{1,4}", answer):
        whole, _, places = answer.partition(".")
        return f"\\frac{{{whole}{places}}}{{1{'0' * len(places)}}}"
    text = re.sub(r"(?<![\\A-Za-z])\\frac(?![A-Za-z])", r"\\dfrac", answer.replace(r"\dfrac", r"\frac"))
    text = re.sub(r"\\left\s*|\\right\s*", "", text)
    if re.fullmatch(r"\([^()]*,[^()]*\)", text):
        text = f"\\left( {text[1:-1]} \\right)"
    text = re.sub(r"\s*(?<!\^)(?<!\{)\+\s*", " + ", text)
    return text.replace(r"\cdot", r"\times").replace("^\\circ", "^{\\circ}").replace("\\text{", "\\mbox{")


def check_values(problem: Problem, completion: str) -> Verdict:
    """`check_math` without its short cut for equal texts, so that values, expressions and words are compared."""
    answers_compare.same_text = lambda given, expected: False
    return check_math(problem, completion)
