"""The engine's ways to fail, with a stand-in for vLLM: what real runs do is in tests/verl."""

import os
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
from training_runs import tiny_config

from octavo.plugins.vllm import VLLMEngine, engine
from octavo.plugins.vllm.engine import layers_line
from octavo.plugins.vllm.transfer_folder import PREFIX, TransferFolder
from octavo.rollout.sampler import SamplingConfig
from octavo.trainer import run as run_module
from octavo.trainer.evaluation import run_evaluation
from octavo.trainer.interrupt import StopRequested
from octavo.trainer.metrics import Display
from octavo.trainer.run import load_run

PROMPT = [5, 9, 7]


class StandIn:
    """Has the calls of vllm.LLM that the engine makes; `outputs` are what a step gives."""

    def __init__(self, **settings):
        self.settings, self.outputs, self.dropped, self.loaded, self.num_running = settings, [], [], [], 0
        core = SimpleNamespace(shutdown=lambda: None)
        self.llm_engine = SimpleNamespace(
            engine_core=core,
            step=self.step,
            has_unfinished_requests=lambda: self.num_running > 0,
            abort_request=lambda names, internal: self.dropped.extend(names),
        )

    def collective_rpc(self, method, args=()):
        if method == "octavo_reload":
            self.loaded.append(args[0])
            return [None]
        parts = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
        return [{f"model.layers.{i}.{part}": (True, "BlockKernel") for i in range(3) for part in parts}]

    def enqueue(self, prompts, params, use_tqdm):
        self.params, self.num_running = params, len(prompts)
        return [f"{index}-0a1b2c3d" for index in range(len(prompts))]

    def step(self):
        if isinstance(self.outputs, Exception):
            raise self.outputs
        self.num_running -= max(1, len(self.outputs))
        return self.outputs

    def reset_prefix_cache(self):
        return True


def output(tokens=(3, 0), logprobs=(-0.5, -0.25), finish_reason="stop", name="0"):
    rows = [{token: SimpleNamespace(logprob=logprob)} for token, logprob in zip(tokens, logprobs, strict=True)]
    found = SimpleNamespace(token_ids=list(tokens), logprobs=rows, finish_reason=finish_reason)
    return SimpleNamespace(request_id=name, prompt_token_ids=PROMPT, outputs=[found], finished=True)


@pytest.fixture
def vllm(monkeypatch):
    """The module, whose LLM is the stand-in."""
    module, utils, deep_gemm = (ModuleType(name) for name in ("vllm", "vllm.utils", "vllm.utils.deep_gemm"))
    module.__version__, module.LLM, module.SamplingParams = "0.32.0", StandIn, SimpleNamespace
    deep_gemm.is_deep_gemm_e8m0_used = lambda: False
    for each in (module, utils, deep_gemm):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.setattr("os.environ", dict(os.environ))  # which the engine changes
    return module


def config_of(tmp_path, **engine):
    return tiny_config(
        tmp_path / "run",
        precision={"kv_cache": "bf16", "allow_mismatch": True},
        rollout__engine={"type": "vllm", "transfer_dir": str(tmp_path), **engine},
        calibration=None,
    )


@pytest.fixture
def run(vllm, tmp_path):
    loaded = load_run(config_of(tmp_path), Display(), VLLMEngine)
    yield loaded
    loaded.verifiers.close()


def sample(run, sampling=SamplingConfig(), **settings):  # noqa: B008
    return run.engine.generate([PROMPT], sampling, max_completion_tokens=4, **settings)


def test_a_finished_request_is_a_completion(run):
    llm = run.engine.receiver.llm
    llm.outputs = [output(name="1", finish_reason="length"), output()]
    ((first, second),) = sample(run, SamplingConfig(temperature=0.7), group_size=2, seed=3)
    assert (first.prompt, first.tokens, first.rollout_logprobs) == (PROMPT, [3, 0], [-0.5, -0.25])
    assert (first.finish_reason, second.finish_reason) == ("stop", "length")
    one, other = llm.params
    assert one.seed != other.seed and all(0 <= each.seed < 2**63 for each in llm.params)
    assert (one.temperature, one.max_tokens, one.stop_token_ids, one.ignore_eos) == (0.7, 4, [0], True)
    assert llm.settings["kv_cache_dtype"] == "auto" and llm.settings["logprobs_mode"] == "processed_logprobs"


@pytest.mark.parametrize(
    "outputs, message",
    [
        ([], "vLLM gave 0 of 2 completions and says it has no more"),
        (RuntimeError("CUDA out of\nmemory."), "vLLM fails while it samples: CUDA out of memory. --resume goes on"),
        ([output(finish_reason="abort")], "vLLM ended a completion for the reason 'abort'"),
        ([output(logprobs=(-0.5, float("nan")))], "the logits of sequence 0 at position 4 are not finite"),
    ],
)
def test_a_failure_is_one_line_and_drops_what_runs(run, outputs, message):
    llm = run.engine.receiver.llm
    llm.outputs = outputs
    with pytest.raises(ValueError, match=message):
        sample(run, group_size=2)
    assert llm.dropped == ([] if outputs == [] else ["0-0a1b2c3d", "1-0a1b2c3d"])


