"""How far vLLM's rollouts lie from training, beside octavo's own engine: octavo's trainer on a CPU.

    make test-verl                                              makes the environment
    PYTHONPATH=. .venv-verl/bin/python benchmarks/vllm_mismatch.py

writes benchmarks/results/vllm_mismatch.json, in some four minutes. Ten steps an arm, the model of examples/tiny;
vLLM's block-FP8 kernel is emulated (tests/verl/vllm_on_cpu.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from octavo.bench.results import Results, Row

TESTS = Path(__file__).resolve().parents[1] / "tests" / "verl"
NUM_STEPS = 10
VLLM = {"type": "vllm", "cuda_graphs": False, "max_sequences": 128}
ARMS: dict[str, tuple[str | dict[str, Any], dict[str, Any]]] = {
    "octavo/block128": ("octavo", {"recipe": "block128", "kv_cache": "bf16"}),
    "vllm/bf16": (VLLM, {"recipe": "bf16"}),
    "vllm/block128": (VLLM, {"recipe": "block128", "kv_cache": "bf16"}),
    "vllm/block128+kv8": (VLLM, {"recipe": "block128", "kv_cache": "fp8"}),
    "vllm/w8a16, rollout block128": (VLLM, {"recipe": "w8a16", "kv_cache": "bf16", "rollout": "block128"}),
    "vllm/bf16, rollout block128": (VLLM, {"recipe": "bf16", "rollout": {"recipe": "block128", "kv_cache": "bf16"}}),
}
"""Name: rollout.engine and precision."""
FIGURES = {
    "mean_abs": "mismatch/mean_abs_logprob_diff",
    "max_abs": "mismatch/max_abs_logprob_diff",
    "k3": "mismatch/kl_k3",
}


def main() -> None:
    """Every arm, one after the other."""
    if importlib.util.find_spec("vllm") is None:
        print("vllm_mismatch: vLLM is not installed here; run it in the environment of make test-verl")
        return
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")
    sys.path.insert(0, str(TESTS))
    from vllm_on_cpu import register

    register()
    results = Results("vllm_mismatch", "PYTHONPATH=. .venv-verl/bin/python benchmarks/vllm_mismatch.py")
    for arm, (engine, precision) in ARMS.items():
        lines = trained(engine, precision)
        num_tokens = sum(line["mismatch/num_tokens"] for line in lines)
        note = f"{NUM_STEPS} steps, {num_tokens:.0f} tokens"
        for metric, key in FIGURES.items():
            values = [line[key] for line in lines]
            value = max(values) if metric == "max_abs" else sum(values) / len(values)
            results.add(
                Row(case=f"mismatch/tiny/{arm}", metric=metric, value=value, unit="nats", better="lower", note=note)
            )


def trained(engine: str | dict[str, Any], precision: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of a run."""
    from rich.console import Console

    from octavo.plugins.vllm import VLLMEngine
    from octavo.trainer.config import TrainConfig
    from octavo.trainer.config_file import from_dict
    from octavo.trainer.metrics import Display
    from octavo.trainer.train import train

    with tempfile.TemporaryDirectory() as folder:
        data = {
            "output_dir": f"{folder}/run",
            "model": {"path": "examples/tiny/model"},
            "precision": {**precision, "allow_mismatch": True},
            "task": {"type": "arithmetic"},
            "rollout": {"max_prompt_tokens": 16, "max_completion_tokens": 16, "engine": engine},
            "calibration": None,
            "optimizer": {"lr": 2e-4},
            "trainer": {"num_steps": NUM_STEPS, "num_mini_batches": 4, "shadow_interval": 0},
            "evaluation": {"interval": 0},
        }
        config = from_dict(TrainConfig, data, "vllm_mismatch")
        path = train(config, Display(Console(quiet=True)), vllm=VLLMEngine)
        return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()
