"""Rotary position embedding in FP32, with the context-extension rules of the Hugging Face configs."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Types whose frequencies do not change with the length of the sequence: exactness needs that."""


def rotary_table(config: PretrainedConfig, head_dim: int, num_positions: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, each [num_positions, head_dim / 2] fp32, scaled as the rope type asks.

    Raises:
        ValueError: a rope type whose frequencies depend on the sequence length.
    """
    parameters = config.rope_parameters
    rope_type = parameters.get("rope_type", "default")
    if rope_type not in STATIC_ROPE_TYPES:
        raise ValueError(
            f"rope_type {rope_type!r} is not supported: its frequencies change with the sequence length or are unknown "
            f"here. Supported: {', '.join(STATIC_ROPE_TYPES)}"
        )
    attention_factor = 1.0
    if rope_type == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        frequencies = 1.0 / (parameters["rope_theta"] ** exponents)
    else:
        frequencies, attention_factor = ROPE_INIT_FUNCTIONS[rope_type](config, device="cpu")
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return angles.cos() * attention_factor, angles.sin() * attention_factor
