"""The problems of a run as prompts: read, compared with those that are evaluated, encoded, left out where too long."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.tasks.order import ProblemOrder
from octavo.tasks.overlap import split_overlap
from octavo.tasks.problem import Problem, Task
from octavo.tasks.prompts import encode_messages, keep_within_limit
from octavo.trainer.config import TrainConfig
from octavo.trainer.metrics import Display


@dataclass(frozen=True, kw_only=True)
class EncodedProblem:
    """A problem and its prompt as token ids."""

    problem: Problem
    prompt: list[int]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """Problems that are evaluated together."""

    name: str
    """Of the data set."""
    task: Task
    """How they are shown and checked."""
    problems: Sequence[EncodedProblem]
    """Those whose prompts are short enough."""
    num_left_out: int
    """The others."""


def load_problems(
    config: TrainConfig, tokenizer: Any, display: Display
) -> tuple[Task, list[EncodedProblem], list[Benchmark]]:
    """The task, its training problems, and the sets that are evaluated; says what was left out and why.

    Raises:
        ValueError: something cannot be read, or nothing is left of a set.
    """
    task = config.task.build()
    sets = evaluated_tasks(config, task)
    for note in dict.fromkeys([*task.notes, *(note for each in sets for note in each.notes)]):
        display.line(f"warning: {note}")
    train = without_overlap(config, task.train, [problem for each in sets for problem in each.test], display)
    train_problems = encode_problems(config, tokenizer, task, train, f"{task.name} training", display)
    benchmarks = []
    for each in sets:
        if each.test:
            problems = encode_problems(config, tokenizer, each, each.test, f"{each.name} test", display)
            num_left_out = len(each.test) - len(problems)
            benchmarks.append(Benchmark(name=each.name, task=each, problems=problems, num_left_out=num_left_out))
    num_test = sum(len(benchmark.problems) for benchmark in benchmarks)
    display.line(f"task: {task.name} from {task.source}, {len(train_problems)} training, {num_test} test")
    for benchmark in benchmarks if config.evaluation.sets else ():
        display.line(f"evaluated: {benchmark.name} from {benchmark.task.source}, {len(benchmark.problems)} problems")
    return task, train_problems, benchmarks


def evaluated_tasks(config: TrainConfig, task: Task) -> list[Task]:
    """The tasks whose test problems are evaluated, each a set of its own.

    Raises:
        ValueError: one cannot be read, or two have one name.
    """
    built = [each.build_benchmark() for each in config.evaluation.sets] or [task]
    sets = [part for each in built for part in each.parts or [each]]
    twice = [name for name, count in Counter(each.name for each in sets).items() if count > 1]
    if twice:
        raise ValueError(f"evaluation.sets has {twice[0]!r} twice. Set `name` in one of them")
    return sets


def without_overlap(
    config: TrainConfig, train: Sequence[Problem], test: Sequence[Problem], display: Display
) -> Sequence[Problem]:
    """The training problems, without those that are evaluated too if the config says so; warns of them otherwise."""
    both = overlap_text(train, test)
    if not both:
        return train
    if not config.evaluation.drop_overlap:
        display.line(f"warning: {both}; evaluation.drop_overlap=true leaves them out of training")
        return train
    left_out = {id(problem) for problem in split_overlap(train, test)[0]}
    kept = [problem for problem in train if id(problem) not in left_out]
    display.line(f"left out {len(left_out)} of {len(train)} training problems: {both}")
    return kept


def overlap_text(train: Sequence[Problem], test: Sequence[Problem]) -> str:
    """Which evaluated problems are training problems too, for the user; empty if none."""
    in_test = split_overlap(train, test)[1]
    counts = Counter(problem.task for problem in in_test)
    sets = ", ".join(f"{count} of {name}" for name, count in counts.items())
    some = ", ".join(problem.id for problem in in_test[:3])
    return f"{sets} are both trained on and evaluated, such as {some}" if in_test else ""


def encode_problems(
    config: TrainConfig, tokenizer: Any, task: Task, problems: Sequence[Problem], what: str, display: Display
) -> list[EncodedProblem]:
    """Problems with their prompts, without those that are too long; says how many those are."""
    if not problems:
        return []
    model, limit = config.model, config.rollout.max_prompt_tokens
    encoded = [
        EncodedProblem(
            problem=problem,
            prompt=encode_messages(tokenizer, task.messages(problem), model.chat_template, model.enable_thinking),
        )
        for problem in problems
    ]
    kept, num_long = keep_within_limit(encoded, limit)
    if num_long:
        display.line(
            f"left out {num_long} of {len(problems)} {what} problems: their prompts exceed "
            f"rollout.max_prompt_tokens={limit}"
        )
    return kept


def problem_order(task: Task, problems: Sequence[EncodedProblem], seed: int) -> ProblemOrder:
    """The order of training problems, by the weights of a mixture.

    Raises:
        ValueError: there are none, or none of a part.
    """
    if not problems:
        raise ValueError(f"task {task.name!r} has no training problems. Name a training split, or another task")
    if not task.weights:
        return ProblemOrder([len(problems)], (), seed)
    counts = Counter(encoded.problem.task for encoded in problems)
    for part in task.parts:
        if not counts[part.name]:
            raise ValueError(f"no training problem of part {part.name!r} of the mixture is left. Leave the part out")
    return ProblemOrder([counts[part.name] for part in task.parts], task.weights, seed)
