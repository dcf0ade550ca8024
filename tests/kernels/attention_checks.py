"""Checks of the kernels of attention that hold in Triton's interpreter and on a GPU."""

from dataclasses import dataclass, replace
from unittest import mock

import torch

from octavo.kernels.attention import StoredKV, attend, probability_dtype, store_kv
from octavo.kernels.attention_kernels import LOG2_E
from octavo.kernels.cast import cast_1x128
from octavo.kernels.decode_attention import decode_attention
from octavo.kernels.heads import HeadTransform, empty_kv, gathered, rotate, rotate_back, write_heads
from octavo.kernels.spread_attention import spread_attention, workspace_bytes
from octavo.kernels.triton_attention import (
    DECODE_ROWS,
    PREFILL_ROWS,
    attention_forward,
    decode_tiles,
    decodes_fp8,
    packed_rows,
    tiles_of,
)
from octavo.numerics.error import relative_error
from octavo.numerics.exact import mean_square

NORM_EPS = 1e-6


@dataclass(frozen=True, eq=False)
class Problem:
    """Sequences, some keys of which are stored, in pages and packed."""

    q: torch.Tensor
    """[T, H, Dh] of every token."""
    k: StoredKV
    """Packed, [T, Hkv, Dh]."""
    v: StoredKV
    lengths: list[int]
    pages_k: StoredKV
    """By slot."""
    pages_v: StoredKV
    table: torch.Tensor
    """[N, pages]."""
    page_size: int

    @property
    def softmax_scale(self):
        return self.q.shape[2] ** -0.5

    @property
    def boundaries(self):
        return torch.tensor([0, *self.lengths], device=self.q.device).cumsum(0)

    @property
    def group(self):
        return self.q.shape[1] // self.k.values.shape[1]


