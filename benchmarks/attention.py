"""Attention on a GPU: decode from pages, forward and backward over packed sequences, and the heads before it.

    python benchmarks/attention.py    # a table, and benchmarks/results/attention.json (under $OUT if that is set)

Decode: the share of the time that a large copy would take for the keys, values and scales, each read once and from
memory, in a CUDA graph, as the engine runs it. Forward and backward: TFLOP/s of causal attention, two and five products
over half the square. Peers in the same run: torch's FlashAttention 2 and cuDNN through SDPA, over dense BF16 tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from octavo.bench.measure import copy_speed, microseconds_each, milliseconds
from octavo.bench.results import Results, Row
from octavo.kernels.attention import StoredKV, store_kv
from octavo.kernels.attention_backward import attention_backward
from octavo.kernels.heads import HeadTransform, empty_kv, gathered, transformed, write_heads
from octavo.kernels.triton_attention import attention_forward, decode_tiles, packed_rows, packed_tiles, tiles_of
from octavo.layers.attention import PackedAttention
from octavo.numerics.recipe import StorageFormat

MODELS = {"qwen3-8b": (32, 8, 128), "qwen2.5-0.5b": (14, 2, 64)}
"""H, Hkv, Dh."""
DECODES = ((128, 4096), (32, 4096), (16, 8192), (8, 8192), (4, 8192))
"""Sequences, keys of each."""
BATCHES = ((1, 4096), (2, 8192), (4, 4096), (16, 1024))
"""Sequences, tokens of each."""
TOKENS = 16384
PAGE_SIZE = 16
REP_MS = 60
FORMATS: tuple[StorageFormat, ...] = ("bf16", "fp8")
PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
COLD_BYTES = 2**28
"""Of keys and values before any are read again: several times the L2 cache."""
DECODE_GOAL = 0.75
"""Share of the bandwidth bound, from 32 sequences on."""


def random_heads(*shape: int) -> Tensor:
    """Of a projection, bf16."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def random_kv(slots: int, heads: tuple[int, int, int], kv_format: StorageFormat) -> StoredKV:
    """Keys or values by slot."""
    kept = empty_kv((slots, *heads[1:]), kv_format, torch.device("cuda"))
    for part in range(0, slots, 2**16):  # quantising all at once would take many times their memory
        new = store_kv(random_heads(min(2**16, slots - part), *heads[1:]), kv_format)
        rows = slice(part, part + len(new.values))
        kept.values[rows].copy_(new.values)
        if kept.scale is not None and new.scale is not None:
            kept.scale[rows].copy_(new.scale)
    return kept


def sdpa(back_end: str, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """torch's attention over [N, heads, L, Dh]."""
    with sdpa_kernel(PEERS[back_end]):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)


def in_graph(calls: Sequence[Callable[[], object]]) -> float:
    """Milliseconds of a call."""
    return microseconds_each(calls, REP_MS) / 1e3


def one_by_one(calls: Sequence[Callable[[], object]]) -> float:
    """Milliseconds of the only call."""
    return milliseconds(calls[0], REP_MS)


def time_of_peer(
    case: str,
    *calls: Callable[[], object],
    measure: Callable[[Sequence[Callable[[], object]]], float] = one_by_one,
) -> float | None:
    """Milliseconds; None, and a line that says why, where torch refuses."""
    try:
        calls[0]()
        return measure(calls)
    except RuntimeError as error:
        print(f"{case}: refused: {str(error).splitlines()[0][:120]}", flush=True)
        return None


def main() -> None:
    """Measure, print, write."""
    torch.manual_seed(0)
    copy = copy_speed()
    results = Results("attention", "python benchmarks/attention.py")

    def add(case: str, metric: str, value: float, unit: str, goal: float | None = None, note: str = "") -> None:
        better = "lower" if unit == "ms" else "higher"
        results.add(Row(case=case, metric=metric, value=value, unit=unit, goal=goal, better=better, note=note))

    add("copy/1 GiB/uint8", "gb_s", copy, "GB/s")
    for model, heads in MODELS.items():
        for num_sequences, length in DECODES:
            decode(f"decode {num_sequences} x {length:,}/{model}", heads, num_sequences, length, copy, add)
            torch.cuda.empty_cache()
    for num_sequences, length in BATCHES:
        forward(num_sequences, length, add)
        backward(num_sequences, length, add)
    for kv_format in FORMATS:
        write(kv_format, copy, add)
        layer(kv_format, add)


