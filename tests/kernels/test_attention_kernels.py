"""The kernels of attention without a GPU: compiled for Hopper, interpreted, and the layouts that back ends take."""

import json

import pytest
import torch
from kernel_checks import REPO, WAITS_AND_LETS_START, in_another_process, interpreted, needs_triton

from octavo.kernels.attention_backward import BackwardName, attention_backward
from octavo.kernels.triton_attention import FEW_PROGRAMS, decode_tiles, num_warps, packed_tiles, spreads, tiles_of
from octavo.numerics.error import relative_error


def queries_of(table):
    """(sequence, position, packed query) of every query that some tile takes."""
    return [
        (sequence, position + i, first + i) for first, size, position, sequence in table.tolist() for i in range(size)
    ]


@pytest.mark.parametrize("rows, group", [(16, 1), (16, 7), (64, 4), (64, 7), (128, 3)])
@pytest.mark.parametrize("lengths", [[1], [0, 5, 0, 130, 64, 1], [16, 16, 16], []])
def test_tiles_take_every_query_once(rows, group, lengths):
    boundaries = torch.tensor([0, *lengths]).cumsum(0)
    firsts = torch.randint(100, (len(lengths),))
    for given in (None, firsts):
        tiles = tiles_of(boundaries, given, sum(lengths), group, rows)
        starts = [0] * len(lengths) if given is None else given.tolist()
        wanted = [
            (n, start + i, int(boundaries[n]) + i)
            for n, (start, length) in enumerate(zip(starts, lengths, strict=True))
            for i in range(length)
        ]
        assert sorted(queries_of(tiles.table)) == wanted
        needed = tiles.table[tiles.table[:, 1] > 0]
        assert (needed[:, 1] * group <= rows).all() and (tiles.table[tiles.table[:, 1] == 0] == 0).all()
        assert needed[:, 2].tolist() == sorted(needed[:, 2].tolist(), reverse=True), "those with most keys first"


def test_more_heads_than_rows_are_refused():
    with pytest.raises(ValueError, match="at most 16 query heads for each KV head in a tile of 16 rows; got 17"):
        tiles_of(torch.tensor([0, 5]), None, 5, 17, 16)


def test_warps():
    assert [num_warps(rows, FEW_PROGRAMS) for rows in (16, 64, 128)] == [1, 4, 8]
    assert [num_warps(rows, 1) for rows in (16, 64, 128)] == [2, 4, 8]


def test_few_long_sequences_are_spread():
    def spread(positions, group, pages):
        tiles = decode_tiles(torch.tensor(positions), group)
        return spreads(tiles, 8, torch.zeros(len(positions), pages), 16)

    assert spread([3, 5000], 4, 512) and spread([1] * 12, 16, 64)
    assert not spread([1] * 13, 4, 512)  # 104 programs
    assert not spread([3, 5], 4, 63)  # 1,008 keys
    assert not spread([3], 17, 512)  # more rows than a tile has


@needs_triton
def test_every_kernel_compiles_for_hopper():
    found = json.loads(in_another_process(REPO / "tests/kernels/attention_aot.py"))
    assert len(found) == 21
    for name, counts in found.items():
        kind, kv_format = name.split()[:2]
        tall = kind in ("prefill", "packed", "many", "grad_q", "grad_kv", "gradients_q", "gradients_kv")
        by = counts["wgmma.mma_async"] > 0, counts["mma.sync"] > 0
        small = kind in ("decode", "codes") or (kind == "spread" and "weights" not in name)
        assert by == (tall, small), (name, counts)
        if kind == "codes":  # which are read once, and stay in the registers that a product reads
            assert counts["ldmatrix"] == 13 and counts["st.shared"] < 16, (name, counts)  # eight of codes
        if tall or small:
            inputs = {"fp8": "f32.f16.f16", "bf16": "f32.bf16.bf16"}[kv_format]
            assert counts[inputs] == counts["wgmma.mma_async"] + counts["mma.sync"], (name, counts)
        if "codes" not in name:
            assert counts["together"] in ([2], []), (name, counts)  # the same for tiles of any height
        # One warp that holds 16 rows spills in the last block of keys of a sequence; others a little at width 96, and
        # what holds dK and dV in registers some addresses.
        most = {"decode": 64 if "few" in name else 1024, "gradients_kv": 192}.get(kind, 64)
        assert counts["stack"] <= most, (name, counts)
        assert counts["shared"] <= 227 * 1024, (name, counts)
        assert (counts["first"][:2] == WAITS_AND_LETS_START) == (kind in ("heads", "codes")), (name, counts)
        if kind == "spread":  # which first find what the kernel ahead does not write
            assert counts["early"] == WAITS_AND_LETS_START, (name, counts)
        assert counts["atom"] == (1 if name.startswith("heads fp8") else 0), (name, counts)


