"""A run that does not fit its device: what is said, and whether following it helps."""

import re

import pytest
import torch
import yaml
from training_runs import TINY_MODEL, tiny_config, train_quietly
from transformers import Qwen3Config

from octavo import cli
from octavo.trainer import host_memory, memory_advice, train
from octavo.trainer import run as training_run
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import load_config
from octavo.trainer.memory import GIB, binary_size, planner
from octavo.trainer.memory_advice import changes_that_fit, check_room, options, planned, with_changes

LARGE = {
    "kl": "algorithm={kl: {coefficient: 1e-3}}",
    "ema": "calibration={reference: ema}",
    "bf16": "watch={action: bf16_forward}",
    "activations": "precision={saved_activations: bf16}",
    "lent": "rollout={engine: {kv_cache_tokens: 400000}}",
    "cache": "rollout={engine: {kv_cache_tokens: 400000, max_prefill_tokens: 65536}, prompts_per_step: 64}",
}
"""Configurations of which each takes more for something of its own."""


@pytest.fixture
def config_file(tmp_path):
    """A run of a model with the widths of Qwen3-0.6B and four layers; only its config.json is there."""
    Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=40960,
    ).save_pretrained(tmp_path / "model")
    settings = {
        "output_dir": str(tmp_path / "run"),
        "device": "cuda",
        "model": {"path": str(tmp_path / "model")},
        "task": {"type": "arithmetic"},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    return tmp_path / "run.yaml"


def refusal(config, free):
    with pytest.raises(ValueError, match="needs") as caught:
        check_room(config, free, planner(config))
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("large", LARGE)
def test_a_run_that_follows_the_advice_fits(large, config_file):
    config = load_config(TrainConfig, config_file, [LARGE[large]])
    plan_of = planner(config)
    needed = plan_of(config).needed_bytes
    check_room(config, needed, plan_of)  # what fits is not refused
    _, least = changes_that_fit(config, 0, plan_of)
    assert 4 * GIB < least < needed
    for free in (needed - 1, least):
        message = refusal(config, free)
        overrides = re.search(r"It fits with ([^ ]+=[^ ]+(?: [^ ]+=[^ ]+)*)\. ", message)[1].split()
        followed = load_config(TrainConfig, config_file, [LARGE[large], *overrides])
        assert plan_of(followed).needed_bytes <= free, message
        for override in overrides:
            rest = [each for each in overrides if each != override]
            without = load_config(TrainConfig, config_file, [LARGE[large], *rest])
            assert plan_of(without).needed_bytes > free, f"{override} is not needed"


@pytest.mark.parametrize("large", LARGE)
def test_each_key_saves_what_is_said(large, config_file):
    config = load_config(TrainConfig, config_file, [LARGE[large]])
    plan_of = planner(config)
    needed = plan_of(config).needed_bytes
    savings = re.findall(r"([^ ]+=[^ ]+) saves ([\d.]+ [GM]iB)", refusal(config, 0))
    assert len(savings) >= 3
    for override, size in savings:
        changed = load_config(TrainConfig, config_file, [LARGE[large], override])
        assert binary_size(needed - plan_of(changed).needed_bytes) == size, override
    keys = {"kl": "algorithm.kl", "ema": "calibration.reference", "bf16": "watch.action", "cache": "rollout.engine.kv"}
    keys["lent"] = "rollout.engine.lend_memory=true"
    assert any(override.startswith(keys.get(large, "precision.saved")) for override, _ in savings)


def test_where_nothing_helps_the_least_is_said(config_file):
    config = load_config(TrainConfig, config_file)
    message = refusal(config, 4 * GIB)
    _, least = changes_that_fit(config, 0, planner(config))
    assert f"at the least it needs {least / GIB:.2f} GiB. Take a smaller model" in message
    assert "in update (" in message and "AdamW 1.63 GiB" in message


def test_advice_never_leads_to_a_config_that_is_refused(tmp_path):
    config = tiny_config(tmp_path, rollout__max_completion_tokens=1500, rollout__engine={"kv_cache_tokens": 3100})
    found = {key: values for key, values in options(config) for value in values if with_changes(config, {key: value})}
    assert found["rollout.engine.kv_cache_tokens"] == [1550], "775 would hold no whole sequence"
    assert found["trainer.microbatch_tokens"] == [4096, 2048]
    assert "rollout.engine.lend_memory" not in found, "on a CPU"
    done = with_changes(config, {"trainer.microbatch_tokens": 2048, "trainer.recompute_layers": True})
    assert not {"trainer.microbatch_tokens", "trainer.recompute_layers"} & dict(options(done)).keys()


def test_moments_are_advised_onto_a_host_that_has_room(config_file, monkeypatch):
    config = load_config(TrainConfig, config_file, ["trainer.num_mini_batches=1", "calibration=null"])
    needs, key = planner(config)(config).estimate.parts["AdamW"], "optimizer.offload_moments=true"
    moved = load_config(TrainConfig, config_file, [key])
    monkeypatch.setattr(memory_advice, "prepare_device", lambda config: None)
    monkeypatch.setattr(memory_advice, "free_bytes", lambda device: 100 * GIB)
    for free in (needs, needs - 1):
        for module in (memory_advice, host_memory):
            monkeypatch.setattr(module, "memory_bytes", lambda free=free: (free, 2**40))
        message = refusal(config, 4 * GIB)
        if free == needs:
            assert f"{key} saves 1.71 GiB" in message and planned(moved).host == {"AdamW": needs}
    assert key not in message
    with pytest.raises(ValueError, match=rf"offload_moments=true needs {needs} bytes of the host's memory \(AdamW"):
        planned(moved)


def test_training_stops_before_anything_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(memory_advice, "prepare_device", lambda config: None)
    monkeypatch.setattr(memory_advice, "free_bytes", lambda device: 10**8)
    monkeypatch.setattr(train, "load_run", None)  # a call would be a TypeError
    with pytest.raises(ValueError, match=r"needs 1.\d\d GiB of device='cuda', where 95.4 MiB are free: "):
        train_quietly(tiny_config(tmp_path / "run", device="cuda"), tmp_path / "log")
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_the_command_says_so_in_one_line(config_file, monkeypatch, capsys):
    monkeypatch.setattr(memory_advice, "prepare_device", lambda config: None)
    monkeypatch.setattr(memory_advice, "free_bytes", lambda device: 8 * GIB)
    monkeypatch.setattr("sys.argv", ["octavo", "train", str(config_file), f"model.path={config_file.parent / 'model'}"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    line = capsys.readouterr().err.strip()
    assert (
        stop.value.code == 2
        and line.startswith("octavo: the run needs 10.18 GiB of device='cuda', where 8.00 GiB are free: 8.60 GiB")
        and "\n" not in line
    )
    assert "It fits with trainer.recompute_layers=true. Alone, trainer.recompute_layers=true saves 3." in line


def test_what_the_allocator_keeps_for_itself_is_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    assert memory_advice.free_bytes("cuda") == 140


def test_the_tiny_model_is_planned_from_its_config_alone(tmp_path):
    config = tiny_config(tmp_path / "run", device="cuda")
    assert config.model.path == str(TINY_MODEL) and 0 < planner(config)(config).peak[1] < GIB


def test_vllms_share_is_what_can_be_lowered(config_file, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (140 * GIB, 140 * GIB))
    overrides = ["precision.allow_mismatch=true", "rollout.engine=vllm"]
    config = load_config(TrainConfig, config_file, overrides)
    message = refusal(config, 60 * GIB)
    assert "rollout.engine.gpu_memory_utilization=0.3 saves 14.70 GiB" in message  # of 56, and what fragments
    changes, needed = changes_that_fit(config, 60 * GIB, planner(config))
    assert changes == {"rollout.engine.gpu_memory_utilization": 0.3} and needed <= 60 * GIB


@pytest.mark.parametrize("share, lower", [(0.0016, [0.001]), (0.001, []), (0.0001, [])])
def test_a_share_is_lowered_to_no_less_than_a_thousandth(share, lower, config_file):
    overrides = ["precision.allow_mismatch=true", "rollout.engine=vllm"]
    config = load_config(TrainConfig, config_file, [*overrides, f"rollout.engine.gpu_memory_utilization={share}"])
    found = dict(options(config)).get("rollout.engine.gpu_memory_utilization", [])
    assert list(dict.fromkeys(found)) == lower
    refusal(config, 0)  # every option makes a config


def test_a_gpu_without_the_kernels_is_refused_before_a_plan_is_made(config_file, monkeypatch):
    monkeypatch.setattr(training_run, "use_device", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    monkeypatch.setattr(memory_advice, "planner", None)  # a call would be a TypeError
    with pytest.raises(ValueError, match="NVIDIA L4 has 8.9. Use kernels=reference"):
        memory_advice.planned(load_config(TrainConfig, config_file))
