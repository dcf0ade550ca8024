"""How much more each recipe clips than BF16 would, and what calibration makes of it, on the tiny model.

    python benchmarks/overclip.py --seeds 5        writes benchmarks/results/overclip.json and docs/overclip.svg

One run of examples/overclip_tiny.yaml a seed and learning rate gives the weights and the tokens. On each step's last
mini-batch, before its update, every recipe runs on the same masters, now and before the step: the same tokens, weights
and advantages for all. r_bf16 is the BF16 shadow's ratio. A run is kept in --folder once done, so the same command
goes on after a kill. One CPU thread, about a minute of it a run.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.bench.results import Results, Row
from octavo.kernels.operands import Operand
from octavo.layers import linear
from octavo.models.decoder import Decoder
from octavo.numerics.recipe import get_recipe
from octavo.rl import calibration
from octavo.rl.batch import MiniBatch
from octavo.rl.calibration_config import ExactCalibration, GridCalibration, SymmetricCalibration
from octavo.rl.losses import ClipBounds, ClipConfig
from octavo.rl.mismatch import amplification
from octavo.trainer import loop
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import load_config
from octavo.trainer.divergence import StepRecord
from octavo.trainer.files import write_whole
from octavo.trainer.metrics import Display
from octavo.trainer.policy import packed_logprobs
from octavo.trainer.progress import Progress
from octavo.trainer.reference import nudged_gain
from octavo.trainer.rollout import batches as rollout_batches
from octavo.trainer.rollout import collect, judge
from octavo.trainer.run import Run, load_run, make_optimizer

REPO = Path(__file__).resolve().parents[1]
RECIPES = ("block128", "rowwise", "tensorwise_static", "tensorwise", "w8a16", "bf16", "fp32")
OTHER_ORDER = "block128, other order"
CASES = (*RECIPES, OTHER_ORDER)
"""The last: the ratio's numerator by another kernel than its denominator, as where two engines share a recipe."""
CLIP = ClipConfig()
FIXED = ClipBounds(low=0.5, high=2.0)
SMALL: dict[str, Any] = {"min_tokens": 100, "min_clipped": 5}
FORMS = {
    "grid": GridCalibration(**SMALL),
    "exact": ExactCalibration(**SMALL),
    "symmetric": SymmetricCalibration(**SMALL),
}
RATES = ("2e-4", "5e-5")
"""Learning rates: ratios that move as in the demo, and ratios that hardly move, where noise is most of them."""
NULL_EVERY = 3
"""Steps from one null line, and one count of flipped codes, to the next."""


Figures = dict[str, dict[str, float | None]]
"""Of each case, by metric; None where there is none."""


