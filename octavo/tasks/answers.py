"""Finds the final answer in a completion, and checks it against the reference.

The checks are what a task's `check` may be, by name in `checks`: `check_math`, `check_exact`, `check_choice`; and
`CheckNumeric`. None waits or crashes on purpose, but an expression may take for ever: `VerifierPool` bounds it.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from octavo.tasks.answers_compare import compare_answers, compare_numbers
from octavo.tasks.answers_plain import closing_brace, plain
from octavo.tasks.answers_values import NUMBER_IN_TEXT, read_value
from octavo.tasks.problem import Problem
from octavo.tasks.verdict import Verdict, judged

SEARCHED_CHARS = 20_000
"""At the end of a completion; an answer is the last thing it says."""

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?=[0-9A-Za-z]))")
_BETWEEN_BOXES = re.compile(r"(?:[\s$,;]|\\[()\[\],;]|\b(?:and|or)\b)*")
_PHRASE = re.compile(
    r"\banswer\b[^\n.:=]{0,40}?(?:\bis\b|[:=])\s*(?:simply|just|equal to|approximately)?\s*:?", re.IGNORECASE
)
_MATH = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+?)\$|\\\(((?:(?!\\\().)+?)\\\)|\\\[((?:(?!\\\[).)+?)\\\]", re.DOTALL)
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_SENTENCE_END = re.compile(r"[.!?](?=\s+[A-Z\"'(*]|\s*$)|\n")
_WORDS = r"(?:[\s.:;*]*(?:[A-Za-z]{2,}+[\s,.:;'\"*]*)*)"  # each text in one way only, or a match takes for ever
_NUMBER_AMONG_WORDS = re.compile(
    rf"(?:{_WORDS}(?<=[\s*])(?!-\s))?(?P<number>{NUMBER_IN_TEXT.pattern})(?:[.*]*\s+{_WORDS}|[.*]*)"
)
_CHOICE = re.compile(r"\(([A-Za-z])\)|(?<![A-Za-z0-9'])([A-J])(?![A-Za-z0-9'])")


def extract_answer(text: str) -> str | None:
    """The final answer as written: the last \\boxed{}, else what follows the last ####, else the last "answer is",
    else the last formula or number, whichever comes later.

    Thoughts up to </think> are left aside, unless nothing follows them. Boxes with nothing but "and", "or" or a comma
    between them are one answer of several parts. An empty or unclosed last box, and a last #### with nothing behind it,
    are no answer (None): the completion announced one and did not give it, so a number from elsewhere in the text must
    not stand in.
    """
    _, _, spoken = text[-SEARCHED_CHARS:].rpartition("</think>")
    answers = _TAGGED.findall(spoken)
    spoken = answers[-1] if answers else spoken
    if _BOX.search(spoken):
        return _boxed(spoken)
    _, marker, tail = spoken.rpartition("####")
    if marker:
        lines = tail.strip().splitlines()
        return _number_before_unit(lines[0].strip()) if lines else None
    if answers:
        return answers[-1].strip() or None
    phrases = list(_PHRASE.finditer(spoken))
    if phrases and (said := _sentence(spoken[phrases[-1].end() :])):
        return _number_before_unit(said)
    return _last_formula_or_number(spoken)


def math_equal(answer: str, reference: str) -> bool:
    """Whether two answers are equal; one that cannot be read is not. May be slow: see `answers_symbolic`."""
    return compare_answers(answer, reference)[0] == "equal"


def check_math(problem: Problem, completion_text: str) -> Verdict:
    """Correct if the final answer equals the reference as a number, expression, set, tuple, matrix or word."""
    answer = extract_answer(completion_text)
    if answer is None:
        return Verdict("unparsable", 0.0, "no answer")
    found = [compare_answers(answer, reference) for reference in (problem.answer, *problem.accepted)]
    equality, why = max(found, key=lambda result: ("unreadable", "different", "equal").index(result[0]))
    if equality == "unreadable":
        return Verdict("unparsable", 0.0, why or "no comparison")
    return judged(equality == "equal")


def check_numbers(problem: Problem, completion_text: str) -> Verdict | None:
    """`check_math`'s verdict where there is no answer, or it and the references are plain numbers; None where more is
    to be read than takes a millisecond."""
    answer = extract_answer(completion_text)
    references = (problem.answer, *problem.accepted)
    if answer is not None and any(compare_numbers(answer, reference) is None for reference in references):
        return None
    return check_math(problem, completion_text)


def check_exact(problem: Problem, completion_text: str) -> Verdict:
    """Correct if the final answer, or the whole completion where none is marked, is the reference, letter by letter."""
    answer = (
        extract_answer(completion_text) if re.search(r"\\boxed|####|<answer>", completion_text) else completion_text
    )
    if answer is None or not answer.strip():
        return Verdict("unparsable", 0.0, "no answer")
    return judged(" ".join(answer.split()) == " ".join(problem.answer.split()))


def check_choice(problem: Problem, completion_text: str) -> Verdict:
    """Correct if the final answer is the reference's letter: "(B)", "\\text{B}", "B. Paris" and "B" are all B."""
    spoken = completion_text[-SEARCHED_CHARS:].rpartition("</think>")[2]
    answer = extract_answer(spoken) if re.search(r"\\boxed|####|<answer>", spoken) else None
    if answer is None:
        phrases = list(_PHRASE.finditer(spoken))
        answer = _sentence(spoken[phrases[-1].end() :]) if phrases else spoken
    bare = re.sub(r"\\text\{([^{}]*)\}", r"\1", plain(answer))
    letters = {(match[1] or match[2]).upper() for match in _CHOICE.finditer(bare.strip().strip("*"))}
    if len(bare) == 1 and bare.isalpha():
        letters = {bare.upper()}
    if not letters:
        return Verdict("unparsable", 0.0, "no letter")
    return judged(
        letters == {problem.answer.strip().strip("()").upper()}, "" if len(letters) == 1 else "several letters"
    )


