"""octavo generate as a user meets it: files in and out, stopped and gone on with to the byte, a line for a mistake."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from training_runs import TINY_MODEL, in_a_child, signal_at

from octavo import cli
from octavo.generate import generation, meter
from octavo.generate.completion_file import CompletionFile
from octavo.models.checkpoint import load_decoder
from octavo.numerics.recipe import get_recipe
from octavo.rollout.engine import Engine, EngineConfig
from octavo.rollout.sampler import SamplingConfig
from octavo.tasks.prompts import encode_prompt, stop_token_ids
from octavo.trainer.run import load_tokenizer

REPO = Path(__file__).resolve().parents[2]
NUM_PROMPTS, GROUP_SIZE = 12, 3
OPTIONS = ("--max-tokens", 6, "--group-size", GROUP_SIZE, "--seed", 5, "--max-sequences", 4)


def run(*arguments) -> int:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(sys, "argv", ["octavo", "generate", *map(str, arguments)])
        patch.delenv("OCTAVO_TRACEBACK", raising=False)
        cli.main()
    return stop.value.code or 0


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("".join(f"{n}+{3 * n}-2=\n" for n in range(NUM_PROMPTS)))
    return path


def rows_of(path):
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_rows_are_what_the_engine_samples(prompts, tmp_path, capsys):
    output = tmp_path / "out.jsonl"
    assert run(TINY_MODEL, "--prompts", prompts, "--output", output, "--logprobs", *OPTIONS) == 0
    decoder, tokenizer = load_decoder(TINY_MODEL, get_recipe("block128")), load_tokenizer(str(TINY_MODEL))
    engine = Engine(decoder, EngineConfig(), stop_token_ids(tokenizer, None, decoder.hf_config))
    texts = prompts.read_text().splitlines()
    encoded = [encode_prompt(tokenizer, text) for text in texts]
    groups = engine.generate(encoded, SamplingConfig(), max_completion_tokens=6, group_size=GROUP_SIZE, seed=5)
    wanted = [
        {
            "prompt": texts[index],
            "prompt_index": index,
            "sample": sample,
            "completion": tokenizer.decode(completion.tokens, skip_special_tokens=True),
            "finish_reason": completion.finish_reason,
            "num_prompt_tokens": len(encoded[index]),
            "num_tokens": len(completion.tokens),
            "mean_logprob": sum(completion.rollout_logprobs) / len(completion.tokens),
            "tokens": completion.tokens,
            "rollout_logprobs": completion.rollout_logprobs,
        }
        for index, group in enumerate(groups)
        for sample, completion in enumerate(group)
    ]
    assert rows_of(output) == wanted and len({row["completion"] for row in wanted}) > 5
    captured = capsys.readouterr()
    num_tokens = sum(row["num_tokens"] for row in wanted)
    assert f"done: 36 completions, {num_tokens} tokens in " in captured.err and captured.out == ""
    assert " tok/s; prompts, " in captured.err and f" preemptions; {output}\n" in captured.err


@pytest.mark.parametrize("calls", [1, 16])
def test_a_killed_run_goes_on_to_the_same_bytes(calls, prompts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(generation, "COMPLETIONS_PER_CALL", calls)
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    assert run(TINY_MODEL, "--prompts", prompts, "--output", whole, *OPTIONS) == 0
    arguments = (TINY_MODEL, "--prompts", prompts, "--output", parts, *OPTIONS, "--resume")
    for call in (8, 11):
        with monkeypatch.context() as patch:
            signal_at(patch, CompletionFile, "add", call, signal.SIGKILL)
            assert in_a_child(run, *arguments) == -signal.SIGKILL
    assert [len(parts.read_bytes().splitlines()), parts.read_bytes()[-1:]] == [17, b"\n"]
    capsys.readouterr()
    assert run(*arguments) == 0
    assert parts.read_bytes() == whole.read_bytes()
    error = capsys.readouterr().err
    assert f"going on with {parts}: 17 of 36 completions are there" in error and "done: 19 completions, " in error
    assert run(*arguments) == 0 and "done: 0 completions, 0 tokens" in capsys.readouterr().err


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_whole_lines_and_says_how_to_go_on(number, code, prompts, tmp_path, monkeypatch, capsys):
    output = tmp_path / "out.jsonl"
    arguments = (TINY_MODEL, "--prompts", prompts, "--output", output, *OPTIONS)
    with monkeypatch.context() as patch:
        signal_at(patch, CompletionFile, "add", 3, number)
        assert run(*arguments) == code
    num_rows = len(rows_of(output))
    assert 3 <= num_rows < 36
    said = f"{num_rows} of 36 completions are in {output}; the same command with --resume goes on"
    assert f"octavo: stopped by {number.name}, {said}\n" in capsys.readouterr().err
    assert run(*arguments) == 2 and "is there already. Go on with it by --resume" in capsys.readouterr().err
    assert run(*arguments, "--resume") == 0 and len(rows_of(output)) == 36


def test_ctrl_c_in_a_process_of_its_own(prompts, tmp_path):
    output = tmp_path / "out.jsonl"
    prompts.write_text("1+1=\n" * 20_000)
    command = [sys.executable, "-m", "octavo.cli", "generate", TINY_MODEL, "--prompts", prompts, "--output", output]
    process = subprocess.Popen([*command, "--max-tokens", "3"], cwd=REPO, stderr=subprocess.PIPE, text=True)
    while not (output.exists() and output.stat().st_size):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in error
    num_rows = len(rows_of(output))
    assert f"{num_rows:,} of 20,000 completions are in" in error.splitlines()[-1]
    assert output.read_bytes().endswith(b"\n")


def test_a_run_may_grow(prompts, tmp_path, capsys):
    output, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    grown = tmp_path / "more.txt"
    grown.write_text(prompts.read_text() + "5+5=\n")
    small = (*OPTIONS[:3], 1, *OPTIONS[4:])
    assert run(TINY_MODEL, "--prompts", prompts, "--output", output, *small) == 0
    assert run(TINY_MODEL, "--prompts", grown, "--output", output, *OPTIONS, "--resume") == 0
    assert f"done: {13 * 3 - 12} completions" in capsys.readouterr().err
    assert run(TINY_MODEL, "--prompts", grown, "--output", whole, *OPTIONS) == 0
    assert output.read_bytes() == whole.read_bytes()


OTHERS = {
    "seed: 5 -> 6": ("--seed", 6),
    "sampling.temperature: 1.0 -> 0.5": ("--temperature", 0.5),
    "sampling.top_k: 0 -> 2": ("--top-k", 2),
    "recipe: 'block128' -> 'bf16'": ("--recipe", "bf16"),
    "kv_cache: 'fp8' -> 'bf16'": ("--kv-cache", "bf16"),
    "max_tokens: 6 -> 7": ("--max-tokens", 7),
}


def test_another_setting_is_not_mixed_in(prompts, tmp_path, capsys):
    arguments = (TINY_MODEL, "--prompts", prompts, "--output", tmp_path / "out.jsonl", *OPTIONS)
    assert run(*arguments) == 0
    before = (tmp_path / "out.jsonl").read_bytes()
    for said, option in OTHERS.items():
        assert run(*arguments, "--resume", *option) == 2
        assert said in capsys.readouterr().err and (tmp_path / "out.jsonl").read_bytes() == before


def test_another_model_is_not_mixed_in(prompts, tmp_path, capsys):
    shutil.copytree(TINY_MODEL, tmp_path / "model")
    arguments = (tmp_path / "model", "--prompts", prompts, "--output", tmp_path / "out.jsonl", *OPTIONS, "--resume")
    assert run(*arguments) == 0
    config = json.loads((tmp_path / "model/config.json").read_text())
    (tmp_path / "model/config.json").write_text(
        json.dumps({**config, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
    )
    assert run(*arguments) == 2
    assert "rope.rope_theta: " in capsys.readouterr().err


def test_a_gpu_that_is_too_small_is_one_line(monkeypatch, capsys):
    def load(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 96.00 MiB.\nSee the documentation")

    monkeypatch.setattr(generation, "load_decoder", load)
    assert run(TINY_MODEL, "1+1=") == 2
    error = capsys.readouterr().err
    assert (
        error.count("\n") == 1 and "do not fit on cpu: CUDA out of memory. Tried to allocate 96.00 MiB. Free" in error
    )


def test_a_pipe_is_as_good_as_a_file(capsys):
    command = f"{sys.executable} -c 'import sys; from octavo.generate.prompt_files import read_prompts, Path; "
    command += "print([p.fields for p in read_prompts(Path(sys.argv[1]))])' <(printf '1+1=\\n2+2=\\n')"
    result = subprocess.run(["bash", "-c", command], cwd=REPO, capture_output=True, text=True)
    assert result.stdout == "[{'prompt': '1+1='}, {'prompt': '2+2='}]\n", result.stderr


@pytest.mark.gpu
def test_on_a_gpu_the_size_of_the_engine_changes_nothing(prompts, tmp_path, capsys):
    files = tmp_path / "fits.jsonl", tmp_path / "small.jsonl"
    arguments = (TINY_MODEL, "--prompts", prompts, "--device", "cuda", "--max-tokens", 40, "--group-size", 8)
    assert run(*arguments, "--output", files[0]) == 0
    assert "up to 96 sequences at once" in capsys.readouterr().err
    assert run(*arguments, "--output", files[1], "--kv-cache-tokens", 128, "--max-sequences", 5) == 0
    assert files[0].read_bytes() == files[1].read_bytes() and len(rows_of(files[0])) == 96


def test_json_lines_are_printed_as_they_are(tmp_path, monkeypatch, capsysbinary):
    row = {"id": "ü", "messages": [{"role": "user", "content": "1+1="}]}
    monkeypatch.setattr(sys, "stdin", type("Input", (), {"buffer": io.BytesIO(json.dumps(row).encode())}))
    arguments = ("--prompts", "-", "--output", "-", "--max-tokens", 3, "--temperature", 0)
    assert run(TINY_MODEL, *arguments) == 0
    (line,) = capsysbinary.readouterr().out.splitlines()
    assert "ü".encode() in line
    found = json.loads(line)
    assert found == row | found and (found["prompt_index"], found["sample"]) == (0, 0) and found["completion"]


def test_a_closed_pipe_ends_it(prompts):
    command = f"{sys.executable} -m octavo.cli generate {TINY_MODEL} --prompts {prompts} --output - --max-sequences 1"
    shell = f"({command}; echo $? >&2) | head -n 1"
    result = subprocess.run(["bash", "-c", shell], cwd=REPO, capture_output=True, text=True, timeout=100)
    assert json.loads(result.stdout)["prompt_index"] == 0 and "Traceback" not in result.stderr
    assert result.stderr.splitlines()[-1] == "1"


def test_lines_say_how_far_it_is_where_there_is_no_terminal(prompts, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(meter, "LINE_INTERVAL_S", 0.0)
    assert run(TINY_MODEL, "--prompts", prompts, "--output", tmp_path / "out.jsonl", *OPTIONS) == 0
    error = capsys.readouterr().err
    assert " of 36 completions, " in error and " tok/s\n" in error
    assert "12 prompts x 3; KV cache (fp8) of 64 tokens" in error and "up to 4 sequences at once" in error


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((), "give either prompts or --prompts FILE"),
        (("1+1=", "--prompts", "p.jsonl"), "give either prompts or --prompts FILE, not both"),
        (("1+1=", "--resume"), "--resume goes on with a file: give --output FILE, too"),
        (("1+1=", "--resume", "--output", "-"), "--resume goes on with a file"),
        (("--prompts", "no.txt"), "no.txt is no file of prompts"),
        (("--prompts", "p.jsonl"), "p.jsonl has 1 bad row (line 2: not JSON"),
        (("1+1=", "ö" * 300), "prompt 2 has "),
        (("1+1=", "--output", "no/out.jsonl"), "--output no/out.jsonl lies in a folder that does not exist"),
        (("1+1=", "--max-sequences", "0"), "max_sequences must be at least 1; got 0"),
        (("1+1=", "--kv-cache-tokens", "-5"), "kv_cache_tokens must be at least 1; got -5"),
        (("1+1=", "--kv-cache-tokens", "16"), "--kv-cache-tokens 16 is less than the 144 that the longest prompt and"),
        (("1+1=", "--min-p", "1"), "min_p is in [0, 1); got 1.0"),
        (("1+1=", "--top-k", "-1"), "top_k is at least 0"),
        (("1+1=", "--chat-template", "always"), "prompt 1: chat_template='always' wants a tokenizer with a chat"),
        (("1+1=", "--device", "cuda:77"), "device='cuda:77' cannot be used here"),
        (("1+1=", "--group-size", str(2**20 + 1)), "group_size is at most"),
    ],
)
def test_a_mistake_is_one_line(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("p.jsonl").write_text('{"prompt": "a"}\nx\n')
    assert run(TINY_MODEL, *arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("octavo: ") and said in lines[-1]
    assert os.listdir() == ["p.jsonl"]
