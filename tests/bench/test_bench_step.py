"""`octavo bench step`: a step on a CPU, its prediction by hand, what the cache gets, and what is refused."""

import importlib
import json
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

from octavo.bench import results, step, step_plan, step_sampled
from octavo.bench.rollout import random_decoder, step_bytes
from octavo.bench.step import (
    PHASES,
    Rates,
    StepTime,
    bench_step,
    build,
    calibration_share,
    predicted_seconds,
    step_seconds,
    step_times,
    whole_step,
)
from octavo.bench.step_plan import StepWork, cache_tokens, formats_beside, step_peak_bytes
from octavo.bench.step_sampled import sampled_step
from octavo.bench.train import FORMATS, model_flops
from octavo.cli import app
from octavo.models.config import read_config
from octavo.numerics.recipe import get_recipe
from octavo.rl.calibration_config import GridCalibration
from octavo.trainer.memory import FRAGMENTATION, LIBRARY_BYTES
from octavo.trainer.memory_held import count_parameters, forward_bytes, master_bytes, moment_bytes
from octavo.trainer.memory_passes import DecoderPass

MODEL = "examples/tiny/model"
WORK = StepWork(
    completion_tokens=12, prompt_tokens=4, num_prompts=2, group_size=2, num_mini_batches=2, microbatch_tokens=32
)
SIZES = {"at_once": 3, "cache_tokens": 48, "peak_bytes": 2**31, "planned_bytes": 2**30}
RATES = Rates(copy_gb_s=1000.0, forward_tflop_s=1.0, bf16_tflop_s=0.5, train_tflop_s=2.0)


@pytest.mark.parametrize("recipe, kv_cache, formats", [("block128", "fp8", FORMATS[2]), ("bf16", "bf16", FORMATS[0])])
def test_every_phase_of_a_step_runs_and_trains(recipe, kv_cache, formats, monkeypatch):
    seen, run_step = [], step.run_step

    def spying(work, engine, reference, optimizer):
        before = [p.detach().clone() for p in engine.decoder.parameters()]
        times = run_step(work, engine, reference, optimizer)
        still = sum(torch.equal(a, b) for a, b in zip(before, engine.decoder.parameters(), strict=True))
        seen.append((work.completion_tokens, optimizer.update, engine.decoder.policy_version, still, len(before)))
        return times

    monkeypatch.setattr(step, "run_step", spying)
    chosen = get_recipe(recipe, kv_cache=kv_cache)
    work = replace(WORK, completion_tokens=20)
    models = build(*read_config(MODEL), chosen, formats, work.longest, device="cpu")
    time = bench_step(models, work, RATES, 2 * 32)
    assert [entry[:2] for entry in seen] == [(16, 2), (20, 4)], "a short step first, two updates each"
    assert seen[0][2] + 2 == seen[1][2] and seen[1][3] < seen[1][4], "bytes follow each update"
    assert time.at_once == 2 and tuple(time.measured) == tuple(time.predicted) == PHASES
    assert all(seconds > 0.0 for seconds in (*time.measured.values(), *time.predicted.values()))
    total = sum(seconds / 20 if phase == "shadow" else seconds for phase, seconds in time.measured.items())
    assert time.tok_s == pytest.approx(4 * 20 / total) and time.batch_invariant


def step_time(work, measured, predicted, batch_invariant=True):
    return StepTime(
        work=work, formats="x", batch_invariant=batch_invariant, **SIZES, measured=measured, predicted=predicted
    )


def test_a_step_counts_the_shadow_once_in_twenty_steps():
    assert GridCalibration().interval == 20, "of a run whose configuration does not say"
    measured = dict(zip(PHASES, (10.0, 2.0, 1.0, 40.0, 4.0, 1.0), strict=True))
    time = step_time(WORK, measured, dict.fromkeys(PHASES, 4.0))
    assert time.seconds == pytest.approx(10 + 2 + 1 + 40 / 20 + 4 + 1)
    assert time.calibration_share == pytest.approx(2 / 20)
    assert time.tok_s == pytest.approx(48 / 20) and time.tok_s_rarely_checked == pytest.approx(48 / 18)
    assert step_seconds(time.predicted) == pytest.approx(5 * 4 + 4 / 20)
    assert calibration_share(time.predicted) == pytest.approx(0.2 / 20.2)


