"""Prompt files: text or JSONL; a bad line is named."""

import pytest

from octavo.diagnose.prompt_files import PromptRow, read_prompts


def test_text_is_a_prompt_a_line(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("\ufefffirst ü 日本\r\n\n  second\nthird\n", encoding="utf-8")
    assert read_prompts(path, 2) == [PromptRow(prompt="first ü 日本"), PromptRow(prompt="second")]


def test_json_lines_may_hold_completions(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "a", "completion": " b", "advantage": -1}\n{"prompt": "{", "completion": "}", "advantage": 0}\n'
    )
    first, second = read_prompts(path, 9)
    assert first == PromptRow(prompt="a", completion=" b", advantage=-1)
    assert second == PromptRow(prompt="{", completion="}", advantage=0)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", "holds no prompt"),
        ("\n \n", "holds no prompt"),
        ('{"prompt": "a"}\n{"prompt": ', "line 2 is no JSON"),
        ("[1]\n", "line 1 is no JSON object but list"),
        ('{"prompt": "a", "answer": "b"}', "line 1: keys are prompt, completion and advantage; got 'answer'"),
        ('{"completion": "a"}', "line 1: prompt is a text with at least one character; got None"),
        ('{"prompt": 3}', "line 1: prompt is a text with at least one character; got 3"),
        ('{"prompt": "a", "completion": ""}', "line 1: completion is a text with at least one character"),
        ('{"prompt": "a", "completion": "b", "advantage": NaN}', "line 1: advantage is a finite number; got nan"),
        ('{"prompt": "a", "completion": "b", "advantage": true}', "line 1: advantage is a finite number; got True"),
        ('{"prompt": "a", "advantage": 1}', "line 1: advantage belongs to a completion"),
        ('{"prompt": "a"}\n{"prompt": "a", "completion": "b"}', "line 2: some rows have a completion"),
        (
            '{"prompt": "a", "completion": "b", "advantage": 1}\n{"prompt": "a", "completion": "b"}',
            "some rows have an adv",
        ),
        ("[" * 100_000, "line 1 is no JSON"),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, expected):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="prompts.jsonl") as caught:
        read_prompts(path, 100)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_no_text_is_refused(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"ab\xff\xfe")
    with pytest.raises(ValueError, match="no UTF-8 text: byte 2"):
        read_prompts(path, 4)
