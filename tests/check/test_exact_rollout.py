"""The exactness self-test passes here, and fails when engine and training are made to differ."""

import pytest

from octavo.check import exact_rollout as module
from octavo.check.exact_rollout import control, exactness, exactness_rows, invariant_recipes
from octavo.numerics.recipe import RECIPE_NAMES, get_recipe
from octavo.rollout.engine import Engine

BLOCK128 = get_recipe("block128")


def test_every_invariant_recipe_is_tried_with_both_caches():
    tried = {(recipe.name, recipe.kv_cache) for recipe in invariant_recipes()}
    names = [name for name in RECIPE_NAMES if get_recipe(name).batch_invariant and name != "fp32"]
    assert tried == {(name, kv) for name in names for kv in ("bf16", "fp8")} | {("fp32", "fp32")}
    assert ("tensorwise", "fp8") not in tried and ("block128", "fp8") in tried


def test_rollout_equals_training_here():
    error, detail = exactness(BLOCK128, "cpu")
    assert error == "" and "120 tokens" in detail
    assert control("cpu")[0] == ""


def test_its_sequences_are_preempted(monkeypatch):
    engines = []
    monkeypatch.setattr(module, "Engine", lambda *arguments: engines.append(Engine(*arguments)) or engines[-1])
    module.sample(module.random_decoder(BLOCK128, "cpu"))
    assert engines[0].num_preemptions > 0


def rows(monkeypatch):
    monkeypatch.setattr(module, "invariant_recipes", lambda: [BLOCK128])
    return {row.name: row for row in exactness_rows("cpu")}


def test_rows_are_named_after_recipe_and_cache(monkeypatch):
    found = rows(monkeypatch)
    assert {name: row.status for name, row in found.items()} == {"block128, KV fp8": "OK", "damage is seen": "OK"}


def test_other_numerics_in_training_fail(monkeypatch):
    plain = module.packed_logprobs
    monkeypatch.setattr(module, "packed_logprobs", lambda decoder, batch, t: plain(decoder, batch, t * 1.0001))
    row = rows(monkeypatch)["block128, KV fp8"]
    assert row.status == "FAIL" and "of 60 log-probabilities differ before an update" in row.detail
    assert "require_exact" in row.next_step


def test_an_engine_with_stale_weights_fails(monkeypatch):
    monkeypatch.setattr(module, "update_", lambda decoder: None)
    row = rows(monkeypatch)["block128, KV fp8"]
    assert row.status == "FAIL" and "does not see new weights" in row.detail


@pytest.mark.parametrize("name", ["flip_key_byte", "double_key_scale"])
def test_damage_that_goes_unseen_fails_the_control(name, monkeypatch):
    monkeypatch.setattr(module, name, lambda cache, slots: None)
    row = rows(monkeypatch)["damage is seen"]
    assert row.status == "FAIL" and "was not seen" in row.detail


def test_a_check_that_compares_nothing_fails_the_control(monkeypatch):
    monkeypatch.setattr(module, "differing", lambda decoder, completions: (0, 60))
    assert rows(monkeypatch)["damage is seen"].status == "FAIL"


def test_an_error_of_the_device_is_a_row(monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("CUDA error: device-side assert\ntriggered")

    monkeypatch.setattr(module, "Engine", broken)
    assert rows(monkeypatch)["block128, KV fp8"].detail == "CUDA error: device-side assert triggered"
