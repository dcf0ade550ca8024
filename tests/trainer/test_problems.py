"""What a run trains on and what it is measured on."""

import io
import json
from collections import Counter

import pytest
from rich.console import Console
from training_runs import same_run, signal_at, tiny_config

from octavo.trainer import rollout
from octavo.trainer.evaluation import evaluate
from octavo.trainer.interrupt import Interrupted
from octavo.trainer.metrics import Display
from octavo.trainer.run import load_run
from octavo.trainer.train import train

SUMS = [{"problem": f"({a}+{b}-1+2+3)%10", "answer": (a + b + 4) % 10} for a in range(1, 9) for b in range(1, 9)]


def write(file, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def loaded(config):
    text = io.StringIO()
    return load_run(config, Display(Console(file=text, width=1000))), text.getvalue()


def dataset(path, **keys):
    return {"type": "dataset", "path": path, "instruction": "", **keys}


def test_problems_that_are_evaluated_too_are_a_warning_or_left_out(tmp_path):
    train = [
        {"problem": "Add (1, 2).", "answer": 3},
        {"problem": "Add 2, 3!", "answer": 5},
        {"problem": "One?", "answer": 1},
    ]
    write(tmp_path / "train.jsonl", train)
    write(tmp_path / "test.jsonl", [{"problem": "add: 1, 2", "answer": 3}])
    task = dataset(str(tmp_path), name="sums")
    benchmark = {"path": write(tmp_path / "bench.jsonl", [{"problem": "add 2 3", "answer": 5}] * 2), "instruction": ""}
    run, said = loaded(tiny_config(tmp_path / "run", task=task))
    assert "warning: 1 of sums are both trained on and evaluated, such as sums/test/0" in said
    assert len(run.train_problems) == 3
    evaluation = {"sets": [benchmark], "drop_overlap": True}
    run, said = loaded(tiny_config(tmp_path / "run", task=task, evaluation=evaluation))
    assert "left out 1 of 3 training problems: 2 of bench are both" in said and "evaluated: bench from" in said
    assert [encoded.problem.answer for encoded in run.train_problems] == ["3", "1"]
    assert [(each.name, len(each.problems)) for each in run.benchmarks] == [("bench", 2)]


def test_training_wants_problems_and_evaluation_too(tmp_path):
    path = write(tmp_path / "sums.jsonl", SUMS)
    quiet = Display(Console(quiet=True))
    with pytest.raises(ValueError, match="'sums' has no problems to evaluate on. Give evaluation.sets"):
        train(tiny_config(tmp_path / "run", task=dataset(path)), quiet)
    with pytest.raises(ValueError, match="'sums' has no training problems"):
        train(tiny_config(tmp_path / "run", task=dataset(path, train_split=None)), quiet)
    assert not (tmp_path / "run").exists()
    run, _ = loaded(tiny_config(tmp_path / "run", task=dataset(path)))
    with pytest.raises(ValueError, match="has no problems to evaluate on"):
        evaluate(run)


def mixture(tmp_path, weights=(3.0, 1.0)):
    path = write(tmp_path / "sums.jsonl", SUMS)
    generated = {"type": "arithmetic", "num_train": 64, "num_test": 8}
    parts = [{"weight": weights[0], "task": generated}, {"weight": weights[1], "task": dataset(path)}]
    return {"type": "mixture", "parts": parts}


def test_a_mixture_draws_by_weight_and_is_measured_by_part(tmp_path):
    run, said = loaded(tiny_config(tmp_path / "run", task=mixture(tmp_path), evaluation={"num_problems": 4}))
    drawn = [encoded.problem.task for encoded in run.problems(0, 80)]
    assert len(drawn) == 80 and 55 <= Counter(drawn)["arithmetic"] <= 65
    assert run.task.check(run.train_problems[0].problem, run.train_problems[0].problem.answer).outcome == "correct"
    assert [each.name for each in run.benchmarks] == [
        "arithmetic"
    ] and "mixture from arithmetic: a generator; sums: " in said
    assert evaluate(run)["eval/num_problems"] == 4


def test_a_part_of_a_mixture_that_is_too_long_is_named(tmp_path):
    config = tiny_config(tmp_path / "run", task=mixture(tmp_path), rollout__max_prompt_tokens=14)
    assert len(loaded(config)[0].train_problems) == 128
    write(tmp_path / "sums.jsonl", [{"problem": f"{'1+' * 20}1", "answer": 21}])
    with pytest.raises(ValueError, match="no training problem of part 'sums' of the mixture is left"):
        train(config, Display(Console(quiet=True)))


def test_a_resumed_mixture_goes_on_at_the_same_problem(tmp_path, monkeypatch):
    quiet = Display(Console(quiet=True))
    changes = {
        "task": mixture(tmp_path, (1.0, 1.0)),
        "rollout__group_size": 2,
        "calibration": None,
        "trainer": {"num_steps": 2, "num_mini_batches": 1, "shadow_interval": 0, "logged_samples": 4},
        "evaluation": {"interval": 0},
    }
    train(tiny_config(tmp_path / "whole", **changes), quiet)
    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        signal_at(patch, rollout, "sample", 2, 2)
        train(tiny_config(tmp_path / "parts", **changes), quiet)
    train(tiny_config(tmp_path / "parts", **changes), quiet, resume=True)
    same_run(tmp_path / "parts", tmp_path / "whole")
    ids = [json.loads(line)["id"] for line in (tmp_path / "parts/samples.jsonl").read_text().splitlines()]
    assert len(set(ids)) == 8 and {name.split("/")[0] for name in ids} == {"arithmetic", "sums"}
