"""The shadow in a step: which completions it runs on, what a loss takes from it, when calibration is called."""

from dataclasses import replace

import pytest
import torch
from training_runs import half_right, read_lines, tiny_config

from octavo.rl.batch import pack, select
from octavo.rl.calibration import calibrate, statistics_from_metrics
from octavo.rl.calibration_losses import scale_of
from octavo.rl.losses import ClipBounds
from octavo.trainer import loop, shadow
from octavo.trainer.calibrating import drawn_completions, noise_alarm, of_drawn
from octavo.trainer.divergence import StepRecord
from octavo.trainer.metrics import Display
from octavo.trainer.progress import Progress
from octavo.trainer.rollout import sample
from octavo.trainer.run import TRAINING, load_run, make_optimizer
from octavo.trainer.train import train


def small_config(folder, **changes):
    settings = {
        "rollout__prompts_per_step": 2,
        "optimizer__lr": 2e-4,
        "trainer": {"num_steps": 2, "num_mini_batches": 2, "shadow_interval": 0},
        "evaluation__interval": 0,
    }
    return tiny_config(folder, **(settings | changes))


def first_batch(run, microbatch_tokens=8192):
    completions = sample(run, run.problems(0, run.config.rollout.prompts_per_step), run.seed(TRAINING, 0))
    advantages = torch.linspace(-1.0, 1.0, 8).view(2, 4)
    (batch,) = pack(completions, advantages, num_mini_batches=1, microbatch_tokens=microbatch_tokens)
    return loop.annotate(run, None, batch)


