import json

import pytest

from octavo.tasks.datasets import DatasetConfig, FieldsConfig
from octavo.tasks.few_shot import FewShotConfig
from octavo.tasks.reader import answer_text


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def problems(count, start=0):
    return [{"problem": f"What is {index} + 1?", "answer": index + 1} for index in range(start, start + count)]


def test_a_file_is_trained_on_as_a_task_and_measured_as_a_benchmark(tmp_path):
    config = DatasetConfig(path=write(tmp_path / "mine.jsonl", problems(3)), num_train=2)
    task, benchmark = config.build(), config.build_benchmark()
    assert [problem.id for problem in task.train] == ["mine/train/0", "mine/train/1"] and task.test == ()
    assert [problem.id for problem in benchmark.test] == [f"mine/test/{index}" for index in range(3)]
    assert benchmark.train == () and task.name == benchmark.name == "mine"
    only_test = DatasetConfig(path=config.path, train_split=None).build()
    assert only_test.train == () and len(only_test.test) == 3


def test_a_folder_with_splits_and_columns_of_ones_own(tmp_path):
    rows = [{"q": {"text": "Red?"}, "choices": ["A", "B"], "key": "B", "n": 7, "why": "since \\boxed{B}"}]
    write(tmp_path / "dev.jsonl", rows)
    write(tmp_path / "final.jsonl", [{**rows[0], "n": 8}])
    config = DatasetConfig(
        path=str(tmp_path),
        train_split="dev",
        test_split="final",
        fields=FieldsConfig(problem="q.text", answer="key", id="n", solution="why"),
        name="colours",
        instruction="\nA letter.",
        system_prompt="Be brief.",
    )
    task = config.build()
    (first,), (second,) = task.train, task.test
    assert (first.text, first.answer, first.id, second.id, first.solution) == ("Red?", "B", "7", "8", rows[0]["why"])
    assert task.messages(first) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Red?\nA letter."},
    ]


def test_bad_rows_are_named_and_skipped_up_to_the_limit(tmp_path):
    rows = [*problems(2), {"problem": "none"}, {"problem": "", "answer": "1"}, {"problem": "?", "answer": None}]
    path = write(tmp_path / "x.jsonl", rows)
    with pytest.raises(
        ValueError, match=r"x.jsonl, 1 bad row \(line 3: wants 'answer'; its keys are 'problem'\), with "
    ):
        DatasetConfig(path=path).build()
    with pytest.raises(ValueError, match=r"3 bad rows \(line 3: .*; line 4: wants text.*; line 5: .*max_bad_rows=2"):
        DatasetConfig(path=path, max_bad_rows=2).build()
    task = DatasetConfig(path=path, max_bad_rows=3).build()
    (note,) = task.notes
    assert len(task.train) == 2 and "x.jsonl: left out 3 bad rows (line 3: " in note
    many = write(tmp_path / "y.jsonl", [*problems(1), *[{}] * 9])
    assert "and 4 more)" in DatasetConfig(path=many, max_bad_rows=9).build().notes[0]
    with pytest.raises(ValueError, match=r"at least one problem; got 1 bad row \(line 1: wants 'problem'"):
        DatasetConfig(path=write(tmp_path / "z.jsonl", [{}]), max_bad_rows=1).build()
    assert len(DatasetConfig(path=path, num_train=2).build().train) == 2  # the rest is not even read


@pytest.mark.parametrize(
    "preset, row, why",
    [
        ("math500", {"problem": "half \ud83d", "answer": "1"}, "half a character"),
        ("math500", {"problem": "1", "answer": "\ud83d"}, "half a character"),
        ("mbpp", {"problem": "?", "answer": "", "tests": 5}, "is not of the form of mbpp"),
        ("eurus2_code", {"ability": "code", "prompt": [{"content": 5}], "reward_model": 5}, "wants 'reward_model"),
        ("amc22", {"problem": "?", "answer": "1", "url": 5}, "is not of the form of amc22"),
    ],
)
def test_columns_of_another_kind_make_a_bad_row(preset, row, why, tmp_path):
    with pytest.raises(ValueError, match=rf"x.jsonl, 1 bad row .line 1: .*{why}"):
        DatasetConfig(preset=preset, path=write(tmp_path / "x.jsonl", [row])).build_benchmark()


