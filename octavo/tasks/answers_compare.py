"""Whether two answers in plain LaTeX are the same: their structure first, then the numbers and expressions in it.

Lists and sets want every element, in any order; tuples, intervals, vectors and matrices want them in their places and
within the same brackets. A name before an equals sign and a unit behind a number may be left out, but not differ.
"""

import re
from itertools import accumulate

from octavo.tasks.answers_plain import key, plain, words_key
from octavo.tasks.answers_symbolic import Equality, compare_expressions
from octavo.tasks.answers_values import parse_number, read_value, same_value

MAX_ELEMENTS = 64
"""Of a list; longer ones must be the same text."""
MAX_NESTED = 30
"""Brackets within brackets that are read."""
MAX_ANSWER_CHARS = 4096
"""Longer answers are not read."""

_NAME = r"(?:\\?[A-Za-z]+(?:_\{[^{}]*\}|_\w)?'*\s*(?:\([^()=<>]{1,20}\))?|\\text\{[^{}]*\})"
_PREFIX = re.compile(
    rf"\s*(?P<name>{_NAME}(?:\s*,\s*{_NAME})*|\({_NAME}(?:\s*,\s*{_NAME})+\))\s*(?:=(?!=)|:(?![0-9=])|\\approx|\\equiv)\s*(?P<rest>.+)"
)
_MEMBER = re.compile(rf"\s*(?P<name>{_NAME}|\({_NAME}(?:\s*,\s*{_NAME})+\))\s*\\in(?![A-Za-z])\s*(?P<rest>.+)")
_RELATION = re.compile(r"\\(?:le|ge|ne)(?![A-Za-z])|<|>|=")
_UNIT = re.compile(
    r"(?P<head>.*[0-9}})A-Za-z%])\s*(?P<unit>"
    r"(?:\s*/?\s*(?:\\cdot)?\s*\\text\{[^{}]*\}\s*(?:\^\s*\{?-?[0-9]\}?)?)+"  # \text{ cm}^2, one or several
    r"|\s*\^\\circ\s*(?:\\text\{[^{}]*\}|[CF])?"
    r"|\s+[A-Za-z][A-Za-z/ .]+(?:\^\{?[23]\}?)?)"  # words
)
_UNITS = {
    "mm": "mm", "millimeter": "mm", "cm": "cm", "centimeter": "cm", "m": "m", "meter": "m", "metre": "m", "km": "km",
    "kilometer": "km", "in": "in", "inch": "in", "ft": "ft", "foot": "ft", "feet": "ft", "yd": "yd", "yard": "yd",
    "mi": "mi", "mile": "mi", "g": "g", "gram": "g", "kg": "kg", "kilogram": "kg", "lb": "lb", "pound": "lb",
    "s": "s", "sec": "s", "second": "s", "min": "min", "minute": "min", "h": "h", "hr": "h", "hour": "h", "day": "day",
    "week": "week", "month": "month", "year": "year", "cent": "cent", "dollar": "dollar", "mph": "mph",
}  # fmt: skip
_OPENING, _CLOSING = (
    {"(": 1, "[": 1, "\\{": 1, "{": 1, "\\langle": 1},
    {")": 1, "]": 1, "\\}": 1, "}": 1, "\\rangle": 1},
)
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f]")
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_AND = re.compile(r"\s*(?:,\s*)?(?:\\text\{\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*")


def compare_answers(answer: str, reference: str) -> tuple[Equality, str]:
    """Whether an answer is the reference, as (equal, different or unreadable; why it is unreadable).

    Args:
        answer: as the completion wrote it, without \\boxed.
        reference: the right answer.
    """
    if (found := compare_numbers(answer, reference)) is not None:
        return found
    if _CONTROL.search(answer):
        return "unreadable", "control characters"
    if max(accumulate(("([{".count(c) - ")]}".count(c) for c in answer), initial=0)) > MAX_NESTED:
        return "unreadable", f"brackets nested more than {MAX_NESTED} deep"
    given, expected = plain(answer), plain(reference)
    if not given or not expected:
        return "unreadable", "empty" if not given else "the reference is empty"
    return _compare(given, expected)


