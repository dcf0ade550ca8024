"""benchmarks/verl_gsm8k.py with a script in verl's place; tests/verl runs it with verl."""

import json
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import verl_gsm8k

from octavo.bench.results import read_results

FAKE = """
import json, os, sys, time
steps, k3, ending = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
print("verl's own words", flush=True)
with open(os.environ["VERL_FILE_LOGGER_PATH"], "w") as file:
    for step in range(1, steps + 1):
        timers = "gen", "old_log_prob", "update_actor", "update_weights", "step"
        data = {f"timing_s/{name}": 10.0 / step for name in timers}
        data |= {"rollout_corr/k3_kl": k3 * step if k3 < 1 else None, "rollout_corr/kl": 0.0}
        data["training/rollout_probs_diff_mean"] = 0.25
        data |= {"critic/rewards/mean": 0.5, "response_length/mean": 100.0, "actor/pg_clipfrac": 0.0}
        if ending == "bounds":
            data |= {f"actor/calibration/{name}": x + step for name, x in (("low", 0.5), ("high", 1.5))}
            data["actor/calibration/is_skipped"] = float(step == 1)
        file.write(json.dumps({"step": step, "data": data}) + "\\n")
    if ending == "hang":
        file.write('{"step": 9, "da')
if ending == "hang":
    time.sleep(60)
sys.exit(ending == "fail")
"""


def write_gsm8k(folder):
    for name in ("train", "test"):
        line = {"id": f"{name}/0", "problem": f"{name}: 1 + 1?", "answer": "2"}
        (folder / f"{name}.jsonl").write_text(json.dumps(line) + "\n")


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs the benchmark on arms; verl's part is `FAKE` with these arguments."""
    monkeypatch.setattr(verl_gsm8k, "absent", lambda on_gpu: "")
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setenv("OCTAVO_COMMIT", "0" * 40)
    monkeypatch.setattr("octavo.bench.results._commit", lambda: "0" * 40)
    write_gsm8k(tmp_path)
    (tmp_path / "Qwen").mkdir()
    (tmp_path / "Qwen" / "config.json").write_text("{}")
    commands = []

    def measure(*arguments, steps=4, k3=0.001, ending="end"):
        def fake(model, prompts, wanted, overrides):
            commands.append((model, wanted, list(overrides)))
            return [sys.executable, "-c", FAKE, str(steps), str(k3), ending]

        monkeypatch.setattr(verl_gsm8k, "command", fake)
        named = [
            "--model",
            str(tmp_path / "Qwen"),
            "--data",
            str(tmp_path),
            "--output",
            str(tmp_path / "logs"),
        ]
        monkeypatch.setattr(sys, "argv", ["verl_gsm8k.py", *arguments, *named])
        status, said = verl_gsm8k.main(), capsys.readouterr()
        return status, said.out + said.err

    path = tmp_path / "verl_gsm8k.json"
    return SimpleNamespace(
        measure=measure,
        commands=commands,
        rows=lambda: {key: row.value for key, row in read_results(path).items()},
        path=path,
    )


def test_means_medians_and_bounds_are_those_of_the_steps(run):
    assert run.measure("mixed")[0] == 0
    status, said = run.measure("unified", k3=0.0004, ending="bounds")
    assert status == 0
    mixed, unified = "verl/qwen/bf16+fp8", "verl/qwen/block128+same bytes"
    rows = run.rows()
    assert rows[f"{mixed} k3"] == pytest.approx(0.001 * (1 + 2 + 3 + 4) / 4)
    assert rows[f"{mixed} step_s"] == rows[f"{mixed} rollout_s"] == pytest.approx(10 / 3), "the first is not counted"
    assert (rows[f"{mixed} first_step_s"], rows[f"{mixed} probability_diff"], rows[f"{mixed} reward"]) == (
        10,
        0.25,
        0.5,
    )
    assert f"{mixed} clip_low_end" not in rows
    bounds = [rows[f"{unified} {name}"] for name in ("clip_low_end", "clip_high_end", "calibrations")]
    assert bounds == [4.5, 5.5, 3]
    row = read_results(run.path)[f"{unified} k3"]
    assert row.goal == pytest.approx(0.5 * 0.0025) and row.met
    assert [overrides for _, _, overrides in run.commands] == [verl_gsm8k.FP8_ROLLOUT, verl_gsm8k.UNIFIED]


def test_an_arm_that_is_measured_is_not_run_again(run):
    run.measure("bf16", "mixed")
    status, said = run.measure("mixed", "unified")
    assert status == 0 and "mixed: measured already" in said and len(run.commands) == 3


def test_a_run_that_fails_says_why_and_leaves_no_row(run):
    status, said = run.measure("bf16", steps=1, ending="fail")
    assert status == 2 and not run.path.exists()
    assert said.endswith("verl's own words\n\nbf16: verl ended with status 1 with 1 of 4 steps\n")


def test_metrics_that_verl_did_not_log_are_named(run):
    status, said = run.measure("bf16", k3=float("inf"))
    assert status == 2 and "to have rollout_corr/k3_kl in each step; they have [None, None" in said


def test_steps_before_the_time_limit_count_and_its_processes_are_gone(run):
    begun = time.monotonic()
    status, _ = run.measure("bf16", "--timeout-s", "3", steps=3, k3=0.00123, ending="hang")
    assert status == 0 and time.monotonic() - begun < 30
    row = read_results(run.path)["verl/qwen/bf16+bf16 k3"]
    assert row.value == pytest.approx(0.00246) and row.note == "3 of 4 steps, stopped after 3 s"
    assert subprocess.run(["pgrep", "-f", "0.00123 hang"], capture_output=True).returncode == 1


def test_prompts_ask_for_what_verls_check_reads(tmp_path):
    write_gsm8k(tmp_path)
    verl_gsm8k.write_prompts(str(tmp_path), tmp_path / "prompts.jsonl")
    row = json.loads((tmp_path / "prompts.jsonl").read_text())
    assert row["prompt"][0]["content"].startswith("train: 1 + 1? ") and '"####"' in row["prompt"][0]["content"]
    assert (row["data_source"], row["reward_model"]["ground_truth"]) == ("openai/gsm8k", "2")


def test_what_is_missing_is_named(monkeypatch, capsys):
    monkeypatch.setattr(verl_gsm8k.importlib.util, "find_spec", lambda name: None if name in ("ray", "vllm") else name)
    monkeypatch.setattr(verl_gsm8k.torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["verl_gsm8k.py", "--model", "m", "--data", "d"])
    assert verl_gsm8k.main() == 2
    assert "a run needs ray, vLLM, a GPU, not to be found here" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["verl_gsm8k.py"])
    assert verl_gsm8k.main() == 0 and "skipped" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["int8"], ["--steps", "0"], ["--timeout-s", "0"]])
def test_arguments_that_mean_nothing_are_refused(run, arguments, capsys):
    with pytest.raises(SystemExit):
        run.measure(*arguments)
    assert "arms are bf16, mixed, unified" in (said := capsys.readouterr().err) or "above 0" in said


def test_a_model_that_is_no_folder_is_refused(run, tmp_path):
    (tmp_path / "Qwen" / "config.json").unlink()
    status, said = run.measure("bf16")
    assert status == 2 and "Qwen is none" in said and not run.commands
