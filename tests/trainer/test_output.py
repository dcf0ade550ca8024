"""Files of a run: lines that a full disk refuses wait, and the file always ends with a whole line."""

import json
import os
import resource
import signal

import pytest
from training_runs import in_a_child, read_lines, tiny_config

from octavo.trainer.checkpoint import list_checkpoints
from octavo.trainer.output import JsonLines, RunFolder


def test_lines_that_the_disk_refuses_wait_and_come_later(tmp_path):
    path = tmp_path / "metrics.jsonl"

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        file = JsonLines(path)
        file.extend([{"step": 0, "text": "\u00e9"}])
        size = path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 7, resource.RLIM_INFINITY))
        refused = 0
        for step in (1, 2):
            try:
                file.extend([{"step": step}])
            except OSError as error:
                refused += error.filename == str(path)
        assert refused == 2 and path.stat().st_size == size, "half a line was left"
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        file.extend([{"step": 3}])
        assert file.flush() == path.stat().st_size

    assert in_a_child(limited) == 0
    assert [line["step"] for line in read_lines(path)] == [0, 1, 2, 3]


def test_text_that_is_no_unicode_is_written_as_a_question_mark(tmp_path):
    file = JsonLines(tmp_path / "samples.jsonl")
    file.extend([{"completion": "half a character \ud800"}])
    assert json.loads((tmp_path / "samples.jsonl").read_text())["completion"] == "half a character ?"


def test_cut_drops_what_lies_beyond_and_says_when_lines_are_gone(tmp_path):
    file = JsonLines(tmp_path / "metrics.jsonl")
    file.extend([{"step": 0}])
    size = file.flush()
    file.extend([{"step": 1}])
    assert file.cut(size) and [line["step"] for line in read_lines(file.path)] == [0]
    assert not file.cut(size + 1) and [line["step"] for line in read_lines(file.path)] == [0]
    file.path.unlink()
    assert not file.cut(size)


def test_replace_is_whole_or_not_at_all(tmp_path):
    path = tmp_path / "rows.jsonl"

    def limited():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        file = JsonLines(path)
        file.replace([{"row": 1}])
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, 20))
        try:
            file.replace([{"row": index} for index in range(5)])
        except OSError:
            return
        raise AssertionError("the disk did not refuse")

    assert in_a_child(limited) == 0
    assert read_lines(path) == [{"row": 1}] and [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("edit", ["a longer line before", "no newline at the end"])
def test_cut_leaves_whole_lines_only(edit, tmp_path):
    file = JsonLines(tmp_path / "metrics.jsonl")
    file.extend([{"step": 0}, {"step": 1}])
    size = file.flush()
    data = file.path.read_bytes()
    file.path.write_bytes(b'{"note": 10}\n' + data if edit == "a longer line before" else data[:-1])
    assert not file.cut(size)
    file.extend([{"step": 2}])
    wanted = [{"note": 10}, {"step": 2}] if edit == "a longer line before" else [{"step": 0}, {"step": 2}]
    assert read_lines(file.path) == wanted


def test_a_lock_that_was_refused_is_not_held(tmp_path):
    with RunFolder(tmp_path) as first, RunFolder(tmp_path) as second:
        first.lock()
        for _ in range(2):
            with pytest.raises(ValueError, match="in use by another octavo process"):
                second.lock()


def test_overwrite_leaves_no_checkpoint_behind_a_link_and_nothing_there_is_lost(tmp_path):
    config = tiny_config(tmp_path / "run", overwrite=True)
    (tmp_path / "disk/step_000009").mkdir(parents=True)  # were it listed, the new run's would be pruned as older
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text("{}\n")
    (tmp_path / "run/checkpoints").symlink_to(tmp_path / "disk")
    with RunFolder(config.output_dir) as folder:
        folder.create(config, 1, 1)
    assert list_checkpoints(tmp_path / "run") == [] and (tmp_path / "disk/step_000009").is_dir()


def test_what_cannot_be_cleared_is_an_error(tmp_path, monkeypatch):
    config = tiny_config(tmp_path / "run", overwrite=True)
    (tmp_path / "run/checkpoints/step_000009").mkdir(parents=True)

    def refuse(path, *arguments, **keywords):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "rmdir", refuse)
    with RunFolder(config.output_dir) as folder, pytest.raises(ValueError, match="cannot be written: Permission"):
        folder.create(config, 1, 1)


@pytest.mark.parametrize("name", ["config.yaml", "samples.jsonl", "model", "checkpoints.txt"])
def test_what_no_run_left_is_not_touched(name, tmp_path):
    config = tiny_config(tmp_path / "run", overwrite=True)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("mine")
    with RunFolder(config.output_dir) as folder:
        if name == "checkpoints.txt":
            folder.create(config, 1, 1)
        else:
            with pytest.raises(ValueError, match=f"{name} is there already and was not left by a run"):
                folder.create(config, 1, 1)
    assert (tmp_path / "run" / name).read_text() == "mine"
