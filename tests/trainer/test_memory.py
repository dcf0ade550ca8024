"""The memory plan: by hand for published shapes, and against a whole run whose kernels write nothing."""

from dataclasses import replace

import pytest
import torch
from training_runs import TINY_MODEL, read_lines, train_quietly

from octavo.bench.memory import PlannedRun, random_model
from octavo.models.config import DecoderConfig
from octavo.trainer import train as training
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import from_dict
from octavo.trainer.memory import GIB, TokenCounts, plan_memory, planner
from octavo.trainer.memory_passes import DecoderPass
from octavo.trainer.metrics import StepClock

MODEL = {"family": "qwen3", "norm_eps": 1e-6, "qkv_bias": False, "qk_norm": True, "max_positions": 40960}
QWEN3_8B = DecoderConfig(
    **MODEL,
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    tied_embeddings=False,
)
SMOLLM2 = replace(
    QWEN3_8B,
    family="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    qk_norm=False,
    tied_embeddings=True,
)
BASE = {"output_dir": "runs/x", "model": {"path": "x"}, "task": {"type": "arithmetic"}, "device": "cuda"}


def plan_of(shape, **changes):
    config = from_dict(TrainConfig, {**BASE, **changes}, "test")
    return plan_memory(config, shape, two_forwards=False)


def test_vllm_takes_its_share_and_octavo_samples_nothing(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (100 * GIB, 140 * GIB))
    vllm = {"type": "vllm", "gpu_memory_utilization": 0.25}
    own, plan = (
        plan_of(QWEN3_8B, precision={"allow_mismatch": True}, rollout={"engine": engine}) for engine in ("octavo", vllm)
    )
    assert plan.held["vLLM"] == 35 * GIB and plan.phases["rollout"] == {}
    assert own.held.keys() - plan.held.keys() == {"KV cache", "page table"}
    assert {name: plan.phases[name] for name in ("old_logprobs", "update")} == {
        name: own.phases[name] for name in ("old_logprobs", "update")
    }
    assert plan.totals["rollout"] == sum(plan.held.values())


def test_what_qwen3_8b_holds():
    held = plan_of(QWEN3_8B).held
    assert held["FP32 masters"] == 4 * 8_190_735_360 and held["AdamW"] == 8 * 8_190_735_360
    # 36 layers of 4096 x (4096 + 2 x 1024) + 4096 x 4096 + 3 x 4096 x 12288 in a byte, transposed in another
    assert held["operands"] == 6_945_767_424
    assert held["block128 bytes"] == 6_945_767_424 + 2 * 2 * 151936 * 4096
    # 4,097 pages of 16: keys and values of 8 heads, 128 bytes and a scale of 4
    assert held["KV cache"] == 65_552 * 36 * 2 * 8 * 132


