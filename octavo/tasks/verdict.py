"""What a check of one completion found: the outcome, apart from the reward that training makes of it."""

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["correct", "wrong", "unparsable", "timeout", "crashed"]
"""correct and wrong: an answer was found and judged. unparsable: there is none, or it cannot be read. timeout: judging
it took longer than it may. crashed: it took down, or exhausted, what judged it, or the judge itself failed."""


@dataclass(frozen=True)
class Verdict:
    """Of one completion, e.g. Verdict("unparsable", 0.0, "no answer")."""

    outcome: Outcome
    reward: float
    """What training maximises; 1.0 for a right answer and 0.0 otherwise, unless the task says more."""
    detail: str = ""
    """Why, in a few words, for whoever audits; never parsed."""


def judged(correct: bool, detail: str = "") -> Verdict:
    """The verdict on an answer that was found and read: reward 1.0 or 0.0."""
    return Verdict("correct", 1.0, detail) if correct else Verdict("wrong", 0.0, detail)
