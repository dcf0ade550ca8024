"""Two sides of a run: declared, refused, or run as two forwards over one set of masters."""

import pytest
import torch
import yaml
from training_runs import read_lines, tiny_config

from octavo.layers.attention import PackedAttention
from octavo.models.checkpoint import load_decoder
from octavo.numerics.precision_flow import PrecisionFlow
from octavo.rl.mismatch import tis_weights
from octavo.rollout.engine import Engine
from octavo.rollout.kv_cache import KVCache
from octavo.trainer import loop
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import from_dict
from octavo.trainer.divergence import StepRecord
from octavo.trainer.metrics import Display
from octavo.trainer.precision import check_live, declared_flow
from octavo.trainer.precision_config import PrecisionConfig, SidePrecision
from octavo.trainer.progress import Progress, weights_fingerprint
from octavo.trainer.rollout import pack, sample
from octavo.trainer.run import load_reference, load_run, make_optimizer
from octavo.trainer.train import train

SPLIT = {"rollout": "block128", "train": "bf16"}


def split_config(folder, **precision):
    """A run of one step whose sides may differ."""
    changes = {f"precision__{key}": value for key, value in precision.items()}
    return tiny_config(
        folder, trainer__num_steps=1, trainer__shadow_interval=0, evaluation__interval=0, calibration=None, **changes
    )


def run_lines(config):
    return read_lines(train(config, Display()) / "metrics.jsonl")


def start(run):
    return Progress(bounds=run.config.start_bounds())


def test_sides_take_from_precision_what_they_leave_out():
    config = PrecisionConfig(
        recipe="rowwise",
        kv_cache="bf16",
        saved_activations="bf16",
        scale_rounding="power_of_two",
        keep_bf16=("o_proj",),
        rollout=SidePrecision(recipe="fp8_channel", keep_bf16=()),
        train=SidePrecision(kv_cache="fp8", scale_rounding="none"),
    )
    rollout, train = config.rollout_recipe(), config.train_recipe()
    assert (rollout.name, rollout.kv_cache, rollout.scale_rounding) == ("fp8_channel", "bf16", "power_of_two")
    assert rollout.keep_bf16 == ("lm_head", "embed_tokens") and train.keep_bf16 == ("lm_head", "embed_tokens", "o_proj")
    assert (train.name, train.kv_cache, train.saved_activations) == ("rowwise", "fp8", "bf16")
    assert train.scale_rounding == "none"


def test_sides_that_differ_are_refused_before_weights_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("octavo.trainer.run.load_decoder", lambda *a, **k: pytest.fail("weights were loaded"))
    config = split_config(tmp_path / "run", **SPLIT)
    with pytest.raises(ValueError, match=r"model\.layers\.\*\.self_attn\.q_proj.*fprop X e4m3 1x128 / bf16"):
        train(config, Display())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "precision, named",
    [
        ({"rollout": {"kv_cache": "bf16"}}, r"kv_cache in 3 layers: fprop K bf16 / e4m3 row"),
        ({"train": {"keep_bf16": ["layers.1.mlp.down_proj"]}}, r"model\.layers\.1\.mlp\.down_proj: fprop X"),
        ({"rollout": "fp32"}, r"model\.embed_tokens: fprop W fp32 / bf16"),
        ({"recipe": "tensorwise_static", "rollout": {"amax_margin": 2.0}}, r"frozen x2\) / .*frozen x1.25"),
    ],
)
def test_one_difference_is_caught(precision, named, tmp_path):
    flow = declared_flow(split_config(tmp_path, **precision))
    with pytest.raises(ValueError, match=named):
        flow.check(allow_mismatch=False)


def test_an_allowed_mismatch_is_printed_measured_and_corrected(tmp_path, capsys):
    config = split_config(tmp_path / "run", allow_mismatch=True, **SPLIT)
    (line,) = run_lines(config)
    assert line["mismatch/max_abs_logprob_diff"] > 0.0 and line["mismatch/tis_weight_mean"] != 1.0
    out = capsys.readouterr().out
    assert "0 of 21 projections train in FP8" in out and "two forwards" in out
    assert "model.layers.*.mlp.down_proj in 3 layers: fprop X e4m3 1x128 / bf16, fprop W e4m3 128x128 / bf16" in out
    left = PrecisionFlow.from_json((tmp_path / "run/precision.json").read_text())
    assert left == declared_flow(config)
    assert [graph.recipe for graph in left.graphs] == ["block128", "bf16", "bf16", "bf16"]
    saved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert from_dict(TrainConfig, saved, "saved") == config


def test_importance_weights_of_an_allowed_mismatch_are_not_all_one(tmp_path):
    run = load_run(split_config(tmp_path, allow_mismatch=True, **SPLIT), Display())
    completions = sample(run, run.problems(0, 4), 0)
    (batch,) = pack(completions, torch.ones(4, 4), num_mini_batches=1, microbatch_tokens=10_000)
    batch = loop.annotate(run, None, batch)
    mask, old, rollout = (batch.gather(name) for name in ("loss_mask", "old_logprobs", "rollout_logprobs"))
    assert (tis_weights(old, rollout)[mask] != 1.0).float().mean() > 0.9


