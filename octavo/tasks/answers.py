"""Finds the final answer in a completion and compares it with a reference.

Both sides of a comparison are first read as numbers, exactly; only when that fails does math-verify parse
them. Whatever cannot be read, or takes too long, is a wrong answer: one odd completion must never stop a run.
"""

import re
import threading
from decimal import Decimal

MAX_EXPRESSION_CHARS = 256
PARSE_TIMEOUT_S = 2

_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(rf"(?P<sign>[+-]?)\s*\$?\s*(?P<minus>-?)(?P<unsigned>{_UNSIGNED})\s*%?\.?")
# Somewhere in a text. A minus after a digit, a letter or a bracket subtracts; it is no sign.
_NUMBER_IN_TEXT = re.compile(rf"(?:(?<![\w)\]}}.])-\s?)?\$?(?:(?<![\w)\]}}.])-)?{_UNSIGNED}%?")
# What a computer algebra system may chew on for hours: factorials, huge exponents, towers of powers.
_COSTLY = re.compile(r"!|\*\*|\^\s*\{?\s*-?[0-9]{4,}|\^[^ ]*\^|binom")


def extract_answer(text: str) -> str | None:
    """The final answer as written: the last \\boxed{}, else what follows the last ####, else the last number.

    An empty or unclosed last box, and a last #### with nothing behind it, are no answer (None): the completion
    announced one and did not give it, so a number from elsewhere in the text must not stand in.
    """
    start = text.rfind("\\boxed{")
    if start >= 0:
        return _balanced(text, start + len("\\boxed{")) or None
    _, marker, tail = text.rpartition("####")
    if marker:
        lines = tail.strip().splitlines()
        return _number_before_unit(lines[0].strip()) if lines else None
    numbers = _NUMBER_IN_TEXT.findall(text.replace("\u2212", "-").replace("\\$", "$"))
    return numbers[-1] if numbers else None


def parse_number(text: str) -> Decimal | None:
    """The value of a text that is one number and nothing else, e.g. "-$1,234.50", "18%" (18) or "3." (3)."""
    plain = text.strip().strip("*").removeprefix("\\(").removesuffix("\\)").strip()
    for written, read in (("\u2212", "-"), ("\\$", "$"), ("\\%", "%"), ("{,}", ","), ("\\!", ""), ("\\,", "")):
        plain = plain.replace(written, read)
    if len(plain) > 2 and plain[0] == plain[-1] == "$":
        plain = plain[1:-1].strip()
    match = _NUMBER.fullmatch(plain)
    if match is None or (match["sign"] and match["minus"]):
        return None
    value = Decimal(match["unsigned"].replace(",", ""))
    return value.copy_negate() if "-" in (match["sign"], match["minus"]) else value


def math_equal(answer: str, reference: str) -> bool:
    """Whether two answers are equal: as numbers if both are numbers, else through math-verify.

    Args:
        answer: what the completion gave, without \\boxed; numbers, LaTeX or plain expressions.
        reference: the right answer, in the same forms.
    """
    answer_value, reference_value = parse_number(answer), parse_number(reference)
    if answer_value is not None and reference_value is not None:
        return answer_value == reference_value
    if len(answer) > MAX_EXPRESSION_CHARS or _COSTLY.search(answer):
        return answer.strip() == reference.strip()
    from math_verify import parse, verify  # 0.5 s to import, and most answers are numbers

    # math-verify's timeout is a signal, which only the main thread may set.
    timeout_s = PARSE_TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
    try:
        expected = parse(f"${reference}$", parsing_timeout=timeout_s)
        given = parse(f"${answer}$", parsing_timeout=timeout_s)
        return bool(verify(expected, given, timeout_seconds=timeout_s))
    except Exception:  # noqa: BLE001 - a parser of free text: what it cannot read is wrong, whatever it raises
        return False


def _balanced(text: str, start: int) -> str:
    """The text from `start` up to the brace that closes the one before it; empty if none does."""
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end].strip()
    return ""


def _number_before_unit(line: str) -> str:
    """ "72 dollars" -> "72"; a line with no number, or with several, is kept, so that hedging earns nothing."""
    numbers = _NUMBER_IN_TEXT.findall(line.replace("\u2212", "-").replace("\\$", "$"))
    words_only = re.fullmatch(r"[^0-9=+*/^\\]*", _NUMBER_IN_TEXT.sub("", line))
    return numbers[0] if len(numbers) == 1 and words_only else line
