"""Packed attention against float64 on the keys and values it decodes, and the same bits in every layout."""

import pytest
import torch
from attention_reference import (
    DH,
    FORMATS,
    HKV,
    LENGTHS,
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

from octavo.kernels import attention
from octavo.kernels.attention import attend, packed_attention, probability_dtype, store_kv
from octavo.numerics.error import relative_error
from octavo.numerics.exact import product_bits, to_grid


@pytest.mark.parametrize("num_heads, num_kv_heads, head_dim", [(H, HKV, DH), (4, 4, 64), (3, 1, 16)])
@every_format
def test_forward_within_the_bound_of_float64(kv_format, num_heads, num_kv_heads, head_dim):
    q, k, v = qkv(kv_format, sum(LENGTHS), num_heads, num_kv_heads, head_dim)
    k_hat, v_hat = decoded(k, v, kv_format)
    expected = slow_attention(q.double(), k_hat, v_hat, LENGTHS)
    got = packed_attention(q, k, v, boundaries(LENGTHS), SOFTMAX_SCALE, kv_format)
    # A score is off by the grids of q and k and four roundings to FP32; p by that, by exp and by its own rounding; the
    # grids of p and V^, and p that FP16 cannot hold, by 2**-22 of the largest V^ a key.
    q_sum, k_sum = (x.double().abs().sum(dim=-1).max() for x in (q, k_hat))
    grid = 2.0 ** -product_bits(head_dim) * (q.double().abs().max() * k_sum + k_hat.abs().max() * q_sum) * SOFTMAX_SCALE
    largest_score = q.double().norm(dim=-1).max() * k_hat.norm(dim=-1).max() * SOFTMAX_SCALE
    score_error = grid + 4 * 2.0**-24 * 2 * largest_score
    p_roundoff = UNIT_ROUNDOFF[probability_dtype(kv_format)]
    bound = (2 * score_error + 2.0**-22 + p_roundoff) * slow_attention(q.double(), k_hat, v_hat.abs(), LENGTHS)
    bound += max(LENGTHS) * 2.0**-22 * v_hat.abs().max()
    bound += UNIT_ROUNDOFF[q.dtype] * (expected.abs() + bound)
    error = (got.double() - expected).abs()
    assert got.dtype == q.dtype and expected.abs().max() > 1.0
    assert (error <= bound).all(), f"{(error / bound).max():.2f} times the bound"


@every_format
def test_forward_is_as_good_as_its_formats(kv_format):
    # Floor: float64 with the two roundings that the format asks for, of p and of the output. For fp32: plain FP32 on
    # values rounded to the 23 bits of their grid.
    q, k, v = qkv(kv_format, sum(LENGTHS))
    k_hat, v_hat = decoded(k, v, kv_format)
    expected = slow_attention(q.double(), k_hat, v_hat, LENGTHS)
    if kv_format == "fp32":
        floor = relative_error(slow_attention(*(to_grid(x, 23).float() for x in (q, k, v)), LENGTHS), expected)
    else:
        rounded = slow_attention(q.double(), k_hat, v_hat, LENGTHS, p_dtype=probability_dtype(kv_format))
        floor = relative_error(rounded.to(q.dtype), expected)
    error = relative_error(packed_attention(q, k, v, boundaries(LENGTHS), SOFTMAX_SCALE, kv_format), expected)
    assert error <= (1.5 if kv_format == "fp32" else 1.01) * floor, f"error {error:.3g}, floor {floor:.3g}"


@pytest.mark.parametrize("kv_format", ["fp8", "bf16"])
def test_p_is_rounded_above_the_fraction_line_only(kv_format):
    # Part of the definition, as the kernels of both sides must agree on it. A rounding that goes another way than here
    # (a score in FP32, a tie) changes few elements; leaving one out, or one too many, changes many.
    q, k, v = qkv(kv_format, sum(LENGTHS))
    q, k_hat, v_hat = q.double(), *decoded(k, v, kv_format)
    p_dtype = probability_dtype(kv_format)
    got = packed_attention(q.bfloat16(), k, v, boundaries(LENGTHS), SOFTMAX_SCALE, kv_format)
    differ = {}
    for name, above, below in (("as defined", p_dtype, None), ("no", None, None), ("both", p_dtype, p_dtype)):
        expected = slow_attention(q, k_hat, v_hat, LENGTHS, p_dtype=above, sum_dtype=below)
        differ[name] = (got != expected.bfloat16()).double().mean().item()
    assert 10 * differ["as defined"] < min(differ["no"], differ["both"]), differ


def test_fp8_error_is_that_of_the_stored_keys_and_values():
    # Against the keys and values before they are stored: 1.5 times what storing them does to exact attention.
    q, k, v = qkv("fp8", sum(LENGTHS))
    truth = slow_attention(q.double(), k.double(), v.double(), LENGTHS)
    floor = relative_error(slow_attention(q.double(), *decoded(k, v, "fp8"), LENGTHS), truth)
    error = relative_error(packed_attention(q, k, v, boundaries(LENGTHS), SOFTMAX_SCALE, "fp8"), truth)
    assert 0.01 < floor and error <= 1.5 * floor, f"error {error:.4f}, floor {floor:.4f}"


@pytest.mark.parametrize("num_heads, num_kv_heads", [(H, HKV), (2, 2), (3, 1)])
@every_format
def test_gradients_equal_float64_on_decoded_keys_and_values(kv_format, num_heads, num_kv_heads):
    # Straight through: the gradients of K^ and V^ are those of k and v.
    q, k, v = qkv(kv_format, sum(LENGTHS), num_heads, num_kv_heads)
    grad_out = torch.randn(q.shape).to(q.dtype)
    k_hat, v_hat = decoded(k, v, kv_format)

    def ours(q, k, v):
        return packed_attention(q, k, v, boundaries(LENGTHS), SOFTMAX_SCALE, kv_format)

    def slow(q, k, v):
        return slow_attention(q, k, v, LENGTHS)

    out, *got = run(ours, q, k, v, grad_out)
    exact_out, *exact = run(slow, q.double(), k_hat, v_hat, grad_out.double())
    # Floor: the backward pass takes rowsum(d_out * out) of the rounded output, and rounds what it gives. An error d of
    # that sum adds -d p to the gradient of the scores, which is that of -d logsumexp(scores).
    leaves = [x.clone().requires_grad_() for x in (q.double(), k_hat, v_hat)]
    weights = -((out.double() - exact_out) * grad_out.double()).sum(dim=-1)
    y, weighted = slow_attention(*leaves, LENGTHS, row_weights=weights)
    ((y * grad_out.double()).sum() + weighted).backward()
    floors = [relative_error(x.grad.to(q.dtype), truth) for x, truth in zip(leaves, exact, strict=True)]
    margin = 1.01
    if kv_format == "fp32":  # where the noise of an FP32 backward pass shows too: that of autograd
        plain = run(slow, q, k, v, grad_out)[1:]
        floors = [x + relative_error(y, truth) for x, y, truth in zip(floors, plain, exact, strict=True)]
        margin = 1.5
    for name, x, floor, truth in zip("qkv", got, floors, exact, strict=True):
        error = relative_error(x, truth)
        assert truth.abs().max() > 0.1 and x.dtype == q.dtype
        assert error <= margin * floor, f"{name}: error {error:.3g}, floor {floor:.3g}"


@every_format
def test_gradients_of_sequences_do_not_mix(kv_format):
    q, k, v = qkv(kv_format, 50)
    grad_out = torch.zeros_like(q)
    grad_out[20:] = 1.0  # only the second sequence is in the loss

    def ours(q, k, v):
        return packed_attention(q, k, v, boundaries([20, 30]), SOFTMAX_SCALE, kv_format)

    for grad in run(ours, q, k, v, grad_out)[1:]:
        assert torch.equal(grad[:20], torch.zeros_like(grad[:20]))
        assert grad[21:].abs().amax(dim=(1, 2)).min() > 0.0  # the first query has no choice, so no gradient


# The same bits in every layout.


@every_format
def test_a_sequence_does_not_depend_on_its_pack(kv_format):
    q, k, v = qkv(kv_format, sum(LENGTHS))
    packed = packed_attention(q, k, v, boundaries(LENGTHS), SOFTMAX_SCALE, kv_format)
    assert packed.abs().max() > 1.0
    pieces = zip(*(x.split(LENGTHS) for x in (packed, q, k, v)), strict=True)
    for expected, q_n, k_n, v_n in pieces:
        alone = packed_attention(q_n, k_n, v_n, boundaries([len(q_n)]), SOFTMAX_SCALE, kv_format)
        assert torch.equal(alone, expected)
    order = [3, 0, 4, 2, 1]
    moved = [torch.cat([x.split(LENGTHS)[n] for n in order]) for x in (q, k, v, packed)]
    lengths = [LENGTHS[n] for n in order]
    assert torch.equal(packed_attention(*moved[:3], boundaries(lengths), SOFTMAX_SCALE, kv_format), moved[3])


@pytest.mark.parametrize("max_scores", [1, 2 * H * 70 * 70, 3 * H * 130 * 130])
@every_format
def test_chunks_change_nothing(kv_format, max_scores, monkeypatch):
    q, k, v = qkv(kv_format, sum(LENGTHS))
    grad_out = torch.randn(q.shape).to(q.dtype)

    def ours(q, k, v):
        return packed_attention(q, k, v, boundaries(LENGTHS), SOFTMAX_SCALE, kv_format)

    whole = run(ours, q, k, v, grad_out)
    monkeypatch.setattr(attention, "MAX_SCORES_PER_CHUNK", max_scores)
    chunked = run(ours, q, k, v, grad_out)
    assert len(list(attention._chunks(boundaries(LENGTHS), H))) > 1
    assert torch.equal(chunked[0], whole[0])

    # The backward pass is FP32 in whatever order the matrix library likes: as exact as before, not the same bits.
    def slow(q, k, v):
        return slow_attention(q, k, v, LENGTHS)

    exact = run(slow, q.double(), *decoded(k, v, kv_format), grad_out.double())
    for got, before, truth in zip(chunked[1:], whole[1:], exact[1:], strict=True):
        error, floor = relative_error(got, truth), relative_error(before, truth)
        assert error <= 1.1 * floor, f"error {error:.3g}, in one chunk {floor:.3g}"


@pytest.mark.parametrize("garbage", [0.0, 3e38, -3e38, torch.inf, torch.nan])
@every_format
def test_decode_and_chunked_prefill_equal_training(kv_format, garbage):
    # A cache of 192 slots, whatever lies beyond the sequence; one query at a time, 7 at a time, all at once.
    T, slots = 133, 192
    q, k, v = qkv(kv_format, T)
    trained = packed_attention(q, k, v, boundaries([T]), SOFTMAX_SCALE, kv_format)
    cache = []
    for x in (k, v):
        hat = store_kv(x, kv_format).decode()
        cache.append(torch.cat([hat, torch.full((slots - T, HKV, DH), garbage, dtype=hat.dtype)]))
    for step in (1, 7, T):
        rows = []
        for start in range(0, T, step):
            stop = min(start + step, T)
            seen = [x.clone() for x in cache]
            for x in seen:
                x[stop:] = garbage  # not written yet
            positions = torch.arange(start, stop)[None]
            rows.append(
                attend(
                    q[None, start:stop],
                    seen[0][None],
                    seen[1][None],
                    positions,
                    SOFTMAX_SCALE,
                    probability_dtype(kv_format),
                )[0]
            )
        assert torch.equal(torch.cat(rows), trained), f"{step} queries at a time"


@pytest.mark.parametrize("later", [1e30, torch.nan])
@every_format
def test_a_query_sees_nothing_later(kv_format, later):
    # In one call: what a later query of the same sequence sees must not reach an earlier one, not even as 0 * NaN.
    q, k, v = qkv(kv_format, 100)
    before = packed_attention(q, k, v, boundaries([100]), SOFTMAX_SCALE, kv_format)
    for name, x in (("k", k), ("v", v)):
        changed = {"k": k, "v": v, name: x.clone()}
        changed[name][66:] = later
        after = packed_attention(q, changed["k"], changed["v"], boundaries([100]), SOFTMAX_SCALE, kv_format)
        assert torch.equal(after[:66], before[:66]), name
        assert not torch.equal(after[66:], before[66:])


@every_format
def test_a_bad_key_or_value_is_seen_by_its_head_and_no_other(kv_format):
    for which in (1, 2):
        inputs = qkv(kv_format, 60)
        clean = packed_attention(*inputs, boundaries([40, 20]), SOFTMAX_SCALE, kv_format)
        inputs[which][10, 1, 3] = torch.nan  # token 10 of the first sequence, the second KV head
        got = packed_attention(*inputs, boundaries([40, 20]), SOFTMAX_SCALE, kv_format)
        spoilt = torch.zeros(60, H, dtype=torch.bool)
        spoilt[10:40, H // HKV :] = True
        assert torch.equal(got.isnan(), spoilt[..., None].expand(60, H, DH))
        assert torch.equal(got[~spoilt], clean[~spoilt])


@every_format
def test_threads_change_nothing(kv_format):
    q, k, v = qkv(kv_format, sum(LENGTHS))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single = packed_attention(q, k, v, boundaries(LENGTHS), SOFTMAX_SCALE, kv_format)
        torch.set_num_threads(2)
        assert torch.equal(packed_attention(q, k, v, boundaries(LENGTHS), SOFTMAX_SCALE, kv_format), single)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("kv_format", ["bf16", "fp32"])
def test_scores_in_any_order(kv_format):
    # Huge terms that cancel, in pairs that the order separates: a sum that rounded in between would leave a part of
    # 2**-53 of them in the score, which then picks a key at random.
    q, k, v = qkv(kv_format, 70)
    q, k = (x * 2.0 ** torch.randint(30, 60, x.shape) for x in (q, k))
    q[..., 1::2], k[..., 1::2] = q[..., ::2], -k[..., ::2]
    q, k = q.to(v.dtype), k.to(v.dtype)
    whole = packed_attention(q, k, v, boundaries([70]), SOFTMAX_SCALE, kv_format)
    for _ in range(10):
        order = torch.randperm(DH)
        assert torch.equal(
            packed_attention(q[..., order], k[..., order], v, boundaries([70]), SOFTMAX_SCALE, kv_format), whole
        )
    average = v.double().cumsum(dim=0) / torch.arange(1.0, 71.0)[:, None, None]
    expected = average.repeat_interleave(H // HKV, dim=1)
    floor = relative_error(to_grid(expected, 23).to(q.dtype), expected)
    assert relative_error(whole, expected) <= 1.5 * floor


def test_weighted_values_in_any_order():
    # In float64, before the output's rounding could hide it. Order within a block of 64 keys is free.
    p = torch.exp(-28.0 * torch.rand(1, HKV, 5, 100)).half()
    v = torch.randn(1, 100, HKV, DH) * 2.0 ** torch.randint(-20, 20, (1, 100, HKV, 1))
    whole = attention._weighted_values(p, v)
    assert whole.abs().min() > 0.0
    for _ in range(20):
        order = torch.cat([torch.randperm(64), 64 + torch.randperm(36)])
        assert torch.equal(attention._weighted_values(p[..., order], v[:, order]), whole)
    assert torch.equal(attention._weighted_values(p[:, :, 3:4], v), whole[:, :, 3:4])
    blocks = [attention._weighted_values(p[..., keys], v[:, keys]) for keys in (slice(0, 64), slice(64, 100))]
    assert torch.equal(blocks[0] + blocks[1], whole)


@every_format
def test_strided_inputs(kv_format):
    # q, k and v as views of one fused projection, and a gradient that is expanded.
    fused = torch.randn(50, (H + 2 * HKV) * DH).to(FORMATS[kv_format])
    views = [x.unflatten(1, (-1, DH)) for x in fused.split([H * DH, HKV * DH, HKV * DH], dim=1)]
    grad_out = torch.ones(1, 1, 1, dtype=fused.dtype)

    def ours(q, k, v):
        return packed_attention(q, k, v, boundaries([20, 30]), SOFTMAX_SCALE, kv_format)

    leaf = fused.clone().requires_grad_()
    out = ours(*(x.unflatten(1, (-1, DH)) for x in leaf.split([H * DH, HKV * DH, HKV * DH], dim=1)))
    out.backward(grad_out.expand_as(out))
    expected = run(ours, *(x.contiguous() for x in views), grad_out.expand(50, H, DH).contiguous())
    assert torch.equal(out, expected[0])
    assert torch.equal(leaf.grad, torch.cat([x.flatten(1) for x in expected[1:]], dim=1))
