"""A config against this machine, and `octavo check` as a command."""

import json
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from training_runs import tiny_config

from octavo import cli
from octavo.check import run_config, runner
from octavo.check.rows import Row
from octavo.check.run_config import config_rows, sandbox_row
from octavo.kernels.device import choose_kernels, runs_kernels
from octavo.models.config import read_config
from octavo.numerics.recipe import get_recipe
from octavo.rollout.vllm_config import VLLMConfig
from octavo.trainer import host_memory
from octavo.trainer import run as training_run
from octavo.trainer.memory import binary_size

REPO = Path(__file__).resolve().parents[2]
TINY_MODEL = REPO / "examples/tiny/model"
DEMO = REPO / "examples/demo.yaml"


def check(tmp_path, *overrides):
    """Rows of the demo's config by name; the run would go to tmp_path / run."""
    changes = [f"output_dir={tmp_path / 'run'}", f"model.path={TINY_MODEL}", *overrides]
    return {row.name: row for row in config_rows(DEMO, changes)}


def test_the_demo_can_run(tmp_path):
    rows = check(tmp_path)
    assert {row.status for row in rows.values()} == {"OK"}
    assert {"configuration", "precision flow", "device", "model", "tokenizer", "task"} < rows.keys()
    assert "1.8 M parameters in 3.6 MB" in rows["model"].detail and "<eos> (0)" in rows["tokenizer"].detail
    assert "4096 training, 512 test" in rows["task"].detail and "longest has 14 tokens" in rows["prompts"].detail
    assert "FP32 masters 7.2 MB" in rows["memory for the run"].detail
    assert not (tmp_path / "run").exists()


def test_vllm_as_the_engine_is_looked_for_and_the_models_widths_held_to_it(tmp_path, monkeypatch):
    wanted = ("rollout.engine={type: vllm}", "precision.allow_mismatch=true")
    row = check(tmp_path, *wanted)["vLLM"]
    assert row.status == "FAIL" and "vLLM cannot be imported" in row.detail and "type=octavo" in row.next_step
    monkeypatch.setattr(run_config, "supported_release", lambda: "0.32.0")
    rows = check(tmp_path, *wanted)
    assert (rows["vLLM"].status, rows["vLLM"].detail) == ("OK", "0.32.0")
    assert "not exact: the rollout runs another forward" in rows["precision flow"].detail
    assert "rollout.engine.type=octavo" in rows["precision flow"].next_step
    assert "the rollout's own bytes" not in rows["memory for the run"].detail
    shape, _ = read_config(TINY_MODEL)
    narrow, vllm_row = replace(shape, num_kv_heads=1), partial(run_config.vllm_row, VLLMConfig())
    row = vllm_row(get_recipe("block128"), narrow)
    assert row.status == "FAIL" and "model.layers.0.self_attn.k_proj: 64" in row.detail
    kept = get_recipe("block128", keep_bf16=("lm_head", "embed_tokens", "q_proj", "k_proj", "v_proj"))
    assert {vllm_row(recipe, narrow).status for recipe in (get_recipe("bf16"), kept)} == {"OK"}


def test_vllm_is_split_over_gpus_that_are_there_and_over_whole_heads(tmp_path, monkeypatch):
    monkeypatch.setattr(run_config, "supported_release", lambda: "0.24.0")
    shape, _ = read_config(TINY_MODEL)

    def row(size):
        return run_config.vllm_row(VLLMConfig(tensor_parallel_size=size), get_recipe("bf16"), shape)

    assert row(1).status == row(shape.num_heads).status == "OK", "a CPU has no number of devices"
    assert row(3).status == "FAIL" and f"=3 does not divide the model's {shape.num_heads} heads" in row(3).detail
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = row(2)
    assert found.status == "FAIL" and "=2, and GPUs here: 1" in found.detail
    assert found.next_step == "give 1 or fewer" and row(1).status == "OK"


@pytest.mark.parametrize("missing", [True, False], ids=["missing", "a file"])
def test_weights_on_their_way_to_vllm_need_a_folder(tmp_path, monkeypatch, missing):
    monkeypatch.setattr(run_config, "supported_release", lambda: "0.32.0")
    if not missing:
        (tmp_path / "transfer").write_text("")
    engine = f"rollout.engine={{type: vllm, transfer_dir: {tmp_path / 'transfer'}}}"
    row = check(tmp_path, engine, "precision.allow_mismatch=true")["vLLM"]
    assert row.status == "FAIL" and f"transfer_dir={str(tmp_path / 'transfer')!r} is no folder" in row.detail


