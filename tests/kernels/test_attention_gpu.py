"""Attention on a GPU: one answer in decode, prefill and training; as good as float64; damage shows."""

import math
import random
from dataclasses import replace
from functools import partial

import pytest
import torch
from attention_checks import (
    assert_same,
    check_bad_values,
    check_damage_is_seen,
    check_every_length,
    check_gathered,
    check_heads,
    check_reference,
    check_same_bits,
    check_spread,
    check_values,
    packed,
    paged,
    problem,
)
from attention_layers import check_cache_equals_packed, check_gradients
from gradient_checks import check_backward, check_backward_alone

from octavo.kernels import attention_gradients
from octavo.kernels.attention import StoredKV
from octavo.kernels.attention_backward import attention_backward
from octavo.kernels.triton_attention import DECODE_ROWS, attention_forward, packed_tiles
from octavo.numerics.error import relative_error

pytestmark = pytest.mark.gpu
SHAPES = {  # H, Hkv, Dh
    "qwen3-8b, llama-3-8b": (32, 8, 128),
    "qwen2.5-0.5b": (14, 2, 64),
    "smollm2-135m": (9, 3, 64),
    "phi-3-mini": (32, 32, 96),
}
LARGE = SHAPES["qwen3-8b, llama-3-8b"]
LONGEST = 4096
every_shape = pytest.mark.parametrize("heads", SHAPES.values(), ids=list(SHAPES))
every_format = pytest.mark.parametrize("kv_format", ["bf16", "fp8"])


def on_gpu(lengths, heads, kv_format):
    return problem(lengths, heads, kv_format, page_size=16, device="cuda")


@every_format
@every_shape
def test_every_length_in_every_batch(heads, kv_format):
    """Lengths 1 to 4,096, each some times, in batches of 1 to 256."""
    left, batches = [], []
    for size in range(1, 257):
        if len(left) < size:
            left += random.sample(range(LONGEST), LONGEST)
        batches.append([left.pop() for _ in range(size)])
    assert {position for batch in batches for position in batch} == set(range(LONGEST))
    check_every_length(on_gpu([LONGEST, 65, 1], heads, kv_format), batches)


@every_format
@every_shape
def test_one_answer(heads, kv_format):
    """256 sequences of any length, packed, prefilled whole and by chunks, decoded together and alone."""
    lengths = [int(math.exp(random.uniform(0.0, math.log(LONGEST)))) for _ in range(254)]
    check_same_bits(on_gpu([LONGEST, *lengths, 1], heads, kv_format), chunks=(1, 64, 1000))


@every_format
def test_one_answer_for_four_long_sequences(kv_format):
    check_same_bits(on_gpu([8192, 8191, 8000, 8192], LARGE, kv_format), chunks=(4000,))


@every_format
@every_shape
def test_few_sequences_spread(heads, kv_format):
    lengths = [8192, 1, 64, 65, 4000, 300]
    p = on_gpu(lengths, heads, kv_format)
    check_spread(p, [n - 1 for n in lengths])
    check_spread(p, [8000, 0, 63, 63, 3999, 128])


@every_format
def test_one_answer_for_tiles_of_any_height(kv_format):
    check_same_bits(on_gpu([1500, 64, 7], LARGE, kv_format), rows=(16, 64, 128))


@every_format
@every_shape
def test_a_sequence_does_not_depend_on_its_neighbours(heads, kv_format):
    lengths = [300, 2000, 1, 77]
    p = on_gpu(lengths, heads, kv_format)
    wanted, starts = packed(p), p.boundaries.tolist()
    for start, length in zip(starts, lengths, strict=False):
        rows = slice(start, start + length)
        k, v = (replace(x, values=x.values[rows], scale=None if x.scale is None else x.scale[rows]) for x in (p.k, p.v))
        assert_same(packed(replace(p, q=p.q[rows], k=k, v=v, lengths=[length])), wanted, rows, f"alone, {length}")


@every_format
def test_pages_beyond_what_32_bits_count(kv_format):
    p = on_gpu([500, 30], LARGE, kv_format)
    slots = 2**31 // p.k.values[0].numel() + len(p.pages_k.values)
    far = []
    for near in (p.pages_k, p.pages_v):
        values = torch.empty(slots, *near.values.shape[1:], dtype=near.values.dtype, device="cuda")
        values[-len(near.values) :].copy_(near.values)
        scale = None if near.scale is None else torch.empty(slots, near.scale.shape[1], device="cuda")
        if scale is not None:
            scale[-len(near.values) :].copy_(near.scale)
        far.append(StoredKV(values, scale))
    assert (slots - len(p.pages_k.values)) % p.page_size == 0
    table = p.table + (slots - len(p.pages_k.values)) // p.page_size
    *found, index = paged(replace(p, pages_k=far[0], pages_v=far[1], table=table), [499, 29], DECODE_ROWS)
    assert_same(found, packed(p), index, "decode from far pages")


