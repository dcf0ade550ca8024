"""Moments in eight bits and masters in BF16: as good as FP32 on a quadratic, unbiased, resumed to the bit, counted."""

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_config as tiny_model
from tiny_models import tiny_decoder
from training_runs import resumable, run, same_run, signal_at
from training_runs import tiny_config as tiny_run

from octavo.layers.attention import PackedAttention
from octavo.models.checkpoint import load_decoder
from octavo.models.config import decoder_config
from octavo.numerics.recipe import get_recipe
from octavo.rl.calibration_config import EMAReference, GridCalibration
from octavo.trainer.checkpoint import list_checkpoints
from octavo.trainer.export import export_checkpoint
from octavo.trainer.interrupt import Interrupted
from octavo.trainer.memory_held import estimate_memory
from octavo.trainer.optimizer import Optimizer, OptimizerConfig
from octavo.trainer.reference import Reference

COMPACT = {"optimizer__state_format": "int8", "optimizer__master_format": "bf16"}
SHORT = {"trainer__num_steps": 2, "trainer__shadow_interval": 0, "evaluation__interval": 0, "calibration": None}


def final_loss(**formats):
    """Of a quadratic with curvatures from 1e-3 to 1 and noisy gradients, after 200 updates that end at a rate of 0."""
    generator = torch.Generator().manual_seed(0)
    curvature = torch.logspace(-3, 0, 4096).view(16, 256)[:, torch.randperm(256, generator=generator)]
    weight = torch.nn.Parameter(torch.randn(16, 256, generator=generator))
    if formats.get("master_format") == "bf16":
        weight = torch.nn.Parameter(weight.detach().bfloat16())
        weight.grad_dtype = torch.float32
    config = OptimizerConfig(lr=0.05, beta2=0.99, max_grad_norm=1e9, lr_schedule="linear", **formats)
    optimizer = Optimizer({"weight": weight}, config, 200, seed=1)
    for _ in range(200):
        noise = 0.1 * torch.randn(16, 256, generator=generator)
        weight.grad = curvature * (weight.detach().float() + noise)
        optimizer.step()
    return (curvature * weight.detach().float().square()).sum().item()


@pytest.mark.parametrize(
    "formats",
    [{"state_format": "int8"}, {"master_format": "bf16"}, {"state_format": "int8", "master_format": "bf16"}],
)
def test_a_quadratic_converges_as_in_fp32(formats):
    """From 590 to 0.16, within 3 % of where FP32 ends."""
    exact, found = final_loss(), final_loss(**formats)
    assert 0.0 < exact < 0.2 and abs(found / exact - 1.0) < 0.03, (exact, found)


def moved(master_format):
    """Mean movement of 65,536 weights of 0.02 in 20 updates at a rate of 1e-6."""
    weight = torch.full((256, 256), 0.02).bfloat16()
    weight = torch.nn.Parameter(weight if master_format == "bf16" else weight.float())
    weight.grad_dtype = torch.float32
    start = weight.detach().float().clone()
    optimizer = Optimizer({"w": weight}, OptimizerConfig(lr=1e-6, master_format=master_format), 20, seed=3)
    for _ in range(20):
        weight.grad = torch.full((256, 256), 1e-3)
        optimizer.step()
    return (weight.detach().float() - start).mean().item()


def test_at_a_rate_of_1e_6_bf16_masters_move_as_fp32_does_on_average():
    exact = moved("fp32")
    found = moved("bf16")
    assert exact == pytest.approx(-20e-6, rel=1e-3)
    step = 2.0**-13  # between BF16 numbers from 2^-6 to 2^-5
    share = 20e-6 / step  # of the weights has moved by one step
    standard_error = step * (share * (1 - share)) ** 0.5 / 256
    assert abs(found - exact) < 5 * standard_error, (found, exact, standard_error)
    start = torch.tensor(0.02).bfloat16()
    assert (start.float() - 1e-6).bfloat16() == start, "to nearest nothing would move"


def test_rounding_depends_on_seed_update_and_matrix_only():
    def trained(seed, restart=False):
        weights = {name: torch.nn.Parameter(torch.ones(4, 256).bfloat16()) for name in "ab"}
        optimizer = Optimizer(
            weights, OptimizerConfig(lr=1e-3, state_format="int8", master_format="bf16"), 4, seed=seed
        )
        for update in range(4):
            if restart and update == 2:
                kept = {name: tensor.clone() for name, tensor in optimizer.moments().items()}
                optimizer = Optimizer(weights, optimizer.config, 4, seed=seed)
                for name, tensor in optimizer.moments().items():
                    tensor.copy_(kept[name])
                optimizer.restore(2)
            for weight in weights.values():
                weight.grad = torch.linspace(-1, 1, 1024).view(4, 256).bfloat16()
            optimizer.step()
        return [weight.detach() for weight in weights.values()]

    first, again, resumed, other = trained(5), trained(5), trained(5, restart=True), trained(6)
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, again, resumed, strict=True))
    assert not torch.equal(first[0], other[0]) and not torch.equal(first[0], first[1])


