"""Checks of attention inside a decoder that hold in Triton's interpreter and on a GPU."""

from dataclasses import replace
from itertools import pairwise

import kernel_products
import torch
from attention_checks import NORM_EPS, transform_of
from tiny_models import mismatch, tiny_config, tiny_decoder

from octavo.check.exact_rollout import DamagedCache, flip_key_byte
from octavo.kernels.attention import store_kv
from octavo.kernels.heads import transformed
from octavo.layers.attention import PackedAttention
from octavo.models.config import decoder_config
from octavo.numerics.error import relative_error
from octavo.numerics.recipe import get_recipe
from octavo.rollout.engine import Engine, EngineConfig
from octavo.rollout.kv_cache import KVCache, PagedAttention
from octavo.rollout.sampler import SamplingConfig


def exact_gradients(fused, gains, transform, lengths, heads, kv_format, grad_out):
    """Of the projected heads and the gains, in float64 at the values that attention sees, straight through rounding."""
    H, Hkv, Dh = heads
    widths = [H * Dh, Hkv * Dh, Hkv * Dh]
    leaf, gains = fused.cpu().double().requires_grad_(), [g.cpu().double().requires_grad_() for g in gains]
    q, k, v = (x.unflatten(1, (-1, Dh)) for x in leaf.split(widths, dim=1))
    cos, sin = (x.cpu().double()[:, None] for x in (transform.cos, transform.sin))

    def turned(x, gain):
        first, second = (x * (x.square().mean(dim=-1, keepdim=True) + NORM_EPS).rsqrt() * gain).chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    with torch.no_grad():
        seen = [x.unflatten(1, (-1, Dh)) for x in fused.split(widths, dim=1)]
        seen[:2] = transformed(*seen[:2], transform, kv_format)
        seen[1:] = (store_kv(x, kv_format).decode() for x in seen[1:])
    made = turned(q, gains[0]), turned(k, gains[1]), v
    q, k, v = (x + (value.cpu().double() - x).detach() for x, value in zip(made, seen, strict=True))
    outs = []
    for piece in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        q_n, k_n, v_n = (x.repeat_interleave(H // x.shape[1], dim=1).transpose(0, 1) for x in piece)
        out = torch.nn.functional.scaled_dot_product_attention(q_n, k_n, v_n, is_causal=True, scale=Dh**-0.5)
        outs.append(out.transpose(0, 1))
    torch.cat(outs).backward(grad_out.cpu().double())
    return leaf.grad, *(gain.grad for gain in gains)


def check_gradients(kv_format, lengths, heads, back_end="triton", device="cpu"):
    """Of a packed batch, through attention, rotary and qk-norm to what was projected."""
    (H, Hkv, Dh), T = heads, sum(lengths)
    fused = torch.randn(T, (H + 2 * Hkv) * Dh).bfloat16().to(device).requires_grad_()
    transform = transform_of(T, Dh, True, device)
    gains = [transform.q_gain.requires_grad_(), transform.k_gain.requires_grad_()]
    context = PackedAttention(torch.tensor([0, *lengths], device=device).cumsum(0), kv_format, back_end)
    q, k, v = (x.unflatten(1, (-1, Dh)) for x in fused.split([H * Dh, Hkv * Dh, Hkv * Dh], dim=1))
    grad_out = torch.randn(T, H, Dh).bfloat16().to(device)
    context.attend(0, q, k, v, transform, Dh**-0.5).backward(grad_out)
    wanted = exact_gradients(
        fused.detach(), [g.detach() for g in gains], transform, lengths, heads, kv_format, grad_out
    )
    for name, x, exact in zip(("heads", "q gain", "k gain"), (fused, *gains), wanted, strict=True):
        error = relative_error(x.grad.cpu(), exact)  # some roundings to BF16, which is off by 2**-9 at a time
        assert exact.abs().max() > 0.1 and error < 2.0**-7, f"{name}: {error:.3g}"


def check_cache_equals_packed(kv_format, lengths, heads, device="cpu"):
    """The engine's context, prefilling in two chunks and then decoding twice, has the bits of a packed batch."""
    (H, Hkv, Dh), T, page_size, scale = heads, sum(lengths), 16, heads[2] ** -0.5
    fused = torch.randn(T, (H + 2 * Hkv) * Dh).bfloat16().to(device)
    transform = transform_of(T, Dh, True, device)
    boundaries = torch.tensor([0, *lengths], device=device).cumsum(0)

    def heads_of(rows):
        return (x.unflatten(1, (-1, Dh)) for x in fused[rows].split([H * Dh, Hkv * Dh, Hkv * Dh], dim=1))

    everything = torch.arange(T, device=device)
    wanted = PackedAttention(boundaries, kv_format).attend(0, *heads_of(everything), transform, scale)
    assert wanted.abs().max() > 0.5
    config = tiny_config("qwen3", num_hidden_layers=1, num_attention_heads=H, num_key_value_heads=Hkv, head_dim=Dh)
    pages = -(-max(lengths) // page_size)
    cache = KVCache(decoder_config(config), len(lengths) * pages, page_size, kv_format, device)
    table = torch.randperm(cache.num_pages).view(-1, pages).to(device)
    stops = [[0, n // 3, max(n // 3, n - 2), max(n // 3, n - 1), n] for n in lengths]
    for firsts, ends in pairwise(zip(*stops, strict=True)):
        counts = [end - first for first, end in zip(firsts, ends, strict=True)]
        spans = zip(boundaries.tolist(), firsts, ends, strict=False)
        rows = torch.cat([torch.arange(start + first, start + end) for start, first, end in spans]).to(device)
        context = PagedAttention(cache, table, list(firsts), counts)
        now = replace(transform, cos=transform.cos[rows], sin=transform.sin[rows])
        found = context.attend(0, *heads_of(rows), now, scale)
        assert torch.equal(found, wanted[rows]), (kv_format, firsts, ends)


def check_rollout_equals_training(kv_format, monkeypatch):
    """An engine that prefills and decodes with the kernels reports the log-probabilities of a packed forward."""
    kernel_products.as_on_gpu(monkeypatch)
    config = tiny_config("qwen3", num_attention_heads=2, num_key_value_heads=1)
    decoder = tiny_decoder(config, get_recipe("block128", kv_cache=kv_format))
    engine = Engine(decoder, EngineConfig(page_size=8, kv_cache_tokens=256, max_prefill_tokens=70), ())
    prompts = [[token % 97 for token in range(1, 66 * 5, 5)], [7, 3]]
    completions = engine.generate(prompts, SamplingConfig(), max_completion_tokens=3)
    difference = mismatch(decoder, completions, 1.0)
    assert len(difference) == 6 and (difference == 0.0).all(), difference
    engine.cache = DamagedCache(engine.cache, flip_key_byte)
    damaged = engine.generate(prompts[1:], SamplingConfig(), max_completion_tokens=2)
    assert (mismatch(decoder, damaged, 1.0) != 0.0).any()