@pytest.mark.parametrize("recipe, may", [("bf16", True), ("block128", True), ("w8a16", True), ("tensorwise", False)])
def test_a_recipe_that_is_not_batch_invariant_is_always_checked(recipe, may):
    phases = dict.fromkeys(PHASES, 1.0)
    time = step_time(WORK, phases, phases, get_recipe(recipe).batch_invariant)
    assert time.tok_s_rarely_checked == (pytest.approx(48 / 4.05) if may else None)


def test_samples_add_up_to_a_step(monkeypatch):
    """Of calls that all take a second: what each phase repeats, by hand."""
    times = []

    def decode(engine, batch, context, calls):
        times.append((batch, context))
        return float(context)

    def once(call, device):
        call()
        return 1.0

    monkeypatch.setattr(step_sampled, "once", once)
    monkeypatch.setattr(step_sampled, "decode_milliseconds", decode)
    monkeypatch.setattr(step_sampled, "MICROBATCHES", 1)
    work = StepWork(
        completion_tokens=20, prompt_tokens=4, num_prompts=4, group_size=3, num_mini_batches=2, microbatch_tokens=48
    )
    models = build(*read_config(MODEL), get_recipe("block128"), FORMATS[0], work.longest, device="cpu")
    time = bench_step(models, work, RATES, 5 * 32, sampled_step)
    found = time.measured
    assert tuple(found) == PHASES
    # Six sequences of 24 tokens make up a mini-batch, two a microbatch: three of these, one of which runs.
    assert found["old_logprobs"] == found["reference"] == pytest.approx(3 * 2)
    assert found["shadow"] == pytest.approx(2 * 3)
    assert found["update"] == pytest.approx(3 * 2 + 2) and found["weight_update"] == 2.0
    # Twelve sequences, five at once: two rounds and one of two, each at contexts of 4 to 20.
    assert times == [(batch, context) for batch in (5, 2) for context in (4, 8, 12, 16, 20)]
    assert found["rollout"] == pytest.approx(1.0 + 1.0 + 3 * 20 * 12 / 1e3), "prompts, memory, steps"
    # Of the shadow's six seconds a step counts a twentieth; without the check it is six shorter.
    assert time.seconds == pytest.approx(2.72 + 6 + 6 + 0.3 + 8 + 2)
    assert time.calibration_share == pytest.approx(0.3 / 25.02)
    assert time.tok_s == pytest.approx(12 * 20 / 25.02) and time.tok_s_rarely_checked == pytest.approx(240 / 19.02)


def test_samples_run_on_a_cpu():
    models = build(*read_config(MODEL), get_recipe("block128"), FORMATS[0], WORK.longest, device="cpu")

    def measure(work):
        return bench_step(models, work, RATES, 3 * 16, sampled_step)

    time = measure(WORK)
    assert time.at_once == 3 and all(time.measured[phase] > 0.0 for phase in PHASES)
    with pytest.raises(
        ValueError, match="are sampled 4 tokens at a time, and completions have 3. Measure a whole step"
    ):
        measure(replace(WORK, completion_tokens=3))


def test_the_prediction_by_hand():
    config, hf_config = read_config(MODEL)
    recipe = get_recipe("block128")
    decoder = random_decoder(config, hf_config, recipe, 64, "cpu")
    found = predicted_seconds(decoder, WORK, RATES, FORMATS[0], at_once=3)
    flops, held, count = (
        model_flops(config, [16] * 4, 48),
        forward_bytes(config, recipe, True),
        count_parameters(config),
    )
    wanted = {
        "rollout": 2 * 12 * step_bytes(decoder, 3, 10) / 1e12 + model_flops(config, [4] * 2, 2) / 3e12,  # two rounds
        "old_logprobs": flops / 3e12,
        "reference": flops / 3e12,
        "shadow": flops / 1.5e12,  # two forwards of one mini-batch of two
        "update": flops / 2e12 + 2 * (2 * 4 + 2 * 8 + 4 * 4) * count / 1e12,
        "weight_update": 2 * (4 * count + held.stored + held.operands + held.backward) / 1e12,
    }
    assert found == pytest.approx(wanted)


