"""What the graphs declare is what the decoder computes: the numbers worked out from the edges alone, to the bit."""

import pytest
import torch
from declared_numbers import DTYPE, backward, forward
from tiny_models import lay_end_to_end, masters_by_name, random_prompts, tiny_config, tiny_decoder

from octavo.kernels import attention
from octavo.layers.attention import PackedAttention
from octavo.layers.linear import FP8Linear
from octavo.models.config import decoder_config
from octavo.models.decoder import Norm
from octavo.models.modules import decoder_modules
from octavo.numerics.flow_edges import declare_flow
from octavo.numerics.precision_flow import compare
from octavo.numerics.recipe import FORWARD_ONLY, RECIPE_NAMES, get_recipe

ALWAYS = ("lm_head", "embed_tokens")
VARIANTS = {
    **{name: get_recipe(name) for name in RECIPE_NAMES},
    "fp8 KV alone": get_recipe("bf16", kv_cache="fp8"),
    "bf16 KV": get_recipe("block128", kv_cache="bf16"),
    "bf16 saved": get_recipe("rowwise", saved_activations="bf16"),
    "2^n": get_recipe("block128", scale_rounding="power_of_two"),
    "2^n w8a16": get_recipe("w8a16", scale_rounding="power_of_two", kv_cache="bf16"),
    "2^n static": get_recipe("tensorwise_static", scale_rounding="power_of_two", amax_margin=2.0),
    "kept": get_recipe("rowwise", keep_bf16=(*ALWAYS, "layers.0.*", "layers.1.self_attn.o_proj")),
    "kept in w8a16": get_recipe("w8a16", keep_bf16=(*ALWAYS, "q_proj", "k_proj", "v_proj", "layers.1.mlp.down_proj")),
}
CASES = [(name, "qwen3", False) for name in VARIANTS] + [
    (name, family, tied)
    for name in ("block128", "w8a16", "tensorwise", "bf16", "kept")
    for family, tied in (("llama", False), ("qwen2", True))
]


def run(name, family, tied):
    """(decoder, flow, packed batch) of a variant, sequences of 1 to 90 tokens."""
    config = tiny_config(
        family, tie_word_embeddings=tied, hidden_size=160, num_attention_heads=5, num_key_value_heads=1
    )
    recipe = VARIANTS.get(name) or get_recipe(name)
    flow = declare_flow(
        decoder_modules(decoder_config(config)),
        rollout=recipe,
        train=recipe if name in VARIANTS else get_recipe("bf16"),
    )
    return tiny_decoder(config, recipe), flow, lay_end_to_end(random_prompts(0, 5, 1, 90))


@pytest.mark.parametrize("name, family, tied", [*CASES, *((name, "qwen2", False) for name in FORWARD_ONLY)])
def test_the_forward_is_the_declared_one(name, family, tied):
    decoder, flow, (tokens, positions, cu_seqlens) = run(name, family, tied)
    with torch.no_grad():
        hidden = decoder(tokens, positions, PackedAttention(cu_seqlens, decoder.recipe.kv_cache))
        logits = decoder.logits(hidden)
    declared = forward(flow.graph("rollout"), decoder, tokens, positions, cu_seqlens)
    assert torch.equal(declared["model.norm"], hidden)
    assert torch.equal(declared["lm_head"], logits) and logits.std() > 0.1


def test_the_declared_numbers_are_equal_exactly_where_the_graphs_are():
    outs = {}
    for name in VARIANTS:
        decoder, flow, batch = run(name, "qwen3", False)
        graph = flow.graph("rollout")
        outs[name] = graph, forward(graph, decoder, *batch)["lm_head"]
    for name, (graph, logits) in outs.items():
        for other, (other_graph, other_logits) in outs.items():
            assert torch.equal(logits, other_logits) == (compare(graph, other_graph) == []), (name, other)


@pytest.mark.parametrize("name", ["block128", "bf16 KV", "fp8 KV alone", "fp32"])
def test_attention_multiplies_in_the_declared_formats(name, monkeypatch):
    decoder, flow, (tokens, positions, cu_seqlens) = run(name, "qwen3", False)
    seen = []

    def spy(function):
        return lambda *args: seen.extend(x.dtype for x in args if isinstance(x, torch.Tensor)) or function(*args)

    for function in ("to_grid", "_weighted_values"):
        monkeypatch.setattr(attention, function, spy(getattr(attention, function)))
    with torch.no_grad():
        decoder(tokens, positions, PackedAttention(cu_seqlens, decoder.recipe.kv_cache))
    node = flow.graph("rollout").node("model.layers.0.self_attn.attention")
    assert seen[:4] == [DTYPE[node.edge(f"fprop {tensor}").format] for tensor in ("Q", "K^", "P", "V^")]


@pytest.mark.parametrize("name, family, tied", CASES)
def test_the_backward_is_the_declared_one(name, family, tied):
    decoder, flow, (tokens, positions, cu_seqlens) = run(name, family, tied)
    nodes = {node.name: node for node in flow.graph("train").nodes}
    masters = {name: master.clone() for name, master in masters_by_name(decoder).items()}
    inputs, grads, saved = {}, {}, set()
    for module in decoder.modules():
        if isinstance(module, FP8Linear | Norm):
            module.register_forward_hook(lambda module, args, out: inputs.update({module: args[0].detach()}))
            module.register_full_backward_hook(lambda module, dx, dy: grads.update({module: (dx[0], dy[0])}))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.add((x.data_ptr(), x.dtype)) or x, lambda x: x):
        hidden = decoder(tokens, positions, PackedAttention(cu_seqlens, decoder.recipe.kv_cache))
        logprobs, _ = decoder.logprobs(hidden, tokens, 1.0)
    logprobs.sum().backward()
    for index, block in enumerate(decoder.blocks()):
        for parent, layer in (
            ("self_attn", block.qkv_proj),
            ("self_attn", block.o_proj),
            ("mlp", block.gate_up_proj),
            ("mlp", block.down_proj),
        ):
            group = [nodes[f"model.layers.{index}.{parent}.{name}"] for name in layer.projections]
            grad_x, grad_y = grads[layer]
            assert grad_y.abs().max() > 0.0 and grad_y.dtype == decoder.dtype
            wanted = backward(group, masters, inputs[layer], grad_y)
            found = [grad_x, layer.weight.grad, None if layer.bias is None else layer.bias.grad]
            for mine, its in zip(wanted, found, strict=True):
                assert its is None or (mine.dtype == its.dtype and torch.equal(mine, its)), (
                    index,
                    parent,
                    list(layer.projections),
                )
        for name, norm in (("input_layernorm", block.input_norm), ("post_attention_layernorm", block.post_norm)):
            node = nodes[f"model.layers.{index}.{name}"]
            grad_x, grad_y = grads[norm]
            found = {"dgrad dY": grad_y, "dgrad dX": grad_x, "gradient dW": norm.weight.grad, "saved X": inputs[norm]}
            for edge, tensor in found.items():
                assert tensor.dtype == DTYPE[node.edge(edge).format], (name, edge)
            assert (inputs[norm].data_ptr(), inputs[norm].dtype) in saved
    for name, master in (("model.embed_tokens", decoder.embed_tokens), ("lm_head", decoder.lm_head)):
        if master is not None:
            assert master.grad.dtype == DTYPE[nodes[name].edge("gradient dW").format]
    assert (hidden.data_ptr(), DTYPE[nodes["lm_head"].edge("saved X").format]) in saved
