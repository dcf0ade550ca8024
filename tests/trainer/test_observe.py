"""The observatory in a run: no training number moves, and what it says is what its numerics say of the tokens."""

import math
from dataclasses import replace

import pytest
import torch
from tiny_models import disturb_, tiny_decoder
from tiny_models import tiny_config as tiny_shape
from training_runs import read_lines, tiny_config, without_times

from octavo.models.decoder import Norm
from octavo.numerics.recipe import get_recipe
from octavo.rl.batch import MiniBatch, pack
from octavo.rl.observatory import LogprobPair, ObservedTokens, log_ratio_std, ratio_metrics
from octavo.trainer import loop
from octavo.trainer.metrics import Display
from octavo.trainer.observe import answer_index, null_change, observe, observe_old
from octavo.trainer.policy import packed_logprobs
from octavo.trainer.rollout import sample
from octavo.trainer.run import TRAINING, Run, load_run
from octavo.trainer.train import train

EVERYTHING = {"observatory__interval": 1, "observatory__fp32": True, "observatory__modules": True}
AREAS = {"observed", "null", "answers", "modules"}


def test_no_training_number_changes_when_it_is_on(tmp_path):
    short = {"precision__recipe": "tensorwise_static", "calibration": None}  # whose scales learn from each forward
    short |= {"trainer__num_steps": 2, "trainer__shadow_interval": 0, "evaluation__interval": 0}
    short |= {"rollout__prompts_per_step": 2, "rollout__group_size": 2, "rollout__max_completion_tokens": 12}
    folders = [
        train(tiny_config(tmp_path / name, **short, **settings), Display())
        for name, settings in (("off", {"observatory__interval": 0}), ("on", EVERYTHING))
    ]
    off, on = (without_times(read_lines(folder / "metrics.jsonl")) for folder in folders)
    added = on[0].keys() - off[0].keys()
    assert {key.partition("/")[0] for key in added} == AREAS
    assert [{key: line[key] for key in before} for line, before in zip(on, off, strict=True)] == off
    written = [{file.relative_to(folder): file for file in folder.rglob("*.safetensors")} for folder in folders]
    assert len(written[0]) > 2 and written[0].keys() == written[1].keys()
    for name, file in written[0].items():
        assert file.read_bytes() == written[1][name].read_bytes(), name
    for line in read_lines(folders[1] / "metrics.jsonl"):
        assert line["time/observatory_s"] > 0.0
        assert line["modules/first_differing"] == "model.layers.0.self_attn.q_proj"
        assert len(line["modules/error_by_layer"]) == 3 and min(line["modules/error_by_layer"]) > 0.0


@pytest.fixture(scope="module")
def moved(tmp_path_factory) -> tuple[Run, MiniBatch, dict[str, torch.Tensor]]:
    """A run, a mini-batch of several microbatches, its old log-probabilities, and weights that moved since."""
    folder = tmp_path_factory.mktemp("observed") / "run"
    run = load_run(tiny_config(folder, trainer__microbatch_tokens=80, **EVERYTHING), Display())
    advantages = torch.linspace(-1.0, 1.0, 16).view(4, 4)
    completions = sample(run, run.problems(0, run.config.rollout.prompts_per_step), run.seed(TRAINING, 0))
    (batch,) = pack(completions, advantages, num_mini_batches=1, microbatch_tokens=80)
    batch = loop.annotate(run, None, batch)
    old = observe_old(run, batch)
    disturb_(run.policy, seed=0, amount=0.5)
    return run, batch, old


@pytest.fixture(scope="module")
def seen(moved) -> tuple[torch.Tensor, dict]:
    """Log-probabilities of the moved policy, and what is observed."""
    run, batch, old = moved
    logprobs, _ = logprobs_of(run.policy, batch)
    return logprobs, observe(run, batch, logprobs, old)


@torch.no_grad()
def logprobs_of(decoder, batch, temperature=1.0):
    parts = [packed_logprobs(decoder, microbatch, temperature) for microbatch in batch.microbatches]
    return tuple(torch.cat(x) for x in zip(*parts, strict=True))


