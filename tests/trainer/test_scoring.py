"""Completions are judged while others are still sampled; what the reward is made of, and what fails, is told."""

import itertools
import json
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from training_runs import TINY_MODEL, in_a_child, read_lines, same_run, tiny_config, train_quietly
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForSequenceClassification

from octavo.rollout.engine import Completion
from octavo.tasks.sandbox import refusal
from octavo.trainer import loop, rollout
from octavo.trainer.divergence import StepRecord
from octavo.trainer.metrics import Display
from octavo.trainer.progress import Progress
from octavo.trainer.run import Run, check_isolation, load_run, make_optimizer
from octavo.trainer.scoring import Scoring, scoring_faults, scoring_metrics

SCORE = """
import random

def score(prompt, completion, answer):
    if answer == "3":
        raise KeyError("three")
    return len(completion) + random.random()
"""


@pytest.fixture
def loaded(tmp_path):
    """Loads a run of `changes`, whose pool is closed at the end."""
    (tmp_path / "rewards.py").write_text(SCORE)
    runs = []

    def load(**changes):
        runs.append(load_run(tiny_config(tmp_path / "run", **changes), Display(Console(quiet=True))))
        return runs[-1]

    yield load
    for run in runs:
        run.verifiers.close()


def completions_of(run, problems, on_completion):
    return rollout.sample(run, problems, seed=1, on_completion=on_completion)


def test_rewards_are_the_same_with_and_without_overlap(loaded, tmp_path):
    run = loaded(
        reward={"python": {"function": f"{tmp_path}/rewards.py:score", "weight": 0.5}, "format": {"pattern": "=.*"}}
    )
    problems, reward, size = run.problems(0, 4), run.config.reward, run.config.rollout.group_size
    during, after = (Scoring(run, run.task, problems, size, reward) for _ in range(2))
    completions = completions_of(run, problems, during.add)
    for p, g in reversed(list(itertools.product(range(4), range(4)))):
        after.add(p, g, completions[p][g])
    scored = during.gather()
    assert scored == after.gather()
    for encoded, group, judged in zip(problems, completions, scored, strict=True):
        for completion, each in zip(group, judged, strict=True):
            assert each.text == run.decode(completion.tokens)
            assert each.verdict == run.task.check(encoded.problem, each.text)
            own = 0.0 if encoded.problem.answer == "3" else each.parts["python"]
            assert int(own) == (0 if encoded.problem.answer == "3" else len(each.text))
            assert each.reward == each.verdict.reward + 0.1 * each.text.startswith("=") + 0.5 * own


def test_what_fails_is_counted_and_named(loaded, tmp_path):
    run = loaded(reward={"python": f"{tmp_path}/rewards.py:score"})
    problem = run.train_problems[0]
    problems = [
        replace(problem, problem=replace(problem.problem, answer=answer, task=task))
        for answer, task in (("3", "a"), ("4", "b"))
    ]
    scoring = Scoring(run, run.task, problems, 1, run.config.reward)
    for p in range(2):
        scoring.add(
            p, 0, Completion(prompt=[], tokens=problem.prompt[-1:], rollout_logprobs=[0.0], finish_reason="stop")
        )
    scored = scoring.gather()
    metrics = scoring_metrics(problems, scored)
    rewards = [group[0].reward for group in scored]
    assert metrics["reward/python_failed_share"] == 0.5 and metrics["reward/check_failed_share"] == 0.0
    assert metrics["reward/a/mean"] == rewards[0] and metrics["reward/b/mean"] == rewards[1] > rewards[0]
    assert metrics["reward/python_mean"] == scored[1][0].parts["python"] / 2
    assert sum(metrics[f"verify/{outcome}_share"] for outcome in ("correct", "wrong", "unparsable")) == 1.0
    (fault,) = scoring_faults(scored)
    assert fault == "reward.python failed for 1 of 2 completions, which counts as 0: KeyError: 'three'"