def decode(case: str, heads: tuple[int, int, int], num_sequences: int, length: int, copy: float, add: Callable) -> None:
    """One query of each sequence over keys in pages that lie anywhere."""
    (H, Hkv, Dh), slots = heads, num_sequences * length
    q, goal = random_heads(num_sequences, H, Dh), DECODE_GOAL if num_sequences >= 32 else None
    table = torch.randperm(slots // PAGE_SIZE, device="cuda").view(num_sequences, -1)
    tiles = decode_tiles(torch.full((num_sequences,), length - 1, device="cuda"), H // Hkv)
    num_copies = max(2, -(-COLD_BYTES // (2 * slots * Hkv * Dh)))
    for kv_format in FORMATS:
        stored = [[random_kv(slots, heads, kv_format) for _ in "kv"] for _ in range(num_copies)]
        calls = [
            partial(attention_forward, q, k.values, v.values, k.scale, v.scale, tiles, Dh**-0.5, table, PAGE_SIZE)
            for k, v in stored
        ]
        k = stored[0][0]
        bound = 2 * slots * Hkv * (Dh * k.values.itemsize + (4 if k.scale is not None else 0)) / copy / 1e6
        time, again = in_graph(calls), in_graph(calls)
        note = f"{time * 1e3:.0f} us, second run {again * 1e3:.0f}, bound {bound * 1e3:.0f}"
        add(f"{case}/{kv_format}", "bandwidth_share", bound / time, "of copy", goal, note)
        if kv_format == "bf16":
            dense = [[x.values.view(num_sequences, length, Hkv, Dh).transpose(1, 2) for x in kv] for kv in stored]
            for name in PEERS:
                peers = [partial(sdpa, name, q[:, :, None], *kv, is_causal=False) for kv in dense]
                theirs = time_of_peer(f"{case}/{name}", *peers, measure=in_graph)
                if theirs is not None:
                    note = f"{theirs * 1e3:.0f} us, no pages"
                    add(f"{case}/torch {name}", "bandwidth_share", bound / theirs, "of copy", note=note)


def forward(num_sequences: int, length: int, add: Callable) -> None:
    """Packed sequences as in training, the same gathered from pages as in prefill, and SDPA."""
    heads = H, Hkv, Dh = MODELS["qwen3-8b"]
    T, case = num_sequences * length, f"{num_sequences} x {length:,}/qwen3-8b"
    flop = 2 * T * length * H * Dh
    q, boundaries = random_heads(T, H, Dh), torch.arange(0, T + 1, length, device="cuda")
    tiles = tiles_of(boundaries, None, T, H // Hkv, packed_rows(Dh))
    slots = (
        torch.randperm(T // PAGE_SIZE, device="cuda")[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device="cuda")
    ).flatten()
    for kv_format in FORMATS:
        stored = tuple(random_kv(T, heads, kv_format) for _ in "kv")
        packed = tuple(gathered(x, slots) for x in stored)

        def attend(k: StoredKV, v: StoredKV, starts: torch.Tensor | None = None) -> None:
            attention_forward(q, k.values, v.values, k.scale, v.scale, tiles, Dh**-0.5, key_starts=starts)

        def prefill(stored: tuple[StoredKV, StoredKV] = stored) -> None:
            attend(*(gathered(x, slots) for x in stored), boundaries)

        for kind, call in (("forward", partial(attend, *packed)), ("prefill", prefill)):
            time, again = milliseconds(call, REP_MS), milliseconds(call, REP_MS)
            note = f"{time:.3f} ms, second run {again:.3f}"
            add(f"{kind} {case}/{kv_format}", "tflop_s", flop / time / 1e9, "TFLOP/s", note=note)
    dense = [random_heads(num_sequences, length, n, Dh).transpose(1, 2) for n in (H, Hkv, Hkv)]
    for name in PEERS:
        theirs = time_of_peer(f"forward {case}/{name}", partial(sdpa, name, *dense, is_causal=True))
        if theirs is not None:
            note = f"{theirs:.3f} ms"
            add(f"forward {case}/torch {name}", "tflop_s", flop / theirs / 1e9, "TFLOP/s", note=note)


def backward(num_sequences: int, length: int, add: Callable) -> None:
    """From our output and logsumexp by each back end, and SDPA's own backward from SDPA's forward."""
    H, Hkv, Dh = MODELS["qwen3-8b"]
    T, case, scale = num_sequences * length, f"{num_sequences} x {length:,}/qwen3-8b", Dh**-0.5
    flop = 5 * T * length * H * Dh
    q, k, v, d_out = (random_heads(T, n, Dh) for n in (H, Hkv, Hkv, H))
    boundaries = torch.arange(0, T + 1, length, device="cuda")
    tiles = packed_tiles(boundaries, T, H // Hkv, Dh)
    out, logsumexp = attention_forward(q, k, v, None, None, tiles.forward, scale)
    operands = d_out, q, k, v, out, logsumexp, boundaries, tiles, scale
    for name in ("gluon", "triton", *PEERS):
        time = time_of_peer(f"backward {case}/{name}", partial(attention_backward, *operands, name))
        if time is not None:
            add(f"backward {case}/{name}", "tflop_s", flop / time / 1e9, "TFLOP/s", note=f"{time:.3f} ms")
    dense = [x.view(num_sequences, length, -1, Dh).transpose(1, 2) for x in (q, k, v)]
    leaves, grad = [x.detach().requires_grad_() for x in dense], d_out.view(num_sequences, length, H, Dh)
    for name in PEERS:
        case_of_peer, kept = f"backward {case}/torch {name}", []

        def theirs(name: str = name, kept: list[Tensor] = kept) -> object:
            if not kept:
                kept.append(sdpa(name, *leaves, is_causal=True))
            return torch.autograd.grad(kept[0], leaves, grad.transpose(1, 2), retain_graph=True)

        time = time_of_peer(case_of_peer, theirs)
        if time is not None:
            add(case_of_peer, "tflop_s", flop / time / 1e9, "TFLOP/s", note=f"{time:.3f} ms")


def random_transform(num_tokens: int, head_dim: int) -> HeadTransform:
    """With qk-norm."""
    angles, gains = torch.randn(num_tokens, head_dim // 2, device="cuda"), torch.randn(2, head_dim, device="cuda")
    return HeadTransform(angles.cos(), angles.sin(), *gains, 1e-6, torch.zeros(1, dtype=torch.int64, device="cuda"))


def projected() -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of TOKENS tokens in one row, as a fused projection leaves them."""
    H, Hkv, Dh = MODELS["qwen3-8b"]
    fused = random_heads(TOKENS, H + 2 * Hkv, Dh)
    return fused[:, :H], fused[:, H : H + Hkv], fused[:, H + Hkv :]


def write(kv_format: StorageFormat, copy: float, add: Callable) -> None:
    """qk-norm, rotary and the write to pages in one kernel."""
    H, Hkv, Dh = MODELS["qwen3-8b"]
    (q, k, v), transform = projected(), random_transform(TOKENS, Dh)
    keys, values = (empty_kv((TOKENS, Hkv, Dh), kv_format, q.device) for _ in "kv")
    slots = torch.randperm(TOKENS // PAGE_SIZE, device="cuda")[:, None] * PAGE_SIZE
    slots = (slots + torch.arange(PAGE_SIZE, device="cuda")).flatten()

    def one_after_another() -> object:
        _, turned = transformed(q, k, transform, kv_format)
        return store_kv(turned, kv_format), store_kv(v, kv_format)

    stored = 2 * Hkv * (Dh * keys.values.itemsize + (4 if keys.scale is not None else 0))
    bound = TOKENS * (2 * Dh * (2 * H + 2 * Hkv) + 4 * Dh + stored) / copy / 1e6
    time = milliseconds(partial(write_heads, q, k, v, transform, keys, values, slots), REP_MS)
    note = f"{time * 1e3:.0f} us, one after another {milliseconds(one_after_another, REP_MS) * 1e3:.0f}, without pages"
    add(f"heads of {TOKENS:,}/qwen3-8b/{kv_format}", "bandwidth_share", bound / time, "of copy", note=note)


def layer(kv_format: StorageFormat, add: Callable) -> None:
    """What a decoder layer of training spends between its projections."""
    (q, k, v), Dh = projected(), MODELS["qwen3-8b"][2]
    leaves = [x.contiguous().requires_grad_() for x in (q, k, v)]
    context = PackedAttention(torch.arange(0, TOKENS + 1, 4096, device="cuda"), kv_format)
    call, grad = partial(context.attend, 0, *leaves, random_transform(TOKENS, Dh), Dh**-0.5), random_heads(*q.shape)
    ahead, both = milliseconds(call, REP_MS), milliseconds(lambda: call().backward(grad), REP_MS, leaves)
    add(f"layer of {TOKENS:,}/qwen3-8b/{kv_format}", "forward_ms", ahead, "ms", note="sequences of 4,096")
    add(f"layer of {TOKENS:,}/qwen3-8b/{kv_format}", "forward_backward_ms", both, "ms", note="norm, rotary included")


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        print("benchmarks/attention.py measures a GPU, and there is none here: skipped")
