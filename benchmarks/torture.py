"""Completions made to hang, crash, flood or deceive the checks: what comes of each, in which time, and what is left.

    python benchmarks/torture.py                  2,000 of them, a limit of 1 s, two workers
    python benchmarks/torture.py --count 200

Writes benchmarks/results/torture.json.
"""

import argparse
import sys
import time
from collections import Counter

from torture_cases import hostile_cases, right_cases

from octavo.bench.results import Results, Row
from octavo.tasks.linux import PR_SET_CHILD_SUBREAPER, children, prctl
from octavo.tasks.verifiers import VerifierConfig, VerifierPool


def main() -> None:
    """Check them all, count, and look for processes that are left."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=2000)
    count = parser.parse_args().count
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # what the pool leaves behind becomes a child of this process
    cases = hostile_cases(count)
    start = time.monotonic()
    with VerifierPool(VerifierConfig(num_workers=2, timeout_s=1.0)) as pool:
        futures = [(case, pool.submit(case.check, case.problem, case.completion)) for case in cases]
        found = [(case, future.result()) for case, future in futures]
        seconds = time.monotonic() - start
        right = [(case, pool.submit(case.check, case.problem, case.completion).result())
                 for number in range(10) for case in right_cases(number)]  # fmt: skip
    time.sleep(1.0)
    left = children()
    outcomes = Counter(verdict.outcome for _, verdict in found)
    faults = [(case, verdict) for case, verdict in [*found, *right] if verdict.outcome not in case.allowed]
    for case, verdict in faults:
        print(f"{case.kind}: {verdict}, allowed {case.allowed}: {case.completion[:200]!r}", file=sys.stderr)
    results = Results("torture", f"python benchmarks/torture.py --count {count}")
    goals = {"correct": 0.0}
    for outcome in ("correct", "wrong", "unparsable", "timeout", "crashed"):
        results.add(Row(case=f"{count} hostile completions", metric=outcome, value=outcomes[outcome], unit="",
                        goal=goals.get(outcome), better="lower"))  # fmt: skip
    results.add(Row(case=f"{count} hostile completions", metric="not as expected", value=len(faults), unit="",
                    goal=0.0, better="lower", note=f"with {len(right)} right ones behind them"))  # fmt: skip
    results.add(Row(case=f"{count} hostile completions", metric="seconds", value=seconds, unit="s", goal=600.0,
                    better="lower", note="two workers, a limit of 1 s"))  # fmt: skip
    results.add(Row(case=f"{count} hostile completions", metric="processes left", value=len(left), unit="", goal=0.0,
                    better="lower"))  # fmt: skip
    if faults or left:
        sys.exit(1)


if __name__ == "__main__":
    main()
