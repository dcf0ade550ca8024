"""Folders that are damaged or do not fit: one error that names the file or tensor."""

import json

import pytest
import torch
from model_folders import read_folder
from safetensors.torch import save_file
from tiny_models import (
    masters_by_name,
)

from octavo.models import checkpoint
from octavo.models.checkpoint import load_decoder, save_decoder
from octavo.numerics.fp8 import E4M3
from octavo.numerics.recipe import get_recipe

# What is damaged.


def rewrite(folder, change):
    tensors = read_folder(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"1 tensors.*'model\.layers\.1\.mlp\.up_proj\.weight'"),
        (lambda t: t.pop("model.layers.0.self_attn.q_norm.weight"), r"'model\.layers\.0\.self_attn\.q_norm\.weight'"),
        (lambda t: t.pop("lm_head.weight"), r"1 tensors.*'lm_head\.weight'"),
        (lambda t: t.clear(), r"25 tensors.*'model\.embed_tokens\.weight'"),
        (
            lambda t: t.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(200, 96)}),
            r"holds 'model\.layers\.2\.mlp\.up_proj\.weight', which a qwen3 decoder",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)}),
            r"q_proj\.bias', which a qwen3",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.down_proj.weight": torch.zeros(200, 96)}),
            r"down_proj\.weight is torch\.float32 \(200, 96\);.*\(96, 200\)",
        ),
        (
            lambda t: t.update({"model.embed_tokens.weight": torch.zeros(96, 96)}),
            r"embed_tokens\.weight is torch\.float32 \(96, 96\);.*\(97, 96\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(1)}),  # would broadcast
            r"model\.norm\.weight is torch\.float32 \(1,\);.*\(96,\)",
        ),
        (
            lambda t: t.update({k: v.to(E4M3) for k, v in t.items() if k.endswith("o_proj.weight")}),
            r"o_proj\.weight is torch\.float8_e4m3fn",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(96, dtype=torch.int32)}),
            r"model\.norm\.weight is torch\.int32",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(make_folder, change, message):
    folder, _ = make_folder()
    rewrite(folder, change)
    with pytest.raises(ValueError, match=message) as caught:
        load_decoder(folder, get_recipe("block128"))
    assert str(folder) in str(caught.value)


@pytest.mark.parametrize("kept", [0, 4, 100, 0.5, -1])
def test_a_truncated_file_is_named(make_folder, kept):
    folder, _ = make_folder()
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: int(kept * len(data)) if isinstance(kept, float) else kept])
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read") as caught:
        load_decoder(folder, get_recipe("block128"))
    assert str(folder) in str(caught.value)


def test_a_missing_shard_is_named(make_folder, tmp_path):
    folder, _ = make_folder()
    save_decoder(load_decoder(folder, get_recipe("bf16")), tmp_path / "out", folder, max_shard_size="60KB")
    gone = sorted((tmp_path / "out").glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ValueError, match=f"{gone.name} cannot be read"):
        load_decoder(tmp_path / "out", get_recipe("bf16"))


def test_shards_without_an_index_are_all_read(make_folder, tmp_path):
    folder, model = make_folder()
    decoder = load_decoder(folder, get_recipe("bf16"))
    save_decoder(decoder, tmp_path / "out", folder, max_shard_size="60KB")
    (tmp_path / "out" / "model.safetensors.index.json").unlink()
    masters = masters_by_name(load_decoder(tmp_path / "out", get_recipe("bf16")))
    for name, tensor in model.named_parameters():
        assert torch.equal(masters[name], tensor.detach().float()), name


@pytest.mark.parametrize("text", ["", '{"weight_ma', "{}", '{"metadata": {}}'])
def test_a_damaged_index_is_named(make_folder, text):
    folder, _ = make_folder()
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json is damaged"):
        load_decoder(folder, get_recipe("bf16"))


def test_a_folder_without_safetensors_is_named(make_folder):
    folder, _ = make_folder()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"has no \*\.safetensors file"):
        load_decoder(folder, get_recipe("bf16"))


def test_a_quantised_checkpoint_of_another_kind_is_refused_by_its_config(make_folder):
    folder, _ = make_folder()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"quantization_config=.*weight_block_size"):
        load_decoder(folder, get_recipe("block128"))


def test_max_tokens_beyond_the_positions_is_refused(make_folder):
    folder, _ = make_folder()
    assert load_decoder(folder, get_recipe("bf16"), max_tokens=100).max_tokens == 100
    with pytest.raises(ValueError, match=r"up to 300 tokens.*256 positions"):
        load_decoder(folder, get_recipe("bf16"), max_tokens=300)


def test_weights_that_the_hub_does_not_give_are_named(make_folder, tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    folder, _ = make_folder()
    decoder = load_decoder(folder, get_recipe("bf16"))
    with pytest.raises(ValueError, match=r"'octavo-tests/nowhere' could not be fetched"):
        save_decoder(decoder, tmp_path / "out", "octavo-tests/nowhere")
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(checkpoint, "read_config", lambda path: (decoder.config, decoder.hf_config))
    with pytest.raises(ValueError, match=r"'octavo-tests/nowhere' could not be fetched"):
        load_decoder("octavo-tests/nowhere", get_recipe("bf16"))


def test_extra_tensors_that_transformers_ignores_are_ignored(make_folder):
    folder, model = make_folder(family="llama", tie_word_embeddings=True)
    rewrite(
        folder,
        lambda t: t.update(
            {
                "lm_head.weight": t["model.embed_tokens.weight"].clone(),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(16),
            }
        ),
    )
    decoder = load_decoder(folder, get_recipe("bf16"))
    assert torch.equal(decoder.embed_tokens.data, model.model.embed_tokens.weight.detach().float())
    assert decoder.lm_head is None
