import json
import tempfile
from pathlib import Path

import pytest

from octavo.tasks.code import CheckCode, extract_program
from octavo.tasks.problem import Problem
from octavo.tasks.sandbox import ALLOW_UNISOLATED, Limits, Sandbox, _mount_point, refusal
from octavo.tasks.verifiers import VerifierConfig, VerifierPool

pytestmark = pytest.mark.skipif(refusal() is not None, reason=f"no sandbox here: {refusal()}")
CHECK = CheckCode(timeout_s=1.0, limits=Limits(memory_mb=512))
DOUBLE = Problem(
    id="0",
    text="Write double.",
    answer="",
    tests=("assert double(2) == 4", "assert double('a') == 'aa'", "assert double([1]) == [1, 1]"),
)
ADD = Problem(
    id="1",
    text="Add.",
    answer="",
    tests=(json.dumps({"stdin": "1 2\n", "stdout": "3\n"}), '{"stdin": "0 5", "stdout": "5"}'),
)
HEAD = Problem(
    id="2",
    text='import math\n\n\ndef half(x):\n    return x / 2\n\n\ndef root(x):\n    """The root of half of x."""\n',
    answer="",
    tests=("def check(f):\n    assert f(8) == 2.0\n    assert half(f(32)) == 2.0\n\ncheck(root)",),
)


def fenced(program):
    return f"Here it is:\n```python\n{program}\n```\nIt passes."


@pytest.mark.parametrize(
    "problem, completion, outcome",
    [
        (DOUBLE, fenced("def double(x): return x * 2"), "correct"),
        (DOUBLE, fenced("double = lambda x: x + x"), "correct"),
        (DOUBLE, "def double(x):\n    return x * 2\n\nThat is all.", "correct"),
        (DOUBLE, "[BEGIN]\ndef double(x):\n    return x * 2\n[DONE]", "correct"),
        (DOUBLE, "<think>```python\nx\n```</think>" + fenced("def double(x): return x * 2"), "correct"),
        (DOUBLE, fenced("def double(x): return x * 2") + "\nFor example\n```python\nprint(double(3))\n```", "correct"),
        (DOUBLE, "```python\ndef double(x):\n    return x * 2", "correct"),  # cut off after the program
        (DOUBLE, fenced("def double(x): return x * 3"), "wrong"),
        (DOUBLE, fenced("def twice(x): return x * 2"), "wrong"),
        (DOUBLE, fenced("def double(x): raise ValueError(x)"), "wrong"),
        (DOUBLE, fenced("def double(x): return double(x)"), "wrong"),
        (DOUBLE, fenced("def double(x) return"), "unparsable"),
        (DOUBLE, "I cannot write programs.", "unparsable"),
        (DOUBLE, "", "unparsable"),
        (DOUBLE, fenced("x = " + "(" * 500), "unparsable"),
        (DOUBLE, fenced("\x00"), "unparsable"),
        (DOUBLE, fenced("while True: pass"), "timeout"),
        (DOUBLE, fenced("def double(x):\n    while True: pass"), "timeout"),
        (DOUBLE, fenced("import time\ntime.sleep(60)"), "timeout"),
        (DOUBLE, fenced("def double(x): return 'a' * 10**10"), "crashed"),
        (DOUBLE, fenced("x = [0] * 10**10"), "crashed"),
        (DOUBLE, fenced("import ctypes\nctypes.string_at(0)"), "crashed"),
        (ADD, fenced("print(sum(map(int, input().split())))"), "correct"),
        (ADD, fenced("import sys\na, b = map(int, sys.stdin.read().split())\nprint(a + b)\nsys.exit(0)"), "correct"),
        (ADD, fenced("print(3)"), "wrong"),
        (ADD, fenced("print(sum(map(int, input().split())))\nraise ValueError"), "wrong"),
        (ADD, fenced("while True: print('x' * 1000)"), "wrong"),
        (HEAD, "    return math.sqrt(half(x))\n", "correct"),
        (HEAD, fenced("def root(x):\n    return (x / 2) ** 0.5"), "correct"),
        (HEAD, "    return math.sqrt(half(x))\n\nprint(root(8)", "correct"),  # runs on until the limit
        (HEAD, "    return 2.0\n", "wrong"),
        (HEAD, "", "unparsable"),
    ],
)
def test_check(problem, completion, outcome):
    verdict = CHECK(problem, completion)
    assert (verdict.outcome, verdict.reward) == (outcome, float(outcome == "correct")), verdict


