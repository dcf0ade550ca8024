"""Fifty completions of benchmarks/torture.py: none hangs, none is right, and no process is left."""

import os
import time
from contextlib import suppress
from pathlib import Path

import pytest
from torture_cases import MATHS, PROGRAMS, hostile_cases, right_cases

from octavo.tasks.sandbox import refusal
from octavo.tasks.verifiers import VerifierConfig, VerifierPool

COUNT = 50


def descendants(pid):
    """Processes that this one has started, and theirs."""
    parents = {}
    for folder in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


@pytest.mark.skipif(refusal() is not None, reason=f"no sandbox here: {refusal()}")
def test_hostile_completions_are_told_and_leave_nothing():
    before = descendants(os.getpid())
    with VerifierPool(VerifierConfig(num_workers=4, timeout_s=2.0)) as pool:
        pool.submit(os.getpid).result()
        started = descendants(os.getpid()) - before
        cases = hostile_cases(2 * max(len(MATHS), len(PROGRAMS)))[:COUNT]
        futures = [pool.submit(case.check, case.problem, case.completion) for case in cases]
        verdicts = [future.result(timeout=120) for future in futures]
        right = next(right_cases(1))
        assert pool.submit(right.check, right.problem, right.completion).result().outcome == "correct"
    for case, verdict in zip(cases, verdicts, strict=True):
        assert verdict.outcome in case.allowed and verdict.reward == 0.0, (case.kind, verdict)
    assert len({verdict.outcome for verdict in verdicts}) == 4 and len({case.kind for case in cases}) > 40
    deadline = time.monotonic() + 10
    while left := [pid for pid in started if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert not descendants(os.getpid()) - before