@needs_triton
def test_forward_in_the_interpreter():
    interpreted(
        "from attention_checks import *\n"
        "for lengths, heads, kv_format in (([70, 1, 40], (4, 2, 64), 'fp8'), ([67, 5], (7, 1, 96), 'bf16')):\n"
        "    p = problem(lengths, heads, kv_format, 8)\n"
        "    check_values(p, kv_format)\n"
        "    check_reference(p, kv_format)\n"
        "    check_same_bits(p, rows=(16, 128), chunks=(30,))\n"
        "    check_every_length(p, [[64, 0, 9, 62], [66, 63]])\n"
        "    check_damage_is_seen(p)\n"
        "    check_bad_values(p)\n"
    )


@needs_triton
def test_spread_decode_in_the_interpreter():
    interpreted(
        "from attention_checks import *\n"
        "for kv_format in ('bf16', 'fp8'):\n"
        "    check_spread(problem([130, 64, 3], (2, 1, 64), kv_format, 16), [129, 63, 2])\n"
        "check_spread(problem([70, 66], (6, 1, 24), 'bf16', 8), [69, 63])\n"
    )


@needs_triton
def test_backward_and_heads_in_the_interpreter():
    interpreted(
        "from attention_checks import *\n"
        "from gradient_checks import *\n"
        "check_backward([70, 1, 0, 20], (4, 2, 64))\n"
        "check_backward([30, 5], (7, 1, 96))\n"
        "check_heads(19, (4, 2, 64), 'fp8', False)\n"
        "check_heads(5, (3, 1, 96), 'bf16', True)\n"
        "check_heads(5, (3, 1, 24), 'fp8', True)\n"
        "check_gathered(7, (4, 2, 64), 'fp8')\n"
        "check_gathered(5, (3, 3, 24), 'bf16')\n"
    )


@needs_triton
def test_gradients_and_pages_in_the_interpreter():
    interpreted(
        "from attention_layers import *\n"
        "check_gradients('fp8', [40, 3, 27], (4, 2, 64))\n"
        "check_gradients('bf16', [66], (3, 1, 24))\n"
        "check_cache_equals_packed('fp8', [70, 1, 2], (4, 2, 64))\n"
    )


@needs_triton
def test_rollout_equals_training_in_the_interpreter():
    interpreted(
        "import pytest\n"
        "from attention_layers import *\n"
        "for kv_format in ('bf16', 'fp8'):\n"
        "    with pytest.MonkeyPatch.context() as patch:\n"
        "        check_rollout_equals_training(kv_format, patch)\n"
    )


def by_hand(d_out, q, k, v, out, logsumexp, scale):
    """Gradients of one sequence [L, heads, Dh] in float64, from the logsumexp [L, H] that is given."""
    group = q.shape[1] // k.shape[1]
    d_out, q, k, v, out = (x.double() for x in (d_out, q, k, v, out))
    wide_k, wide_v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, wide_k) * scale
    p = torch.exp(scores - logsumexp.double().T[..., None]).tril()
    grad_v = torch.einsum("hqk,qhd->khd", p, d_out)
    d_p = torch.einsum("qhd,khd->hqk", d_out, wide_v)
    d_scores = p * (d_p - (d_out * out).sum(dim=-1).T[..., None]) * scale
    grad_k = torch.einsum("hqk,qhd->khd", d_scores, q)
    grad_k, grad_v = (x.unflatten(1, (-1, group)).sum(dim=2) for x in (grad_k, grad_v))
    return [x.bfloat16() for x in (torch.einsum("hqk,khd->qhd", d_scores, wide_k), grad_k, grad_v)]


def as_schema(op, arguments, scale):
    """The arguments by the names that torch's operator has for them."""
    schema = op.default._schema
    names = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    assert len(names) == len(arguments)
    return dict(zip(names, arguments, strict=True)) | {"scale": scale}


def flash_by_hand(op):
    """What torch's FlashAttention takes: packed sequences, logsumexp [H, T], int32 boundaries."""

    def run(*arguments, scale):
        a = as_schema(op, arguments, scale)
        assert a["cum_seq_q"].dtype == torch.int32 and torch.equal(a["cum_seq_q"], a["cum_seq_k"])
        assert a["is_causal"] is True and a["dropout_p"] == 0.0
        assert a["logsumexp"].is_contiguous() and a["logsumexp"].shape == a["query"].shape[1::-1]
        counts = a["cum_seq_q"].diff().tolist()
        assert a["max_q"] == a["max_k"] == max(counts)
        tensors = [a[name] for name in ("grad_out", "query", "key", "value", "out")] + [a["logsumexp"].T]
        pieces = zip(*(x.split(counts) for x in tensors), strict=True)
        return [torch.cat(parts) for parts in zip(*(by_hand(*piece, scale) for piece in pieces), strict=True)]

    return run


