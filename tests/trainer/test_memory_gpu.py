"""The memory plan against what a run on a GPU takes, at most 5 % apart."""

import pytest
from training_runs import TINY_MODEL

from octavo.bench.memory import full_run, random_model, train_beside_plan
from octavo.trainer.memory_advice import with_changes

pytestmark = pytest.mark.gpu

QWEN3 = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 32000,
}
RAGGED = {
    **QWEN3,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
}
"""SmolLM2-135M's widths, which 128 does not divide."""
CASES = [
    (QWEN3, {"recipe": "block128"}, False),
    (QWEN3, {"recipe": "block128"}, True),
    (QWEN3, {"recipe": "w8a16"}, False),
    (QWEN3, {"recipe": "bf16"}, False),
    (QWEN3, {"recipe": "rowwise", "kv_cache": "bf16"}, True),
    (RAGGED, {"recipe": "block128"}, False),
]


@pytest.mark.parametrize("widths, precision, recompute", CASES)
def test_the_plan_is_what_a_run_takes(widths, precision, recompute, tmp_path):
    model = random_model(tmp_path / "model", TINY_MODEL, widths)
    run = train_beside_plan(full_run(model, tmp_path / "run", precision, recompute))
    assert {"rollout", "old_logprobs", "shadow", "update", "peak", "held"} == run.planned.keys()
    assert abs(run.off("peak")) <= 0.05, f"\n{run.table()}"


def test_the_plan_of_a_run_that_lends_its_cache(tmp_path):
    model = random_model(tmp_path / "model", TINY_MODEL, QWEN3)
    engine = {"rollout.engine.lend_memory": True, "rollout.engine.kv_cache_tokens": 400_000}
    run = train_beside_plan(with_changes(full_run(model, tmp_path / "run", {"recipe": "block128"}), engine))
    assert run.plan.peak[0] == "rollout" and run.measured["rollout"] - run.measured["held"] > 6.0
    assert all(abs(run.off(phase)) <= 0.05 for phase in ("peak", "rollout", "update", "held")), f"\n{run.table()}"
