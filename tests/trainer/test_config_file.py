"""Tests."""

import json
import re
from dataclasses import dataclass

import pytest
import yaml
from run_configs import (
    BOOL,
    CISPO,
    FLOAT,
    INTEGER,
    LITERAL,
    MODEL,
    TEXT,
    Model,
    PPOClip,
    Run,
    TaskSet,
    error_of,
    message_of,
)

from octavo.trainer.config_file import from_dict, load_config, to_dict


def test_a_file_of_every_kind_of_value(write):
    path = write(
        """
        model: {path: Qwen/Qwen3-0.6B, dtype: fp32}
        loss: {type: cispo, ratio_cap: 5}
        seed: 7
        lr: 1e-6
        exact: false
        note: "true"
        stop_after: null
        betas: [1, 0.5]
        keep_bf16: []
        tasks: [{name: gsm8k}, {name: math, weight: 2.5}]
        mode: 8
        """
    )
    run = load_config(Run, path)
    assert run == Run(
        model=Model(path="Qwen/Qwen3-0.6B", dtype="fp32"),
        loss=CISPO(ratio_cap=5.0),
        seed=7,
        lr=1e-6,
        exact=False,
        note="true",
        stop_after=None,
        betas=(1.0, 0.5),
        keep_bf16=(),
        tasks=(TaskSet(name="gsm8k"), TaskSet(name="math", weight=2.5)),
        mode=8,
    )
    assert type(run.loss.ratio_cap) is float and type(run.betas[0]) is float  # an integer is taken, as a float


def test_keys_left_out_take_their_defaults(write):
    assert load_config(Run, write("model: {path: m}\n")) == Run(model=Model(path="m"))


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "+1e-6", "1.e-6", ".1e-5", "0.000001"])
def test_every_spelling_of_a_float(write, text):
    assert load_config(Run, write(f"model: {{path: m}}\nlr: {text}\n")).lr == 1e-6


def test_a_section_given_in_part_takes_the_rest_from_the_default_of_its_field():
    run = from_dict(Run, {"model": MODEL, "loss": {"clip_high": 0.3}}, "src")
    assert run.loss == PPOClip(clip_low=0.1, clip_high=0.3)  # 0.1 is Run's default, 0.2 the class's
    run = from_dict(Run, {"model": MODEL, "shadow_loss": {"type": "ppo_clip", "clip_high": 0.3}}, "src")
    assert run.shadow_loss == PPOClip(clip_low=0.2, clip_high=0.3)


@pytest.mark.parametrize(
    "run",
    [
        Run(model=Model(path="m")),
        Run(
            model=Model(path="1e-6"),
            loss=CISPO(ratio_cap=1e-9),
            shadow_loss=PPOClip(),
            lr=3e22,
            note="off",
            stop_after=3,
            tasks=(TaskSet(name="a", weight=0.1),),
            mode=8,
        ),
    ],
)
def test_round_trip_through_dict_yaml_and_json(run, write):
    assert from_dict(Run, to_dict(run), "src") == run
    assert from_dict(Run, json.loads(json.dumps(to_dict(run))), "src") == run
    assert load_config(Run, write(yaml.safe_dump(to_dict(run)))) == run


def test_to_dict_is_complete():
    run = Run(model=Model(path="m"), tasks=(TaskSet(name="a"),))
    assert to_dict(run) == {
        "model": {"path": "m", "dtype": "bf16"},
        "loss": {"type": "ppo_clip", "clip_low": 0.1, "clip_high": 0.28},
        "shadow_loss": None,
        "seed": 0,
        "lr": 1e-6,
        "exact": True,
        "note": "",
        "stop_after": None,
        "betas": [0.9, 0.95],
        "keep_bf16": ["lm_head"],
        "tasks": [{"name": "a", "weight": 1.0}],
        "mode": "on",
    }


