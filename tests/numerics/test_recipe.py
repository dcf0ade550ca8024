"""Each recipe field by field, and the combinations that must be refused."""

import dataclasses

import pytest

from octavo.numerics.recipe import FORWARD_ONLY, RECIPE_NAMES, GemmRecipe, Recipe, get_recipe, names_module

TENSOR, ROW, COLUMN = (None, None), (1, None), (None, 1)
ALONG_K, ALONG_T, SQUARE = (1, 128), (128, 1), (128, 128)
PLAIN = (None, None)  # both operands in high precision

# name: FProp (X, W), DGrad (dY, W), WGrad (dY, X), saved activations, KV cache, batch-invariant
TABLE = {
    "bf16": (PLAIN, PLAIN, PLAIN, "bf16", "bf16", True),
    "block128": ((ALONG_K, SQUARE), (ALONG_K, SQUARE), (ALONG_T, ALONG_T), "fp8", "fp8", True),
    "rowwise": ((ROW, ROW), (ROW, COLUMN), (COLUMN, COLUMN), "fp8", "fp8", True),
    "tensorwise": ((TENSOR, TENSOR), (TENSOR, TENSOR), (TENSOR, TENSOR), "fp8", "fp8", False),
    "w8a16": ((None, SQUARE), (ALONG_K, SQUARE), (ALONG_T, ALONG_T), "fp8", "fp8", True),
    "tensorwise_static": ((TENSOR, TENSOR), (TENSOR, TENSOR), (TENSOR, TENSOR), "fp8", "fp8", True),
    "fp32": (PLAIN, PLAIN, PLAIN, "fp32", "fp32", True),
}
every_recipe = pytest.mark.parametrize("name", TABLE)


def test_the_table_is_complete():
    assert set(RECIPE_NAMES) == set(TABLE)


@every_recipe
def test_recipe_is_its_row_of_the_table(name):
    fprop, dgrad, wgrad, saved_activations, kv_cache, batch_invariant = TABLE[name]
    recipe = get_recipe(name)
    assert dataclasses.asdict(recipe) == {
        "name": name,
        "fprop": {"left": fprop[0], "right": fprop[1]},
        "dgrad": {"left": dgrad[0], "right": dgrad[1]},
        "wgrad": {"left": wgrad[0], "right": wgrad[1]},
        "high_precision": "fp32" if name == "fp32" else "bf16",
        "static_activation_scale": name == "tensorwise_static",
        "amax_margin": 1.25,
        "kv_cache": kv_cache,
        "saved_activations": saved_activations,
        "keep_bf16": ("lm_head", "embed_tokens"),
        "scale_rounding": "none",
    }
    assert recipe.batch_invariant is batch_invariant
    assert recipe.quantizes is (fprop[1] is not None)


@pytest.mark.parametrize("name", FORWARD_ONLY)
def test_forward_only_recipes_have_the_fprop_of_one_that_trains_and_nothing_behind_it(name):
    recipe, trains = get_recipe(name), get_recipe(FORWARD_ONLY[name])
    assert recipe.fprop == trains.fprop and recipe.batch_invariant is trains.batch_invariant
    assert recipe.forward_only and not trains.forward_only and recipe.quantizes
    assert (recipe.dgrad, recipe.wgrad, recipe.saved_activations, recipe.kv_cache) == (None, None, None, "bf16")


@every_recipe
def test_recipes_are_frozen(name):
    recipe = get_recipe(name)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.kv_cache = "bf16"
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.fprop.left = None
    changed = get_recipe(name, keep_bf16=("lm_head", "embed_tokens", "down_proj"))
    assert changed.keep_bf16 == ("lm_head", "embed_tokens", "down_proj")
    assert get_recipe(name) == recipe and recipe.keep_bf16 == ("lm_head", "embed_tokens")
    assert hash(recipe) == hash(get_recipe(name))


def test_recipes_are_keyword_only():
    with pytest.raises(TypeError):
        GemmRecipe(None, None)
    with pytest.raises(TypeError):
        Recipe("bf16", GemmRecipe(left=None, right=None))


