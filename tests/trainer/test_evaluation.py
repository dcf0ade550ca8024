"""An evaluation that is interrupted goes on where it was, and ends with the bytes of one that was not."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from training_runs import tiny_config

from octavo.rollout.engine import Engine
from octavo.trainer.evaluation import evaluate, measure
from octavo.trainer.evaluation_result import to_metrics
from octavo.trainer.interrupt import StopRequested
from octavo.trainer.metrics import Display
from octavo.trainer.run import load_run


def loaded(tmp_path, **changes):
    config = tiny_config(
        tmp_path / "run",
        evaluation={"num_problems": 10, "completions_per_problem": 2},
        rollout__engine={"page_size": 4, "kv_cache_tokens": 2048, "max_sequences": 5},
        **changes,
    )
    return load_run(config, Display(Console(quiet=True)))


@pytest.fixture
def whole(tmp_path):
    run = loaded(tmp_path)
    metrics = to_metrics(measure(run, tmp_path / "whole.jsonl"))
    assert metrics == evaluate(run)
    return (tmp_path / "whole.jsonl").read_bytes(), metrics


def stop_at(monkeypatch, part, error=KeyboardInterrupt):
    generate, left = Engine.generate, [part]

    def stopping(*arguments, **keywords):
        left[0] -= 1
        if left[0] == 0:
            raise error
        return generate(*arguments, **keywords)

    monkeypatch.setattr(Engine, "generate", stopping)


def test_the_parts_of_an_interrupted_evaluation_make_the_whole(whole, tmp_path, monkeypatch):
    run = loaded(tmp_path)
    path = tmp_path / "parts.jsonl"
    for part in (3, 2):
        with monkeypatch.context() as patch:
            stop_at(patch, part)
            with pytest.raises(KeyboardInterrupt):
                measure(run, path)
        assert not path.exists()
    partial = tmp_path / "parts.jsonl.partial"
    assert len(partial.read_text().splitlines()) == 1 + 3 * 4
    partial.write_bytes(partial.read_bytes()[:-30])  # as a kill may leave it
    assert to_metrics(measure(run, path)) == whole[1]
    assert path.read_bytes() == whole[0] and not partial.exists()
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 20 and sum(row["outcome"] == "correct" for row in rows) == whole[1]["eval/num_correct"]


def test_a_kill_after_the_last_problem_loses_nothing(whole, tmp_path, monkeypatch):
    run, path = loaded(tmp_path), tmp_path / "parts.jsonl"
    partial = tmp_path / "parts.jsonl.partial"
    for calls in (1, 2, 3):  # renames and removals, once all rows are there
        left = [calls]

        def counted(original, left=left):
            def call(self, *arguments, **keywords):
                if partial.exists() and len(partial.read_bytes().splitlines()) == 1 + 20:
                    left[0] -= 1
                if left[0] == 0:
                    raise KeyboardInterrupt
                return original(self, *arguments, **keywords)

            return call

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Path, "replace", counted(Path.replace))
            patch.setattr(Path, "unlink", counted(Path.unlink))
            measure(run, path)
    stop_at(monkeypatch, 1, AssertionError("nothing is left to sample"))
    assert to_metrics(measure(run, path)) == whole[1]
    assert path.read_bytes() == whole[0]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["parts.jsonl", "whole.jsonl"]


@pytest.mark.parametrize("change", ["seed", "weights", "damaged", "rope", "edited"])
def test_a_partial_file_of_another_evaluation_is_refused(change, tmp_path, monkeypatch):
    run = loaded(tmp_path)
    path = tmp_path / "parts.jsonl"
    with monkeypatch.context() as patch:
        stop_at(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            measure(run, path)
    partial = tmp_path / "parts.jsonl.partial"
    if change == "seed":
        run = replace(run, config=replace(run.config, seed=1))
    elif change == "weights":
        run.policy.norm.weight.data[0] += 1e-3
    elif change == "rope":
        run.policy.hf_config.rope_parameters["rope_theta"] *= 2
    elif change == "edited":
        lines = partial.read_text().splitlines(keepends=True)
        partial.write_text("".join(lines[:1] + lines[2:]))
    else:
        partial.write_text("three years of work\n")
    before = partial.read_bytes()
    named = {"damaged": "it is none of ours", "rope": "model numbers", "edited": "its rows"}.get(change, change)
    with pytest.raises(ValueError, match=f"left by another evaluation .({named})"):
        measure(run, path)
    assert partial.read_bytes() == before


def test_an_evaluation_can_be_asked_to_stop(tmp_path):
    run = loaded(tmp_path)
    run.interrupts.requested = 2
    with pytest.raises(StopRequested):
        evaluate(run)