def compare_numbers(answer: str, reference: str) -> tuple[Equality, str] | None:
    """The same of two plain numbers, and of an answer that is too long to be read; None for any other."""
    if len(answer) > MAX_ANSWER_CHARS:
        return "unreadable", f"longer than {MAX_ANSWER_CHARS} characters"
    one, other = parse_number(answer), parse_number(reference)
    if one is None or other is None or (one != other and "%" in answer + reference):
        return None
    return ("equal" if one == other else "different"), ""


def _compare(given: str, expected: str) -> tuple[Equality, str]:
    """Two plain answers."""
    if same_text(given, expected):
        return "equal", ""
    words = words_key(given), words_key(expected)
    if words[0] is not None and words[0] == words[1]:
        return "equal", ""
    for step in (_as_values, _as_named, _as_lists, _as_brackets, _as_unions, _as_intervals, _as_chains, _with_units):
        found = step(given, expected)
        if found is not None:
            return found
    if words[0] is not None and words[1] is not None:
        return "different", ""
    bases = [
        re.fullmatch(r"(?:\\text\{)?(-?[0-9A-Z.]*[0-9][0-9A-Z]*)\}?_\{?([0-9]+)\}?", key(each))
        for each in (given, expected)
    ]
    if any(bases):  # digits in a base
        same = all(bases) and bases[0].groups() == bases[1].groups()  # type: ignore[union-attr]
        return ("equal" if same else "different"), ""
    return compare_expressions(given, expected)


def same_text(given: str, expected: str) -> bool:
    """Whether two plain answers are the same but for spaces."""
    return key(given) == key(expected)


def _as_values(given: str, expected: str) -> tuple[Equality, str] | None:
    one, other = read_value(given), read_value(expected)
    if one is None or other is None:
        return None
    return ("equal" if same_value(one, other) else "different"), ""


def _as_named(given: str, expected: str) -> tuple[Equality, str] | None:
    """ "x=5" and "5" are the same, "x=5" and "y=5" are not; "x \\in [1,2]" is "[1,2]"."""
    one, other = (_PREFIX.fullmatch(each) or _membership(each) for each in (given, expected))
    if one is None and other is None or (one and _is_list(given)) or (other and _is_list(expected)):
        return None
    if one and other and key(one["name"]) != key(other["name"]):
        return None  # perhaps the same equation
    if other is None and one is not None and _RELATION.search(expected):
        return None
    if one is None and _RELATION.search(given):
        return None
    return _compare(one["rest"] if one else given, other["rest"] if other else expected)


def _is_list(text: str) -> bool:
    return len(_list_parts(text)) > 1


def _membership(text: str) -> re.Match[str] | None:
    match = _MEMBER.fullmatch(text)
    return match if match and re.match(r"\s*[\[(]|\s*\\\{", match["rest"]) else None


def _as_lists(given: str, expected: str) -> tuple[Equality, str] | None:
    """Sets and bare lists, in any order; plus-minus stands for both."""
    one, other = _elements(given), _elements(expected)
    if one is None and other is None:
        return None
    if one is None or other is None:
        one, other = one or [given], other or [expected]
    if len(one) != len(other) or len(one) > MAX_ELEMENTS:
        return "different", ""
    if one == [given] and other == [expected]:
        return None
    waiting, worst = list(other), "different"
    for element in one:
        found = [_compare(element, candidate)[0] for candidate in waiting]
        if "equal" not in found:
            worst = "unreadable" if "different" not in found else "different"
            return worst, "an element of the answer" if worst == "unreadable" else ""  # type: ignore[return-value]
        del waiting[found.index("equal")]
    return "equal", ""


def _elements(text: str) -> list[str] | None:
    """The elements of a set, of a list with commas, "and" or "or", or of a plus-minus; None for what is none."""
    bare = text.strip()
    braced = bare.startswith("\\{") and _closes(bare, "\\{") == len(bare)
    if braced:
        bare = bare[2:-2].strip()
        if re.search(r"\\mid|\||:", bare):
            return None  # a rule, not a list
    if (listed := re.fullmatch(r"\\text\{([^{},;]+(?:[,;][^{},;]+)+)\}", bare)) is not None:
        bare = listed[1]
    parts = [piece for part in _list_parts(bare) for piece in _plus_minus(part)]
    parts = _with_shared_name(parts)
    return parts if braced or len(parts) > 1 else None


