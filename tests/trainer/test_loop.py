"""The loop on the tiny model: exact at every step, bounds that can be recomputed, losses that can be checked."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from training_runs import TINY_MODEL, read_lines, tiny_config, without_times

from octavo.models.checkpoint import load_decoder
from octavo.numerics.recipe import get_recipe
from octavo.rl.calibration import calibrate, statistics_from_metrics
from octavo.rl.losses import ClipBounds
from octavo.rollout.kv_cache import KVCache
from octavo.trainer import loop
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import from_dict, to_dict
from octavo.trainer.divergence import StepRecord
from octavo.trainer.evaluation import evaluate, make_jobs, sample_jobs
from octavo.trainer.metrics import Display
from octavo.trainer.optimizer import Optimizer
from octavo.trainer.progress import Progress
from octavo.trainer.rollout import pack, sample
from octavo.trainer.run import load_reference, load_run, make_optimizer
from octavo.trainer.train import train


def run_lines(config: TrainConfig) -> list[dict]:
    return read_lines(train(config, Display()) / "metrics.jsonl")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainConfig, list[dict], Path]:
    folder = tmp_path_factory.mktemp("run") / "a"
    config = tiny_config(folder)
    return config, run_lines(config), folder


def test_every_step_writes_its_line(finished):
    config, lines, _ = finished
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [line["policy_version"] for line in lines] == [0, 2, 4, 6]
    for line in lines:
        for key in ("reward/mean", "clip/low", "clip/high", "overclip/low_share", "loss/policy", "time/step_s"):
            assert isinstance(line[key], float), key
        assert line["mismatch/num_tokens"] == line["completion/length_mean"] * 16
    assert "eval/initial_accuracy" in lines[0] and "eval/accuracy" in lines[3] and "eval/accuracy" not in lines[1]


def test_rollout_and_training_agree_to_the_bit_at_every_step(finished):
    for line in finished[1]:
        assert line["mismatch/max_abs_logprob_diff"] == 0.0
        assert line["mismatch/tis_weight_mean"] == 1.0


def test_every_bound_can_be_recomputed_from_the_metrics(finished):
    config, lines, _ = finished
    bounds = config.calibration.start_bounds()
    moves = 0
    for line in lines:
        assert (line["clip/low"], line["clip/high"]) == (bounds.low, bounds.high)
        if "calibration/low" in line:
            before, statistics = statistics_from_metrics(line, config.calibration)
            assert before == bounds
            result = calibrate(before, statistics, config.calibration)
            assert (line["calibration/low"], line["calibration/high"]) == (result.bounds.low, result.bounds.high)
            moves += result.bounds != bounds
            bounds = result.bounds
    assert moves >= 1, "no calibration moved a bound, so nothing was tested"


def test_the_second_mini_batch_has_ratios_that_are_not_all_one(finished, tmp_path):
    assert all(line["policy/ratio_std"] > 0.0 for line in finished[1])
    still = run_lines(tiny_config(tmp_path / "still", optimizer__lr=0.0, trainer__num_steps=1, evaluation__interval=0))
    assert still[0]["policy/ratio_std"] == 0.0


def test_the_same_config_gives_the_same_run(finished, tmp_path):
    again = run_lines(tiny_config(tmp_path / "b"))
    assert without_times(again) == without_times(finished[1])


def test_layers_computed_again_change_no_number_of_a_run(finished, tmp_path):
    again = run_lines(tiny_config(tmp_path / "c", trainer__recompute_layers=True))
    assert without_times(again) == without_times(finished[1])


def test_saved_config_is_complete_and_reads_back(finished):
    config, _, folder = finished
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert from_dict(TrainConfig, saved, "saved") == config and to_dict(config) == saved


def test_trained_model_is_saved_and_differs_from_the_start(finished):
    _, _, folder = finished
    before = load_decoder(TINY_MODEL, get_recipe("fp32"))
    after = load_decoder(folder / "model", get_recipe("fp32"))
    changed = [not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True)]
    assert sum(changed) > len(changed) // 2
    assert {file.name for file in (folder / "model").iterdir()} >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }


@pytest.mark.parametrize("recipe", ["bf16", "rowwise", "w8a16", "tensorwise_static"])
def test_batch_invariant_recipes_stay_exact_while_they_learn(recipe, tmp_path):
    config = tiny_config(
        tmp_path / "run",
        precision__recipe=recipe,
        trainer__num_steps=2,
        evaluation__interval=0,
        trainer__shadow_interval=0,
    )
    for line in run_lines(config):
        assert line["mismatch/max_abs_logprob_diff"] == 0.0
        assert line["policy/ratio_std"] > 0.0
        assert ("precision/saturated_share" in line) == (recipe == "tensorwise_static")


def test_a_recipe_that_depends_on_the_batch_shows_its_mismatch_and_is_corrected(tmp_path):
    config = tiny_config(tmp_path / "run", precision__recipe="tensorwise", trainer__num_steps=1, evaluation__interval=0)
    (line,) = run_lines(config)
    assert line["mismatch/max_abs_logprob_diff"] > 0.0
    assert line["mismatch/tis_weight_mean"] != 1.0


def test_one_flipped_kv_byte_stops_the_run_or_shows_in_the_metrics(tmp_path, monkeypatch):
    write = KVCache.write

    def flip(self, layer, slot_mapping, *heads):
        queries = write(self, layer, slot_mapping, *heads)
        if layer == 1:
            self.k.view(torch.uint8)[layer, slot_mapping[0], 0, 0] ^= 0x40
        return queries

    monkeypatch.setattr(KVCache, "write", flip)
    config = tiny_config(tmp_path / "run", trainer__num_steps=1, evaluation__interval=0)
    with pytest.raises(ValueError, match="disagree by up to .*'block128'.*require_exact=false"):
        train(config, Display())
    tolerant = replace(config, overwrite=True, trainer=replace(config.trainer, require_exact=False))
    (line,) = run_lines(tolerant)
    assert line["mismatch/max_abs_logprob_diff"] > 0.0


@pytest.mark.parametrize("recipe", ["block128", "bf16"])
def test_old_logprobs_of_an_exact_rollout_are_the_rollouts_to_the_bit(recipe, tmp_path, monkeypatch):
    seen, packed_logprobs = [], loop.packed_logprobs

    def counted(*arguments):
        seen.append(torch.is_grad_enabled())
        return packed_logprobs(*arguments)

    monkeypatch.setattr(loop, "packed_logprobs", counted)
    runs, forwards = {}, {}
    for interval in (1, 3):
        settings = {"precision__recipe": recipe, "trainer__num_steps": 4, "evaluation__interval": 0}
        folder = tmp_path / str(interval)
        seen.clear()
        lines = run_lines(tiny_config(folder, trainer__exactness_interval=interval, **settings))
        runs[interval], forwards[interval] = lines, (seen.count(False), seen.count(True))
    assert forwards[1][1] == forwards[3][1] > 0 and forwards[1][0] == 2 * forwards[3][0] > 0, "steps 0 and 3 of four"
    for step, (every, third) in enumerate(zip(runs[1], runs[3], strict=True)):
        tokens = every.pop("mismatch/num_tokens"), third.pop("mismatch/num_tokens")
        assert (tokens[0] == tokens[1]) == (step in (0, 3)) and 0 < tokens[1] <= tokens[0]
        kept = [
            without_times([{k: v for k, v in line.items() if not k.startswith("mismatch/")}]) for line in (every, third)
        ]
        assert kept[0] == kept[1], step
        assert third["mismatch/max_abs_logprob_diff"] == 0.0


def test_the_first_mini_batch_checks_where_no_forward_of_its_own_does(tmp_path, monkeypatch):
    write, steps = KVCache.write, []

    def flip(self, layer, slot_mapping, *heads):
        queries = write(self, layer, slot_mapping, *heads)
        if steps == [0, 1] and layer == 1:
            self.k.view(torch.uint8)[layer, slot_mapping[0], 0, 0] ^= 0x40
        return queries

    collect, step_ = loop.collect, Optimizer.step
    monkeypatch.setattr(loop, "collect", lambda *given: steps.append(len(steps)) or collect(*given))
    monkeypatch.setattr(KVCache, "write", flip)
    updates = []
    monkeypatch.setattr(Optimizer, "step", lambda self: updates.append(len(steps)) or step_(self))
    config = tiny_config(tmp_path / "run", trainer__num_steps=2, trainer__exactness_interval=2, evaluation__interval=0)
    with pytest.raises(ValueError, match="disagree by up to .*'block128'.*require_exact=false"):
        train(config, Display())
    assert updates == [1, 1], "none after the rollout that was wrong"


@pytest.mark.parametrize(
    "changes",
    [{"trainer__require_exact": False}, {"precision__allow_mismatch": True}, {"precision__recipe": "tensorwise"}],
)
def test_an_interval_of_checks_wants_an_exact_rollout(changes, tmp_path):
    with pytest.raises(ValueError, match="trainer.exactness_interval=2 takes old_logprobs from the rollout"):
        tiny_config(tmp_path, trainer__exactness_interval=2, **changes)


def test_loss_and_its_gradient_match_the_formula(tmp_path):
    run = load_run(tiny_config(tmp_path / "run", algorithm__kl__coefficient=0.25), Display())
    reference = load_reference(run.config)
    problems = run.problems(0, 4)
    completions = sample(run, problems, 0)
    advantages = torch.linspace(-1.0, 1.0, 16).view(4, 4)
    (batch,) = pack(completions, advantages, num_mini_batches=1, microbatch_tokens=120)
    assert len(batch.microbatches) > 1
    batch = loop.annotate(run, reference, batch)
    with torch.no_grad():  # move the policy so that ratios, clipping and KL are not trivial
        for parameter in run.policy.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    run.policy.requantize_()
    logprobs, metrics = loop.accumulate(run, batch, ClipBounds(low=0.99, high=1.01), lambda count: None)

    total, kl_total, clipped = 0.0, 0.0, 0
    old, ref, mask = batch.gather("old_logprobs"), batch.gather("ref_logprobs"), batch.gather("loss_mask")
    adv = batch.gather("advantages")
    for t in mask.nonzero().squeeze(1).tolist():
        ratio = torch.exp(logprobs[t] - old[t]).item()
        a = adv[t].item()
        surrogate = min(ratio * a, min(max(ratio, 0.99), 1.01) * a)
        d = (logprobs[t] - ref[t]).item()
        kl = torch.tensor(-d, dtype=torch.float64).exp().item() - 1.0 + d
        total += (-surrogate + 0.25 * kl) / batch.num_loss_tokens
        kl_total += kl / batch.num_loss_tokens
        clipped += (a > 0 and ratio > 1.01) or (a < 0 and ratio < 0.99)
    assert clipped > 5
    assert metrics["loss/policy"] == pytest.approx(total, rel=1e-4, abs=1e-6)
    assert metrics["loss/kl"] == pytest.approx(kl_total, rel=1e-3) and kl_total > 1e-4
    assert metrics["loss/clip_fraction"] == pytest.approx(clipped / batch.num_loss_tokens)


def test_problems_of_a_step_cover_an_epoch_once_and_depend_on_the_seed(tmp_path):
    run = load_run(tiny_config(tmp_path / "run"), Display())
    epoch = [problem.problem.id for step in range(16) for problem in run.problems(4 * step, 4)]
    assert len(epoch) == 64 and len(set(epoch)) == 64
    assert [p.problem.id for p in run.problems(64, 4)] != epoch[:4]
    other = replace(run, config=replace(run.config, seed=1))
    assert [p.problem.id for step in range(16) for p in other.problems(4 * step, 4)] != epoch


def test_evaluation_counts_what_it_sampled(tmp_path):
    run = load_run(tiny_config(tmp_path / "run", evaluation__completions_per_problem=2), Display())
    samples = sample_jobs(run, make_jobs(run))
    metrics = evaluate(run)
    assert len(samples) == 32 and metrics["eval/num_problems"] == 16
    right = [re.findall(r"\d+", sample["completion"])[-1:] == [sample["answer"]] for sample in samples]
    assert metrics["eval/accuracy"] == sum(right) / 32 and 0 < sum(right) < 32
    assert evaluate(run) == metrics


def test_step_without_shadow_reports_no_overclipping(tmp_path):
    config = tiny_config(tmp_path / "run", calibration=None, trainer__shadow_interval=0)
    run = load_run(config, Display())
    progress = Progress(bounds=config.start_bounds())
    metrics = loop.train_step(run, make_optimizer(run), None, progress, StepRecord(step=0))
    assert (metrics["clip/low"], metrics["clip/high"]) == (0.8, 1.28)
    assert "overclip/low_share" not in metrics and metrics["mismatch/max_abs_logprob_diff"] == 0.0
