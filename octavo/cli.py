"""The command line: octavo train | evaluate | generate | report."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from octavo import __version__
from octavo.tasks.prompts import ChatTemplate
from octavo.trainer.files import check_output, write_whole

# Read when torch is loaded, so it stands before any import of it. Threads that spin long while they wait starve each
# other beside a busy process: a step of the demo took 45 s instead of 3.5 s. Alone it takes 1.8 s either way.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")

app = typer.Typer(
    help="Reinforcement learning for language models in one FP8 precision flow.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)

ConfigPath = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file, such as examples/gsm8k.yaml.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Changes to the file: model.path=Qwen/Qwen3-0.6B optimizer.lr=1e-6"),
]


@app.command()
def train(config: ConfigPath, overrides: Overrides = None) -> None:
    """Post-train a model: rollouts, rewards, updates; leaves metrics.jsonl and model/ in output_dir."""
    from octavo.trainer.config import TrainConfig
    from octavo.trainer.config_file import load_config
    from octavo.trainer.loop import train as run_training
    from octavo.trainer.metrics import Display

    settings = load_config(TrainConfig, config, overrides or [])
    try:
        folder = run_training(settings, Display())
    except KeyboardInterrupt:  # typer would end without a word
        print(f"octavo: interrupted; the steps that ended are in {settings.output_dir}/metrics.jsonl", file=sys.stderr)
        raise typer.Exit(130) from None
    print(f"done: {folder / 'metrics.jsonl'}, {folder / 'model'}")


@app.command()
def evaluate(
    config: ConfigPath,
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option(help="Write every completion here, a JSON object a line.")] = None,
) -> None:
    """Measure a model on the task's held-out problems, under the config's precision flow."""
    from octavo.trainer.config import TrainConfig
    from octavo.trainer.config_file import load_config
    from octavo.trainer.evaluation import evaluate_with_samples
    from octavo.trainer.metrics import Display
    from octavo.trainer.run import load_run

    settings = load_config(TrainConfig, config, overrides or [])
    if output is not None:
        check_output(output)
    metrics, samples = evaluate_with_samples(load_run(settings, Display()))
    if output is not None:
        write_whole(output, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in samples))
    print(json.dumps(metrics))


@app.command()
def generate(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face folder or hub id.")],
    prompt: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="One or more prompts.")],
    recipe: Annotated[str, typer.Option(help="Precision flow: bf16, block128, rowwise, w8a16, ...")] = "block128",
    kv_cache: Annotated[str | None, typer.Option(help="fp8 or bf16; default as the recipe says.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Keep the likeliest tokens of this total probability.")] = 1.0,
    max_tokens: Annotated[int, typer.Option(help="Longest completion.")] = 128,
    group_size: Annotated[int, typer.Option(help="Completions of each prompt.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the random numbers.")] = 0,
    chat_template: Annotated[ChatTemplate, typer.Option(help="auto, always or never.")] = "auto",
) -> None:
    """Sample completions of prompts and print them with their mean log-probability."""
    from octavo.models.checkpoint import load_decoder
    from octavo.numerics.recipe import get_recipe
    from octavo.rollout.engine import Engine, EngineConfig
    from octavo.rollout.sampler import SamplingConfig
    from octavo.tasks.prompts import encode_prompt, stop_token_ids
    from octavo.trainer.run import load_generation_config, load_tokenizer

    changes = {} if kv_cache is None else {"kv_cache": kv_cache}
    sampling = SamplingConfig(temperature=temperature, top_p=top_p)
    decoder = load_decoder(model, get_recipe(recipe, **changes))
    tokenizer = load_tokenizer(model)
    prompts = [encode_prompt(tokenizer, text, None, chat_template=chat_template) for text in prompt]
    stops = stop_token_ids(tokenizer, load_generation_config(model), decoder.hf_config)
    longest = max(len(tokens) for tokens in prompts) + max_tokens
    engine = Engine(decoder, EngineConfig(kv_cache_tokens=max(4096, 2 * longest)), stops)
    groups = engine.generate(prompts, sampling, max_completion_tokens=max_tokens, group_size=group_size, seed=seed)
    for text, group in zip(prompt, groups, strict=True):
        for completion in group:
            mean = sum(completion.rollout_logprobs) / len(completion.tokens)
            print(f"{text}{tokenizer.decode(completion.tokens, skip_special_tokens=True)}")
            print(f"  [{len(completion.tokens)} tokens, {completion.finish_reason}, mean logprob {mean:.3f}]")


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs: their output_dir.")],
    output: Annotated[
        Path | None, typer.Option(help="The page; default RUN/report.html, or ./report.html for several runs.")
    ] = None,
) -> None:
    """Write one HTML file on a run, finished or not, or on several side by side."""
    from octavo.report.page import write_report

    print(f"done: {write_report(runs, output)}")


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Reinforcement learning for language models in one FP8 precision flow."""
    if show:
        print(f"octavo {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; what a user can cause is one line on stderr and exit code 2."""
    try:
        app()
    except ValueError as error:
        if os.environ.get("OCTAVO_TRACEBACK"):
            raise
        print(f"octavo: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if os.environ.get("OCTAVO_TRACEBACK"):
            raise
        print(f"octavo: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
