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
    """The reference answer, as text; only the task's `check` reads it. Several, with commas between or in a set, are
    all required, in any order."""
    task: str = ""
    """Name of the data set it came from, for statistics by task; "" counts as the task's own name."""
    tests: tuple[str, ...] = ()
    """Of a programming problem: Python that calls the completion's program and must end without an exception, or JSON
    {"stdin": ..., "stdout": ...}; all must pass."""
    accepted: tuple[str, ...] = ()
    """Other answers, each as right as `answer`."""
    appendix: str = ""
    """What the prompt says after the text and what makes it no other problem, as the tests of a program."""
    solution: str = ""
    """A worked solution, for few-shot examples."""
    generated: bool = False
    """Made from a seed, so that problems which differ by a sign are different ones."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A problem with a completion that solves it, shown before another problem."""

    problem: Problem
    answer: str
    """The completion."""


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
    examples: Sequence[Example] = ()
    """Worked examples, one more than are shown."""
    num_examples: int = 0
    """How many of them stand before a problem."""
    notes: Sequence[str] = ()
    """What a user should know of how it was read, a line each."""
    parts: Sequence["Task"] = ()
    """The tasks that this one is a mixture of; each says how its own problems are shown."""
    weights: Sequence[float] = ()
    """Share of the prompts of each part, up to a factor; empty takes every problem equally often."""

    def part_of(self, problem: Problem) -> "Task":
        """The part that a problem comes from; the task itself where it has none."""
        return next((part for part in self.parts if part.name == problem.task), self)

    def prompt_text(self, problem: Problem) -> str:
        """The problem's text followed by the task's instruction."""
        return problem.text + problem.appendix + self.part_of(problem).instruction

    def messages(self, problem: Problem) -> list[dict[str, str]]:
        """The conversation up to the completion: system message, examples, problem."""
        owner = self.part_of(problem)
        messages = [] if owner.system_prompt is None else [{"role": "system", "content": owner.system_prompt}]
        key = same_problem_key(problem) if owner.examples else ""
        others = [example for example in owner.examples if same_problem_key(example.problem) != key]
        for example in others[: owner.num_examples]:
            messages.append({"role": "user", "content": self.prompt_text(example.problem)})
            messages.append({"role": "assistant", "content": example.answer})
        return [*messages, {"role": "user", "content": self.prompt_text(problem)}]


def same_text_key(text: str) -> str:
    """Letters and digits alone, in lower case: what stays when a problem is only set in type differently."""
    return "".join(filter(str.isalnum, text.lower()))


def same_problem_key(problem: Problem) -> str:
    """Equal for two statements of one problem. Of a generated one every character counts: 3+4 is not 3-4."""
    return problem.text if problem.generated else same_text_key(problem.text)