EQUAL = "class E:\n    def __eq__(self, other): return True\n    __len__ = lambda self: 1\n"
FORGED = r"""import os
said = b'{"passed": true, "why": ""}'
for i in range(3, 64):
    try: os.write(i, len(said).to_bytes(8, 'little') + said)
    except OSError: pass
"""


@pytest.mark.parametrize(
    "program",
    [
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "raise SystemExit",
        "def double(x):\n    import sys; sys.exit(0)",
        "def double(x):\n    import os; os._exit(0)",
        "print('passed', 'PASSED', 'success', 0)\ndef double(x): print('{\"passed\": true}')",
        EQUAL + "def double(x): return E()",
        "class E(int):\n    def __eq__(self, other): return True\ndef double(x): return E()",
        "class E(list):\n    def __eq__(self, other): return True\ndef double(x): return E()",
        "class E(type):\n    def __eq__(self, other): return True\nclass F(metaclass=E): pass\ndef double(x): return F",
        "import builtins\nbuiltins.AssertionError = type('A', (BaseException,), {})\ndef double(x): return 0",
        "import builtins\nbuiltins.isinstance = lambda *a: 1\nbuiltins.exec = lambda *a: 0\ndef double(x): return 0",
        "import os, sys\nos._exit = sys.exit = lambda *a: None\ndef double(x): return 0",
        "import sys\ndef double(x):\n    return sys._getframe(1).f_locals | sys._getframe(2).f_locals",
        "import gc\ndef double(x): return [o for o in gc.get_objects() if isinstance(o, str) and 'assert' in o]",
        "import glob\ntests = [open(f).read() for f in glob.glob('/tmp/**', recursive=True)]\ndouble = lambda x: tests",
        "import os\ndef double(x): return [open(f'/proc/{p}/cmdline').read() for p in os.listdir('/proc')]",
        FORGED + "def double(x): return 0",
        "def double(x):\n    " + FORGED.replace("\n", "\n    "),
        "def sorted(x): return 0\ndef set(x): return 0\ndef len(x): return 0\ndef double(x): return x",
        "import signal, os\nos.kill(os.getppid(), 9)\ndef double(x): return 0",
        "import os, signal\n[os.kill(p, 9) for p in range(2, 400) if not os.system('true')]\ndef double(x): return 0",
        "import subprocess\nsubprocess.run(['python3', '-c', 'print(1)'])\ndef double(x): return 0",
        "double = 4",
        "__name__ = 'tests'\nassert_ = True",
    ],
)
def test_a_program_cannot_pass_by_a_trick(program):
    assert CHECK(DOUBLE, fenced(program)).outcome in ("wrong", "crashed")


def test_tests_may_use_what_the_program_defines_and_more():
    program = fenced(
        """
        import math
        class Pair:
            def __init__(self, a, b): self.a, self.b = a, b
            def total(self): return self.a + self.b
            def __lt__(self, other): return self.total() < other.total()
        def chain(pairs): return sum(pair.total() for pair in sorted(pairs))
        def reverse(items): items.reverse()
        def count(n):
            yield from range(n)
        def apply(f, x): return f(x)
        def same(x): return x
        def fail(): raise KeyError("k")
        def cast(kind, x): return kind(x)
        """.replace("\n        ", "\n")
    )
    tests = (
        "assert chain([Pair(1, 2), Pair(3, 4)]) == 10 and Pair(1, 2).total() == 3 and Pair(1, 2) < Pair(3, 4)",
        "items = [1, 2]\nreverse(items)\nassert items == [2, 1]",
        "assert list(count(3)) == [0, 1, 2] and count(3) != [0, 1, 2]",
        "assert apply(lambda x: x + 1, 2) == 3",
        "values = [None, True, 2**5000, 0.1, 1j, b'a', 'é', (1, [2]), {1: {2}}, frozenset([3]), range(3)]\n"
        "assert all(same(v) == v and type(same(v)) is type(v) for v in values)",
        "try:\n    fail()\nexcept KeyError:\n    pass\nelse:\n    raise AssertionError",
        "assert math.isclose(same(0.1) + 0.2, 0.3) and cast(int, '5') == 5",
        "assert (getattr(globals()['Pair'](1, 1), 'total') if 'Pair' in globals() else same)() == 2",
    )
    for test in tests:
        verdict = CHECK(Problem(id="0", text="?", answer="", tests=(test,)), program)
        assert verdict.outcome == "correct", (test, verdict)


