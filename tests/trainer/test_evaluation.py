"""An evaluation that is interrupted goes on where it was, and ends with the bytes of one that was not."""

import json
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console
from training_runs import in_a_child, signal_at, tiny_config

from octavo.numerics.recipe import get_recipe
from octavo.rollout.engine import Engine
from octavo.tasks.verdict import Outcome
from octavo.trainer.evaluation import evaluate, measure
from octavo.trainer.evaluation_result import to_lines, to_metrics
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


@pytest.mark.parametrize("change", ["seed", "weights", "damaged", "rope", "edited", "verifier", "rows"])
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
    elif change == "verifier":
        run = replace(run, config=replace(run.config, verifier=replace(run.config.verifier, timeout_s=9.0)))
    elif change == "rows":
        partial.write_text(partial.read_text().splitlines(keepends=True)[0] + "[1]\n")
    elif change == "edited":
        lines = partial.read_text().splitlines(keepends=True)
        partial.write_text("".join(lines[:1] + lines[2:]))
    else:
        partial.write_text("three years of work\n")
    before = partial.read_bytes()
    named = {"damaged": "it is none of ours", "rope": "model numbers", "edited": "its rows", "rows": "its rows"}.get(
        change, change
    )
    with pytest.raises(ValueError, match=f"left by another evaluation .({named})"):
        measure(run, path)
    assert partial.read_bytes() == before


def sums(tmp_path, name, first, count=3):
    """A benchmark of three-digit sums in a file."""
    rows = [{"problem": f"({a}+2+3+4+5)%10", "answer": (a + 14) % 10} for a in range(first, first + count)]
    (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"path": str(tmp_path / f"{name}.jsonl"), "instruction": ""}


def with_sets(tmp_path, *sets, **changes):
    evaluation = {"num_problems": 10, "completions_per_problem": 3, "sets": list(sets)}
    engine = {"page_size": 4, "kv_cache_tokens": 2048, "max_sequences": 6}
    config = tiny_config(tmp_path / "run", evaluation=evaluation, rollout__engine=engine, **changes)
    return load_run(config, Display(Console(quiet=True)))


def test_several_sets_each_measured_as_if_alone(tmp_path):
    one, two = sums(tmp_path, "one", 1), sums(tmp_path, "two", 4, count=5)
    both = measure(with_sets(tmp_path, one, two), tmp_path / "both.jsonl")
    assert both == measure(with_sets(tmp_path, one)) + measure(with_sets(tmp_path, two))
    metrics = to_metrics(both)
    rows = [json.loads(line) for line in (tmp_path / "both.jsonl").read_text().splitlines()]
    right = {name: [row["outcome"] == "correct" for row in rows if row["set"] == name] for name in ("one", "two")}
    assert {name: len(found) for name, found in right.items()} == {"one": 9, "two": 15}
    for name, found in right.items():
        assert metrics[f"eval/{name}/accuracy"] == pytest.approx(sum(found) / len(found))
        in_any = [any(found[start : start + 3]) for start in range(0, len(found), 3)]
        assert metrics[f"eval/{name}/pass_at_3"] == pytest.approx(sum(in_any) / len(in_any))
        assert metrics[f"eval/{name}/num_correct"] == sum(found)
    assert metrics["eval/accuracy"] == pytest.approx(sum(sum(x) / len(x) for x in right.values()) / 2)
    assert metrics["eval/num_problems"] == 8 and metrics["eval/num_left_out"] == 0
    counted = sum(metrics[f"eval/num_{outcome}"] for outcome in get_args(Outcome))
    assert counted == 24 and 0 < metrics["eval/num_correct"] < 24
    assert metrics["eval/accuracy_low"] < metrics["eval/accuracy"] < metrics["eval/accuracy_high"]
    lines = to_lines(both)
    assert len(lines) == 3 and "avg@3" in lines[1] and f"{sum(right['one'])} correct" in lines[1]


def test_sets_of_one_name_are_refused(tmp_path):
    one = sums(tmp_path, "one", 1)
    with pytest.raises(ValueError, match="has 'one' twice. Set `name`"):
        with_sets(tmp_path, one, one)
    assert len(measure(with_sets(tmp_path, one, {**one, "name": "again"}))) == 2


def test_problems_that_are_too_long_are_counted_in_the_result(tmp_path):
    rows = [{"problem": "(1+2+3+4+5)%10", "answer": 5}, {"problem": f"({'1+' * 20}1)%10", "answer": 1}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = evaluate(with_sets(tmp_path, {"path": str(tmp_path / "x.jsonl"), "instruction": ""}))
    assert (metrics["eval/num_problems"], metrics["eval/num_left_out"]) == (1, 1)


def test_another_precision_is_measured_on_the_same_draws_and_compared_in_pairs(tmp_path):
    config = {"rollout__max_completion_tokens": 8, "seed": 4}
    run = with_sets(tmp_path, sums(tmp_path, "one", 1, count=8), **config)
    found = measure(run, tmp_path / "two.jsonl", get_recipe("bf16"))
    alone = measure(with_sets(tmp_path, sums(tmp_path, "one", 1, count=8), precision__recipe="bf16", **config))
    assert [result.precision for result in found] == ["eval", "bf16"]
    assert replace(found[1], precision="eval") == alone[0]
    metrics = to_metrics(found)
    assert metrics["bf16/accuracy"] == alone[0].accuracy.value
    assert metrics["difference/accuracy"] == pytest.approx(metrics["eval/accuracy"] - metrics["bf16/accuracy"])
    assert metrics["difference/accuracy_low"] < metrics["difference/accuracy_high"]
    rows = [json.loads(line) for line in (tmp_path / "two.jsonl").read_text().splitlines()]
    texts = [[row["completion"] for row in rows if row["precision"] == name] for name in ("eval", "bf16")]
    assert texts[0] != texts[1] and len(texts[0]) == len(texts[1]) == 24
    assert sum(map(str.__eq__, *texts)) > 12  # FP8 changes some draws, not all
    assert "difference" in to_lines(found)[-1]


def test_a_killed_evaluation_of_several_sets_goes_on_and_ends_the_same(tmp_path, monkeypatch):
    sets = sums(tmp_path, "one", 1), sums(tmp_path, "two", 4, count=5)
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    wanted = measure(with_sets(tmp_path, *sets), whole, get_recipe("bf16"))
    for call in (3, 5):  # between the sets, then in the first set under the other precision
        with monkeypatch.context() as patch:
            signal_at(patch, Engine, "generate", call, signal.SIGKILL)
            work = partial(measure, output=parts, compare=get_recipe("bf16"))
            assert in_a_child(work, with_sets(tmp_path, *sets)) == -signal.SIGKILL
    done = len((tmp_path / "parts.jsonl.partial").read_text().splitlines()) - 1
    assert 24 < done < 48 and not parts.exists()
    assert measure(with_sets(tmp_path, *sets), parts, get_recipe("bf16")) == wanted
    assert parts.read_bytes() == whole.read_bytes()


def test_an_evaluation_can_be_asked_to_stop(tmp_path):
    run = loaded(tmp_path)
    run.interrupts.requested = 2
    with pytest.raises(StopRequested):
        evaluate(run)
