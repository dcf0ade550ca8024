"""Sums such as `17+48-20=`, made from a seed; small enough for a model that trains on a CPU.

A problem is held out by a hash of its text, not by the seed or the order in which it was drawn. Whoever
draws problems, with whatever seed, therefore agrees on which ones are held out: the training problems of
the task and the text of examples/tiny/pretrain.py contain none of them.
"""

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass

from octavo.tasks.problem import Problem, Task

HELD_OUT_SHARE = 0.1


def is_held_out(text: str) -> bool:
    """Whether this problem text belongs to the test split. Depends on the text alone."""
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:8]) / 2**64 < HELD_OUT_SHARE


def draw_problem_text(rng: random.Random, num_operands: int, min_operand: int, max_operand: int) -> str:
    """One sum such as "17+48-20=", evaluated from the left; a partial result is never negative."""
    value = rng.randint(min_operand, max_operand)
    text = str(value)
    for _ in range(num_operands - 1):
        operand = rng.randint(min_operand, max_operand)
        subtract = operand <= value and rng.random() < 0.5
        value += -operand if subtract else operand
        text += f"{'-' if subtract else '+'}{operand}"
    return text + "="


def worked_solution(text: str) -> str:
    """The sum worked one operation at a time from the left: "17+48-20=" -> "65-20=45"."""
    first, *operations = re.findall(r"^\d+|[+-]\d+", text)
    value, steps = int(first), []
    for done, operation in enumerate(operations, start=1):
        value += int(operation)
        steps.append(str(value) + "".join(operations[done:]))
    return "=".join(steps)


def direct_answer(text: str) -> str:
    """The result alone: "17+48-20=" -> "45"."""
    return worked_solution(text).rsplit("=", 1)[-1]


def score_arithmetic(problem: Problem, completion_text: str) -> float:
    """1.0 if what follows the last "=" of the completion (all of it, if there is none) is the answer.

    Nothing but spaces may stand around the number: "65-20=45" is right for 45, "65-20" and "=45+" are not.
    """
    return float(completion_text.rsplit("=", 1)[-1].strip() == problem.answer)


@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig:
    """Sums of a few operands, made from a seed."""

    seed: int = 0
    """Chooses which problems are drawn; never which of them are held out."""
    num_train: int = 4096
    """Distinct problems to train on."""
    num_test: int = 512
    """Distinct held-out problems."""
    num_operands: int = 3
    """Numbers in one sum, at least 2."""
    min_operand: int = 10
    """Smallest number in a sum, at least 0."""
    max_operand: int = 99
    """Largest number in a sum."""

    def __post_init__(self):
        if self.num_train < 1 or self.num_test < 1:
            raise ValueError(f"num_train and num_test are at least 1; got {self.num_train} and {self.num_test}")
        if self.num_operands < 2:
            raise ValueError(f"num_operands is at least 2; got {self.num_operands}")
        if not 0 <= self.min_operand <= self.max_operand:
            raise ValueError(
                f"operands need 0 <= min_operand <= max_operand; got {self.min_operand} and {self.max_operand}"
            )

    def build(self) -> Task:
        """Draws the problems; the same config always gives the same task."""
        return Task(
            name="arithmetic",
            train=tuple(_draw_split(self, "train", self.num_train)),
            test=tuple(_draw_split(self, "test", self.num_test)),
            score=score_arithmetic,
        )


def _draw_split(config: ArithmeticConfig, split: str, num_problems: int) -> Iterator[Problem]:
    rng = random.Random(f"{config.seed}/{split}")
    seen = set()
    for _ in range(1000 + 100 * num_problems):
        text = draw_problem_text(rng, config.num_operands, config.min_operand, config.max_operand)
        if text in seen or is_held_out(text) != (split == "test"):
            continue
        yield Problem(id=f"arithmetic/{split}/{len(seen)}", text=text, answer=direct_answer(text))
        seen.add(text)
        if len(seen) == num_problems:
            return
    raise ValueError(
        f"num_{split}={num_problems} distinct problems were wanted, but only {len(seen)} turned up with "
        f"{config.num_operands} operands from {config.min_operand} to {config.max_operand}. Ask for fewer, "
        f"or widen the operands."
    )
