"""Dumps of other frameworks: what the schema promises is read, and a bad row is named."""

import json

import pytest
import torch

from octavo.diagnose.dumps import read_dump

ROW = {"rollout_logprobs": [-0.5, -1.0], "old_logprobs": [-0.5, -1.5], "advantages": 2.0}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_are_laid_end_to_end_without_masked_tokens(tmp_path):
    rows = [
        {**ROW, "response_mask": [1, 0], "step": 3, "group": "a", "reward": 1, "text": "x"},
        {**ROW, "response_mask": [1, 1], "step": 4, "group": "b", "reward": 0.5, "text": "y"},
    ]
    dump = read_dump([write(tmp_path / "a.jsonl", rows)])
    assert {name: values.tolist() for name, values in dump.columns.items()} == {
        "rollout_logprobs": [-0.5, -0.5, -1.0],
        "old_logprobs": [-0.5, -0.5, -1.5],
        "advantages": [2.0, 2.0, 2.0],
    }
    assert dump.answer_index.tolist() == [0, 1, 1] and dump.positions.tolist() == [0, 0, 1]
    assert dump.step.tolist() == [3, 4, 4] and dump.ignored == ["text"]
    assert dump.answers[1] == {"step": 4, "group": "b", "reward": 0.5}
    part = dump.of_step(4)
    assert part.columns["old_logprobs"].tolist() == [-0.5, -1.5] and len(part.answers) == 1


def test_verls_names_stand_for_ours(tmp_path):
    row = {"rollout_log_probs": [-1.0], "old_log_probs": [-2.0], "log_probs": [-3.0], "entropys": [0.5]}
    row |= {"advantages": [0.1], "uid": "u", "score": 1.0, "ref_logprobs": [0.0]}
    dump = read_dump([write(tmp_path / "1.jsonl", [row])])
    assert set(dump.columns) == {"rollout_logprobs", "old_logprobs", "logprobs", "entropy", "advantages"}
    assert dump.answers == [{"step": 0, "group": "u", "reward": 1.0}] and dump.ignored == ["ref_logprobs"]


def test_a_folder_is_read_in_the_order_of_its_numbers(tmp_path):
    for step in (10, 9, 1):
        write(tmp_path / f"{step}.jsonl", [{**ROW, "step": step}])
    (tmp_path / "notes.txt").write_text("left alone")
    assert [answer["step"] for answer in read_dump([tmp_path]).answers] == [1, 9, 10]


def test_parquet_gives_the_same_as_json(tmp_path):
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    rows = [{**ROW, "advantages": [0.5, -0.5], "step": step} for step in range(300)]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    found, lines = read_dump([tmp_path / "a.parquet"]), read_dump([write(tmp_path / "a.jsonl", rows)])
    assert len(found.step) == 600 and found.answers == lines.answers
    for name, values in lines.columns.items():
        assert torch.equal(found.columns[name], values)
    bad = [*rows[:280], {**rows[0], "advantages": [0.5]}]
    parquet.write_table(pyarrow.Table.from_pylist(bad), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b.parquet, row 281: the lists of a row are equally long"):
        read_dump([tmp_path / "b.parquet"])
    damaged = (tmp_path / "a.parquet").read_bytes()
    for content in (b"", b"PAR1nonsensePAR1", damaged[: len(damaged) // 2]):
        (tmp_path / "c.parquet").write_bytes(content)
        with pytest.raises(ValueError, match=r"c.parquet cannot be read as Parquet after row 0"):
            read_dump([tmp_path / "c.parquet"])


@pytest.mark.parametrize(
    "row, expected",
    [
        ({"input": "a", "output": "b", "gts": None, "score": 1.0}, "verl's trainer.rollout_data_dir writes texts and"),
        ({"text": "a"}, "no log-probabilities; its columns are text. docs/diagnose.md is the schema"),
        ({}, "no log-probabilities; its columns are none"),
        (
            {**ROW, "old_logprobs": [-1.0]},
            "equally long, a number a completion token; got rollout_",
        ),
        ({**ROW, "old_logprobs": "[-1.0, -1.0]"}, "old_logprobs is a list with a number a completion token; got str"),
        ({**ROW, "old_logprobs": -1.0}, "old_logprobs is a list with a number a completion token; got float"),
        ({**ROW, "old_logprobs": [-1.0, None]}, "old_logprobs[1] is no number but None"),
        ({**ROW, "old_logprobs": [-1.0, [2]]}, "old_logprobs[1] is no number but [2]"),
        ({**ROW, "old_logprobs": [-1.0, float("nan")]}, "old_logprobs[1] is nan; wanted a finite number, at most 0"),
        ({**ROW, "old_logprobs": [-1.0, -float("inf")]}, "old_logprobs[1] is -inf; wanted a finite number, at most 0"),
        ({**ROW, "old_logprobs": [0.7, -1.0]}, "old_logprobs[0] is 0.7; wanted a finite number, at most 0"),
        ({**ROW, "old_logprobs": [-1.0, 10**400]}, "old_logprobs holds a whole number too large"),
        ({**ROW, "advantages": [1.0, float("inf")]}, "advantages[1] is inf; wanted a finite number."),
        ({**ROW, "advantages": "high"}, "advantages is a finite number; got 'high'"),
        ({**ROW, "response_mask": [1, 2]}, "response_mask holds 0 and 1; got 2"),
        ({**ROW, "step": 1.5}, "step is a whole number, at least 0; got 1.5"),
        ({**ROW, "step": 10**30}, "step is a whole number, at least 0; got 1e+30"),
        ({**ROW, "step": -1}, "step is a whole number, at least 0; got -1"),
        ({**ROW, "group": [1]}, "group is a text or a number; got list"),
        ({**ROW, "reward": "good"}, "reward is a finite number; got 'good'"),
        ({**ROW, "old_log_probs": [-1.0, -1.0]}, "old_logprobs is there twice, under another name too (old_l"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, expected):
    path = tmp_path / "dump.jsonl"
    path.write_text(f"\n{json.dumps(row)}\n")
    with pytest.raises(ValueError, match="dump.jsonl, line 2: ") as caught:
        read_dump([path])
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_a_row_with_other_columns_is_named(tmp_path):
    rows = [ROW, ROW, {"rollout_logprobs": [-1.0], "advantages": 0.0}]
    with pytest.raises(ValueError, match="dump.jsonl, line 3: every row has the same columns; old_logprobs is in some"):
        read_dump([write(tmp_path / "dump.jsonl", rows)])


def test_what_is_masked_may_hold_anything(tmp_path):
    row = {**ROW, "old_logprobs": [-1.0, float("nan")], "response_mask": [1, 0]}
    assert read_dump([write(tmp_path / "a.jsonl", [row])]).columns["old_logprobs"].tolist() == [-1.0]


def test_files_that_are_no_dumps_are_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "a.csv").write_text("a,b")
    (tmp_path / "half.jsonl").write_text('{"old_logprobs": [-1.0')
    for name, expected in (
        ("empty", "holds no file ending in .jsonl or .parquet"),
        ("empty.jsonl", "no row"),
        ("a.csv", "is no dump"),
        ("half.jsonl", "half.jsonl, line 1 is no JSON"),
    ):
        with pytest.raises(ValueError, match=expected):
            read_dump([tmp_path / name])
    with pytest.raises(OSError, match="No such file"):
        read_dump([tmp_path / "none.jsonl"])
