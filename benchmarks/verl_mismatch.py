"""verl's own mismatch between training and vLLM: BF16, FP8 rollouts alone, and one precision for both, on a CPU.

    make test-verl                                              makes the environment
    PYTHONPATH=. .venv-verl/bin/python benchmarks/verl_mismatch.py

writes benchmarks/results/verl_mismatch.json, in some five minutes on two cores. Two steps of `verl.trainer.main_ppo` an
arm, GRPO, a Qwen3 of two layers with random weights; vLLM's block-FP8 kernel is emulated.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from pathlib import Path

from octavo.bench.results import Results, Row

TESTS = Path(__file__).resolve().parents[1] / "tests" / "verl"
STEPS = (1, 2)


def main() -> None:
    """The three arms, one after the other."""
    if importlib.util.find_spec("ray") is None:
        print("verl_mismatch: verl is not installed here; run it in the environment of make test-verl")
        return
    sys.path.insert(0, str(TESTS))
    from verl_runs import FP8_ROLLOUTS, UNIFIED, prepare, run

    arms = {"bf16+bf16": [], "bf16+fp8": FP8_ROLLOUTS, "block128+same bytes": UNIFIED}
    results = Results("verl_mismatch", "PYTHONPATH=. .venv-verl/bin/python benchmarks/verl_mismatch.py")
    mixed = None
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        for number, (arm, overrides) in enumerate(arms.items()):
            metrics = run(Path(folder), Path(folder) / str(number), overrides)
            total = sum(metrics[step]["rollout_corr/k3_kl"] for step in STEPS)
            mixed = total if arm == "bf16+fp8" else mixed
            unified = arm.startswith("block128")
            note = f"steps {STEPS}, {sum(64 * metrics[step]['response_length/mean'] for step in STEPS):.0f} tokens"
            goal = 0.5 * mixed if unified and mixed is not None else None
            case = f"verl/qwen3-2-layers/{arm}"
            results.add(Row(case=case, metric="k3", value=total, unit="nats", goal=goal, better="lower", note=note))
            seconds = metrics[2]["timing_s/step"]
            results.add(Row(case=case, metric="step_s", value=seconds, unit="s", better="lower", note="step 2"))


if __name__ == "__main__":
    main()