def moved(run):
    """Masters that have moved, so that no ratio is 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in run.policy.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    for decoder in run.decoders:
        decoder.requantize_()


def test_drawn_completions_are_a_share_the_same_each_time_and_alone_in_their_pass(tmp_path):
    calibration = {"shadow_share": 0.3, "min_tokens": 1}
    run = load_run(small_config(tmp_path / "run", calibration=calibration), Display())
    batch = first_batch(run, microbatch_tokens=70)
    draws = drawn_completions(run, batch, 3)
    assert len(draws) > 1 and int(torch.cat(draws).sum()) == 2  # 0.3 of 8
    assert all(torch.equal(a, b) for a, b in zip(draws, drawn_completions(run, batch, 3), strict=True))
    assert not torch.equal(torch.cat(draws), torch.cat(drawn_completions(run, batch, 4)))
    for microbatch, drawn in zip(batch.microbatches, draws, strict=True):
        tokens = drawn[microbatch.sequence_index]
        some = of_drawn(microbatch, drawn, lambda part: shadow.shadow_logprobs(run, part))
        every = shadow.shadow_logprobs(run, microbatch)
        assert torch.equal(some[tokens], every[tokens]) and not some[~tokens].any()
        if drawn.any():
            part = select(microbatch, drawn)
            assert torch.equal(part.tokens, microbatch.tokens[tokens]) and part.sequence_index[-1] == drawn.sum() - 1
            assert part.cu_seqlens[-1] == len(part.tokens) and part.old_logprobs is not None


def test_calibration_looks_at_the_drawn_completions_only(tmp_path, monkeypatch):
    half_right(monkeypatch)
    calibration = {"interval": 1, "min_tokens": 1, "min_clipped": 0, "shadow_share": 0.5, "confidence": 0.01}
    lines = read_lines(train(small_config(tmp_path / "run", calibration=calibration), Display()) / "metrics.jsonl")
    for line in lines:
        looked_at = line["calibration/num_positive"] + line["calibration/num_negative"]
        assert 0 < looked_at <= line["calibration/shadow_tokens"] < 0.45 * line["mismatch/num_tokens"]


def shadow_run(folder, **algorithm):
    changes = {f"algorithm__{key}": value for key, value in algorithm.items()}
    return load_run(small_config(folder, calibration=None, **changes), Display())


@pytest.mark.parametrize("source", ["bf16_shadow", "fp32_shadow"])
def test_a_ratio_from_the_shadow_weighs_and_clips_by_it(source, tmp_path):
    run = shadow_run(tmp_path / "run", ratio_from=source)
    batch = shadow.with_shadow(run, first_batch(run))
    moved(run)
    (microbatch,) = batch.microbatches
    bounds, weights = ClipBounds(low=0.95, high=1.05), torch.full((len(microbatch.tokens),), 1.5)
    logprobs = loop.packed_logprobs(run.policy, microbatch, 1.0)[0].detach().requires_grad_()
    losses, dropped = shadow.loss_of_shadow(run, microbatch, logprobs, bounds, weights)
    losses.sum().backward()
    ratio = torch.exp(shadow.shadow_logprobs(run, microbatch) - microbatch.shadow_old_logprobs)
    A = microbatch.advantages
    wanted_dropped = ((ratio < 0.95) & (A < 0)) | ((ratio > 1.05) & (A > 0))
    assert torch.equal(dropped, wanted_dropped) and 0 < dropped.sum() < (A != 0).sum()
    torch.testing.assert_close(logprobs.grad, torch.where(dropped, 0.0, -1.5 * ratio * A), rtol=1e-5, atol=1e-6)
    own = torch.exp(logprobs.detach() - microbatch.old_logprobs)
    assert (own - ratio).abs().max() > 1e-3, "both ratios are the same, so nothing was tested"
    precise = run.shadow.recipe.high_precision
    assert precise == ("fp32" if source == "fp32_shadow" else "bf16")


def test_a_clip_mask_from_the_shadow_leaves_trainings_ratio(tmp_path):
    run = shadow_run(tmp_path / "run", clip_mask_from="bf16_shadow")
    batch = shadow.with_shadow(run, first_batch(run))
    moved(run)
    (microbatch,) = batch.microbatches
    logprobs = loop.packed_logprobs(run.policy, microbatch, 1.0)[0].detach().requires_grad_()
    ones = torch.ones(len(microbatch.tokens))
    own, A = torch.exp(logprobs.detach() - microbatch.old_logprobs), microbatch.advantages
    theirs = torch.exp(shadow.shadow_logprobs(run, microbatch) - microbatch.shadow_old_logprobs)
    between = torch.where(A < 0, (own - theirs).abs(), 0.0).argmax()  # a bound here: one clips this token, one does not
    low = (own[between] + theirs[between]).item() / 2
    losses, dropped = shadow.loss_of_shadow(run, microbatch, logprobs, ClipBounds(low=low, high=1.05), ones)
    losses.sum().backward()
    assert torch.equal(dropped, ((theirs < low) & (A < 0)) | ((theirs > 1.05) & (A > 0)))
    assert dropped[between] == (own[between] > low), "both masks are the same, so nothing was tested"
    torch.testing.assert_close(logprobs.grad, torch.where(dropped, 0.0, -own * A), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("key", ["ratio_from", "clip_mask_from"])
def test_under_bf16_the_shadow_changes_nothing_but_rounding(key, tmp_path):
    found = []
    for name, source in (("a", "training"), ("b", "bf16_shadow")):
        config = small_config(
            tmp_path / name, calibration=None, precision__recipe="bf16", **{f"algorithm__{key}": source}
        )
        found.append(read_lines(train(config, Display()) / "metrics.jsonl"))
    for plain, shadowed in zip(*found, strict=True):
        assert shadowed["loss/clip_fraction"] == plain["loss/clip_fraction"]
        assert shadowed["optimizer/grad_norm"] == pytest.approx(plain["optimizer/grad_norm"], rel=2e-2)
        assert "time/shadow_s" in shadowed and "time/shadow_s" not in plain
    assert found[0][0]["optimizer/grad_norm"] > 0.0


@pytest.mark.parametrize(
    "algorithm, message",
    [
        ({"ratio_from": "bf16_shadow"}, "calibration: null"),
        ({"ratio_from": "bf16_shadow", "clip_mask_from": "fp32_shadow"}, "Use one of them"),
        ({"ratio_from": "fp32_shadow", "loss": {"type": "bapo"}}, "loss.type=bapo has none"),
        ({"clip_mask_from": "fp32_shadow", "loss": {"type": "cispo"}}, "loss.type=cispo has none"),
        ({"clip_mask_from": "bf16_shadow", "loss": {"dual_clip": 3.0}}, "or dual_clip: null"),
        ({"ratio_from": "fp16"}, "bf16_shadow"),
    ],
)
def test_what_does_not_go_with_a_ratio_from_a_shadow_is_refused(algorithm, message, tmp_path):
    calibration = {} if message == "calibration: null" else None
    with pytest.raises(ValueError, match=message):
        small_config(
            tmp_path, calibration=calibration, **{f"algorithm__{key}": value for key, value in algorithm.items()}
        )


@pytest.mark.parametrize(
    "loss, calibration, message",
    [
        ({"type": "cispo"}, {}, "calibration.type: symmetric"),
        ({"type": "cispo", "ratio_cap": 1.0}, {"type": "symmetric"}, "cap above 1"),
        ({"type": "gspo", "clip_low": 0.0}, {}, "offsets above 0"),
        ({"type": "gspo", "clip_low": 0.5}, {}, "below 0"),
        ({"type": "m2po"}, {"type": "exact"}, "loss.type=m2po has none"),
        ({"type": "dppo_tv"}, {}, "drops by something else"),
    ],
)
def test_losses_that_calibration_does_not_serve_are_refused(loss, calibration, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        small_config(tmp_path, calibration=calibration, algorithm__loss=loss)


@pytest.mark.parametrize(
    "loss, form",
    [
        ({"type": "gspo", "clip_low": 0.005, "clip_high": 0.01}, "exact"),
        ({"type": "gspo_token", "clip_low": 0.005, "clip_high": 0.01}, "symmetric"),
        ({"type": "cispo", "ratio_cap": 1.1}, "symmetric"),
    ],
)
def test_other_losses_are_calibrated_in_their_own_ranges(loss, form, tmp_path, monkeypatch):
    half_right(monkeypatch)
    calibration = {"type": form, "interval": 1, "min_tokens": 1, "min_clipped": 0, "max_shadow_clipped": 1.0}
    changes = {"algorithm__loss": loss, "trainer__num_steps": 3, "optimizer__lr": 1e-3}
    config = small_config(tmp_path / "run", calibration=calibration, **changes)
    bounds, scale, moves = config.start_bounds(), scale_of(config.algorithm.loss), 0
    for line in read_lines(train(config, Display()) / "metrics.jsonl"):
        assert (line["clip/low"], line["clip/high"]) == (bounds.low, bounds.high)
        before, statistics = statistics_from_metrics(line, config.calibration)
        result = calibrate(before, statistics, config.calibration, scale)
        assert (line["calibration/low"], line["calibration/high"]) == (result.bounds.low, result.bounds.high)
        moves += result.bounds != bounds
        bounds = result.bounds
        if loss["type"] != "cispo":
            assert statistics.num_positive + statistics.num_negative <= 4, "completions are counted, not tokens"
            assert 0.9875 - 1e-9 <= bounds.low <= 0.9975 + 1e-9 and 1.01 - 1e-9 <= bounds.high <= 1.05 + 1e-9
        else:
            assert bounds.low == 0.0 and 1.1 - 1e-9 <= bounds.high <= 1.5 + 1e-9
    assert moves >= 1, "no calibration moved a bound, so nothing was tested"


def test_an_event_calls_a_calibration_and_is_told(tmp_path, monkeypatch):
    half_right(monkeypatch)
    trigger = {"type": "event", "overclip_band": 1.0, "drift_band": 1e-9, "min_interval": 2}
    calibration = {"type": "exact", "interval": 50, "min_tokens": 1, "min_clipped": 0, "max_shadow_clipped": 1.0}
    calibration["trigger"] = trigger
    config = small_config(tmp_path / "run", calibration=calibration, trainer__num_steps=5)
    lines = read_lines(train(config, Display()) / "metrics.jsonl")
    made = {line["step"]: line["calibration/called_by"] for line in lines if "calibration/skipped" in line}
    assert made[0] == "no calibration yet"
    # A band of nothing: called as soon as min_interval allows, for the bound that is off.
    assert list(made)[1] == 3 and "bound off by" in made[3]
    for line in lines:
        assert ("trigger/event" in line) != ("calibration/skipped" in line)
        assert "time/shadow_s" in line and ("overclip/low_share" in line) == ("calibration/skipped" in line)


def test_anything_may_call_a_calibration(tmp_path, monkeypatch):
    half_right(monkeypatch)
    config = small_config(tmp_path / "run", calibration={"interval": 50, "min_tokens": 1, "min_clipped": 0})
    run = load_run(config, Display())
    optimizer, progress = make_optimizer(run), Progress(bounds=config.start_bounds())
    assert not shadow.shadow_wanted(config, progress, 0)
    progress.watch.event = "asked for"
    metrics = loop.train_step(run, optimizer, None, progress, StepRecord(step=0))
    assert metrics["calibration/called_by"] == "asked for" and progress.watch.event == ""
    assert not shadow.shadow_wanted(config, progress, 1)


def test_a_reference_noisier_than_the_null_line_allows_is_skipped(tmp_path, monkeypatch):
    half_right(monkeypatch)
    calibration = {
        "interval": 1,
        "min_tokens": 1,
        "min_clipped": 0,
        "max_shadow_noise": 1.001,
    }
    config = small_config(tmp_path / "run", calibration=calibration, trainer__num_steps=1, optimizer__lr=1e-3)
    (line,) = read_lines(train(config, Display()) / "metrics.jsonl")
    noise, null = line["calibration/shadow_noise"], line["calibration/null_noise"]
    assert 0.0 < null < noise and "BF16 itself runs away" in line["calibration/skipped"]
    assert line["calibration/low"] == line["calibration/low_before"]
    lenient = replace(config, overwrite=True, calibration=replace(config.calibration, max_shadow_noise=1e6))
    (line,) = read_lines(train(lenient, Display()) / "metrics.jsonl")
    assert line["calibration/skipped"] == "" and line["calibration/null_noise"] == null
    assert noise_alarm(float("nan"), 1.0, 5.0) and not noise_alarm(5.0, 1.0, 5.0) and not noise_alarm(0.0, 0.0, 5.0)
