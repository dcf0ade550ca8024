"""One spelling for the many of an answer: LaTeX, Unicode and plain text in, plain LaTeX out. Changes no value.

What is left: no delimiters, no \\left, \\right, no thin spaces, every argument of \\frac and \\sqrt in braces, words in
\\text{...}, and one name for each symbol.
"""

import re
import unicodedata

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁽⁾ⁿⁱ", "0123456789+-()ni", strict=True))
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋ₙ", "0123456789+-n", strict=True))
_SYMBOLS = {
    "−": "-", "–": "-", "‐": "-", "‑": "-", "﹣": "-", "×": r"\cdot ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
    "÷": "/", "∕": "/", "⁄": "/", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ", "⩾": r"\ge ",
    "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "±": r"\pm ",
    "°": r"^\circ ", "º": r"^\circ ", "′": "'", "’": "'", "‘": "'", "“": '"', "”": '"', "∖": r"\setminus ",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℚ": r"\mathbb{Q}", "ℕ": r"\mathbb{N}", "ℂ": r"\mathbb{C}",
    "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ",
    "π": r"\pi ", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "ε": r"\epsilon ",
    "θ": r"\theta ", "λ": r"\lambda ", "μ": r"\mu ", "σ": r"\sigma ", "τ": r"\tau ", "φ": r"\phi ", "ϕ": r"\phi ",
    "ω": r"\omega ", "ρ": r"\rho ", "Δ": r"\Delta ", "Ω": r"\Omega ", "Σ": r"\Sigma ", "Φ": r"\Phi ", "Θ": r"\Theta ",
    "€": "", "£": "", "¥": "", "₹": "", "…": r"\ldots ", "√": r"\sqrt ", "∛": r"\sqrt[3]", "∶": ":",
}  # fmt: skip
_NAMES = {
    r"\leq": r"\le", r"\leqslant": r"\le", r"\leqq": r"\le", r"\geq": r"\ge", r"\geqslant": r"\ge", r"\geqq": r"\ge",
    r"\neq": r"\ne", r"\times": r"\cdot", r"\ast": r"\cdot", r"\varnothing": r"\emptyset", r"\dots": r"\ldots",
    r"\cdots": r"\ldots", r"\lbrace": r"\{", r"\rbrace": r"\}", r"\lvert": "|", r"\rvert": "|", r"\vert": "|",
    r"\lbrack": "[", r"\rbrack": "]", r"\colon": ":", r"\div": "/", r"\varepsilon": r"\epsilon", r"\varphi": r"\phi",
    r"\dfrac": r"\frac", r"\tfrac": r"\frac", r"\cfrac": r"\frac", r"\dbinom": r"\binom", r"\tbinom": r"\binom",
    r"\bmatrix": r"\pmatrix", r"\degree": r"^\circ", r"\degrees": r"^\circ", r"\lt": "<", r"\gt": ">",
    r"\mleft": "", r"\mright": "", r"\left": "", r"\right": "", r"\displaystyle": "", r"\textstyle": "",
    r"\limits": "", r"\nolimits": "", r"\quad": " ", r"\qquad": " ", r"\pounds": "", r"\euro": "", r"\bigl": "",
    r"\bigr": "", r"\Bigl": "", r"\Bigr": "", r"\biggl": "", r"\biggr": "", r"\big": "", r"\Big": "", r"\bigg": "",
    r"\Bigg": "", r"\rm": "", r"\bf": "", r"\it": "", r"\boldmath": "", r"\thinspace": "", r"\land": r"\text{and}",
    r"\lor": r"\text{or}", r"\wedge": r"\wedge", r"\mathstrut": "", r"\null": "", r"\strut": "",
}  # fmt: skip
_COMMAND = re.compile(r"\\[A-Za-z]+")
_FONTS = re.compile(
    r"\\(?:text|mbox|hbox|textbf|textit|textrm|textnormal|textsf|texttt|mathrm|mathbf|mathit|mathsf|mathnormal"
    r"|boldsymbol|bm|pmb|operatorname\*?|emph|mathop|underline)\s*\{([^{}]*)\}"
)
_BOX = re.compile(r"\\(?:boxed|fbox|framebox)\s*\{")
_SPACES = re.compile(r"\\[!,;:> ]|\\hspace\*?\s*\{[^{}]*\}|~|[\s\u200b\u2060\ufeff]+")
_ARGUMENT = r"\s*(\{|\\[A-Za-z]+|[0-9A-Za-z])"
_ONE_TOKEN = re.compile(r"([\^_])\{([0-9A-Za-z])\}")


