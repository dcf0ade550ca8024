"""The modules of the decoder as the precision flow sees them: names, inputs and shapes, from the config alone."""

from __future__ import annotations

from octavo.models.config import DecoderConfig
from octavo.numerics.flow_edges import Module


def decoder_modules(config: DecoderConfig) -> list[Module]:
    """Every module of a decoder, in the order of its forward pass."""
    V, D = config.vocab_size, config.hidden_size
    modules = [Module(name="model.embed_tokens", kind="embedding", inputs=(), shape=(V, D))]
    for index in range(config.num_layers):
        modules += _block(config, index, modules[-1].name)
    modules.append(Module(name="model.norm", kind="norm", inputs=(modules[-1].name,), shape=(D,)))
    tied_to = "model.embed_tokens" if config.tied_embeddings else ""
    modules.append(Module(name="lm_head", kind="head", inputs=("model.norm",), shape=(V, D), tied_to=tied_to))
    return modules


def _block(config: DecoderConfig, index: int, h: str) -> list[Module]:
    """One decoder layer, reading the residual stream h."""
    D, F, Dh = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_heads * Dh, config.num_kv_heads * Dh
    layer = f"model.layers.{index}"
    attention, mlp = f"{layer}.self_attn", f"{layer}.mlp"

    def norm(name: str, source: str, width: int) -> Module:
        return Module(name=name, kind="norm", inputs=(source,), shape=(width,))

    def projections(parent: str, source: str, widths: dict[str, int], K: int, bias: bool = False) -> list[Module]:
        names = tuple(f"{parent}.{name}" for name in widths)
        return [
            Module(name=name, kind="projection", inputs=(source,), shape=(N, K), bias=bias, fused=names)
            for name, N in zip(names, widths.values(), strict=True)
        ]

    modules = [norm(f"{layer}.input_layernorm", h, D)]
    widths = {"q_proj": query, "k_proj": key, "v_proj": key}
    modules += projections(attention, modules[-1].name, widths, D, config.qkv_bias)
    q, k, v = (f"{attention}.{name}" for name in widths)
    if config.qk_norm:
        modules += [norm(f"{attention}.q_norm", q, Dh), norm(f"{attention}.k_norm", k, Dh)]
        q, k = modules[-2].name, modules[-1].name
    rotary, cache, out = (f"{attention}.{name}" for name in ("rotary", "kv_cache", "attention"))
    modules += [
        Module(name=rotary, kind="rotary", inputs=(q, k)),
        Module(name=cache, kind="kv_cache", inputs=(rotary, v)),
        Module(name=out, kind="attention", inputs=(rotary, cache)),
        *projections(attention, out, {"o_proj": D}, query),
        Module(name=f"{attention}.residual", kind="residual", inputs=(h, f"{attention}.o_proj")),
        norm(f"{layer}.post_attention_layernorm", f"{attention}.residual", D),
        *projections(mlp, f"{layer}.post_attention_layernorm", {"gate_proj": F, "up_proj": F}, D),
        Module(name=f"{mlp}.act_fn", kind="activation", inputs=(f"{mlp}.gate_proj", f"{mlp}.up_proj")),
        *projections(mlp, f"{mlp}.act_fn", {"down_proj": D}, F),
        Module(name=f"{mlp}.residual", kind="residual", inputs=(f"{attention}.residual", f"{mlp}.down_proj")),
    ]
    return modules