@dataclass(frozen=True)
class CheckNumeric:
    """Correct if the final answer is a number within a relative distance of the reference, which is one."""

    relative_tolerance: float = 1e-2

    def __call__(self, problem: Problem, completion_text: str) -> Verdict:
        """The verdict on a completion."""
        answer = extract_answer(completion_text)
        number = None if answer is None else _one_number(answer)
        references = [value for text in (problem.answer, *problem.accepted) if (value := _one_number(text)) is not None]
        if number is None or not references:
            return Verdict("unparsable", 0.0, "no number" if number is None else "the reference is no number")
        tolerance = Fraction(self.relative_tolerance)
        return judged(any(abs(number - reference) <= tolerance * abs(reference) for reference in references))


def _one_number(text: str) -> Fraction | None:
    numbers = [] if "\\" in text else NUMBER_IN_TEXT.findall(text)
    value = read_value(plain(text)) or (read_value(plain(numbers[0])) if len(numbers) == 1 else None)
    return None if value is None else value.number / (100 if value.percent else 1)


def _boxed(text: str) -> str | None:
    """What the last box holds; with the boxes before it, if only a comma or a word is between."""
    found: list[str] = []
    place = -1
    for match in _BOX.finditer(text):
        if match.start() < place:
            continue  # inside the last one
        end = closing_brace(text, match.end()) if match[0].endswith("{") else match.end() + 1
        inside = "" if end is None else text[match.end() : end].strip()
        joined = found and place >= 0 and _BETWEEN_BOXES.fullmatch(text, place, match.start())
        found = [*found, inside] if joined else [inside]
        place = len(text) if end is None else end + match[0].endswith("{")
    if not all(found):
        return None
    return ", ".join(dict.fromkeys(found))


def _sentence(text: str) -> str:
    """The rest of a sentence that gives the answer, without what only decorates it."""
    text = text.lstrip()
    end = None
    for match in _SENTENCE_END.finditer(text):
        if text[: match.start()].count("$") % 2 == 0 and text[: match.start()].strip():
            end = match.start()
            break
    return text[:end].strip().strip("*").strip()


def _number_before_unit(line: str) -> str:
    """ "72 dollars" -> "72"; a line with anything but words and one number is kept, so that hedging earns nothing."""
    match = _NUMBER_AMONG_WORDS.fullmatch(line.replace("\u2212", "-").replace("\\$", "$"))
    return match["number"] if match else line


def _last_formula_or_number(text: str) -> str | None:
    formulas = list(_MATH.finditer(text))
    last = formulas[-1] if formulas else None
    plain_text = text.replace("\u2212", "-").replace("\\$", "$")
    after = NUMBER_IN_TEXT.findall(text[last.end() :].replace("\u2212", "-")) if last is not None else []
    if last is not None and not after:
        return next(group for group in last.groups() if group is not None).strip()
    numbers = after or NUMBER_IN_TEXT.findall(plain_text)
    return numbers[-1] if numbers else None
