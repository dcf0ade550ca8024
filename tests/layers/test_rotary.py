"""Rotary embedding against the modules of transformers, bit for bit in FP32."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from octavo.kernels.heads import rotate
from octavo.layers.rotary import rotary_table
from octavo.numerics.error import relative_error

POSITIONS = 300
ROPE = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "default 1e6": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, own factor": {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "attention_factor": 0.8,
    },
}
every_rope = pytest.mark.parametrize("rope", ROPE.values(), ids=ROPE)


def config(rope, head_dim=64, hidden_size=256, num_heads=4):
    return LlamaConfig(
        hidden_size=hidden_size,
        num_attention_heads=num_heads,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=4 * POSITIONS,
        rope_parameters=rope,
    )


def theirs(rope, q, k, positions, **kwargs):
    """transformers' own rotation of q [T, H, Dh] and k [T, Hkv, Dh]."""
    cos, sin = LlamaRotaryEmbedding(config(rope, **kwargs))(q, positions[None])
    q, k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    return q[0].transpose(0, 1), k[0].transpose(0, 1)


@pytest.mark.parametrize("head_dim", [64, 128])  # 128: not hidden_size / num_heads
@every_rope
def test_rotation_equals_transformers(rope, head_dim):
    q, k, positions = torch.randn(100, 4, head_dim), torch.randn(100, 2, head_dim), torch.randint(POSITIONS, (100,))
    cos, sin = rotary_table(config(rope, head_dim), head_dim, POSITIONS)
    expected = theirs(rope, q, k, positions, head_dim=head_dim)
    for x, truth in zip((q, k), expected, strict=True):
        assert relative_error(truth, x) > 0.1  # it does rotate
        assert torch.equal(rotate(x, cos[positions], sin[positions]), truth)


def test_types_differ():
    tables = [rotary_table(config(rope), 64, POSITIONS)[0] for rope in ROPE.values()]
    for i, table in enumerate(tables):
        assert all(relative_error(table, other) > 0.01 for other in tables[:i])


@every_rope
def test_table_by_formula(rope):
    # In float64; an FP32 angle of up to 300 radians is off by 300 * 2**-23 for two roundings, and cos by as much.
    cos, sin = rotary_table(config(rope), 64, POSITIONS)
    frequencies = LlamaRotaryEmbedding(config(rope)).inv_freq.double()
    if rope["rope_type"] in ("default", "linear"):
        frequencies = rope["rope_theta"] ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64) / rope.get(
            "factor", 1.0
        )
    size = rope.get("attention_factor", 0.1 * math.log(4.0) + 1.0) if rope["rope_type"] == "yarn" else 1.0
    angles = torch.arange(POSITIONS, dtype=torch.float64)[:, None] * frequencies
    bound = POSITIONS * 2.0**-22
    assert cos.dtype == sin.dtype == torch.float32
    assert (cos.double() - size * angles.cos()).abs().max() <= bound
    assert (sin.double() - size * angles.sin()).abs().max() <= bound


@every_rope
def test_a_position_does_not_depend_on_the_length_of_the_table(rope):
    longest = rotary_table(config(rope), 64, 4 * POSITIONS)
    for num_positions in (1, 2, 3, 17, 100, 299):
        for table, longer in zip(rotary_table(config(rope), 64, num_positions), longest, strict=True):
            assert torch.equal(table, longer[:num_positions])


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope", "proportional"])
def test_lengths_that_change_frequencies_are_refused(rope_type):
    refused = config({"rope_type": "default", "rope_theta": 10000.0})
    refused.rope_parameters = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(
        ValueError, match=f"rope_type '{rope_type}' is not supported.*Supported: default, linear, llama3, yarn"
    ):
        rotary_table(refused, 64, POSITIONS)


def test_pairs_are_half_a_head_apart():
    # A quarter turn of the first pair (0, 2) takes (1, 3) to (-3, 1); the second pair (1, 3) is at rest.
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    cos, sin = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    assert rotate(x, cos, sin).tolist() == [[[-3.0, 2.0, 1.0, 4.0]]]


def test_position_zero_is_at_rest():
    cos, sin = rotary_table(config(ROPE["default"]), 64, 1)
    x = torch.randn(3, 4, 64)
    assert torch.equal(rotate(x, cos.expand(3, -1), sin.expand(3, -1)), x)


def test_bf16_is_rounded_once():
    x, positions = torch.randn(50, 4, 64).bfloat16(), torch.arange(50)
    cos, sin = (table[positions] for table in rotary_table(config(ROPE["default"]), 64, POSITIONS))
    got = rotate(x, cos, sin)
    assert torch.equal(got, rotate(x.float(), cos, sin).bfloat16())
    assert not torch.equal(got, theirs(ROPE["default"], x, x[:, :2], positions)[0])  # where cos is BF16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_rope
def test_gradient_turns_back(rope, dtype):
    # The transpose of a rotation; in FP32 that of transformers to the bit, in BF16 rounded once.
    x, positions = torch.randn(60, 4, 64).to(dtype), torch.randint(POSITIONS, (60,))
    cos, sin = (table[positions] for table in rotary_table(config(rope), 64, POSITIONS))
    grad_y = torch.randn(60, 4, 64).to(dtype)
    leaf = x.clone().requires_grad_()
    rotate(leaf, cos, sin).backward(grad_y)
    assert leaf.grad.dtype == dtype and leaf.grad.abs().max() > 0.0
    assert torch.equal(leaf.grad, rotate(grad_y, cos, -sin))
    if dtype == torch.float32:
        leaf_of_theirs = x.clone().requires_grad_()
        theirs(rope, leaf_of_theirs, x[:, :2], positions)[0].backward(grad_y)
        assert torch.equal(leaf.grad, leaf_of_theirs.grad)


def test_a_token_does_not_depend_on_its_batch_or_strides():
    cos, sin = rotary_table(config(ROPE["default"]), 64, 70)
    fused = torch.randn(70, 5 * 64)
    x = fused[:, 64:].unflatten(1, (4, 64))
    whole = rotate(x.contiguous(), cos, sin)
    assert torch.equal(rotate(x, cos, sin), whole)
    for T in range(1, 71):
        assert torch.equal(rotate(x[-T:], cos[-T:], sin[-T:]), whole[-T:])


def test_zero_empty_and_nan():
    cos, sin = rotary_table(config(ROPE["default"]), 64, 5)
    assert torch.equal(rotate(torch.zeros(5, 2, 64), cos, sin), torch.zeros(5, 2, 64))
    assert rotate(torch.zeros(0, 2, 64), cos[:0], sin[:0]).shape == (0, 2, 64)
    x = torch.randn(5, 2, 64)
    x[3, 1, 40] = torch.nan  # pair (8, 40)
    expected = torch.zeros(5, 2, 64, dtype=torch.bool)
    expected[3, 1, [8, 40]] = True
    assert torch.equal(rotate(x, cos, sin).isnan(), expected)