def main() -> None:
    """Run what is missing, then write the results and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=REPO / "runs/overclip")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.folder.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[Figures]] = {rate: [] for rate in RATES}
    for rate in RATES:
        for seed in range(args.seeds):
            path = args.folder / f"lr{rate}-seed{seed}.json"
            if not path.exists():
                write_whole(path, json.dumps(one_run(seed, rate)))
            runs[rate].append(json.loads(path.read_text()))
            print(f"learning rate {rate}, seed {seed} done", flush=True)
    results = Results("overclip", f"python benchmarks/overclip.py --seeds {args.seeds}")
    for rate, seeds in runs.items():
        for case in CASES:
            for metric in seeds[0][case]:
                values = [value for seed in seeds if (value := seed[case][metric]) is not None]
                if values:
                    results.add(
                        Row(
                            case=f"overclip/tiny-qwen3, lr {rate}/{case}",
                            metric=metric,
                            value=statistics.fmean(values),
                            unit=unit_of(metric),
                            note=f"{len(values)} of {args.seeds} seeds: " + ", ".join(f"{x:.4g}" for x in values),
                        )
                    )
    draw(runs, REPO / "docs/overclip.svg")
    for rate, seeds in runs.items():
        print(f"\nlearning rate {rate}\n\n{table(seeds)}")


def one_run(seed: int, rate: str) -> Figures:
    """Figures of every case over the steps of one run."""
    overrides = [f"seed={seed}", f"optimizer.lr={rate}"]
    config = load_config(TrainConfig, REPO / "examples/overclip_tiny.yaml", overrides)
    config = replace(config, model=replace(config.model, path=str(REPO / config.model.path)))
    run = load_run(config, Display())
    decoders = {name: run.policy.with_recipe(get_recipe(name)) for name in RECIPES}
    decoders["block128"] = run.policy
    optimizer, bounds = make_optimizer(run), config.start_bounds()
    progress = Progress(bounds=bounds)
    seen: dict[str, list[dict[str, Tensor]]] = {case: [] for case in CASES}
    rare: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for step in range(config.trainer.num_steps):
        _, groups, _ = collect(run, progress, StepRecord(step=step))
        progress.next_prompt += len(groups.problems)
        mini_batches = rollout_batches(config, groups.completions, judge(config, groups))
        batches = [loop.annotate(run, None, batch) for batch in mini_batches]
        for decoder in decoders.values():
            decoder.freeze_activation_scales_()
        old, old_codes = every_numerics(run, decoders, batches[-1], step)
        for batch in batches:
            if batch is batches[-1]:
                now, codes = every_numerics(run, decoders, batch, step)
                note_step(seen, batch, old, now)
                if step % NULL_EVERY == 0:
                    note_rare(rare, batch, now, every_null(run, decoders, batch, step), old_codes, codes)
            loop.accumulate(run, batch, bounds, lambda count: None)
            optimizer.step()
            for decoder in decoders.values():
                decoder.requantize_()
    return {case: figures(seen[case]) | means(rare[case]) for case in CASES}


Codes = dict[str, list[Tensor]]
"""Of each recipe that quantises activations, the E4M3 codes that its layers multiply, in order."""


@torch.no_grad()
def every_numerics(
    run: Run, decoders: dict[str, Decoder], batch: MiniBatch, step: int
) -> tuple[dict[str, Tensor], Codes]:
    """[T] log-probabilities of the mini-batch in every case, and the codes where they are counted; under `shadow`
    those of the BF16 shadow."""
    temperature = run.config.rollout.sampling.temperature
    logprobs, codes = {}, {}

    def of(decoder: Decoder, shadow: bool = False) -> Tensor:
        return torch.cat([packed_logprobs(decoder, part, temperature, shadow=shadow)[0] for part in batch.microbatches])

    for name, decoder in decoders.items():
        with noted_codes() as kept:
            logprobs[name] = of(decoder)
        if step % NULL_EVERY == 0 and decoder.recipe.fprop.left is not None:
            codes[name] = list(kept)
    with other_order():
        logprobs[OTHER_ORDER] = of(run.policy)
    logprobs["shadow"] = of(run.policy, shadow=True)
    return logprobs, codes


def every_null(run: Run, decoders: dict[str, Decoder], batch: MiniBatch, step: int) -> tuple[dict[str, Tensor], Codes]:
    """The same after one BF16 step of a norm gain."""
    with nudged_gain(run.policy):  # the masters are shared, so every recipe sees it
        return every_numerics(run, decoders, batch, step)


@contextmanager
def noted_codes() -> Iterator[list[Tensor]]:
    """The left operands of FP8 products, as they are multiplied."""
    codes: list[Tensor] = []
    original = linear.product

    def noting(left: Operand, right: Operand, *rest: Any) -> Tensor:
        if left.scale is not None:
            codes.append(left.values.float())
        return original(left, right, *rest)

    linear.product = noting
    try:
        yield codes
    finally:
        linear.product = original


@contextmanager
def other_order() -> Iterator[None]:
    """Products summed in FP32 from the last K to the first, as another kernel might."""
    original = linear.product

    def reversed_product(left: Operand, right: Operand, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        y = left.decode().float().flip(1) @ right.decode().float().flip(1).T
        return (y if bias is None else y + bias.float()).to(dtype)

    linear.product = reversed_product
    try:
        yield
    finally:
        linear.product = original


def note_step(
    seen: dict[str, list[dict[str, Tensor]]], batch: MiniBatch, old: dict[str, Tensor], now: dict[str, Tensor]
) -> None:
    """Keep the loss tokens of a mini-batch: their log-probabilities in every case, and the shadow's."""
    mask, advantages = batch.gather("loss_mask"), batch.gather("advantages")
    for case, kept in seen.items():
        before = old["block128" if case == OTHER_ORDER else case]
        tensors = (now[case], before, now["shadow"], old["shadow"], advantages)
        names = ("logprobs", "old", "shadow", "shadow_old", "advantages")
        kept.append({name: tensor[mask] for name, tensor in zip(names, tensors, strict=True)})


