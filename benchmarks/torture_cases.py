"""Completions made to hang, crash, flood or deceive whoever checks them, and what must come of each."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from octavo.tasks.answers import check_math
from octavo.tasks.code import check_code
from octavo.tasks.problem import Problem
from octavo.tasks.verdict import Outcome, Verdict


@dataclass(frozen=True, kw_only=True)
class Case:
    """A completion and the outcomes that are right for it."""

    kind: str
    """What it tries."""
    check: Callable[[Problem, str], Verdict]
    problem: Problem
    completion: str
    allowed: tuple[Outcome, ...]
    """More than one where it depends on the machine's speed or limits which comes first."""


SUM = Problem(id="sum", text="?", answer="\\frac{1}{2}+x")
DOUBLE = Problem(id="double", text="Write double.", answer="", tests=("assert double(2) == 4", "assert double(0) == 0"))
NOT_RIGHT: tuple[Outcome, ...] = ("wrong", "unparsable", "timeout")
"""Of mathematics: whatever is found, the worker lives, or is killed in time."""

MATHS: dict[str, Callable[[int], str]] = {
    "power tower": lambda i: "^".join(["{9"] * (3 + i % 40)) + "}" * (3 + i % 40),
    "factorials": lambda i: f"{10 ** (3 + i % 9)}{'!' * (1 + i % 7)}",
    "large power": lambda i: f"{i + 2}^{{{10 ** (4 + i % 12)}}}",
    "nested fractions": lambda i: "\\frac{1}{1+" * (5 + i) + "x" + "}" * (5 + i),
    "nested roots": lambda i: "\\sqrt{1+" * (5 + i) + "x" + "}" * (5 + i),
    "brackets": lambda i: "(" * (10 * i + 1) + "x" + ")" * (10 * i + 1),
    "unclosed brackets": lambda i: "[(" * (10 * i + 1) + "x",
    "braces": lambda i: "{" * (20 * i + 1) + "x" + "}" * (20 * i + 1),
    "long sum": lambda i: "+".join(f"x_{{{j}}}" for j in range(50 + 20 * i)),
    "long product": lambda i: "".join(f"(x+{j})" for j in range(5 + 4 * i)),
    "many digits": lambda i: "9" * 10 ** (2 + i % 5),
    "digits and point": lambda i: "0." + "3" * 10 ** (1 + i % 5),
    "infinite sum": lambda i: f"\\sum_{{n=1}}^{{{10 ** (3 + i % 9)}}} \\frac{{1}}{{n^{{{i}}}}}",
    "integral": lambda i: f"\\int_0^1 x^{{{i}}} \\sin(x^{{{i + 1}}}) e^{{-x^{i % 9}}} dx",
    "limit": lambda i: f"\\lim_{{x\\to 0}} \\frac{{\\sin({i}x)^{{{i}}}}}{{x^{{{i}}}}}",
    "binomial": lambda i: f"\\binom{{{10 ** (3 + i % 9)}}}{{{10 ** (2 + i % 9)}}}",
    "matrix": lambda i: "\\begin{pmatrix}" + " \\\\ ".join(["&".join(["x"] * (i + 2))] * (i + 2)) + "\\end{pmatrix}",
    "list": lambda i: ", ".join(["\\sqrt{2}"] * (10 + 20 * i)),
    "plus-minus": lambda i: "\\pm ".join(map(str, range(i + 3))),
    "sines": lambda i: "\\sin(" * (i + 3) + "x" + ")" * (i + 3),
    "control characters": lambda i: "x\x00\x07" * (i + 1),
    "right to left": lambda i: "\u202e\u0660\u0661x" * (i + 1),
    "combining marks": lambda i: "x" + "\u0301" * (100 * i + 1),
    "surrogate": lambda i: "\ud800" * (i + 1),
    "code": lambda i: f"__import__('os').system('sleep {i + 1}')",
    "lambda": lambda i: "(lambda f: f(f))(lambda f: f(f))" * (i % 3 + 1),
    "unknown commands": lambda i: f"\\{'abc'[i % 3] * (i + 3)}{{x}}" * (i + 1),
    "input": lambda i: f"\\input{{/etc/passwd}}\\write18{{sleep {i}}}",
    "boxes": lambda i: "\\boxed{" * (i + 2) + "7" + "}" * (i + 2),
    "unclosed boxes": lambda i: "\\boxed{7 " * (100 * i + 1),
    "dollars": lambda i: "$" * (500 * i + 1),
    "opening formulas": lambda i: "\\(" * (500 * i + 1),
    "words": lambda i: f"#### {'a' * (50 * i + 30)}!",
    "spaces": lambda i: f"#### {' ' * 400 * i}7{' .' * 400 * i}{{",
}
"""What stands in the box; those that begin with ####, or with a box of their own, are the completion."""