@pytest.mark.parametrize(
    "recipe, bytes_a_token",
    [
        # h twice 16384, inverse_rms 8, qkv 12288, out 8192, logsumexp 128, gate_up 49152; casts of 1 + 4 / 128 bytes
        ("block128", 16384 + 8 + 12288 + 8192 + 128 + 49152 + 33 * (4096 + 4096 + 4096 + 12288) // 32),
        ("w8a16", 16384 + 8 + 12288 + 8192 + 128 + 49152 + 33 * (4096 + 4096 + 4096 + 12288) // 32),
        ("tensorwise", 16384 + 8 + 12288 + 8192 + 128 + 49152 + 4096 + 4096 + 4096 + 12288),
        ("tensorwise_static", 16384 + 8 + 12288 + 8192 + 128 + 49152 + 2 * (4096 + 4096 + 4096 + 12288)),
        ("bf16", 16384 + 8 + 12288 + 8192 + 128 + 49152 + 2 * (4096 + 4096 + 12288)),  # out is the input of o_proj
    ],
)
def test_what_a_layer_of_qwen3_8b_saves(recipe, bytes_a_token):
    recipe = from_dict(TrainConfig, {**BASE, "precision": {"recipe": recipe}}, "test").precision.train_recipe()
    (first, *_) = DecoderPass(shape=QWEN3_8B, recipe=recipe, num_tokens=8192, num_scored=8192).layers
    assert sum(first.saved.values()) == pytest.approx(8192 * bytes_a_token, abs=100)


def test_layers_computed_again_keep_their_input_alone():
    tokens = {"rollout": {"prompts_per_step": 64}}
    kept, again = plan_of(QWEN3_8B, **tokens), plan_of(QWEN3_8B, **tokens, trainer={"recompute_layers": True})
    saved = [plan.phases["update"]["saved activations"] for plan in (kept, again)]
    of_head = 2 * 8192 * 151936 + 4 * 8192 * 594  # weights of a softmax in BF16, the largest logit of each 256 words
    assert saved[0] - saved[1] == 36 * 8192 * (111_496 - 8192) + of_head
    assert kept.held == again.held and kept.peak[0] == "update" and again.needed_bytes < kept.needed_bytes


@pytest.mark.parametrize("num_scored", [32768, 21202, 21201, 16384])  # of 21,201 at most lm_head keeps its weights
def test_a_microbatch_with_fewer_scored_tokens_fits_too(num_scored):
    changes = {"trainer": {"microbatch_tokens": 32768}, "rollout": {"prompts_per_step": 64}}
    config, update = from_dict(TrainConfig, {**BASE, **changes}, "test"), plan_of(QWEN3_8B, **changes).phases["update"]
    tokens = {"num_tokens": 32768, "num_scored": num_scored, "longest": config.max_tokens}
    actual = DecoderPass(shape=QWEN3_8B, recipe=config.precision.train_recipe(), **tokens)
    planned = update["saved activations"] + update["backward"]
    assert actual.update(accumulated=True) <= planned
    assert (actual.update(accumulated=True) == planned) == (num_scored == 21201)


def test_smollm2_whose_widths_end_within_blocks():
    plan = plan_of(SMOLLM2)
    assert plan.held["FP32 masters"] == 4 * 134_515_008
    # W of qkv, o and gate_up filled up to blocks of 128, 576 -> 640 and 192 -> 256; down_proj's ends in its last block
    forward = (640 + 2 * 256) * 640 + 576 * 640 + 2 * 1536 * 640
    backward = 576 * (640 + 2 * 256) + 576 * 640 + 576 * 2 * 1536 + 1536 * 640
    assert plan.held["operands"] == 30 * (forward + backward)


def test_a_step_of_one_microbatch_has_gradients_only_as_its_activations_go():
    several = plan_of(SMOLLM2, rollout={"prompts_per_step": 64})
    single = plan_of(SMOLLM2, rollout={"prompts_per_step": 2, "group_size": 8})
    assert several.phases["update"]["gradients"] == 4 * 134_515_008 and "gradients" not in single.phases["update"]
    assert single.totals["update"] < several.totals["update"]


def test_a_lent_cache_is_planned_for_the_rollout_alone():
    large = {"kv_cache_tokens": 300_000}
    kept, lent = (plan_of(QWEN3_8B, rollout={"engine": {**large, "lend_memory": lends}}) for lends in (False, True))
    cache = 300_016 * 36 * 2 * 8 * 132  # 18,750 pages and one more of 16 tokens, 76,032 bytes each
    assert kept.held["KV cache"] == cache == lent.phases["rollout"]["KV cache"] and "KV cache" not in lent.held
    assert lent.held == {name: size for name, size in kept.held.items() if name != "KV cache"}
    less = {name: kept.totals[name] - lent.totals[name] for name in kept.totals}
    assert less.pop("rollout") == 0 and set(less.values()) == {cache}
    assert kept.estimate == lent.estimate and kept.reserve == lent.reserve
    rescued = {"watch": {"action": "bf16_forward"}}
    kept, lent = (
        plan_of(QWEN3_8B, rollout={"engine": {**large, "lend_memory": lends}}, **rescued) for lends in (False, True)
    )
    in_bf16 = 300_016 * 36 * 2 * 8 * 256
    assert lent.phases["rollout"]["KV cache"] == in_bf16, "the larger of two, which take turns"
    assert kept.held["rescue in BF16"] - lent.held["rescue in BF16"] == in_bf16
    assert kept.totals["rollout"] - lent.totals["rollout"] == cache


@pytest.mark.parametrize("num_mini_batches", [1, 2])
def test_moments_on_the_host_are_planned_from_the_first_update_on(num_mini_batches):
    trainer = {"num_mini_batches": num_mini_batches, "shadow_interval": 1}
    settings = {"trainer": trainer, "calibration": None, "rollout": {"engine": {"lend_memory": True}}}
    kept, moved = (plan_of(QWEN3_8B, **settings, optimizer={"offload_moments": each}) for each in (False, True))
    moments = 8 * 8_190_735_360
    assert kept.held["AdamW"] == moments and not kept.host and moved.host == {"AdamW": moments}
    assert moved.held == {name: size for name, size in kept.held.items() if name != "AdamW"}
    less = {name: kept.totals[name] - moved.totals[name] for name in kept.totals}
    later = 0 if num_mini_batches == 2 else moments  # a single pass comes before the only update
    wanted = {"rollout": moments, "old_logprobs": moments, "shadow": later, "update": later, "optimizer": 0}
    assert less == wanted and kept.estimate == moved.estimate and kept.reserve == moved.reserve
    assert moved.lines()[-1] == "  pinned in the host's memory: AdamW 61.03 GiB" and len(kept.lines()) == 2
    compact = plan_of(QWEN3_8B, optimizer={"offload_moments": True, "state_format": "int8"})
    assert 2 * 8_190_735_360 < compact.host["AdamW"] < 2.1 * 8_190_735_360
    on_cpu = plan_of(QWEN3_8B, device="cpu", optimizer={"offload_moments": True})
    assert not on_cpu.host and not on_cpu.phases


@pytest.mark.parametrize(
    "formats, num_mini_batches, needed, fitting",
    [
        ({"master_format": "bf16"}, 1, (167.0, 129.7), (None, 1_400_000)),
        ({"state_format": "int8", "master_format": "bf16"}, 1, (119.2, 102.9), (1_180_000, 1_400_000)),
        ({"state_format": "int8", "master_format": "bf16"}, 2, (119.2, 119.2), (1_180_000, 1_400_000)),
        ({"state_format": "int8"}, 2, (135.2, 135.2), (960_000, 1_180_000)),
    ],
)
def test_qwen3_8b_with_its_moments_on_the_host(formats, num_mini_batches, needed, fitting):
    """As in docs/memory.md."""
    trainer = {"num_mini_batches": num_mini_batches}

    def needed_gib(offloads, tokens=300_000):
        rollout = {"prompts_per_step": 64, "engine": {"kv_cache_tokens": tokens, "lend_memory": True}}
        optimizer = {**formats, "offload_moments": offloads}
        plan = plan_of(QWEN3_8B, rollout=rollout, optimizer=optimizer, calibration=None, trainer=trainer)
        return plan.needed_bytes / GIB

    assert [needed_gib(False), needed_gib(True)] == pytest.approx(needed, abs=0.05)
    for offloads, tokens in zip((False, True), fitting, strict=True):
        if tokens is not None:
            assert needed_gib(offloads, tokens) <= 139.8 < needed_gib(offloads, tokens + 20_000)


def test_a_critics_moments_on_the_host_are_planned_for_its_phase():
    def judged(offloads):
        critic = {"recipe": "bf16", "optimizer": {"offload_moments": offloads}}
        config = from_dict(TrainConfig, {**BASE, "algorithm": GAE, "critic": critic}, "test")
        return plan_memory(config, SMOLLM2, False, SMOLLM2)

    kept, moved = judged(False), judged(True)
    moments = 8 * (134_515_008 + 577)
    assert moved.host == {"the critic's AdamW": moments} and not kept.host
    less = {name: kept.totals[name] - moved.totals[name] for name in kept.totals}
    assert less.pop("critic") == 0 and set(less.values()) == {moments} and "rollout" in less


@pytest.mark.parametrize(
    "formats, tokens, kept, lent",
    [
        ({"state_format": "int8", "master_format": "bf16"}, 8192, 150.8, 128.5),
        ({"state_format": "int8"}, 4096, 149.3, 127.0),
        ({"state_format": "int8"}, 8192, 166.8, 144.5),
    ],
)
def test_qwen3_8b_beside_its_reference_with_a_large_cache(formats, tokens, kept, lent):
    def needed_gib(lends):
        rollout = {"prompts_per_step": 64, "engine": {"kv_cache_tokens": 300_000, "lend_memory": lends}}
        kl, trainer = {"kl": {"coefficient": 1e-3}}, {"microbatch_tokens": tokens}
        return plan_of(QWEN3_8B, rollout=rollout, optimizer=formats, algorithm=kl, trainer=trainer).needed_bytes / GIB

    assert [needed_gib(False), needed_gib(True)] == pytest.approx([kept, lent], abs=0.05)  # as in docs/memory.md


def test_a_critic_a_shadow_in_the_loss_and_steps_in_bf16_have_their_say():
    plain = plan_of(SMOLLM2, calibration=None, trainer={"shadow_interval": 0}, critic={})
    assert plain.phases.keys() == {"rollout", "old_logprobs", "update", "optimizer"}
    config = from_dict(TrainConfig, {**BASE, "algorithm": GAE, "critic": {"recipe": "bf16"}}, "test")
    judged = plan_memory(config, SMOLLM2, False, SMOLLM2)
    parameters = 134_515_008 + 577  # a vector and a number in place of lm_head
    assert judged.phases["critic"]["gradients"] == 4 * parameters
    assert judged.held["critic"] == 12 * parameters + 2 * (134_515_008 - 30 * 2 * 576 - 576)
    rescued = plan_of(SMOLLM2, watch={"action": "bf16_forward"})
    in_bf16 = plan_of(SMOLLM2, precision={"recipe": "bf16"})
    assert rescued.phases["update"] == in_bf16.phases["update"]
    few = {"trainer": {"recompute_layers": True, "microbatch_tokens": 1024}, "calibration": None}
    read = plan_of(SMOLLM2, **few, algorithm={"ratio_from": "bf16_shadow"})
    assert read.phases["update"]["backward"] >= plan_of(SMOLLM2, **few).phases["shadow"]["forward"]


def test_counts_are_the_most_that_can_be():
    rollout = {"prompts_per_step": 6, "group_size": 4, "max_prompt_tokens": 100, "max_completion_tokens": 200}
    changes = {"trainer": {"num_mini_batches": 2, "microbatch_tokens": 1000}, "evaluation": {"interval": 0}}
    config = from_dict(TrainConfig, {**BASE, **changes, "rollout": rollout}, "test")
    assert TokenCounts.of(config) == TokenCounts(
        running=24, prefill=6 * 100 + 24 * 16, in_step=24 * 300, in_mini_batch=12 * 300, microbatch=1000
    )
    small = replace(config.rollout.engine, kv_cache_tokens=4800, max_prefill_tokens=512)  # 16 sequences of 24
    small = replace(
        config, rollout=replace(config.rollout, engine=small), trainer=replace(config.trainer, microbatch_tokens=64)
    )
    counts = TokenCounts.of(small)
    assert (counts.prefill, counts.microbatch) == (512, 300), "what was preempted is computed again; no sequence is cut"


GAE = {"advantage": {"type": "gae"}}


@pytest.mark.parametrize(
    "changes",
    [{"device": "cpu"}, {"precision": {"recipe": "fp32"}}, {"algorithm": GAE, "critic": {"recipe": "fp32"}}],
)
def test_activations_are_planned_for_kernels_alone(changes):
    plan = plan_of(SMOLLM2, **changes)
    assert not plan.phases and not plan.lines() and not plan.metrics() and plan.estimate.total_bytes > 0


def test_the_plan_is_said_in_two_lines():
    plan = plan_of(QWEN3_8B)
    first, second = plan.lines()
    assert first.startswith(f"memory plan: {plan.peak[1] / GIB:.2f} GiB at the peak, in update (rollout ")
    assert "AdamW 61.03 GiB, FP32 masters 30.51 GiB" in second and "in update also saved activations" in second
    assert plan.metrics() == {"memory/planned_gib": plan.peak[1] / GIB}


def test_peaks_of_phases_that_lie_in_each_other(monkeypatch):
    peaks = iter([1, 2, 7, 3, 4, 5, 6])  # before, in outer, in inner, in outer, between, in other, after
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks) * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: GIB // 2)
    clock = StepClock("cuda")
    with clock.phase("outer"):
        with clock.phase("inner"):
            pass
    with clock.phase("other"):
        pass
    found = {key: value for key, value in clock.finish().items() if key.startswith("memory/")}
    assert found == {
        "memory/peak_gib": 7.0,
        "memory/outer_gib": 7.0,
        "memory/inner_gib": 7.0,
        "memory/other_gib": 5.0,
        "memory/held_gib": 0.5,
    }


def test_a_clock_counts_what_the_allocator_does_not(monkeypatch):
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * GIB)
    mapped = [GIB]
    clock = StepClock("cuda", lambda: mapped[0])
    with clock.phase("rollout"):
        mapped[0] = 5 * GIB
    mapped[0] = GIB // 2
    with clock.phase("update"):
        pass
    found = {key: value for key, value in clock.finish().items() if key.startswith("memory/")}
    assert found == {
        "memory/peak_gib": 8.0,
        "memory/rollout_gib": 8.0,
        "memory/update_gib": 3.5,
        "memory/held_gib": 2.5,
    }


