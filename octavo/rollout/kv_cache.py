"""Paged KV cache: keys and values of all sequences in pages of `page_size` tokens, shared by reference count."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from octavo.kernels.attention import MAX_SCORES_PER_CHUNK, StoredKV, attend, probability_dtype, store_kv
from octavo.kernels.attention_kernels import LOG2_E
from octavo.kernels.cast_outputs import BLOCK, Cast
from octavo.kernels.decode_attention import decode_attention
from octavo.kernels.decode_step import locate
from octavo.kernels.heads import HeadTransform, gathered, transformed, write_heads
from octavo.kernels.triton_attention import (
    DECODE_ROWS,
    PREFILL_ROWS,
    Tiles,
    attention_forward,
    decode_rows,
    decodes_fp8,
    has_kernel,
    packed_rows,
    spreads,
    tiles_of,
)
from octavo.models.config import DecoderConfig
from octavo.numerics.fp8 import E4M3, ScaleRounding
from octavo.numerics.recipe import StorageFormat
from octavo.rollout.lent_memory import LentMemory, tensor_bytes

MAX_GATHERED = 2
"""Keys for each new token, up to which a prefill lays the keys of its sequences end to end."""


class KVCache:
    """Storage of every layer's keys and values.

    Args:
        config: the decoder's shape.
        num_pages, page_size: pages, and tokens in one. There is one page more, for what nobody will read.
        kv_format: "fp8" keeps E4M3 and one FP32 power-of-two scale per token and head.
        device: where it lives.
        lends_memory: its memory can be lent, on a CUDA device.
    """

    k: Tensor
    """[layers, slots, Hkv, Dh]; slot = page * page_size + offset."""
    v: Tensor
    k_scale: Tensor | None
    """[layers, slots, Hkv] fp32."""
    v_scale: Tensor | None

    def __init__(
        self,
        config: DecoderConfig,
        num_pages: int,
        page_size: int,
        kv_format: StorageFormat,
        device: torch.device | str = "cpu",
        lends_memory: bool = False,
    ) -> None:
        self.num_pages, self.page_size, self.kv_format = num_pages, page_size, kv_format
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        dtype = {"fp8": E4M3, "bf16": torch.bfloat16, "fp32": torch.float32}[kv_format]
        self.scratch_page = num_pages
        slots = (config.num_layers, (num_pages + 1) * page_size, config.num_kv_heads)
        self.memory = None
        if lends_memory:
            wanted = [((*slots, config.head_dim), dtype)] * 2 + [(slots, torch.float32)] * 2 * (kv_format == "fp8")
            self.memory = LentMemory(sum(tensor_bytes(*each) for each in wanted), torch.device(device))
            self.k, self.v, *scales = (self.memory.tensor(*each) for each in wanted)
            self.k_scale, self.v_scale = scales or (None, None)
            self._clear()
            return
        try:
            self.k = torch.zeros(*slots, config.head_dim, dtype=dtype, device=device)
            self.v = torch.zeros_like(self.k)
        except RuntimeError as error:  # torch has no class for a failed allocation on a CPU
            gigabytes = 2 * math.prod(slots) * config.head_dim * dtype.itemsize / 1e9
            raise ValueError(
                f"a KV cache of {num_pages * page_size} tokens takes {gigabytes:.1f} GB, which {device} did not give. "
                f"Lower rollout.engine.kv_cache_tokens"
            ) from error
        self.k_scale = torch.ones(slots, device=device) if kv_format == "fp8" else None
        self.v_scale = torch.ones(slots, device=device) if kv_format == "fp8" else None

    def lend(self) -> None:
        """Give its memory away, and what it holds with it, until `take_back`; nothing without `lends_memory`."""
        if self.memory is not None:
            self.memory.lend()

    def take_back(self) -> None:
        """Have its memory, as new where it was lent.

        Raises:
            ValueError: the device does not give it.
        """
        if self.memory is not None and self.memory.take_back():
            self._clear()

    def _clear(self) -> None:
        for x in (self.k, self.v):
            x.zero_()
        for scale in (self.k_scale, self.v_scale):
            if scale is not None:
                scale.fill_(1.0)

    def write(
        self, layer: int, slot_mapping: Tensor, q: Tensor, k: Tensor, v: Tensor, transform: HeadTransform
    ) -> Tensor:
        """Transform q [T, H, Dh] and k [T, Hkv, Dh]; store k and v at slots [T] of a layer. Returns the queries."""
        keys, values = self.stored(layer)
        if has_kernel(q):
            return write_heads(q, k, v, transform, keys, values, slot_mapping)[0]
        q, k = transformed(q, k, transform, self.kv_format)
        for x, kept in ((k, keys), (v, values)):
            new = store_kv(x, self.kv_format)
            _indexable(kept.values)[slot_mapping] = _indexable(new.values)
            if kept.scale is not None and new.scale is not None:
                kept.scale[slot_mapping] = new.scale
        return q

    def stored(self, layer: int) -> tuple[StoredKV, StoredKV]:
        """Keys and values of a layer by slot."""
        k_scale, v_scale = (None if x is None else x[layer] for x in (self.k_scale, self.v_scale))
        return StoredKV(self.k[layer], k_scale), StoredKV(self.v[layer], v_scale)

    def read(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """K^ and V^ at slots [N, S] of a layer, [N, S, Hkv, Dh] each."""
        k, v = (_indexable(x)[layer][slots].view(x.dtype) for x in (self.k, self.v))
        k_scale, v_scale = (None if x is None else x[layer][slots] for x in (self.k_scale, self.v_scale))
        return StoredKV(k, k_scale).decode(), StoredKV(v, v_scale).decode()


def _indexable(x: Tensor) -> Tensor:
    """E4M3 as bytes: not every device indexes float8."""
    return x.view(torch.uint8) if x.dtype == E4M3 else x


class PagedAttention:
    """The engine's attention context: a ragged batch of sequences, each with new tokens and a page table.

    Many queries on a GPU read their keys gathered from the pages.

    Args:
        cache: written and read in place.
        page_table: [N, pages] int64, pages of each sequence in order; unused entries are any valid page.
        first_positions: position of each sequence's first new token.
        num_new: new tokens of each sequence; they lie packed in this order.
    """

    _gathered_keys: tuple[Tensor, Tensor] | None = None
    """Slots of the keys of all sequences end to end, and where each sequence begins among them."""

    def __init__(self, cache: KVCache, page_table: Tensor, first_positions: list[int], num_new: list[int]) -> None:
        self.cache, device = cache, page_table.device
        starts, counts = torch.tensor(first_positions, device=device), torch.tensor(num_new, device=device)
        sequence = torch.repeat_interleave(torch.arange(len(num_new), device=device), counts)
        packed_start = counts.cumsum(0) - counts
        self.positions = torch.arange(len(sequence), device=device) - packed_start[sequence] + starts[sequence]
        """[T] int64, position of every new token."""
        slots = page_table[:, :, None] * cache.page_size + torch.arange(cache.page_size, device=device)
        slots = slots.flatten(1)
        self.slot_mapping = slots[sequence, self.positions]
        """[T] int64, slot of every new token."""
        self._page_table, self._chunks = page_table, []
        self._tiles: Tiles | None = None
        ends = [start + count for start, count in zip(first_positions, num_new, strict=True)]
        if has_kernel(cache.k):
            group = cache.num_heads // cache.num_kv_heads
            few = max(num_new, default=0) * group <= DECODE_ROWS
            gathers = not few and sum(ends) <= MAX_GATHERED * len(sequence)
            tile_rows = DECODE_ROWS if few else packed_rows(cache.k.shape[-1]) if gathers else PREFILL_ROWS
            boundaries = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
            self._tiles = tiles_of(boundaries, starts, len(sequence), group, tile_rows)
            if gathers:
                self._gathered_keys = _end_to_end(slots, torch.tensor(ends, device=device))
            return
        for chunk in _chunks_of_sequences(num_new, ends, cache.num_heads):
            rows = torch.arange(max(num_new[chunk]), device=device)
            inside = rows < counts[chunk, None]  # [n, R]
            row = torch.minimum(rows, counts[chunk, None] - 1)
            index = packed_start[chunk, None] + row  # padded row -> packed token
            self._chunks.append((inside, index, starts[chunk, None] + row, slots[chunk, : max(ends[chunk])]))

    @classmethod
    def decode(cls, cache: KVCache, page_table: Tensor, positions: Tensor, order: Tensor) -> PagedAttention:
        """One new token of each sequence; on a GPU the host waits for nothing.

        Args:
            cache: written and read in place.
            page_table: [N, pages] int32; it may be wider than it need be.
            positions: [N] int64, of the new tokens.
            order: [N] int64, rows, best with those of most keys first.
        """
        if has_kernel(cache.k):
            return _PagedDecode(cache, page_table, positions, order)
        where = positions.tolist()
        width = max(where) // cache.page_size + 1
        return cls(cache, page_table[:, :width].long(), where, [1] * len(where))

    def attend_cast(self, *arguments: Any) -> Cast | None:
        """None: its kernels cast nothing, but for those of `decode`."""
        return None

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, transform: HeadTransform, softmax_scale: float
    ) -> Tensor:
        """Write the new keys and values, then attend to everything stored; [T, H, Dh]."""
        q = self.cache.write(layer, self.slot_mapping, q, k, v, transform)
        if self._tiles is not None:
            keys, values = self.cache.stored(layer)
            if self._gathered_keys is None:
                operands = q, keys.values, values.values, keys.scale, values.scale, self._tiles, softmax_scale
                return attention_forward(*operands, self._page_table, self.cache.page_size)[0]
            slots, starts = self._gathered_keys
            keys, values = gathered(keys, slots), gathered(values, slots)
            operands = q, keys.values, values.values, keys.scale, values.scale, self._tiles, softmax_scale
            return attention_forward(*operands, key_starts=starts)[0]
        p_dtype = probability_dtype(self.cache.kv_format)
        out = torch.empty_like(q)
        for inside, index, query_positions, slots in self._chunks:
            k_hat, v_hat = self.cache.read(layer, slots)
            out[index[inside]] = attend(q[index], k_hat, v_hat, query_positions, softmax_scale, p_dtype)[inside]
        return out


class _PagedDecode(PagedAttention):
    """A query a sequence, by kernels."""

    def __init__(self, cache: KVCache, page_table: Tensor, positions: Tensor, order: Tensor) -> None:
        self.cache, self._page_table, self.positions = cache, page_table, positions
        self.slot_mapping, table = locate(page_table, positions, order, cache.page_size)
        self._tiles = Tiles(table, decode_rows(cache.num_heads // cache.num_kv_heads), one_query=True)

    def attend_cast(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        transform: HeadTransform,
        softmax_scale: float,
        rounding: ScaleRounding,
    ) -> Cast | None:
        assert self._tiles is not None
        if self.cache.kv_format != "fp8" or q.shape[2] != BLOCK or not decodes_fp8(self._tiles, BLOCK):
            return None
        if spreads(self._tiles, self.cache.num_kv_heads, self._page_table, self.cache.page_size):
            return None
        q = self.cache.write(layer, self.slot_mapping, q, k, v, transform)
        keys, values = self.cache.stored(layer)
        assert keys.scale is not None and values.scale is not None
        where = self._tiles.table, softmax_scale * LOG2_E, self._page_table, self.cache.page_size
        return decode_attention(q, keys.values, values.values, keys.scale, values.scale, *where, rounding)


def _end_to_end(slots: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The first `lengths` [N] of slots [N, S] one after another, and where each row begins among them."""
    row = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
    starts = lengths.cumsum(0) - lengths
    return slots[row, torch.arange(len(row), device=lengths.device) - starts[row]], starts


def _chunks_of_sequences(num_new: list[int], ends: list[int], num_heads: int) -> Iterator[slice]:
    """Neighbouring sequences whose padded scores, rows x keys x heads, stay within MAX_SCORES_PER_CHUNK."""
    first = 0
    while first < len(num_new):
        rows, keys, stop = num_new[first], ends[first], first + 1
        while stop < len(num_new):
            rows, keys = max(rows, num_new[stop]), max(keys, ends[stop])
            if (stop + 1 - first) * rows * keys * num_heads > MAX_SCORES_PER_CHUNK:
                break
            stop += 1
        yield slice(first, stop)
        first = stop


class PageAllocator:
    """Free pages and reference counts of pages in use.

    Args:
        num_pages: pages in the cache.
    """

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, -1, -1))
        self._references = [0] * num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each with one reference."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: list[int]) -> None:
        """One more holder of pages already in use."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free and cannot be shared"
            self._references[page] += 1

    def release(self, pages: list[int]) -> None:
        """One holder less; a page without a holder is free again."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} released twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)