@pytest.mark.parametrize(
    "key, value, expected",
    [
        ("seed", 2.0, "seed: wants an integer, got 2.0. Write 2."),
        ("seed", 2.5, f"seed: wants an integer, got 2.5. {INTEGER}"),
        ("seed", "2", f"seed: wants an integer, got '2'. {INTEGER}"),
        ("seed", True, f"seed: wants an integer, got true. {INTEGER}"),
        ("seed", None, f"seed: wants an integer, got null. {INTEGER}"),
        ("stop_after", 1.5, f"stop_after: wants an integer or null, got 1.5. {INTEGER}"),
        ("lr", "0.1", f"lr: wants a finite number, got '0.1'. {FLOAT}"),
        ("lr", "fast", f"lr: wants a finite number, got 'fast'. {FLOAT}"),
        ("lr", False, f"lr: wants a finite number, got false. {FLOAT}"),
        ("lr", float("nan"), f"lr: wants a finite number, got nan. {FLOAT}"),
        ("lr", float("-inf"), f"lr: wants a finite number, got -inf. {FLOAT}"),
        ("lr", "1e999", f"lr: wants a finite number, got '1e999'. {FLOAT}"),
        ("lr", 10**400, f"lr: wants a finite number, got 1{'0' * 76}.... {FLOAT}"),
        ("exact", "true", f"exact: wants true or false, got 'true'. {BOOL}"),
        ("exact", 1, f"exact: wants true or false, got 1. {BOOL}"),
        ("note", 3, f"note: wants text, got 3. {TEXT}"),
        ("note", False, f"note: wants text, got false. {TEXT}"),
        ("mode", False, f"mode: wants one of 'off', 'on', 8, got false. {LITERAL}"),
        ("mode", 8.0, f"mode: wants one of 'off', 'on', 8, got 8.0. {LITERAL}"),
        ("mode", "of", "mode: wants one of 'off', 'on', 8, got 'of'. Did you mean off?"),
        ("betas", 0.9, "betas: wants a list of 2: a finite number, a finite number, got 0.9. Write it as [...]."),
        ("betas", [0.9], "betas: wants a list of 2: a finite number, a finite number, got [0.9]. Write it as [...]."),
        ("betas", [0.9, True], f"betas[1]: wants a finite number, got true. {FLOAT}"),
        ("keep_bf16", "lm_head", "keep_bf16: wants a list, each text, got 'lm_head'. Write it as [...]."),
        ("keep_bf16", ["a", 1], f"keep_bf16[1]: wants text, got 1. {TEXT}"),
        ("tasks", [{"name": 1}], f"tasks[0].name: wants text, got 1. {TEXT}"),
        ("tasks", ["gsm8k"], "tasks[0]: wants a section, got 'gsm8k'. Write keys under it: name, weight."),
        ("model", "m", "model: wants a section, got 'm'. Write keys under it: path, dtype."),
        ("model", None, "model: wants a section, got nothing. Write keys under it: path, dtype."),
        (
            "loss",
            "cispo",
            "loss: wants a section, got 'cispo'. Write keys under it: type, clip_low, clip_high, ratio_cap.",
        ),
        ("loss", {"type": "cispro"}, "loss.type: wants one of 'ppo_clip', 'cispo', got 'cispro'. Did you mean cispo?"),
        ("loss", {"type": None}, f"loss.type: wants one of 'ppo_clip', 'cispo', got null. {LITERAL}"),
        ("shadow_loss", {"ratio_cap": 2}, "shadow_loss.type: missing; wants one of 'ppo_clip', 'cispo'. Add it."),
        ("loss", {"type": "cispo"}, "loss.ratio_cap: missing; wants a finite number. Add it."),
        (
            "loss",
            {"clip_lo": 0.1},
            "loss.clip_lo: unknown key, got 0.1. Did you mean clip_low? Known: type, clip_low, clip_high.",
        ),
        (
            "loss",
            {"tipe": "cispo"},
            "loss.tipe: unknown key, got 'cispo'. Did you mean type? Known: type, clip_low, clip_high.",
        ),
        (
            "loss",
            {"type": "cispo", "clip_low": 0.1},
            "loss.clip_low: unknown key, got 0.1. Remove it. Known: type, ratio_cap.",
        ),
        ("loss", {"clip_low": 1}, "loss: clip_low is an offset below 1, in [0, 1); got 1.0"),
        ("seed", -1, "seed wants 0 or more; got -1"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_wanted_and_the_way_out(key, value, expected):
    assert error_of(**{key: value}) == f"src: {expected}"


def test_an_unknown_key_lists_the_known_ones():
    known = "model, loss, shadow_loss, seed, lr, exact, note, stop_after, betas, keep_bf16, tasks, mode"
    assert error_of(xyzzy=[1]) == f"src: xyzzy: unknown key, got [1]. Remove it. Known: {known}."
    assert error_of(sed=1) == f"src: sed: unknown key, got 1. Did you mean seed? Known: {known}."
    assert error_of(note="", **{"loss.clip_low": 1}).startswith("src: loss.clip_low: unknown key, got 1. ")
    assert message_of(from_dict, Run, {True: 1}, "src") == f"src: True: unknown key, got 1. Remove it. Known: {known}."


def test_a_missing_key_is_named():
    assert message_of(from_dict, Run, {}, "src") == "src: model: missing; wants a section. Add it."
    assert message_of(from_dict, Run, {"model": {}}, "src") == "src: model.path: missing; wants text. Add it."


def test_an_annotation_that_is_no_config_type_is_a_bug():
    @dataclass(frozen=True)
    class Bad:
        sizes: list[int]

    with pytest.raises(AssertionError, match=re.escape("sizes: list[int]")):
        from_dict(Bad, {"sizes": [1]}, "src")


TOP_LEVEL = (
    "Write keys under it: model, loss, shadow_loss, seed, lr, exact, note, stop_after, betas, keep_bf16, tasks, mode."
)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("", f"run.yaml: wants a section, got nothing. {TOP_LEVEL}"),
        ("# only a comment\n", f"run.yaml: wants a section, got nothing. {TOP_LEVEL}"),
        ("- 1\n- 2\n", f"run.yaml: wants a section, got [1, 2]. {TOP_LEVEL}"),
        ("seed: 1\nlr: [1, 2\n", "run.yaml: not YAML: line 3: expected ',' or ']', but got '<stream end>'. "),
        ("seed: 1\n\tlr: 2\n", "run.yaml: not YAML: line 2: found character '\\t' that cannot start any token. "),
        ("a: 1\n---\nb: 1\n", "run.yaml: not YAML: line 2: but found another document. "),
        (
            "note: !!python/name:os.system\n",
            "run.yaml: not YAML: line 1: could not determine a constructor for the tag ",
        ),
        ("note: 2025-02-30\n", "run.yaml: not YAML: day is out of range for month. Correct or quote it."),
        ("note: a\0b\n", "run.yaml: not YAML: unacceptable character #x0000"),
        ("seed: 1\nlr: 2\nseed: 3\n", "run.yaml: seed: given twice: 1 on line 1, 3 on line 3. Keep one of them."),
        (
            "loss:\n  clip_low: 0.1\n  clip_low: 0.1\n",
            "run.yaml: loss.clip_low: given twice: 0.1 on line 2, 0.1 on line 3. Keep one of them.",
        ),
        (
            "model: {path: m}\nmodel: {path: n}\n",
            "run.yaml: model: given twice: mapping on line 1, mapping on line 2. Keep one of them.",
        ),
        (
            "tasks:\n- name: a\n- {name: b, name: c}\n",
            "run.yaml: tasks[1].name: given twice: b on line 3, c on line 3. Keep one of them.",
        ),
        ("model: &m {path: *m}\n", f"run.yaml: model.path: wants text, got {{'path': {{...}}}}. {TEXT}"),
    ],
)
def test_a_file_that_cannot_be_used(write, text, expected):
    message = message_of(load_config, Run, write(text))
    assert message.startswith(expected), message


def test_a_file_that_cannot_be_read(write, tmp_path):
    write("")
    wanted = "Give the path of a YAML file."
    assert message_of(load_config, Run, "no.yaml") == f"no.yaml: cannot be read: No such file or directory. {wanted}"
    assert message_of(load_config, Run, tmp_path) == f"{tmp_path}: cannot be read: Is a directory. {wanted}"
    (tmp_path / "latin1.yaml").write_bytes("note: café\n".encode("latin-1"))
    assert message_of(load_config, Run, "latin1.yaml") == (
        "latin1.yaml: not YAML: unacceptable character #x00e9: invalid continuation byte "
        'in "<byte string>", position 9. Correct or quote it.'
    )


def test_yaml_merge_keys_are_not_duplicates(write):
    path = write("model: &m {path: m}\nloss: {clip_low: 0.3}\n")
    assert load_config(Run, path).loss.clip_low == 0.3
    path = write("tasks:\n- &a {name: a, weight: 2}\n- {<<: *a, name: b}\nmodel: {path: m}\n")
    assert load_config(Run, path).tasks == (TaskSet(name="a", weight=2.0), TaskSet(name="b", weight=2.0))