def test_a_clock_on_a_cpu_measures_no_memory():
    clock = StepClock("cpu")
    with clock.phase("update"):
        pass
    assert clock.finish().keys() == {"time/update_s", "time/step_s"}


WIDTHS = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1024,
}


@pytest.mark.parametrize("precision, recompute", [({"recipe": "block128"}, False), ({"recipe": "bf16"}, True)])
def test_every_phase_of_a_run_takes_what_is_planned(precision, recompute, tmp_path, monkeypatch):
    pytest.importorskip("triton", reason="the launchers are triton's")
    from cuda_dry_run import Allocations, pretend_cuda, pretend_finite, pretend_to_measure

    changes = {
        "model": {"path": str(random_model(tmp_path / "model", TINY_MODEL, WIDTHS))},
        "precision": precision,
        "rollout": {
            "prompts_per_step": 4,
            "group_size": 4,
            "max_prompt_tokens": 16,
            "max_completion_tokens": 112,
            "engine": {"max_sequences": 16, "kv_cache_tokens": 4096},
        },
        "trainer": {
            "num_steps": 2,
            "recompute_layers": recompute,
            "shadow_interval": 1,
            "microbatch_tokens": 512,
        },
        "evaluation": {"interval": 0},
        "checkpoint": {"interval": 0, "keep_best": False},
        "watch": None,
    }
    config = from_dict(TrainConfig, {**BASE, **changes, "output_dir": str(tmp_path / "run")}, "test")
    plan, allocations = planner(config)(config), Allocations()
    pretend_cuda(monkeypatch)
    pretend_finite(monkeypatch)
    pretend_to_measure(monkeypatch, allocations)
    monkeypatch.setattr(training, "StepClock", lambda device, uncounted_bytes: StepClock("cuda", uncounted_bytes))
    monkeypatch.setattr(training, "planned", lambda config: plan)
    with allocations:
        train_quietly(replace(config, device="cpu"), tmp_path / "log")
    _, line = read_lines(tmp_path / "run/metrics.jsonl")  # in the first step there are no moments yet
    assert line["memory/planned_gib"] == plan.peak[1] / GIB
    plan.held.pop("cuBLAS workspaces")
    measured = {key[len("memory/") : -len("_gib")]: value for key, value in line.items() if key.startswith("memory/")}
    run = PlannedRun(plan=plan, measured=measured, reserved=0.0, beside=0.0)
    assert run.planned.keys() == {"rollout", "old_logprobs", "shadow", "update", "peak", "held"}
    assert 0.0 <= run.off("rollout") < 0.05, run.table()  # a bound: how many prompts share a prefill, nobody knows
    assert all(abs(run.off(phase)) < 0.005 for phase in run.planned if phase != "rollout"), f"\n{run.table()}"
