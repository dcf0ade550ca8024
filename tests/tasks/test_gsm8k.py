import builtins
import gzip
import json

import pytest

from octavo.tasks.answers import check_math
from octavo.tasks.answers_values import parse_number
from octavo.tasks.gsm8k import GSM8KConfig
from octavo.tasks.problem import Problem

ROWS = [
    {"question": "What is 1 + 1?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"},
    {"question": "What is 700 x 100?", "answer": "It is 70,000.\n#### 70,000"},
]


def write_folder(folder, train, test):
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in test))
    with gzip.open(folder / "train.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(row) + "\n" for row in train)
    return str(folder)


def test_original_rows(tmp_path):
    path = write_folder(tmp_path, ROWS, ROWS[:1])
    task = GSM8KConfig(path=path).build()
    assert [problem.answer for problem in task.train] == ["2", "70,000"]
    assert task.test[0].text == "What is 1 + 1?"
    assert task.check(task.train[1], "so \\boxed{70000}").reward == 1.0
    assert len({problem.id for problem in (*task.train, *task.test)}) == 3
    assert "\\boxed{}" in task.prompt_text(task.test[0]) and task.prompt_text(task.test[0]).startswith("What is 1 + 1?")


def test_rows_with_id_problem_and_answer(tmp_path):
    assert len(GSM8KConfig(path=write_folder(tmp_path, ROWS, ROWS), num_test=1).build().test) == 1
    path = write_folder(tmp_path, [{"id": "a/0", "problem": "6 x 7?", "answer": 42}] * 3, [ROWS[0]])
    task = GSM8KConfig(path=path, num_train=2, system_prompt="Be brief.", instruction="").build()
    assert task.train == (Problem(id="a/0", text="6 x 7?", answer="42", task="gsm8k"),) * 2
    assert task.system_prompt == "Be brief." and task.prompt_text(task.train[0]) == "6 x 7?"


def test_the_real_files(data_dir):
    task = GSM8KConfig(path=str(data_dir / "gsm8k")).build()
    assert (len(task.train), len(task.test)) == (7473, 1055)
    assert all(parse_number(problem.answer) is not None for problem in (*task.train, *task.test))
    assert not {problem.text for problem in task.train} & {problem.text for problem in task.test}
    assert task.train[0].answer == "72" and task.train[0].text.startswith("Natalia sold clips")
    assert all(task.check(problem, f"It is\n#### {problem.answer}").outcome == "correct" for problem in task.test)


@pytest.mark.parametrize(
    "completion, outcome",
    [
        ("48/2 = 24, 24+48 = 72. #### 72", "correct"),
        ("The answer is $72.00.", "correct"),
        ("\\boxed{\\$72}", "correct"),
        ("#### 72 clips", "correct"),
        ("\\boxed{\\frac{144}{2}}", "correct"),
        ("She sold 72 clips, so \\boxed{96}", "wrong"),  # right in the middle, wrong at the end
        ("72? No, the total is 73.", "wrong"),
        ("#### 72 or 73", "wrong"),
        ("#### 71 72", "wrong"),
        ("#### 72/3", "wrong"),
        ("\\boxed{70, 71, 72}", "wrong"),
        ("#### -72", "wrong"),
        ("#### 720", "wrong"),
        ("72 ####", "unparsable"),
        ("####", "unparsable"),
        ("", "unparsable"),
    ],
)
def test_check(completion, outcome):
    verdict = check_math(Problem(id="0", text="?", answer="72"), completion)
    assert (verdict.outcome, verdict.reward) == (outcome, float(outcome == "correct"))


def test_building_a_config_reads_nothing():
    GSM8KConfig(path="/no/such/folder")


@pytest.mark.parametrize("path", ["/no/such/folder", "./data/gsm8k", "../gsm8k", "gsm8k", "a/b/c"])
def test_a_missing_folder_is_named(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=path):
        GSM8KConfig(path=path).build()


def test_a_folder_without_test_file_names_what_it_holds(tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps(ROWS[0]))
    with pytest.raises(ValueError, match=r"test\.jsonl.*it holds train\.jsonl"):
        GSM8KConfig(path=str(tmp_path)).build()


def test_hub_without_the_datasets_package(tmp_path, monkeypatch):
    real_import = builtins.__import__

    def without_datasets(name, *args, **kwargs):
        if name == "datasets":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OCTAVO_DATA", str(tmp_path))
    monkeypatch.setattr(builtins, "__import__", without_datasets)
    with pytest.raises(ValueError, match="pip install datasets"):
        GSM8KConfig().build()


@pytest.mark.parametrize(
    "row, message",
    [
        (
            {"text": "a", "answer": "1"},
            r"train.jsonl.gz, 1 bad row \(line 1: wants 'question'; its keys are 'text', 'answer'",
        ),
        ({"problem": "a", "answer": "b ####"}, "line 1: wants a final answer, got ''"),
    ],
)
def test_a_bad_row_is_named(row, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        GSM8KConfig(path=write_folder(tmp_path, [row], ROWS)).build()


def test_an_empty_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="at least one problem"):
        GSM8KConfig(path=write_folder(tmp_path, [], ROWS)).build()


def test_bad_counts_are_errors():
    with pytest.raises(ValueError, match="num_test is at least 1"):
        GSM8KConfig(num_test=0)


@pytest.mark.parametrize(
    "answer, text", [(1e-05, "0.00001"), (1e22, "10000000000000000000000"), (2.50, "2.5"), (-3, "-3")]
)
def test_a_number_as_the_answer_is_read_in_plain_digits(answer, text, tmp_path):
    path = write_folder(tmp_path, [{"problem": "?", "answer": answer}], ROWS)
    task = GSM8KConfig(path=path).build()
    assert task.train[0].answer == text
    assert task.check(task.train[0], f"#### {text}").outcome == "correct"
