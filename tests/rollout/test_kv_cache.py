"""Pages, reference counts, and what comes back out of the cache."""

import random

import pytest
import torch
from tiny_models import tiny_config

from octavo.kernels.attention import packed_attention, store_kv
from octavo.kernels.heads import no_transform
from octavo.models.config import decoder_config
from octavo.numerics.fp8 import E4M3
from octavo.rollout.kv_cache import KVCache, PageAllocator, PagedAttention

LAYERS, HKV, DH, H = 2, 2, 32, 4
DTYPES = {"fp8": torch.bfloat16, "bf16": torch.bfloat16, "fp32": torch.float32}


def make_cache(kv_format, num_pages=11, page_size=4):
    return KVCache(decoder_config(tiny_config("llama")), num_pages, page_size, kv_format)


def write(cache, layer, slots, k, v):
    cache.write(layer, slots, torch.zeros(len(k), H, DH, dtype=k.dtype), k, v, no_transform(len(k), DH))


def attend(context, q, k, v):
    return context.attend(1, q, k, v, no_transform(len(q), DH), DH**-0.5)


def as_bytes(x):
    return x.contiguous().view(torch.uint8)


def random_kv(kv_format, count):
    # Heads and tokens of very different size, or one scale for all of them would do.
    spread = torch.exp2(torch.randint(-6, 7, (count, HKV, 1)).float())
    return tuple((torch.randn(count, HKV, DH) * spread).to(DTYPES[kv_format]) for _ in "kv")


# The allocator.


def test_pages_are_handed_out_once():
    allocator = PageAllocator(5)
    first, second = allocator.allocate(2), allocator.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert allocator.num_free == 0
    assert allocator.allocate(0) == []
    with pytest.raises(AssertionError, match="1 pages wanted, 0 free"):
        allocator.allocate(1)


def test_a_shared_page_is_free_after_its_last_holder():
    allocator = PageAllocator(3)
    pages = allocator.allocate(2)
    allocator.share(pages)
    allocator.share(pages[:1])
    allocator.release(pages)
    assert allocator.num_free == 1
    allocator.release(pages)
    assert allocator.num_free == 2  # pages[1]; pages[0] has one holder left
    allocator.release(pages[:1])
    assert allocator.num_free == 3
    assert sorted(allocator.allocate(3)) == [0, 1, 2]


def test_a_free_page_is_neither_released_nor_shared():
    allocator = PageAllocator(2)
    (page,) = allocator.allocate(1)
    allocator.release([page])
    with pytest.raises(AssertionError, match=f"page {page} released twice"):
        allocator.release([page])
    with pytest.raises(AssertionError, match=f"page {page} is free"):
        allocator.share([page])
    assert allocator.num_free == 2


# Storage.


@pytest.mark.parametrize("kv_format", DTYPES)
def test_what_is_read_is_what_was_quantised(kv_format):
    cache = make_cache(kv_format)
    slots = torch.tensor([43, 0, 17, 18, 5, 30])  # any order, any page
    for layer in range(LAYERS):
        k, v = random_kv(kv_format, len(slots))
        write(cache, layer, slots, k, v)
        k_hat, v_hat = cache.read(layer, slots.view(2, 3))
        for x, hat in ((k, k_hat), (v, v_hat)):
            assert hat.dtype == DTYPES[kv_format]
            assert torch.equal(hat.view(x.shape), store_kv(x, kv_format).decode())
            assert torch.equal(hat.view(x.shape), x) == (kv_format != "fp8")
            error = ((hat.view(x.shape) - x).float().norm() / x.float().norm()).item()
            assert error < 0.05
        if kv_format == "fp8":
            assert not torch.equal(k_hat.view(v.shape), v_hat.view(v.shape))


