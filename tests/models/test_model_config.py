"""Reading config.json: what is understood, and one line for what is not."""

import json
import sys

import pytest
import torch
from tiny_models import tiny_config

from octavo.layers.rotary import rotary_table
from octavo.models.config import decoder_config, read_config


def write_config(folder, **changes):
    """config.json of a tiny Qwen3 with some keys changed, or removed where the value is None."""
    values = {**tiny_config("qwen3").to_dict(), **changes}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return folder


@pytest.fixture
def offline(monkeypatch):
    """No network and no waiting for it, whatever this machine has."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_every_field_is_read(tmp_path):
    folder = write_config(
        tmp_path,
        vocab_size=301,
        hidden_size=192,
        intermediate_size=520,
        num_hidden_layers=5,
        layer_types=None,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=40,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=777,
    )
    config, hf_config = read_config(folder)
    assert hf_config.model_type == config.family == "qwen3"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (301, 192, 520)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (5, 6, 3, 40)
    assert (config.norm_eps, config.max_positions, config.tied_embeddings) == (1e-5, 777, True)


@pytest.mark.parametrize(
    "family, qkv_bias, qk_norm", [("llama", False, False), ("qwen2", True, False), ("qwen3", False, True)]
)
def test_families_differ_in_bias_and_qk_norm(family, qkv_bias, qk_norm):
    config = decoder_config(tiny_config(family))
    assert (config.qkv_bias, config.qk_norm, config.tied_embeddings) == (qkv_bias, qk_norm, False)


def test_head_dim_and_kv_heads_have_defaults(tmp_path):
    folder = write_config(tmp_path, model_type="llama", head_dim=None, num_key_value_heads=None)
    config, _ = read_config(folder)
    assert (config.head_dim, config.num_kv_heads) == (24, 4)


def test_old_style_rope_keys_give_the_same_table(tmp_path):
    # Folders written before transformers 5 have rope_theta and rope_scaling beside each other.
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    old = write_config(
        tmp_path / "old", model_type="llama", rope_parameters=None, rope_theta=5000.0, rope_scaling=scaling
    )
    new = write_config(tmp_path / "new", model_type="llama", rope_parameters={**scaling, "rope_theta": 5000.0})
    plain = write_config(tmp_path / "plain", model_type="llama", rope_parameters=None, rope_theta=5000.0)
    tables = [torch.cat(rotary_table(read_config(folder)[1], 32, 200)) for folder in (old, new, plain)]
    assert torch.equal(tables[0], tables[1])
    assert not torch.equal(tables[0], tables[2])


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "mixtral"}, r"model_type 'mixtral' is not supported; supported are llama, qwen2, qwen3"),
        ({"model_type": "gpt2"}, r"model_type 'gpt2' is not supported"),
        ({"model_type": "from_the_future"}, r"config\.json is not the config of a supported model.*from_the_future"),
        ({"model_type": None}, r"config\.json is not the config of a supported model.*model_type"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config=.*fp8.*does not support"),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, r"use_sliding_window=True"),
        ({"attention_bias": True}, r"attention_bias=True"),
        ({"model_type": "llama", "mlp_bias": True}, r"mlp_bias=True"),
        ({"model_type": "llama", "attention_bias": True}, r"attention_bias=True"),
        ({"hidden_act": "gelu"}, r"hidden_act='gelu'"),
        ({"attention_dropout": 0.1}, r"attention_dropout=0\.1"),
        ({"head_dim": -32}, r"head_dim=-32; a model has at least 1"),
        ({"num_key_value_heads": 0}, r"num_key_value_heads=0; a model has at least 1"),
        ({"num_key_value_heads": 3}, r"num_attention_heads=4, which num_key_value_heads=3 does not divide"),
        ({"vocab_size": "many"}, r"config\.json is not the config of a supported model.*vocab_size.*many"),
    ],
)
def test_what_the_decoder_does_not_have_is_named(tmp_path, changes, message):
    folder = write_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        read_config(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_config_that_is_no_json_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3", "hidden')
    with pytest.raises(ValueError, match=r"config\.json is not the config of a supported model.*valid JSON"):
        read_config(tmp_path)


def test_custom_code_is_neither_run_nor_asked_about(tmp_path, monkeypatch):
    folder = write_config(tmp_path, model_type="own", auto_map={"AutoConfig": "configuration_own.OwnConfig"})
    (folder / "configuration_own.py").write_text("raise SystemExit('was run')")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on the terminal"))
    with pytest.raises(ValueError, match="custom code"):
        read_config(folder)
    assert not any("configuration_own" in name for name in sys.modules)


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "~/models/x", "runs/a/model", ""])
def test_a_path_without_config_json_is_no_hub_id(path, monkeypatch):
    monkeypatch.setattr("octavo.models.config.AutoConfig.from_pretrained", lambda *a, **k: pytest.fail("asked the hub"))
    with pytest.raises(ValueError, match=r"has no config\.json; it wants a Hugging Face model folder"):
        read_config(path)


def test_a_file_or_a_folder_without_config_json_is_named(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"x")
    for path in (tmp_path, tmp_path / "weights.bin"):
        with pytest.raises(ValueError, match=r"has no config\.json") as caught:
            read_config(path)
        assert repr(str(path)) in str(caught.value)


@pytest.mark.parametrize("name", ["octavo-tests/nowhere", "nowhere-at-all", "not an id!"])
def test_a_hub_id_that_cannot_be_had_is_named(name, offline):
    with pytest.raises(ValueError, match=r"neither a folder here nor a model that the .* hub gave us: \w") as caught:
        read_config(name)
    assert f"model.path={name!r}" in str(caught.value)
