"""Resume to the bit on a GPU: the backward's sums must not depend on the order in which threads come."""

import signal

import pytest
from training_runs import same_run, signal_at, tiny_config, train_quietly

from octavo.trainer.checkpoint import list_checkpoints
from octavo.trainer.interrupt import Interrupted
from octavo.trainer.optimizer import Optimizer

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(
    "recipe, kv_cache", [("block128", "fp8"), ("w8a16", "fp8"), ("tensorwise_static", "fp8"), ("bf16", "bf16")]
)
def test_a_run_that_is_stopped_and_resumed_equals_one_that_is_not(recipe, kv_cache, compact, tmp_path, monkeypatch):
    precision = {"recipe": recipe, "kv_cache": kv_cache}
    settings = {"device": "cuda", "precision": precision, "optimizer__lr": 2e-4, "evaluation__interval": 2}
    if compact:
        settings |= {"optimizer__state_format": "int8", "optimizer__master_format": "bf16"}
    config = tiny_config(tmp_path / "stopped", **settings)
    with monkeypatch.context() as patch:
        signal_at(patch, Optimizer, "step", 3, signal.SIGTERM)
        with pytest.raises(Interrupted):
            train_quietly(config, tmp_path / "log")
    assert [path.name for path in list_checkpoints(tmp_path / "stopped")] == ["step_000002-before-evaluation"]
    train_quietly(config, tmp_path / "log", resume=True)
    train_quietly(tiny_config(tmp_path / "whole", **settings), tmp_path / "log")
    same_run(tmp_path / "stopped", tmp_path / "whole")
