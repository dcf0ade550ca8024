"""From rows to problems: every row is one, is left out on purpose, or is counted as bad and named."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import islice
from typing import Any

from octavo.tasks.problem import Problem
from octavo.tasks.rows import BadRow, Source, take

SHOWN_BAD_ROWS = 5
"""Bad rows that a message lists."""


@dataclass(kw_only=True)
class ProblemReader:
    """Reads the splits of one data set."""

    name: str
    """Of the data set."""
    read: Callable[[dict], dict | None]
    """Row -> `problem`, `answer`, and where there are any `id`, `solution`, `tests`, `appendix`, `accepted`; None
    leaves it out."""
    needs_tests: bool = False
    """Whether a problem is judged by its tests, and may do without an answer."""
    repeats: bool = False
    """Whether the source repeats problems, ids and all, of which only the first counts."""
    max_bad_rows: int = 0
    """Bad rows of a split that are skipped; one more is an error."""
    notes: list[str] = field(default_factory=list)
    """What was left out, a line a split."""

    def problems(self, source: Source, role: str, limit: int | None = None) -> tuple[Problem, ...]:
        """The problems of a split, in order.

        Args:
            source: where its rows are.
            role: "train" or "test", for ids.
            limit: stop after so many problems; None reads all.

        Raises:
            ValueError: the source cannot be read, has no problem, or more bad rows than `max_bad_rows`.
        """
        bad: list[str] = []
        seen: set[str] = set()
        problems = tuple(islice(self._good(source, role, bad, seen), limit))
        if not problems:
            found = listed(bad) if bad else "none"
            raise ValueError(f"{source.name} wants at least one problem; got {found}. Correct it, or name another")
        if bad:
            self.notes.append(f"{source.name}: left out {listed(bad)}")
        return problems

    def _good(self, source: Source, role: str, bad: list[str], seen: set[str]) -> Iterator[Problem]:
        for index, (place, row) in enumerate(source.rows()):
            try:
                if isinstance(row, BadRow):
                    raise row
                values = self._values(row)
                if values is None:
                    continue
                problem = self._problem(values, f"{self.name}/{role}/{index}")
            except BadRow as error:
                bad.append(f"{place}: {error}")
                if len(bad) > self.max_bad_rows:
                    raise ValueError(
                        f"{source.name}, {listed(bad)}, with max_bad_rows={self.max_bad_rows}. Correct the rows, or "
                        f"raise max_bad_rows to skip them"
                    ) from error
                continue
            if not (self.repeats and problem.id in seen):
                yield problem
            seen.add(problem.id)

    def _values(self, row: dict) -> dict | None:
        try:
            return self.read(row)
        except (TypeError, AttributeError, KeyError, IndexError) as error:  # a column holds another kind of value
            raise BadRow(f"is not of the form of {self.name} ({error})") from error

    def _problem(self, values: dict, default_id: str) -> Problem:
        text, answer = take(values, "problem"), answer_text(take(values, "answer"))
        if not isinstance(text, str) or not text.strip():
            raise BadRow(f"wants text as the problem, got {text!r:.40}")
        if answer is None:
            raise BadRow(f"wants as the answer text, a finite number, or a list of them, got {values['answer']!r:.40}")
        tests = _listing(values.get("tests")) if self.needs_tests else ()
        if self.needs_tests and not (tests and all(isinstance(test, str) and test.strip() for test in tests)):
            raise BadRow(f"wants at least one test program, got {values.get('tests')!r:.40}")
        if not answer and not self.needs_tests:
            raise BadRow(f"wants a final answer, got {values['answer']!r:.40}")
        problem = Problem(
            id=str(values.get("id") if values.get("id") is not None else default_id),
            text=text,
            answer=answer,
            accepted=tuple(filter(None, map(answer_text, _listing(values.get("accepted"))))),
            task=self.name,
            tests=tests,
            appendix=str(values.get("appendix") or ""),
            solution=str(values.get("solution") or "").strip(),
        )
        try:
            "".join([problem.id, text, answer, *problem.accepted, *tests, problem.appendix, problem.solution]).encode()
        except UnicodeEncodeError as error:  # neither a tokenizer nor a file takes it
            raise BadRow(f"holds {error.object[error.start]!r}, half a character") from error
        return problem


def _listing(value: Any) -> tuple:
    """A list as it is, one value as a list of it, nothing as an empty one."""
    if value is None or value == "":
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def answer_text(answer: Any) -> str | None:
    """An answer as a completion would write it: 1e-05 is 0.00001, 142.0 is 142; a list, of which all are required, has
    commas between; None for what is neither text, finite number, nor list of them."""
    if isinstance(answer, str):
        return answer.strip()
    if isinstance(answer, list | tuple):
        parts = [answer_text(part) for part in answer]
        return None if None in parts else ", ".join(map(str, parts))
    if isinstance(answer, int):
        return None if isinstance(answer, bool) else str(answer)
    if not isinstance(answer, float) or not math.isfinite(answer):
        return None
    return format(Decimal(repr(answer)).normalize(), "f")


def listed(bad: list[str]) -> str:
    """ "2 bad rows (line 3: ...; line 9: ...)", the first few spelt out."""
    shown = "; ".join(bad[:SHOWN_BAD_ROWS])
    more = f"; and {len(bad) - SHOWN_BAD_ROWS} more" if len(bad) > SHOWN_BAD_ROWS else ""
    return f"{len(bad)} bad row{'s' * (len(bad) > 1)} ({shown}{more})"
