"""The two nouns every task shares: a problem, and a task that holds problems and scores completions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem with its answer, e.g. Problem(id="gsm8k/train/0", text="Natalia sold ...", answer="72")."""

    id: str
    """Unique within its task; it says which split the problem belongs to."""
    text: str
    """What the policy is shown, before the task's instruction and the chat template."""
    answer: str
    """The reference answer, as text; only the task's `score` reads it."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Problems to train on, problems to be measured on, and the score of a completion."""

    name: str
    """Short name for logs, e.g. "gsm8k"."""
    train: Sequence[Problem]
    """Problems that rollouts may use."""
    test: Sequence[Problem]
    """Held-out problems; none of them is in `train`."""
    score: Callable[[Problem, str], float]
    """(problem, completion text) -> reward, 1.0 for a right answer and 0.0 for any other."""
    source: str = "a generator"
    """Where the problems came from, as the run says when it starts."""
    system_prompt: str | None = None
    """System message for a chat model; None sends none."""
    instruction: str = ""
    """Appended to the problem's text as it stands, e.g. "\\nPut the answer in \\\\boxed{}."."""

    def prompt_text(self, problem: Problem) -> str:
        """The problem's text followed by the task's instruction."""
        return problem.text + self.instruction
