"""The command line: octavo train | evaluate | generate | describe | check | diagnose | report | export | bench."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from octavo import __version__
from octavo.bench.commands import bench
from octavo.diagnose.commands import diagnose
from octavo.generate.commands import generate
from octavo.trainer.completion import complete_config, complete_override
from octavo.trainer.errors import reason
from octavo.trainer.files import check_output, write_whole

# Read when torch is loaded, so it stands before any import of it. Threads that spin long while they wait starve each
# other beside a busy process: a step of the demo took 45 s instead of 3.5 s. Alone it takes 1.8 s either way.
os.environ.setdefault("GOMP_SPINCOUNT", "3000")


class _Commands(TyperGroup):
    """Says that it was interrupted; typer would end without a word."""

    def invoke(self, ctx: Any) -> Any:
        try:
            if not {"--help", "--version"} & set(sys.argv):
                import_torch()
            return super().invoke(ctx)
        except KeyboardInterrupt:
            resume = "; --resume goes on from the newest checkpoint" if ctx.invoked_subcommand == "train" else ""
            print(f"octavo: interrupted{resume}", file=sys.stderr)
            raise typer.Exit(130) from None


def import_torch() -> None:
    """Load torch with Ctrl-C held back until it is there: numpy that is interrupted midway stays half loaded, and torch
    goes on without it and fails much later."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        import torch  # noqa: F401
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


app = typer.Typer(
    cls=_Commands,
    help="Reinforcement learning for language models in one FP8 precision flow.",
    epilog="`octavo COMMAND --help` explains a command; `octavo --install-completion` makes the tab key complete "
    "commands, YAML files and config keys.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
    rich_markup_mode="markdown",
)


def examples(*commands: str) -> str:
    """The end of a command's help."""
    return "\n\n".join(f"- `{command}`" for command in commands)


CONFIG = typer.Argument(
    metavar="CONFIG", help="YAML file, such as examples/gsm8k.yaml.", autocompletion=complete_config
)
ConfigPath = Annotated[Path, CONFIG]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Changes to the file, keys as in docs/config.md: model.path=Qwen/Qwen3-0.6B optimizer.lr=1e-6",
        autocompletion=complete_override,
    ),
]


@app.command(
    epilog=examples(
        "octavo train examples/demo.yaml",
        "octavo train examples/gsm8k.yaml model.path=./my-model output_dir=runs/mine",
        "octavo train examples/gsm8k.yaml model.path=./my-model output_dir=runs/mine --resume",
    )
)
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint, to the bit.")] = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Resume although the config differs from the run's.")
    ] = False,
) -> None:
    """Post-train a model: rollouts, rewards, updates; leaves metrics.jsonl and model/ in output_dir."""
    from octavo.plugins.vllm import VLLMEngine
    from octavo.trainer.config import TrainConfig
    from octavo.trainer.config_file import load_config
    from octavo.trainer.interrupt import Interrupted
    from octavo.trainer.metrics import Display
    from octavo.trainer.train import train as run_training

    settings = load_config(TrainConfig, config, overrides or [])
    display = Display()
    try:
        folder = run_training(settings, display, resume=resume, allow_changes=allow_changes, vllm=VLLMEngine)
    except Interrupted as stop:
        print(f"octavo: {stop}", file=sys.stderr)
        raise typer.Exit(stop.exit_code) from None
    display.line(f"done: {folder / 'metrics.jsonl'}, {folder / 'model'}")


@app.command(
    epilog=examples(
        "octavo evaluate examples/demo.yaml",
        "octavo evaluate examples/gsm8k.yaml model.path=runs/gsm8k/model --output samples.jsonl",
        "octavo evaluate examples/gsm8k.yaml 'evaluation.sets=[math500, aime24]' evaluation.completions_per_problem=8",
    )
)
def evaluate(
    config: ConfigPath,
    overrides: Overrides = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Write every completion here, a JSON object a line; after a stop the same command goes on."),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(metavar="RECIPE", help="Measure under this recipe too, as bf16, and print the paired difference."),
    ] = None,
) -> None:
    """Measure a model on the task's held-out problems, or on evaluation.sets; prints JSON, and a table on stderr."""
    from octavo.plugins.vllm import VLLMEngine
    from octavo.trainer.config import TrainConfig
    from octavo.trainer.config_file import load_config
    from octavo.trainer.evaluation import run_evaluation

    settings = load_config(TrainConfig, config, overrides or [])
    if output is not None:
        check_output(output)
    print(json.dumps(run_evaluation(settings, output, compare, VLLMEngine)))


app.command(
    epilog=examples(
        "octavo generate examples/tiny/model '(7+8-5+9+2)%10'",
        "octavo generate Qwen/Qwen3-0.6B 'What is 17 + 25?' --recipe bf16 --temperature 0",
        "octavo generate Qwen/Qwen3-8B --prompts prompts.jsonl --output completions.jsonl --device cuda --resume",
    )
)(generate)


