"""What the documents show runs: every YAML block and example loads, every command exists, every snippet is right."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from typer.main import get_command

from octavo import cli
from octavo.bench.results import read_results
from octavo.rl import calibration
from octavo.rl.losses import ClipConfig
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import from_dict, load_config, to_dict
from octavo.trainer.config_reference import sections

REPO = Path(__file__).resolve().parents[1]
PAGES = {path.relative_to(REPO).as_posix(): path.read_text() for path in [REPO / "README.md", *REPO.glob("docs/*.md")]}
EXAMPLES = sorted((REPO / "examples").glob("*.yaml"))
SMALLEST = {"output_dir": "runs/x", "model": {"path": "m"}, "task": {"type": "arithmetic"}}


def blocks(language):
    """(page, number, text) of every fenced block of a language."""
    fences = ((page, re.findall(rf"^```{language}\n(.*?)^```", text, re.M | re.S)) for page, text in PAGES.items())
    return [pytest.param(text, id=f"{page}-{n}") for page, found in fences for n, text in enumerate(found)]


@pytest.mark.parametrize("text", blocks("yaml"))
def test_a_yaml_block_loads(text):
    data = yaml.safe_load(text)
    whole = data if "output_dir" in data else {**SMALLEST, **data}
    config = from_dict(TrainConfig, whole, "the block")
    assert to_dict(config) != to_dict(from_dict(TrainConfig, SMALLEST, "the smallest")), "it says nothing"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_loads(path):
    config = load_config(TrainConfig, path)
    assert from_dict(TrainConfig, to_dict(config), "again") == config


def test_the_reference_example_is_what_it_says():
    config = load_config(TrainConfig, REPO / "examples/kl_reference.yaml")
    assert config.algorithm.kl.coefficient == 1e-3 and config.optimizer.lr == 1e-6
    assert config.rollout.prompts_per_step * config.rollout.group_size == 256
    assert (config.evaluation.interval, config.calibration.interval, config.precision.recipe) == (5, 20, "block128")


def commands():
    """Every `octavo ...` in a page, an example or a command's help."""
    sources = {**PAGES, **{path.name: path.read_text() for path in EXAMPLES}}
    sources |= {f"octavo {name} --help": command.epilog for name, command in get_command(cli.app).commands.items()}
    pattern = r"(?:^[#>$ ]*|`)(?:\.venv/bin/)?octavo ([a-z]+(?: [^`\n]*)?)[`\n]"
    found = {(where, text) for where, page in sources.items() for text in re.findall(pattern, f"{page}\n", re.M)}
    return sorted(found)


@pytest.mark.parametrize("where, command", commands())
def test_a_command_that_is_shown_exists_and_its_config_loads(where, command):
    name, *arguments = shlex.split(command.partition(" #")[0])
    assert name in get_command(cli.app).commands
    if name != "generate" and arguments and (REPO / arguments[0]).is_file():
        overrides = [argument for argument in arguments[1:] if re.match(r"[\w.]+=", argument)]
        load_config(TrainConfig, REPO / arguments[0], overrides)


def test_commands_are_found():
    names = {command.split()[0] for _, command in commands()}
    assert {"train", "evaluate", "generate", "check"} <= names and len(commands()) > 10


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", PAGES[page])
    missing = [
        target for target in targets if "://" not in target and not (REPO / page).parent.joinpath(target).exists()
    ]
    assert not missing, f"{page} links to {missing}"


def test_every_octavo_key_of_the_conversion_tables_exists():
    keys = {key for section in sections(TrainConfig) for key in (section.path, *(key for key, *_ in section.keys()))}
    for text in re.findall(r"^\|.*\|$", PAGES["docs/moving.md"], re.M):
        for key in re.findall(r"`((?:[a-z_0-9]+\.)+[a-z_0-9]+)`", text.rpartition(" | ")[2]):
            assert key in keys, f"{key} in {text}"


def write_calibrated_run(folder, form):
    """metrics.jsonl and config.yaml of three calibrations, one of them skipped."""
    calibrated = {"type": form, "min_tokens": 100, "min_clipped": 5}
    config = from_dict(TrainConfig, {**SMALLEST, "calibration": calibrated}, "the run")
    settings, bounds = config.calibration, config.calibration.start_bounds()
    lines = [{"step": 0, "reward/mean": 0.5}]
    for step, num_tokens in enumerate((4000, 20, 4000), start=1):
        shadow = torch.exp(0.15 * torch.randn(num_tokens))
        ratio = shadow * torch.exp(0.15 * torch.randn(num_tokens))
        ones, advantages = torch.ones(num_tokens), torch.randn(num_tokens)
        statistics = calibration.measure(ratio, shadow, ones, advantages, ones.bool(), ClipConfig(), settings)
        result = calibration.calibrate(bounds, statistics, settings)
        lines.append({"step": step, **calibration.to_metrics(bounds, statistics, result)})
        bounds = result.bounds
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(to_dict(config)))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return lines