PROBLEMS = {
    "unknown key": ("optimizer.lrr=1", "configuration", "FAIL", "Did you mean lr?"),
    "not exact": ("precision.recipe=tensorwise", "precision flow", "WARN", "block128"),
    "no such device": ("device=foo", "device", "FAIL", "foo"),
    "no such model": ("model.path={tmp}/no", "model", "FAIL", "config.json"),
    "positions": ("rollout.max_completion_tokens=300", "model", "FAIL", "256 positions"),
    "two forwards": ("precision.train=bf16", "precision flow", "FAIL", "allow_mismatch=true"),
    "two forwards, allowed": ("precision={train: bf16, allow_mismatch: true}", "precision flow", "WARN", "not exact"),
    "pattern": ("precision.keep_bf16=[gate]", "model", "FAIL", "names no module"),
    "half of a fused weight": ("precision.keep_bf16=[q_proj]", "model", "FAIL", "all of them or none"),
    "no data": ("task={type: gsm8k, path: '{tmp}/data'}", "task", "FAIL", "train.jsonl"),
    "long prompts": ("rollout.max_prompt_tokens=13", "prompts", "FAIL", "max_prompt_tokens=14"),
    "not writable": ("output_dir={repo}/README.md/run", "output_dir", "FAIL", "can be made"),
    "model inside": ("output_dir={repo}/examples/tiny", "output_dir", "FAIL", "another output_dir"),
    "cache too large": ("rollout.engine.kv_cache_tokens=4000000000", "memory for the run", "FAIL", "kv_cache_tokens"),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_a_problem_is_a_row_with_the_next_step(problem, tmp_path):
    override, name, status, text = PROBLEMS[problem]
    row = check(tmp_path, override.replace("{tmp}", str(tmp_path)).replace("{repo}", str(REPO)))[name]
    assert row.status == status and row.next_step
    assert text in f"{row.detail} {row.next_step}"


def test_an_earlier_run_and_a_foreign_model_are_seen(tmp_path):
    (tmp_path / "run/model").mkdir(parents=True)
    assert "not left by a run" in check(tmp_path, "overwrite=false")["output_dir"].detail
    (tmp_path / "run/metrics.jsonl").write_text("")
    assert "earlier run" in check(tmp_path, "overwrite=false")["output_dir"].detail
    assert check(tmp_path, "overwrite=true")["output_dir"].status == "OK"


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_damaged_weights_are_seen_without_reading_them(damage, tmp_path):
    shutil.copytree(TINY_MODEL, tmp_path / "model")
    weights = tmp_path / "model/model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:100_000])
    else:
        weights.unlink()
    row = check(tmp_path, f"model.path={tmp_path / 'model'}")["model"]
    assert row.status == "FAIL" and "safetensors" in row.next_step


def test_little_memory_and_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(run_config, "memory_bytes", lambda: (65 * 10**6, 10**9))
    assert check(tmp_path)["memory for the run"].status == "WARN"
    monkeypatch.setattr("octavo.trainer.output.shutil.disk_usage", lambda path: type("Usage", (), {"free": 10**6}))
    assert check(tmp_path)["disk"].status == "FAIL"


@pytest.mark.parametrize("free, status", [(2**31, "OK"), (10**6, "FAIL")])
def test_moments_on_the_host_are_held_against_its_memory(free, status, tmp_path, monkeypatch):
    monkeypatch.setattr(run_config, "prepare_device", lambda config: None)
    monkeypatch.setattr(run_config, "free_bytes", lambda device: 2**31)
    monkeypatch.setattr(run_config, "back_end_rows", lambda *_: iter(()))
    for module in (run_config, host_memory):
        monkeypatch.setattr(module, "memory_bytes", lambda: (free, 2**40))
    assert "pinned memory" not in check(tmp_path, "device=cuda")
    rows = check(tmp_path, "device=cuda", "optimizer.offload_moments=true")
    row = rows["pinned memory"]
    assert row.status == status and "AdamW" in row.detail and str(free) * (status == "FAIL") in row.detail
    assert "pinned in the host's memory: AdamW" in rows["memory for the run"].detail


@pytest.mark.parametrize("free, status", [(2**31, "OK"), (10**9, "FAIL")])
def test_a_memory_plan_is_held_against_the_card(free, status, tmp_path, monkeypatch):
    monkeypatch.setattr(run_config, "prepare_device", lambda config: None)
    monkeypatch.setattr(run_config, "free_bytes", lambda device: free)
    monkeypatch.setattr(run_config, "back_end_rows", lambda *_: iter(()))
    row = check(tmp_path, "device=cuda")["memory for the run"]
    assert row.status == status and f"of {binary_size(free)} free; memory plan: " in row.detail
    assert "FP32 masters 6.9 MiB" in row.detail and "in rollout also prefill" in row.detail
    assert status == "OK" or "rollout.engine.max_sequences=16 saves" in row.next_step


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["octavo", "check", *map(str, arguments)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code or 0


@pytest.fixture
def quick(monkeypatch):
    """The command without its self-tests, which have tests of their own."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(runner, "exactness_rows", lambda device: iter(()))


@pytest.mark.parametrize("override, code", [("seed=1", 0), ("device=foo", 2)])
def test_the_exit_code_says_whether_something_fails(override, code, quick, monkeypatch, capsys, tmp_path):
    arguments = (DEMO, f"model.path={TINY_MODEL}", f"output_dir={tmp_path / 'run'}", override)
    assert run(monkeypatch, *arguments) == code
    out = capsys.readouterr().out
    assert "numbers on cpu" in out and "OK    E4M3 cast" in out and f"{1 if code else 0} FAIL" in out
    assert ("FAIL  device" in out) == ("-> set device=cpu" in out) == (code == 2)


def test_json_holds_the_rows(quick, monkeypatch, capsys):
    assert run(monkeypatch, "--json") == 0
    rows = [Row(**row) for row in json.loads(capsys.readouterr().out)]
    assert {row.group for row in rows} == {"machine", "packages", "environment", "numbers on cpu"}


def test_a_row_that_warns_must_say_what_to_do():
    with pytest.raises(AssertionError, match="without a next step"):
        Row(group="machine", name="x", status="WARN", detail="odd")


def test_a_model_is_held_to_what_training_reads(tmp_path):
    model, change = tmp_path / "model", f"model.path={tmp_path / 'model'}"
    shutil.copytree(TINY_MODEL, model)
    (model / "consolidated.safetensors").write_bytes(b"")
    row = check(tmp_path, change)["model"]
    assert row.status == "OK" and row.detail.endswith("of safetensors; left aside: consolidated.safetensors")
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"x": "model-1-of-2.safetensors"}}')
    row = check(tmp_path, change)["model"]
    assert row.status == "FAIL" and "model-1-of-2.safetensors" in row.detail
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": 5}))
    row = check(tmp_path, change)["prompts"]
    assert row.status == "FAIL" and "vocabulary is 0 to 4" in row.detail


def test_a_gpu_that_the_kernels_are_not_for_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(training_run, "use_device", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    rows = check(tmp_path, "device=cuda")  # and nothing is launched there
    assert rows["device"].status == "FAIL" and "NVIDIA A100 has 8.0" in rows["device"].detail


@pytest.mark.parametrize("capability, by_kernels", [((8, 9), False), ((9, 0), True)])
def test_the_numbers_of_a_gpu_are_those_of_what_would_run_there(capability, by_kernels, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    for rows in ("machine_rows", "package_rows", "environment_rows"):
        monkeypatch.setattr(runner, rows, lambda: [])
    monkeypatch.setattr(runner, "number_rows", lambda device: [])
    seen = SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(runner, "exactness_rows", lambda device: [(device, runs_kernels(seen))])
    try:
        assert list(runner.check_rows(None, [])) == [("cpu", True), ("cuda", by_kernels)]
    finally:
        choose_kernels("by_device")


def test_what_the_system_refuses_is_a_row(tmp_path):
    rows = check(tmp_path, f"output_dir={'x' * 300}")
    assert rows["output_dir"].status == "FAIL" and rows["output_dir"].detail.endswith(": File name too long")
    assert rows["memory for the run"].status == "OK"


@pytest.mark.parametrize(
    "allowed, why, status", [(False, None, "OK"), (False, "no namespaces", "FAIL"), (True, "no namespaces", "WARN")]
)
def test_programs_want_a_sandbox(allowed, why, status, tmp_path):
    config = tiny_config(tmp_path / "run", verifier={"allow_unisolated": allowed})
    row = sandbox_row(config, why)
    assert row.status == status and (why is None or why in row.detail)
