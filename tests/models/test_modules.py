"""The list of modules against transformers' own model: names, shapes, biases."""

import pytest
from model_folders import FAMILIES
from tiny_models import tiny_config, tiny_transformers

from octavo.models.config import decoder_config
from octavo.models.modules import decoder_modules


@pytest.mark.parametrize("family, tied", FAMILIES)
def test_modules_with_a_weight_are_transformers_parameters(family, tied):
    config = tiny_config(family, tie_word_embeddings=tied)
    modules = decoder_modules(decoder_config(config))
    named = {}
    for module in modules:
        if module.shape and not module.tied_to:
            named[f"{module.name}.weight"] = module.shape
            if module.bias:
                named[f"{module.name}.bias"] = module.shape[:1]
    assert named == {name: tuple(x.shape) for name, x in tiny_transformers(config).named_parameters()}
    assert [module.tied_to for module in modules if module.kind == "head"] == ["model.embed_tokens" if tied else ""]


def test_a_module_stands_behind_all_that_it_reads():
    seen = set()
    for module in decoder_modules(decoder_config(tiny_config("qwen3"))):
        assert seen.issuperset(module.inputs), module
        seen.add(module.name)
