"""The exact value of an answer that is one number, however it is written, and when two such values are the same."""

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

MAX_EXPONENT = 400
"""Of ten, in a number that is read exactly; beyond it a completion could ask for a number that fills the memory."""
MAX_DIGITS = 400
ROUNDED_DIGITS = 6
"""Significant digits from which a decimal may stand for the exact number that it is rounded from."""

_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(rf"(?P<sign>[+-]?)\s*\$?\s*(?P<minus>-?)(?P<unsigned>{_UNSIGNED})\s*%?\.?")
# Somewhere in a text. A minus after a digit, a letter or a bracket subtracts; it is no sign.
NUMBER_IN_TEXT = re.compile(rf"(?:(?<![\w)\]}}.])-\s?)?\$?(?:(?<![\w)\]}}.])-)?{_UNSIGNED}%?")
_DECIMAL = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?|[0-9]{1,3}(?: [0-9]{3})+|[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
_POWER_OF_TEN = r"10\s*\^\s*[{(]?\s*(?P<power>[+-]?\s*[0-9]{1,4})\s*[})]?"
_SCIENTIFIC = re.compile(
    rf"(?:(?P<mantissa>{_DECIMAL})\s*(?:\\cdot|x)\s*{_POWER_OF_TEN}|(?P<plain>{_DECIMAL})[eE](?P<e>[+-]?[0-9]{{1,4}}))"
)
_FRACTION = re.compile(
    rf"(?:(?P<whole>[0-9]+)\s*)?\\frac\s*\{{\s*(?P<above>-?\s*{_DECIMAL})\s*\}}\s*\{{\s*(?P<below>-?\s*{_DECIMAL})\s*\}}"
)
_SLASH = re.compile(
    rf"(?:(?P<whole>[0-9]+)(?:\s+|\s*-\s*(?=[0-9]+/)))?(?P<above>{_DECIMAL})\s*/\s*(?P<below>{_DECIMAL})"
)
_REPEATING = re.compile(
    r"(?P<before>[0-9]*\.[0-9]*)(?:\\(?:overline|bar)\s*\{(?P<line>[0-9]+)\}|\\dot\s*\{?(?P<dot>[0-9])\}?)"
)


@dataclass(frozen=True)
class Value:
    """A number, e.g. Value(Fraction(1, 2), decimals=1) for "0.5"."""

    number: Fraction
    percent: bool = False
    """Written as a percentage; `number` is what stands before the sign."""
    decimals: int | None = None
    """Places after the point, for a plain decimal; None for an integer, a fraction or a power."""


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


def read_value(text: str) -> Value | None:
    """The value of plain LaTeX that is one number: integer, decimal, fraction, mixed, scientific, repeating, percent.

    Args:
        text: as `answers_plain.plain` gives it.

    Returns:
        None for anything else, and for numbers too long to be read exactly.
    """
    bare = re.sub(r"\s*\\?%$|\s*\\text\{percent\}$|\s+percent$", "", text.strip())
    percent = bare != text.strip()
    sign = -1 if bare.startswith("-") else 1
    bare = bare.removeprefix("-" if sign < 0 else "+").strip()
    while bare.startswith("(") and bare.endswith(")") and "(" not in bare[1:]:
        bare = bare[1:-1].strip()
    if len(bare) > MAX_DIGITS or not bare:
        return None
    number = _read_unsigned(bare)
    if number is None:
        return None
    decimals = len(bare.partition(".")[2]) if re.fullmatch(r"[0-9,]*\.[0-9]+", bare) else None
    return Value(sign * number, percent, decimals)


def same_value(answer: Value, reference: Value) -> bool:
    """Whether two numbers are equal.

    Exactly, but that a percentage is both itself and its hundredth, and a decimal of six significant digits or more
    equals the fraction that it is correctly rounded from.
    """
    candidates = [answer.number]
    others = [reference.number]
    if answer.percent != reference.percent:
        (candidates if answer.percent else others).append((answer if answer.percent else reference).number / 100)
    return any(
        one == other or rounded_from(answer, one, other) or rounded_from(reference, other, one)
        for one in candidates
        for other in others
        if answer.decimals is None or reference.decimals is None or one == other
    )


def rounded_from(value: Value, number: Fraction, exact: Fraction) -> bool:
    """Whether `number`, written as `value`, is `exact` rounded to the places it shows, six significant at least."""
    if value.decimals is None or exact.denominator == 1:
        return False
    digits = str(abs(value.number.numerator * 10**value.decimals // value.number.denominator)).lstrip("0")
    return len(digits) >= ROUNDED_DIGITS and abs(number - exact) * 2 <= Fraction(1, 10**value.decimals)


def _read_unsigned(text: str) -> Fraction | None:
    if re.fullmatch(_DECIMAL, text):
        return _fraction(text)
    if (match := _SCIENTIFIC.fullmatch(text)) is not None:
        power = match["power"] or match["e"]
        exponent = int(power.replace(" ", ""))
        mantissa = match["mantissa"] or match["plain"]
        return None if abs(exponent) > MAX_EXPONENT else _fraction(mantissa) * Fraction(10) ** exponent
    if (match := re.fullmatch(_POWER_OF_TEN, text)) is not None:
        exponent = int(match["power"].replace(" ", ""))
        return None if abs(exponent) > MAX_EXPONENT else Fraction(10) ** exponent
    if (match := _REPEATING.fullmatch(text)) is not None:
        return _repeating(match["before"], match["line"] or match["dot"])
    match = _FRACTION.fullmatch(text) or _SLASH.fullmatch(text)
    if match is None:
        return None
    above, below = _fraction(match["above"]), _fraction(match["below"])
    if below == 0 or (match["whole"] and (above < 0 or below < 0)):
        return None
    return int(match["whole"] or 0) + above / below


def _fraction(text: str) -> Fraction:
    bare = text.replace(",", "").replace(" ", "").rstrip(".")
    return Fraction("0" + bare if bare.startswith(".") else bare)


def _repeating(before: str, block: str) -> Fraction:
    """ "0.1", "6" -> 1/6."""
    whole, _, fixed = before.partition(".")
    scale = 10 ** len(fixed)
    return Fraction(int((whole + fixed) or "0"), scale) + Fraction(int(block), (10 ** len(block) - 1) * scale)
