"""Steps trained on what vLLM samples on a Hopper GPU, its block FP8 by DeepGEMM."""

import pytest
from training_runs import read_lines, tiny_config

pytest.importorskip("vllm", reason="needs vLLM: pip install 'octavo[vllm]'")

from octavo.plugins.vllm import VLLMEngine
from octavo.trainer.metrics import Display
from octavo.trainer.train import train

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "recipe, kv_cache, rounding, bound",
    [
        ("bf16", "bf16", "none", 0.02),
        ("block128", "bf16", "none", 0.05),
        ("block128", "bf16", "power_of_two", 0.05),
        ("block128", "fp8", "none", 0.1),
    ],
)
def test_steps_are_trained_on_what_vllm_samples(recipe, kv_cache, rounding, bound, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM_E8M0", str(int(rounding == "power_of_two")))
    config = tiny_config(
        tmp_path / "run",
        device="cuda",
        precision={"recipe": recipe, "kv_cache": kv_cache, "scale_rounding": rounding, "allow_mismatch": True},
        rollout__engine={"type": "vllm", "gpu_memory_utilization": 0.2},
        calibration=None,
    )
    lines = read_lines(train(config, Display(), vllm=VLLMEngine) / "metrics.jsonl")
    means = [line["mismatch/mean_abs_logprob_diff"] for line in lines]
    out = capsys.readouterr().out
    assert f"{0 if recipe == 'bf16' else 12} of 12 linear layers in FP8" in out and "only DeepGEMM" not in out, out
    assert len(means) == 4 and all(0.0 < mean < bound for mean in means), means
