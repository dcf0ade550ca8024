"""`octavo bench train`: FLOPs and bytes by hand, a step on a CPU, what is chosen and what is refused."""

import json
from dataclasses import replace

import pytest
import torch
import train as script
from typer.testing import CliRunner

from octavo.bench import train
from octavo.bench.train import (
    FORMATS,
    TrainFormats,
    TrainSpeed,
    bench_train,
    formats_that_fit,
    model_flops,
    needed_bytes,
    random_batch,
    train_speeds,
)
from octavo.cli import app
from octavo.layers.linear import FP8Linear
from octavo.models.config import decoder_config, read_config
from octavo.numerics.recipe import get_recipe
from octavo.trainer.optimizer import OptimizerConfig

MODEL = "examples/tiny/model"


def shape(**changes):
    sizes = {"vocab_size": 100, "hidden_size": 8, "intermediate_size": 16, "num_layers": 2, "num_heads": 2}
    return replace(read_config(MODEL)[0], **sizes | {"num_kv_heads": 1, "head_dim": 4} | changes)


def test_flops_by_hand():
    # Weights of a layer: q 8 x 8, k and v 4 x 8, o 8 x 8, gate, up and down 16 x 8 each: 576; of two layers 1,152.
    # Sequences of 3 and 5 tokens: (9 + 25) / 2 = 17 pairs of query and key, 12 x 2 layers x 2 heads x 4 for each.
    assert model_flops(shape(), [3, 5], 6) == 6 * (1152 * 8 + 800 * 6) + 192 * 17
    one, two = (model_flops(shape(), lengths, 0) for lengths in ([8], [4, 4]))
    assert one - two == 192 * (64 - 32) / 2, "packing changes attention alone"


def test_needed_bytes_differ_by_what_the_formats_hold():
    config, recipe = shape(hidden_size=256, intermediate_size=512, vocab_size=1000), get_recipe("block128")
    sizes = [needed_bytes(config, recipe, 128, formats) for formats in FORMATS]
    assert sizes == sorted(sizes, reverse=True)
    matrices = 2 * (8 * 256 + 2 * 4 * 256 + 256 * 8 + 3 * 512 * 256) + 1000 * 256
    assert config.tied_embeddings
    # 8 bytes become 2 and a scale for each 256; then masters 4 become 2. The plan adds 5 %.
    assert sizes[0] - sizes[1] == pytest.approx(1.05 * (6 * matrices - 8 * matrices / 256), rel=1e-3)
    assert sizes[1] - sizes[2] == pytest.approx(1.05 * 2 * matrices, rel=1e-3)


def test_the_first_formats_that_fit_are_taken():
    config, recipe = shape(hidden_size=256, intermediate_size=512), get_recipe("block128")
    for formats in FORMATS:
        assert formats_that_fit(config, recipe, 1024, needed_bytes(config, recipe, 1024, formats)) is formats
    with pytest.raises(
        ValueError, match=r"a step on 1024 tokens needs .* \(bf16 masters, int8 moments, layers again\)"
    ):
        formats_that_fit(config, recipe, 1024, needed_bytes(config, recipe, 1024, FORMATS[-1]) - 1)


