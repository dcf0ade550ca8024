"""A training run whose rollout adds the blocks of K in the opposite order: the same weights and recipe, other kernels.

    python benchmarks/reordered_rollout.py examples/smollm2_reasoning.yaml output_dir=runs/smollm2_reordered

This is `octavo train` in `block128` but for that: the engine multiplies through a decoder of its own, over the same
masters and the same FP8 bytes, that sums each product from the last block of 128 to the first. What its mismatch costs
is what a unified flow whose kernels are not equal costs. The run is told so: `trainer.require_exact` is off.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from torch import Tensor

from octavo.kernels.gemm import product
from octavo.kernels.operands import Operand
from octavo.layers.linear import FP8Linear, quantized_layers
from octavo.numerics.exact import K_BLOCK
from octavo.rollout.engine import Engine, EngineConfig
from octavo.trainer import train as train_module
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import load_config
from octavo.trainer.metrics import Display
from octavo.trainer.run import Run, VLLMFactory, load_run


class BackwardsLinear(FP8Linear):
    """A linear layer that adds its blocks of K from the last to the first."""

    def multiply(self, x: Operand) -> Tensor:
        weight = self._prepared("backwards", lambda: backwards(self.weight_operand()))
        return product(backwards(x), weight, self.bias_hp, self._dtype)


def backwards(operand: Operand) -> Operand:
    """The operand with its filled blocks of K in the opposite order."""
    assert operand.by_blocks and operand.scale is not None, "precision.recipe must be block128"
    codes = operand.values.view(torch.uint8)  # E4M3 cannot be flipped as it is
    blocks = codes.unflatten(1, (-1, K_BLOCK)).flip(1).flatten(1)
    scale = operand.scale.flip(1) if operand.rows_per_scale > 1 else operand.scale.T.flip(0).T
    return replace(operand, values=blocks.view(operand.values.dtype), scale=scale)


def load_reordered(config: TrainConfig, display: Display, vllm: VLLMFactory | None = None) -> Run:
    """`load_run`, with an engine that adds backwards."""
    run = load_run(config, display, vllm)
    decoder = run.policy.with_recipe(run.policy.recipe)
    for layer in quantized_layers(decoder):
        layer.__class__ = BackwardsLinear
    return replace(run, engine=Engine(decoder, config.rollout.engine, sorted(run.engine.stop_token_ids)))


def main() -> None:
    """Train."""
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    config = load_config(TrainConfig, sys.argv[1], [*sys.argv[2:], "trainer.require_exact=false"])
    recipes = {config.precision.train_recipe().name, config.precision.rollout_recipe().name}
    if not config.runs_kernels or recipes != {"block128"} or not isinstance(config.rollout.engine, EngineConfig):
        raise SystemExit(
            "benchmarks/reordered_rollout.py reorders block128's kernels in octavo's engine: it wants device=cuda, "
            f"kernels=by_device, precision.recipe=block128 and rollout.engine.type=octavo; got {config.device}, "
            f"{config.kernels}, {' and '.join(sorted(recipes))} and {config.rollout.engine.type_name}"
        )
    train_module.load_run = load_reordered
    train_module.train(config, Display())


if __name__ == "__main__":
    main()