def _with_shared_name(parts: list[str]) -> list[str]:
    """ "x = 1, 2" -> ["1", "2"]: a name stands for all that follow, if it does not come again with another."""
    first = _PREFIX.fullmatch(parts[0]) if len(parts) > 1 else None
    if first is None or any("=" in part for part in parts[1:]):
        return parts
    return [first["rest"], *parts[1:]]


def _list_parts(text: str) -> list[str]:
    """What commas, semicolons, "and" and "or" separate, outside all brackets."""
    return [text] if _in_brackets(text) else split(_AND.sub(",", text), ",;")


def _plus_minus(text: str) -> list[str]:
    """ "1 \\pm \\sqrt{2}" -> both; text with none or several as it is."""
    if len(re.findall(r"\\(?:pm|mp)(?![A-Za-z])", text)) != 1:
        return [text]
    return [re.sub(r"\\(?:pm|mp)(?![A-Za-z])\s*", sign, text).removeprefix("+") for sign in "+-"]


def _as_brackets(given: str, expected: str) -> tuple[Equality, str] | None:
    """Tuples, intervals and matrices: the same brackets, the same places. Brackets round one thing are dropped."""
    one, other = _bracketed(given), _bracketed(expected)
    if one is None and other is None:
        return None
    for own, text, rest in ((one, given, expected), (other, expected, given)):
        if own is not None and len(own[1]) == 1 and own[0] == "()":
            return _compare(own[1][0], rest) if text is given else _compare(rest, own[1][0])
    if one is None or other is None:
        return None
    if one[0] != other[0] or len(one[1]) != len(other[1]):
        return "different", ""
    return _all_equal([_compare(*pair) for pair in zip(one[1], other[1], strict=True)])


def _bracketed(text: str) -> tuple[str, list[str]] | None:
    """(brackets, elements) of a text that is one pair of brackets, or a matrix; None for others."""
    bare = text.strip()
    matrix = re.fullmatch(r"\\begin\{pmatrix\}(.*)\\end\{pmatrix\}", bare, flags=re.DOTALL)
    if matrix is not None and "\\begin" not in matrix[1]:
        rows = [row.split("&") for row in re.split(r"\\cr", matrix[1]) if row.strip()]
        return f"matrix of {len(rows)} rows", [cell.strip() for row in rows for cell in row]
    if len(ratio := split(bare, ":")) > 1:
        return "ratio", ratio
    if not _in_brackets(bare):
        return None
    opening = re.match(r"\\langle|.", bare)
    assert opening is not None
    closing = "\\rangle" if opening[0] == "\\langle" else bare[-1]
    inner = bare[opening.end() : len(bare) - len(closing)]
    return opening[0] + closing, [part.strip() for part in split(inner, ",;")]


def _in_brackets(text: str) -> bool:
    """Whether one pair of brackets, of either kind, holds the whole text."""
    opening = next((each for each in ("(", "[", "\\langle") if text.startswith(each)), None)
    return opening is not None and _closes(text, opening) == len(text)


def _closes(text: str, opening: str) -> int | None:
    """Place after the bracket that closes the one which the text starts with; half-open intervals close as any."""
    depth, place = 0, 0
    for token in _TOKEN.findall(text):
        place += len(token)
        depth += _OPENING.get(token, 0) - _CLOSING.get(token, 0)
        if depth == 0:
            return place
    return None


def _as_unions(given: str, expected: str) -> tuple[Equality, str] | None:
    one, other = (split(re.sub(r"\\cup(?![A-Za-z])", "\x00", each), "\x00") for each in (given, expected))
    if len(one) == len(other) == 1:
        return None
    if len(one) != len(other):
        return "different", ""
    return _as_lists(*(f"\\{{{'; '.join(parts)}\\}}" for parts in (one, other)))


def _as_intervals(given: str, expected: str) -> tuple[Equality, str] | None:
    """ "1 < x \\le 3" is "(1,3]" and "x > 2" is "(2, \\infty)"."""
    one, other = _interval(given), _interval(expected)
    if one is None and other is None or (one is None and not _in_brackets(given)):
        return None
    if other is None and not _in_brackets(expected):
        return None
    return _as_brackets(one[1] if one else given, other[1] if other else expected) if _same_name(one, other) else None


def _same_name(one: tuple[str, str] | None, other: tuple[str, str] | None) -> bool:
    return one is None or other is None or key(one[0]) == key(other[0])


