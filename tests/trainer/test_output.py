"""Files of a run: lines that a full disk refuses wait, and the file always ends with a whole line."""

import json
import resource
import signal

from training_runs import in_a_child, read_lines

from octavo.trainer.output import JsonLines


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
            except OSError:
                refused += 1
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
