import json
import shutil

import pytest

pytest.importorskip("verl.trainer", reason="needs verl: make test-verl")

import torch
from torch.testing import assert_close
from transformers import AutoConfig
from verl_engines import (
    CALIBRATION,
    actor_config,
    logprobs_of,
    make_engine,
    mini_batch,
    train,
    two_updates,
    with_old_logprobs,
)
from verl_runs import MODEL

from octavo.models.checkpoint import load_decoder
from octavo.models.fp8_folder import stored_weights
from octavo.numerics.recipe import get_recipe
from octavo.plugins.verl.transfer import Arrival


def same_bytes(a, b):
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.fixture(scope="module")
def untrained():
    return make_engine(actor_config("octavo"))


def test_bytes_are_those_of_octavos_own_decoder(untrained):
    decoder = load_decoder(MODEL, get_recipe("block128"))
    wanted = stored_weights(decoder)
    assert wanted.keys() == untrained.layers.keys() and len(wanted) == 21
    for name, weight in wanted.items():
        layer = untrained.layers[name]
        assert same_bytes(layer.get_buffer("weight_q"), weight.q), name
        assert same_bytes(layer.get_buffer("weight_q_scale"), weight.scale), name


def test_the_shadow_is_verls_bf16_model(untrained):
    bf16 = make_engine(actor_config("fsdp2"))
    wanted = logprobs_of(bf16, mini_batch(0)).values().float()
    with untrained.eval_mode():
        found = untrained._shadow_logprobs(mini_batch(0)).values()
    fp8 = logprobs_of(untrained, mini_batch(0)).values()
    noise = (fp8 - found).abs().mean()
    assert (found - wanted).abs().mean() < 0.5 * noise, (found - wanted).abs().mean()
    assert noise > 0.01


def test_an_update_rewrites_the_bytes_from_the_masters_and_moves_as_bf16_does():
    engines = {}
    for strategy in ("octavo", "fsdp2"):
        actor = actor_config(strategy)
        engine = make_engine(actor)
        data = with_old_logprobs(engine, mini_batch(0))
        before = {name: p.full_tensor().clone() for name, p in engine.module.named_parameters()}
        outputs = train(engine, actor, data)
        moved = {name: p.full_tensor() - before[name] for name, p in engine.module.named_parameters()}
        engines[strategy] = (engine, moved, outputs["metrics"]["grad_norm"])
    engine, moved, grad_norm = engines["octavo"]
    assert engine.policy_version == 1
    for name, layer in engine.layers.items():
        kept = layer.get_buffer("weight_q").clone()
        layer.requantize_()
        assert same_bytes(layer.get_buffer("weight_q"), kept), name
    _, wanted, wanted_norm = engines["fsdp2"]
    assert 0.7 < grad_norm / wanted_norm < 1.4
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.2.mlp.down_proj.weight"):
        assert torch.cosine_similarity(moved[name].flatten(), wanted[name].flatten(), dim=0) > 0.5, name


def test_calibration_moves_the_bounds_and_leaves_the_masters():
    actor = actor_config("octavo", {"calibration": CALIBRATION}, "calibrated")
    engine = make_engine(actor)
    first = two_updates(engine, actor, 0)["metrics"]
    assert "calibration/low" not in first and len(engine.calibrator.pool) == 1
    bounds = engine.calibrator.bounds
    assert (bounds.low, bounds.high) == (0.6, 1.8)
    metrics = two_updates(engine, actor, 10)["metrics"]
    bounds = engine.calibrator.bounds
    assert (metrics["calibration/low"], metrics["calibration/high"]) == ([bounds.low], [bounds.high])
    assert 0.6 != bounds.low and bounds.high != 1.8
    assert (metrics["calibration/num_positive"], metrics["calibration/num_negative"]) == ([36], [40])
    assert metrics["actor/clip_low"].aggregate() == 0.6


@pytest.mark.parametrize("master_dtype", ["fp32", "bf16"])
def test_the_shadow_of_old_runs_on_the_masters_before_the_step(master_dtype):
    actor = actor_config("octavo", {"calibration": CALIBRATION | {"pooled_steps": 1}}, "calibrated")
    object.__setattr__(actor.engine, "model_dtype", master_dtype)
    engine = make_engine(actor)
    two_updates(engine, actor, 0)
    batch = mini_batch(5, last=True)
    with engine.eval_mode():
        wanted = engine._shadow_logprobs(batch).values()
    train(engine, actor, with_old_logprobs(engine, mini_batch(4)))
    masters = [master.clone() for master in engine._local_masters()]
    with engine.train_mode():
        now = engine._shadow_logprobs(batch).values()
        log_ratio = engine._shadow_log_ratio(batch).values()
    assert (now - wanted).abs().max() > 0.01
    assert_close(log_ratio, now - wanted, rtol=0.0, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(engine._local_masters(), masters, strict=True))


