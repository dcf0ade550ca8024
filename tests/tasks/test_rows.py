import builtins
import gzip
import importlib.util
import json
import sys
from types import ModuleType

import pytest

from octavo.tasks.rows import BadRow, find_source, take

needs_datasets = pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="datasets is not installed")
ROWS = [{"problem": "2+2\u2028?", "answer": "4"}, {"problem": "Größe?", "answer": "3"}]


def rows_of(path, *splits):
    return [
        (place, str(row) if isinstance(row, BadRow) else row) for place, row in find_source(str(path), splits).rows()
    ]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".json", ".csv"])
def test_the_same_rows_from_every_format(suffix, tmp_path):
    if suffix == ".csv":
        text = 'problem,answer\r\n"2+2\u2028?",4\r\nGröße?,3\r\n'
    else:
        text = (
            json.dumps(ROWS) if suffix == ".json" else "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
        )
    data = text.encode("utf-8-sig")
    file = tmp_path / f"train{suffix}"
    file.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    places = {".json": ["row 0", "row 1"], ".csv": ["line 2", "line 3"]}.get(suffix, ["line 1", "line 3"])
    assert rows_of(file, "train") == list(zip(places, ROWS, strict=True))
    assert rows_of(tmp_path, "test", "train") == rows_of(file, "train")


@needs_datasets
def test_parquet(tmp_path):
    import pyarrow
    from pyarrow.parquet import write_table

    nested = [{"prompt": [{"role": "user", "content": "2+2?"}], "reward_model": {"ground_truth": "4"}}] * 3
    write_table(pyarrow.Table.from_pylist(nested), tmp_path / "train.parquet")
    assert rows_of(tmp_path, "train") == [(f"row {index}", row) for index, row in enumerate(nested)]
    (tmp_path / "train.parquet").write_bytes(b"no parquet")
    with pytest.raises(ValueError, match="train.parquet cannot be read as Parquet"):
        rows_of(tmp_path, "train")


def test_the_hub(tmp_path, monkeypatch):
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        if name == "owner/gone":
            raise ConnectionError("no\nnetwork")
        return iter([{"a": 1}])

    module = ModuleType("datasets")
    module.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", module)
    monkeypatch.setenv("OCTAVO_DATA", str(tmp_path))
    source = find_source("owner/name", ("test", "validation"), "main")
    assert list(source.rows()) == [("row 0", {"a": 1})] and source.name == "the hub's owner/name, validation"
    with pytest.raises(ValueError, match=r"'owner/gone' is no file or folder here, and the hub .*\(no network\)"):
        list(find_source("owner/gone", ("test",)).rows())
    assert asked == [("owner/name", "main", "validation"), ("owner/gone", None, "test")]


def test_parquet_and_the_hub_ask_for_the_package(tmp_path, monkeypatch):
    real_import = builtins.__import__

    def without_datasets(name, *args, **kwargs):
        if name == "datasets":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setenv("OCTAVO_DATA", str(tmp_path))
    monkeypatch.setattr(builtins, "__import__", without_datasets)
    (tmp_path / "train.parquet").write_bytes(b"")
    for path in (tmp_path, "owner/name"):
        with pytest.raises(ValueError, match="pip install datasets"):
            rows_of(path, "train")


def test_damaged_lines_are_rows_of_their_own(tmp_path):
    lines = [b'{"a": 1}', b"{oops", b"[1]", b"\xff\xfe", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"]
    lines += [b'{"a": 1, "b": {"c": 1, "c": 2}}', b'{"a": 2}']
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(lines))
    rows = rows_of(tmp_path / "x.jsonl")
    assert rows[0] == ("line 1", {"a": 1}) and rows[-1] == ("line 8", {"a": 2})
    for (place, fault), (number, said) in zip(
        rows[1:-1],
        [
            (2, "not JSON"),
            (3, "wants a JSON object, got list"),
            (4, "utf-8"),
            (5, "nested too deeply"),
            (6, "digits"),
            (7, "the key 'c' is there twice"),
        ],
        strict=True,
    ):
        assert place == f"line {number}" and said in fault


def test_csv_with_other_numbers_of_cells(tmp_path):
    (tmp_path / "x.csv").write_text('problem,answer\n1+1,2,3\n1+2\n"a\nb",3\n')
    assert rows_of(tmp_path / "x.csv") == [
        ("line 2", "wants 2 cells, as the first line has"),
        ("line 3", "wants 2 cells, as the first line has"),
        ("line 5", {"problem": "a\nb", "answer": "3"}),
    ]
    (tmp_path / "x.csv").write_text('problem,answer\n"1+1,2\n')
    with pytest.raises(ValueError, match=r"x.csv, line .*: not CSV"):
        rows_of(tmp_path / "x.csv")


@pytest.mark.parametrize(
    "name, data, message",
    [
        ("x.jsonl.gz", gzip.compress(b'{"a": 1}\n' * 1000, mtime=0)[:30], "x.jsonl.gz cannot be read.*Fetch it again"),
        ("x.jsonl.gz", b"no gzip", "x.jsonl.gz cannot be read"),
        ("x.json", b'{"a": 1}', "x.json wants a list of objects, got dict"),
        ("x.json", b'{"a": 1}\n{"a": 2}', "x.json is not JSON .*name it .jsonl"),
        ("x.json", b'[{"a": 1, "a": 2}]', "x.json is not JSON .the key 'a' is there twice"),
        ("x.csv", b"a,b,a\n1,2,3\n", "x.csv has two columns 'a'. Rename one"),
        ("x.txt", b"", "x.txt has an ending that is not read; known: .jsonl, "),
    ],
)
def test_a_file_that_cannot_be_read_is_named(name, data, message, tmp_path):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ValueError, match=message):
        rows_of(tmp_path / name)


def test_where_a_split_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("OCTAVO_DATA", str(tmp_path))
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k/validation.jsonl").touch()
    assert find_source("openai/gsm8k", ("test", "validation")).file == tmp_path / "gsm8k/validation.jsonl"
    with pytest.raises(ValueError, match=r"wants test\.jsonl in that folder .*it holds validation\.jsonl"):
        find_source("openai/gsm8k", ("test",))
    hub = find_source("owner/other", ("test", "validation"), "main")
    assert (hub.file, hub.hub, hub.hub_config, hub.split) == (None, "owner/other", "main", "validation")
    with pytest.raises(ValueError, match="no such file or folder"):
        find_source("./nowhere", ("test",))


def test_take_follows_a_dotted_path():
    row = {"a": {"b": [{"c": 1}, {"c": 2}]}, "d": "text"}
    assert take(row, "a.b.-1.c") == 2 and take(row, "d") == "text"
    for path in ("e", "a.c", "a.b.5.c", "a.b.x", "d.e", "d.0"):
        with pytest.raises(BadRow, match=f"wants '{path}'; its keys are 'a', 'd'"):
            take(row, path)