def test_both_forwards_follow_the_masters(tmp_path):
    run = load_run(split_config(tmp_path, rollout="w8a16", allow_mismatch=True), Display())
    twin = run.engine.decoder
    assert twin is not run.policy and run.decoders == [run.policy, twin]
    before = twin.layers[0].o_proj.weight_q.clone(), twin.embed_hp.clone()
    assert [decoder.policy_version for decoder in run.decoders] == [0, 0]
    loop.train_step(run, make_optimizer(run), None, start(run), StepRecord(step=0))
    assert not torch.equal(twin.layers[0].o_proj.weight_q.view(torch.uint8), before[0].view(torch.uint8))
    assert not torch.equal(twin.embed_hp, before[1])
    assert [decoder.policy_version for decoder in run.decoders] == [2, 2]
    run.policy.requantize_()  # which nobody counted
    assert run.policy.policy_version == 3 and run.policy.with_recipe(twin.recipe).policy_version == 3
    layer, other = run.policy.layers[0].o_proj, twin.layers[0].o_proj
    assert torch.equal(layer.weight_q.view(torch.uint8), other.weight_q.view(torch.uint8))
    assert torch.equal(layer.weight_q_scale, other.weight_q_scale)


def test_static_scales_are_frozen_on_both_sides_each_step(tmp_path):
    config = split_config(tmp_path, recipe="tensorwise_static", rollout={"amax_margin": 2.0}, allow_mismatch=True)
    run = load_run(config, Display())
    optimizer, progress = make_optimizer(run), start(run)
    loop.train_step(run, optimizer, None, progress, StepRecord(step=0))
    layers = [decoder.layers[0].o_proj for decoder in run.decoders]
    wanted = [layer.activation_amax * layer.recipe.amax_margin / 448.0 for layer in layers]
    first = [layer.activation_scale.clone() for layer in layers]
    loop.train_step(run, optimizer, None, progress, StepRecord(step=1))
    for layer, scale, old in zip(layers, wanted, first, strict=True):
        torch.testing.assert_close(layer.activation_scale, scale)
        assert not torch.equal(layer.activation_scale, old)


@pytest.mark.parametrize("rollout, train", [("fp8_tensor", "block128"), ("fp32", "block128"), ("block128", "fp32")])
def test_other_pairs_of_forwards_train(rollout, train, tmp_path):
    (line,) = run_lines(split_config(tmp_path / "run", rollout=rollout, train=train, allow_mismatch=True))
    assert line["mismatch/max_abs_logprob_diff"] > 0.0


def test_a_serving_recipe_whose_forward_is_trainings_is_exact(tmp_path):
    (line,) = run_lines(split_config(tmp_path / "run", rollout="fp8_channel", train="rowwise", kv_cache="bf16"))
    assert line["mismatch/max_abs_logprob_diff"] == 0.0


def test_equal_sides_run_one_decoder_and_leave_its_flow(tmp_path):
    config = split_config(tmp_path / "run", rollout="block128", train="block128")
    run = load_run(config, Display())
    assert run.engine.decoder is run.policy and run.flow.differences() == []
    assert run.decoders == [run.policy]
    assert [graph.role for graph in run.flow.graphs] == ["rollout", "old", "train", "export"]
    with_kl = declared_flow(tiny_config(tmp_path, algorithm__kl__coefficient=0.1))
    assert "reference" in [graph.role for graph in with_kl.graphs]


def test_a_live_engine_that_is_not_as_declared_is_refused(tmp_path):
    run = load_run(split_config(tmp_path), Display())
    check_live(run.flow, run.policy, run.engine)
    cache = run.engine.cache
    run.engine.cache = KVCache(run.policy.config, cache.num_pages, cache.page_size, "bf16")
    with pytest.raises(
        ValueError, match=r"flow of rollout, declared / found: .*fprop K e4m3 row \(2\^n scale\) / bf16"
    ):
        check_live(run.flow, run.policy, run.engine)
    run.engine.cache = cache
    run.policy.layers[2].down_proj.quantized = False
    with pytest.raises(ValueError, match=r"flow of train.*layers\.2\.mlp\.down_proj: .*W e4m3 128x128 / absent"):
        check_live(run.flow, run.policy, run.engine)


def test_an_engine_on_other_masters_is_refused(tmp_path):
    run, other = (load_run(split_config(tmp_path), Display()) for _ in range(2))
    with pytest.raises(ValueError, match="the engine reads other masters than the policy trains, .* embed_tokens"):
        check_live(run.flow, run.policy, Engine(other.policy, run.config.rollout.engine, ()))


@torch.no_grad()
def test_a_reference_model_keeps_no_masters_and_computes_what_the_policy_does(tmp_path):
    config = tiny_config(tmp_path, algorithm__kl__coefficient=0.1)
    policy, reference = load_run(config, Display()).policy, load_reference(config)
    assert sum(parameter.numel() for parameter in reference.parameters() if parameter.ndim != 1) == 0
    tokens = torch.arange(5, 25)
    found, wanted = (
        decoder.logits(decoder(tokens, torch.arange(20), PackedAttention(torch.tensor([0, 20]), "fp8")))
        for decoder in (reference, policy)
    )
    assert torch.equal(found, wanted)
    before = weights_fingerprint(reference)
    reference.layers[0].o_proj.weight_q.view(torch.uint8)[0, 0] ^= 1
    assert weights_fingerprint(reference) != before, "its bytes are hashed"


def test_a_reference_model_is_held_to_its_graph(tmp_path, monkeypatch):
    config = tiny_config(tmp_path, algorithm__kl__coefficient=0.1)
    assert load_reference(config) is not None

    def tampered(*args, **options):
        decoder = load_decoder(*args, **options)
        decoder.layers[0].o_proj.quantized = False
        return decoder

    monkeypatch.setattr("octavo.trainer.run.load_decoder", tampered)
    with pytest.raises(ValueError, match="flow of reference.*layers.0.self_attn.o_proj"):
        load_reference(config)