def test_the_cache_gets_what_the_rest_leaves():
    config, recipe = read_config(MODEL)[0], get_recipe("block128")
    token = 2 * config.num_layers * config.num_kv_heads * (config.head_dim + 4)
    assert step_plan.token_bytes(config, recipe) == token

    def room(free_bytes):
        formats = formats_beside(config, recipe, [WORK], free_bytes)
        return formats, cache_tokens(config, recipe, WORK, formats, free_bytes)

    def beside(formats, num_tokens):
        """Free bytes that leave room for a cache of so many tokens."""
        step = int(step_peak_bytes(config, recipe, WORK, formats) * (1 + FRAGMENTATION)) + LIBRARY_BYTES
        return step + int(num_tokens * token / step_plan.CACHE_SHARE) + 1

    assert room(2**40) == (FORMATS[0], 64), "all four sequences, and nothing made smaller"
    assert room(beside(FORMATS[2], 40)) == (FORMATS[2], 40)
    with pytest.raises(ValueError, match="keys and values of one sequence of 16 tokens do not fit beside the step"):
        room(beside(FORMATS[2], 15))


def test_layers_are_computed_again_where_more_sequences_fit_then():
    config, recipe = replace(read_config(MODEL)[0], num_layers=40), get_recipe("block128")
    work = replace(WORK, completion_tokens=508, microbatch_tokens=2048)
    once, again = (step_peak_bytes(config, recipe, work, formats) for formats in FORMATS[2:])
    assert once > 1.2 * again
    all_of_them = 4 * 512 * step_plan.token_bytes(config, recipe) / step_plan.CACHE_SHARE
    for free, formats in ((once + all_of_them, FORMATS[2]), (once + all_of_them / 2, FORMATS[3])):
        free_bytes = int(free * (1 + FRAGMENTATION)) + LIBRARY_BYTES
        assert formats_beside(config, recipe, [work], free_bytes) is formats


def test_formats_fit_every_step():
    """A microbatch of long sequences may be the smaller one: 1,088 tokens here, beside four sequences of 512."""
    config, recipe = replace(read_config(MODEL)[0], num_layers=40), get_recipe("bf16")
    long, short = (
        replace(WORK, completion_tokens=size - 4, microbatch_tokens=2048, lends_memory=True) for size in (1088, 512)
    )
    peaks = [step_peak_bytes(config, recipe, work, FORMATS[2]) for work in (long, short)]
    assert peaks[1] > 1.1 * peaks[0] > 1.1 * step_peak_bytes(config, recipe, short, FORMATS[3])
    free_bytes = int(1.05 * peaks[0] * (1 + FRAGMENTATION)) + LIBRARY_BYTES
    assert formats_beside(config, recipe, [long], free_bytes) is FORMATS[2]
    for works in ([long, short], [short, long]):
        assert formats_beside(config, recipe, works, free_bytes) is FORMATS[3]
        with pytest.raises(ValueError, match=f"one sequence of {works[0].longest} tokens do not fit"):
            formats_beside(config, recipe, works, peaks[0] // 4)


def test_lent_memory_leaves_all_but_what_is_held_to_the_cache():
    config, recipe = replace(read_config(MODEL)[0], num_layers=40), get_recipe("block128")
    work = replace(WORK, completion_tokens=2044, num_prompts=64, microbatch_tokens=2048)
    step = step_peak_bytes(config, recipe, work, FORMATS[2])
    free = int(step * (1 + FRAGMENTATION)) + LIBRARY_BYTES
    token = step_plan.token_bytes(config, recipe)

    def room(work, free_bytes):
        return cache_tokens(config, recipe, work, FORMATS[2], free_bytes)

    lent = replace(work, lends_memory=True)
    assert room(work, free + 10 * token) < 16 and room(lent, free - 1) == 0
    held = step_plan._held_bytes(config, recipe, FORMATS[2]) + step_plan._sampling_bytes(config, recipe, lent)
    assert room(lent, free) == pytest.approx(0.95 * 1.05 * (step - held) / token, rel=1e-3)
    crowd = replace(lent, num_prompts=100_000)  # whose decode step takes more than training does
    assert step_plan._sampling_bytes(config, recipe, crowd) > step and room(crowd, free) == 0
    with pytest.raises(ValueError, match="one sequence of 2048 tokens do not fit"):
        formats_beside(config, recipe, [crowd], free)


def test_what_a_step_holds_by_hand():
    """Two mini-batches of two sequences of 16 tokens, together in a microbatch, filled up to 128 tokens; then alone."""
    config, recipe = read_config(MODEL)[0], get_recipe("block128")
    held, count = forward_bytes(config, recipe, True), count_parameters(config)
    vectors = master_bytes(config, "bf16") - 2 * count  # which stay FP32
    always = 2 * (held.stored + held.operands + held.head) + held.backward
    always += master_bytes(config, "bf16") + moment_bytes(config, "int8")
    assert vectors > 0 and 4.0 < always / count < 12.0

    def most(accumulated, num_tokens=128):
        shape = {"num_tokens": num_tokens, "num_scored": num_tokens, "longest": 16}
        passes = DecoderPass(shape=config, recipe=recipe, recompute=False, **shape)
        update = passes.update(accumulated=accumulated) + 4 * count * accumulated
        return always + max(update, 4 * count + passes.forward(shadow=True))

    assert step_peak_bytes(config, recipe, WORK, FORMATS[2]) == most(False)
    assert step_peak_bytes(config, recipe, replace(WORK, microbatch_tokens=16), FORMATS[2]) == most(True)


def test_what_cannot_be_measured_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="6 prompts do not make up 4 mini-batches"):
        StepWork(completion_tokens=4, num_prompts=6)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    shown = CliRunner().invoke(app, ["bench", "step", "--model", MODEL])
    assert "octavo bench step measures a CUDA device" in f"{shown.exception}{shown.output}"
    monkeypatch.setattr(step, "require_cuda", lambda what: None)
    monkeypatch.setattr(step, "require_kernels", lambda device, precision: None)
    with pytest.raises(ValueError, match="recipe 'fp8_channel' has no backward"):
        next(step_times(*read_config(MODEL), get_recipe("fp8_channel"), [WORK]))
    with pytest.raises(ValueError, match="positions. Give fewer --prompt-tokens or --completion-tokens"):
        next(step_times(*read_config(MODEL), get_recipe("block128"), [WORK, replace(WORK, completion_tokens=10**6)]))


