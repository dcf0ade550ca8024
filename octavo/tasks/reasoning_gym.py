"""Tasks of the package reasoning-gym: problems made from a seed, each judged by the scorer of its own data set."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import yaml

from octavo.rollout.counter import uniform_bits
from octavo.tasks.answers import extract_answer
from octavo.tasks.problem import Problem, Task
from octavo.tasks.verdict import Verdict, judged

INSTRUCTION = "\nThink it through, and put the final answer, and nothing else, between <answer> and </answer>."

AnswerPlace = Literal["tags", "text"]


@dataclass(frozen=True)
class ReasoningGymCheck:
    """The scorer of one data set. Holds what makes the data set, since a worker process has to make it again."""

    dataset: str
    parameters: tuple[str, ...]
    seeds: tuple[tuple[str, int, int], ...]
    """(split, seed, problems) of each split."""
    answer_in: AnswerPlace = "tags"

    def __call__(self, problem: Problem, completion_text: str) -> Verdict:
        """Correct if the scorer gives 1; less is a reward, but no right answer. A scorer that raises has crashed."""
        from reasoning_gym.utils import extract_answer as extract_tagged

        if self.answer_in == "tags":
            answer = extract_tagged(completion_text, tag_name="answer")
        else:
            answer = extract_answer(completion_text)
        if answer is None:
            return Verdict("unparsable", 0.0, "no <answer>" if self.answer_in == "tags" else "no answer")
        _, _, split, index = problem.id.split("/")
        seed, size = next((seed, size) for name, seed, size in self.seeds if name == split)
        try:
            source = _make(self.dataset, self.parameters, seed, size)
            score = float(source.score_answer(answer=answer, entry=source[int(index)]))
        except Exception as error:  # noqa: BLE001 - a scorer of others, which reads free text
            return Verdict("crashed", 0.0, f"{type(error).__name__}: {' '.join(str(error).split())}")
        return judged(True) if score == 1.0 else Verdict("wrong", score, f"score {score:g}")


@dataclass(frozen=True, kw_only=True)
class ReasoningGymConfig:
    """Problems of one data set of reasoning-gym (pip install reasoning-gym)."""

    type_name: ClassVar[str] = "reasoning_gym"

    dataset: str
    """Its name there, e.g. leg_counting."""
    parameters: tuple[str, ...] = ()
    """Of the data set, e.g. ["max_animals=5"]; the values are YAML."""
    seed: int = 0
    """Makes the problems; training and test have random numbers of their own."""
    num_train: int = 4096
    """Training problems."""
    num_test: int = 512
    """Held-out problems; those that a training problem equals are left out."""
    system_prompt: str | None = None
    """System message for a chat model; null sends none."""
    instruction: str = INSTRUCTION
    """Appended to each problem."""
    answer_in: AnswerPlace = "tags"
    """tags: the scorer reads what stands between <answer> and </answer>, and nothing else is an answer; text: also a
    box, or else the last number or formula, as in mathematics (docs/verifiers.md)."""

    def __post_init__(self) -> None:
        if self.num_train < 1 or self.num_test < 1:
            raise ValueError(f"num_train and num_test are at least 1; got {self.num_train} and {self.num_test}")
        for text in self.parameters:
            if not text.partition("=")[0].isidentifier() or "=" not in text:
                raise ValueError(f"parameters are written name=value; got {text!r}")

    def build(self) -> Task:
        """Makes the problems; the same config always gives the same task."""
        streams = enumerate((("train", self.num_train), ("test", self.num_test)))
        seeds = tuple((split, uniform_bits(self.seed, stream, 0) >> 33, size) for stream, (split, size) in streams)
        made = {split: list(self._problems(split, seed, size)) for split, seed, size in seeds}
        trained = {problem.text for problem in made["train"]}
        return Task(
            name=self.dataset,
            source="reasoning-gym",
            train=made["train"],
            test=[problem for problem in made["test"] if problem.text not in trained],
            check=ReasoningGymCheck(self.dataset, self.parameters, seeds, self.answer_in),
            system_prompt=self.system_prompt,
            instruction=self.instruction,
        )

    def _problems(self, split: str, seed: int, size: int) -> Iterator[Problem]:
        source = _make(self.dataset, self.parameters, seed, size)
        for index in range(size):
            entry = source[index]
            yield Problem(
                id=f"reasoning_gym/{self.dataset}/{split}/{index}",
                text=entry["question"],
                answer=str(entry["answer"]),
                task=self.dataset,
                generated=True,
            )


@lru_cache(maxsize=8)
def _make(dataset: str, parameters: tuple[str, ...], seed: int, size: int) -> Any:
    """The data set itself.

    Raises:
        ValueError: the package is not installed, or refuses the name or a parameter.
    """
    try:
        import reasoning_gym
    except ImportError as error:
        raise ValueError(
            "task.type=reasoning_gym wants the package reasoning-gym, which is not installed. Run `pip install "
            "reasoning-gym`"
        ) from error
    values = {name: yaml.safe_load(value) for name, _, value in (text.partition("=") for text in parameters)}
    state = random.getstate()
    try:
        return reasoning_gym.create_dataset(dataset, seed=seed, size=size, **values)
    except Exception as error:  # its configs assert, and unknown names raise what they like
        raise ValueError(
            f"reasoning-gym refuses dataset={dataset!r} with {values}: {' '.join(str(error).split())}. Correct them"
        ) from error
    finally:
        random.setstate(state)
