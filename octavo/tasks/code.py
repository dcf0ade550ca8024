"""Programs in completions: found, run in a sandbox, and judged by tests that they cannot see.

Two kinds of tests: a Python program that calls the completion's functions and raises where they are wrong (MBPP,
HumanEval), and JSON `{"stdin": ..., "stdout": ...}` for what a whole program reads and prints.
"""

import ast
import builtins
import json
import os
import re
import select
import socket
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from octavo.tasks.code_parts import Peer
from octavo.tasks.problem import Problem
from octavo.tasks.sandbox import Limits, Sandbox, exit_reason
from octavo.tasks.verdict import Verdict, judged

MAX_PROGRAM_CHARS = 100_000
MAX_OUTPUT_BYTES = 2**20
"""Printed by a program under test; one that prints more is killed, and wrong."""
MAX_TRIMMED_LINES = 200
"""Dropped from the end of a bare completion until it is a program."""

_FENCE = re.compile(r"```[ \t]*([A-Za-z0-9+_-]*)[^\n]*\n(.*?)(?:\n[ \t]*```|\Z)", re.DOTALL)
_BEGIN = re.compile(r"\[BEGIN\]\s*\n?(.*?)(?:\[DONE\]|\Z)", re.DOTALL)
_STATEMENTS = (ast.FunctionDef, ast.ClassDef, ast.Assign, ast.Import, ast.ImportFrom, ast.Call, ast.For, ast.While)
_PYTHON = ("", "python", "py", "python3")


@dataclass(frozen=True)
class CheckCode:
    """Correct if the completion's program passes every test of its problem."""

    timeout_s: float = 60.0
    """For all tests together; a pool's own limit is usually shorter."""
    limits: Limits = field(default_factory=Limits)
    """Of the program."""

    def __call__(self, problem: Problem, completion_text: str) -> Verdict:
        """The verdict on a completion."""
        try:
            program = extract_program(problem, completion_text)
        except (RecursionError, MemoryError):
            return Verdict("unparsable", 0.0, "a program that is nested too deeply")
        if program is None:
            return Verdict("unparsable", 0.0, "no program")
        if not problem.tests:
            return Verdict("unparsable", 0.0, "the problem has no tests")
        deadline = time.monotonic() + self.timeout_s
        cases = [_stdin_case(test) for test in problem.tests]
        calls = [test for test, case in zip(problem.tests, cases, strict=True) if case is None]
        try:
            for case in filter(None, cases):
                verdict = self._run_script(program, *case, deadline)
                if verdict.outcome != "correct":
                    return verdict
            return self._run_tests(problem, program, calls, deadline) if calls else judged(True)
        except TimeoutError:
            return Verdict("timeout", 0.0, f"longer than {self.timeout_s:g} s")

    def _run_tests(self, problem: Problem, program: str, tests: list[str], deadline: float) -> Verdict:
        """Tests that call the program: it and they run in two sandboxes, with a wire between for plain data."""
        calls, answers = socket.socketpair()
        ours, theirs = socket.socketpair()
        with ours, calls, Sandbox("candidate", [answers], self.limits) as candidate:
            send(calls, [program, "program"], deadline)
            calls.settimeout(None)
            with Sandbox("judge", [calls, theirs], Limits()):
                send(ours, [problem.text if _is_python(problem.text) else "", tests], deadline)
                try:
                    said = receive(ours, deadline)
                except EOFError:
                    said = {"lost": True, "why": "the tests did not end"}
            if "passed" in said:
                return judged(said["passed"] is True, str(said["why"]))
            return Verdict("crashed", 0.0, f"{said['why']}: {exit_reason(candidate.wait(deadline))}")

    def _run_script(self, program: str, stdin: str, stdout: str, deadline: float) -> Verdict:
        """A test that reads what a whole program prints."""
        ours, theirs = socket.socketpair()
        with ours, tempfile.TemporaryFile() as given:
            given.write(stdin.encode())
            given.seek(0)
            with Sandbox("program", [theirs], self.limits, given.fileno(), stdout=True) as sandbox:
                send(ours, [program, "__main__"], deadline)
                printed = _read_output(sandbox.stdout, deadline)
                if len(printed) > MAX_OUTPUT_BYTES:
                    return judged(False, f"printed more than {MAX_OUTPUT_BYTES} bytes")
                status = sandbox.wait(deadline)
        if status > 1:
            return Verdict("crashed", 0.0, exit_reason(status))
        if status == 1:
            return judged(False, "the program ended with an error")
        return judged(printed.decode(errors="replace").split() == stdout.split())