def test_8b_fits_an_h200_with_int8_moments():
    """Masters, gradients and moments of Qwen3-8B in FP32 are 16 x 8.19e9 bytes; an H200 has 139 GiB."""
    qwen3_8b = replace(
        read_config(MODEL)[0],
        **{"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288, "num_layers": 36},
        **{"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "tied_embeddings": False},
    )
    found = [formats_that_fit(qwen3_8b, get_recipe("bf16"), tokens, 139 * 2**30) for tokens in (4096, 8192, 16384)]
    assert [str(formats) for formats in found[:2]] == ["fp32 masters, int8 moments"] * 2
    assert str(found[2]) == "bf16 masters, int8 moments"


@pytest.mark.parametrize("formats", [FORMATS[0], FORMATS[3]])
def test_a_step_trains_and_every_pass_is_timed(formats):
    config, hf_config = read_config(MODEL)
    torch.manual_seed(0)
    speed = bench_train(config, hf_config, get_recipe("block128"), 64, 32, formats, device="cpu", calls=1)
    assert (speed.tokens, speed.sequence_tokens, speed.formats) == (64, 32, str(formats))
    assert min(speed.step_ms, speed.reference_ms, speed.shadow_ms, speed.weight_update_ms) > 0.0
    assert speed.step_ms > speed.reference_ms
    assert speed.flops == model_flops(config, [32, 32], 62)


def test_speeds_are_worked_out_of_times():
    times = {"step_ms": 500.0, "reference_ms": 100.0, "shadow_ms": 200.0, "weight_update_ms": 10.0}
    speed = TrainSpeed(tokens=8000, sequence_tokens=1000, formats="x", flops=1e14, peak_gib=1.0, **times)
    assert (speed.tok_s, speed.tflop_s, speed.reference_tok_s) == (16000.0, 200.0, 80000.0)


def test_a_step_moves_every_weight_and_rewrites_the_bytes():
    config, hf_config = read_config(MODEL)
    decoder = train.random_decoder(config, hf_config, get_recipe("block128"), 32, "cpu", masters=True)
    before = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    q = decoder.layers[0].o_proj.weight_q.clone()
    formats = TrainFormats(optimizer=OptimizerConfig(lr=1e-2))
    optimizer = train.Optimizer(dict(decoder.named_parameters()), formats.optimizer, 10)
    train.train_once(decoder, optimizer, random_batch(config.vocab_size, 64, 32, "cpu"))
    still = [name for name, parameter in decoder.named_parameters() if torch.equal(parameter, before[name])]
    assert not still and not torch.equal(decoder.layers[0].o_proj.weight_q.view(torch.uint8), q.view(torch.uint8))


def test_what_cannot_be_measured_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shown = CliRunner().invoke(app, ["bench", "train", "--model", MODEL])
    assert "octavo bench train measures a CUDA device" in f"{shown.exception}{shown.output}"
    with pytest.raises(ValueError, match="100 tokens are no whole number of sequences of 30"):
        random_batch(50, 100, 30, "cpu")
    monkeypatch.setattr(train, "require_cuda", lambda what: None)
    monkeypatch.setattr(train, "require_kernels", lambda device, precision: None)
    with pytest.raises(ValueError, match="recipe 'fp8_channel' has no backward"):
        train_speeds(*read_config(MODEL), get_recipe("fp8_channel"), [(64, 64)])
    longest = read_config(MODEL)[0].max_positions
    with pytest.raises(
        ValueError, match=f"the model has {longest} positions. Give fewer --sequence-tokens or --tokens"
    ):
        train_speeds(*read_config(MODEL), get_recipe("block128"), [(longest + 1, longest + 1)])


def test_the_command_prints_a_table_or_json(monkeypatch):
    times = {"step_ms": 500.0, "reference_ms": 100.0, "shadow_ms": 200.0, "weight_update_ms": 10.0}
    speed = TrainSpeed(tokens=8192, sequence_tokens=4096, formats="int8 moments", flops=1e14, peak_gib=1.0, **times)
    asked = []
    monkeypatch.setattr(train, "train_speeds", lambda *given: asked.append(given) or [speed])
    arguments = ["bench", "train", "--model", MODEL, "--tokens", "8192", "--sequence-tokens", "4096"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0 and asked[0][3] == [(8192, 4096)], shown.output
    for text in ("16,384", "200", "500.0", "int8 moments with 8,192 tokens"):
        assert text in shown.output, shown.output
    (row,) = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert row["tok_s"] == 16384.0 and row["weight_update_ms"] == 10.0


def test_depths_are_extrapolated_along_a_line():
    times = {"step_ms": 100.0, "reference_ms": 30.0, "shadow_ms": 40.0, "weight_update_ms": 2.0}
    formats = {"tokens": 64, "sequence_tokens": 32, "formats": "x", "flops": 1.0}
    shallow = TrainSpeed(**formats, **times, peak_gib=10.0)
    deep = TrainSpeed(**formats, **{name: 1.5 * x for name, x in times.items()}, peak_gib=14.0)
    found = script.extrapolated(shallow, deep, (4, 8), script.SHAPES["14b"])  # of 40 layers, 9 steps of 4
    assert (found.step_ms, found.weight_update_ms, found.peak_gib) == (100.0 + 9 * 50.0, 2.0 + 9 * 1.0, 10.0 + 9 * 4.0)
    assert "extrapolated from 4 and 8 layers, 100.0 and 150.0 ms" in found.formats
    assert found.flops == model_flops(decoder_config(script.SHAPES["14b"]), [32, 32], 62)


def test_rows_have_goals_at_their_tokens_alone():
    times = {"reference_ms": 100.0, "shadow_ms": 200.0, "weight_update_ms": 16.0, "peak_gib": 1.0}
    slow, fast = (
        TrainSpeed(tokens=8192, sequence_tokens=8192, formats="x", flops=1e14, step_ms=ms, **times)
        for ms in (1000.0, 500.0)
    )
    rows = {row.metric: row for row in script.rows_of("case", "block128", fast, slow, True)}
    assert rows["speedup_vs_bf16"].value == 2.0 and rows["speedup_vs_bf16"].goal == 1.25
    assert not rows["weight_update_ms"].met and rows["tok_s"].met and rows["tok_s"].unit == "tok/s"
    assert all(row.goal is None for row in script.rows_of("case", "block128", fast, None, False))


def test_a_peer_stands_in_for_every_linear_and_trains():
    config, hf_config = read_config(MODEL)
    decoder = train.random_decoder(config, hf_config, get_recipe("bf16"), 32, "cpu", masters=True)
    batch = random_batch(config.vocab_size, 64, 32, "cpu")
    wanted = train.packed_logprobs(decoder, batch.microbatches[0], 1.0)[0]
    script.replace_linears_(decoder, torch.nn.Sequential)
    assert not [m for m in decoder.modules() if isinstance(m, FP8Linear)]
    found = train.packed_logprobs(decoder, batch.microbatches[0], 1.0)[0]
    assert (found - wanted).abs().max() < 0.1 and wanted.std() > 0.1
    before = decoder.layers[0].o_proj.layer[0].weight.detach().clone()
    speed = train.time_passes(decoder, batch, TrainFormats(optimizer=OptimizerConfig(lr=1e-2, master_format="bf16")), 1)
    assert speed.step_ms > 0.0 and not torch.equal(decoder.layers[0].o_proj.layer[0].weight, before)


@pytest.mark.gpu
def test_it_measures_a_step_on_a_gpu():
    (speed,) = train_speeds(*read_config(MODEL), get_recipe("block128"), [(256, 128)])
    assert speed.formats == str(FORMATS[0]) and speed.tok_s > 100.0 and speed.peak_gib > 0.0