def reward_model(folder, num_labels=1):
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_labels=num_labels,
    )
    torch.manual_seed(0)
    model = Qwen3ForSequenceClassification(config)
    torch.nn.init.normal_(model.score.weight, std=1.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.eval(), tokenizer


@torch.no_grad()
def test_a_reward_model_scores_each_completion_as_it_would_alone(loaded, tmp_path):
    model, tokenizer = reward_model(tmp_path / "judge")
    run = loaded(reward={"check_weight": 0.0, "model": {"path": str(tmp_path / "judge"), "batch_size": 5}})
    problems = run.problems(0, 4)
    scoring = Scoring(run, run.task, problems, 4, run.config.reward)
    completions_of(run, problems, scoring.add)
    scored = scoring.gather()
    for encoded, group in zip(problems, scored, strict=True):
        for each in group:
            tokens = tokenizer(run.task.prompt_text(encoded.problem) + each.text, return_tensors="pt")
            alone = model(**tokens).logits.item()
            assert each.reward == each.parts["model"] == pytest.approx(alone, abs=1e-4)
    assert len({each.reward for group in scored for each in group}) > 4


def test_a_model_of_several_labels_is_no_reward_model(loaded, tmp_path):
    reward_model(tmp_path / "judge", num_labels=3)
    with pytest.raises(ValueError, match="has 3 labels; a reward model has one"):
        loaded(reward={"model": str(tmp_path / "judge")}).check_rewards()
    with pytest.raises(ValueError, match=r"reward.model.path='.*none' cannot be read"):
        loaded(reward={"model": str(tmp_path / "none")}).check_rewards()


@pytest.mark.parametrize(
    "text, message",
    [
        ("def score(:", "SyntaxError"),
        ("import no_such_package", "No module named 'no_such_package'"),
        ("def other(): pass", "has no function score"),
    ],
)
def test_a_function_that_cannot_be_loaded_stops_the_run_before_it_begins(loaded, tmp_path, text, message):
    (tmp_path / "broken.py").write_text(text)
    run = loaded(reward={"python": f"{tmp_path}/broken.py:score"})
    with pytest.raises(ValueError, match=rf"reward.python.function='.*broken.py:score' cannot be loaded: .*{message}"):
        run.check_rewards()


def test_a_run_with_a_reward_of_several_parts_resumes_to_the_bit(tmp_path):
    (tmp_path / "rewards.py").write_text(SCORE.replace('"three"', "answer"))
    reward_model(tmp_path / "judge")
    changes = {
        "reward": {
            "python": f"{tmp_path}/rewards.py:score",
            "format": "=.*",
            "model": {"path": str(tmp_path / "judge"), "weight": 0.1},
        },
        "verifier": {"num_workers": 2, "audit_samples": 3},
        "evaluation__interval": 0,
        "rollout__prompts_per_step": 2,
        "checkpoint": {"interval": 1},
    }
    log = tmp_path / "log"
    train_quietly(tiny_config(tmp_path / "whole", trainer__num_steps=2, **changes), log)
    assert in_a_child(train_quietly, tiny_config(tmp_path / "run", trainer__num_steps=1, **changes), log) == 0
    train_quietly(tiny_config(tmp_path / "run", trainer__num_steps=2, **changes), log, resume=True, allow_changes=True)
    same_run(tmp_path / "run", tmp_path / "whole")
    assert (tmp_path / "run/audit.jsonl").read_bytes() == (tmp_path / "whole/audit.jsonl").read_bytes()
    rows = read_lines(tmp_path / "run/audit.jsonl")
    assert 3 <= len(rows) <= 9 and {row["outcome"] for row in rows} >= {"wrong"}
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    for name in ("check", "python", "format", "model"):
        assert f"reward/{name}_mean" in lines[1] and lines[1][f"reward/{name}_failed_share"] < 1.0
    assert all("time/reward_wait_s" in line for line in lines)


@pytest.mark.skipif(refusal() is not None, reason=f"no sandbox here: {refusal()}")
def test_programs_are_rewarded_by_their_tests(loaded, tmp_path, monkeypatch):
    """A step on rows as MBPP publishes them. The tiny model writes no Python, so its completions are replaced."""
    row = {
        "text": "Write double.",
        "code": "",
        "test_list": ["assert double(2) == 4"],
        "task_id": 1,
        "test_setup_code": "",
    }
    for split in ("train", "test"):
        rows = [{**row, "task_id": number, "text": f"{number}"} for number in range(4)]
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    run = loaded(
        task={"type": "dataset", "preset": "mbpp", "path": str(tmp_path), "instruction": ""},
        rollout__max_prompt_tokens=128,
        trainer__num_steps=1,
        verifier={"timeout_s": 30.0},
    )
    assert run.task.prompt_text(run.train_problems[0].problem).endswith("pass these tests:\nassert double(2) == 4")
    programs = ["def double(x): return x + x", "def double(x): return x", "no program", "import os\nos.abort()"]
    written = itertools.cycle(programs)
    monkeypatch.setattr(Run, "decode", lambda self, tokens: f"```python\n{next(written)}\n```")
    record, progress = StepRecord(step=0), Progress(bounds=run.config.start_bounds())
    metrics = loop.train_step(run, make_optimizer(run), None, progress, record)
    shares = {outcome: metrics[f"verify/{outcome}_share"] for outcome in ("correct", "wrong", "unparsable", "crashed")}
    assert set(shares.values()) == {0.25} and metrics["reward/mean"] == 0.25 and metrics["optimizer/grad_norm"] > 0


class Refusing:
    """A pool on a machine that isolates nothing."""

    def submit(self, function):
        future = Future()
        future.set_result("unshare: Operation not permitted")
        return future


def test_programs_without_isolation_are_refused_unless_allowed(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(Display, "line", lambda self, text: told.append(text))
    with pytest.raises(ValueError, match="cannot be isolated here .unshare: Operation not permitted"):
        check_isolation(tiny_config(tmp_path / "run"), Refusing(), Display())
    assert not told
    check_isolation(tiny_config(tmp_path / "run", verifier={"allow_unisolated": True}), Refusing(), Display())
    assert len(told) == 1 and "run without isolation (unshare: Operation not permitted)" in told[0]