def test_changes_that_go_together():
    assert get_recipe("block128", kv_cache="bf16", saved_activations="bf16", scale_rounding="power_of_two") == (
        dataclasses.replace(
            get_recipe("block128"), kv_cache="bf16", saved_activations="bf16", scale_rounding="power_of_two"
        )
    )
    assert get_recipe("bf16", kv_cache="fp8").kv_cache == "fp8"
    assert get_recipe("tensorwise_static", amax_margin=1.0).amax_margin == 1.0
    bf16_wgrad = get_recipe("rowwise", wgrad=GemmRecipe(left=None, right=None), saved_activations="bf16")
    assert bf16_wgrad.wgrad == GemmRecipe(left=None, right=None)


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("fp4", {}, "recipe 'fp4' does not exist; choose one of bf16, block128, rowwise, .*tensorwise_static, fp32"),
        ("block128", {"kv_cache": "fp32"}, r"kv_cache must be one of \('fp8', 'bf16'\).*'block128'; got 'fp32'"),
        ("block128", {"kv_cache": "int8"}, r"kv_cache must be one of \('fp8', 'bf16'\).*'block128'; got 'int8'"),
        ("fp8_channel", {"saved_activations": "fp8"}, "'fp8_channel' has no backward.*got saved_activations='fp8'"),
        ("fp32", {"kv_cache": "fp8"}, r"kv_cache must be one of \('fp32',\).*'fp32'; got 'fp8'"),
        ("bf16", {"saved_activations": "fp8"}, "saved_activations='fp8' .*'bf16'.* Use 'bf16'"),
        ("fp32", {"saved_activations": "bf16"}, "saved_activations='bf16' .*'fp32'.* Use 'fp32'"),
        ("w8a16", {"saved_activations": "fp32"}, "saved_activations='fp32' .*'w8a16'.* Use 'fp8'"),
        ("rowwise", {"wgrad": GemmRecipe(left=None, right=None)}, "saved_activations='fp8' .*'rowwise'.* Use 'bf16'"),
        ("tensorwise_static", {"amax_margin": 0.9}, "amax_margin .*at least 1; got 0.9"),
        ("tensorwise_static", {"amax_margin": float("nan")}, "amax_margin .*at least 1; got nan"),
        ("tensorwise_static", {"amax_margin": float("inf")}, "amax_margin .*finite, at least 1; got inf"),
        ("block128", {"scale_rounding": "up"}, r"scale_rounding must be one of \('none', 'power_of_two'\); got 'up'"),
        ("block128", {"keep_bf16": ("lm_head",)}, r"keep_bf16=\['lm_head'\] leaves out 'embed_tokens'.* Add"),
        ("block128", {"keep_bf16": ("embed_tokens", "lm")}, "leaves out 'lm_head'.* Add 'lm_head' to the list"),
        ("bf16", {"keep_bf16": ()}, r"keep_bf16=\[\] leaves out 'lm_head'"),
        ("block128", {"static_activation_scale": True}, r"static_activation_scale=True .*'block128'.*\(1, 128\).* Use"),
        ("w8a16", {"static_activation_scale": True}, "static_activation_scale=True .*'w8a16'.* Use recipe 'tensorw"),
        ("bf16", {"static_activation_scale": True}, "static_activation_scale=True .*'bf16'.* Use recipe 'tensorwise_"),
    ],
)
def test_what_does_not_go_together_is_refused(name, changes, message):
    with pytest.raises(ValueError, match=message):
        get_recipe(name, **changes)


def test_an_unknown_field_is_refused():
    with pytest.raises(TypeError, match="kvcache"):
        get_recipe("block128", kvcache="bf16")


LAYER = "model.layers.0.mlp.gate_proj"


@pytest.mark.parametrize(
    "pattern, module, matches",
    [
        ("gate_proj", LAYER, True),
        ("gate", LAYER, False),
        ("proj", LAYER, False),
        ("mlp", LAYER, False),  # a part in the middle is not a trailing one
        ("mlp.gate_proj", LAYER, True),
        ("p.gate_proj", LAYER, False),
        ("layers.0.mlp.gate_proj", LAYER, True),
        ("layers.1.mlp.gate_proj", LAYER, False),
        ("model.layers.0.mlp.gate_proj", LAYER, True),
        ("del.layers.0.mlp.gate_proj", LAYER, False),
        ("layers.0.*", LAYER, True),
        ("layers.0.*", "model.layers.10.mlp.gate_proj", False),
        ("layers.1.*", "model.layers.11.mlp.gate_proj", False),
        ("layers.0.*", "model.layers.0.self_attn.q_proj", True),
        ("layers.0", LAYER, False),
        ("gate_proj.*", LAYER, False),
        ("down_proj", "model.layers.3.mlp.down_proj", True),
        ("down_proj", "model.layers.3.mlp.updown_proj", False),
        ("Down_proj", "model.layers.3.mlp.down_proj", False),
        ("[qkv]_proj", "model.layers.3.self_attn.k_proj", True),
        ("[qkv]_proj", "model.layers.3.self_attn.o_proj", False),
        ("lm_head", "lm_head", True),
        ("*", LAYER, True),
        ("", LAYER, False),
    ],
)
def test_keep_bf16_matches_whole_names(pattern, module, matches):
    assert names_module(pattern, module) is matches
    recipe = get_recipe("block128", keep_bf16=("lm_head", "embed_tokens", pattern))
    assert recipe.keeps_bf16(module) is matches
