"""octavo diagnose model | dump."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from octavo.tasks.prompts import ChatTemplate

diagnose = typer.Typer(
    help="Say what FP8 does to a model's ratios, or did to another framework's run, and what to do about it.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
Output = Annotated[Path, typer.Option(help="The page; the figures stand beside it as .json.")]
ClipLow = Annotated[float, typer.Option(help="BF16's lower bound on the ratio is 1 less this.")]
ClipHigh = Annotated[float, typer.Option(help="Its upper bound is 1 plus this.")]
PAGE = Path("diagnosis.html")


@diagnose.command(
    epilog="- `octavo diagnose model HuggingFaceTB/SmolLM2-135M-Instruct prompts.jsonl`\n\n"
    "- `octavo diagnose model examples/tiny/model prompts.txt --recipe block128 --recipe tensorwise --lr 1e-5`"
)
def model(
    path: Annotated[str, typer.Argument(metavar="MODEL", help="Hugging Face folder or hub id.")],
    prompts: Annotated[
        Path, typer.Argument(metavar="PROMPTS", help="Text, a prompt a line; or JSONL with prompt, and completion.")
    ],
    recipe: Annotated[
        list[str] | None, typer.Option(help="Compared with bf16, repeatable. [default: block128, w8a16]")
    ] = None,
    num_prompts: Annotated[int, typer.Option(help="The first of the file.")] = 4,
    group_size: Annotated[int, typer.Option(help="Completions of each prompt, where the file has none.")] = 4,
    max_tokens: Annotated[int, typer.Option(help="Longest completion.")] = 32,
    temperature: Annotated[float, typer.Option(help="Of the samples, above 0.")] = 1.0,
    lr: Annotated[float, typer.Option(help="Learning rate of the step that is compared.")] = 1e-6,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.28,
    kv_cache: Annotated[Literal["fp8", "bf16"], typer.Option(help="Of the recipes.")] = "fp8",
    dither: Annotated[bool, typer.Option("--dither", help="Move the weights off FP8 rounding ties.")] = False,
    fp32: Annotated[bool, typer.Option("--fp32", help="Compare with FP32 too.")] = False,
    seed: Annotated[int, typer.Option(help="Of samples and random signs.")] = 0,
    chat_template: Annotated[ChatTemplate, typer.Option(help="auto, always or never.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, or cuda.")] = "cpu",
    kernels: Annotated[Literal["by_device", "reference"], typer.Option(help="As in a run's config.")] = "by_device",
    output: Output = PAGE,
) -> None:
    """One batch under several recipes: noise, over-clipping, and the operation at which they part."""
    from octavo.diagnose.model import ModelDiagnosis, diagnose_model
    from octavo.rl.losses import ClipConfig
    from octavo.trainer.metrics import Display

    changes: dict[str, Any] = {} if not recipe else {"recipes": tuple(recipe)}
    settings = ModelDiagnosis(
        model=path,
        prompts=prompts,
        num_prompts=num_prompts,
        group_size=group_size,
        max_tokens=max_tokens,
        temperature=temperature,
        lr=lr,
        clip=ClipConfig(clip_low=clip_low, clip_high=clip_high),
        kv_cache=kv_cache,
        dither=dither,
        fp32=fp32,
        seed=seed,
        chat_template=chat_template,
        device=device,
        kernels=kernels,
        **changes,
    )
    check_outputs(output)
    write(diagnose_model(settings, Display()), output)


@diagnose.command(
    epilog="- `octavo diagnose dump logprobs.parquet`\n\n- `octavo diagnose dump rollouts/ --clip-high 0.2`"
)
def dump(
    paths: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Parquet or JSONL, or folders of them; docs/diagnose.md.")
    ],
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.28,
    output: Output = PAGE,
) -> None:
    """Log-probabilities that verl, or any other framework, wrote: what is there is judged, what is missing said."""
    from octavo.diagnose.recorded import diagnose_dump
    from octavo.rl.losses import ClipConfig

    check_outputs(output)
    write(diagnose_dump(paths, ClipConfig(clip_low=clip_low, clip_high=clip_high)), output)


def check_outputs(page: Path) -> None:
    """Refuse a page or figures that could not be written, before any work."""
    from octavo.trainer.files import check_output

    if page.suffix == ".json":
        raise ValueError(
            f"--output {page} is the page, and its figures go to .json beside it. Give a name ending in .html"
        )
    check_output(page)
    check_output(page.with_suffix(".json"))


def write(diagnosis: Any, page: Path) -> None:
    """The console's tables, the figures and the page."""
    import json

    from octavo.diagnose.diagnosis_page import render, show
    from octavo.trainer.files import write_whole

    show(diagnosis)
    write_whole(page.with_suffix(".json"), json.dumps(diagnosis.to_json(), indent=1, ensure_ascii=False) + "\n")
    write_whole(page, render(diagnosis))
    print(f"done: {page}, {page.with_suffix('.json')}")
