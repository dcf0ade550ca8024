"""benchmarks/vllm_rollout.py with a vLLM that only counts; `--tiny` runs it with a real one."""

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import rollout
import vllm_rollout
from rollout import PROTOCOLS, SHAPES
from vllm_rollout import PRECISIONS

from octavo.bench.results import Row, read_results
from octavo.models.config import FP8_FORMAT, read_config


def test_the_folder_is_a_config_in_blocks_that_both_read(tmp_path):
    vllm_rollout.write_model(tmp_path, SHAPES["qwen3-8b"], in_fp8=True)
    config, hf_config = read_config(tmp_path)
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (36, 4096, 151936)
    assert hf_config.architectures == ["Qwen3ForCausalLM"]
    assert hf_config.quantization_config["weight_block_size"] == FP8_FORMAT["weight_block_size"]
    vllm_rollout.write_model(tmp_path, SHAPES["qwen3-8b"], in_fp8=False)
    assert getattr(read_config(tmp_path)[1], "quantization_config", None) is None


class FakeLLM:
    """Gives as many tokens as it is asked for; what it was asked for is noted."""

    def __init__(self, **options):
        self.options, self.calls = options, []
        made.append(self)

    def generate(self, prompts, params, use_tqdm):
        self.calls.append((len(prompts), len(prompts[0]["prompt_token_ids"]), params["max_tokens"]))
        tokens = [1] * (params["max_tokens"] - short)
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=tokens, logprobs=tokens)]) for _ in prompts]


made, short = [], 0


@pytest.fixture
def fake(monkeypatch, tmp_path):
    made.clear()
    module = SimpleNamespace(LLM=FakeLLM, SamplingParams=dict, __version__="0.24.0", __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setattr(vllm_rollout.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("octavo.bench.results._device", lambda: "a GPU")
    monkeypatch.setenv("OUT", str(tmp_path))
    for name in vllm_rollout.ENVIRONMENT:
        monkeypatch.setenv(name, "")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["vllm_rollout.py", *arguments])
        vllm_rollout.main()

    return run


def test_the_protocols_are_those_of_rollout(fake, tmp_path):
    fake("--precision", "block128+kv8", "--engine", "vllm")
    (llm,) = made
    assert llm.calls[:2] == [(256, 512, 40), (256, 512, 1024)], "the same prompts before, which compile"
    assert llm.calls[2:] == [(128, 4096, 40), (128, 4096, 1), (128, 4096, 512)]
    assert llm.options["kv_cache_dtype"] == "fp8" and not llm.options["enforce_eager"]
    assert 128 in llm.options["compilation_config"]["cudagraph_capture_sizes"], "a graph of the batch itself"
    rows = read_results(tmp_path / "vllm_rollout.json")
    assert list(rows) == [f"{protocol}/qwen3-8b/block128+kv8/vllm tok_s" for protocol in ("A", "B1", "B2")]
    assert all(row.note.startswith("vLLM 0.24.0, up in ") for row in rows.values())
    fake("A", "--precision", "block128+kv8", "--engine", "vllm")
    assert len(made) == 1, "it is there already"


def test_octavo_runs_the_same_protocols_into_the_same_file(fake, tmp_path, monkeypatch):
    asked = []

    def protocol(name):
        def measure(decoder):
            yield Row(case=f"{name}/qwen3-8b/bf16", metric="tok_s", value=12.0, unit="tok/s")

        def cases(precision, copy_gb_s):
            asked.append((name, precision, copy_gb_s))
            return {f"{name}/qwen3-8b/bf16": measure}

        return replace(PROTOCOLS[name], cases=cases)

    monkeypatch.setattr(vllm_rollout, "copy_speed", lambda: 4.0)
    monkeypatch.setattr(rollout, "random_decoder", lambda *args, **kwargs: None)
    monkeypatch.setattr(vllm_rollout, "PROTOCOLS", {name: protocol(name) for name in ("A", "B")})
    for _ in range(2):
        fake("--precision", "bf16", "--engine", "octavo")
    fake("A", "--precision", "bf16", "--engine", "vllm")
    assert asked == 2 * [("A", "bf16", 4.0), ("B", "bf16", 4.0)]
    rows = read_results(tmp_path / "vllm_rollout.json")
    assert list(rows) == [
        f"{case} tok_s" for case in ("A/qwen3-8b/bf16/octavo", "B/qwen3-8b/bf16/octavo", "A/qwen3-8b/bf16/vllm")
    ]


def test_every_precision_and_engine_has_a_process(fake, monkeypatch):
    commands = []
    monkeypatch.setattr(vllm_rollout.subprocess, "run", lambda command, check: commands.append((command[2:], check)))
    fake("B")
    fake("A", "--precision", "bf16")
    wanted = [["B", "--precision", name, "--engine", engine] for name in PRECISIONS for engine in ("octavo", "vllm")]
    wanted += [["A", "--precision", "bf16", "--engine", engine] for engine in ("octavo", "vllm")]
    assert commands == [(command, True) for command in wanted] and not made


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["C"], "protocols are A and B; got C"),
        (["--tiny", "--precision", "block128"], "--tiny is BF16 in vLLM; got block128 in vllm"),
        (["--tiny", "--engine", "octavo"], "--tiny is BF16 in vLLM; got bf16 in octavo"),
    ],
)
def test_what_it_does_not_measure_is_refused(arguments, message, fake, capsys):
    with pytest.raises(SystemExit):
        fake(*arguments)
    assert message in capsys.readouterr().err and not made


def test_fewer_tokens_than_asked_for_are_no_measurement(fake, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "short", 1)
    with pytest.raises(AssertionError, match=r"\(39, 39\) tokens and log-probabilities, not 40"):
        fake("--precision", "bf16", "--engine", "vllm")


def test_without_vllm_or_a_gpu_it_says_so(fake, monkeypatch, capsys):
    monkeypatch.setattr(vllm_rollout.torch.cuda, "is_available", lambda: False)
    fake()
    assert "one of them is missing here: skipped" in capsys.readouterr().out and not made
