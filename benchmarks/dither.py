"""What moving masters off the FP8 rounding ties does to the first updates (`model.dither_masters`).

    python benchmarks/dither.py examples/tiny/model --name tiny-qwen3        adds to benchmarks/results/dither.json

Sequences of random tokens with advantages of +1 and -1, AdamW at a learning rate, block128. Of each update

    step_amplification  sum of dW^ dW / sum of dW dW: how far FP8 weights W^ move along the masters' step; 1 is true
    flip_share          weight codes that change
    log_ratio_std       std of log r over the tokens since the start, in FP8; log_ratio_std_bf16 in the BF16 shadow

One CPU thread.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch

from octavo.bench.results import Results, Row, read_results
from octavo.layers.linear import quantized_layers
from octavo.models.checkpoint import load_decoder
from octavo.models.decoder import Decoder
from octavo.numerics.recipe import get_recipe
from octavo.rl.batch import Microbatch
from octavo.trainer.optimizer import Optimizer, OptimizerConfig
from octavo.trainer.policy import packed_logprobs

REPO = Path(__file__).resolve().parents[1]
RATES = (1e-6, 2e-4)
UPDATES = 3
MOST_LAYERS = 24
"""Layers whose weights are compared, evenly spaced."""
UNITS = {"step_amplification": "ratio", "flip_share": "share", "log_ratio_std": "nats", "log_ratio_std_bf16": "nats"}


def main() -> None:
    """Every rate with and without the dither, over seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--name", required=True, help="of the model, in the results")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--tokens", type=int, default=512)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results("dither", "python benchmarks/dither.py MODEL --name NAME")
    path = REPO / "benchmarks/results/dither.json"
    mine = f"dither/{args.name}/"
    if path.exists():
        results.rows = [row for row in read_results(path).values() if not row.case.startswith(mine)]
    for rate in args.rates:
        for dithered in (False, True):
            runs = [first_updates(args.model, seed, dithered, rate, args.tokens) for seed in range(args.seeds)]
            for update in range(UPDATES):
                for metric, unit in UNITS.items():
                    values = [run[update][metric] for run in runs]
                    case = f"{mine}lr {rate:g}, {'dithered' if dithered else 'as loaded'}, update {update + 1}"
                    note = f"seeds 0..{args.seeds - 1}: " + ", ".join(f"{value:.4g}" for value in values)
                    results.add(Row(case=case, metric=metric, value=statistics.fmean(values), unit=unit, note=note))


def first_updates(path: str, seed: int, dithered: bool, rate: float, num_tokens: int) -> list[dict[str, float]]:
    """Figures of the first updates of a model."""
    recipe = get_recipe("block128")
    policy = load_decoder(path, recipe, max_tokens=64, dither_seed=seed if dithered else None)
    batch = random_tokens(policy.config.vocab_size, num_tokens // 32, seed)
    optimizer = Optimizer(dict(policy.named_parameters()), OptimizerConfig(lr=rate), UPDATES)
    layers = [layer for layer in quantized_layers(policy) if layer.quantized]
    layers = layers[:: max(1, len(layers) // MOST_LAYERS)]
    with torch.no_grad():
        start = packed_logprobs(policy, batch, 1.0)[0], packed_logprobs(policy, batch, 1.0, shadow=True)[0]
    figures = []
    for _ in range(UPDATES):
        logprobs, _ = packed_logprobs(policy, batch, 1.0)
        (-(batch.advantages * logprobs)[batch.loss_mask].mean()).backward()
        before = [(layer.weight.detach().clone(), layer.quantized_weight("weight_q").dequantize()) for layer in layers]
        codes = [layer.weight_q.float() for layer in layers]
        optimizer.step()
        policy.requantize_()
        along = size = flipped = total = 0.0
        for layer, (master, decoded), code in zip(layers, before, codes, strict=True):
            moved = (layer.weight.detach() - master).double()
            along += ((layer.quantized_weight("weight_q").dequantize() - decoded).double() * moved).sum().item()
            size += moved.square().sum().item()
            flipped += (layer.weight_q.float() != code).sum().item()
            total += code.numel()
        figures.append(
            {
                "step_amplification": along / size,
                "flip_share": flipped / total,
                "log_ratio_std": std_since(policy, batch, start[0], shadow=False),
                "log_ratio_std_bf16": std_since(policy, batch, start[1], shadow=True),
            }
        )
    return figures


@torch.no_grad()
def std_since(policy: Decoder, batch: Microbatch, old: torch.Tensor, shadow: bool) -> float:
    """Standard deviation of the log-ratio against old log-probabilities, in nats."""
    now = packed_logprobs(policy, batch, 1.0, shadow=shadow)[0]
    return (now - old)[batch.loss_mask].std(correction=0).item()


def random_tokens(vocab_size: int, num_sequences: int, seed: int) -> Microbatch:
    """Sequences of 32 tokens, the first a prompt; half of them rewarded, half punished."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(32).repeat(num_sequences)
    index = torch.repeat_interleave(torch.arange(num_sequences), 32)
    return Microbatch(
        tokens=torch.randint(vocab_size, (num_sequences * 32,), generator=generator),
        positions=positions,
        cu_seqlens=torch.arange(num_sequences + 1) * 32,
        sequence_index=index,
        loss_mask=positions > 0,
        advantages=torch.where(index % 2 == 0, 1.0, -1.0),
        rollout_logprobs=torch.zeros(num_sequences * 32),
    )


if __name__ == "__main__":
    main()
