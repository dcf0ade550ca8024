"""Sums such as `(7+8-5+9+2)%10`, made from a seed; small enough for a model that trains on a CPU.

A problem is held out by a hash of its text, not by the seed or the order in which it was drawn. Whoever
draws problems, with whatever seed, therefore agrees on which ones are held out: the training problems of
the task and the text of examples/tiny/pretrain.py contain none of them.
"""

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from typing import ClassVar

from octavo.tasks.problem import Problem, Task
from octavo.tasks.verdict import Verdict, judged

HELD_OUT_SHARE = 0.1


def is_held_out(text: str) -> bool:
    """Whether this problem text belongs to the test split. Depends on the text alone."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8]) / 2**64 < HELD_OUT_SHARE


def draw_problem_text(rng: random.Random, config: "ArithmeticConfig") -> str:
    """One sum that may or may not be held out, e.g. "(7+8-5)%10"; signs and operands are uniform."""
    operands = [str(rng.randint(config.min_operand, config.max_operand)) for _ in range(config.num_operands)]
    total = "".join(operand + rng.choice("+-") for operand in operands)[:-1]
    return total if config.modulus is None else f"({total})%{config.modulus}"


def running_totals(text: str) -> list[int]:
    """The total after each operation, from the left: "7+8-5" -> [15, 10], "(7+8-5)%10" -> [5, 0]."""
    match = re.fullmatch(r"\(?([0-9+-]+)\)?(?:%([0-9]+))?", text)
    assert match is not None, f"not a sum: {text!r}"
    total, modulus = match.groups()
    totals = list(accumulate(map(int, re.findall(r"[+-]?[0-9]+", total))))[1:]
    return totals if modulus is None else [value % int(modulus) for value in totals]


def check_arithmetic(problem: Problem, completion_text: str) -> Verdict:
    """Correct if the last integer of the completion is the answer: "=9" and ":5,0,9" are both right for 9."""
    integers = re.findall(r"-?[0-9]+", completion_text)
    return judged(integers[-1] == problem.answer) if integers else Verdict("unparsable", 0.0, "no integer")


@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig:
    """Sums of a few operands, made from a seed."""

    type_name: ClassVar[str] = "arithmetic"

    seed: int = 0
    """Chooses which problems are drawn; never which of them are held out."""
    num_train: int = 4096
    """Distinct problems to train on."""
    num_test: int = 512
    """Distinct held-out problems."""
    num_operands: int = 5
    """Numbers in one sum, 2 to 1000."""
    min_operand: int = 1
    """Smallest number in a sum, at least 0."""
    max_operand: int = 9
    """Largest number in a sum."""
    modulus: int | None = 10
    """The answer is the sum modulo this, at least 2; None asks for the sum itself."""

    def __post_init__(self) -> None:
        if self.num_train < 1 or self.num_test < 1:
            raise ValueError(f"num_train and num_test are at least 1; got {self.num_train} and {self.num_test}")
        if not 2 <= self.num_operands <= 1000:
            raise ValueError(f"num_operands lies in [2, 1000]; got {self.num_operands}")
        if not 0 <= self.min_operand <= self.max_operand:
            raise ValueError(
                f"operands need 0 <= min_operand <= max_operand; got {self.min_operand} and {self.max_operand}"
            )

        if self.modulus is not None and self.modulus < 2:
            raise ValueError(f"modulus is at least 2, or None for plain sums; got {self.modulus}")

    def build(self) -> Task:
        """Draws the problems; the same config always gives the same task."""
        return Task(
            name="arithmetic",
            train=tuple(_draw_split(self, "train", self.num_train)),
            test=tuple(_draw_split(self, "test", self.num_test)),
            check=check_arithmetic,
        )


def _draw_split(config: ArithmeticConfig, split: str, num_problems: int) -> Iterator[Problem]:
    """Distinct problems of one split, drawn at random.

    Raises:
        ValueError: more than half of the split is wanted; drawing the rest would take very long, or for ever.
    """
    num_values = config.max_operand - config.min_operand + 1
    share = HELD_OUT_SHARE if split == "test" else 1.0 - HELD_OUT_SHARE
    num_possible = int(Fraction(share) * num_values**config.num_operands * 2 ** (config.num_operands - 1))
    if 2 * num_problems > num_possible:
        raise ValueError(
            f"num_{split}={num_problems} distinct problems were wanted, but {config.num_operands} operands from "
            f"{config.min_operand} to {config.max_operand} make only about {num_possible}. Ask for fewer than half of "
            f"them, or widen the operands."
        )
    rng = random.Random(f"{config.seed}/{split}")
    seen: set[str] = set()
    while len(seen) < num_problems:
        text = draw_problem_text(rng, config)
        if text not in seen and is_held_out(text) == (split == "test"):
            yield Problem(
                id=f"arithmetic/{split}/{len(seen)}",
                text=text,
                answer=str(running_totals(text)[-1]),
                task="arithmetic",
                generated=True,
            )
            seen.add(text)
