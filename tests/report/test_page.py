"""The page as a whole: self-contained, complete, written or not at all."""

import json
import shutil
import subprocess
import sys
import zipfile
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_runs import run_config, sample_rows, write_rows, write_run

from octavo.report import page
from octavo.report.figures import COLOURS
from octavo.report.page import config_differences, duration, plain, render, sample_table, summary, write_report
from octavo.report.runs import read_run, read_runs

REPO = Path(__file__).resolve().parents[2]
HOSTILE = (
    "</script><script>document.title='taken'</script><img src=x onerror=\"a()\">&amp; {{ 1 + 1 }} 🦀 日本\x00\x1b\u202e"
)


class Parsed(HTMLParser):
    """Tags with their attributes, and the text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.texts: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture
def no_figures(monkeypatch):
    """A page without them is quick."""
    monkeypatch.setattr(page, "sections", lambda runs: [])


def page_of(*folders: Path) -> str:
    return render(read_runs(folders), datetime(2026, 1, 2, 3, 4, tzinfo=UTC))


def test_the_page_needs_nothing_else(tmp_path):
    html = page_of(write_run(tmp_path / "a"), write_run(tmp_path / "b", exact=False, seed=1))
    parsed = Parsed(html)
    assert {"svg", "figure", "table", "details"} <= {tag for tag, _ in parsed.tags}
    assert not {"script", "img", "iframe", "object", "image"} & {tag for tag, _ in parsed.tags}
    links = [value for _, attrs in parsed.tags for key, value in attrs.items() if key in ("src", "href", "xlink:href")]
    assert len(links) > 20 and all(link.startswith("#") or link == "data:," for link in links)
    assert not any(key.startswith("on") for _, attrs in parsed.tags for key in attrs)
    assert "@import" not in html and "url(http" not in html
    ids = [attrs["id"] for _, attrs in parsed.tags if "id" in attrs]
    assert len(ids) == len(set(ids)) and {link[1:] for link in links if link.startswith("#")} <= set(ids)


def test_what_the_model_wrote_is_text_on_the_page(tmp_path, no_figures):
    folder = write_run(tmp_path / "a")
    write_rows(folder / "samples.jsonl", sample_rows(0, HOSTILE))
    write_rows(folder / "resumes.jsonl", [{"step": 1, "message": HOSTILE, "changes": [HOSTILE]}])
    (folder / "config.yaml").write_text(f"# {HOSTILE[:60]}\nmodel: {{path: '<b>\"&'}}\n")
    parsed = Parsed(page_of(folder))
    shown = HOSTILE.replace("\x00", "␀").replace("\x1b", "␛").replace("\u202e", "<U+202E>")
    assert f"{shown} (1)" in parsed.texts and parsed.texts.count(shown) == 2
    assert '<b>"&' in parsed.texts and "b" not in {tag for tag, _ in parsed.tags}
    assert not {"script", "img"} & {tag for tag, _ in parsed.tags}


def test_lone_surrogates_do_not_stop_the_page(tmp_path, no_figures):
    folder = write_run(tmp_path / "a")
    write_rows(folder / "samples.jsonl", [{"step": 0, "completion": "x\ud83d"}])
    assert "x\ufffd" in write_report([folder], None).read_text(encoding="utf-8")


def test_a_run_that_is_broken_in_every_way_still_has_its_page(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "metrics.jsonl").write_bytes(
        b'{"step": 0, "reward/mean": NaN}\nno\n{"step": 1, "reward/mean": 0.5}\n{"st'
    )
    (folder / "config.yaml").write_text("a: [")
    (folder / "samples.jsonl").write_text('{"step": 1, "reward": "x", "prompt": 3}\n{"st')
    text = " ".join(Parsed(page_of(folder)).texts)
    for said in (
        "a: config.yaml is damaged",
        "a: metrics.jsonl: 1 line left out, no JSON object.",
        "a: metrics.jsonl: the last line is half written and left out.",
        "a: samples.jsonl: the last line is half written and left out.",
        "a: NaN or infinite, left out of the figures: reward/mean (1 step).",
        "Left out, as the run has no eval/accuracy: ",
        "running or stopped, last step written ",
    ):
        assert said in text, said


def test_values_of_any_kind_make_a_page(tmp_path):
    odd = [
        None,
        "x",
        [],
        {},
        True,
        float("nan"),
        float("inf"),
        -5.5,
        0,
        1e99,
        10**400,
        [None],
        [-1] * 8,
        [1e308] * 8,
        [-1, *[9] * 7],
    ]
    folder = write_run(tmp_path / "a")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for place, line in enumerate(lines):
        line |= {key: odd[(place * 5 + i) % len(odd)] for i, key in enumerate(line) if key != "step"}
    write_rows(folder / "metrics.jsonl", lines)
    write_rows(folder / "samples.jsonl", [{"step": 0, "reward": value, "prompt": value} for value in odd])
    assert page_of(folder).count("<svg role") > 10


def test_the_summary_counts_and_finds_the_best(tmp_path):
    vllm = run_config(
        tmp_path, precision={"allow_mismatch": True}, rollout={"engine": "vllm"}, trainer={"num_steps": 12}
    )
    runs = read_runs([write_run(tmp_path / "a", num_steps=20), write_run(tmp_path / "b", config=vllm, exact=False)])
    rows = {label: cells for label, *cells in summary(runs).rows}
    assert rows["steps"] == ["20 of 20", "12 of 12"] and rows["status"] == ["finished", "finished"]
    assert rows["engine"] == ["octavo", "vllm"]
    assert rows["recipe"][0] == "block128" and rows["model"][0] == "some/model"
    rewards = runs[0].series("reward/mean").values
    assert rows["reward, last"][0] == plain(rewards[-1])
    assert rows["reward, best"][0] == f"{plain(max(rewards))} (step {rewards.index(max(rewards))})"
    assert rows["accuracy, last"][0] == f"{0.3 + 0.6 * (1 - 2.718281828 ** (-19 / 30)):.3f} ± 0.030"
    assert rows["accuracy, best"][0].endswith("(after 20 steps)")
    assert rows["largest mismatch"][0] == "exactly 0" and rows["largest mismatch"][1].endswith(" nats")
    assert rows["tokens sampled"][0] == f"{sum(runs[0].series('rollout/num_tokens').values):,.0f}"
    assert rows["time, all steps"][0] == "4 min 20 s" and rows["resumes"][0] == "1"


def test_settings_that_differ_stand_side_by_side(tmp_path):
    changes = ({"optimizer": {"lr": 1e-6}}, {"optimizer": {"lr": 1.00001e-6}, "calibration": None})
    folders = [
        write_run(tmp_path / name, config=run_config(tmp_path, **change))
        for name, change in zip("ab", changes, strict=True)
    ]
    table = config_differences(read_runs(folders))
    rows = {key: cells for key, *cells in table.rows}
    assert table.head == ["key", "a", "b"]
    assert rows["optimizer.lr"] == ["1e-06", "1.00001e-06"]
    assert rows["calibration"] == ["–", "null"] and rows["calibration.interval"] == ["20", "–"]
    assert not {"seed", "output_dir", "algorithm.clip.clip_low"} & set(rows)
    assert config_differences(read_runs(folders[:1])).rows == []


def test_samples_are_of_the_last_steps_the_best_and_the_worst(tmp_path):
    folder = write_run(tmp_path / "a", num_steps=6)
    table = sample_table(read_run(folder, "a"))
    assert table.total == 48
    assert [(row["step"], row["reward"]) for row in table.rows] == [
        (str(step), reward) for step in (5, 4, 3) for reward in ("1", "1", "1", "0", "0", "0")
    ]
    write_rows(folder / "samples.jsonl", sample_rows(0)[:4])
    assert len(sample_table(read_run(folder, "a")).rows) == 4  # none twice
    write_rows(folder / "samples.jsonl", [{"step": 0, "completion": "y" * 20_005}])
    assert sample_table(read_run(folder, "a")).rows[0]["completion"] == "y" * 20_000 + " … (5 characters more)"


def test_the_page_lies_in_the_run_or_here(tmp_path, monkeypatch, no_figures):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b")
    monkeypatch.chdir(tmp_path)
    assert write_report([a], None) == a / "report.html" and (a / "report.html").is_file()
    assert write_report([a, b], None) == Path("report.html") and (tmp_path / "report.html").is_file()
    assert write_report([b], tmp_path / "x.html") == tmp_path / "x.html" and not (b / "report.html").exists()


def test_a_page_that_cannot_be_made_leaves_the_earlier_one(tmp_path, monkeypatch, no_figures):
    folder = write_run(tmp_path / "a")
    (folder / "report.html").write_text("earlier")

    def no_room(path, *arguments, **settings):
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", no_room)
    with pytest.raises(ValueError, match="report.html cannot be written: No space left on device"):
        write_report([folder], None)
    assert (folder / "report.html").read_bytes() == b"earlier"
    assert not list(folder.glob("*.partial"))


def test_more_runs_than_colours_are_refused(tmp_path):
    with pytest.raises(ValueError, match=f"a report has {len(COLOURS)} colours, one a run; got 11 runs"):
        write_report([tmp_path] * 11, None)


def test_numbers_and_times_read_well():
    assert [plain(value) for value in (None, True, 3, 0.123456, 1e-6, [1, 2.0], "x")] == [
        *("–", "true", "3", "0.1235", "1e-06", "1, 2", "x")
    ]
    assert [duration(s) for s in (2.94, 59.7, 250.2, 3599.8, 11_100)] == [
        *("2.9 s", "59.7 s", "4 min 10 s", "1 h 0 min", "3 h 5 min")
    ]


def test_drawing_libraries_are_loaded_only_when_a_page_is_written():
    code = "import octavo.cli, octavo.report.page, octavo.trainer.trackers, sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert "jinja2" in result.stdout.split()
    assert not {"matplotlib", "tensorboard", "torch.utils.tensorboard", "wandb"} & set(result.stdout.split())


def test_an_installed_package_has_the_template(tmp_path):
    pytest.importorskip("setuptools", "77", reason="needs the build back end, setuptools >= 77")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, tmp_path)
    shutil.copytree(REPO / "octavo", tmp_path / "octavo", ignore=shutil.ignore_patterns("__pycache__"))
    code = "from setuptools.build_meta import build_wheel; print(build_wheel('.'))"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist() if name.endswith(".html")}
    templates = {path.relative_to(REPO).as_posix(): path.read_bytes() for path in REPO.glob("octavo/**/*.html")}
    assert packed == templates and "octavo/report/template.html" in packed
