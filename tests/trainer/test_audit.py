import json

import pytest

from octavo.trainer.audit import Audit


def rows(step, outcome, count):
    return [{"outcome": outcome, "completion": f"{step}/{number}"} for number in range(count)]


def kept(audit):
    return [(row["step"], row["outcome"], row["completion"]) for row in map(json.loads, audit.path.open())]


def test_the_newest_of_each_outcome_stay(tmp_path):
    audit = Audit(tmp_path / "audit.jsonl")
    audit.add(0, rows(0, "wrong", 3) + rows(0, "crashed", 1), per_outcome=2)
    audit.add(1, rows(1, "wrong", 1), per_outcome=2)
    assert kept(audit) == [(0, "wrong", "0/2"), (0, "crashed", "0/0"), (1, "wrong", "1/0")]


def test_a_step_that_is_done_again_replaces_what_it_left_before(tmp_path):
    audit = Audit(tmp_path / "audit.jsonl")
    for step in (0, 1, 2, 1):
        audit.add(step, rows(step, "wrong", 1), per_outcome=9)
    assert kept(audit) == [(0, "wrong", "0/0"), (1, "wrong", "1/0")]


def test_a_damaged_file_is_begun_anew(tmp_path):
    audit = Audit(tmp_path / "audit.jsonl")
    audit.path.write_text('{"step": 0, "outco')
    audit.add(1, rows(1, "correct", 1), per_outcome=1)
    assert kept(audit) == [(1, "correct", "1/0")]


def test_none_wanted_leaves_no_file_and_a_refused_one_says_so(tmp_path):
    Audit(tmp_path / "audit.jsonl").add(0, rows(0, "wrong", 1), per_outcome=0)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="cannot be written"):
        Audit(tmp_path / "none/audit.jsonl").add(0, rows(0, "wrong", 1), per_outcome=1)