@pytest.mark.parametrize("lends", [False, True])
def test_segments_are_expandable_before_torch_takes_any(lends, monkeypatch):
    called = []
    for name in ("require_cuda", "require_kernels", "expand_segments", "device_rates", "build", "bench_step"):
        monkeypatch.setattr(step, name, lambda *given, name=name: called.append(name))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**40, 2**40))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    works = [WORK, replace(WORK, lends_memory=lends)]
    list(step_times(*read_config(MODEL), get_recipe("block128"), works))
    wanted = ["device_rates", "build", "bench_step", "bench_step"]
    assert called[2:] == ["expand_segments"] * lends + wanted


def test_the_command_prints_phases_or_json(monkeypatch):
    measured, predicted = ({phase: seconds for phase in PHASES} for seconds in (2.0, 1.0))
    times = [step_time(WORK, measured, predicted), step_time(WORK, measured, predicted, batch_invariant=False)]
    asked = []
    monkeypatch.setattr(step, "step_times", lambda *given: asked.extend(given[3]) or times)
    arguments = [
        "bench",
        "step",
        "--model",
        MODEL,
        "--completion-tokens",
        "12",
        "--prompts",
        "2",
        "--mini-batches",
        "2",
    ]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0 and (asked[0].completion_tokens, asked[0].num_prompts) == (12, 2), shown.output
    lines = {line.split("│")[1].strip(): line for line in shown.output.splitlines() if "│" in line}
    for name, texts in {
        "update": ["2.00 / 1.00"] * 2,
        "shadow, once in 20 steps": ["2.00 / 1.00"] * 2,  # all of it
        "step": ["10.10 / 5.05"] * 2,
        "shadow's share of it": ["0.99% / 0.99%"] * 2,
        "tok/s": ["5", "5"],
        "tok/s, rarely checked": ["6", "-"],  # 48 tokens in 8.1 seconds
    }.items():
        assert [text.strip() for text in lines[name].split("│")[2:4]] == texts, shown.output
    assert "4 sequences, 3 at once" in shown.output
    row, other = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert row["seconds"] == pytest.approx(10.1) and row["measured"]["shadow"] == row["measured"]["rollout"] == 2.0
    assert row["tok_s"] == pytest.approx(48 / 10.1) and row["tok_s_rarely_checked"] == pytest.approx(48 / 8.1)
    assert row["calibration_share"] == pytest.approx(0.1 / 10.1) and other["tok_s_rarely_checked"] is None


