"""What a diagnosis shows: figures, findings, what is missing; a page that needs nothing else, whatever a file held."""

import json
import re

import pytest
from test_recorded import CLIP, full_rows

from octavo import cli
from octavo.diagnose.diagnosis import Diagnosis, Finding
from octavo.diagnose.diagnosis_page import SHOWN_COLUMNS, figures_table, modules_summary, render, show, written
from octavo.diagnose.recorded import diagnose_dump
from octavo.rl.observatory_modules import ModuleDifference

HOSTILE = "</td><script>document.title='taken'</script>{{ 1 + 1 }} [bold]🦀\x1b\u202e"


def difference(name: str, relative: float) -> ModuleDifference:
    share = 0.5 if relative else 0.0
    return ModuleDifference(module=name, max_abs=relative, relative=relative, differing_share=share)


@pytest.fixture
def hostile() -> Diagnosis:
    return Diagnosis(
        title=HOSTILE,
        facts={"source": HOSTILE},
        columns={HOSTILE: {"num_tokens": 1200, "mismatch/outside_share": 0.123, "observed/factor": None}},
        findings=[Finding(says=HOSTILE, do="Use `w8a16`.")],
        missing=[f"entropy: no {HOSTILE}"],
        modules={"a / b": [difference("first", 0.0), difference("second", 0.25), difference("third", 0.125)]},
    )


def test_the_page_holds_everything_and_needs_nothing(hostile):
    html = render(hostile)
    assert "<script" not in html and "{{" in html and "\x1b" not in html and "\u202e" not in html
    assert not re.search(r'(?:src|href)="(?!#|data:,)', html)
    for text in (
        "12.30%",
        "1,200",
        "Use `w8a16`.",
        "Not diagnosed: entropy",
        "<td>0.25</td>",
        "second is the first of 3",
    ):
        assert text in html, text


def test_the_console_shows_what_the_page_does(hostile, capsys):
    show(hostile)
    printed = capsys.readouterr().out
    for text in ("12.30%", "1,200", "-> Use `w8a16`.", "[bold]", "not diagnosed: entropy", "second is the first of 3"):
        assert text in printed, text


def test_figures_as_a_person_writes_them():
    assert [written(x, "share") for x in (0.0, 0.66642, None)] == ["0.00%", "66.64%", "–"]
    assert [written(x, "number") for x in (0.012345, float("nan"), "text", True)] == ["0.0123", "nan", "–", "–"]
    assert written(12345.0, "count") == "12,345"


def test_the_table_shows_some_columns_and_says_how_many_more():
    columns = {f"step {step}": {"num_tokens": step} for step in range(20)}
    table = figures_table(Diagnosis(title="", facts={}, columns=columns))
    assert table.head == ["(12 more in the figures file)", *list(columns)[:SHOWN_COLUMNS]]
    assert table.rows == [["loss tokens", *map(str, range(SHOWN_COLUMNS))]]


def test_equal_forwards_are_said_to_be():
    assert modules_summary([difference("a", 0.0)]) == "equal to the bit in all 1 operations."


def test_the_command_writes_page_and_figures(tmp_path, monkeypatch, capsys):
    dump = tmp_path / "dump.jsonl"
    dump.write_text("".join(json.dumps(row) + "\n" for row in full_rows()))
    monkeypatch.setattr("sys.argv", ["octavo", "diagnose", "dump", str(dump), "--output", str(tmp_path / "d.html")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0 and "done:" in capsys.readouterr().out
    figures = json.loads((tmp_path / "d.json").read_text())
    assert figures["columns"] == diagnose_dump([dump], CLIP).to_json()["columns"]
    html = (tmp_path / "d.html").read_text()
    assert html.count("<svg role") >= 5 and "Clip matrix" in html


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["dump", "nowhere.jsonl"], "octavo: nowhere.jsonl: No such file or directory"),
        (["dump", "nowhere.jsonl", "--output", "x.json"], "octavo: --output x.json is the page"),
        (["dump", "nowhere.jsonl", "--output", "no/folder.html"], "lies in a folder that does not exist"),
        (["dump", "nowhere.jsonl", "--output", "."], "octavo: --output . is a link, folder or device"),
        (["dump", "nowhere.jsonl", "--clip-low", "2"], "octavo: clip_low is an offset below 1, in [0, 1); got 2.0"),
        (["model", "nowhere", "nothing.txt"], "octavo: nothing.txt: No such file or directory"),
        (["model", "nowhere", "nothing.txt", "--recipe", "x"], "octavo: recipe 'x' does not exist"),
        (["model", "nowhere", "nothing.txt", "--device", "meta"], "octavo: device='meta' holds no numbers"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys, arguments, expected):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["octavo", "diagnose", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and expected in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
