"""The package is optional: what it does is tried where it is installed, what we make of it with one of our own."""

import importlib.util
import pickle
import random
import sys
from types import ModuleType

import pytest

from octavo.tasks.reasoning_gym import INSTRUCTION, ReasoningGymConfig, _make

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed"
)


class Doubling:
    """A data set as reasoning-gym has them: by index, from seed + index, with a scorer of its own."""

    def __init__(self, seed, size, highest=9):
        assert highest > 0, "highest must be positive"
        self.seed, self.size, self.highest = seed, size, highest

    def __getitem__(self, index):
        number = random.Random(self.seed + index).randint(1, self.highest)
        return {"question": f"Double {number}", "answer": 2 * number, "metadata": {"number": number}}

    def score_answer(self, answer, entry):
        if answer == "explode":
            raise ZeroDivisionError("in the scorer")
        return 1.0 if answer == str(entry["answer"]) else 0.1 if answer.isdigit() else 0.0


@pytest.fixture
def package(monkeypatch):
    """Our own `reasoning_gym`, with one data set."""

    def create_dataset(name, **values):
        if name != "doubling":
            raise ValueError(f"Dataset {name} not registered")
        random.seed(0)  # careless with the global state, as others' code may be
        return Doubling(**values)

    def extract_answer(completion, tag_name):
        head, opened, tail = completion.rpartition(f"<{tag_name}>")
        return tail.partition(f"</{tag_name}>")[0].strip() if opened else None

    module, utils = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.utils")
    module.create_dataset, utils.extract_answer = create_dataset, extract_answer
    monkeypatch.setitem(sys.modules, "reasoning_gym", module)
    monkeypatch.setitem(sys.modules, "reasoning_gym.utils", utils)
    _make.cache_clear()
    yield
    _make.cache_clear()


def test_problems_come_from_the_seed_alone(package):
    before = random.getstate()
    config = ReasoningGymConfig(dataset="doubling", num_train=50, num_test=50, parameters=("highest=1000",))
    task = config.build()
    assert random.getstate() == before
    assert task == config.build() and len(task.train) == 50
    other = ReasoningGymConfig(dataset="doubling", num_train=50, num_test=50, parameters=("highest=1000",), seed=1)
    assert [p.text for p in other.build().train] != [p.text for p in task.train]
    assert not {p.text for p in task.train} & {p.text for p in task.test} and len(task.test) > 40
    assert all(p.task == task.name == "doubling" and p.generated for p in (*task.train, *task.test))
    assert task.prompt_text(task.train[0]).endswith(INSTRUCTION)


def test_its_own_scorer_judges_also_in_another_process(package):
    task = ReasoningGymConfig(dataset="doubling", num_train=3, num_test=3, parameters=("highest=1000",)).build()
    check = pickle.loads(pickle.dumps(task.check))
    for problem in (*task.train, *task.test):
        found = {
            text: check(problem, text)
            for text in (
                f"so <answer>{problem.answer}</answer>",
                "<answer>7</answer>",
                problem.answer,
                "<answer>explode</answer>",
            )
        }
        outcomes = [(verdict.outcome, verdict.reward) for verdict in found.values()]
        assert outcomes == [("correct", 1.0), ("wrong", 0.1), ("unparsable", 0.0), ("crashed", 0.0)]
    assert found["<answer>explode</answer>"].detail == "ZeroDivisionError: in the scorer"


def test_an_answer_may_stand_anywhere(package):
    config = ReasoningGymConfig(dataset="doubling", num_train=3, num_test=3, answer_in="text")
    task = config.build()
    problem = task.train[0]
    half = str(int(problem.answer) // 2)
    texts = (
        f"{half} + {half} = {problem.answer}.",
        f"<answer>{problem.answer}</answer>",
        f"It is 7{half}.",
        "No idea.",
    )
    assert [task.check(problem, text).outcome for text in texts] == ["correct", "correct", "wrong", "unparsable"]


def test_what_the_package_refuses_is_named(package):
    with pytest.raises(ValueError, match="refuses dataset='chess'.*not registered"):
        ReasoningGymConfig(dataset="chess").build()
    with pytest.raises(ValueError, match="highest must be positive"):
        ReasoningGymConfig(dataset="doubling", parameters=("highest=-1",)).build()
    with pytest.raises(ValueError, match="written name=value; got 'highest'"):
        ReasoningGymConfig(dataset="doubling", parameters=("highest",))


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    _make.cache_clear()
    with pytest.raises(ValueError, match="pip install reasoning-gym"):
        ReasoningGymConfig(dataset="leg_counting").build()


@needs_package
@pytest.mark.parametrize("name", ["leg_counting", "basic_arithmetic", "countdown"])
def test_the_real_package(name):
    task = ReasoningGymConfig(dataset=name, num_train=4, num_test=4).build()
    for problem in task.train:
        answer = "3*4" if problem.answer == "None" else problem.answer
        assert task.check(problem, f"I think <answer>{answer}</answer>").outcome == "correct"
        assert task.check(problem, "<answer>no idea</answer>").outcome == "wrong"
        assert task.check(problem, "no idea").outcome == "unparsable"