@app.command(
    epilog=examples(
        "octavo check",
        "octavo check examples/gsm8k.yaml model.path=./my-model",
    )
)
def check(
    config: Annotated[Path | None, CONFIG] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Say what this machine can do, whether its numbers are right, and whether a config can run on it.

    Exit code 0 without a FAIL, 2 with one. Loads no weights.
    """
    from rich.console import Console

    from octavo.check.rows import show
    from octavo.check.runner import check_rows

    found = check_rows(config, overrides or [])
    if as_json:
        rows = list(found)
        print(json.dumps([vars(row) for row in rows], indent=1, ensure_ascii=False))
    else:
        rows = show(found, Console(highlight=False, soft_wrap=True))
    if any(row.status == "FAIL" for row in rows):
        raise typer.Exit(2)


@app.command(
    epilog=examples(
        "octavo describe examples/gsm8k.yaml",
        "octavo describe examples/gsm8k.yaml precision.rollout=fp8_channel precision.train=bf16 --picture flow.svg",
    )
)
def describe(
    config: ConfigPath,
    overrides: Overrides = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the flow here; - prints it instead.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it, as .svg or .png.")] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="OTHER", help="Another YAML, or a run's precision.json: what differs.")
    ] = None,
) -> None:
    """Show which tensor has which format in rollout and training; reads no weights and no task."""
    from octavo.report.flow_against import against_lines
    from octavo.report.flow_picture import draw_flow
    from octavo.report.flow_table import print_flow
    from octavo.trainer.config import TrainConfig
    from octavo.trainer.config_file import load_config
    from octavo.trainer.memory import offload_lines
    from octavo.trainer.precision import declared_flow

    to_stdout = str(json_file) == "-"
    if json_file is not None and not to_stdout:
        check_output(json_file, "--json")
    if picture is not None:
        check_output(picture, "--picture")
    settings = load_config(TrainConfig, config, overrides or [])
    flow = declared_flow(settings)
    differing = [] if against is None else against_lines(settings, flow, against)
    if picture is not None:
        draw_flow(flow, picture, settings.model.path)
    if to_stdout:
        print(flow.to_json(), end="")
    else:
        print_flow(flow, settings.precision.allow_mismatch)
    if json_file is not None and not to_stdout:
        write_whole(json_file, flow.to_json())
    for line in [*offload_lines(settings), *differing]:
        print(line, file=sys.stderr if to_stdout else sys.stdout)


@app.command(
    epilog=examples("octavo report runs/demo", "octavo report runs/a runs/b --output compared.html"),
)
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs: their output_dir.")],
    output: Annotated[
        Path | None, typer.Option(help="The page; default RUN/report.html, or ./report.html for several runs.")
    ] = None,
) -> None:
    """Write one HTML file on a run, finished or not, or on several side by side."""
    from octavo.report.page import write_report

    print(f"done: {write_report(runs, output)}")


@app.command(
    epilog=examples(
        "octavo export runs/demo exported",
        "octavo export runs/demo exported --checkpoint step_000020 --weights fp8",
    )
)
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run: its output_dir.")],
    output: Annotated[Path, typer.Argument(metavar="FOLDER", help="Model folder to make.")],
    checkpoint: Annotated[str, typer.Option(help="best, newest, or a name, as step_000020.")] = "best",
    weights: Annotated[
        Literal["bf16", "fp8"], typer.Option(help="fp8: the very bytes of the rollout, in blocks of 128x128.")
    ] = "bf16",
) -> None:
    """Write a checkpoint of a run as a Hugging Face folder, in BF16 or block FP8."""
    from octavo.trainer.export import export_checkpoint

    export = export_checkpoint(run, output, checkpoint, weights)
    for reader, projections in export.obstacles.items():
        if projections:
            print(
                f"note: octavo reads this folder, {reader} would refuse or misread it, for the widths of "
                f"{len(projections)} projections, the first {projections[0]}. Export BF16 for {reader}"
            )
    print(f"done: {output}, from {export.checkpoint}")


app.add_typer(bench, name="bench")
app.add_typer(diagnose, name="diagnose")


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Reinforcement learning for language models in one FP8 precision flow."""
    if show:
        print(f"octavo {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; what a user can cause is one line on stderr and exit code 2."""
    prepare_streams()
    try:
        app()
    except (ValueError, OSError) as error:
        if os.environ.get("OCTAVO_TRACEBACK"):
            raise
        print(f"octavo: {reason(error)}", file=sys.stderr)
        sys.exit(2)


def prepare_streams() -> None:
    """Let no character that the locale lacks, and no closed stream, stop a command."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell: octavo ... >&-
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        else:
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    main()
