"""Equality of LaTeX expressions: math-verify's parser, then numbers at fixed points; its comparison only for the rest.

The parser drops what it does not know (primes, subscripts of numbers, \\gcd), and simplification may run for ever or
take different things for equal, so a fixed list of commands is let in and scalars are never simplified. What is left
may still be slow: callers that must not wait run it in a `VerifierPool`.
"""

import re
import zlib
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

from octavo.tasks.answers_plain import closing_brace
from octavo.tasks.answers_values import ROUNDED_DIGITS, read_value

if TYPE_CHECKING:
    from sympy import Basic

Equality = Literal["equal", "different", "unreadable"]

MAX_EXPRESSION_CHARS = 256
MAX_POWER = 10**5
"""Of an exponent or a factorial's operand that is still evaluated."""
MAX_DEPTH = 12
"""Of nested brackets; the parser takes exponential time in it."""
DIGITS = 30
"""Of the numbers that stand for an expression at a point."""
TOLERANCE = 1e-18
"""Relative distance of two such numbers that are the same; they carry DIGITS digits."""

_COMMANDS = frozenset(
    (
        "frac sqrt cdot pm mp pi infty binom sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh ln log "
        "exp lfloor rfloor lceil rceil overline bar hat vec alpha beta gamma delta epsilon zeta eta theta iota "
        "kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Pi Sigma "
        "Upsilon Phi Psi Omega sum prod int lim to le ge ne in cup cap setminus emptyset mathbb begin end cr text "
        "circ max min ell partial "
    ).split()
)
_AS_VARIABLE = {
    "I": r"\text{I}",  # read as the imaginary unit
    "E": r"\text{E}",
    r"\gamma": r"\text{gammaletter}",  # as Euler's constant, and as the gamma function before a bracket
    **{rf"\{name}": rf"\text{{{name}}}" for name in ("aleph", "beth", "hbar")},
}
_SAMPLES = ("0.73", "1.37", "-0.61", "3", "7")
"""One value for every symbol, shifted a little from symbol to symbol; integers too, for floors and factorials."""


def compare_expressions(answer: str, reference: str) -> tuple[Equality, str]:
    """Whether two expressions in plain LaTeX are equal, and why not or why that cannot be said.

    A decimal of six significant digits or more equals the number that it is correctly rounded from.
    """
    if r"\ln" in answer + reference:  # \log is the natural logarithm to who writes \ln
        answer, reference = (re.sub(r"\\log(?![A-Za-z_])(?!\s*_)", r"\\ln", each) for each in (answer, reference))
    try:
        expected = _parse(reference)
    except ValueError as error:
        return "unreadable", f"the reference {error}"
    try:
        given = _parse(answer)
    except ValueError as error:
        return "unreadable", f"the answer {error}"
    return _compare(given, expected, _decimals(answer), _decimals(reference)), ""


def warm_up() -> None:
    """Load what an expression needs, a second's work, once for all worker processes."""
    compare_expressions("2x+1", "1+2x")


def _decimals(text: str) -> int | None:
    """Places after the point, of a plain decimal of enough digits to be the rounding of something."""
    value = read_value(text)
    digits = re.sub("[^0-9]", "", text).lstrip("0")
    return value.decimals if value is not None and value.decimals and len(digits) >= ROUNDED_DIGITS else None


@lru_cache(maxsize=256)
def _parse(text: str) -> "Basic":
    """The sympy object of plain LaTeX; ValueError says what is wrong with the text."""
    if len(text) > MAX_EXPRESSION_CHARS:
        raise ValueError(f"is longer than {MAX_EXPRESSION_CHARS} characters")
    if not _balanced(text):
        raise ValueError("has brackets that do not close")
    if _too_large(text):
        raise ValueError("would take too long to evaluate")
    text = _readable(text)
    if unknown := set(re.findall(r"\\([A-Za-z]+)", text)) - _COMMANDS:
        raise ValueError(f"holds \\{min(unknown)}, which is not read")
    if re.search(r"['\"?&#@~`:;]|[0-9]\s*_|[^\x00-\x7f]", re.sub(r"\\begin\{.*?\\end\{[a-z]*\}", "", text)):
        raise ValueError("holds characters that are not read")
    import sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    config = ConversionConfig(lowercase_symbols=False, interpret_contains_as_eq=False)
    written = text.replace(r"\cr", r"\\").replace("{pmatrix}", "{bmatrix}")
    try:
        found = latex2sympy(
            written, is_real=None, convert_degrees="\\circ" in text, normalization_config=None, conversion_config=config
        )
    except Exception as error:  # a parser of free text, which raises whatever it meets
        raise ValueError("is no mathematics that the parser knows") from error
    if not isinstance(found, sympy.Basic | sympy.MatrixBase):
        raise ValueError("is no mathematics that the parser knows")
    return found.xreplace({each: sympy.Rational(str(each)) for each in found.atoms(sympy.Float)})  # 0.1 is a tenth


