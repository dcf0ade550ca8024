"""The shape of a dense decoder, read from a Hugging Face config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

FAMILIES = ("llama", "qwen2", "qwen3")
COUNTS = (
    *("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings"),
    *("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
)
"""Keys of config.json that count something."""


FP8_FORMAT = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "scale_fmt": "float",
}
"""The `quantization_config` that is read and written (`models.fp8_folder`), but for the modules left in BF16."""


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A Llama-like decoder. `D` hidden_size, `F` intermediate_size, `H`, `Hkv` heads, `Dh` head_dim, `V` vocab_size."""

    family: str
    """One of FAMILIES."""
    vocab_size: int
    """V, rows of the embedding."""
    hidden_size: int
    """D, model width."""
    intermediate_size: int
    """F, feed-forward width."""
    num_layers: int
    """Decoder blocks."""
    num_heads: int
    """H, query heads."""
    num_kv_heads: int
    """Hkv, key-value heads; divides num_heads."""
    head_dim: int
    """Dh."""
    norm_eps: float
    """Of every RMSNorm."""
    qkv_bias: bool
    """Qwen2: q, k and v have a bias."""
    qk_norm: bool
    """Qwen3: q and k are normalised per head before rotary."""
    tied_embeddings: bool
    """lm_head is the embedding."""
    max_positions: int
    """Longest sequence the model was made for, in tokens."""


def read_config(path: str | Path) -> tuple[DecoderConfig, PretrainedConfig]:
    """Read config.json of a Hugging Face folder or hub id.

    Returns:
        The decoder's shape, and the transformers config it came from (rope parameters, token ids).

    Raises:
        ValueError: no such folder or hub id, or an architecture that the decoder does not cover.
    """
    folder = Path(path)
    looks_local = folder.is_absolute() or str(path).startswith((".", "~")) or str(path).count("/") > 1
    is_local = looks_local or folder.exists()
    if is_local and not (folder / "config.json").is_file():
        raise ValueError(
            f"model.path={str(path)!r} has no config.json; it wants a Hugging Face model folder (config.json, "
            f"*.safetensors, tokenizer.json) or a hub id such as Qwen/Qwen3-0.6B"
        )
    try:
        hf_config = AutoConfig.from_pretrained(path, trust_remote_code=False)  # None would ask on the terminal
    except Exception as error:  # the file may hold anything, and transformers raises as much
        reason = " ".join(line.strip() for line in str(error).splitlines()[:2])
        if is_local:
            raise ValueError(f"{folder / 'config.json'} is not the config of a supported model: {reason}") from error
        raise ValueError(
            f"model.path={str(path)!r} is neither a folder here nor a model that the Hugging Face hub gave us: {reason}"
        ) from error
    return decoder_config(hf_config, str(path)), hf_config


def decoder_config(hf_config: PretrainedConfig, path: str = "model") -> DecoderConfig:
    """The decoder's shape from a transformers config.

    Raises:
        ValueError: the model uses something the decoder does not have; the message names the config key.
    """
    family = hf_config.model_type
    if family not in FAMILIES:
        raise ValueError(f"{path}: model_type {family!r} is not supported; supported are {', '.join(FAMILIES)}")
    unsupported = {
        "use_sliding_window": bool(getattr(hf_config, "use_sliding_window", False)),
        "mlp_bias": bool(getattr(hf_config, "mlp_bias", False)),
        "attention_bias": family != "qwen2" and bool(getattr(hf_config, "attention_bias", False)),
        "hidden_act": hf_config.hidden_act not in ("silu", "swish"),
        "attention_dropout": getattr(hf_config, "attention_dropout", 0.0) != 0.0,
    }
    for key, present in unsupported.items():
        if present:
            value = getattr(hf_config, key)
            raise ValueError(f"{path}: config.json has {key}={value!r}, which octavo does not support")
    _check_quantization(getattr(hf_config, "quantization_config", None), path)
    for key in COUNTS:
        count = getattr(hf_config, key, None)
        if count is not None and count < 1:
            raise ValueError(f"{path}: config.json has {key}={count}; a model has at least 1. Fetch the file again")
    theta = hf_config.rope_parameters.get("rope_theta")
    if not isinstance(theta, int | float) or not 0.0 < theta < math.inf:
        raise ValueError(f"{path}: config.json has rope_theta={theta!r}; it is a number above 0. Fetch the file again")
    num_heads = hf_config.num_attention_heads
    num_kv_heads = hf_config.num_key_value_heads or num_heads
    if num_heads % num_kv_heads:
        raise ValueError(
            f"{path}: config.json has num_attention_heads={num_heads}, which num_key_value_heads={num_kv_heads} does "
            f"not divide"
        )
    return DecoderConfig(
        family=family,
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.intermediate_size,
        num_layers=hf_config.num_hidden_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=getattr(hf_config, "head_dim", None) or hf_config.hidden_size // num_heads,
        norm_eps=hf_config.rms_norm_eps,
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        tied_embeddings=hf_config.tie_word_embeddings,
        max_positions=hf_config.max_position_embeddings,
    )


def _check_quantization(found: Mapping[str, Any] | None, path: str) -> None:
    """ValueError for another quantisation than FP8_FORMAT; keys but the method and the block size may be absent."""
    if found is None:
        return
    for key, wanted in FP8_FORMAT.items():
        value = found.get(key, None if key in ("quant_method", "weight_block_size") else wanted)
        if (list(value) if isinstance(value, tuple) else value) != wanted:
            raise ValueError(
                f"{path}: config.json has quantization_config={dict(found)!r}, which octavo does not support: it reads "
                f"{key}={wanted!r}, or a model that is not quantised"
            )