def test_each_numerics_is_a_model_of_its_own_over_the_same_masters(moved, seen):
    (run, batch, old), (logprobs, metrics) = moved, seen
    now, entropy = {"fp8": logprobs}, None
    for name in ("bf16", "fp32"):
        now[name], entropies = logprobs_of(run.policy.with_recipe(get_recipe(name)), batch)
        entropy = entropies if name == "bf16" else entropy
    before = {"fp8": batch.gather("old_logprobs"), **old}
    pairs = {name: LogprobPair(before=before[name], after=now[name]) for name in now}
    tokens = ObservedTokens(
        loss_mask=batch.gather("loss_mask"),
        advantages=batch.gather("advantages"),
        entropy=entropy,
        answer_index=answer_index(batch),
    )
    expected = ratio_metrics(pairs, tokens, run.config.algorithm.clip)
    assert {key: metrics[key] for key in expected} == expected
    assert expected["observed/num_clipped_fp8"] > 0
    spread = log_ratio_std(pairs, tokens.loss_mask)
    assert len(set(spread.values())) == 3 and min(spread.values()) > 0.0


def test_the_null_line_is_noise_alone_and_goes_away_when_it_is_not_wanted(moved, seen):
    (run, batch, old), (logprobs, metrics) = moved, seen
    with null_change(run.policy):
        changed, _ = logprobs_of(run.policy, batch)
    mask = batch.gather("loss_mask")
    spread = (changed - logprobs)[mask].double().std(correction=0).item()
    assert metrics["null/log_ratio_std_fp8"] == spread > 0.0
    assert metrics["null/log_ratio_std_fp8"] < metrics["observed/log_ratio_std_fp8"] / 4
    settings = replace(run.config.observatory, null_line=False, modules=False)
    without = observe(replace(run, config=replace(run.config, observatory=settings)), batch, logprobs, old)
    assert without == {key: value for key, value in metrics.items() if not key.startswith(("null/", "modules/"))}


def test_the_split_into_microbatches_changes_nothing(moved, seen):
    (run, batch, old), (logprobs, metrics) = moved, seen
    assert metrics["null/log_ratio_std_fp8"] > 0.0 and len(batch.microbatches) > 1
    assert observe(run, replace(batch, microbatches=[join(batch)]), logprobs, old) == metrics


def join(batch):
    """All microbatches as one."""
    offsets = [0, *torch.tensor([len(m.tokens) for m in batch.microbatches]).cumsum(0).tolist()]
    edges = [m.cu_seqlens[1:] + offset for m, offset in zip(batch.microbatches, offsets, strict=False)]
    whole = {
        name: batch.gather(name)
        for name in ("tokens", "positions", "loss_mask", "advantages", "rollout_logprobs", "old_logprobs")
    }
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), *edges])
    return replace(batch.microbatches[0], **whole, sequence_index=answer_index(batch), cu_seqlens=cu_seqlens)


def test_answers_are_numbered_across_microbatches(moved):
    _, batch, _ = moved
    index = answer_index(batch)
    starts = torch.cat([m.positions for m in batch.microbatches]) == 0
    assert torch.equal(index, starts.long().cumsum(0) - 1) and index.max() == 15


@pytest.mark.parametrize("shape", [{}, {"num_hidden_layers": 1}])
def test_a_null_change_moves_eight_gains_by_one_bf16_step_and_gives_the_bits_back(shape):
    decoder = tiny_decoder(tiny_shape("llama", **shape), get_recipe("block128"))
    norms = [module for module in decoder.modules() if isinstance(module, Norm)]
    before = {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}
    with null_change(decoder):
        moved = {name: p for name, p in decoder.named_parameters() if not torch.equal(p, before[name])}
        assert all("norm" in name for name in moved) and len(moved) == min(8, len(norms))
        steps = [(p - before[name])[p != before[name]] for name, p in moved.items()]
        sizes = [before[name][p != before[name]] for name, p in moved.items()]
        assert sum(map(len, steps)) == 8
        for step, size in zip(torch.cat(steps), torch.cat(sizes), strict=True):
            exponent = math.floor(math.log2(abs(size)))
            assert step.item() == pytest.approx(2.0 ** (exponent - 7), rel=1e-3)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter.view(torch.int32), before[name].view(torch.int32)), name


def test_a_null_change_is_undone_when_the_forward_fails():
    decoder = tiny_decoder(tiny_shape("llama"), get_recipe("bf16"))
    before = decoder.norm.weight.detach().clone(), decoder.layers[0].input_norm.weight.detach().clone()
    with pytest.raises(RuntimeError), null_change(decoder):
        raise RuntimeError
    assert torch.equal(decoder.norm.weight, before[0]) and torch.equal(decoder.layers[0].input_norm.weight, before[1])
