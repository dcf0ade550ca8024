"""Hugging Face folders: what is written loads in transformers, what is read comes back, what is damaged is refused."""

import json
import shutil

import pytest
import torch
from model_folders import FAMILIES, TOKENIZER_FILES, logits_of, read_folder, same_bytes
from safetensors.torch import save_file
from tiny_models import (
    masters_by_name,
    random_prompts,
)
from transformers import AutoModelForCausalLM

from octavo.models import checkpoint
from octavo.models.checkpoint import load_decoder, save_decoder
from octavo.numerics.recipe import get_recipe


@pytest.mark.parametrize("family, tied", FAMILIES)
def test_masters_are_the_tensors_on_disk(make_folder, family, tied):
    folder, model = make_folder(family=family, tie_word_embeddings=tied)
    masters = masters_by_name(load_decoder(folder, get_recipe("block128")))
    wanted = dict(model.named_parameters())
    assert masters.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert masters[name].dtype == torch.float32
        assert torch.equal(masters[name], tensor.detach().float()), name


@pytest.mark.parametrize("family, tied", FAMILIES)
def test_load_then_save_gives_the_same_bytes_back(make_folder, tmp_path, family, tied):
    folder, _ = make_folder(family=family, tie_word_embeddings=tied)
    save_decoder(load_decoder(folder, get_recipe("block128")), tmp_path / "out", folder)
    same_bytes(read_folder(tmp_path / "out"), read_folder(folder))
    save_decoder(load_decoder(tmp_path / "out", get_recipe("rowwise")), tmp_path / "again", tmp_path / "out")
    same_bytes(read_folder(tmp_path / "again"), read_folder(folder))
    assert ("lm_head.weight" in read_folder(folder)) == (not tied)
    original, saved = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, tmp_path / "again"))
    assert saved.dtype == original.dtype == torch.bfloat16
    tokens = torch.tensor(random_prompts(0, 2, 30, 30))
    with torch.no_grad():
        assert torch.equal(saved(tokens).logits, original(tokens).logits)


@pytest.mark.parametrize("family, tied", [("llama", True), ("qwen2", False), ("qwen3", False)])
def test_transformers_gives_the_decoders_logits_after_saving(make_folder, tmp_path, family, tied):
    folder, _ = make_folder(family=family, tie_word_embeddings=tied)
    decoder = load_decoder(folder, get_recipe("fp32"))
    for name, master in masters_by_name(decoder).items():
        master.mul_(1.0 + 0.1 * torch.randn(master.shape)) if "norm" not in name else master.add_(0.01)
    decoder.requantize_()
    save_decoder(decoder, tmp_path / "out", folder)
    assert {x.dtype for x in read_folder(tmp_path / "out").values()} == {torch.float32}
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    tokens = random_prompts(0, 1, 50, 50)[0]
    with torch.no_grad():
        difference = logits_of(decoder, tokens) - saved(torch.tensor([tokens])).logits[0]
    assert saved.dtype == torch.float32
    assert difference.abs().max() < 1e-5
    reloaded = load_decoder(tmp_path / "out", get_recipe("fp32"))
    assert torch.equal(logits_of(reloaded, tokens), logits_of(decoder, tokens))


def test_masters_are_rounded_to_nearest_bf16(make_folder, tmp_path):
    folder, _ = make_folder()
    decoder = load_decoder(folder, get_recipe("block128"))
    masters = masters_by_name(decoder)
    for master in masters.values():
        master.mul_(1.0 + 2.0**-7 * torch.rand(master.shape))
    save_decoder(decoder, tmp_path / "out", folder)
    same_bytes(read_folder(tmp_path / "out"), {name: master.bfloat16() for name, master in masters.items()})


@pytest.mark.parametrize("recipe, dtype", [("block128", torch.bfloat16), ("fp32", torch.float32)])
def test_shards_hold_the_same_bytes(make_folder, tmp_path, recipe, dtype):
    folder, _ = make_folder(family="qwen2", dtype=dtype)
    decoder = load_decoder(folder, get_recipe(recipe))
    save_decoder(decoder, tmp_path / "sharded", folder, max_shard_size="60KB")
    files = sorted((tmp_path / "sharded").glob("*.safetensors"))
    index = json.loads((tmp_path / "sharded" / "model.safetensors.index.json").read_text())
    assert len(files) > 3
    assert {file.name for file in files} == set(index["weight_map"].values())
    assert index["weight_map"].keys() == read_folder(folder).keys()
    same_bytes(read_folder(tmp_path / "sharded"), read_folder(folder))
    tokens = random_prompts(0, 1, 30, 30)[0]
    reloaded = load_decoder(tmp_path / "sharded", get_recipe(recipe))
    assert torch.equal(logits_of(reloaded, tokens), logits_of(decoder, tokens))
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "sharded")
    same_bytes(dict(saved.state_dict()), read_folder(folder))