def note_rare(
    rare: dict[str, list[dict[str, float]]],
    batch: MiniBatch,
    now: dict[str, Tensor],
    null: tuple[dict[str, Tensor], Codes],
    old_codes: Codes,
    codes: Codes,
) -> None:
    """The null line of every case, and the codes that flip by it and by the step's updates."""
    mask, advantages = batch.gather("loss_mask"), batch.gather("advantages")
    plain = CLIP.bounds()
    for case, kept in rare.items():
        log_ratio = (null[0][case] - now["block128" if case == OTHER_ORDER else case])[mask]
        ratio = torch.exp(log_ratio)
        found = {
            "null_log_ratio_std": log_ratio.std(correction=0).item(),
            "null_clip_share": clipped(ratio, advantages[mask], plain).double().mean().item(),
        }
        if case in codes:
            found["null_flip_share"] = flip_share(codes[case], null[1][case])
            found["flip_share"] = flip_share(old_codes[case], codes[case])
        kept.append(found)


def flip_share(before: list[Tensor], after: list[Tensor]) -> float:
    """Share of codes that differ."""
    differing = sum(int((a != b).sum()) for a, b in zip(before, after, strict=True))
    return differing / sum(a.numel() for a in before)


def means(rows: list[dict[str, float]]) -> dict[str, float | None]:
    """Mean of each figure; None where a case has none."""
    names = ("null_log_ratio_std", "null_clip_share", "null_flip_share", "flip_share")
    return {name: statistics.fmean(row[name] for row in rows) if name in rows[0] else None for name in names}


def clipped(ratio: Tensor, advantages: Tensor, bounds: ClipBounds) -> Tensor:
    """[N] bool: A < 0 at or below the low bound, A > 0 above the high one."""
    return (advantages < 0) & (ratio <= bounds.low) | (advantages > 0) & (ratio > bounds.high)


def figures(steps: list[dict[str, Tensor]]) -> dict[str, float | None]:
    """Figures of one case over all its tokens."""
    logprobs, old, shadow, shadow_old, advantages = (
        torch.cat([step[name] for step in steps]) for name in ("logprobs", "old", "shadow", "shadow_old", "advantages")
    )
    ratio, shadow_ratio = torch.exp(logprobs - old), torch.exp(shadow - shadow_old)
    ones, mask = torch.ones_like(ratio), torch.ones_like(ratio, dtype=torch.bool)
    found: dict[str, float | None] = {
        "log_ratio_std": (logprobs - old).std(correction=0).item(),
        "log_ratio_std_bf16": (shadow - shadow_old).std(correction=0).item(),
        "noise_std": (logprobs - old - shadow + shadow_old).std(correction=0).item(),
        "amplification": amplification(logprobs, shadow, old, shadow_old, mask)["noise/amplification"],
        "clip_share_bf16": clipped(shadow_ratio, advantages, CLIP.bounds()).double().mean().item(),
    }
    found |= at_bounds("plain", ratio, shadow_ratio, advantages, CLIP.bounds())
    found |= at_bounds("fixed", ratio, shadow_ratio, advantages, FIXED)
    for name, config in FORMS.items():
        measured = calibration.measure(ratio, shadow_ratio, ones, advantages, mask, CLIP, config)
        target = calibration.calibrate(FIXED, measured, config).target
        bounds = None if target is None else ClipBounds(*target)
        found |= at_bounds(name, ratio, shadow_ratio, advantages, bounds)
        found |= {f"{name}_low": bounds and bounds.low, f"{name}_high": bounds and bounds.high}
    return found


