"""Attention by hand, at its extremes, and what the KV cache stores."""

import pytest
import torch
from attention_reference import (
    DH,
    FORMATS,
    HKV,
    SOFTMAX_SCALE,
    UNIT_ROUNDOFF,
    H,
    boundaries,
    decoded,
    every_format,
    qkv,
    run,
    slow_attention,
)

from octavo.kernels.attention import StoredKV, packed_attention, probability_dtype, store_kv
from octavo.numerics.error import relative_error
from octavo.numerics.exact import to_grid

# Values by hand.


@every_format
def test_the_first_token_sees_itself_as_it_is_stored(kv_format):
    q, k, v = qkv(kv_format, 3)
    out = packed_attention(q, k, v, boundaries([1, 2]), SOFTMAX_SCALE, kv_format)
    v_hat = store_kv(v, kv_format).decode().repeat_interleave(H // HKV, dim=1)
    expected = to_grid(v_hat, 23).to(q.dtype)  # which moves FP32 only, by its last bit
    assert torch.equal(out[[0, 1]], expected[[0, 1]])
    assert torch.equal(expected, v_hat) == (kv_format != "fp32")
    assert torch.equal(store_kv(v, kv_format).decode(), v) == (kv_format != "fp8")


@every_format
def test_queries_without_a_preference_average(kv_format):
    _, k, v = qkv(kv_format, 4)
    v = torch.arange(1.0, 5.0)[:, None, None].expand(4, HKV, DH).to(v.dtype)  # 1, 2, 3, 4: codes of E4M3
    q = torch.zeros(4, H, DH, dtype=v.dtype)
    out = packed_attention(q, k, v, boundaries([4]), SOFTMAX_SCALE, kv_format)
    assert torch.equal(out, torch.tensor([1.0, 1.5, 2.0, 2.5])[:, None, None].expand(4, H, DH).to(out.dtype))


@every_format
def test_two_keys_by_hand(kv_format):
    # Scores 0 and ln 3: weights 1/4 and 3/4 of the values 8 and 16; p = (1/3, 1) is rounded, 8/3 of 44/3 at most.
    q, k = torch.zeros(2, 1, 16), torch.zeros(2, 1, 16)
    q[:, :, 0], k[1, 0, 0] = 1.0, 1.0
    v = torch.tensor([8.0, 16.0])[:, None, None].expand(2, 1, 16)
    q, k, v = (x.to(FORMATS[kv_format]) for x in (q, k, v))
    out = packed_attention(q, k, v, boundaries([2]), torch.log(torch.tensor(3.0)).item(), kv_format)
    roundoff = UNIT_ROUNDOFF[probability_dtype(kv_format)] + 2.0**-22
    torch.testing.assert_close(out[1].float(), torch.full((1, 16), 14.0), rtol=roundoff, atol=0.0)


@every_format
def test_huge_scores_pick_one_key(kv_format):
    q, k, v = qkv(kv_format, 3, num_heads=1, num_kv_heads=1)
    k = torch.eye(3, DH)[:, None].to(k.dtype)
    q = (torch.tensor([[1.0, 0, 0], [1.0, 0, 0], [0, 0, 1.0]]) @ torch.eye(3, DH) * 3e4)[:, None].to(q.dtype)
    out = packed_attention(q, k, v, boundaries([3]), SOFTMAX_SCALE, kv_format)
    assert torch.equal(out, to_grid(store_kv(v, kv_format).decode(), 23)[[0, 0, 2]].to(q.dtype))


def test_fp8_saturates_queries_at_the_end_of_fp16():
    # In BF16 the number 65504 is 65536, which FP16 has not.
    q, k, v = qkv("fp8", 5)
    q[3], q[4] = 1e6, -3e38
    k = k * 1e-6
    got = packed_attention(q, k, v, boundaries([5]), SOFTMAX_SCALE, "fp8")
    k_hat, v_hat = decoded(k, v, "fp8")
    saturated = slow_attention(q.double().clamp(-65504.0, 65504.0), k_hat, v_hat, [5])
    error, floor = relative_error(got, saturated), relative_error(saturated.bfloat16(), saturated)
    assert error <= 1.5 * floor, f"error {error:.3g}, floor {floor:.3g}"
    otherwise = slow_attention(q.double().clamp(-1e6, 1e6), k_hat, v_hat, [5])
    assert relative_error(otherwise, saturated) > 10 * floor


@every_format
def test_a_bad_query_spoils_itself_only(kv_format):
    q, k, v = qkv(kv_format, 9)
    clean = packed_attention(q, k, v, boundaries([9]), SOFTMAX_SCALE, kv_format)
    q[4, 2, 5] = torch.nan
    got = packed_attention(q, k, v, boundaries([9]), SOFTMAX_SCALE, kv_format)
    spoilt = torch.zeros(9, H, dtype=torch.bool)
    spoilt[4, 2] = True
    assert got[spoilt].isnan().all() and torch.equal(got[~spoilt], clean[~spoilt])


@every_format
def test_huge_keys_and_values(kv_format):
    # Powers of two move every scale and grid exactly.
    q, k, v = qkv(kv_format, 40)
    out = packed_attention(q, k, v, boundaries([40]), SOFTMAX_SCALE, kv_format)
    moved = packed_attention(q, k * 2.0**100, v * 2.0**100, boundaries([40]), SOFTMAX_SCALE * 2.0**-100, kv_format)
    assert out.abs().max() > 1.0 and torch.equal(moved, out * 2.0**100)


@every_format
def test_zero_and_empty(kv_format):
    q, k, v = (torch.zeros_like(x) for x in qkv(kv_format, 9))

    def ours(q, k, v):
        return packed_attention(q, k, v, boundaries([9]), SOFTMAX_SCALE, kv_format)

    for x in run(ours, q, k, v, torch.zeros_like(q)):
        assert torch.equal(x, torch.zeros_like(x))
    q, k, v = qkv(kv_format, 9)
    expected = packed_attention(q, k, v, boundaries([4, 5]), SOFTMAX_SCALE, kv_format)
    assert torch.equal(packed_attention(q, k, v, boundaries([0, 4, 0, 5, 0]), SOFTMAX_SCALE, kv_format), expected)
    none = qkv(kv_format, 0)
    assert packed_attention(*none, boundaries([0]), SOFTMAX_SCALE, kv_format).shape == (0, H, DH)
    assert packed_attention(*none, boundaries([]), SOFTMAX_SCALE, kv_format).shape == (0, H, DH)


# Storage.


def test_fp8_storage_has_a_power_of_two_per_token_and_head():
    x = (torch.randn(20, HKV, DH) * 2.0 ** torch.randint(-20, 20, (20, HKV, 1))).bfloat16()
    stored = store_kv(x, "fp8")
    amax = x.abs().amax(dim=2).float()
    assert stored.scale.shape == (20, HKV) and stored.values.dtype == torch.float8_e4m3fn
    assert (torch.frexp(stored.scale).mantissa == 0.5).all()
    assert ((amax <= 448.0 * stored.scale) & (amax > 224.0 * stored.scale)).all()  # rounded up, by less than 2
    exact = stored.values.double() * stored.scale[..., None].double()
    assert exact.abs().max() > 0.0 and torch.equal(stored.decode().double(), exact)
    # Nearest of three mantissa bits, or of the subnormal step 2**-9 * scale.
    error, half_step = (exact - x.double()).abs(), 2.0**-10 * stored.scale[..., None].double()
    assert (error <= torch.maximum(2.0**-4 * x.double().abs(), half_step)).all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_key_spoils_its_token_and_head(bad):
    x = torch.randn(5, HKV, DH).bfloat16()
    clean = store_kv(x, "fp8").decode()
    x[2, 1, 7] = bad
    got = store_kv(x, "fp8").decode()
    expected = torch.zeros(5, HKV, DH, dtype=torch.bool)
    expected[2, 1] = True
    assert torch.equal(got.isnan(), expected) and torch.equal(got[~expected], clean[~expected])


def test_other_formats_keep_their_bits():
    x = torch.randn(4, HKV, DH)
    for kept, kv_format in ((x.bfloat16(), "bf16"), (x, "fp32")):
        stored = store_kv(kept, kv_format)
        assert stored.scale is None and torch.equal(stored.decode(), kept) and stored.decode().dtype == kept.dtype


def test_decode_by_hand():
    values = torch.tensor([[[1.5, -448.0]], [[0.0, 2.0**-9]]]).to(torch.float8_e4m3fn)
    stored = StoredKV(values, torch.tensor([[2.0], [2.0**-60]]))
    assert stored.decode().tolist() == [[[3.0, -896.0]], [[0.0, 2.0**-69]]]


def test_probability_dtype():
    # E4M3 converts to FP16 in one instruction, so q and p are FP16 beside it.
    assert {x: probability_dtype(x) for x in FORMATS} == {
        "fp8": torch.float16,
        "bf16": torch.bfloat16,
        "fp32": torch.float32,
    }
