"""Prompt files of every kind; each bad row is named by its place."""

import gzip
import io
import json
import sys
from types import SimpleNamespace

import pytest

from octavo.generate.prompt_files import OWN_KEYS, STDIN, Prompt, read_prompts, text_prompts

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ü 日本?"}]


def user(text):
    return [{"role": "user", "content": text}]


def file_of(tmp_path, name, data):
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_text_is_a_prompt_a_line_as_it_stands(tmp_path):
    path = file_of(tmp_path, "prompts.txt", "\ufefffirst ü 日本\r\n\n  second \n{third\n")
    assert [prompt.messages for prompt in read_prompts(path)] == [
        user("first ü 日本"),
        user("  second "),
        user("{third"),
    ]
    assert [prompt.place for prompt in read_prompts(path)] == ["line 1", "line 3", "line 4"]


ROWS = [{"prompt": "a", "answer": 3}, {"messages": CHAT, "id": "x"}, {"prompt": CHAT}]
LINES = "\n".join(json.dumps(row) for row in ROWS)


@pytest.mark.parametrize("name", ["p.jsonl", "p.jsonl.gz", "p.json", "-"])
def test_rows_have_a_prompt_or_messages_and_keep_what_else_they_hold(name, tmp_path, monkeypatch):
    data = json.dumps(ROWS) if name == "p.json" else LINES
    path = file_of(tmp_path, name, gzip.compress(data.encode()) if name.endswith(".gz") else data)
    if name == "-":
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"\xef\xbb\xbf\n" + data.encode())))
        path = STDIN
    prompts = read_prompts(path)
    assert [prompt.fields for prompt in prompts] == ROWS
    assert [prompt.messages for prompt in prompts] == [user("a"), CHAT, CHAT]


def test_the_standard_input_may_be_text(monkeypatch):
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(b"one\r\n\ntwo {")))
    assert [prompt.fields for prompt in read_prompts(STDIN)] == [{"prompt": "one"}, {"prompt": "two {"}]


def test_csv_has_a_column_prompt(tmp_path):
    (prompt,) = read_prompts(file_of(tmp_path, "p.csv", 'id,prompt\n7,"a, b"\n'))
    assert prompt == Prompt(place="line 2", fields={"id": "7", "prompt": "a, b"}, messages=user("a, b"))


def test_prompts_of_the_command_line():
    assert [prompt.place for prompt in text_prompts(["a", "b"])] == ["prompt 1", "prompt 2"]
    for text, fault in (("", "is an empty prompt"), ("\udcff", "holds '\\udcff', half a character")):
        with pytest.raises(ValueError) as caught:
            text_prompts(["a", text])
        assert str(caught.value).startswith(f"prompt 2: {fault}")


@pytest.mark.parametrize(
    "line, fault",
    [
        ("{", "not JSON"),
        ("[1]", "wants a JSON object, got list"),
        ('{"text": "a"}', "wants either 'prompt' or 'messages', has keys 'text'"),
        ("{}", "has keys none"),
        ('{"prompt": "a", "messages": []}', "has both"),
        ('{"prompt": 3}', "wants a text, or a list of messages with role and content; got 3"),
        ('{"prompt": ""}', "is an empty prompt, which has no token"),
        ('{"messages": []}', "got []"),
        ('{"messages": ["a"]}', "got 'a'"),
        ('{"messages": [{"role": "user"}]}', "wants messages with a text as role and as content"),
        ('{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "with a text as role and as content"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "ends with a message of the assistant"),
        ('{"prompt": "\\ud800"}', "half a character"),
        ('{"prompt": "a", "x": NaN}', "what JSON does not have"),
        ('{"prompt": "a", "prompt": "b"}', "the key 'prompt' is there twice"),
        *((f'{{"prompt": "a", "{key}": 0}}', f"has a key '{key}', which its completions get") for key in OWN_KEYS),
    ],
)
def test_a_bad_row_is_named(line, fault, tmp_path):
    path = file_of(tmp_path, "p.jsonl", f'{{"prompt": "a"}}\n\n{line}\n')
    with pytest.raises(ValueError, match="p.jsonl has 1 bad row ") as caught:
        read_prompts(path)
    assert f"line 3: {fault}" in str(caught.value) or (fault in str(caught.value) and "line 3" in str(caught.value))
    assert "\n" not in str(caught.value)


def test_of_many_bad_rows_the_first_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"9 bad rows \(line 1: .*line 5: .*; and 4 more\). Correct or remove them"):
        read_prompts(file_of(tmp_path, "p.jsonl", "x\n" * 9))


@pytest.mark.parametrize(
    "name, data, fault",
    [
        ("p.txt", "", "p.txt holds no prompt"),
        ("p.txt", " \n\n", "p.txt holds no prompt"),
        ("p.txt", b"good\nb\xffd\n", "line 2: is no UTF-8 text, byte 2"),
        ("p.json", "{}", "p.json wants a list of objects, got dict"),
        ("p.json", "[]", "p.json holds no prompt"),
        ("p.json", "[1]", "row 0: wants an object, got int"),
    ],
)
def test_a_bad_file_is_named(name, data, fault, tmp_path):
    with pytest.raises(ValueError, match="p[.]") as caught:
        read_prompts(file_of(tmp_path, name, data))
    assert fault in str(caught.value)


def test_what_is_no_file_is_refused(tmp_path):
    for path in (tmp_path, tmp_path / "missing.txt"):
        with pytest.raises(ValueError, match="is no file of prompts"):
            read_prompts(path)
