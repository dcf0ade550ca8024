"""What a configuration says of vLLM as the engine, and what it does not go with."""

import sys
from types import SimpleNamespace

import pytest
from training_runs import TINY_MODEL, tiny_config

from octavo.numerics.recipe import get_recipe
from octavo.rollout.engine import EngineConfig
from octavo.rollout.sampler import SamplingConfig
from octavo.rollout.vllm_config import VLLMConfig, check_vllm_runs, supported_release
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import from_dict, load_config, to_dict

ALLOWED = {"precision__allow_mismatch": True, "rollout__engine": "vllm"}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be at least 1; got 0"),
        ({"gpu_memory_utilization": 0.0}, r"gpu_memory_utilization is a share, in \(0, 1\]; got 0.0"),
        ({"gpu_memory_utilization": 1.5}, "got 1.5"),
        ({"max_prefill_tokens": 8}, "max_prefill_tokens=8 is less than max_sequences=256"),
        ({"transfer_dir": ""}, "transfer_dir is empty"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        VLLMConfig(**changes)


@pytest.mark.parametrize("recipe", ["w8a16", "rowwise", "tensorwise", "tensorwise_static", "fp32", "fp8_channel"])
def test_recipes_that_vllm_does_not_run_are_refused(recipe):
    with pytest.raises(ValueError, match=f"vLLM runs the recipes block128 and bf16; the rollout's is '{recipe}'"):
        check_vllm_runs(get_recipe(recipe), SamplingConfig())


def test_a_temperature_that_vllm_would_raise_is_refused():
    for temperature in (0.0, 0.01, 1.0):
        check_vllm_runs(get_recipe("bf16"), SamplingConfig(temperature=temperature))
    with pytest.raises(ValueError, match="vLLM raises a temperature of 0.009 to 0.01"):
        check_vllm_runs(get_recipe("bf16"), SamplingConfig(temperature=0.009))


def test_a_name_alone_stands_for_the_engine(tmp_path):
    assert tiny_config(tmp_path, **ALLOWED).rollout.engine == VLLMConfig()
    assert tiny_config(tmp_path, rollout__engine="octavo").rollout.engine == EngineConfig()
    file = tmp_path / "run.yaml"
    file.write_text(
        f"output_dir: runs/x\nmodel: {{path: {TINY_MODEL}}}\ntask: {{type: arithmetic}}\n"
        f"precision: {{allow_mismatch: true}}\nrollout: {{engine: vllm}}\n"
    )
    config = load_config(TrainConfig, file, ["rollout.engine.tensor_parallel_size=2"])
    assert config.rollout.engine == VLLMConfig(tensor_parallel_size=2)
    assert to_dict(config)["rollout"]["engine"]["type"] == "vllm"
    assert from_dict(TrainConfig, to_dict(config), "saved") == config


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"precision__allow_mismatch": False}, "trainer.require_exact cannot hold. Set precision.allow_mismatch=true"),
        ({"precision__recipe": "w8a16"}, "vLLM runs the recipes block128 and bf16"),
        ({"evaluation__sampling": {"temperature": 0.001}}, "vLLM raises a temperature of 0.001"),
        ({"device": "cuda:1"}, "takes GPUs from the first one on, and device='cuda:1' is another"),
        ({"watch": {"action": "bf16_forward"}}, "watch.action=bf16_forward samples with octavo's own engine"),
        ({"rollout__engine": {"type": "vllm", "transfer_dir": "~/x"}}, "rollout.engine.transfer_dir='~/x' would be"),
        ({"rollout__engine": {"type": "vllm", "page_size": 4}}, "page_size: unknown key"),
    ],
)
def test_what_vllm_does_not_go_with_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        tiny_config(tmp_path, **(ALLOWED | changes))


def test_training_may_run_another_recipe_than_vllm(tmp_path):
    precision = {"recipe": "w8a16", "rollout": "block128", "allow_mismatch": True}
    config = tiny_config(tmp_path, precision=precision, rollout__engine="vllm")
    assert config.precision.rollout_recipe().name == "block128"


def test_a_missing_or_unknown_vllm_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match=r"vLLM cannot be imported .*pip install 'octavo\[vllm\]'"):
        supported_release()
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.33.1"))
    with pytest.raises(ValueError, match=r"vLLM 0.33.1 is not supported.*0.24.x, 0.32.x"):
        supported_release()