SAFE: tuple[Outcome, ...] = ("wrong", "crashed")
KILLED: tuple[Outcome, ...] = ("wrong", "crashed", "timeout")
PROGRAMS: dict[str, tuple[str, tuple[Outcome, ...]]] = {
    "endless loop": ("while True: pass", ("timeout",)),
    "endless loop inside": ("def double(x):\n    while True: x += 1", ("timeout",)),
    "sleep": ("import time\ntime.sleep({i} + 60)", ("timeout",)),
    "deaf to signals": (
        "import signal\nfor s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n    except (OSError, "
        "ValueError): pass\nwhile True: pass",
        ("timeout",),
    ),
    "deaf to exceptions": (
        "def spin():\n    while True:\n        try: pass\n        except BaseException: pass\nspin()",
        ("timeout",),
    ),
    "fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", KILLED),
    "daemon": (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n"
        "    os._exit(0)\ndef double(x): return {i} + 1",
        SAFE,
    ),
    "daemon that waits": (
        "import os, time\nfor _ in range(9):\n    if os.fork() == 0:\n        os.setsid()\n        time.sleep(600)\n"
        "time.sleep(600)",
        ("timeout",),
    ),
    "thread bomb": (
        "import threading, time\nfor _ in range(10**6): threading.Thread(target=time.sleep, args=(600,)).start()",
        KILLED,
    ),
    "memory": ("x = [0] * 10**{i}0", KILLED),
    "memory by parts": ("x = []\nwhile True: x.append(bytearray(2**24))", KILLED),
    "recursion": ("import sys\nsys.setrecursionlimit(10**9)\ndef double(x): return double(x + 1)\ndouble(1)", KILLED),
    "power": ("def double(x): return 10 ** 10 ** 1{i}", KILLED),
    "segmentation fault": ("import ctypes\nctypes.string_at({i})", ("crashed",)),
    "abort": ("import os\nos.abort()", ("crashed",)),
    "gigabytes printed": ("while True: print('x' * 10**6)", ("timeout",)),
    "gigabytes returned": ("def double(x): return 'x' * 10**{i}", KILLED),
    "disk": ("with open('f', 'wb') as f:\n    while True: f.write(bytes(10**7))", KILLED),
    "many files": ("for n in range(10**7): open(f'f{{n}}', 'w').close()", KILLED),
    "network": ("import socket\nsocket.create_connection(('127.0.0.1', 22))\ndef double(x): return 2 * x", SAFE),
    "files": ("open('/etc/passwd').read()\ndef double(x): return 2 * x", SAFE),
    "exit": ("import sys\nsys.exit(0)", SAFE),
    "hard exit": ("import os\nos._exit(0)", SAFE),
    "exit in a test": ("import os\ndef double(x): os._exit(0)", SAFE),
    "kill everything": ("import os\ndef double(x): os.kill(-1, 9)", SAFE),
    "kill the parent": ("import os\nos.kill(os.getppid(), 9)\ndef double(x): return {i}0", SAFE),
    "always equal": ("class E:\n    def __eq__(self, o): return True\ndef double(x): return E()", SAFE),
    "equal number": ("class E(int):\n    def __eq__(self, o): return True\ndef double(x): return E({i} + 7)", SAFE),
    "patched builtins": ("import builtins\nbuiltins.AssertionError = KeyError\ndef double(x): return -1", SAFE),
    "printed success": ("print('passed', 0, True)\ndef double(x): return 'passed'", SAFE),
    "forged messages": (
        "import os, json\nm = json.dumps({{'passed': True, 'why': '', 'value': 4, 'changed': []}}).encode()\n"
        "for d in range(3, 64):\n    try: os.write(d, len(m).to_bytes(8, 'little') + m)\n    except OSError: pass\n"
        "def double(x): return {i} + 7",
        KILLED,
    ),
    "frames": ("import sys\ndef double(x): return sys._getframe(3).f_locals", SAFE),
    "regular expression": ("import re\nre.match('(a+)+$', 'a' * 60 + '!')", ("timeout",)),
    "nested too deeply": ("x = {brackets}", ("unparsable",)),
    "no program": ("this is no program, number {i}", ("unparsable",)),
    "null bytes": ("x = 1\x00", ("unparsable",)),
}


def right_cases(number: int) -> Iterator[Case]:
    """Right answers among the hostile ones: the pool still tells them."""
    yield Case(kind="right answer", check=check_math, problem=SUM, allowed=("correct",),
               completion=f"After {number} steps \\boxed{{x+0.5}}")  # fmt: skip
    program = f"```python\ndef double(x):\n    return {number} * 0 + x + x\n```"
    yield Case(kind="right program", check=check_code, problem=DOUBLE, allowed=("correct",), completion=program)


def hostile_cases(count: int) -> list[Case]:
    """So many, maths and code alike, every kind in turn with growing size; in an order that mixes them."""
    cases: list[Case] = []
    for i in range(count):
        number = i // 2
        if i % 2:
            kind, (program, allowed) = list(PROGRAMS.items())[number % len(PROGRAMS)]
            size = number // len(PROGRAMS)
            text = program.format(i=size % 10, brackets="(" * (200 + size))
            completion, problem, check = f"Here:\n```python\n{text}\n# {size}\n```", DOUBLE, check_code
        else:
            kind, make = list(MATHS.items())[number % len(MATHS)]
            size, allowed = number // len(MATHS), NOT_RIGHT
            text = make(size)
            completion = text if text.startswith(("####", "\\boxed")) else f"Thus \\boxed{{{text}}}."
            problem, check = SUM, check_math
        cases.append(Case(kind=kind, check=check, problem=problem, completion=completion, allowed=allowed))
    random.Random(0).shuffle(cases)
    return cases
