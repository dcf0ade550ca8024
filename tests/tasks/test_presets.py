"""Every preset loads: the real files where they are there, else rows as they are published."""

import json
import re
from pathlib import Path
from typing import get_args

import pytest
from published_rows import PUBLISHED

from octavo.tasks.datasets import DatasetConfig
from octavo.tasks.presets import INSTRUCTIONS, MIXES, PRESETS, CheckName, PresetName, last_box

LOCAL_ONLY = {"deepmath_5k", "deepscaler_math", "deepscaler_sub", "aime_1983_2023"}


def test_every_preset_has_a_name_in_the_config_and_rows_in_the_tests():
    assert set(get_args(PresetName)) == set(PRESETS) | set(MIXES)
    assert set(PRESETS) == set(PUBLISHED) | LOCAL_ONLY
    assert set(INSTRUCTIONS) == set(get_args(CheckName))


@pytest.mark.parametrize("name", PUBLISHED)
def test_rows_as_published(name, tmp_path):
    split, rows, wanted = PUBLISHED[name]
    (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    preset = PRESETS[name]
    role = "train" if split == preset.train else "test"
    assert split == getattr(preset, role)
    other = {"test_split" if role == "train" else "train_split": None}
    task = DatasetConfig(preset=name, path=str(tmp_path), **other).build()
    problems = task.train or task.test
    assert [(problem.text, problem.answer) for problem in problems] == wanted
    assert len({problem.id for problem in problems}) == len(problems) == len(task.train) + len(task.test)
    assert all(problem.task == task.name == name for problem in problems)


def rows_of_the_readme(data_dir):
    """(folder, split) -> rows, of the table in the README of the data folder."""
    lines = re.findall(
        r"^\| (\w+) \| (\w+)\.jsonl(?:\.gz)? \| ([0-9,]+) \|", (data_dir / "README.md").read_text(), re.M
    )
    return {(folder, split): int(rows.replace(",", "")) for folder, split, rows in lines}


def test_the_real_files_have_as_many_problems_as_their_readme_says(data_dir, monkeypatch):
    monkeypatch.setenv("OCTAVO_DATA", str(data_dir))
    counts = rows_of_the_readme(data_dir)
    loaded = {}
    for name, preset in PRESETS.items():
        if (data_dir / preset.folder).is_dir():
            task = DatasetConfig(preset=name).build()
            assert str(data_dir / preset.folder) in task.source
            bad = {"train": 0, "test": 0}
            for note in task.notes:
                match = re.search(r"/(train|test)\.jsonl.* left out ([0-9]+) bad row", note)
                bad[match[1]] = int(match[2])
            for role, problems in (("train", task.train), ("test", task.test)):
                if problems:
                    loaded[preset.folder, role] = len(problems) + bad[role]
                    known = {"math": 2, "deepscaler_math": 2, "deepscaler_sub": 1}  # without an answer
                    assert bad[role] == (known.get(name, 0) if role == "train" else 0)
    beside = {("mbpp", "validation"), ("mbpp", "prompt")}
    assert loaded == {key: rows for key, rows in counts.items() if key not in beside}
    assert loaded["gsm8k", "train"] == 7473 and loaded["math", "test"] == 5000 and len(loaded) == 17


def test_the_mix_is_both_sets(data_dir, monkeypatch):
    monkeypatch.setenv("OCTAVO_DATA", str(data_dir))
    task = DatasetConfig(preset="gsm8k_math", num_train=100, num_test=5).build()
    assert [part.name for part in task.parts] == ["gsm8k", "math"] and not task.weights
    assert len(task.train) == 200 and len(task.test) == 10
    assert task.prompt_text(task.train[0]).endswith("after ####.")
    assert task.prompt_text(task.train[150]).endswith("in \\boxed{}.")


def test_minerva_accepts_every_answer_of_its_list(data_dir, monkeypatch):
    monkeypatch.setenv("OCTAVO_DATA", str(data_dir))
    problem = next(p for p in DatasetConfig(preset="minerva").build().test if p.accepted == ("6630",))
    assert problem.answer == "6630.65"


def test_the_documents_list_every_preset_as_it_is():
    page = (Path(__file__).resolve().parents[2] / "docs/data.md").read_text()
    lines = re.findall(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (\S+) \| (\S+) \| (\w+) \| (.*) \|$", page, re.M)
    listed = {line[0]: line[1:] for line in lines}
    assert list(listed) == list(PRESETS)
    for name, preset in PRESETS.items():
        link = "–"
        if preset.hub:
            more = f", {preset.hub_config}" if preset.hub_config else ""
            link = f"[{preset.hub}](https://huggingface.co/datasets/{preset.hub}){more}"
        splits = (preset.train or "–", preset.test or "–")
        assert listed[name] == (preset.folder, link, *splits, preset.check, preset.licence)


def test_a_published_split_on_its_own_name(tmp_path):
    (tmp_path / "validation.jsonl").write_text(json.dumps(PUBLISHED["eurus2_math"][1][0]))
    (tmp_path / "train.jsonl").write_text(json.dumps(PUBLISHED["eurus2_math"][1][0]))
    task = DatasetConfig(preset="eurus2_math", path=str(tmp_path)).build()
    assert len(task.train) == len(task.test) == 1 and task.test[0].id == "eurus2_math/test/0"


def test_a_set_that_was_never_published_by_itself_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_DATA", str(tmp_path))
    with pytest.raises(ValueError, match=r"preset=deepmath_5k wants the folder .*deepmath_5k.* never published"):
        DatasetConfig(preset="deepmath_5k").build()


def test_calls_and_input_become_tests_of_a_program():
    read = PRESETS["eurus2_code"].read
    calls, stdin = (read(row)["tests"] for row in PUBLISHED["eurus2_code"][1][1:])
    for program, right in (
        ("def add(a, b):\n    return a + b", True),
        ("class Solution:\n    def add(self, a, b):\n        return a + b", True),
        ("def add(a, b):\n    return 3", False),
    ):
        space: dict = {}
        exec(program, space)  # our own text
        results = []
        for test in calls:
            try:
                exec(test, dict(space))
                results.append(True)
            except AssertionError:
                results.append(False)
        assert all(results) == right
    assert [json.loads(test) for test in stdin] == [{"stdin": "1 2\n", "stdout": "3\n"}]


@pytest.mark.parametrize(
    "solution, answer",
    [
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("$\\boxed{\\frac{\\sqrt{3}}{2}}$", "\\frac{\\sqrt{3}}{2}"),
        ("$\\fbox{7}$", "7"),
        ("$\\boxed 5$.", "5"),
        ("no box", ""),
        ("\\boxed{never closed", ""),
    ],
)
def test_last_box(solution, answer):
    assert last_box(solution) == answer
