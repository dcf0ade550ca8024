import re

import pytest

from octavo.tasks.datasets import DatasetConfig
from octavo.tasks.overlap import split_overlap
from octavo.tasks.presets import PRESETS
from octavo.tasks.problem import Problem, same_problem_key


def problem(text, generated=False):
    return Problem(id=text, text=text, answer="1", generated=generated)


def test_letters_and_digits_make_a_problem_the_same():
    train = [problem("What is $1+1$?"), problem("Solve x.")]
    test = [problem("what is  1 + 1"), problem("What is 1 + 2?"), problem("solve X!")]
    in_train, in_test = split_overlap(train, test)
    assert in_train == train and in_test == [test[0], test[2]]
    made = [problem("3+4", generated=True)], [problem("3-4", generated=True), problem("3+4", generated=True)]
    assert split_overlap(*made) == (made[0], made[1][1:])


def test_the_table_of_the_data_readme(data_dir, monkeypatch):
    """Repeats inside each training set, and the evaluation problems that it holds too."""
    monkeypatch.setenv("OCTAVO_DATA", str(data_dir))
    table = (data_dir / "README.md").read_text().partition("## Overlap")[2]
    wanted = {}
    for name, repeats, found in re.findall(r"^\| (\w+) \| ([0-9]+) \| (.*) \|$", table, re.M):
        wanted[name] = (int(repeats), {name: int(count) for name, count in re.findall(r"(\w+) ([0-9]+)", found)})
    tasks = {name: DatasetConfig(preset=name).build() for name in PRESETS if (data_dir / PRESETS[name].folder).is_dir()}
    tests = [problem for task in tasks.values() for problem in task.test]
    for name, (repeats, found) in wanted.items():
        train = tasks[name].train
        counts: dict[str, int] = {}
        for problem in split_overlap(train, tests)[1]:
            counts[problem.task] = counts.get(problem.task, 0) + 1
        assert counts == found, name
        assert len(train) - len(set(map(same_problem_key, train))) == repeats, name
    assert len(wanted) == 8 and pytest.approx(976) == wanted["dapo_math_17k"][1]["math"]