def test_a_checkpoint_keeps_bounds_pool_and_bytes(tmp_path):
    actor = actor_config("octavo", {"calibration": CALIBRATION}, "calibrated")
    engine = make_engine(actor)
    for seed in (0, 10, 20):
        two_updates(engine, actor, seed)
    engine.save_checkpoint(str(tmp_path / "actor"))
    fresh = make_engine(actor_config("octavo", {"calibration": CALIBRATION}, "calibrated"))
    fresh.load_checkpoint(str(tmp_path / "actor"), del_local_after_load=False)
    assert fresh.calibrator == engine.calibrator and fresh.calibrator.bounds.low != 0.6 and fresh.calibrator.pool
    assert fresh.policy_version == engine.policy_version == 6
    assert torch.equal(logprobs_of(fresh, mini_batch(3)).values(), logprobs_of(engine, mini_batch(3)).values())
    wanted = two_updates(engine, actor, 30)["metrics"]
    found = two_updates(fresh, actor, 30)["metrics"]
    assert found["calibration/low"] == wanted["calibration/low"]


def test_a_checkpoint_without_bounds_is_refused(tmp_path):
    make_engine(actor_config("octavo")).save_checkpoint(str(tmp_path / "actor"))
    state = tmp_path / "actor" / "octavo.json"
    engine = make_engine(actor_config("octavo", {"calibration": CALIBRATION}, "calibrated"))
    with pytest.raises(ValueError, match="holds no bounds: the run that wrote it did not calibrate"):
        engine.load_checkpoint(str(tmp_path / "actor"), del_local_after_load=False)
    for damage in ("{", "[1]", '{"policy_version": 1, "calibration": {"step": 3}}'):
        state.write_text(damage)
        with pytest.raises(ValueError, match="octavo.json"):
            engine.load_checkpoint(str(tmp_path / "actor"), del_local_after_load=False)
    state.unlink()
    with pytest.raises(ValueError, match="octavo.json cannot be read"):
        engine.load_checkpoint(str(tmp_path / "actor"), del_local_after_load=False)
    state.write_text("{}")
    engine.load_checkpoint(str(tmp_path / "actor"), del_local_after_load=False)
    assert engine.calibrator.bounds.low == 0.6


def test_what_crosses_are_the_bytes_in_use(untrained):
    arrival = Arrival()
    sent = dict(arrival.take(list(untrained.get_per_tensor_param()[0])))
    assert arrival.complete and arrival.policy_version == untrained.policy_version
    for name, layer in untrained.layers.items():
        assert same_bytes(sent[f"{name}.weight"], layer.get_buffer("weight_q"))
        assert same_bytes(sent[f"{name}.weight_scale_inv"], layer.get_buffer("weight_q_scale"))
    norm = untrained.module.state_dict()["model.norm.weight"].full_tensor()
    assert torch.equal(sent["model.norm.weight"], norm.bfloat16())


@pytest.mark.parametrize(
    "octavo, message",
    [
        ({"recipe": "bf16"}, "recipe is one that trains in FP8"),
        ({"recipe": "tensorwise_static"}, "recipe is one that trains in FP8"),
        ({"recipe": "rowwise"}, "rollout_weights='fp8' sends weights in blocks of 128x128"),
        ({"recipe": "block129"}, "recipe: wants one of"),
        ({"recipie": "block128"}, "recipie: unknown key"),
        ({"keep_bf16": ["lm_head"]}, "leaves out 'embed_tokens'"),
        ({"keep_bf16": ["lm_head", "embed_tokens", "*_proj"]}, "leaves no linear layer of Qwen3ForCausalLM"),
        ({"calibration": {"type": "exact", "shadow_share": 0.5}}, "leave trigger, reference, shadow_share"),
        ({"calibration": {"low_max": 0.8}}, "calibration.type: missing"),
    ],
)
def test_options_that_cannot_be_used_are_named(octavo, message):
    with pytest.raises(ValueError, match=message):
        make_engine(actor_config("octavo", octavo))


