import random
import re

import pytest

from octavo.tasks.arithmetic import ArithmeticConfig, draw_problem_text, is_held_out, running_totals
from octavo.tasks.problem import Problem


@pytest.mark.parametrize(
    "text, totals",
    [("7+8-5", [15, 10]), ("(7+8-5)%10", [5, 0]), ("3-9", [-6]), ("(3-9)%10", [4]), ("12-40+30", [-28, 2])],
)
def test_running_totals(text, totals):
    assert running_totals(text) == totals


def test_answers_are_right():
    for modulus in (None, 2, 10, 97):
        for problem in ArithmeticConfig(modulus=modulus, num_train=200, num_test=50).build().train:
            assert int(problem.answer) == eval(problem.text), problem


def test_the_same_config_gives_the_same_task():
    task = ArithmeticConfig().build()
    assert task == ArithmeticConfig().build()
    first = task.train[0]
    assert (first.id, first.task, first.generated) == ("arithmetic/train/0", "arithmetic", True)
    assert task.train != ArithmeticConfig(seed=1).build().train


def test_no_held_out_problem_is_in_training_whatever_the_seed():
    tasks = [ArithmeticConfig(seed=seed).build() for seed in range(3)]
    train = {problem.text for task in tasks for problem in task.train}
    test = {problem.text for task in tasks for problem in task.test}
    assert not train & test
    assert all(map(is_held_out, test)) and not any(map(is_held_out, train))
    for task in tasks:
        assert (len(set(task.train)), len(set(task.test))) == (4096, 512)


def test_a_tenth_is_held_out():
    rng = random.Random(0)
    held_out = [is_held_out(draw_problem_text(rng, ArithmeticConfig())) for _ in range(20_000)]
    assert 0.09 < sum(held_out) / len(held_out) < 0.11


def test_operands_and_their_number_follow_the_config():
    config = ArithmeticConfig(num_operands=3, min_operand=10, max_operand=12, modulus=None, num_train=40, num_test=5)
    for problem in config.build().train:
        assert re.fullmatch(r"1[0-2][+-]1[0-2][+-]1[0-2]", problem.text), problem


@pytest.mark.parametrize(
    "completion, outcome",
    [
        ("=9", "correct"),
        (":5,0,9", "correct"),
        ("The answer is 9.", "correct"),
        (":5,0,9,1", "wrong"),
        ("9 or 8", "wrong"),
        ("-9", "wrong"),
        ("=19", "wrong"),
        ("=", "unparsable"),
        ("", "unparsable"),
    ],
)
def test_check(completion, outcome):
    task = ArithmeticConfig(num_train=1, num_test=1).build()
    verdict = task.check(Problem(id="0", text="(7+8-5+9)%10", answer="9"), completion)
    assert (verdict.outcome, verdict.reward) == (outcome, float(outcome == "correct"))


def test_too_many_problems_is_an_error_that_says_how_many_there_are():
    with pytest.raises(ValueError, match="num_train=4096 distinct problems were wanted, but .* make only about 45"):
        ArithmeticConfig(num_operands=2, max_operand=5).build()


@pytest.mark.parametrize("field", [{"num_test": 0}, {"num_operands": 1}, {"min_operand": 10}, {"modulus": 1}])
def test_bad_fields_are_errors(field):
    with pytest.raises(ValueError, match=next(iter(field))):
        ArithmeticConfig(**field)


def test_the_longest_sums_can_be_counted():
    config = ArithmeticConfig(num_operands=1000, num_train=1, num_test=1)
    assert config.build().train[0].text.count("+") > 400