def problem(lengths, heads, kv_format, page_size, device="cpu"):
    """Random heads (H, Hkv, Dh); values of very different size; pages in random order, garbage in unused slots."""
    (H, Hkv, Dh), T = heads, sum(lengths)
    spread = torch.exp2(torch.randint(-6, 7, (T, Hkv, 1), device=device).float())
    q = torch.randn(T, H, Dh, device=device).bfloat16()
    k = store_kv(torch.randn(T, Hkv, Dh, device=device).bfloat16(), kv_format)
    v = store_kv((torch.randn(T, Hkv, Dh, device=device) * spread).bfloat16(), kv_format)
    counts = [-(-length // page_size) for length in lengths]
    pages = torch.randperm(sum(counts), device=device).split(counts)
    table = torch.zeros(len(lengths), max(counts), dtype=torch.int64, device=device)
    slots = []
    for row, (own, length) in enumerate(zip(pages, lengths, strict=True)):
        table[row, : len(own)] = own
        position = torch.arange(length, device=device)
        slots.append(own[position // page_size] * page_size + position % page_size)
    slots, size = torch.cat(slots), sum(counts) * page_size
    paged = []
    for stored in (k, v):
        values = torch.full((size, *stored.values.shape[1:]), 448.0, device=device).to(stored.values.dtype)
        values.view(torch.int8 if stored.scale is not None else torch.int16)[slots] = stored.values.view(
            torch.int8 if stored.scale is not None else torch.int16
        )
        scale = None
        if stored.scale is not None:
            scale = torch.full((size, Hkv), 2.0**30, device=device)
            scale[slots] = stored.scale
        paged.append(StoredKV(values, scale))
    return Problem(q, k, v, list(lengths), *paged, table, page_size)


def packed(p, rows=PREFILL_ROWS):
    """Output and logsumexp of every token, as in training."""
    tiles = tiles_of(p.boundaries, None, len(p.q), p.group, rows)
    return attention_forward(p.q, p.k.values, p.v.values, p.k.scale, p.v.scale, tiles, p.softmax_scale)


def paged(p, first, rows, sequences=None):
    """Output and logsumexp of the queries from `first` on, of some sequences, as in the engine; and their packed rows.

    Args:
        first: position of each sequence's first query.
        rows: of a tile.
    """
    sequences = range(len(p.lengths)) if sequences is None else sequences
    starts = p.boundaries.tolist()
    index = torch.cat([torch.arange(starts[n] + first[n], starts[n] + p.lengths[n]) for n in sequences])
    index = index.to(p.q.device)
    counts = torch.tensor([0, *(p.lengths[n] - first[n] for n in sequences)], device=p.q.device)
    tiles = tiles_of(
        counts.cumsum(0), torch.tensor([first[n] for n in sequences], device=p.q.device), len(index), p.group, rows
    )
    k, v, table = p.pages_k, p.pages_v, p.table[list(sequences)]
    out = attention_forward(
        p.q[index].contiguous(), k.values, v.values, k.scale, v.scale, tiles, p.softmax_scale, table, p.page_size
    )
    return *out, index


def widened(stored):
    """Codes as FP16, which kernels of many queries take."""
    return stored if stored.scale is None else StoredKV(stored.values.half(), stored.scale)


def apart(p, first, rows):
    """Output and logsumexp of the queries from `first` on over packed keys, in another order; and their packed rows."""
    pieces, order = everyones(p), list(reversed(range(len(p.lengths))))
    index = torch.cat([piece[min(first, len(piece) - 1) :] for piece in pieces])
    firsts = torch.tensor([min(first, n - 1) for n in p.lengths], device=p.q.device)
    lengths = torch.tensor(p.lengths, device=p.q.device)
    boundaries = torch.nn.functional.pad((lengths - firsts).cumsum(0), (1, 0))
    tiles = tiles_of(boundaries, firsts, len(index), p.group, rows)
    keys = torch.cat([pieces[n] for n in order])
    starts = torch.empty_like(lengths)
    starts[order] = torch.nn.functional.pad(lengths[order].cumsum(0), (1, 0))[:-1]
    stored = [None if x is None else x[keys] for x in (p.k.values, p.v.values, p.k.scale, p.v.scale)]
    out = attention_forward(p.q[index], *stored, tiles, p.softmax_scale, key_starts=starts)
    return *out, index


def everyones(p):
    """Packed rows of each sequence."""
    return torch.arange(len(p.q), device=p.q.device).split(p.lengths)


def assert_same(found, wanted, index, what):
    """Output and logsumexp of some rows are those of the whole, to the bit."""
    for name, part, whole in zip(("out", "logsumexp"), found, wanted, strict=True):
        wrong = (part != whole[index]).flatten(1).any(dim=1)
        assert not wrong.any(), f"{what}: {name} of {wrong.sum()} of {len(wrong)} rows differ, {wrong.nonzero()[:4]}"


def check_values(p, kv_format):
    """As good as float64 with the roundings that the format asks for; logsumexp to FP32's precision."""
    out, logsumexp = packed(p)
    q, k, v = (x.double() for x in (p.q, p.k.decode(), p.v.decode()))
    exact, floor, sums = [], [], []
    for q_n, k_n, v_n in zip(*(x.split(p.lengths) for x in (q, k, v)), strict=True):
        k_n, v_n = (x.repeat_interleave(p.group, dim=1) for x in (k_n, v_n))
        scores = torch.einsum("qhd,khd->hqk", q_n, k_n) * p.softmax_scale
        scores = scores.masked_fill(torch.ones_like(scores[0]).triu(1).bool(), -torch.inf)
        weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
        rounded = weights.to(probability_dtype(kv_format)).double()
        sums.append(torch.logsumexp(scores, dim=-1).T)
        exact.append(torch.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdim=True), v_n))
        floor.append(torch.einsum("hqk,khd->qhd", rounded / weights.sum(-1, keepdim=True), v_n).bfloat16().double())
    exact, floor, sums = torch.cat(exact), torch.cat(floor), torch.cat(sums)
    error, noise = relative_error(out, exact), relative_error(floor, exact)
    assert exact.abs().max() > 1.0 and error <= 1.5 * noise, f"error {error:.3g}, floor {noise:.3g}"
    off = (logsumexp - sums).abs().max().item()
    assert off <= 4e-6 * sums.abs().max().item(), f"logsumexp is off by {off:.3g}"


def check_reference(p, kv_format):
    """Agrees with `attend`, which defines the answer, as two roundings to BF16 do."""
    out, _ = packed(p)
    for start, length in zip(p.boundaries.tolist(), p.lengths, strict=False):
        rows = slice(start, start + length)
        k, v = (x.decode()[None, rows].cpu() for x in (p.k, p.v))
        positions = torch.arange(length)[None]
        wanted = attend(p.q[None, rows].cpu(), k, v, positions, p.softmax_scale, probability_dtype(kv_format))[0]
        assert relative_error(out[rows].cpu(), wanted) < 2.0**-9


def check_same_bits(p, *, rows=(), chunks=()):
    """Packed, alone, in tiles of any height, in shuffled pages, prefilled whole, by chunks and decoded: one answer.

    Args:
        rows: of tiles, beside those that train, prefill and decode.
        chunks: positions at which a later chunk of a prefill starts; the last token of each sequence is decoded.
    """
    wanted = packed(p)
    assert wanted[0].abs().max() > 1.0
    everything = torch.arange(len(p.q), device=p.q.device)
    for height in rows:
        assert_same(packed(p, height), wanted, everything, f"packed by {height} rows")
    wide = replace(p, k=widened(p.k), v=widened(p.v))
    for height in {PREFILL_ROWS, packed_rows(p.q.shape[2]), *rows}:
        assert_same(packed(wide, height), wanted, everything, f"packed by {height} rows, codes as FP16")
        for first in (0, 77):
            *found, index = apart(wide, first, height)
            assert_same(found, wanted, index, f"queries from {first} by {height} rows, keys elsewhere")
    for first in ([0] * len(p.lengths), *([min(c, n - 1) for n in p.lengths] for c in chunks)):
        *found, index = paged(p, first, PREFILL_ROWS)
        assert_same(found, wanted, index, f"prefill from {first}")
    last = [n - 1 for n in p.lengths]
    for height in {DECODE_ROWS, *rows}:
        *found, index = paged(p, last, height)
        assert_same(found, wanted, index, f"decode by {height} rows")
    *found, index = paged(p, last, DECODE_ROWS, [len(p.lengths) - 1])
    assert_same(found, wanted, index, "decode of one sequence")
    index = p.boundaries[1:] - 1
    k, v, tiles = p.pages_k, p.pages_v, decode_tiles(torch.tensor(last, device=p.q.device), p.group)
    operands = p.q[index], k.values, v.values, k.scale, v.scale
    found = attention_forward(*operands, tiles, p.softmax_scale, p.table, p.page_size)
    assert_same(found, wanted, index, "decode of a query a sequence")
    if k.scale is not None and p.q.shape[2] == 128 and decodes_fp8(tiles, 128):
        for rounding in ("none", "power_of_two"):
            casts = decode_attention(*operands, tiles.table, p.softmax_scale * LOG2_E, p.table, p.page_size, rounding)
            expected = cast_1x128(found[0].flatten(1), rounding)
            for name, mine, theirs in zip(("codes", "scales"), casts, expected, strict=True):
                assert torch.equal(mine.float(), theirs.float()), f"{name} of the cast, {rounding}"


def check_every_length(p, batches):
    """A sequence that is decoded has the bits of training at each of its lengths, whatever is decoded beside it.

    Args:
        batches: positions in the first sequence whose queries are decoded together, for each batch.
    """
    wanted, k, v = packed(p), p.pages_k, p.pages_v
    for positions in batches:
        positions = torch.tensor(positions, device=p.q.device)
        tiles = decode_tiles(positions, p.group)
        table = p.table[:1].expand(len(positions), -1)
        operands = p.q[positions], k.values, v.values, k.scale, v.scale
        found = attention_forward(*operands, tiles, p.softmax_scale, table, p.page_size)
        assert_same(found, wanted, positions, f"decode at {positions[:4].tolist()}, batch of {len(positions)}")


def check_bad_values(p):
    """A key or value that is not finite spoils later queries of its KV head and sequence, and nothing else."""
    wanted, token = packed(p)[0], p.lengths[0] // 2
    for name in ("k", "v"):
        stored = getattr(p, name)
        values, scale = stored.values.clone(), None if stored.scale is None else stored.scale.clone()
        if scale is None:
            values[token, -1, 0] = torch.nan
        else:
            scale[token, -1] = torch.nan
            values.view(torch.uint8)[token, -1] = 0x7F
        damaged = replace(p, **{name: StoredKV(values, scale)})
        got, wide = packed(damaged)[0], packed(replace(damaged, k=widened(damaged.k), v=widened(damaged.v)))[0]
        spoilt = torch.zeros(got.shape[:2], dtype=torch.bool, device=got.device)
        spoilt[token : p.lengths[0], -p.group :] = True
        assert got[spoilt].isnan().any(dim=-1).all(), name
        assert torch.equal(got[~spoilt], wanted[~spoilt]), name
        assert torch.equal(got.nan_to_num(7.0), wide.nan_to_num(7.0)), f"{name}, codes as FP16"


def check_spread(p, positions):
    """Few sequences spread over a GPU have the bits of a program each, beside what is not finite and what is unwritten.

    Args:
        positions: of the queries, one for each sequence.
    """
    at = torch.tensor(positions, device=p.q.device)
    q, tiles = p.q[p.boundaries[:-1] + at], decode_tiles(at, p.group)
    empty, empty_like, made = torch.empty, torch.empty_like, []

    def poisoned(x):
        made.append(x.numel() * x.element_size())
        return x.fill_(torch.nan)

    def assert_equal(p, what):
        k, v = p.pages_k, p.pages_v
        operands = q, k.values, v.values, k.scale, v.scale
        one_each = replace(tiles, one_query=False)
        wanted = attention_forward(*operands, one_each, p.softmax_scale, p.table, p.page_size)
        with (
            mock.patch("torch.empty", lambda *shape, **options: poisoned(empty(*shape, **options))),
            mock.patch("torch.empty_like", lambda x, **options: poisoned(empty_like(x, **options))),
        ):
            found = spread_attention(*operands, tiles.table, p.softmax_scale * LOG2_E, p.table, p.page_size)
        for name, mine, theirs in zip(("out", "logsumexp"), found, wanted, strict=True):
            assert torch.equal(mine.isnan(), theirs.isnan()), (name, what)
            assert torch.equal(mine.nan_to_num(7.0), theirs.nan_to_num(7.0)), (name, what)
        return wanted[0]

    out = assert_equal(p, "")
    assert out.abs().max() > 1.0
    num_keys, (N, H, Dh) = p.table.shape[1] * p.page_size, q.shape
    assert sum(made) == workspace_bytes(N, H, H // p.group, num_keys) + N * H * (2 * Dh + 4)  # and what it returns
    for name in ("pages_k", "pages_v"):
        for place in (0, positions[0]):  # in a block that is seen whole, and in the last
            slot = p.table[0, place // p.page_size] * p.page_size + place % p.page_size
            for bad in (torch.nan, torch.inf):
                stored = getattr(p, name)
                values, scale = stored.values.clone(), None if stored.scale is None else stored.scale.clone()
                if scale is None:
                    values[slot, -1, -1] = bad
                else:
                    scale[slot, -1] = torch.nan
                    values.view(torch.uint8)[slot, -1] = 0x7F
                out = assert_equal(replace(p, **{name: StoredKV(values, scale)}), (name, place, bad))
                spoils = name == "pages_v" or bad != torch.inf  # a score of minus infinity is a weight of 0
                assert not (spoils and out[0].isfinite().all()) and out[1:].isfinite().all(), (name, place, bad)


def check_damage_is_seen(p):
    """One byte, one scale or one page entry changes rows that see it and no others."""
    wanted = packed(p)[0]
    first, length = [0] * len(p.lengths), p.lengths[0]
    place = length // 2
    slot = p.table[0, place // p.page_size] * p.page_size + place % p.page_size
    damages = []
    for name in ("pages_k", "pages_v"):
        stored = getattr(p, name)
        largest = stored.values[slot, 0].float().abs().argmax()
        bits = stored.values.view(torch.uint8 if stored.scale is not None else torch.int16).clone()
        bits[slot, 0, largest] ^= 8
        damages.append((f"a byte of {name}", {name: replace(stored, values=bits.view(stored.values.dtype))}))
        if stored.scale is not None:
            scale = stored.scale.clone()
            scale[slot, 0] *= 2.0
            damages.append((f"a scale of {name}", {name: replace(stored, scale=scale)}))
    table = p.table.clone()
    table[0, place // p.page_size] = p.table[1, 0]
    damages.append(("a page entry", {"table": table}))
    for what, change in damages:
        *found, index = paged(replace(p, **change), first, PREFILL_ROWS)
        changed = (found[0] != wanted[index]).flatten(1).any(dim=1).nonzero().flatten().tolist()
        earliest = place if "page" not in what.split() else place // p.page_size * p.page_size
        assert changed and earliest <= changed[0] and changed[-1] < length, (what, changed)


def transform_of(T, Dh, normed, device="cpu"):
    """Random angles and gains."""
    angles, gains = torch.randn(T, Dh // 2), 1.0 + 0.2 * torch.randn(2, Dh)
    q_gain, k_gain = gains.to(device) if normed else (None, None)
    tables = angles.cos().to(device), angles.sin().to(device)
    return HeadTransform(*tables, q_gain, k_gain, NORM_EPS, torch.zeros(1, dtype=torch.int64, device=device))


def check_gathered(num_slots, heads, kv_format, device="cpu"):
    """What some slots hold, in their order and as often as they are named; codes as FP16."""
    _, Hkv, Dh = heads
    stored = store_kv((torch.randn(num_slots, Hkv, Dh, device=device) * 9.0).bfloat16(), kv_format)
    slots = torch.randint(num_slots, (2 * num_slots + 1,), device=device)
    found = gathered(stored, slots)
    assert found.values.dtype == (torch.bfloat16 if kv_format == "bf16" else torch.float16)
    assert torch.equal(found.values.float(), stored.values.float()[slots]) and found.values.abs().max() > 9.0
    assert stored.scale is None or torch.equal(found.scale, stored.scale[slots])
    assert len(gathered(stored, slots[:0]).values) == 0


def by_slot(kept, slots):
    """Keys or values of some slots."""
    return StoredKV(kept.values[slots], None if kept.scale is None else kept.scale[slots])


def check_heads(T, heads, kv_format, normed, device="cpu"):
    """The bits of norm, rotation and storage one after another, as a CPU computes them; other slots stay untouched."""
    H, Hkv, Dh = heads
    size = torch.exp(torch.randn(T, 1) * 4)
    fused = (torch.randn(T, (H + 2 * Hkv) * Dh) * size).bfloat16().to(device)
    q, k, v = (x.unflatten(1, (-1, Dh)) for x in fused.split([H * Dh, Hkv * Dh, Hkv * Dh], dim=1))
    transform = transform_of(T, Dh, normed, device)
    if not normed:
        q[0, 0, 0] = 1e6
        q[1, 0], transform.cos[1], transform.sin[1] = 65536.0, 1.0, 0.0  # the first that BF16 has beyond
    slots = torch.randperm(2 * T)[:T].to(device)
    keys, values = (empty_kv((2 * T, Hkv, Dh), kv_format, device) for _ in "kv")
    for kept in (keys, values):
        kept.values.view(torch.uint8).fill_(7)
    got, inverse_rms = write_heads(q, k, v, transform, keys, values, slots)
    wanted, inverses = [], []
    for x, gain in ((q.cpu(), transform.q_gain), (k.cpu(), transform.k_gain)):
        if gain is not None:
            inverse = (mean_square(x) + NORM_EPS).rsqrt().float()
            inverses.append(inverse.flatten())
            x = (x.float() * inverse * gain.cpu()).bfloat16()
        wanted.append(rotate(x, transform.cos.cpu(), transform.sin.cpu()))
    assert torch.equal(got.cpu(), wanted[0])
    assert not normed or torch.equal(inverse_rms.cpu(), torch.cat(inverses))
    decoded = [empty_kv((T, Hkv, Dh), kv_format, device, torch.bfloat16) for _ in "kv"]
    write_heads(q, k, v, replace(transform, num_saturated=torch.zeros_like(transform.num_saturated)), *decoded, None)
    for found, kept in zip(decoded, (keys, values), strict=True):
        assert torch.equal(found.values, by_slot(kept, slots).decode())
    other = torch.ones(2 * T, dtype=torch.bool, device=device).index_fill(0, slots, False)
    for kept, x in ((keys, wanted[1]), (values, v.cpu())):
        stored = store_kv(x, kv_format)
        assert torch.equal(kept.values.view(torch.uint8)[slots].cpu(), stored.values.view(torch.uint8))
        assert (kept.values.view(torch.uint8)[other] == 7).all()
        assert stored.scale is None or torch.equal(kept.scale[slots].cpu(), stored.scale)
    beyond = (wanted[0].float().abs() > 65504.0).sum().item() if kv_format == "fp8" else 0
    assert transform.num_saturated.item() == beyond and (beyond > 0) == (kv_format == "fp8" and not normed)
    turned = rotate_back(q.contiguous(), k, transform)
    for x, back in zip((q, k), turned, strict=True):
        assert torch.equal(back.cpu(), rotate(x.cpu(), transform.cos.cpu(), -transform.sin.cpu()))