def _readable(text: str) -> str:
    """What the parser takes for something else, or cannot read, under names that it takes for variables."""
    text = re.sub(r"\^\s*\{?\s*\\(?:top|intercal)(?![A-Za-z])\s*\}?", "^{T}", text)
    text = re.sub(r"\\math(?:frak|cal|scr)\s*\{\s*([A-Za-z])\s*\}", r"\\text{script\1}", text)
    text = re.sub(r"\^\s*\{?\s*(?:\*|\\ast|\\cdot)\s*\}?(?=\s*(?:$|[)=+-]))", r"_{\\text{star}}", text)  # an adjoint
    text = re.sub(r"\\(d?dot)\s*\{\s*\\?([A-Za-z]+)\s*\}", r"\\text{\1\2}", text.replace(r"{\odot}", "{sun}"))
    text = re.sub(r"\\(gcd|lcm|dim|ker)\s*(?:\(([^()]*)\)|([A-Za-z])(?![A-Za-z]))", _as_name, text)
    if re.search(r"\\mathbb\s*\{[A-Z]\}\s*[_^/(\[]|[0-9/]\s*\\mathbb", text):  # a group or space, no set of numbers
        text = re.sub(r"\\mathbb\s*\{([A-Z])\}", r"\\text{space\1}", text)
    primes = r"(?<=[A-Za-z])('+)(?!_)"  # they would be dropped
    text = re.sub(primes, lambda match: f"_{{{'q' * len(match[1])}}}", text)
    text = re.sub(r"\^\s*([0-9A-Za-z])", r"^{\1}", text)
    return re.sub(r"\\text\{[^{}]*\}|\\[A-Za-z]+|I|E(?=_)", lambda match: _AS_VARIABLE.get(match[0], match[0]), text)


def _as_name(match: re.Match[str]) -> str:
    """A variable for a function and its arguments as they are written, in any order; one of numbers stays unread."""
    written = match[3] if match[2] is None else match[2]
    if not re.search("[A-Za-z]", written):
        return match[0]
    arguments = ",".join(sorted(re.sub(r"\s", "", written).split(",")))
    digits = zlib.crc32(arguments.encode()).to_bytes(4)
    letters = (chr(97 + half) for byte in digits for half in divmod(byte, 16))
    return f"\\text{{{match[1]}{''.join(letters)}}}"


def _balanced(text: str) -> bool:
    """Whether braces and round brackets close, and are not nested deeper than anybody writes."""
    depth = {"{": 0, "(": 0}
    for token in re.findall(r"\\.|[{}()]", text):
        opening = {"}": "{", ")": "("}.get(token, token)
        if opening in depth:
            depth[opening] += 1 if token == opening else -1
            if not 0 <= depth[opening] <= MAX_DEPTH:
                return False
    return not any(depth.values())


def _too_large(text: str) -> bool:
    """Whether a power, factorial or binomial has an operand that would fill the memory, or stands on another's head."""
    for exponent in _exponents(text):
        inner = re.search(r"([0-9]+)\}?\)?\s*\^\s*[{(]?\s*([0-9]+)", exponent)
        if inner is not None and (len(inner[2]) > 2 or int(inner[1]) ** int(inner[2]) > MAX_POWER):
            return True
        if "!" in exponent or any("^" in above for above in _exponents(exponent)):
            return True
    if re.search(r"\\binom\s*\{[^{}]*\^", text):
        return True
    operands = re.findall(r"(?:\^\s*[-{(\s]*|\\binom\s*\{\s*)([0-9]+)|([0-9]+)\s*[})]?\s*!", text)
    return bool(re.search(r"!\s*[})]?\s*!", text)) or any(int(a or b) > MAX_POWER for a, b in operands)