@pytest.mark.parametrize("kv_format", DTYPES)
def test_a_write_touches_its_own_slots_and_layer_only(kv_format):
    cache = make_cache(kv_format)
    everything = torch.arange(44)
    contents = [random_kv(kv_format, 44) for _ in range(LAYERS)]
    for layer, (k, v) in enumerate(contents):
        write(cache, layer, everything, k, v)
    before = [[x.clone() for x in cache.read(layer, everything[None])] for layer in range(LAYERS)]
    write(cache, 1, torch.tensor([9, 40]), *random_kv(kv_format, 2))
    after = [cache.read(layer, everything[None]) for layer in range(LAYERS)]
    for layer in range(LAYERS):
        for old, new in zip(before[layer], after[layer], strict=True):
            changed = (old != new).flatten(2).any(dim=2)[0].nonzero().flatten().tolist()
            assert changed == ([9, 40] if layer == 1 else [])


def test_fp8_keeps_one_power_of_two_scale_per_token_and_head():
    cache = make_cache("fp8")
    k, v = random_kv("fp8", 6)
    write(cache, 0, torch.arange(6), k, v)
    assert cache.k.dtype == cache.v.dtype == E4M3
    for x, scale in ((k, cache.k_scale), (v, cache.v_scale)):
        largest = x.float().abs().amax(dim=-1)
        got = scale[0, :6]
        assert torch.equal(torch.exp2(torch.log2(got).round()), got)
        assert (largest <= 448.0 * got).all() and (largest > 224.0 * got).all()
        assert got.unique().numel() > 4
    assert (cache.k_scale[1] == 1.0).all(), "the other layer is untouched"


# The page table.


def random_batch(rng, page_size, num_pages):
    """Sequences in distinct, shuffled pages, each with some tokens stored and some new."""
    pages = list(range(num_pages))
    rng.shuffle(pages)
    batch = []
    for _ in range(4):
        stored, new = rng.choice([0, rng.randint(1, 90)]), rng.choice([1, rng.randint(2, 70)])
        count = -(-(stored + new) // page_size)
        batch.append((stored, new, [pages.pop() for _ in range(count)]))
    return batch


@pytest.mark.parametrize("kv_format", DTYPES)
@pytest.mark.parametrize("page_size", [1, 4, 7, 64])
def test_paged_attention_equals_packed_attention_bit_for_bit(kv_format, page_size):
    rng = random.Random(page_size)
    num_pages = 4 * (160 // page_size + 2)
    cache = make_cache(kv_format, num_pages, page_size)
    # What lies in unused slots must not matter, NaN least of all.
    for x in (cache.k, cache.v):
        as_bytes(x).fill_(0xFF)
    for scale in (cache.k_scale, cache.v_scale):
        if scale is not None:
            scale.fill_(torch.nan)
    batch = random_batch(rng, page_size, num_pages)
    lengths = [stored + new for stored, new, _ in batch]
    q = torch.randn(sum(lengths), H, DH).to(DTYPES[kv_format])
    k, v = random_kv(kv_format, sum(lengths))
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    wanted = packed_attention(q, k, v, cu_seqlens, DH**-0.5, kv_format)

    longest = max(len(pages) for _, _, pages in batch)
    table = torch.tensor([pages + [0] * (longest - len(pages)) for _, _, pages in batch])
    for row, (stored, _, _) in enumerate(batch):
        if stored:
            context = PagedAttention(cache, table[row : row + 1], [0], [stored])
            rows = slice(int(cu_seqlens[row]), int(cu_seqlens[row]) + stored)
            assert torch.equal(attend(context, q[rows], k[rows], v[rows]), wanted[rows])
    context = PagedAttention(cache, table, [stored for stored, _, _ in batch], [new for _, new, _ in batch])
    new_rows = torch.cat(
        [torch.arange(int(cu_seqlens[i]) + stored, int(cu_seqlens[i + 1])) for i, (stored, _, _) in enumerate(batch)]
    )
    out = attend(context, q[new_rows], k[new_rows], v[new_rows])
    assert torch.isfinite(wanted).all() and wanted.abs().max() > 0.1
    assert torch.equal(out, wanted[new_rows])
    wanted_positions = [p for stored, new, _ in batch for p in range(stored, stored + new)]
    assert context.positions.tolist() == wanted_positions
    wanted_slots = [
        pages[p // page_size] * page_size + p % page_size
        for stored, new, pages in batch
        for p in range(stored, stored + new)
    ]
    assert context.slot_mapping.tolist() == wanted_slots