def test_one_value_stands_for_a_list_of_it(tmp_path):
    rows = [{"problem": "?", "answer": "1", "accepted": "23"}, {"problem": "?", "answer": "1", "accepted": 4}]
    task = DatasetConfig(preset="math500", path=write(tmp_path / "x.jsonl", rows)).build_benchmark()
    assert [problem.accepted for problem in task.test] == [("23",), ("4",)]
    rows = [{"problem": "?", "answer": "", "tests": "assert f() == 1"}]
    task = DatasetConfig(preset="mbpp", path=write(tmp_path / "y.jsonl", rows)).build_benchmark()
    assert [problem.tests for problem in task.test] == [("assert f() == 1",)]


def test_code_wants_tests_and_no_answer(tmp_path):
    rows = [{"problem": "add", "tests": ["assert add(1, 1) == 2"]}, {"problem": "add", "tests": []}]
    config = DatasetConfig(
        path=write(tmp_path / "x.jsonl", rows),
        fields=FieldsConfig(answer="tests", tests="tests"),
        check="code",
        max_bad_rows=1,
    )
    task = config.build()
    assert task.train[0].tests == ("assert add(1, 1) == 2",) and "line 2: wants at least one test" in task.notes[0]
    assert "```python" in task.prompt_text(task.train[0])


@pytest.mark.parametrize(
    "keys, message",
    [
        ({}, "preset or path"),
        ({"preset": "math", "fields": FieldsConfig()}, "leave out fields"),
        ({"preset": "gsm8k_math", "path": "x"}, "several sets"),
        ({"path": "x", "num_test": 0}, "num_test is at least 1"),
        ({"path": "x", "max_bad_rows": -1}, "max_bad_rows is at least 0"),
    ],
)
def test_a_config_that_says_nothing_or_too_much(keys, message):
    with pytest.raises(ValueError, match=message):
        DatasetConfig(**keys)


def test_no_split_at_all(tmp_path):
    write(tmp_path / "train.jsonl", problems(1))
    with pytest.raises(ValueError, match="left without a split"):
        DatasetConfig(path=str(tmp_path), train_split=None, test_split=None).build()


@pytest.mark.parametrize(
    "answer, text",
    [
        (" 3 ", "3"),
        (["1", 2.0], "1, 2"),
        (10**40, "1" + "0" * 40),
        (10**4000, "1" + "0" * 4000),
        (1e-05, "0.00001"),
        (142.0, "142"),
        (float("nan"), None),
        (True, None),
        (["1", None], None),
        ({"a": 1}, None),
    ],
)
def test_answer_text(answer, text):
    assert answer_text(answer) == text


def test_examples_are_others_and_the_same_for_all(tmp_path):
    write(tmp_path / "train.jsonl", [*problems(6), *problems(6)])  # every problem twice
    write(tmp_path / "test.jsonl", problems(3, start=100))
    shot = FewShotConfig(num_examples=2, seed=1)
    task = DatasetConfig(path=str(tmp_path), few_shot=shot, instruction="").build()
    for problem in (*task.train, *task.test):
        asked = [message["content"] for message in task.messages(problem)[::2]]
        assert len(asked) == 3 and asked[-1] == problem.text and len(set(asked)) == 3
    first, second = task.messages(task.test[0]), task.messages(task.test[1])
    assert first[:-1] == second[:-1] and first[1]["content"].startswith("The answer is \\boxed{")
    other = DatasetConfig(path=str(tmp_path), few_shot=FewShotConfig(num_examples=2, seed=5), instruction="").build()
    assert other.messages(other.test[0])[:-1] != first[:-1]
    benchmark = DatasetConfig(path=str(tmp_path), few_shot=shot, instruction="").build_benchmark()
    assert benchmark.train == () and benchmark.messages(benchmark.test[0]) == first


def test_examples_from_a_file_with_solutions(tmp_path):
    rows = [{"question": "1+1?", "answer": "One and one.\n#### 2"}, {"question": "2+2?", "answer": "So.\n#### 4"}]
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "test.jsonl", rows)
    shots = write(tmp_path / "shots.jsonl", [{"question": "3+3?", "answer": "Three twice.\n#### 6"}])
    task = DatasetConfig(
        preset="gsm8k", path=str(tmp_path), few_shot=FewShotConfig(num_examples=1, path=shots), instruction=""
    ).build()
    assert task.messages(task.test[0]) == [
        {"role": "user", "content": "3+3?"},
        {"role": "assistant", "content": "Three twice.\nThe answer is \\boxed{6}."},
        {"role": "user", "content": "1+1?"},
    ]
    with pytest.raises(ValueError, match="num_examples=3 wants as many different problems"):
        DatasetConfig(preset="gsm8k", path=str(tmp_path), few_shot=FewShotConfig(num_examples=3)).build()
    with pytest.raises(ValueError, match="Raise num_examples"):
        FewShotConfig(path=shots)