def test_tokenizer_and_generation_config_go_along_and_nothing_else(make_folder, tmp_path):
    folder, _ = make_folder()
    (folder / "tokenizer_of_another_tool").mkdir()
    save_decoder(load_decoder(folder, get_recipe("bf16")), tmp_path / "out", folder)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {*TOKENIZER_FILES, "config.json", "model.safetensors"}
    for name, text in TOKENIZER_FILES.items():
        assert (tmp_path / "out" / name).read_text() == text


def test_saving_over_the_source_keeps_its_tokenizer(make_folder):
    folder, _ = make_folder()
    before = read_folder(folder)
    save_decoder(load_decoder(folder, get_recipe("bf16")), folder, folder)
    same_bytes(read_folder(folder), before)
    assert (folder / "tokenizer.json").read_text() == TOKENIZER_FILES["tokenizer.json"]
    assert {path.name for path in folder.parent.iterdir()} == {folder.name}


def test_old_shards_do_not_outlive_a_new_save(make_folder, tmp_path):
    folder, _ = make_folder()
    decoder = load_decoder(folder, get_recipe("bf16"))
    save_decoder(decoder, tmp_path / "out", folder, max_shard_size="60KB")
    save_decoder(decoder, tmp_path / "out", folder)
    assert [file.name for file in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]


@pytest.mark.parametrize("broken", ["second_shard", "config", "tokenizer", "rename"])
def test_an_interrupted_save_leaves_the_old_folder(make_folder, tmp_path, monkeypatch, broken):
    folder, _ = make_folder()
    decoder = load_decoder(folder, get_recipe("bf16"))
    save_decoder(decoder, tmp_path / "out", folder)
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    with torch.no_grad():
        decoder.norm.weight.mul_(2.0)

    calls = []

    def fail(real, at):
        def wrapped(*args, **kwargs):
            calls.append(args)
            if len(calls) == at:
                raise OSError(28, "No space left on device")
            return real(*args, **kwargs)

        return wrapped

    with monkeypatch.context() as patch:
        if broken == "second_shard":
            patch.setattr(checkpoint, "save_file", fail(save_file, 2))
        elif broken == "config":
            config_class = type(decoder.hf_config)
            patch.setattr(config_class, "save_pretrained", fail(config_class.save_pretrained, 1))
        elif broken == "tokenizer":
            patch.setattr(checkpoint.shutil, "copy2", fail(shutil.copy2, 3))
        else:
            patch.setattr(checkpoint.Path, "rename", fail(checkpoint.Path.rename, 1))
        with pytest.raises(OSError, match="No space left"):
            save_decoder(decoder, tmp_path / "out", folder, max_shard_size="60KB")
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before

    save_decoder(decoder, tmp_path / "out", folder)  # what the failure left does not get in the way
    gain = read_folder(tmp_path / "out")["model.norm.weight"]
    assert torch.equal(gain, decoder.norm.weight.data.bfloat16())
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_what_is_no_model_folder_is_not_replaced(make_folder, tmp_path):
    folder, _ = make_folder()
    decoder = load_decoder(folder, get_recipe("bf16"))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    (tmp_path / "file").write_text("a file")
    for name in ("home", "file"):
        with pytest.raises(ValueError, match=f"{name} exists and is not a model folder"):
            save_decoder(decoder, tmp_path / name, folder)
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    save_decoder(decoder, tmp_path / "empty", folder)
    same_bytes(read_folder(tmp_path / "empty"), read_folder(folder))


def test_files_that_are_no_part_of_the_model_are_left_aside(make_folder):
    source, _ = make_folder()
    whole = masters_by_name(load_decoder(source, get_recipe("block128")))
    (source / "._model.safetensors").write_bytes(b"macOS")
    save_file({"tok_embeddings.weight": torch.zeros(3)}, source / "consolidated.safetensors")
    assert [file.name for file in checkpoint.weight_files(source)[1]] == [
        "._model.safetensors",
        "consolidated.safetensors",
    ]
    masters = masters_by_name(load_decoder(source, get_recipe("block128")))
    assert all(torch.equal(masters[name], whole[name]) for name in whole)
    (source / "model.safetensors").rename(source / "model-00001-of-00001.safetensors")
    assert [file.name for file in checkpoint.weight_files(source)[0]] == ["model-00001-of-00001.safetensors"]
