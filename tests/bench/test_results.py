"""Result files: written whole, read back, compared."""

import json
import re

import pytest
from typer.testing import CliRunner

from octavo.bench import results
from octavo.bench.results import Results, Row, compare, read_results, write_results
from octavo.cli import app


def row(case, value, **more):
    return Row(case=case, metric="tflop_s", value=value, unit="TFLOP/s", **more)


def test_a_goal_is_met_or_missed_in_the_right_direction():
    assert row("a", 3.0).met and row("a", 3.0, goal=3.0).met and not row("a", 2.9, goal=3.0).met
    assert row("a", 2.9, goal=3.0, better="lower").met and not row("a", 3.1, goal=3.0, better="lower").met
    assert "missed" in row("a", 2.9, goal=3.0).line() and "goal" not in row("a", 2.9).line()


def test_what_is_written_is_read_back(tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    rows = [row("x/y/z", 1.5, goal=2.0, note="again 1.4"), row("b", 2.0, better="lower")]
    path = write_results("some", "python some.py", rows)
    assert path == tmp_path / "some.json" and list(read_results(path).values()) == rows
    content = json.loads(path.read_text())
    assert content["command"] == "python some.py" and set(content) == {
        *("device", "torch", "triton", "commit", "command", "date", "rows")
    }


def test_two_files_side_by_side(tmp_path, monkeypatch):
    for name, rows in (("a", [row("x", 100.0), row("gone", 1.0)]), ("b", [row("x", 90.0), row("new", 2.0)])):
        monkeypatch.setenv("OUT", str(tmp_path / name))
        write_results("r", "c", rows)
    paths = tmp_path / "a/r.json", tmp_path / "b/r.json"
    assert compare(*paths) == [
        ("x tflop_s", "100 TFLOP/s", "90 TFLOP/s", "0.900 worse"),
        ("gone tflop_s", "1 TFLOP/s", "-", ""),
        ("new tflop_s", "-", "2 TFLOP/s", ""),
    ]
    shown = CliRunner().invoke(app, ["bench", "compare", *map(str, paths)])
    assert shown.exit_code == 0 and "0.900 worse" in shown.output


def with_values(*values):
    return json.dumps({"rows": [{"case": "a", "metric": "m", "unit": "us", "value": value} for value in values]})


ODD = [with_values(value) for value in (None, "1", [1])] + [with_values(1.0, 2.0)]


@pytest.mark.parametrize("content", ["", "[]", '{"rows": [{"case": "a"}]}', '{"rows": 3}', *ODD])
def test_what_is_no_result_file_is_refused(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match="a.json is no result file of a benchmark"):
        read_results(tmp_path / "a.json")


def test_worse_is_slower_or_longer(tmp_path, monkeypatch):
    for name, change in (("a", 1.0), ("b", 1.1)):
        monkeypatch.setenv("OUT", str(tmp_path / name))
        write_results("r", "c", [row("speed", 10.0 * change), row("time", 10.0 * change, better="lower")])
    paths = [tmp_path / name / "r.json" for name in "ab"]
    assert [ratio for *_, ratio in compare(*paths)] == ["1.100", "1.100 worse"]
    assert [ratio for *_, ratio in compare(*reversed(paths))] == ["0.909 worse", "0.909"]


def test_figures_in_different_units_have_no_ratio(tmp_path):
    for name, unit in (("a", "us"), ("b", "ms")):
        (tmp_path / name).write_text(with_values(1.0).replace("us", unit))
    assert compare(tmp_path / "a", tmp_path / "b") == [("a m", "1 us", "1 ms", "")]


def test_the_commit_is_the_one_that_is_named_or_gits_or_unknown(monkeypatch):
    assert re.fullmatch("[0-9a-f]{40}", results._commit.__wrapped__())
    monkeypatch.setenv("PATH", "")
    assert results._commit.__wrapped__() == "unknown"
    monkeypatch.setenv("OCTAVO_COMMIT", "1234")
    assert results._commit.__wrapped__() == "1234"


def test_each_figure_is_on_disk_before_the_next_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OUT", str(tmp_path))
    results = Results("some", "python some.py")
    for number in (1.0, 2.0):
        results.add(row(f"case {number}", number))
        assert [r.value for r in read_results(tmp_path / "some.json").values()][-1] == number
    assert "case 2.0" in capsys.readouterr().out and not list(tmp_path.glob("*.partial"))


def test_a_benchmark_in_parts_keeps_what_earlier_parts_found(tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    Results("some", "python some.py a", resume=True).add(row("a", 1.0))
    later = Results("some", "python some.py a b", resume=True)
    later.add(row("b", 2.0))
    later.add(row("a", 3.0))
    assert [(r.case, r.value) for r in read_results(tmp_path / "some.json").values()] == [("b", 2.0), ("a", 3.0)]
    Results("some", "python some.py").add(row("c", 4.0))
    assert [r.case for r in read_results(tmp_path / "some.json").values()] == ["c"]
