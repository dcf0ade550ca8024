"""`octavo bench gemm`: what it says, and when it refuses."""

import json

import pytest
import torch
from typer.testing import CliRunner

from octavo.bench import gemm, measure
from octavo.bench.gemm import Gain, bench_gemm, linears_of, verdict
from octavo.cli import app
from octavo.models.config import read_config
from octavo.numerics.recipe import get_recipe

MODEL = "examples/tiny/model"


def gain(linear, work, tokens, bf16_us, recipe_us):
    return Gain(linear=linear, work=work, tokens=tokens, bf16_us=bf16_us, recipe_us=recipe_us, kernels=("a", "b"))


def test_the_linears_are_those_of_the_model():
    config = read_config(MODEL)[0]
    linears = linears_of(config)
    heads = config.num_heads * config.head_dim
    assert linears["down_proj"] == (config.intermediate_size, {"down_proj": config.hidden_size})
    assert linears["o_proj"] == (heads, {"o_proj": config.hidden_size})
    assert list(linears["gate_up_proj"][1].values()) == [config.intermediate_size] * 2
    assert sum(linears["qkv_proj"][1].values()) == heads + 2 * config.num_kv_heads * config.head_dim


def test_the_verdict_weighs_by_time_and_says_where_fp8_does_not_help():
    gains = [
        gain("qkv_proj", "train", 8192, 100.0, 50.0),
        gain("o_proj", "train", 8192, 20.0, 25.0),
        gain("qkv_proj", "decode", 64, 10.0, 10.5),
    ]
    assert gains[0].speedup == 2.0
    assert verdict(gains) == [
        "training with 8,192 tokens: 1.60x BF16 over the four linears; slower in o_proj",
        "decoding with 64 tokens: FP8 will not help here, 0.95x BF16 over the four linears",
    ]


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="octavo bench gemm measures a CUDA device, and torch sees none here"):
        next(bench_gemm(read_config(MODEL)[0], get_recipe("block128"), 128, [1]))


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


@pytest.mark.parametrize("recipe", ["bf16", "fp32"])
def test_a_recipe_without_fp8_is_no_comparison(hopper, recipe):
    with pytest.raises(ValueError, match=f"recipe '{recipe}' has no FP8 to compare with BF16"):
        next(bench_gemm(read_config(MODEL)[0], get_recipe(recipe), 128, [1]))


def test_a_gpu_that_the_kernels_are_not_for_is_refused(hopper, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    with pytest.raises(ValueError, match="for Hopper GPUs .* NVIDIA A100 has 8.0"):
        next(bench_gemm(read_config(MODEL)[0], get_recipe("block128"), 128, [1]))


def test_a_recipe_without_a_backward_does_not_train(hopper):
    with pytest.raises(ValueError, match="recipe 'fp8_channel' has no backward; ask for --train-tokens 0"):
        next(bench_gemm(read_config(MODEL)[0], get_recipe("fp8_channel"), 128, [1]))


def test_the_command_prints_gains_verdict_and_kernels(monkeypatch):
    monkeypatch.setattr(gemm, "bench_gemm", lambda *_: iter([gain("qkv_proj", "train", 8192, 100.0, 50.0)]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    shown = CliRunner().invoke(app, ["bench", "gemm", "--model", MODEL])
    assert shown.exit_code == 0, shown.output
    for text in ("qkv_proj", "2.00x", "training with 8,192 tokens: 2.00x BF16", "train: a, b"):
        assert text in shown.output
    (row,) = json.loads(CliRunner().invoke(app, ["bench", "gemm", "--model", MODEL, "--json"]).output)
    assert row["speedup"] == 2.0 and row["kernels"] == ["a", "b"]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["block128", "w8a16", "rowwise"])
def test_it_measures_and_names_the_kernels(recipe):
    gains = list(bench_gemm(read_config(MODEL)[0], get_recipe(recipe), 256, [4]))
    assert [(g.linear, g.work) for g in gains[:2]] == [("qkv_proj", "train"), ("qkv_proj", "decode")]
    assert len(gains) == 8 and all(g.bf16_us > 0.5 and g.recipe_us > 0.5 for g in gains)
    assert "_decode_kernel" in gains[1].kernels, gains[1].kernels
    casts = {"block128": "rows_kernel", "rowwise": "rows_kernel", "w8a16": "_decode_kernel"}
    assert set(gains[1].kernels) <= {"_decode_kernel", casts[recipe]}, "nothing of the host's, nothing unaccounted for"


@pytest.mark.gpu
def test_times_are_of_the_device():
    x = torch.randn(4096, 4096, device="cuda")
    assert 0.02 < measure.milliseconds(lambda: x @ x) < 10.0
    assert 1.0 < measure.microseconds_each([lambda: x.add_(1.0)] * 4) < 500.0
    assert measure.copy_speed() > 1000.0
    assert any("gemm" in name.lower() or "nvjet" in name for name in measure.kernel_names(lambda: x @ x))