def test_a_stop_that_ends_vllm_too_is_a_stop(run):
    def stop(num_finished):
        raise StopRequested

    run.engine.receiver.llm.outputs = RuntimeError("worker died")
    with pytest.raises(StopRequested):
        sample(run, progress=stop)


def test_weights_cross_when_their_version_changes_and_the_one_before_goes(run):
    llm = run.engine.receiver.llm
    llm.outputs = [output()]
    sample(run)
    assert llm.loaded == []
    run.policy.requantize_(4)
    for _ in range(2):
        sample(run)
    assert [path.rpartition("/")[2] for path in llm.loaded] == ["policy_4"]
    assert [path.name for path in run.engine._folder.path.glob("policy_*")] == ["policy_4"]


def test_a_broken_transfer_names_what_is_served(run, monkeypatch):
    def damaged(decoder, folder, **settings):
        publish(decoder, folder, **settings)
        next(folder.glob("*.safetensors")).write_bytes(b"")

    publish = engine.publish
    monkeypatch.setattr(engine, "publish", damaged)
    run.policy.requantize_(2)
    with pytest.raises(
        ValueError, match="changed or vanished.*No rollout of policy_version 2 is sampled; vLLM serves 0"
    ):
        sample(run)
    assert run.engine.receiver.llm.loaded == [] and run.engine.receiver.policy_version == 0


def test_a_vllm_that_fails_on_both_versions_serves_none(run, monkeypatch):
    def fail(method, args):
        raise RuntimeError(f"no room for {args[0].rpartition('/')[2]}.")

    monkeypatch.setattr(run.engine.receiver.llm, "collective_rpc", fail)
    run.policy.requantize_(2)
    both = "no room for policy_2; and on policy_version 0: no room for policy_0. Start it again.*vLLM serves None"
    with pytest.raises(ValueError, match=both):
        sample(run)


def test_a_cache_that_cannot_be_emptied_is_a_failure(run, monkeypatch):
    monkeypatch.setattr(run.engine.receiver.llm, "reset_prefix_cache", lambda: len(run.engine.receiver.llm.loaded) > 1)
    run.policy.requantize_(2)
    with pytest.raises(ValueError, match="its prefix cache could not be emptied.*It serves policy_version 0 again"):
        sample(run)


def test_a_full_disk_is_named(run, monkeypatch):
    def full(*arguments, **settings):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(engine, "publish", full)
    run.policy.requantize_(2)
    with pytest.raises(ValueError, match="rollout.engine.transfer_dir=.*No space left on device. Make room for two"):
        sample(run)


def test_room_for_the_next_version_is_wanted_at_once(vllm, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match="has 0.00 GB free beside the first version of the weights"):
        load_run(config_of(tmp_path), Display(), VLLMEngine)
    assert not list(tmp_path.glob(f"*{PREFIX}*"))


def test_vllm_that_does_not_start_is_one_line(vllm, tmp_path, monkeypatch):
    def refuse(**settings):
        raise KeyError("no\nkernel.")

    monkeypatch.setattr(vllm, "LLM", refuse)
    with pytest.raises(ValueError, match="vLLM does not start: KeyError: .*kernel.*Its settings are below"):
        load_run(config_of(tmp_path), Display(), VLLMEngine)


def test_the_trainer_alone_does_not_start_vllm(tmp_path):
    with pytest.raises(ValueError, match="is a plug-in, which the octavo command hands in. Call train"):
        load_run(config_of(tmp_path), Display())


def test_a_comparison_of_precisions_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(run_module, "load_decoder", lambda *a, **k: pytest.fail("weights were loaded"))
    with pytest.raises(ValueError, match="--compare bf16 runs octavo's own engine"):
        run_evaluation(config_of(tmp_path), None, "bf16", VLLMEngine)


def test_layers_are_held_to_the_declaration(run):
    (found,) = run.engine.receiver.layers
    assert layers_line(run.policy, [found, found]) == "12 of 12 linear layers in FP8, 12 by BlockKernel"
    name = "model.layers.1.mlp.down_proj"
    for layer, text in {
        (False, "UnquantizedLinearMethod"): "by UnquantizedLinearMethod in BF16",
        (True, "MarlinFP8ScaledMMLinearKernel"): "by MarlinFP8ScaledMMLinearKernel in FP8",
    }.items():
        with pytest.raises(
            ValueError, match=f"vLLM runs {name} {text}, and the rollout's recipe says E4M3 weights and"
        ):
            layers_line(run.policy, [found, found | {name: layer}])
    run.policy.recipe = replace(run.policy.recipe, scale_rounding="power_of_two")
    assert layers_line(run.policy, [found]).endswith("only DeepGEMM rounds them")


def test_folders_that_nobody_holds_are_removed(tmp_path):
    held = TransferFolder(str(tmp_path))
    left = tmp_path / f"{PREFIX}left"
    left.mkdir()
    (left / "lock").touch()
    (left / "model.safetensors").write_bytes(b"weights of a process that was killed")
    other = TransferFolder(str(tmp_path))
    assert held.path.is_dir() and other.path.is_dir() and not left.exists()
    path = other.path
    del other
    assert not path.exists() and held.path.is_dir()


@pytest.mark.parametrize("parent", ["missing", "file"])
def test_a_folder_that_cannot_be_written_is_named(parent, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"rollout.engine.transfer_dir=.*{parent}.*cannot take the weights"):
        TransferFolder(str(tmp_path / parent))
