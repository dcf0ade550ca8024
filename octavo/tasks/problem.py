"""The two nouns every task shares: a problem, and a task that holds problems and checks completions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.tasks.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem with its answer, e.g. Problem(id="gsm8k/train/0", text="Natalia sold ...", answer="72")."""

    id: str
    """Unique within its task; it says which split the problem belongs to."""
    text: str
    """What the policy is shown, before the task's instruction and the chat template."""
    answer: str
    """The reference answer, as text; only the task's `check` reads it. Each line is an answer that is accepted; within
    one, those with commas between or in a set are all required, in any order."""
    task: str = ""
    """Name of the data set it came from, for statistics by task; "" counts as the task's own name."""
    tests: tuple[str, ...] = ()
    """Of a programming problem: test programs, each run after the program in the completion; all must end without an
    exception."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Problems to train on, problems to be measured on, and the check of a completion."""

    name: str
    """Short name for logs, e.g. "gsm8k"."""
    train: Sequence[Problem]
    """Problems that rollouts may use."""
    test: Sequence[Problem]
    """Held-out problems; none of them is in `train`."""
    check: Callable[[Problem, str], Verdict]
    """(problem, completion text) -> verdict. Runs in a worker process: a function of a module, or an instance of its
    frozen dataclass with __call__."""
    source: str = "a generator"
    """Where the problems came from, as the run says when it starts."""
    system_prompt: str | None = None
    """System message for a chat model; None sends none."""
    instruction: str = ""
    """Appended to the problem's text as it stands, e.g. "\\nPut the answer in \\\\boxed{}."."""

    def prompt_text(self, problem: Problem) -> str:
        """The problem's text followed by the task's instruction."""
        return problem.text + self.instruction
