"""Answer checking on the real data sets: right answers in many forms, answers of other problems, checks per second.

    python benchmarks/answers.py                  all rows of $OCTAVO_DATA (default ../shared/data)
    python benchmarks/answers.py --rows 200       a sample of each set

Writes benchmarks/results/answers.json, and what was judged otherwise than expected to
benchmarks/results/answers_listed.json. Equal texts are no short cut here: values, expressions and words are compared.
"""

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from answer_cases import FORMS, SETS, Case, check_values, problems_of, right_cases, shuffled_cases

from octavo.bench.results import Results, Row
from octavo.tasks.answers import check_math, check_numbers
from octavo.tasks.verdict import Verdict
from octavo.tasks.verifiers import VerifierConfig, VerifierPool

NUM_TIMED = 20_000


def main() -> None:
    """Judge everything and write both files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=None, help="of each set; all without it")
    rows = parser.parse_args().rows
    command = "python benchmarks/answers.py" + ("" if rows is None else f" --rows {rows}")
    results, listed = Results("answers", command), []
    totals: Counter[str] = Counter()
    with VerifierPool(VerifierConfig(num_workers=2, timeout_s=10.0)) as pool:
        for name in SETS:
            problems = problems_of(name, rows)
            right = [case for problem in problems for case in right_cases(problem)]
            for form in FORMS:
                found = list(judged(pool, [case for case in right if case.form == form]))
                num_right = sum(verdict.outcome == "correct" for _, verdict in found)
                totals |= Counter({form: totals[form] + num_right, f"{form} of": totals[f"{form} of"] + len(found)})
                results.add(Row(case=f"{name}/{form}", metric="correct_share", value=num_right / len(found),
                                unit="", goal=0.995, note=f"{len(found)} answers"))  # fmt: skip
                listed += [entry(case, verdict) for case, verdict in found if verdict.outcome != "correct"]
            found = list(judged(pool, list(shuffled_cases(problems))))
            num_right, num_same = (
                sum(verdict.outcome == "correct" for _, verdict in found),
                sum(case.expected for case, _ in found),
            )
            results.add(Row(case=f"{name}/shuffled", metric="correct_share", value=num_right / len(found), unit="",
                            goal=num_same / len(found), better="lower",
                            note=f"{num_same} of {len(found)} are the same text"))  # fmt: skip
            listed += [entry(case, verdict) for case, verdict in found
                       if (verdict.outcome == "correct") != case.expected]  # fmt: skip
        for form in FORMS:
            results.add(Row(case=f"all/{form}", metric="correct_share", value=totals[form] / totals[f"{form} of"],
                            unit="", goal=0.995, note=f"{totals[f'{form} of']} answers"))  # fmt: skip
        speed(pool, results)
    path = Path(os.environ.get("OUT", "benchmarks/results")) / "answers_listed.json"
    path.write_text("[\n" + ",\n".join(json.dumps(each) for each in listed) + "\n]\n")


def judged(pool: VerifierPool, cases: list[Case]) -> Iterator[tuple[Case, Verdict]]:
    """Each case with its verdict; equal ones are judged once."""
    futures: dict[tuple[str, str, tuple[str, ...]], object] = {}
    for case in cases:
        key = (case.completion, case.problem.answer, case.problem.accepted)
        if key not in futures:
            quick = check_numbers(case.problem, case.completion)
            futures[key] = quick or pool.submit(check_values, case.problem, case.completion)
    for case in cases:
        found = futures[case.completion, case.problem.answer, case.problem.accepted]
        yield case, found if isinstance(found, Verdict) else found.result()


def entry(case: Case, verdict: Verdict) -> dict[str, str]:
    """What the list says of a case."""
    return {
        "id": case.problem.id,
        "form": case.form,
        "completion": case.completion,
        "answer": "\n".join((case.problem.answer, *case.problem.accepted)),
        "outcome": verdict.outcome,
        "detail": verdict.detail,
    }


def speed(pool: VerifierPool, results: Results) -> None:
    """Checks of GSM8K's answers in a second: in a run's own process, as it does plain numbers, and all in workers."""
    problems = problems_of("gsm8k")
    worked = f"She has 3 bags of 4 apples, so 3 * 4 = 12 apples, {'and so on ' * 30}\n#### "
    cases = [(problem, worked + problem.answer) for problem in (problems * NUM_TIMED)[:NUM_TIMED]]
    start = time.perf_counter()
    own = [check_numbers(*case) for case in cases]
    middle = time.perf_counter()
    apart = [future.result() for future in [pool.submit(check_math, *case) for case in cases]]
    end = time.perf_counter()
    assert own == apart and {verdict.outcome for verdict in apart} == {"correct"}
    for name, seconds in (("own process", middle - start), ("2 workers", end - middle)):
        results.add(Row(case=f"gsm8k/{name}", metric="checks_s", value=NUM_TIMED / seconds, unit="1/s", goal=500.0))


if __name__ == "__main__":
    main()