def at_bounds(
    name: str, ratio: Tensor, shadow_ratio: Tensor, advantages: Tensor, bounds: ClipBounds | None
) -> dict[str, float | None]:
    """What FP8 clips at some bounds, against what BF16 clips at the plain ones; None where there are no bounds.

    overclip: tokens clipped, over those of BF16; _low: punished ones. share: tokens clipped, over all. hit: of BF16's,
    those that are clipped too. balance: rewarded over punished contribution, over BF16's.
    """
    keys = [f"{name}_{key}" for key in ("overclip", "overclip_low", "share", "hit", "balance")]
    if bounds is None:
        return dict.fromkeys(keys)
    plain, wanted = clipped(ratio, advantages, bounds), clipped(shadow_ratio, advantages, CLIP.bounds())
    low = advantages < 0
    values = (
        quotient(plain.sum(), wanted.sum()),
        quotient((plain & low).sum(), (wanted & low).sum()),
        plain.double().mean().item(),
        quotient((plain & wanted).sum(), wanted.sum()),
        quotient(balance(ratio, advantages, plain), balance(shadow_ratio, advantages, wanted)),
    )
    return dict(zip(keys, values, strict=True))


def balance(ratio: Tensor, advantages: Tensor, dropped: Tensor) -> Tensor:
    """Contribution of the rewarded tokens that keep their gradient over that of the punished ones."""
    size = (ratio * advantages.abs()).double() * ~dropped
    return size[advantages > 0].sum() / size[advantages < 0].sum()


def quotient(numerator: Tensor, denominator: Tensor) -> float | None:
    """As a number; None over 0."""
    return (numerator / denominator).item() if denominator else None


def unit_of(metric: str) -> str:
    """Of a figure, by its name."""
    if metric.endswith(("_std", "_std_bf16")):
        return "nats"
    return "ratio" if metric.endswith(("overclip", "_low", "_high", "balance", "amplification")) else "share"


COLUMNS = {
    "std(log r)": "log_ratio_std",
    "noise": "noise_std",
    "null line": "null_log_ratio_std",
    "amplification": "amplification",
    **{name: f"{name}_overclip" for name in ("plain", "fixed", *FORMS)},
    "plain hit": "plain_hit",
    "exact hit": "exact_hit",
    "fixed balance": "fixed_balance",
}
"""Of the table in docs/calibration.md."""


def table(seeds: list[Figures]) -> str:
    """Means over seeds as Markdown; how many seeds have a figure, where not all do."""
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for case in CASES:
        cells = []
        for metric in COLUMNS.values():
            values = [value for seed in seeds if (value := seed[case][metric]) is not None]
            some = f" ({len(values)})" if 0 < len(values) < len(seeds) else ""
            cells.append(f"{statistics.fmean(values):.{3 if metric.endswith('_std') else 2}f}{some}" if values else "")
        lines.append(f"| {case} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(runs: dict[str, list[Figures]], path: Path) -> None:
    """Tokens that each case clips, over those of BF16, by the bounds that it clips at; one dot a seed."""
    from matplotlib import pyplot

    pyplot.rcParams.update({"svg.hashsalt": "octavo", "svg.fonttype": "none"})  # the same figures, the same file
    names = {"plain": "[0.8, 1.28]", "fixed": "[0.5, 2.0]", **{form: f"calibrated, {form}" for form in FORMS}}
    figure, panels = pyplot.subplots(len(runs), figsize=(9, 3.2 * len(runs)), sharex=True)
    for axes, (rate, seeds) in zip(panels, runs.items(), strict=True):
        for place, (name, label) in enumerate(names.items()):
            points = [
                (index + (place - 2) * 0.15, value)
                for index, case in enumerate(CASES)
                for seed in seeds
                if (value := seed[case][f"{name}_overclip"]) is not None
            ]
            axes.plot([x for x, _ in points], [y for _, y in points], ".", label=label, alpha=0.8)
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set_yscale("symlog", linthresh=0.25)
        axes.set_yticks([0, 0.25, 0.5, 1, 2, 4, 8], ["0", "0.25", "0.5", "1", "2", "4", "8"])
        axes.set_ylabel(f"lr {rate}: clipped / BF16's")
    panels[-1].set_xticks(range(len(CASES)), CASES, rotation=20, ha="right")
    panels[0].legend(fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.5, 1.16), frameon=False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
