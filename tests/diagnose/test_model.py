"""A model's diagnosis: one batch, the same step for all, figures that a forward of one's own confirms."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from training_runs import TINY_MODEL

from octavo.diagnose import model as module
from octavo.diagnose.model import ModelDiagnosis, diagnose_model, logprobs_of, step_in_bf16
from octavo.models.checkpoint import load_decoder
from octavo.numerics.recipe import get_recipe
from octavo.trainer.metrics import Display

QUIET = Display(Console(quiet=True))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("(7+8-5+9+2)%10\n(3+4)%10\n")
    return path


@pytest.fixture(scope="module")
def settings(prompts) -> ModelDiagnosis:
    return ModelDiagnosis(
        model=str(TINY_MODEL),
        prompts=prompts,
        recipes=("block128", "tensorwise", "bf16", "block128"),
        group_size=2,
        max_tokens=8,
        lr=1e-4,
        fp32=True,
    )


@pytest.fixture(scope="module")
def seen(settings) -> tuple:
    """The diagnosis, and the batch and the masters it worked with."""
    kept = {}

    def step(decoder, batch, chosen):
        kept["batch"] = batch
        kept["before"] = [parameter.detach().clone() for parameter in decoder.parameters()]
        step_in_bf16(decoder, batch, chosen)
        kept["after"] = [parameter.detach().clone() for parameter in decoder.parameters()]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "step_in_bf16", step)
        return diagnose_model(settings, QUIET), kept


def decoder_with(masters, recipe):
    decoder = load_decoder(TINY_MODEL, get_recipe(recipe))
    with torch.no_grad():
        for parameter, values in zip(decoder.parameters(), masters, strict=True):
            parameter.copy_(values)
    decoder.requantize_()
    return decoder


def test_the_step_is_adams_first_and_the_null_change_left_nothing(seen, settings):
    _, kept = seen
    start = load_decoder(TINY_MODEL, get_recipe("bf16"))
    assert all(torch.equal(p, q) for p, q in zip(start.parameters(), kept["before"], strict=True))
    steps = torch.cat([(q - p).flatten() for p, q in zip(kept["before"], kept["after"], strict=True)]).abs()
    assert 0.9 * settings.lr < steps[steps > 0].median() < 1.01 * settings.lr
    assert (steps > 0).double().mean() > 0.8


def test_the_figures_are_those_of_the_recipes_own_forward(seen):
    diagnosis, kept = seen
    batch, mask = kept["batch"], kept["batch"].gather("loss_mask")
    old, now = (
        logprobs_of(decoder_with(kept[when], "block128"), batch, 1.0)[0][mask].double() for when in ("before", "after")
    )
    bf16 = logprobs_of(decoder_with(kept["before"], "bf16"), batch, 1.0)[0][mask].double()
    found = diagnosis.columns["block128"]
    assert found["observed/log_ratio_std_fp8"] == (now - old).std(correction=0).item() > 0.0
    assert found["mismatch/std_logprob_diff"] == (bf16 - old).std(correction=0).item() > 0.0
    assert found["num_tokens"] == mask.sum()
    shared = ("observed/log_ratio_std_bf16", "observed/log_ratio_std_fp32", "null/log_ratio_std_bf16")
    assert list(diagnosis.columns) == ["block128", "tensorwise"]
    assert all(found[key] == diagnosis.columns["tensorwise"][key] > 0.0 for key in shared)


def test_advantages_are_balanced_signs_of_the_seed(seen):
    batch = seen[1]["batch"]
    signs = torch.cat([m.advantages[m.loss_mask & (m.positions == m.positions)] for m in batch.microbatches])
    assert set(signs.tolist()) == {-1.0, 1.0}
    firsts = [m.advantages[edge - 1].item() for m in batch.microbatches for edge in m.cu_seqlens[1:]]
    assert sorted(firsts) == [-1.0] * 2 + [1.0] * 2


def test_the_operation_at_which_a_batch_dependent_recipe_parts_is_named(seen):
    diagnosis, _ = seen
    assert set(diagnosis.modules) == {
        f"{name}{pair}" for name in ("block128", "tensorwise") for pair in (" / bf16", ": rollout / training")
    }
    says = [finding.says for finding in diagnosis.findings]
    assert says[0].startswith("tensorwise: rollout / training: model.layers.0.self_attn.q_proj is the first operation")
    assert not any(text.startswith("block128: rollout / training") for text in says)
    assert all(d.differing_share == 0.0 for d in diagnosis.modules["block128: rollout / training"])


def test_given_completions_and_advantages_are_taken(settings, tmp_path):
    path = tmp_path / "given.jsonl"
    path.write_text(
        '{"prompt": "(1+1)%10", "completion": "=2", "advantage": 0.5}\n'
        '{"prompt": "(3+4)%10", "completion": "=7;;;;;;;;;;;;;;;;;", "advantage": -2}\n'
    )
    changes = {"prompts": path, "recipes": ("w8a16",), "fp32": False, "group_size": 9}
    diagnosis = diagnose_model(replace(settings, **changes), QUIET)
    assert diagnosis.columns["w8a16"]["num_tokens"] == 2 + 8  # the second is cut off at max_tokens
    assert diagnosis.facts["advantages"] == "given" and diagnosis.facts["completions"].startswith("2, given")


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"recipes": ("bf16",)}, "name another, as block128"),
        ({"recipes": ("fp4",)}, "recipe 'fp4' does not exist"),
        ({"temperature": 0.0}, "temperature divides the logits"),
        ({"num_prompts": 0}, "num_prompts must be at least 1; got 0"),
        ({"lr": -1.0}, "lr is the learning rate of a step, finite and above 0; got -1.0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, changes, expected):
    with pytest.raises(ValueError, match=expected):
        replace(settings, **changes)


def test_a_prompt_beyond_the_models_positions_is_refused(settings, tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("7" * 250 + "\n(1+1)%10\n")
    with pytest.raises(ValueError, match=r"long.txt: the longest prompt has 250 tokens, which with 8 more exceed the"):
        diagnose_model(replace(settings, prompts=path), QUIET)


def test_keys_and_values_and_masters_are_as_asked(settings, monkeypatch):
    loaded = []

    def load(*arguments, **changes):
        loaded.append(load_decoder(*arguments, **changes))
        return loaded[-1]

    monkeypatch.setattr(module, "load_decoder", load)
    quick = replace(settings, recipes=("w8a16",), fp32=False, max_tokens=2, kv_cache="bf16", dither=True)
    assert quick.recipe("w8a16").kv_cache == "bf16" and quick.recipe("fp32") == get_recipe("fp32")
    assert replace(quick, kv_cache="fp8").recipe("w8a16") == get_recipe("w8a16")
    rows = module.read_prompts(settings.prompts, 1)
    for changed in (quick, replace(quick, dither=False)):
        module.sampled(changed, rows, QUIET)
    dithered, plain = (decoder.layers[0].down_proj.weight for decoder in loaded)
    assert not torch.equal(dithered, plain) and torch.equal(dithered.bfloat16(), plain.bfloat16())