@pytest.mark.gpu
def test_it_measures_a_step_on_a_gpu():
    works = [WORK, replace(WORK, completion_tokens=30)]
    whole = list(step_times(*read_config(MODEL), get_recipe("block128"), works, whole_step))
    for time in (*whole, *step_times(*read_config(MODEL), get_recipe("block128"), works[1:], sampled_step)):
        assert time.at_once == 4 and all(seconds > 0.0 for seconds in time.measured.values())


def test_the_script_sets_later_calls_beside_bf16(tmp_path, monkeypatch):
    script = importlib.import_module("step")  # of benchmarks/
    asked = []

    def times(config, hf_config, recipe, works, run):
        asked.append((recipe.name, recipe.kv_cache, [work.completion_tokens for work in works], run))
        # Steps of 5 x 2.5 + 50 / 20 = 15 and 5 x 1.75 + 25 / 20 = 10 seconds; with all of the shadow 62.5 and 33.75.
        seconds, shadow = {"bf16": (2.5, 50.0), "block128": (1.75, 25.0)}[recipe.name]
        for work in works:
            phases = dict.fromkeys(PHASES, seconds) | {"shadow": shadow}
            phases = {phase: seconds * work.completion_tokens / 1024 for phase, seconds in phases.items()}
            yield step_time(work, phases, {phase: seconds / 2 for phase, seconds in phases.items()})

    monkeypatch.setattr(script, "step_times", times)
    monkeypatch.setattr(results, "_commit", lambda: "f00")
    monkeypatch.setenv("OUT", str(tmp_path))

    def run(*arguments):
        monkeypatch.setattr(script.sys, "argv", ["step.py", *arguments])
        script.main()
        return results.read_results(tmp_path / "step.json")

    run("sampled", "bf16", "8192")
    rows = run("sampled", "block128+kv8", "2048", "8192")
    assert asked == [("bf16", "bf16", [8192], sampled_step), ("block128", "fp8", [2048, 8192], sampled_step)]
    row = rows["step/qwen3-8b/8192/block128+kv8, sampled speedup_vs_bf16"]
    assert (row.value, row.goal, row.met) == (1.5, 1.5, True)
    assert rows["step/qwen3-8b/2048/block128+kv8, sampled/update seconds"].value == 3.5
    shadow = rows["step/qwen3-8b/2048/block128+kv8, sampled/shadow seconds"]
    assert (shadow.value, shadow.note) == (50.0, "predicted 25.000 s, once in 20 steps"), "all of it"
    for name, step_s, old_s, share in (("bf16", 120.0, 20.0, 2.5 / 15), ("block128+kv8", 80.0, 14.0, 1.25 / 10)):
        case = f"step/qwen3-8b/8192/{name}, sampled"
        assert rows[f"{case} tok_s"].value == 64 * 8192 / step_s
        assert f"{step_s:.1f} s a step, predicted {step_s / 2:.1f} s, 3 sequences" in rows[f"{case} tok_s"].note
        assert rows[f"{case} tok_s_rarely_checked"].value == pytest.approx(64 * 8192 / (step_s - old_s))
        of_it = rows[f"{case} calibration_share"]
        assert of_it.value == pytest.approx(share) and (of_it.goal, of_it.better, of_it.met) == (0.02, "lower", False)
    assert "step/qwen3-8b/2048/block128+kv8, sampled speedup_vs_bf16" not in rows, "no BF16 of that length"
    peak, off = (rows[f"step/qwen3-8b/8192/bf16, sampled {metric}"] for metric in ("peak_gib", "plan_off"))
    assert (peak.value, peak.note, off.value, off.met) == (2.0, "planned 1.0 GiB", 0.5, False)
    assert "in 48 tokens of KV" in rows["step/qwen3-8b/8192/bf16, sampled tok_s"].note
    with pytest.raises(SystemExit, match="no '512'; name some of sampled lent bf16 block128"):
        run("512")