@every_format
@every_shape
def test_values_equal_float64(heads, kv_format):
    check_values(on_gpu([1000, 333, 1], heads, kv_format), kv_format)


@every_format
def test_values_equal_the_reference(kv_format):
    check_reference(on_gpu([150, 70], SHAPES["qwen2.5-0.5b"], kv_format), kv_format)


@every_format
@every_shape
def test_one_byte_one_scale_and_one_page_show(heads, kv_format):
    check_damage_is_seen(on_gpu([200, 100], heads, kv_format))


@every_format
def test_what_is_not_finite_stays_with_its_sequence(kv_format):
    check_bad_values(on_gpu([200, 100], LARGE, kv_format))


@every_shape
def test_gradients_equal_float64(heads):
    check_backward([1000, 64, 1, 0, 513], heads, device="cuda")


RAGGED = [1000, 63, 64, 65, 0, 127, 128, 129, 191, 1, 513]
GROUPS = {"1": (4, 4, 128), "3": (9, 3, 64), "4": (32, 8, 128), "7": (14, 2, 64), "7 of 128": (7, 1, 128)}
every_group = pytest.mark.parametrize("heads", GROUPS.values(), ids=list(GROUPS))


@every_group
def test_gradients_in_gluon_equal_float64(heads):
    check_backward(RAGGED, heads, "gluon", "cuda")


@pytest.mark.parametrize("lengths", [[1], [63], [64], [65], [127], [128], [129], [1000], [4096, 1, 4095]], ids=str)
def test_gradients_in_gluon_of_any_length(lengths):
    check_backward(lengths, (8, 2, 128), "gluon", "cuda")


@pytest.mark.parametrize("back_end", ["gluon", "triton"])
@every_group
def test_gradients_do_not_depend_on_neighbours(heads, back_end):
    check_backward_alone(RAGGED, heads, back_end, "cuda")


@every_group
def test_gradients_in_gluon_read_nothing_unwritten_and_write_all(heads, monkeypatch):
    """Neither results nor blocks of scores start from zeros; heads go in one launch or one after another."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *shape, **options: empty(*shape, **options).fill_(torch.nan))
    monkeypatch.setattr(torch, "empty_like", lambda x: empty_like(x).fill_(torch.nan))
    check_backward_alone([300, 64, 1, 129], heads, "gluon", "cuda")
    monkeypatch.setattr(attention_gradients, "MAX_BLOCK_BYTES", 1)
    check_backward_alone([300, 64, 1, 129], heads, "gluon", "cuda")


@pytest.mark.parametrize("heads", [(32, 8, 128), (14, 2, 64)], ids=["128", "64"])
def test_gradients_in_gluon_have_the_same_bits_every_time(heads):
    (H, Hkv, Dh), lengths = heads, [8192, 2048, 777, 5]
    q, k, v, d_out = (torch.randn(sum(lengths), n, Dh, device="cuda").bfloat16() for n in (H, Hkv, Hkv, H))
    edges = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    tiles = packed_tiles(edges, len(q), H // Hkv, Dh)
    out, logsumexp = attention_forward(q, k, v, None, None, tiles.forward, Dh**-0.5)
    run = partial(attention_backward, d_out, q, k, v, out, logsumexp, edges, tiles, Dh**-0.5)
    wanted = run("gluon")
    for name, ours, theirs in zip("qkv", wanted, run("triton"), strict=True):
        error = relative_error(ours, theirs)
        assert theirs.abs().max() > 0.1 and error < 2.0**-7, f"{name}: {error:.3g} from triton"
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run("gluon"), wanted, strict=True))


@pytest.mark.parametrize("back_end", ["flash", "cudnn"])
@pytest.mark.parametrize("shape", ["qwen3-8b, llama-3-8b", "qwen2.5-0.5b"])
def test_gradients_of_other_back_ends_equal_float64(shape, back_end):
    check_backward([1000, 64, 0, 513], SHAPES[shape], back_end, "cuda")


@every_format
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("shape", ["qwen3-8b, llama-3-8b", "qwen2.5-0.5b", "phi-3-mini"])
def test_heads_have_the_bits_of_a_cpu(shape, normed, kv_format):
    check_heads(200, SHAPES[shape], kv_format, normed, "cuda")
    check_gathered(77, SHAPES[shape], kv_format, "cuda")


@every_format
@every_shape
def test_pages_equal_a_packed_batch(heads, kv_format):
    check_cache_equals_packed(kv_format, [1000, 1, 2, 64, 333], heads, "cuda")


@every_format
@pytest.mark.parametrize("back_end", [None, "triton"])
@pytest.mark.parametrize("shape", ["qwen3-8b, llama-3-8b", "smollm2-135m"])
def test_gradients_of_what_was_projected(shape, back_end, kv_format):
    check_gradients(kv_format, [300, 3, 70], SHAPES[shape], back_end, "cuda")
