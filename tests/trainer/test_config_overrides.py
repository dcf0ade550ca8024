"""Overrides a.b=value on top of a file."""

import pytest
from run_configs import CISPO, FLOAT, INTEGER, Model, PPOClip, Run, Side, Sides, message_of

from octavo.trainer.config_file import load_config

FILE = "model: {path: m}\nloss: {type: ppo_clip, clip_low: 0.3}\nseed: 1\nstop_after: 5\n"


@pytest.mark.parametrize(
    "override, key, expected",
    [
        ("seed=2", "seed", 2),
        ("lr=3e-5", "lr", 3e-5),
        ("lr=1", "lr", 1.0),
        ("exact=false", "exact", False),
        ("stop_after=null", "stop_after", None),
        ("note=", "note", ""),
        ("note= ", "note", ""),
        ("note=a=b", "note", "a=b"),
        ("note='8'", "note", "8"),
        ("betas=[0.5, 1]", "betas", (0.5, 1.0)),
        ("model.dtype=fp32", "model", Model(path="m", dtype="fp32")),
        ("loss.clip_high=0.5", "loss", PPOClip(clip_low=0.3, clip_high=0.5)),
        ("loss={type: cispo, ratio_cap: 2}", "loss", CISPO(ratio_cap=2.0)),
        ("loss={}", "loss", PPOClip(clip_low=0.1)),
        ("shadow_loss={type: ppo_clip}", "shadow_loss", PPOClip()),
    ],
)
def test_an_override(write, override, key, expected):
    got = getattr(load_config(Run, write(FILE), [override]), key)
    assert got == expected and type(got) is type(expected)


def test_later_overrides_win_and_build_on_earlier_ones(write):
    run = load_config(Run, write(FILE), ["seed=2", "seed=3", "loss={type: cispo, ratio_cap: 2}", "loss.ratio_cap=4"])
    assert (run.seed, run.loss) == (3, CISPO(ratio_cap=4.0))
    run = load_config(Run, write(FILE), ["shadow_loss.type=cispo", "shadow_loss.ratio_cap=3"])
    assert run.shadow_loss == CISPO(ratio_cap=3.0)


def test_an_override_does_not_reach_through_an_alias(write):
    path = write("model: {path: m}\nloss: &clip {type: ppo_clip, clip_low: 0.3}\nshadow_loss: *clip\n")
    run = load_config(Run, path, ["loss.clip_low=0.4"])
    assert (run.loss.clip_low, run.shadow_loss.clip_low) == (0.4, 0.3)


@pytest.mark.parametrize(
    "override, expected",
    [
        ("seed", "override 'seed': wants key=value, the key dotted. Write it like loss.clip_low=0.1."),
        ("=1", "override '=1': wants key=value, the key dotted. "),
        ("loss..clip_low=1", "override 'loss..clip_low=1': wants key=value, the key dotted. "),
        ("seed =1", "override 'seed =1': wants key=value, the key dotted. "),
        ("sed=1", "override 'sed=1': sed: unknown key, got 1. Did you mean seed? Known: model, "),
        ("loss.clip_lo=1", "override 'loss.clip_lo=1': loss.clip_lo: unknown key, got 1. Did you mean clip_low? "),
        ("los.clip_low=1", "run.yaml with override 'los.clip_low=1': los: unknown key, got {'clip_low': 1}. "),
        ("seed.x=2", "override 'seed.x=2': seed is 1, not a section. Replace it whole: seed=VALUE."),
        ("lr.x=2", "run.yaml with override 'lr.x=2': lr: wants a finite number, got {'x': 2}. "),
        ("model.path.x=2", "override 'model.path.x=2': model.path is 'm', not a section. "),
        ("seed=x", f"override 'seed=x': seed: wants an integer, got 'x'. {INTEGER}"),
        ("lr=.inf", f"override 'lr=.inf': lr: wants a finite number, got inf. {FLOAT}"),
        ("loss=cispo", "override 'loss=cispo': loss: wants a section, got 'cispo'. "),
        ("loss={ratio_cap: 1}", "override 'loss={ratio_cap: 1}': loss.ratio_cap: unknown key, got 1. Remove it. "),
        ("loss={type: cispo}", "override 'loss={type: cispo}': loss.ratio_cap: missing; wants a finite number. "),
        ("loss.type=cispo", "run.yaml: loss.clip_low: unknown key, got 0.3. "),
        ("loss.clip_low=2", "run.yaml with override 'loss.clip_low=2': loss: clip_low is an offset below 1, "),
        ("seed=-1", "run.yaml with override 'seed=-1': seed wants 0 or more; got -1"),
        ("betas=[1", "override 'betas=[1': not YAML: line 1: expected ',' or ']', but got '<stream end>'. "),
        ("model={path: a, path: b}", "override 'model={path: a, path: b}': path: given twice: a on line 1, b on "),
    ],
)
def test_an_override_that_cannot_be_used(write, override, expected):
    message = message_of(load_config, Run, write(FILE), [override])
    assert message.startswith(expected), message


def test_the_last_override_of_a_key_is_blamed(write):
    message = message_of(load_config, Run, write(FILE), ["seed=a", "seed=b"])
    assert message.startswith("override 'seed=b': seed: wants an integer, got 'b'."), message


@pytest.mark.parametrize(
    "text, overrides, expected",
    [
        ("rollout: fp8\n", [], Sides(rollout=Side(recipe="fp8"))),
        ("train: bf16\n", [], Sides(train=Side(recipe="bf16"))),
        ("{}\n", ["rollout=fp8"], Sides(rollout=Side(recipe="fp8"))),
        ("{}\n", ["rollout=fp8", "rollout.margin=2"], Sides(rollout=Side(recipe="fp8", margin=2.0))),
        ("train: fp8\n", ["train.margin=2"], Sides(train=Side(recipe="fp8", margin=2.0))),
        ("rollout: {margin: 2}\n", ["rollout.recipe=fp8"], Sides(rollout=Side(recipe="fp8", margin=2.0))),
        ("rollout: {margin: 2}\n", ["rollout=fp8"], Sides(rollout=Side(recipe="fp8", margin=2.0))),
        ("{}\n", ["rollout.margin=2", "rollout=fp8"], Sides(rollout=Side(recipe="fp8", margin=2.0))),
        ("rollout: bf16\n", ["rollout.margin=2", "rollout=fp8"], Sides(rollout=Side(recipe="fp8", margin=2.0))),
        ("{}\n", ["train.margin=2", "train=fp8"], Sides(train=Side(recipe="fp8", margin=2.0))),
        ("rollout: {margin: 2}\n", ["rollout={recipe: fp8}"], Sides(rollout=Side(recipe="fp8"))),  # replaced whole
        ("train: {margin: 2}\n", ["train=null"], Sides()),
    ],
)
def test_plain_text_is_a_sections_shorthand(write, text, overrides, expected):
    assert load_config(Sides, write(text), overrides) == expected


@pytest.mark.parametrize(
    "override, expected",
    [
        ("rollout=fp4", "override 'rollout=fp4': rollout.recipe: wants one of 'fp8', 'bf16' or null, got 'fp4'. "),
        ("rollout=8", "override 'rollout=8': rollout: wants a section, got 8. Write keys under it: recipe, margin."),
        ("rollout.recipe.x=1", "override 'rollout.recipe.x=1': rollout.recipe is 'fp8', not a section. "),
    ],
)
def test_a_shorthand_that_cannot_be_used(write, override, expected):
    assert message_of(load_config, Sides, write("rollout: fp8\n"), [override]).startswith(expected)