def plain(text: str) -> str:
    """The answer in plain LaTeX, e.g. "$\\dfrac12$." -> "\\frac{1}{2}", "½" -> "\\frac{1}{2}"."""
    text = re.sub(r"\\\\(?:\[[^\]]*\])?", r"\\cr ", _from_unicode(text))  # the end of a row
    text = re.sub(r",\s*\\!\s*|\{,\}\s*(?=[0-9]{3})", ",", text)  # thousands
    text = re.sub(r"(?<=[0-9])\\[, ](?=[0-9]{3}(?![0-9]))", "", text)
    text = text.replace("\\$", "").replace("\\%", "%").replace("\\#", "").replace("\\_", "_").replace("\\&", "&")
    text = _without_delimiters(text)
    text = _FONTS.sub(_words, text)
    text = _SPACES.sub(lambda match: "" if match[0] in ("\\!", "\u200b", "\u2060", "\ufeff") else " ", text)
    text = _COMMAND.sub(lambda match: _NAMES.get(match[0], match[0]), text)
    text = re.sub(r"\\(begin|end)\s*\{(?:[bBvV]?matrix|array|smallmatrix)\}(?:\{[clr|]*\})?", r"\\\1{pmatrix}", text)
    text = re.sub(r"(?<!\^)(?<!\^\{)\*(?!\*)", r"\\cdot ", re.sub(r"(?<=\w)\*\*(?=[\w({-])", "^", text))
    text = re.sub(r"<=", r"\\le ", re.sub(r">=", r"\\ge ", re.sub("!=", r"\\ne ", text)))
    text = re.sub(r"(?<![A-Za-z\\])(pi|infinity|inf)(?![A-Za-z])", _spelt_symbol, text)
    text = re.sub(r"(?<![A-Za-z\\])sqrt\s*(?=[({0-9])", r"\\sqrt ", text)
    text = re.sub(r"\^\s*(-?[0-9]{2,}|-[0-9A-Za-z])", r"^{\1}", _with_braces(text))
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?", r"^\\circ ", text)
    text = re.sub(r"\^\s*(?:\{((?:\s*\\prime)+)\s*\}|(\\prime)(?![A-Za-z]))", _primes, text)
    text = re.sub(r"^\s*\\approx(?![A-Za-z])|[.,;:\s]+$", "", re.sub(r" {2,}", " ", text).strip()).strip()
    while text.startswith("{") and closing_brace(text, 1) == len(text) - 1:
        text = text[1:-1].strip()
    return text


def key(text: str) -> str:
    """What two plain spellings must share to be the same text: no spaces but those that keep a command apart."""
    apart = re.sub(r"(\\[A-Za-z]+|[0-9]) (?=[A-Za-z0-9])", "\\1\x00", text)
    text = _ONE_TOKEN.sub(r"\1\2", apart.replace(" ", ""))
    return text.replace("\x00", " ").replace("{}", "")


def words_key(text: str) -> str | None:
    """What two answers in words must share, e.g. "\\text{4:30 p.m.}" -> "4:30pm"; None for what is no words."""
    inside = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text)
    bare = inside.strip().strip("()").strip()
    if "\\" in inside or not bare or not re.search(r"[A-Za-z]", bare):
        return None
    explicit = "\\text" in text or (text.startswith("(") and len(bare) == 1)
    if not explicit and not re.fullmatch(r"[A-Za-z][A-Za-z .'-]+|[0-9]{1,2}:[0-9]{2}\s*[apAP]\.?[mM]\.?", bare):
        return None
    return re.sub(r"[\s.'\"-]", "", bare).casefold() or None


