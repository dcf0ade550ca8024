import importlib
import math

import pytest

pytest.importorskip("verl.trainer", reason="needs verl: make test-verl")

import torch
from torch.testing import assert_close
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, get_policy_loss_fn
from verl_engines import actor_config

from octavo.plugins.verl import losses
from octavo.plugins.verl.calibrating import Calibrator, during
from octavo.plugins.verl.status import missing
from octavo.rl.calibration_config import ExactCalibration
from octavo.rl.losses import ClipBounds

GROUP = {"dp_size": 2, "batch_num_tokens": 31, "global_batch_size": 7}


def batch():
    """Three answers of up to six tokens, log-ratios up to 0.7, nothing to be read where the mask is 0."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(3, 6, generator=generator)
    new = (old + 0.7 * (2 * torch.rand(3, 6, generator=generator) - 1)).requires_grad_()
    mask = torch.arange(6) < torch.tensor([[6], [4], [1]])
    advantages = torch.tensor([[1.5], [-0.5], [-2.0]]).expand(3, 6) * mask
    weights = 0.5 + torch.rand(3, 6, generator=generator)
    return {
        "old_log_prob": old,
        "log_prob": new,
        "advantages": advantages,
        "response_mask": mask,
        "rollout_is_weights": weights,
    }


def config(loss_mode, options=None, **changes):
    made = actor_config("octavo", loss_mode=loss_mode, loss_options=options)
    made.global_batch_info.update(GROUP)
    for name, value in changes.items():
        object.__setattr__(made, name, value)
    return made


def value_and_gradient(name, made, reduction, tensors):
    loss, metrics = get_policy_loss_fn(name)(loss_agg_mode=reduction, config=made, **tensors)
    (gradient,) = torch.autograd.grad(loss, tensors["log_prob"])
    return loss.detach(), gradient, metrics


@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_calibrated_at_plain_bounds_is_verls_own_clipping(reduction):
    made = config("calibrated", clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=1e6)
    wanted = value_and_gradient("vanilla", made, reduction, batch())
    with during(Calibrator(config=ExactCalibration(), bounds=ClipBounds(low=0.8, high=1.28))):
        found = value_and_gradient("calibrated", made, reduction, batch())
    assert found[1].abs().max() > 0.0
    assert_close(found[:2], wanted[:2])
    assert found[2]["actor/pg_clipfrac"] == pytest.approx(wanted[2]["actor/pg_clipfrac"])
    assert (found[2]["actor/clip_low"], found[2]["actor/clip_high"]) == (0.8, 1.28)


def test_calibrated_follows_the_bounds_it_is_given():
    made = config("calibrated")
    with during(Calibrator(config=ExactCalibration(), bounds=ClipBounds(low=0.0, high=100.0))):
        metrics = value_and_gradient("calibrated", made, "token-mean", batch())[2]
    assert metrics["actor/pg_clipfrac"] == 0.0 and metrics["actor/clip_high"] == 100.0


def test_gspo_token_is_verls_gspo_whose_gradient_is_the_tokens():
    made = config("gspo_token", {"clip_low": 0.05, "clip_high": 0.1}, clip_ratio_low=0.05, clip_ratio_high=0.1)
    wanted = value_and_gradient("gspo", made, "seq-mean-token-mean", batch())
    found = value_and_gradient("gspo_token", made, "seq-mean-token-mean", batch())
    assert 0.0 < found[2]["actor/pg_clipfrac"] < 1.0
    assert_close(found[:2], wanted[:2])


def test_m2po_bounds_the_kept_tokens_second_moment():
    tensors = batch()
    metrics = value_and_gradient("m2po", config("m2po", {"budget": 0.04}), "token-mean", tensors)[2]
    log_ratio = (tensors["log_prob"] - tensors["old_log_prob"])[tensors["response_mask"]]
    advantages = tensors["advantages"][tensors["response_mask"]]
    outward = log_ratio * advantages > 0
    inside = (log_ratio >= math.log(metrics["actor/clip_low"]) - 1e-6) & (
        log_ratio <= math.log(metrics["actor/clip_high"]) + 1e-6
    )
    assert (outward & ~inside).any() and (outward & inside).any()
    assert log_ratio[outward & inside].square().mean() <= 0.04
    assert metrics["actor/pg_clipfrac"] == pytest.approx((outward & ~inside).sum().item() / len(log_ratio))


def test_bapo_raises_the_low_bound_first():
    metrics = value_and_gradient("bapo", config("bapo", {"positive_share": 0.99}), "token-mean", batch())[2]
    assert (metrics["actor/clip_low"], metrics["actor/clip_high"]) == (0.9, 3.0)  # the share is not reached
    easy = value_and_gradient("bapo", config("bapo", {"positive_share": 0.01}), "token-mean", batch())[2]
    assert (easy["actor/clip_low"], easy["actor/clip_high"]) == (0.6, 1.2)


@pytest.mark.parametrize("name", ["bapo", "m2po", "gspo_token"])
def test_what_verl_pads_with_is_not_read(name):
    wanted = value_and_gradient(name, config(name), "token-mean", batch())
    tensors = batch()
    mask = tensors["response_mask"]
    for key in ("old_log_prob", "advantages", "rollout_is_weights"):
        tensors[key] = torch.where(mask, tensors[key], 5.0)
    found = value_and_gradient(name, config(name), "token-mean", tensors)
    assert_close(found, wanted)


@pytest.mark.parametrize("name", ["bapo", "m2po", "gspo_token"])
def test_an_unknown_option_is_named(name):
    with pytest.raises(ValueError, match=r"actor.policy_loss.octavo: bugdet: unknown key"):
        value_and_gradient(name, config(name, {"bugdet": 1.0}), "token-mean", batch())


def test_calibrated_says_what_it_needs():
    with pytest.raises(ValueError, match="actor.strategy=octavo"):
        value_and_gradient("calibrated", config("calibrated"), "token-mean", batch())


def test_verl_has_what_the_entry_point_registers():
    assert missing() == ""


def test_status_names_what_is_missing(monkeypatch):
    monkeypatch.delitem(POLICY_LOSS_REGISTRY, "m2po")
    assert missing().startswith("verl lacks policy loss m2po")


def test_a_plug_in_that_fails_says_so_where_verl_does_not(monkeypatch, capsys):
    from octavo.plugins.verl import registration

    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "bapo", print)
    with pytest.raises(ValueError, match="octavo replaces none"):
        importlib.reload(registration)
    assert "the plug-in for verl cannot be loaded, and verl goes on without it" in capsys.readouterr().err


def test_a_taken_name_is_refused(monkeypatch):
    monkeypatch.setitem(POLICY_LOSS_REGISTRY, "bapo", print)
    with pytest.raises(ValueError, match="already has policy losses named bapo, and octavo replaces none"):
        losses.register_losses()
    assert POLICY_LOSS_REGISTRY["bapo"] is print
