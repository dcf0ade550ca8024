"""A training step of the Qwen3-8B shape with random weights: tokens a second, model FLOP/s, memory, the other passes.

    python benchmarks/train.py [4096] [8192] [16384] [peers] [14b] [32b]    # all of them where none is named

A table, and benchmarks/results/train.json (under $OUT if that is set), which keeps the figures of earlier calls.

4096 ...   sequences of so many tokens under every recipe, all in the same formats of masters and moments
peers      torchao's Float8Linear in place of the linear layers of the `bf16` decoder; BF16 weights
14b, 32b   the shapes of Qwen3-14B and 32B, from two reduced depths on along a line: extrapolated

A step is one packed microbatch of 16,384 tokens and an optimiser step. Where no length is named, sequences have 8,192.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from octavo.bench.results import Results, Row
from octavo.bench.rollout import random_decoder
from octavo.bench.train import (
    FORMATS,
    TrainFormats,
    TrainSpeed,
    bench_train,
    formats_that_fit,
    model_flops,
    random_batch,
    time_passes,
)
from octavo.layers.linear import FP8Linear
from octavo.models.config import decoder_config
from octavo.models.decoder import Decoder
from octavo.numerics.recipe import Recipe, get_recipe


def shape(D: int, F: int, H: int, num_layers: int) -> Qwen3Config:
    """A Qwen3 of 8 key-value heads."""
    return Qwen3Config(
        vocab_size=151936,
        hidden_size=D,
        intermediate_size=F,
        num_hidden_layers=num_layers,
        num_attention_heads=H,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
    )


SHAPES = {"8b": shape(4096, 12288, 32, 36), "14b": shape(5120, 17408, 40, 40), "32b": shape(5120, 25600, 64, 64)}
PHASES = ("4096", "8192", "16384", "peers", "14b", "32b")
DEPTHS = (4, 8)
"""Layers that are measured of a shape that does not fit."""
RECIPES = ("bf16", "block128", "w8a16", "rowwise", "tensorwise")
TOKENS = 16384
"""Of a step."""
LENGTH = 8192
"""Of a sequence: of the goals, the peers and the extrapolated shapes."""
GOALS = {
    ("bf16", "tok_s"): 10500.0,
    ("block128", "tok_s"): 13000.0,
    ("block128", "speedup_vs_bf16"): 1.25,
    ("tensorwise", "speedup_vs_bf16"): 1.4,
    ("block128", "reference_speedup_vs_bf16"): 1.5,
    ("block128", "weight_update_ms"): 15.0,
}
"""At LENGTH."""
UNITS = {"tok_s": "tok/s", "tflop_s": "TFLOP/s", "peak_gib": "GiB", "speedup_vs_bf16": "x"}


class PeerLinear(nn.Module):
    """Another library's linear layer in the place of an `FP8Linear`.

    Args:
        layer: whose weight it takes, in BF16.
        convert: makes the other layer of a BF16 `nn.Linear`.
    """

    def __init__(self, layer: FP8Linear, convert: Callable[[nn.Linear], nn.Module]) -> None:
        super().__init__()
        assert layer.bias is None, "Qwen3 has none"
        self.splits, self.observing = layer.splits, False
        linear = nn.Linear(layer.in_features, sum(layer.splits), bias=False, device="meta")
        linear.weight = nn.Parameter(layer.weight.detach().bfloat16())
        self.layer = convert(linear)

    def forward(self, x: Tensor, *, shadow: bool = False) -> Tensor:
        """x [T, K] bf16 -> [T, N] bf16."""
        return self.layer(x)


def replace_linears_(decoder: Decoder, convert: Callable[[nn.Linear], nn.Module]) -> None:
    """Another library's layers in place of all of the decoder's, which then trains in BF16 beside them."""
    for block in decoder.blocks():
        for name, layer in list(block.named_children()):
            if isinstance(layer, FP8Linear):
                setattr(block, name, PeerLinear(layer, convert))
    decoder.fuses = False
    decoder.round_masters_()


def peers() -> dict[str, Callable[[nn.Linear], nn.Module]]:
    """Peer -> what makes its layer."""
    if importlib.util.find_spec("torchao") is None:
        print("torchao is not installed here, and its layers are left out")
        return {}
    float8 = importlib.import_module("torchao.float8")

    def converter(name: str) -> Callable[[nn.Linear], nn.Module]:
        config = float8.Float8LinearConfig.from_recipe_name(name)

        def convert(linear: nn.Linear) -> nn.Module:
            layer = float8.convert_to_float8_training(nn.Sequential(linear), config=config)
            return torch.compile(layer, dynamic=False)

        return convert

    return {f"torchao {name}": converter(name) for name in ("tensorwise", "rowwise")}


def rows_of(case: str, recipe: str, speed: TrainSpeed, bf16: TrainSpeed | None, at_goal: bool) -> list[Row]:
    """What there is to say of a step; speed-ups where BF16 was measured, goals at their number of tokens."""
    values = {
        "tok_s": speed.tok_s,
        "tflop_s": speed.tflop_s,
        "reference_ms": speed.reference_ms,
        "shadow_ms": speed.shadow_ms,
        "weight_update_ms": speed.weight_update_ms,
        "peak_gib": speed.peak_gib,
    }
    if bf16 is not None:
        values["speedup_vs_bf16"] = speed.tok_s / bf16.tok_s
        values["reference_speedup_vs_bf16"] = speed.reference_tok_s / bf16.reference_tok_s
    return [
        Row(
            case=case,
            metric=metric,
            value=value,
            unit=UNITS.get(metric.removeprefix("reference_"), "ms"),
            goal=GOALS.get((recipe, metric)) if at_goal else None,
            better="lower" if metric.endswith(("_ms", "_gib")) else "higher",
            note=speed.formats,
        )
        for metric, value in values.items()
    ]


def every_recipe(results: Results, length: int) -> None:
    """The 8B shape, in the most bytes that fit under all recipes."""
    hf_config = SHAPES["8b"]
    config, recipes = decoder_config(hf_config), {name: precision(name) for name in RECIPES}
    free = torch.cuda.mem_get_info()[0]
    formats = max((formats_that_fit(config, recipe, TOKENS, free) for recipe in recipes.values()), key=FORMATS.index)
    bf16 = None
    for name, recipe in recipes.items():
        speed = bench_train(config, hf_config, recipe, TOKENS, length, formats)
        for row in rows_of(f"train/qwen3-8b/{length}/{name}", name, speed, bf16, length == LENGTH):
            results.add(row)
        bf16 = bf16 or speed
        empty_cache()


def precision(name: str) -> Recipe:
    """FP8 recipes with FP8 keys and values, BF16 without."""
    return get_recipe(name, kv_cache="bf16" if name == "bf16" else "fp8")


def every_peer(results: Results) -> None:
    """torchao's layers in the 8B shape: weights in BF16, gradients in FP32, moments in int8."""
    hf_config, formats = SHAPES["8b"], FORMATS[2]
    batch = random_batch(hf_config.vocab_size, TOKENS, LENGTH, "cuda")
    for name, convert in peers().items():
        torch.compiler.reset()  # or the second peer finds all compiled forms taken, and runs uncompiled
        decoder = random_decoder(decoder_config(hf_config), hf_config, get_recipe("bf16"), LENGTH, masters=True)
        replace_linears_(decoder, convert)
        try:
            speed = time_passes(decoder, batch, formats)
        except (RuntimeError, AssertionError, TypeError) as error:
            print(f"{name} does not run here: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        finally:
            del decoder
            empty_cache()
        for row in rows_of(f"train/qwen3-8b/{LENGTH}/{name}", name, speed, None, False):
            if row.metric not in ("shadow_ms", "weight_update_ms"):  # of which it has none
                results.add(row)


def extrapolated(shallow: TrainSpeed, deep: TrainSpeed, depths: tuple[int, int], hf_config: Qwen3Config) -> TrainSpeed:
    """The whole depth on the line through two: every layer takes the same time."""
    share = (hf_config.num_hidden_layers - depths[0]) / (depths[1] - depths[0])
    found = {}
    for name in ("step_ms", "reference_ms", "shadow_ms", "weight_update_ms", "peak_gib"):
        first, second = getattr(shallow, name), getattr(deep, name)
        found[name] = first + share * (second - first)
    lengths = [deep.sequence_tokens] * (deep.tokens // deep.sequence_tokens)
    flops = model_flops(decoder_config(hf_config), lengths, deep.tokens - len(lengths))
    note = f"extrapolated from {depths[0]} and {depths[1]} layers, {shallow.step_ms:.1f} and {deep.step_ms:.1f} ms"
    return replace(deep, **found, flops=flops, formats=f"{note}; {deep.formats}")


def reduced_depth(results: Results, model: str) -> None:
    """A shape that does not fit, under BF16 and the default recipe."""
    formats: TrainFormats = FORMATS[2]
    bf16 = None
    for name in ("bf16", "block128"):
        speeds = []
        for depth in DEPTHS:
            hf_config = shape_of_depth(SHAPES[model], depth)
            speeds.append(bench_train(decoder_config(hf_config), hf_config, precision(name), TOKENS, LENGTH, formats))
            empty_cache()
        speed = extrapolated(*speeds, DEPTHS, SHAPES[model])
        for row in rows_of(f"train/qwen3-{model}, extrapolated/{LENGTH}/{name}", name, speed, bf16, False):
            results.add(row)
        bf16 = bf16 or speed


def shape_of_depth(hf_config: Qwen3Config, depth: int) -> Qwen3Config:
    """The same widths, of so many layers."""
    return shape(hf_config.hidden_size, hf_config.intermediate_size, hf_config.num_attention_heads, depth)


def empty_cache() -> None:
    """Give back what the last case held."""
    gc.collect()
    torch.cuda.empty_cache()


def main() -> None:
    """Measure what is named, print, write."""
    phases = sys.argv[1:] or PHASES
    if unknown := [phase for phase in phases if phase not in PHASES]:
        raise SystemExit(f"no phase {unknown[0]!r}; name some of {' '.join(PHASES)}")
    results = Results("train", f"python benchmarks/train.py {' '.join(sys.argv[1:])}".strip(), resume=True)
    for phase in phases:
        if phase.isdecimal():
            every_recipe(results, int(phase))
        elif phase == "peers":
            every_peer(results)
        else:
            reduced_depth(results, phase)


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        print("benchmarks/train.py measures a GPU, and there is none here: skipped")