@pytest.mark.parametrize(
    "action",
    [
        "import socket\nsocket.create_connection(('127.0.0.1', 22), 1)",
        "import socket\nsocket.getaddrinfo('example.org', 80)",
        "open('/etc/passwd').read()",
        "import os\nassert any(map(os.path.exists, ('/etc', '/work', '/var', '/home', '/proc/self')))",
        "open('/usr/lib/octavo', 'w')",
        "open('big', 'wb').write(bytes(2**26))",
        "import os\nos.setuid(0)",
        "import os\nassert os.environ.keys() - {'PATH', 'HOME', 'TMPDIR', 'LANG', 'LC_CTYPE'}",
        "import os\nassert any(os.path.exists(f'/proc/{pid}') for pid in range(1, 1000))",
        "import os\nfor _ in range(100):\n    if os.fork() == 0:\n        import time; time.sleep(9)",
        "import threading, time\nfor _ in range(100): threading.Thread(target=time.sleep, args=(9,)).start()",
        "import ctypes\nassert ctypes.CDLL(None).mount(b'none', b'/mnt', b'tmpfs', 0, 0) == 0",
        "import ctypes\nassert ctypes.CDLL(None).chroot(b'/') == 0",
        "import os\nos.kill(1, 0) or os.kill(-1, 9)\nraise SystemExit(0 if os.getpid() != 1 else 1)",
    ],
)
def test_a_program_cannot_reach_out(action):
    problem = Problem(id="0", text="?", answer="", tests=('{"stdin": "", "stdout": "reached"}',))
    assert CHECK(problem, fenced(action + "\nprint('reached')")).outcome in ("wrong", "crashed")


def test_the_same_program_without_the_action_reaches_the_end():
    problem = Problem(id="0", text="?", answer="", tests=('{"stdin": "", "stdout": "reached"}',))
    assert CHECK(problem, fenced("open('file', 'w').write('x')\nprint('reached')")).outcome == "correct"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("```python\na = 1\n```\n```python\nb = 2\n```", "b = 2"),
        ("```python\ndef double(x): pass\n```\n```\nprint(1)\n```", "def double(x): pass"),
        ("```js\nlet a\n```\n```py\nc = 3\n```", "c = 3"),
        ("def double(x): pass\n\nprint(", "def double(x): pass\n"),
        ("words and words", None),
    ],
)
def test_extract_program(text, expected):
    assert extract_program(DOUBLE, text) == expected


@pytest.fixture
def refusing(monkeypatch):
    """A kernel that refuses isolation."""
    monkeypatch.setattr("octavo.tasks.sandbox._visible", lambda: ["/no/such/folder"])


def test_a_sandbox_says_why_there_is_none(refusing):
    with pytest.raises(OSError, match="no sandbox: this kernel does not allow it: .*mount: No such file"):
        Sandbox("program", [], Limits())


def test_without_isolation_programs_still_have_limits_and_leave_nothing(refusing, monkeypatch):
    monkeypatch.setenv(ALLOW_UNISOLATED, "1")
    before = set(Path(tempfile.gettempdir()).glob("octavo-program-*"))
    daemon = (
        "import os, time\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n        time.sleep(60)\n"
    )
    for program, outcome in (
        ("open('f', 'w').write('x')\ndef double(x): return x * 2", "correct"),
        ("def double(x): return x", "wrong"),
        ("while True: pass", "timeout"),
        (daemon + "def double(x): return x * 2", "correct"),
    ):
        assert CHECK(DOUBLE, fenced(program)).outcome == outcome
    assert set(Path(tempfile.gettempdir()).glob("octavo-program-*")) == before


def test_sandboxes_leave_no_folder_even_where_their_process_is_killed():
    folders = set(Path(tempfile.gettempdir()).glob("octavo-*"))
    with VerifierPool(VerifierConfig(num_workers=1, timeout_s=0.5), modules=()) as pool:
        for program in ("while True: pass", "import os\nos._exit(0)"):
            pool.submit(CheckCode(), DOUBLE, fenced(program)).result()
    assert set(Path(tempfile.gettempdir()).glob("octavo-*")) <= folders | {Path(_mount_point())}
    assert not list(Path(_mount_point()).iterdir())
