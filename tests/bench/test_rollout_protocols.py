"""benchmarks/rollout.py on a tiny shape: protocols are kept and gone on with, and sum up what they measured."""

import functools
import json
from types import SimpleNamespace

import pytest
import rollout
import torch
from training_runs import TINY_MODEL
from transformers import AutoConfig

from octavo.bench import results
from octavo.bench.results import Results, read_results


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Runs the command with some protocols; returns how many decoders that took, and the rows of the file."""
    shape = AutoConfig.from_pretrained(TINY_MODEL)
    made = []

    @functools.cache
    def of_recipe(recipe):
        return original(rollout.decoder_config(shape), shape, recipe, max_tokens=128, device="cpu")

    def random_decoder(config, hf_config, recipe, max_tokens):
        made.append(recipe)
        return of_recipe(recipe)

    original = rollout.random_decoder
    monkeypatch.setattr(rollout, "SHAPES", dict.fromkeys(rollout.SHAPES, shape))
    monkeypatch.setattr(rollout, "random_decoder", random_decoder)
    monkeypatch.setattr(rollout, "Engine", lambda *arguments: SimpleNamespace(prefill_s=1.0))
    monkeypatch.setattr(rollout.gc, "collect", lambda: 0)
    monkeypatch.setattr(rollout, "copy_speed", lambda: 4000.0)
    monkeypatch.setattr(rollout, "BATCHES", (1, 3))
    monkeypatch.setattr(rollout, "CONCURRENCIES", (2, 4, 10**9))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (100_000_000_000, 0))
    monkeypatch.setattr(
        rollout, "decode_row", lambda d, case, batch, context, copy: rollout.speed_row(case, 10.0 * batch)
    )

    def generate_seconds(engine, count, prompt, new):
        engine.prefill_s += 5.0
        return new * (2.0 if count == 2 else 5.0)

    monkeypatch.setattr(rollout, "generate_seconds", generate_seconds)
    monkeypatch.setattr(rollout.sys, "argv", ["rollout.py"])
    monkeypatch.setenv("OUT", str(tmp_path))

    def run(*protocols):
        made.clear()
        rollout.sys.argv[1:] = protocols
        rollout.main()
        return len(made), read_results(tmp_path / "rollout.json")

    return run


def test_protocols_are_kept_and_not_measured_again(measured, tmp_path, monkeypatch):
    num_decoders, first = measured("D")
    assert num_decoders == 3 and first["D/qwen3-32b/block128+kv8/3 tok_s"].value == 30.0
    assert first["D/qwen3-32b/block128+kv8/3 speedup_vs_bf16"].value == 1.0
    num_decoders, both = measured("L")
    assert num_decoders == 1 and first.keys() < both.keys()
    best = both["L/llama-3.1-8b/block128+kv8 tok_s"]
    assert (best.value, best.goal, best.met) == (1.0, 14000.0, False) and best.note.startswith("2 at once; ")
    assert (
        both["L/llama-3.1-8b/block128+kv8/4 tok_s"].value == 0.8
        and "L/llama-3.1-8b/block128+kv8/1000000000 tok_s" not in both
    )
    content = json.loads((tmp_path / "rollout.json").read_text())
    assert content["command"] == "python benchmarks/rollout.py D; python benchmarks/rollout.py L"
    assert measured("D") == (0, both)

    monkeypatch.setattr(results, "_commit", lambda: "another")
    num_decoders, rows = measured("D")
    assert num_decoders == 3 and not any(row.startswith("L/") for row in rows)


def test_the_bound_is_in_the_note(measured):
    _, rows = measured("L")
    decoder = rollout.random_decoder(None, None, rollout.get_recipe("block128", kv_cache="fp8"), max_tokens=128)
    bound = 4 / (rollout.step_bytes(decoder, 4, 2000) / 4e12)
    assert rows["L/llama-3.1-8b/block128+kv8/4 tok_s"].note == f"{0.8 / bound:.0%} of the bound of decode, {bound:,.0f}"


def test_whole_runs_count_sampled_tokens(measured):
    num_decoders, rows = measured("A", "B")
    assert num_decoders == 6
    row = rows["A/qwen3-8b/block128 tok_s"]
    assert row.value == pytest.approx(256 / 5.0) and "of the bound" in row.note
    assert row.note.startswith("5.00 s of 5120.00 for prompts; ")
    assert "vLLM 0.24 on another H200: 12,014" in rows["A/qwen3-8b/block128+kv8 tok_s"].note
    assert rows["B1/qwen3-8b/bf16 tok_s"].value == pytest.approx(128 * 4096 / 5.0)
    assert rows["B2/qwen3-8b/bf16 tok_s"].value == pytest.approx(128 * 511 / (512 * 5.0 - 5.0))


def test_an_unknown_protocol_is_refused(measured):
    with pytest.raises(SystemExit, match="protocols are A, B, C, W, S, L, D; got X"):
        measured("X")


def test_a_file_without_a_commit_is_not_gone_on_with(tmp_path, monkeypatch):
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(results, "_commit", lambda: results.UNKNOWN)
    row = rollout.speed_row("A/x/bf16", 1.0)
    Results("some", "python some.py").add(row)
    assert Results("some", "python some.py", resume=True).rows == []
    monkeypatch.setattr(results, "_commit", lambda: "f00")
    Results("some", "python some.py a").add(row)
    again = Results("some", "python some.py a", resume=True)
    assert again.rows == [row] and again.has("A/x/bf16") and again.command == "python some.py a"
    again.add(rollout.speed_row("A/x/bf16", 2.0))
    assert [row.value for row in read_results(tmp_path / "some.json").values()] == [2.0]
    monkeypatch.setattr(results, "_device", lambda: "another")
    assert Results("some", "python some.py a", resume=True).rows == []


def test_decode_steps_at_each_context(measured, monkeypatch):
    monkeypatch.setattr(rollout, "decode_kernels", lambda decoder, *_: {"attention": 2.0, "cast": 0.05})
    _, rows = measured("C", "S", "W")
    assert rows["S/qwen3-8b/block128+kv8 tok_s"].value == 40.0
    goals = {case.split("/")[2]: row.goal for case, row in rows.items() if row.metric == "speedup_vs_bf16"}
    assert goals == {"block128": None, "block128+kv8": 1.6}
    assert rows["W/qwen3-8b/w8a16/64 speedup_vs_block128"].met
    assert {case for case in rows if case.startswith("C/qwen3-8b/bf16/")} == {
        f"C/qwen3-8b/bf16/{context} tok_s" for context in (1024, 2048, 4096, 8192)
    }
    step = "kernels of a step/qwen3-8b/block128"
    assert {case for case in rows if case.startswith(f"{step} ") or case.startswith(f"{step}/")} == {
        f"{step} ms",
        f"{step}/attention ms",
    }
    assert rows[f"{step} ms"].value == 2.05


def test_a_row_of_decode_steps_says_how_far_from_the_bound():
    shape = AutoConfig.from_pretrained(TINY_MODEL)
    decoder = rollout.random_decoder(
        rollout.decoder_config(shape), shape, rollout.get_recipe("block128"), max_tokens=256, device="cpu"
    )
    row = rollout.decode_row(decoder, "S/qwen3-8b/block128", 2, 40, 1000.0)
    bound = 2 / (rollout.step_bytes(decoder, 2, 40) / 1e12)
    assert row.note.startswith("batch 2, ") and row.note.endswith(f"of the bound {bound:,.0f}") and row.value < bound
