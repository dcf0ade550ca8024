"""octavo generate."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from octavo.tasks.prompts import ChatTemplate

PRECISION, SAMPLING, ENGINE, FILES = "Precision", "Sampling", "Engine", "Prompts and completions"
"""Headings of options in --help."""
STDOUT = Path("-")


def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face folder or hub id.")],
    prompt: Annotated[list[str] | None, typer.Argument(metavar="PROMPT...", help="Prompts, where no file is.")] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=FILES,
            help="Prompts: text, one a line; JSONL, JSON, CSV or Parquet with prompt or messages; - reads stdin.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", rich_help_panel=FILES, help="A JSON object a completion, as they finish; - prints them."
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", rich_help_panel=FILES, help="Go on with what is in the output.")
    ] = False,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", rich_help_panel=FILES, help="Rows have tokens and rollout_logprobs, too.")
    ] = False,
    chat_template: Annotated[
        ChatTemplate, typer.Option(rich_help_panel=FILES, help="auto, always, or never: prompts as they stand.")
    ] = "auto",
    recipe: Annotated[
        str, typer.Option(rich_help_panel=PRECISION, help="Precision flow: bf16, block128, rowwise, w8a16, ...")
    ] = "block128",
    kv_cache: Annotated[
        str | None, typer.Option(rich_help_panel=PRECISION, help="fp8 or bf16; default as the recipe says.")
    ] = None,
    temperature: Annotated[float, typer.Option(rich_help_panel=SAMPLING, help="0 is greedy.")] = 1.0,
    top_p: Annotated[
        float, typer.Option(rich_help_panel=SAMPLING, help="Keep the likeliest tokens of this total probability.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(rich_help_panel=SAMPLING, help="Keep so many; 0 keeps all.")] = 0,
    min_p: Annotated[
        float, typer.Option(rich_help_panel=SAMPLING, help="Drop tokens less likely than this times the likeliest.")
    ] = 0.0,
    max_tokens: Annotated[int, typer.Option(rich_help_panel=SAMPLING, help="Longest completion.")] = 128,
    group_size: Annotated[int, typer.Option(rich_help_panel=SAMPLING, help="Completions of each prompt.")] = 1,
    seed: Annotated[int, typer.Option(rich_help_panel=SAMPLING, help="Of the random numbers.")] = 0,
    device: Annotated[str, typer.Option(rich_help_panel=ENGINE, help="cpu, or cuda.")] = "cpu",
    kernels: Annotated[
        Literal["by_device", "reference"], typer.Option(rich_help_panel=ENGINE, help="As in a run's config.")
    ] = "by_device",
    kv_cache_tokens: Annotated[
        int | None, typer.Option(rich_help_panel=ENGINE, help="That the KV cache holds; default what fits the GPU.")
    ] = None,
    max_sequences: Annotated[
        int | None, typer.Option(rich_help_panel=ENGINE, help="Running at once. [default: 256 on a GPU, else 64]")
    ] = None,
) -> None:
    """Sample completions of prompts: printed, or written as JSONL, with tokens a second on stderr."""
    from rich.console import Console

    from octavo.generate.completion_file import CompletionFile
    from octavo.generate.generation import Generator, Settings
    from octavo.generate.outputs import print_completions, write_completions
    from octavo.generate.prompt_files import read_prompts, text_prompts
    from octavo.numerics.recipe import get_recipe
    from octavo.rollout.sampler import SamplingConfig
    from octavo.trainer.interrupt import Interrupted
    from octavo.trainer.metrics import Display

    if bool(prompt) == (prompts is not None):
        raise ValueError("give either prompts or --prompts FILE" + (", not both" if prompt else ""))
    if resume and output in (None, STDOUT):
        raise ValueError("--resume goes on with a file: give --output FILE, too")
    changes: dict[str, Any] = {} if kv_cache is None else {"kv_cache": kv_cache}
    settings = Settings(
        model=model,
        recipe=get_recipe(recipe, **changes),
        sampling=SamplingConfig(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p),
        max_tokens=max_tokens,
        group_size=group_size,
        seed=seed,
        chat_template=chat_template,
        logprobs=logprobs,
        device=device,
        kernels=kernels,
        kv_cache_tokens=kv_cache_tokens,
        max_sequences=max_sequences,
    )
    file = None if output is None or output == STDOUT else CompletionFile(output, resume)
    rows = text_prompts(prompt or []) if prompts is None else read_prompts(prompts)
    display = Display(Console(stderr=True, highlight=False, soft_wrap=True))
    generator = Generator(settings, rows, display, fingerprint=file is not None)
    try:
        if file is None:
            print_completions(generator, as_json=output is not None)
        else:
            with closing(file):
                file.open(generator.identity, rows, group_size)
                write_completions(generator, file)
    except Interrupted as stop:
        print(f"octavo: {stop}", file=sys.stderr)
        raise typer.Exit(stop.exit_code) from None
