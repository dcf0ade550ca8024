"""What vLLM computes otherwise, edge by edge."""

import pytest
from tiny_models import tiny_config
from training_runs import tiny_config as tiny_run

from octavo.models.config import decoder_config
from octavo.models.modules import decoder_modules
from octavo.numerics.flow_edges import declare_flow
from octavo.numerics.flow_vllm import vllm_graph
from octavo.numerics.precision_flow import PrecisionFlow, lines
from octavo.numerics.recipe import get_recipe
from octavo.trainer.precision import declared_flow, rollout_shares_bytes

MODULES = decoder_modules(decoder_config(tiny_config("qwen3")))
CACHE, ATTENTION = "model.layers.1.self_attn.kv_cache", "model.layers.1.self_attn.attention"


def vllm_flow(recipe, **changes):
    chosen = get_recipe(recipe, **changes)
    flow = declare_flow(MODULES, rollout=chosen, train=chosen)
    return PrecisionFlow(graphs=(vllm_graph(flow.graph("rollout")), *flow.graphs[1:]))


def formats(flow):
    """{module and edge: the rollout's / training's} where more than the kernel differs."""
    return {
        f"{found.node} {found.edge}": f"{found.left} / {found.right}"
        for found in flow.differences()
        if "[" not in found.left
    }


@pytest.mark.parametrize("recipe", ["bf16", "block128"])
def test_gains_the_rotary_table_and_logits_are_bf16(recipe):
    found = formats(vllm_flow(recipe, kv_cache="bf16"))
    norms = ("input_layernorm", "self_attn.q_norm", "self_attn.k_norm", "post_attention_layernorm")
    gains = {f"model.layers.{index}.{name} fprop W": "bf16 / fp32" for index in (0, 1) for name in norms}
    tables = {f"model.layers.{index}.self_attn.rotary fprop cos sin": "bf16 / fp32" for index in (0, 1)}
    assert found == gains | tables | {"model.norm fprop W": "bf16 / fp32", "lm_head fprop logits": "bf16 / fp32"}


def test_an_fp8_cache_has_one_scale_and_is_multiplied_in_fp8():
    found = formats(vllm_flow("block128", kv_cache="fp8"))
    assert {key: text for key, text in found.items() if key.startswith((CACHE, ATTENTION))} == {
        f"{CACHE} fprop K": "e4m3 tensor / e4m3 row (2^n scale)",
        f"{CACHE} fprop V": "e4m3 tensor / e4m3 row (2^n scale)",
        f"{ATTENTION} fprop Q": "e4m3 tensor / fp16",
        f"{ATTENTION} fprop K^": "e4m3 tensor / bf16",
        f"{ATTENTION} fprop V^": "e4m3 tensor / bf16",
        f"{ATTENTION} fprop P": "e4m3 tensor / fp16",
    }


def test_every_product_is_by_another_kernel_and_what_is_copied_is_not():
    flow = vllm_flow("block128", kv_cache="bf16")
    differing = {(found.node, found.edge) for found in flow.differences()}
    same = {
        (node.name, edge.name)
        for node in flow.graph("rollout").nodes
        for edge in node.edges
        if (node.name, edge.name) not in differing
    }
    assert {kind for kind, edge in same if edge != "fprop Y"} == {"model.embed_tokens"} | {
        f"model.layers.{index}.self_attn.kv_cache" for index in (0, 1)
    }
    text = "fprop X e4m3 1x128 [vLLM's kernel] / e4m3 1x128 [E4M3 sums]"
    assert any("mlp.down_proj in 2 layers" in line and text in line for line in lines(flow.differences()))


def test_a_run_declares_it_and_reads_the_policys_bytes(tmp_path):
    precision = {"recipe": "w8a16", "rollout": "block128", "allow_mismatch": True}
    config = tiny_run(tmp_path, precision=precision, rollout__engine="vllm")
    flow = declared_flow(config)
    assert flow.graph("rollout").node("lm_head").edge("fprop logits").format == "bf16"
    assert rollout_shares_bytes(config, flow)  # the weights of both are the same
    own = tiny_run(tmp_path, precision=precision)
    assert not rollout_shares_bytes(own, declared_flow(own))
    for other in ({"recipe": "bf16"}, {"scale_rounding": "power_of_two"}, {"keep_bf16": ["down_proj"]}):
        sides = {"allow_mismatch": True, "train": other}
        differing = tiny_run(tmp_path, precision=sides, rollout__engine="vllm")
        assert not rollout_shares_bytes(differing, declared_flow(differing)), other
