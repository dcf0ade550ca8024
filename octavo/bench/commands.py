"""`octavo bench`: what FP8 gains on this machine, and result files side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

bench = typer.Typer(
    help="Measure this machine: what FP8 gains here; result files side by side.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)


@bench.command(
    "gemm",
    epilog="- `octavo bench gemm --model Qwen/Qwen3-8B`\n\n"
    "- `octavo bench gemm --model models/smollm2 --recipe w8a16 --train-tokens 0 --decode-tokens 1 --decode-tokens 64`",
)
def bench_gemm(
    model: Annotated[str, typer.Option(metavar="FOLDER", help="Model folder or hub id; its config.json is read.")],
    recipe: Annotated[str, typer.Option(help="Compared with BF16.")] = "block128",
    train_tokens: Annotated[int, typer.Option(min=0, help="Tokens of a training batch; 0 leaves training out.")] = 8192,
    decode_tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Sequences decoded at once, repeatable. [default: 16, 64, 128]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """What a recipe gains over BF16 in each linear layer of a model on this GPU, and which kernels ran.

    Casts are included; weights are random. Says plainly where FP8 will not help.
    """
    from rich.console import Console

    from octavo.bench import gemm
    from octavo.bench.measure import require_cuda
    from octavo.bench.page import show_gains
    from octavo.models.config import read_config
    from octavo.numerics.recipe import get_recipe

    chosen = get_recipe(recipe)
    require_cuda("octavo bench gemm")
    config = read_config(model)[0]
    gains = list(gemm.bench_gemm(config, chosen, train_tokens, decode_tokens or [16, 64, 128]))
    if as_json:
        print(json.dumps([{**vars(gain), "speedup": gain.speedup} for gain in gains], indent=1))
    else:
        show_gains(gains, recipe, Console(highlight=False, soft_wrap=True))


@bench.command(
    "rollout",
    epilog="- `octavo bench rollout --model Qwen/Qwen3-8B`\n\n"
    "- `octavo bench rollout --model models/smollm2 --recipe w8a16 --kv-cache bf16 --batch 1 --batch 256`",
)
def bench_rollout(
    model: Annotated[str, typer.Option(metavar="FOLDER", help="Model folder or hub id; its config.json is read.")],
    recipe: Annotated[str, typer.Option(help="Precision flow.")] = "block128",
    kv_cache: Annotated[str, typer.Option(help="Format of keys and values: fp8 or bf16.")] = "fp8",
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Sequences decoded at once, repeatable. [default: 1, 32, 128]")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(min=1, help="Tokens before them, repeatable. [default: 1024, 4096]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """How fast the engine decodes a model of this shape on this GPU, beside the bound that memory sets.

    Weights are random; sampling is included.
    """
    from rich.console import Console

    from octavo.bench.page import show_decode
    from octavo.bench.rollout import decode_speeds
    from octavo.models.config import read_config
    from octavo.numerics.recipe import get_recipe

    chosen = get_recipe(recipe, kv_cache=kv_cache)
    speeds = decode_speeds(*read_config(model), chosen, batch or [1, 32, 128], context or [1024, 4096])
    if as_json:
        figures = [{**vars(s), "tok_s": s.tok_s, "bandwidth_share": s.bandwidth_share} for s in speeds]
        print(json.dumps(figures, indent=1))
    else:
        show_decode(speeds, Console(highlight=False, soft_wrap=True))


@bench.command(
    "train",
    epilog="- `octavo bench train --model Qwen/Qwen3-8B`\n\n"
    "- `octavo bench train --model models/smollm2 --recipe w8a16 --tokens 8192 --tokens 16384 --sequence-tokens 1024`",
)
def bench_train(
    model: Annotated[str, typer.Option(metavar="FOLDER", help="Model folder or hub id; its config.json is read.")],
    recipe: Annotated[str, typer.Option(help="Precision flow.")] = "block128",
    kv_cache: Annotated[str, typer.Option(help="Format of keys and values: fp8 or bf16.")] = "fp8",
    tokens: Annotated[
        list[int] | None, typer.Option(min=2, help="Tokens of a packed batch, repeatable. [default: 8192]")
    ] = None,
    sequence_tokens: Annotated[
        int | None, typer.Option(min=2, help="Tokens of each sequence in it. [default: one sequence]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """How fast a model of this shape trains on this GPU: a step, the other passes, the weight update, memory.

    Weights are random. Masters and moments are FP32 where that fits, else smaller; the formats are printed.
    """
    from rich.console import Console

    from octavo.bench.page import show_training
    from octavo.bench.train import train_speeds
    from octavo.models.config import read_config
    from octavo.numerics.recipe import get_recipe

    chosen = get_recipe(recipe, kv_cache=kv_cache)
    batches = [(count, sequence_tokens or count) for count in tokens or [8192]]
    speeds = train_speeds(*read_config(model), chosen, batches)
    if as_json:
        print(json.dumps([{**vars(s), "tok_s": s.tok_s, "tflop_s": s.tflop_s} for s in speeds], indent=1))
    else:
        show_training(speeds, Console(highlight=False, soft_wrap=True))


@bench.command(
    "step",
    epilog="- `octavo bench step --model Qwen/Qwen3-1.7B`\n\n"
    "- `octavo bench step --model models/smollm2 --recipe w8a16 --completion-tokens 512 --prompts 16`",
)
def bench_step(
    model: Annotated[str, typer.Option(metavar="FOLDER", help="Model folder or hub id; its config.json is read.")],
    recipe: Annotated[str, typer.Option(help="Precision flow.")] = "block128",
    kv_cache: Annotated[str, typer.Option(help="Format of keys and values: fp8 or bf16.")] = "fp8",
    completion_tokens: Annotated[
        list[int] | None, typer.Option(min=2, help="Tokens of each completion, repeatable. [default: 1024]")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a step, a multiple of the mini-batches.")] = 8,
    group_size: Annotated[int, typer.Option(min=1, help="Completions of each.")] = 8,
    mini_batches: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = 4,
    sampled: Annotated[
        bool, typer.Option("--sampled", help="From samples of each phase, in a tenth of the time.")
    ] = False,
    lend_memory: Annotated[bool, typer.Option("--lend-memory", help="As rollout.engine.lend_memory.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """How long a GRPO step of a model of this shape takes on this GPU, phase by phase, beside what it must take.

    Weights are random, and completions have a forced length.
    """
    from dataclasses import asdict

    from rich.console import Console

    from octavo.bench.page import show_steps
    from octavo.bench.step import step_times, whole_step
    from octavo.bench.step_plan import StepWork
    from octavo.bench.step_sampled import sampled_step
    from octavo.models.config import read_config
    from octavo.numerics.recipe import get_recipe

    chosen = get_recipe(recipe, kv_cache=kv_cache)
    works = [
        StepWork(
            completion_tokens=length,
            prompt_tokens=prompt_tokens,
            num_prompts=prompts,
            group_size=group_size,
            num_mini_batches=mini_batches,
            lends_memory=lend_memory,
        )
        for length in completion_tokens or [1024]
    ]
    steps = list(step_times(*read_config(model), chosen, works, sampled_step if sampled else whole_step))
    if as_json:
        names = ("seconds", "calibration_share", "tok_s", "tok_s_rarely_checked")
        print(json.dumps([asdict(step) | {name: getattr(step, name) for name in names} for step in steps], indent=1))
    else:
        show_steps(steps, Console(highlight=False, soft_wrap=True))


@bench.command("compare", epilog="- `octavo bench compare benchmarks/results/gemm.json /tmp/gemm.json`")
def bench_compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="Result file of a benchmark.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="Another of the same benchmark.")],
) -> None:
    """Two result files side by side."""
    from rich.console import Console

    from octavo.bench.page import show_comparison
    from octavo.bench.results import compare

    show_comparison(compare(first, second), (first.name, second.name), Console(highlight=False, soft_wrap=True))