def test_a_compact_run_resumes_to_the_bit(tmp_path, monkeypatch):
    run(resumable(tmp_path / "whole", **COMPACT, **SHORT))
    config = resumable(tmp_path / "run", **COMPACT, **SHORT, checkpoint__interval=0)
    with monkeypatch.context() as patch:
        signal_at(patch, Optimizer, "step", 2, 15)
        with pytest.raises(Interrupted):
            run(config)
    run(config, resume=True)
    same_run(tmp_path / "run", tmp_path / "whole")
    (newest, *_) = list_checkpoints(tmp_path / "run")
    sizes = {name: sum(f.stat().st_size for f in newest.glob(f"{name}-*")) for name in ("policy", "optimizer")}
    assert sizes["optimizer"] < 1.1 * sizes["policy"], "codes of two moments beside BF16 masters"
    export_checkpoint(tmp_path / "run", tmp_path / "exported", "newest")
    exported, trained = (load_file(tmp_path / name / "model.safetensors") for name in ("exported", "run/model"))
    assert exported.keys() == trained.keys() and all(torch.equal(exported[name], trained[name]) for name in trained)
    changed = resumable(tmp_path / "run", **SHORT | COMPACT | {"optimizer__state_format": "fp32"})
    with pytest.raises(ValueError, match="optimizer.state_format: 'int8' -> 'fp32'"):
        run(changed, resume=True)
    with pytest.raises(ValueError, match="another model, recipe or optimizer. Give .*formats of optimizer"):
        run(changed, resume=True, allow_changes=True)


def test_a_model_in_bf16_gives_the_same_bytes_from_bf16_masters():
    model = "examples/tiny/model"
    wide, narrow = (load_decoder(model, get_recipe("block128"), master_format=name) for name in ("fp32", "bf16"))
    for (name, buffer), other in zip(wide.named_buffers(), narrow.buffers(), strict=True):
        assert torch.equal(buffer.view(torch.uint8), other.view(torch.uint8)), name
    kinds = {(p.ndim > 1, p.dtype) for p in narrow.parameters()}
    assert kinds == {(True, torch.bfloat16), (False, torch.float32)}


def test_gradients_of_bf16_masters_are_those_of_fp32_ones():
    found = []
    for rounds in (False, True):
        decoder = tiny_decoder(tiny_model("qwen3"), get_recipe("block128"))
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.copy_(parameter.bfloat16())
        if rounds:
            decoder.round_masters_()
        decoder.requantize_()
        tokens = torch.arange(40)
        for _ in range(2):
            hidden = decoder(tokens, tokens, PackedAttention(torch.tensor([0, 40]), "fp8"))
            decoder.logprobs(hidden[:-1], tokens[1:], 1.0)[0].sum().backward()
        found.append({name: parameter.grad for name, parameter in decoder.named_parameters()})
    for name, grad in found[0].items():
        assert grad.dtype == found[1][name].dtype == torch.float32
        assert torch.equal(grad, found[1][name]) and grad.any(), name


def test_an_average_follows_bf16_masters_in_fp32():
    policy = tiny_decoder(tiny_model("llama"), get_recipe("block128"))
    policy.round_masters_()
    reference = Reference(policy, GridCalibration(reference=EMAReference(decay=0.75)), 1.0)
    before, master = reference.own.embed_tokens.detach().clone(), policy.embed_tokens
    with torch.no_grad():
        master.add_(1.0)
    reference.follow_()
    assert reference.own.embed_tokens.dtype == torch.float32
    torch.testing.assert_close(reference.own.embed_tokens.detach(), 0.75 * before + 0.25 * master.detach().float())


@pytest.mark.parametrize("tied", [False, True])
def test_the_memory_plan_counts_what_they_hold(tied, tmp_path):
    model = tiny_model("qwen2", tie_word_embeddings=tied)
    config = tiny_run(tmp_path, **COMPACT)
    decoder = tiny_decoder(model, get_recipe("block128"))
    decoder.round_masters_()
    optimizer = Optimizer(dict(decoder.named_parameters()), config.optimizer, 1)
    parts = estimate_memory(config, decoder_config(model), two_forwards=False).parts
    held = {name: x for name, x in optimizer.moments().items() if not name.endswith("step")}
    assert parts["AdamW"] == sum(tensor.nbytes for tensor in held.values())
    assert parts["BF16 masters"] == sum(parameter.nbytes for parameter in decoder.parameters())
    in_fp32 = estimate_memory(tiny_run(tmp_path), decoder_config(model), two_forwards=False).parts
    assert 1.9 < in_fp32["FP32 masters"] / parts["BF16 masters"] < 2.0
    assert 3.5 < in_fp32["AdamW"] / parts["AdamW"] < 4.0
    sizes = [
        estimate_memory(tiny_run(tmp_path, **{k: v}), decoder_config(model), False).total_bytes
        for k, v in [*COMPACT.items()]
    ]
    assert all(size < sum(in_fp32.values()) for size in sizes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model__dither_masters": True}, "dither_masters moves masters inside their BF16 intervals"),
        ({"precision": {"recipe": "fp32"}}, "optimizer.master_format=bf16 rounds the weights that recipe 'fp32'"),
        ({"optimizer__state_format": "int4"}, "state_format"),
    ],
)
def test_what_does_not_go_together_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        tiny_run(tmp_path, **COMPACT | changes)