def _interval(text: str) -> tuple[str, str] | None:
    """(name, interval) of an inequality that is solved for a name, or of "x \\in [1,2]"."""
    if (member := _membership(text)) is not None:
        return member["name"], member["rest"].strip()
    parts, signs = _RELATION.split(text), [sign.strip() for sign in _RELATION.findall(text)]
    parts = [part.strip() for part in parts]
    names = [
        place for place, part in enumerate(parts) if re.fullmatch(_NAME, part) and part not in ("\\infty", "\\pi", "e")
    ]
    if len(names) != 1 or len(parts) not in (2, 3) or "=" in signs or "\\ne" in signs:
        return None
    place = names[0]
    low, high, open_low, open_high = "-\\infty", "\\infty", True, True
    for index, sign in enumerate(signs):
        ascending = sign in ("<", "\\le")
        bound = parts[index] if index < place else parts[index + 1]
        below = (index < place) == ascending  # the bound lies below the name
        if below:
            low, open_low = bound, sign in "<>"
        else:
            high, open_high = bound, sign in "<>"
    if len(parts) == 3 and (place != 1 or (signs[0] in ("<", "\\le")) != (signs[1] in ("<", "\\le"))):
        return None
    return parts[place], f"{'(' if open_low else '['}{low}, {high}{')' if open_high else ']'}"


def _as_chains(given: str, expected: str) -> tuple[Equality, str] | None:
    """ "2 + 3 = 5" is 5, "4 = 5" is neither: what is a number on the way must be the reference too."""
    *before, last = split(given, "=") or [""]
    if not before or len(split(expected, "=")) > 1 or _RELATION.search(given.replace("=", "")):
        return None
    if any(map(_has_letters, before)) and (value := read_value(expected)) is not None and value.number == 0:
        return "different", ""  # an equation, not a result
    checked = [part for part in before if not _has_letters(part)]
    return _all_equal([_compare(part, expected) for part in (*checked, last)])


def _has_letters(text: str) -> bool:
    return re.search("[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", text)) is not None


def _with_units(given: str, expected: str) -> tuple[Equality, str] | None:
    """A unit behind a number may be left out; two known ones must agree."""
    one, other = _unit(given), _unit(expected)
    if one is None and other is None:
        return None
    if one is not None and other is not None and one[1] and other[1] and one[1] != other[1]:
        return "different", ""
    return _compare(one[0] if one else given, other[0] if other else expected)


def _unit(text: str) -> tuple[str, str] | None:
    """(what stands before the unit, the unit's name or "" if it is none of the known); None without a unit."""
    match = _UNIT.fullmatch(text)
    if match is None or not re.search(r"[0-9]|\\pi", match["head"]):
        return None
    if "\\circ" in match["unit"] and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", match["head"]):
        return None  # the argument is in degrees
    name = re.sub(r"\\text|\\cdot|[{}\s.]", "", match["unit"])
    base, _, power = name.partition("^")
    if not match["unit"].lstrip().startswith(("\\text", "^", "/")) and read_value(match["head"]) is None:
        return None  # words behind an expression may be variables
    bare = base.lower()
    known = _UNITS.get(bare) or _UNITS.get(bare.removesuffix("es")) or _UNITS.get(bare.removesuffix("s"))
    return match["head"].strip(), known + power if known else ""


def _all_equal(found: list[tuple[Equality, str]]) -> tuple[Equality, str]:
    for wanted in ("different", "unreadable"):
        for result in found:
            if result[0] == wanted:
                return result
    return "equal", ""


def split(text: str, separators: str) -> list[str]:
    """The parts of a text between separators that stand outside all brackets; commas in numbers separate nothing."""
    parts, depth, current = [], 0, ""
    for match in _TOKEN.finditer(text):
        token = match[0]
        depth += _OPENING.get(token, 0) - _CLOSING.get(token, 0)
        thousands = (
            token == ","
            and re.match(r"[0-9]{3}(?![0-9])", text[match.end() :])
            and re.search(r"(?:^|[^0-9.,])[0-9]{1,3}(?:,[0-9]{3})*$", text[: match.start()])
        )
        if depth == 0 and token in separators and not thousands:
            parts.append(current.strip())
            current = ""
        else:
            current += token
    return [part for part in (*parts, current.strip()) if part]