def cudnn_by_hand(op):
    """What torch's cuDNN attention takes: [1, heads, L, Dh] of one length, logsumexp [1, H, L, 1]."""

    def run(*arguments, scale):
        a = as_schema(op, arguments, scale)
        length = a["query"].shape[2]
        assert a["logsumexp"].is_contiguous() and a["logsumexp"].shape == (1, a["query"].shape[1], length, 1)
        assert (a["max_q"], a["max_k"], a["dropout_p"], a["is_causal"]) == (length, length, 0.0, True)
        assert a["attn_bias"] is a["cum_seq_q"] is a["cum_seq_k"] is None
        dense = [a[name][0].transpose(0, 1) for name in ("grad_out", "query", "key", "value", "out")]
        return [x.transpose(0, 1)[None] for x in by_hand(*dense, a["logsumexp"][0, ..., 0].T, scale)]

    return run


BACK_ENDS = {
    "flash": ("_flash_attention_backward", flash_by_hand),
    "cudnn": ("_scaled_dot_product_cudnn_attention_backward", cudnn_by_hand),
}


@pytest.mark.parametrize("back_end", BACK_ENDS)
def test_a_back_end_of_torch_gets_what_it_takes(monkeypatch, back_end):
    lengths, H, Hkv, Dh, scale = [9, 0, 1, 20], 4, 2, 16, 0.3
    T, cu_seqlens = sum(lengths), torch.tensor([0, *lengths]).cumsum(0)
    q, k, v, d_out = (torch.randn(T, n, Dh).bfloat16() for n in (H, Hkv, Hkv, H))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    outs, sums = [], []
    for q_n, k_n, v_n in zip(*(x.split(lengths) for x in leaves), strict=True):
        scores = torch.einsum("qhd,khd->hqk", q_n, k_n.repeat_interleave(2, dim=1)) * scale
        scores = scores.masked_fill(torch.ones(len(q_n), len(q_n)).triu(1).bool(), -torch.inf)
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v_n.repeat_interleave(2, dim=1)))
        sums.append(scores.logsumexp(dim=-1).T)
    out, logsumexp = torch.cat(outs), torch.cat(sums).float().detach()
    out.backward(d_out.double())
    name, by = BACK_ENDS[back_end]
    monkeypatch.setattr(torch.ops.aten, name, by(getattr(torch.ops.aten, name)))
    tiles = packed_tiles(cu_seqlens, T, H // Hkv, Dh)
    # The gradient comes as a view of something larger, as it may.
    wide = torch.stack([d_out, d_out], dim=-1)[..., 0]
    found = attention_backward(wide, q, k, v, out.detach().bfloat16(), logsumexp, cu_seqlens, tiles, scale, back_end)
    for x, leaf in zip(found, leaves, strict=True):
        assert leaf.grad.abs().max() > 0.1
        assert x.shape == leaf.shape and x.is_contiguous() and relative_error(x, leaf.grad) < 2.0**-7


def test_another_back_end_is_refused():
    tensors, none = [torch.zeros(3, 2, 16).bfloat16()] * 5, torch.zeros(3, 2)
    cu_seqlens = torch.tensor([0, 3])
    other: BackwardName = "fa3"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="attention_backward must be one of gluon, triton, flash, cudnn; got 'fa3'"):
        attention_backward(*tensors, none, cu_seqlens, packed_tiles(cu_seqlens, 3, 1, 16), 1.0, other)
    with pytest.raises(ValueError, match=r"'gluon' wants .* heads of width 64 or 128; got width 16. Use 'triton'"):
        attention_backward(*tensors, none, cu_seqlens, packed_tiles(cu_seqlens, 3, 1, 16), 1.0, "gluon")


@pytest.mark.parametrize("back_end", [None, "gluon", "triton", "flash", "cudnn"])
def test_no_tokens(back_end):
    q, cu_seqlens = torch.zeros(0, 2, 16).bfloat16(), torch.tensor([0])
    found = attention_backward(
        *[q] * 5, torch.zeros(0, 2), cu_seqlens, packed_tiles(cu_seqlens, 0, 1, 16), 1.0, back_end
    )
    assert [x.shape for x in found] == [(0, 2, 16)] * 3