def _from_unicode(text: str) -> str:
    """ASCII and LaTeX for what Unicode has a character of."""
    text = re.sub(f"[{''.join(_SUPERSCRIPTS)}]+", lambda m: "^{" + "".join(_SUPERSCRIPTS[c] for c in m[0]) + "}", text)
    text = re.sub(f"[{''.join(_SUBSCRIPTS)}]+", lambda m: "_{" + "".join(_SUBSCRIPTS[c] for c in m[0]) + "}", text)
    text = re.sub("[¼½¾⅐-⅞]", _vulgar_fraction, text)
    text = "".join(_SYMBOLS.get(character, character) for character in text)
    return unicodedata.normalize("NFKC", text)  # full-width digits and letters, unusual spaces


def _vulgar_fraction(match: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", match[0]).partition("\u2044")
    return f"\\frac{{{above}}}{{{below}}}"


def _without_delimiters(text: str) -> str:
    """Dollars, \\( \\), \\[ \\], bold stars and boxes, wherever they stand."""
    text = text.replace("$", "").replace("\\(", "").replace("\\)", "").replace("\\[", "")
    text = re.sub(r"(?<!\\)\\\](?!\S*\\end)", "", text).strip()
    while len(text) > 4 and text.startswith("**") and text.endswith("**"):
        text = text[2:-2].strip()
    while (box := _BOX.search(text)) is not None:
        end = closing_brace(text, box.end())
        if end is None:
            break
        text = text[: box.start()] + text[box.end() : end] + text[end + 1 :]
    return text


def closing_brace(text: str, start: int) -> int | None:
    """Place of the brace that closes the one just before `start`; None if none does."""
    depth = 1
    for match in re.finditer(r"\\.|[{}]", text[start:], flags=re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return start + match.start()
    return None


def _words(match: re.Match[str]) -> str:
    content = match[1].replace("~", " ").strip()
    if not content:
        return " "
    return content if len(content) == 1 or not re.search("[A-Za-z]", content) else f"\\text{{{content}}}"


def _primes(match: re.Match[str]) -> str:
    return "'" * match[0].count("prime")


def _spelt_symbol(match: re.Match[str]) -> str:
    return "\\pi " if match[1] == "pi" else "\\infty "


def _with_braces(text: str) -> str:
    """Braces round the arguments of \\frac, \\binom and \\sqrt: "\\frac 1{72}" -> "\\frac{1}{72}", "\\sqrt2"."""
    done, rest = [], text
    while (command := re.search(r"\\(frac|binom|sqrt)(?![A-Za-z])", rest)) is not None:
        done.append(rest[: command.start()] + command[0])
        rest = rest[command.end() :]
        if command[1] == "sqrt":
            root = re.match(r"\s*\[[^\[\]]*\]", rest)
            if root is not None:
                done.append(root[0].strip())
                rest = rest[root.end() :]
        arguments, rest = _arguments(rest, 1 if command[1] == "sqrt" else 2)
        done.append(arguments)
    return "".join(done) + rest


def _arguments(text: str, count: int) -> tuple[str, str]:
    """The next `count` arguments, each in braces, and what follows; stops at one that cannot be read."""
    found = ""
    for _ in range(count):
        argument = re.match(_ARGUMENT, text)
        if text.lstrip().startswith("(") and count == 1:  # sqrt(2)
            end = _closing_bracket(text)
            if end is not None:
                found += "{" + _with_braces(text[text.index("(") + 1 : end]) + "}"
                text = text[end + 1 :]
                continue
        if argument is None:
            break
        if argument[1] == "{":
            end = closing_brace(text, argument.end())
            if end is None:
                break
            inner, text = text[argument.end() : end], text[end + 1 :]
        else:
            digits = re.match(r"\s*([0-9]+)", text) if count == 1 else None
            inner, text = (digits[1], text[digits.end() :]) if digits else (argument[1], text[argument.end() :])
        found += "{" + _with_braces(inner).strip() + "}"
    return found, text


def _closing_bracket(text: str) -> int | None:
    depth = 0
    for place, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0 and character == ")":
            return place
    return None
