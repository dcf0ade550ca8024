"""The file of completions: never overwritten, never half a line, never of two settings."""

import json
import os
import signal

import pytest
from training_runs import in_a_child

from octavo.generate.completion_file import CompletionFile
from octavo.generate.prompt_files import text_prompts

PROMPTS = text_prompts(["one", "zwei ü"])
SETTINGS = {"seed": 0, "sampling": {"top_p": 1.0}}


def row(index, sample, **more):
    return {**PROMPTS[index].fields, "prompt_index": index, "sample": sample, "completion": "x", **more}


def opened(path, resume=False, settings=SETTINGS, prompts=PROMPTS, group_size=2):
    file = CompletionFile(path, resume)
    try:
        file.open(settings, prompts, group_size)
    except ValueError:
        file.close()
        raise
    return file


@pytest.fixture
def path(tmp_path):
    """A file of three completions, (1, 1) to come."""
    file = opened(tmp_path / "out.jsonl")
    for place in ((1, 0), (0, 1), (0, 0)):
        file.add(row(*place))
    file.close()
    return tmp_path / "out.jsonl"


def test_what_is_there_is_not_overwritten(path):
    with pytest.raises(ValueError, match=r"out.jsonl is there already. Go on with it by --resume, or give another"):
        CompletionFile(path, resume=False)
    assert len(path.read_text().splitlines()) == 3


def test_what_is_there_is_gone_on_with_and_brought_into_order(path):
    file = opened(path, resume=True)
    assert file.done == {(0, 0), (0, 1), (1, 0)}
    file.add(row(1, 1))
    file.sort()
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    assert rows == [row(0, 0), row(0, 1), row(1, 0), row(1, 1)]
    assert "zwei ü" in path.read_text("utf-8"), "text stays as it is"
    assert sorted(each.name for each in path.parent.iterdir()) == ["out.jsonl", "out.jsonl.settings.json"]
    file.close()


def test_half_a_line_is_cut_off(path):
    with path.open("a") as file:
        file.write('{"prompt": "zwei')
    file = opened(path, resume=True)
    file.add(row(1, 1))
    assert len(path.read_text().splitlines()) == 4 and file.done == {(0, 0), (0, 1), (1, 0), (1, 1)}
    file.close()


def test_more_prompts_and_completions_may_be_wanted(path):
    file = opened(path, resume=True, prompts=text_prompts(["one", "zwei ü", "three"]), group_size=5)
    assert len(file.done) == 3
    file.close()


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("touched", [False, True])
def test_a_file_without_rows_is_a_new_one(resume, touched, tmp_path):
    if touched:
        (tmp_path / "out.jsonl").touch()
    file = opened(tmp_path / "out.jsonl", resume=resume)
    assert file.done == set() and json.loads(file.settings.read_text()) == SETTINGS
    file.close()


@pytest.mark.parametrize(
    "changes, fault",
    [
        ({"settings": {**SETTINGS, "seed": 1}}, "of other settings (seed: 0 -> 1). Give those, or another file"),
        ({"settings": {"seed": 0, "sampling": {"top_p": 0.5}}}, "(sampling.top_p: 1.0 -> 0.5)"),
        ({"settings": {"seed": 0}}, "sampling: "),
        ({"prompts": text_prompts(["one", "two"])}, "line 1 is of another prompt than number 1 now"),
        ({"prompts": PROMPTS[:1]}, "line 1 is of another prompt than number 1 now"),
        ({"group_size": 1}, "line 2 is completion 1 of its prompt, beyond --group-size 1"),
    ],
)
def test_other_settings_or_prompts_are_refused(changes, fault, path):
    before = path.read_bytes()
    with pytest.raises(ValueError) as caught:
        opened(path, resume=True, **changes)
    assert fault in str(caught.value) and str(path) in str(caught.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "line, fault",
    [
        ("{", "is no row of octavo generate"),
        ("", "is no row of octavo generate"),
        ("[0]", "is no row of octavo generate"),
        ('{"prompt_index": "0", "sample": 0, "completion": ""}', "is no row of octavo generate"),
        ('{"prompt_index": true, "sample": 0, "completion": ""}', "is no row of octavo generate"),
        ('{"prompt_index": 0, "sample": -1, "completion": ""}', "is no row of octavo generate"),
        ('{"prompt_index": 1, "sample": 1}', "is no row of octavo generate"),
        (json.dumps(row(0, 1)), "is completion 1 of prompt 0, which is there already"),
    ],
)
def test_a_line_of_somebody_else_is_named(line, fault, path):
    with path.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(ValueError) as caught:
        opened(path, resume=True)
    assert f"{path}, line 4 {fault}. Remove the line" in str(caught.value)


def test_without_its_settings_a_file_is_not_gone_on_with(path):
    settings = path.with_name("out.jsonl.settings.json")
    settings.write_text("{")
    with pytest.raises(ValueError, match="settings.json is damaged"):
        opened(path, resume=True)
    settings.unlink()
    with pytest.raises(ValueError, match="settings.json is not there, which says what .*out.jsonl holds"):
        CompletionFile(path, resume=True)


def test_a_second_process_comes_too_late_before_the_first_row(tmp_path):
    file = opened(tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="out.jsonl is being written by another octavo process"):
        opened(tmp_path / "out.jsonl", settings={**SETTINGS, "seed": 9})
    assert json.loads(file.settings.read_text()) == SETTINGS
    file.close()


def test_two_processes_do_not_write_the_same_file(path):
    file = opened(path, resume=True)
    with pytest.raises(ValueError, match="out.jsonl is being written by another octavo process"):
        opened(path, resume=True)
    file.close()
    opened(path, resume=True).close()


def test_a_killed_process_holds_nothing(path):
    def work():
        opened(path, resume=True).add(row(1, 1))
        os.kill(os.getpid(), signal.SIGKILL)

    assert in_a_child(work) == -signal.SIGKILL
    file = opened(path, resume=True)
    assert (1, 1) in file.done
    file.close()


def test_a_full_disk_says_how_to_go_on(path, monkeypatch):
    file = opened(path, resume=True)
    before = path.read_bytes()
    monkeypatch.setattr(file._lines, "path", type(path)("/dev/full"))
    monkeypatch.setattr(os, "ftruncate", lambda *_: None)
    with pytest.raises(ValueError, match="cannot be written: .* the same command with --resume goes on"):
        file.add(row(1, 1))
    assert (1, 1) not in file.done and path.read_bytes() == before
    file.close()


@pytest.mark.parametrize("where", ["no/folder/out.jsonl", ".", "/dev/null"])
def test_what_cannot_be_written_is_refused_first(where, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="--output"):
        CompletionFile(type(tmp_path)(where), resume=False)