def extract_program(problem: Problem, text: str) -> str | None:
    """The program of a completion, ready to run; None if there is none that compiles.

    The last block between ``` that defines what the tests call, else the last block, else the text itself; where the
    problem is the head of a function, as in HumanEval, what continues it.
    """
    spoken = text.rpartition("</think>")[2]
    blocks = [match[2] for match in _FENCE.finditer(spoken) if match[1].lower() in _PYTHON]
    blocks = blocks or _BEGIN.findall(spoken)
    called = _called_names(problem.tests)
    defining = [block for block in blocks if called & _defined_names(block)]
    head = problem.text if _is_python(problem.text) else ""
    for source in [(defining or blocks)[-1]] if blocks else [spoken, _from_first_statement(spoken)]:
        for whole in [f"{head.rstrip()}\n{source}", f"{head}\n{source}"] if head else [source]:
            program = _compiling(whole, trim=not blocks)
            if program is not None and program.strip() != head.strip():
                return program
    return None


def _compiling(source: str, trim: bool) -> str | None:
    """The source if it compiles, `trim`: without lines at its end that stop it from doing so."""
    if len(source) > MAX_PROGRAM_CHARS or not source.strip():
        return None
    lines = source.split("\n")
    for end in range(len(lines), max(0, len(lines) - MAX_TRIMMED_LINES) if trim else len(lines) - 1, -1):
        try:
            tree = ast.parse("\n".join(lines[:end]))
        except (SyntaxError, ValueError):
            continue
        is_word = trim and not any(isinstance(node, _STATEMENTS) for node in ast.walk(tree))  # "yes" compiles too
        return "\n".join(lines[:end]) if tree.body and not is_word else None
    return None


def _from_first_statement(text: str) -> str:
    """A bare text from the first line that looks like a program's."""
    found = re.search(r"^(?:def|class|import|from|@|async def)\b", text, flags=re.MULTILINE)
    return text[found.start() :] if found else ""


def _is_python(text: str) -> bool:
    """Whether a problem's text is the head of a program, as HumanEval's are."""
    if "def " not in text:
        return False
    try:
        return bool(ast.parse(text).body)
    except (SyntaxError, ValueError, RecursionError):
        return False


def _called_names(tests: tuple[str, ...]) -> set[str]:
    """Names of which the tests make use and that no builtin has."""
    names: set[str] = set()
    for test in tests:
        try:
            names |= {node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)}
        except (SyntaxError, ValueError):
            continue
    return names - set(dir(builtins))


def _defined_names(source: str) -> set[str]:
    return set(re.findall(r"^(?:async +def|def|class) +(\w+)", source, flags=re.MULTILINE))


def _stdin_case(test: str) -> tuple[str, str] | None:
    """(stdin, stdout) of a test in JSON; None for a test program."""
    if not test.lstrip().startswith("{"):
        return None
    try:
        case = json.loads(test)
    except ValueError:
        return None
    return (case["stdin"], case["stdout"]) if isinstance(case, dict) and {"stdin", "stdout"} == set(case) else None


def send(connection: socket.socket, message: object, deadline: float) -> None:
    """One message to a sandbox, in the time that is left; a sandbox that is gone will be noticed by its answer."""
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    with suppress(BrokenPipeError, ConnectionResetError):
        Peer(connection).send(message)


def receive(connection: socket.socket, deadline: float) -> Any:
    """The sandbox's answer.

    Raises:
        TimeoutError, EOFError: there is none.
    """
    connection.settimeout(max(0.001, deadline - time.monotonic()))
    return Peer(connection).receive()


def _read_output(descriptor: int, deadline: float) -> bytes:
    """What a program prints until it closes its output, but no more than a byte over the limit."""
    parts: list[bytes] = []
    while sum(map(len, parts)) <= MAX_OUTPUT_BYTES:
        if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        part = os.read(descriptor, 2**16)
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


check_code = CheckCode()
