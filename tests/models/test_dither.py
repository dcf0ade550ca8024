"""Dithered masters: moved inside their BF16 interval, off the FP8 rounding ties."""

import torch
from model_folders import same_bytes
from tiny_models import (
    masters_by_name,
    tiny_config,
    tiny_decoder,
)

from octavo.kernels.operands import quantize_matrix
from octavo.models.checkpoint import dither_masters_, load_decoder
from octavo.models.decoder import Decoder
from octavo.numerics.fp8 import BLOCK_128X128, E4M3
from octavo.numerics.recipe import get_recipe

# Dither.


def fp8_ties(decoder: Decoder) -> tuple[int, int]:
    """(weights that sit exactly between two E4M3 codes of their block, weights)."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(E4M3).float()  # 0 to 448, ascending
    middles = (codes[1:] + codes[:-1]) / 2
    num_ties = num_weights = 0
    for name, master in masters_by_name(decoder).items():
        if name.endswith("_proj.weight"):
            matrix = quantize_matrix(master, BLOCK_128X128)
            rows, columns = (torch.arange(size) // 128 for size in master.shape)
            scale = matrix.scale[rows[:, None], columns]
            num_ties += torch.isin((master / scale).abs(), middles).sum().item()
            num_weights += master.numel()
    return num_ties, num_weights


def test_dither_moves_masters_inside_their_bf16_interval(make_folder):
    folder, _ = make_folder(family="qwen2")
    plain = masters_by_name(load_decoder(folder, get_recipe("block128")))
    decoder = load_decoder(folder, get_recipe("block128"), dither_seed=7)
    dithered = masters_by_name(decoder)
    for name, master in dithered.items():
        same_bytes({name: master.bfloat16()}, {name: plain[name].bfloat16()})
        moved = (master != plain[name]).float().mean().item()
        if name.endswith("_proj.weight"):
            assert moved > 0.98, f"{name}: only {moved:.3f} of the masters moved"
            # Uniform over one BF16 spacing: standard deviation spacing / sqrt(12), and no drift.
            spacing = 2.0 ** (torch.floor(torch.log2(plain[name].abs())) - 7)
            offset = (master - plain[name]) / spacing
            assert abs(offset.std().item() - 12**-0.5) < 0.01
            assert abs(offset.mean().item()) < 0.01
            assert offset.abs().max() <= 0.5
        else:
            assert moved == 0.0, name
    # The bytes that run are those of the dithered masters.
    wanted = quantize_matrix(decoder.layers[1].o_proj.weight.data, BLOCK_128X128)
    assert torch.equal(decoder.layers[1].o_proj.weight_q.view(torch.uint8), wanted.q.view(torch.uint8))


def test_dither_follows_its_seed(make_folder):
    folder, _ = make_folder()
    first, again, other = (
        masters_by_name(load_decoder(folder, get_recipe("block128"), dither_seed=seed)) for seed in (7, 7, 8)
    )
    name = "model.layers.0.mlp.down_proj.weight"
    assert torch.equal(first[name], again[name])
    assert (first[name] != other[name]).float().mean() > 0.95
    # Layers draw different numbers.
    a, b = (first[f"model.layers.{index}.mlp.down_proj.weight"] for index in (0, 1))
    fractions = [(x - x.bfloat16().float()) * 2.0 ** (7 - torch.floor(torch.log2(x.abs()))) for x in (a, b)]
    assert abs(torch.corrcoef(torch.stack([f.flatten() for f in fractions]))[0, 1].item()) < 0.03


def test_dither_takes_masters_off_the_fp8_ties(make_folder):
    folder, _ = make_folder(family="llama", hidden_size=256, intermediate_size=520)
    ties, total = fp8_ties(load_decoder(folder, get_recipe("block128")))
    dithered_ties, _ = fp8_ties(load_decoder(folder, get_recipe("block128"), dither_seed=0))
    print(f"on a tie: {ties} of {total} ({ties / total:.2%}), dithered {dithered_ties}")
    assert ties > 0.002 * total
    assert dithered_ties < 0.02 * ties


def test_dither_keeps_zeros_powers_of_two_and_extremes():
    decoder = tiny_decoder(tiny_config("llama"), get_recipe("block128"))
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, 2.0**-20, -(2.0**-120), 1e-40, 3.3895e38, -3.3895e38, 0.3])
    values = values.bfloat16().float()
    weight = decoder.layers[0].o_proj.weight.data
    weight.view(-1)[: len(values)] = values
    seen = []
    for seed in range(30):
        weight.view(-1)[: len(values)] = values
        dither_masters_(decoder, seed)
        now = weight.view(-1)[: len(values)].clone()
        same_bytes({"": now.bfloat16()}, {"": values.bfloat16()})
        seen.append(now)
    seen = torch.stack(seen)
    assert torch.isfinite(seen).all()
    assert (seen[:, :2] == 0.0).all(), "a zero is a pruned weight: it stays"
    # Below a power of two the spacing is half as wide: never further down than a quarter of the spacing above.
    assert seen[:, 2].min() >= 1.0 - 2.0**-9 and 1.0 < seen[:, 2].max() <= 1.0 + 2.0**-8