def run_snippet(folder, form):
    of_grid, of_rungs = re.findall(r"^```python\n(.*?)^```", PAGES["docs/calibration.md"], re.M | re.S)
    snippet = of_grid.replace("runs/demo", "runs/mine") if form == "grid" else of_rungs
    return subprocess.run([sys.executable, "-c", snippet], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("form", ["grid", "exact", "symmetric"])
def test_the_calibration_snippet_recomputes_every_bound(form, tmp_path):
    lines = write_calibrated_run(tmp_path / "runs/mine", form)
    result = run_snippet(tmp_path, form)
    assert result.returncode == 0, result.stderr
    moved = [line for line in lines if line.get("calibration/skipped") == ""]
    assert len(result.stdout.splitlines()) == len(moved) == 2
    assert moved[0]["calibration/low"] != moved[0]["calibration/low_before"]

    lines[1]["calibration/shadow_clipped_low"] += 200
    (tmp_path / "runs/mine/metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert "AssertionError" in run_snippet(tmp_path, form).stderr


def test_the_tables_of_overclipping_are_its_results():
    results = read_results(REPO / "benchmarks/results/overclip.json")
    header, *lines = re.findall(r"^\| (?:\| )?(.+) \|$", PAGES["docs/calibration.md"].partition("## Measured")[2], re.M)
    metrics = {"noise": "noise_std", "plain": "plain_overclip", "exact": "exact_overclip", "plain hit": "plain_hit"}
    columns, compared = header.split(" | "), 0
    rates = iter(("2e-4", "5e-5"))
    for case, *cells in (line.split(" | ") for line in [header, *lines]):
        if [case, *cells] == columns:
            rate = next(rates)
        elif len(cells) == len(columns):
            for name, metric in metrics.items():
                row, cell = results[f"overclip/tiny-qwen3, lr {rate}/{case} {metric}"], cells[columns.index(name)]
                assert cell.split(" (")[0] == f"{row.value:.{3 if metric == 'noise_std' else 2}f}", (rate, case, name)
                compared += 1
    assert compared == 2 * 8 * len(metrics)


def accuracies(name, case):
    """Before and after of each seed, from its curve."""
    curves = sorted((REPO / f"benchmarks/results/curves/{name}").glob(f"{case}_*.jsonl"))
    runs = [[json.loads(line) for line in path.read_text().splitlines()] for path in curves]
    ends = [[line["eval/accuracy"] for line in lines if "eval/accuracy" in line][-1] for lines in runs]
    return [lines[0]["eval/initial_accuracy"] for lines in runs], ends


REAL_RUNS = {
    "block128": ("`block128` + FP8 KV, seeds 0, 1, 2", "SmolLM2-135M, easy sums, 200 steps, three seeds"),
    "w8a16": ("`w8a16` + FP8 KV", None),
    "reordered": ("`block128`, rollout adds in another order", "the same, but rollout adds in another order"),
    "tensorwise": ("`tensorwise` (dynamic) + FP8 KV", None),
}
"""Case -> its row in docs/runs.md, and in the README."""


@pytest.mark.parametrize("case", REAL_RUNS)
def test_the_tables_of_real_runs_are_their_results(case):
    results = read_results(REPO / "benchmarks/results/smollm2_reasoning.json")
    found = {
        key.split(" ")[1]: row.value
        for key, row in results.items()
        if key.startswith(f"smollm2_reasoning/smollm2_{case} ")
    }
    columns = accuracies("smollm2_reasoning", f"smollm2_{case}")
    assert sum(columns[1]) / len(columns[1]) == pytest.approx(found["accuracy_end"], abs=1e-5)
    std, outside = found["mismatch/std_logprob_diff"], found["mismatch/outside_share"]
    exact = found["mismatch_max"] == 0.0
    low, high = found["overclip/low_share"], found["overclip/high_share"]
    in_runs, in_readme = REAL_RUNS[case]
    cells = [
        *(", ".join(f"{value:.3f}" for value in values) for values in columns),
        *(("**0**", "0") if exact else (f"{std:.3f}", f"{outside:.1%}".replace("%", " %"))),
        f"{low:.1%} / {high:.1%}".replace("%", " %"),
        f"{found['overclip/log_ratio_std_diff']:.3f}",
    ]
    assert f"| {' | '.join([in_runs, *cells])} |" in PAGES["docs/runs.md"]
    if in_readme is not None:
        cells = [", ".join(f"{value:.2f}" for value in values) for values in columns]
        assert f"| {' | '.join([in_readme, *cells, '0' if exact else f'std {std:.2f}'])} |" in PAGES["README.md"]


def test_the_snippets_on_verifiers_are_right(capsys):
    reward, check = re.findall(r"^```python\n(.*?)^```", PAGES["docs/verifiers.md"], re.M | re.S)
    names = {}
    exec(reward, names)
    assert names["score"]("", "word " * 90, "") == -0.1
    exec(check, {"__name__": "__main__"})
    assert capsys.readouterr().out == "Verdict(outcome='correct', reward=1.0, detail='')\n"