def _exponents(text: str) -> list[str]:
    """What stands above each base."""
    found = []
    for match in re.finditer(r"\^\s*(\{)?", text):
        end = closing_brace(text, match.end()) if match[1] else match.end() + 1
        found.append(text[match.end() : end])
    return found


def _compare(given: Any, expected: Any, given_decimals: int | None, expected_decimals: int | None) -> Equality:
    import sympy

    if given == expected and not given.has(sympy.nan, sympy.zoo):
        return "equal"
    scalar = [isinstance(each, sympy.Expr) and not isinstance(each, sympy.MatrixExpr) for each in (given, expected)]
    if any(each.has(sympy.nan, sympy.zoo) or getattr(each, "is_infinite", False) for each in (given, expected)):
        return "different"
    if all(scalar):
        return _same_numbers(given, expected, given_decimals, expected_decimals)
    relation = [isinstance(each, sympy.core.relational.Relational) for each in (given, expected)]
    if all(relation):
        return _same_relation(given, expected)
    if any(scalar) or any(relation):
        return "different"
    from math_verify import verify

    return "equal" if verify(expected, given, timeout_seconds=None) else "different"


def _same_relation(given: Any, expected: Any) -> Equality:
    """Equations and inequalities are the same when their differences have a constant ratio, of the right sign."""
    import sympy

    if given.free_symbols != expected.free_symbols or not given.free_symbols:
        return "different"
    pairs = _at_points(given.lhs - given.rhs, expected.lhs - expected.rhs)
    ratios = [one / other for one, other in pairs if other != 0]
    if len(ratios) < 2 or not all(_close(ratio, ratios[0]) for ratio in ratios):
        return "different"
    if ratios[0] == 0 or sympy.im(ratios[0]) != 0:
        return "different"
    flipped = {"<": ">", ">": "<", "<=": ">=", ">=": "<="}
    wanted = expected.rel_op if ratios[0] > 0 else flipped.get(expected.rel_op, expected.rel_op)
    return "equal" if given.rel_op == wanted else "different"


def _same_numbers(given: Any, expected: Any, given_decimals: int | None, expected_decimals: int | None) -> Equality:
    """Scalars are equal when they are at every point where both have a value, two at least if there are variables."""
    import sympy

    rounded = given_decimals if given_decimals is not None else expected_decimals
    if given_decimals is not None and expected_decimals is not None:
        rounded = None
    pairs = _at_points(given, expected)
    real = [pair for pair in pairs if any(sympy.im(value) == 0 for value in pair)]
    pairs = real if len(real) >= 2 else pairs  # where no number is real, roots and logarithms are a matter of branches
    for one, other in pairs:
        if not _close(one, other) and (rounded is None or abs(one - other) * 2 > 10**-rounded):
            return "different"
    return "equal" if len(pairs) >= (2 if given.free_symbols | expected.free_symbols else 1) else "unreadable"


def _at_points(one: Any, other: Any) -> list[tuple[Any, Any]]:
    """The values of two expressions, to DIGITS digits, at the sample points where both have one."""
    import sympy

    symbols = sorted(one.free_symbols | other.free_symbols, key=str)
    pairs = []
    for sample in _SAMPLES if symbols else _SAMPLES[:1]:
        point = {
            symbol: sympy.Integer(sample) + place
            if sample.isdigit()
            else sympy.Rational(sample) + sympy.Rational(place, 17)
            for place, symbol in enumerate(symbols)
        } | {symbol: sympy.I for symbol in symbols if str(symbol) == "i"}
        values = [_value_at(expression, point) for expression in (one, other)]
        if None not in values:
            pairs.append((values[0], values[1]))
    return pairs


def _value_at(expression: Any, point: dict[Any, Any]) -> Any:
    import sympy

    try:
        value = sympy.N(expression.subs(point).doit(), DIGITS)
    except (ArithmeticError, TypeError, ValueError, AttributeError, NotImplementedError):
        return None
    return value if value.is_number and value.is_finite else None


def _close(one: Any, other: Any) -> bool:
    """Whether two numbers are the same but for rounding; never by being small both."""
    import sympy

    if one == other:
        return True
    difference = sympy.N(abs(one - other), DIGITS)
    size = max(sympy.N(abs(one), DIGITS), sympy.N(abs(other), DIGITS))
    return bool(difference <= TOLERANCE * size)