def test_other_recipes_train_with_bf16_rollouts():
    actor = actor_config("octavo", {"recipe": "rowwise", "rollout_weights": "bf16", "scale_rounding": "power_of_two"})
    engine = make_engine(actor)
    data = with_old_logprobs(engine, mini_batch(0))
    assert train(engine, actor, data)["metrics"]["grad_norm"] > 0.0
    sent = dict(engine.get_per_tensor_param()[0])
    assert sent["model.layers.0.mlp.up_proj.weight"].dtype == torch.float32


def test_recomputed_blocks_give_the_same_gradient():
    norms = []
    for recompute in (False, True):
        actor = actor_config("octavo")
        engine = make_engine(actor, enable_gradient_checkpointing=recompute)
        norms.append(train(engine, actor, with_old_logprobs(engine, mini_batch(0)))["metrics"]["grad_norm"])
    assert norms[0] == norms[1] > 0.0


def test_an_offloaded_engine_calibrates_saves_and_sends(tmp_path):
    actor = actor_config("octavo", {"calibration": CALIBRATION | {"interval": 1, "pooled_steps": 1}}, "calibrated")
    for name in ("param_offload", "optimizer_offload"):
        object.__setattr__(actor.engine, name, True)
    engine = make_engine(actor)
    bounds = two_updates(engine, actor, 0)["metrics"]["calibration/low"]
    engine.save_checkpoint(str(tmp_path / "actor"))
    engine.load_checkpoint(str(tmp_path / "actor"), del_local_after_load=False)
    assert bounds == [engine.calibrator.bounds.low] != [0.6]
    assert len(list(engine.get_per_tensor_param()[0])) == 2 + len(engine.module.state_dict()) + len(engine.layers)


def test_what_is_not_finite_moves_neither_bytes_nor_bounds():
    actor = actor_config("octavo", {"calibration": CALIBRATION | {"interval": 1, "pooled_steps": 1}}, "calibrated")
    engine = make_engine(actor)
    first, last = (with_old_logprobs(engine, mini_batch(seed, last=seed == 1)) for seed in (0, 1))
    train(engine, actor, first)
    kept = {name: layer.get_buffer("weight_q").clone() for name, layer in engine.layers.items()}
    last["old_log_probs"].values()[3] = float("nan")
    metrics = train(engine, actor, last)["metrics"]
    assert metrics["calibration/is_skipped"] == [1.0]
    assert (engine.calibrator.bounds.low, engine.calibrator.bounds.high) == (0.6, 1.8)
    assert all(same_bytes(layer.get_buffer("weight_q"), kept[name]) for name, layer in engine.layers.items())


def test_lora_is_refused():
    with pytest.raises(ValueError, match="model.lora_rank=8"):
        make_engine(actor_config("octavo"), lora_rank=8)


def test_other_models_are_refused(tmp_path):
    shutil.copytree(MODEL, tmp_path / "model")
    config = json.loads((MODEL / "config.json").read_text()) | {"model_type": "ministral"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"architectures": ["MinistralForCausalLM"]}))
    with pytest.raises(ValueError, match="dense models of llama, qwen2, qwen3; .* is a ministral"):
        make_engine(actor_config("octavo"), model=tmp_path / "model")


def test_shapes_that_vllm_refuses_are_named_before_loading(tmp_path):
    shutil.copytree(MODEL, tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((MODEL / "config.json").read_text()) | {"num_attention_heads": 3, "num_key_value_heads": 1}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    from transformers import AutoModelForCausalLM

    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model"))
    made.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"layers.0.self_attn.q_proj: 192, .*k_proj: 64.* and 3 more"):
        make_engine(actor_config("octavo"), model=tmp_path / "model")


def test_one_update_a_step_cannot_be_calibrated():
    actor = actor_config("octavo", {"calibration": CALIBRATION}, "calibrated")
    engine = make_engine(actor)
    with pytest.raises(ValueError, match="with one update a step every ratio is 1"):
        train(engine, actor, with_old_logprobs(engine, mini_batch(0, last=True)))


def test_calibration_without_its_loss_is_an_error():
    actor = actor_config("octavo", {"calibration": CALIBRATION})
    engine = make_engine(actor)
    with pytest.raises(ValueError, match="actor.policy_loss.loss_mode=calibrated"):
        two_updates(engine, actor, 0)
