"""Every mistake a user can make: one line that names it and says what to do, exit code 2, nothing half-written."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from training_runs import SMALL, TINY_MODEL

from octavo import cli

OVERRIDES = {  # of a config that works: the override, what the line must say
    "unknown key": ("rollout.top_pp=0.9", ["rollout.top_pp", "0.9", "sampling"]),
    "unknown key, near miss": ("optimizer.lrr=1e-6", ["optimizer.lrr", "Did you mean lr?"]),
    "wrong type": ("trainer.num_steps=2.0", ["trainer.num_steps", "integer", "2.0"]),
    "wrong type, text": ("optimizer.lr=fast", ["optimizer.lr", "number", "fast"]),
    "no equals sign": ("trainer.num_steps", ["trainer.num_steps", "="]),
    "unknown recipe": ("precision.recipe=fp4", ["precision.recipe", "fp4", "block128"]),
    "kv_cache of another recipe": ("precision.kv_cache=fp32", ["kv_cache", "fp32", "bf16"]),
    "wandb is not installed": (
        "tracking.wandb_project=mine",
        ["tracking.wandb_project='mine'", "pip install wandb"],
    ),
    "a name without a project": ("tracking.wandb_name=mine", ["wandb_name='mine'", "wandb_project"]),
    "two forwards": (
        "precision={rollout: block128, train: bf16}",
        ["q_proj", "fprop W e4m3 128x128 / bf16", "precision.allow_mismatch=true"],
    ),
    "a common recipe without a backward": (
        "precision.recipe=fp8_channel",
        ["recipe='fp8_channel'", "Use recipe=rowwise"],
    ),
    "training without a backward": ("precision.train=fp8_tensor", ["train.recipe='fp8_tensor'", "tensorwise"]),
    "a rollout that saves": ("precision.rollout.saved_activations=bf16", ["rollout", "Use train.saved_activations"]),
    "a side that does not fit": (
        "precision.train={recipe: bf16, saved_activations: fp8}",
        ["train: saved_activations"],
    ),
    "keep_bf16 names nothing": (
        "precision.keep_bf16=[gate]",
        ["keep_bf16", "'gate'", "names no module"],
    ),
    "top_p in training": ("rollout.sampling.top_p=0.9", ["top_p", "0.9", "biases", "top_p: 1.0"]),
    "top_k in training": ("rollout.sampling.top_k=50", ["top_k", "50", "top_k: 0"]),
    "greedy training": ("rollout.sampling.temperature=0", ["temperature", "greedy"]),
    "calibration with one update": ("trainer.num_mini_batches=1", ["num_mini_batches=1", "calibration: null"]),
    "group of one with std": ("rollout.group_size=1", ["rollout.group_size=1", "scale_by_std", ">= 2"]),
    "mini-batches that do not divide": ("rollout.prompts_per_step=3", ["prompts_per_step=3", "num_mini_batches=2"]),
    "k1 as a penalty": ("algorithm.kl={coefficient: 0.1, estimator: k1}", ["algorithm.kl", "k1", "k3"]),
    "clip out of range": ("algorithm.clip.clip_low=1.2", ["clip_low", "1.2"]),
    "calibration of another loss": ("algorithm.loss.type=bapo", ["algorithm.loss.type=bapo", "calibration: null"]),
    "calibration with a dual clip": ("algorithm.loss.dual_clip=3.0", ["dual_clip=3.0", "calibration: null"]),
    "bounds of another loss": (
        "algorithm={loss: {type: cispo}, clip: {clip_low: 0.1}}",
        ["algorithm", "clip", "loss.type=cispo"],
    ),
    "a cap that nothing reads": (
        "algorithm={correction: {type: icepop}, tis_cap: 3.0}",
        ["algorithm", "tis_cap=3.0", "correction.type=icepop"],
    ),
    "unknown loss": ("algorithm.loss.type=cipso", ["algorithm.loss.type", "Did you mean cispo"]),
    "a key of another loss": ("algorithm.loss={type: gspo, ratio_cap: 3}", ["algorithm.loss.ratio_cap", "unknown key"]),
    "k3 in the reward": ("algorithm.kl={coefficient: 0.1, placement: reward}", ["algorithm.kl", "'reward'", "'k1'"]),
    "a buffer beyond the limit": ("algorithm.overlong.buffer_tokens=17", ["buffer_tokens=17", "tokens=16", "Lower it"]),
    "model folder missing": ("model.path=./nowhere", ["model.path", "./nowhere", "Hugging Face"]),
    "model folder without a model": ("model.path={empty}", ["model.path", "config.json"]),
    "sequences beyond the model": ("rollout.max_completion_tokens=500", ["256 positions", "max_completion_tokens"]),
    "cache too small": ("rollout.engine.kv_cache_tokens=16", ["kv_cache_tokens=16", "32", "Raise"]),
    "no chat template": ("model.chat_template=always", ["chat template", "auto"]),
    "no prompt fits": ("rollout.max_prompt_tokens=2", ["2", "prompt"]),
    "data missing": ("task={type: gsm8k, path: ./no-data}", ["./no-data", "train.jsonl"]),
    "unknown task": ("task={type: chess}", ["task", "chess", "arithmetic", "gsm8k"]),
    "too many problems": ("task.num_test=10000000", ["num_test=10000000", "fewer"]),
    "memory lent on a CPU": (
        "rollout.engine.lend_memory=true",
        ["rollout.engine.lend_memory=true", "device='cpu'", "device=cuda"],
    ),
    "memory lent to vLLM": ("rollout.engine={type: vllm, lend_memory: true}", ["lend_memory", "rollout.engine"]),
    "cache that no machine has": ("rollout.engine.kv_cache_tokens=999999999999999", ["GB", "kv_cache_tokens"]),
    "no such device": ("device=foo", ["device='foo'", "cpu"]),
    "a device without numbers": ("device=meta", ["device='meta'", "cpu"]),
    "no output folder": ("output_dir=", ["output_dir is empty"]),
    "a home that no shell expanded": ("output_dir=~/runs/mine", ["output_dir='~/runs/mine'", "$HOME"]),
    "a model at home": ("model.path=~/models/mine", ["model.path='~/models/mine'", "$HOME"]),
    "broken generation config": ("model.path={broken}", ["generation_config.json", "stop tokens"]),
    "output is a file": ("output_dir={file}/run", ["output_dir", "cannot be written"]),
    "no checkpoint interval": ("checkpoint.interval=-1", ["checkpoint", "interval", "-1"]),
    "no checkpoint kept": ("checkpoint.keep_last=0", ["keep_last", "at least 1"]),
    "learning rate below zero": ("optimizer.lr=-1", ["lr must be at least 0", "-1"]),
    "not a number": ("optimizer.lr=.nan", ["optimizer.lr", "finite"]),
    "a number that FP32 lacks": ("optimizer.lr=1e39", ["optimizer.lr", "1e+30", "1e39"]),
    "a batch that no machine has": ("rollout.prompts_per_step=100000000000", ["prompts_per_step", "1048576"]),
    "too long a sum": ("task.num_operands=1000000", ["num_operands", "1000"]),
    "too long a name": (f"output_dir={'x' * 300}", ["xxx/metrics.jsonl: File name too long"]),
    "a list for a number": ("trainer.num_steps=[1]", ["trainer.num_steps", "integer"]),
    "text for a section": ("rollout=fast", ["rollout", "section"]),
    "a key below a number": ("seed.value=1", ["seed", "integer"]),
    "an empty key": ("=1", ["key=value"]),
    "a penalty that biases ratios": ("rollout.sampling.repetition_penalty=1.1", ["repetition_penalty", "unknown key"]),
    "a sample size below zero": ("trainer.logged_samples=-1", ["logged_samples", "-1"]),
    "too large a group": (
        "evaluation.completions_per_problem=2000000",
        ["completions_per_problem", "1048576"],
    ),
}


def no_config(here):
    return "train", here / "nowhere.yaml"


def config_of(text):
    def make(here):
        (here / "bad.yaml").write_bytes(text)
        return "train", here / "bad.yaml"

    return make


def model_with(change):
    """Training of a copy of the tiny model that `change(folder)` has damaged."""

    def make(here):
        shutil.copytree(TINY_MODEL, here / "model")
        change(here / "model")
        return "train", here / "small.yaml", f"model.path={here / 'model'}"

    return make


def edit_json(name, **changes):
    def change(folder):
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


def edit_weights(change):
    def edit(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def write(name, text):
    def change(folder):
        (folder / name).write_text(text)

    return change


def shrink_vocabulary(folder):
    """The model of another tokenizer, with five tokens."""
    edit_json("config.json", vocab_size=5)(folder)
    key = "model.embed_tokens.weight"
    edit_weights(lambda x: x.update({key: x[key][:5].clone()}))(folder)


def truncate(name):
    def change(folder):
        (folder / name).write_bytes((folder / name).read_bytes()[:-100])

    return change


def data_of(train, test='{"problem": "1+1=", "answer": "2"}\n'):
    def make(here):
        (here / "data").mkdir()
        (here / "data/train.jsonl").write_text(train)
        (here / "data/test.jsonl").write_text(test)
        return "train", here / "small.yaml", f"task={{type: gsm8k, path: {here / 'data'}}}"

    return make


def resumed(change):
    """A resume of a finished run after `change(run folder)`; more arguments are what it returns."""

    def make(here):
        main("train", here / "small.yaml")
        return "train", here / "small.yaml", "--resume", *(change(here / "run") or ())

    return make


def break_every_checkpoint(run):
    for file in run.glob("checkpoints/*/manifest.json"):
        file.write_text("{")


def run_without_config(run):
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "model")
    (run / "config.yaml").unlink()


INPUTS = {
    "config file missing": (no_config, ["nowhere.yaml", "cannot be read"]),
    "config is a folder": (lambda here: ("train", here), ["cannot be read"]),
    "config is empty": (config_of(b""), ["bad.yaml", "section"]),
    "config is no YAML": (config_of(b"a: [1"), ["bad.yaml", "not YAML", "line"]),
    "config is no text": (config_of(b"\x80\x81"), ["bad.yaml", "not YAML"]),
    "config is a list": (config_of(b"- 1\n"), ["bad.yaml", "section"]),
    "config is nested too deeply": (config_of(b"a: " + b"[" * 20_000), ["bad.yaml", "nested too deeply"]),
    "config gives a key twice": (config_of(b"seed: 1\nseed: 2\n"), ["seed", "given twice"]),
    "config lacks the model": (config_of(b"output_dir: x\ntask: {type: arithmetic}\n"), ["model", "missing"]),
    "weights cut off": (model_with(truncate("model.safetensors")), ["model.safetensors", "cannot be read"]),
    "no weights": (model_with(lambda folder: (folder / "model.safetensors").unlink()), ["no *.safetensors"]),
    "a tensor missing": (model_with(edit_weights(lambda x: x.pop("model.norm.weight"))), ["incomplete", "norm"]),
    "a tensor too many": (model_with(edit_weights(lambda x: x.update(extra=torch.ones(1)))), ["'extra'"]),
    "a tensor of another shape": (
        model_with(edit_weights(lambda x: x.update({"model.norm.weight": torch.ones(3)}))),
        ["model.norm.weight", "(3,)"],
    ),
    "a weight that is NaN": (
        model_with(edit_weights(lambda x: x["model.norm.weight"].fill_(torch.nan))),
        ["model.norm.weight", "not finite"],
    ),
    "config.json cut off": (model_with(truncate("config.json")), ["config.json", "supported model"]),
    "config.json holds nothing": (model_with(write("config.json", "null")), ["config.json", "supported model"]),
    "an architecture that is not covered": (model_with(edit_json("config.json", model_type="gpt2")), ["gpt2"]),
    "a rotary base that is text": (
        model_with(edit_json("config.json", rope_parameters={"rope_type": "default", "rope_theta": "many"})),
        ["rope_theta='many'", "a number above 0"],
    ),
    "a rotary base below zero": (
        model_with(edit_json("config.json", rope_parameters={"rope_type": "default", "rope_theta": -1.0})),
        ["rope_theta=-1.0", "a number above 0"],
    ),
    "no tokenizer": (model_with(lambda folder: (folder / "tokenizer.json").unlink()), ["tokenizer"]),
    "a tokenizer that is a list": (model_with(write("tokenizer.json", "[]")), ["tokenizer", "Fetch"]),
    "a tokenizer without its parts": (model_with(write("tokenizer.json", "{}")), ["tokenizer", "'added_tokens'"]),
    "a tokenizer config that is a list": (model_with(write("tokenizer_config.json", "[]")), ["tokenizer", "Fetch"]),
    "a tokenizer of another model": (model_with(shrink_vocabulary), ["token id", "vocabulary is 0 to 4"]),
    "a chat template that is broken": (
        model_with(edit_json("tokenizer_config.json", chat_template="{{ messages | nonsense }}")),
        ["chat template", "nonsense", "never"],
    ),
    "a chat template that refuses": (
        model_with(edit_json("tokenizer_config.json", chat_template="{{ raise_exception('not so') }}")),
        ["chat template", "not so"],
    ),
    "a generation config that is a list": (
        model_with(write("generation_config.json", "[]")),
        ["generation_config.json", "stop tokens"],
    ),
    "a generation config that transformers refuses": (
        model_with(edit_json("generation_config.json", cache_implementation="none")),
        ["generation_config.json", "cache_implementation"],
    ),
    "a stop token that is text": (
        model_with(edit_json("generation_config.json", eos_token_id=[0, "</s>"])),
        ["eos_token_id", "'</s>'", "GenerationConfig"],
    ),
    "a stop token below zero": (
        model_with(edit_json("generation_config.json", eos_token_id=-1)),
        ["eos_token_id", "-1"],
    ),
    "a shard that the index names is missing": (
        model_with(write("model.safetensors.index.json", '{"weight_map": {"a": "model-1-of-2.safetensors"}}')),
        ["model-1-of-2.safetensors", "cannot be read"],
    ),
    "data that is no JSON": (data_of("{oops\n"), ["train.jsonl", "line 1", "not JSON"]),
    "data without answers": (data_of('{"problem": "1+1="}\n'), ["answer", "problem"]),
    "data nested too deeply": (data_of("[" * 100_000), ["train.jsonl", "line 1", "nested too deeply"]),
    "data whose answer is true": (data_of('{"problem": "1", "answer": true}\n'), ["line 1", "answer", "True"]),
    "data whose answer is null": (data_of('{"problem": "1", "answer": null}\n'), ["line 1", "answer", "None"]),
    "data whose answer is NaN": (data_of('{"problem": "1", "answer": NaN}\n'), ["line 1", "finite", "nan"]),
    "data whose answer is infinite": (data_of('{"problem": "1", "answer": 1e999}\n'), ["line 1", "finite", "inf"]),
    "data whose problem is a number": (data_of('{"problem": 1, "answer": "2"}\n'), ["line 1", "problem", "got 1"]),
    "data that is empty": (data_of(""), ["at least one problem"]),
    "data whose answer is empty": (data_of('{"problem": "1", "answer": "#### "}\n'), ["final answer"]),
    "resume with every checkpoint broken": (resumed(break_every_checkpoint), ["none of the", "manifest.json"]),
    "resume without checkpoints or config": (resumed(run_without_config), ["config.yaml", "overwrite=true"]),
    "resume with another recipe": (
        resumed(lambda run: ["precision.recipe=bf16"]),
        ["precision.recipe: 'block128' -> 'bf16'", "--allow-changes"],
    ),
    "evaluate into a missing folder": (
        lambda here: ("evaluate", here / "small.yaml", "--output", here / "no/samples.jsonl"),
        ["no/samples.jsonl", "does not exist"],
    ),
    "evaluate into a folder": (lambda here: ("evaluate", here / "small.yaml", "--output", here), ["folder or device"]),
    "generate without a model": (lambda here: ("generate", here / "nowhere", "hello"), ["nowhere", "config.json"]),
    "generate an empty prompt": (lambda here: ("generate", TINY_MODEL, ""), ["token"]),
    "generate nothing": (lambda here: ("generate", TINY_MODEL, "1", "--max-tokens", "0"), ["at least 1"]),
    "generate beyond the model": (lambda here: ("generate", TINY_MODEL, "1", "--max-tokens", "999"), ["256"]),
    "generate with top_p of 2": (lambda here: ("generate", TINY_MODEL, "1", "--top-p", "2"), ["top_p", "2.0"]),
    "generate with an unknown recipe": (lambda here: ("generate", TINY_MODEL, "1", "--recipe", "int8"), ["'int8'"]),
}


def main(*arguments) -> int:
    sys.argv = ["octavo", *map(str, arguments)]
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return stop.value.code or 0


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with small.yaml, which works."""
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.delenv("OCTAVO_TRACEBACK", raising=False)
    (tmp_path / "small.yaml").write_text(SMALL.format(here=tmp_path, model=TINY_MODEL))
    return tmp_path


def files_of(folder: Path) -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def refused(here, capsys, wanted, *arguments):
    """The command ends with code 2 and one line that says everything wanted; no file came, went or changed."""
    capsys.readouterr()
    before = files_of(here)
    assert main(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("octavo: ") and error.count("\n") == 1 and "Traceback" not in error, error
    for text in wanted:
        assert text in error, f"{text!r} is not in {error!r}"
    assert files_of(here) == before


@pytest.mark.parametrize("mistake", OVERRIDES)
def test_a_bad_override_is_refused(mistake, here, capsys):
    override, wanted = OVERRIDES[mistake]
    if "{broken}" in override:
        shutil.copytree(TINY_MODEL, here / "broken")
        (here / "broken/generation_config.json").write_text("{broken")
    (here / "empty").mkdir()
    for name, path in (("{empty}", "empty"), ("{file}", "small.yaml"), ("{broken}", "broken")):
        override = override.replace(name, str(here / path))
    refused(here, capsys, wanted, "train", here / "small.yaml", override)


@pytest.mark.parametrize("mistake", INPUTS)
def test_a_bad_input_is_refused(mistake, here, capsys):
    make, wanted = INPUTS[mistake]
    refused(here, capsys, wanted, *make(here))
