"""The declared graphs: tensors by hand for each recipe, and every way in which two sides can differ."""

import dataclasses
import json
import re

import pytest
from tiny_models import tiny_config

from octavo.models.config import decoder_config
from octavo.models.modules import decoder_modules
from octavo.numerics.flow_edges import declare_flow
from octavo.numerics.precision_flow import PrecisionFlow, lines
from octavo.numerics.recipe import FORWARD_ONLY, RECIPE_NAMES, get_recipe

MODULES = decoder_modules(decoder_config(tiny_config("qwen3")))
QUERY = "model.layers.1.self_attn.q_proj"
ALWAYS = ("lm_head", "embed_tokens")


def flow_of(rollout="block128", train="block128", **sides):
    """A flow of two recipes by name or of changed ones."""
    rollout, train = (get_recipe(side) if isinstance(side, str) else side for side in (rollout, train))
    return declare_flow(MODULES, rollout=rollout, train=train, **sides)


def texts(flow, role, name):
    return {edge.name: edge.text() for edge in flow.graph(role).node(name).edges}


BF16 = {
    "fprop X": "bf16",
    "fprop W": "bf16",
    "fprop Y": "bf16",
    "dgrad dY": "bf16",
    "dgrad W": "bf16",
    "dgrad dX": "bf16",
    "wgrad dY": "bf16",
    "wgrad X": "bf16",
    "saved X": "bf16",
    "master W": "fp32",
    "gradient dW": "fp32",
}
BLOCK128 = BF16 | {
    "fprop X": "e4m3 1x128",
    "fprop W": "e4m3 128x128",
    "dgrad dY": "e4m3 1x128",
    "dgrad W": "e4m3 128x128",
    "wgrad dY": "e4m3 128x1",
    "wgrad X": "e4m3 128x1",
    "saved X": "e4m3 128x1",
}
TENSORWISE = {key: "e4m3 tensor" if BLOCK128[key].startswith("e4m3") else text for key, text in BF16.items()}
ROW, COLUMN = "e4m3 row", "e4m3 column"
PROJECTION = {
    "bf16": BF16,
    "block128": BLOCK128,
    "w8a16": BLOCK128 | {"fprop X": "bf16"},
    "rowwise": BF16
    | {"fprop X": ROW, "fprop W": ROW, "dgrad dY": ROW, "dgrad W": COLUMN}
    | {"wgrad dY": COLUMN, "wgrad X": COLUMN, "saved X": COLUMN},
    "tensorwise": TENSORWISE,
    "tensorwise_static": TENSORWISE | {"fprop X": "e4m3 tensor (frozen x1.25)"},
    "fp32": dict.fromkeys(BF16, "fp32"),
}


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_the_tensors_of_a_projection_are_those_of_its_recipe(name):
    flow = flow_of(name, name)
    assert texts(flow, "train", QUERY) == PROJECTION[name]
    forward = {edge: text for edge, text in PROJECTION[name].items() if edge.startswith("fprop")}
    for role in ("rollout", "old", "reference"):
        assert texts(flow, role, QUERY) == forward
    assert texts(flow, "export", QUERY) == {"export W": PROJECTION[name]["fprop Y"]}
    kernel = "E4M3 sums" if forward["fprop X"].startswith("e4m3") else "ordered sums"
    assert flow.graph("train").node(QUERY).edge("fprop W").kernel == kernel


@pytest.mark.parametrize(
    "recipe, kv, stored, product, decoded",
    [
        ("block128", "fp8", "e4m3 row (2^n scale)", "fp16", "bf16"),
        ("block128", "bf16", "bf16", "bf16", "bf16"),
        ("bf16", "fp8", "e4m3 row (2^n scale)", "fp16", "bf16"),
        ("fp32", "fp32", "fp32", "fp32", "fp32"),
    ],
)
def test_attention_multiplies_in_what_its_cache_asks_for(recipe, kv, stored, product, decoded):
    recipe = get_recipe(recipe, kv_cache=kv)
    flow = flow_of(recipe, recipe)
    cache, attention = (
        texts(flow, "rollout", f"model.layers.0.self_attn.{name}") for name in ("kv_cache", "attention")
    )
    assert cache == {"fprop K": stored, "fprop V": stored}
    assert attention == {
        "fprop Q": product,
        "fprop K^": decoded,
        "fprop V^": decoded,
        "fprop scores": "fp32",
        "fprop P": product,
        "fprop Y": decoded,
    }
    assert ("model.layers.0.self_attn.kv_cache" in flow.kept()) == (kv != "fp8")


def test_norm_head_and_embedding_are_never_quantised_and_logits_are_fp32():
    flow = flow_of()
    assert texts(flow, "rollout", "model.norm") == {"fprop X": "bf16", "fprop W": "fp32", "fprop Y": "bf16"}
    assert texts(flow, "rollout", "lm_head") == {"fprop X": "bf16", "fprop W": "bf16", "fprop logits": "fp32"}
    assert texts(flow, "train", "lm_head")["dgrad dlogits"] == "fp32"
    for name in ("model.norm", "lm_head", "model.embed_tokens", "model.layers.0.self_attn.q_norm"):
        assert flow.kept()[name] == "never quantised"


def test_every_source_is_a_module_and_a_gradient_comes_from_the_readers():
    graph = flow_of().graph("train")
    names = {node.name for node in graph.nodes}
    for node in graph.nodes:
        for edge in node.edges:
            assert names.issuperset(edge.sources), (node.name, edge)
    assert graph.node("model.layers.1.input_layernorm").edge("fprop X").sources == ("model.layers.0.mlp.residual",)
    assert graph.node("model.layers.0.mlp.residual").edge("dgrad dY").sources == (
        "model.layers.1.input_layernorm",
        "model.layers.1.self_attn.residual",
    )


def test_a_tied_head_reads_and_trains_the_embedding_and_is_not_written_twice():
    modules = decoder_modules(decoder_config(tiny_config("qwen3", tie_word_embeddings=True)))
    flow = declare_flow(modules, rollout=get_recipe("block128"), train=get_recipe("block128"))
    head = flow.graph("train").node("lm_head")
    assert head.edge("fprop W").sources == head.edge("gradient dW").sources == ("model.embed_tokens",)
    assert "lm_head" not in [node.name for node in flow.graph("export").nodes]


@pytest.mark.parametrize("name", RECIPE_NAMES)
def test_equal_sides_are_one_forward_whatever_is_saved(name):
    recipe = get_recipe(name)
    saves_more = dataclasses.replace(recipe, saved_activations=recipe.high_precision)
    assert flow_of(recipe, saves_more).differences() == []


@pytest.mark.parametrize("name", FORWARD_ONLY)
def test_a_forward_only_recipe_has_the_forward_of_its_twin_that_trains(name):
    train = get_recipe(FORWARD_ONLY[name], kv_cache="bf16")
    flow = flow_of(name, train)
    assert flow.differences() == []
    assert {node.name: node.kept for node in flow.graph("rollout").nodes} == flow.kept() | {
        node.name: "" for node in flow.graph("rollout").nodes if not node.kept
    }
    cache = {(d.node, d.edge) for d in flow_of(name, FORWARD_ONLY[name]).differences()}
    assert ("model.layers.0.self_attn.kv_cache", "fprop K") in cache
    assert all(".kv_cache" in node or ".attention" in node for node, _ in cache)


@pytest.mark.parametrize(
    "rollout, train, expected",
    [
        (
            get_recipe("block128", kv_cache="bf16"),
            get_recipe("block128"),
            [
                "model.layers.*.self_attn.kv_cache in 2 layers: fprop K bf16 / e4m3 row (2^n scale), "
                "fprop V bf16 / e4m3 row (2^n scale)",
                "model.layers.*.self_attn.attention in 2 layers: fprop Q bf16 / fp16, fprop P bf16 / fp16",
            ],
        ),
        (
            get_recipe("block128", keep_bf16=(*ALWAYS, "layers.1.mlp.down_proj")),
            get_recipe("block128"),
            ["model.layers.1.mlp.down_proj: fprop X bf16 / e4m3 1x128, fprop W bf16 / e4m3 128x128"],
        ),
        (
            get_recipe("tensorwise_static", keep_bf16=(*ALWAYS, "self_attn.*", "gate_proj", "up_proj")),
            get_recipe("tensorwise_static", keep_bf16=(*ALWAYS, "self_attn.*", "gate_proj", "up_proj"), amax_margin=2),
            ["model.layers.*.mlp.down_proj in 2 layers: fprop X e4m3 tensor (frozen x1.25) / e4m3 tensor (frozen x2)"],
        ),
        (
            get_recipe("w8a16", keep_bf16=(*ALWAYS, "self_attn.*", "gate_proj", "up_proj")),
            get_recipe("block128", keep_bf16=(*ALWAYS, "self_attn.*", "gate_proj", "up_proj")),
            [
                "model.layers.*.mlp.down_proj in 2 layers: fprop X bf16 / e4m3 1x128, "
                "fprop W e4m3 128x128 [ordered sums] / e4m3 128x128 [E4M3 sums]"
            ],
        ),
        (
            get_recipe("w8a16", keep_bf16=(*ALWAYS, "self_attn.*", "gate_proj", "up_proj")),
            get_recipe(
                "w8a16", keep_bf16=(*ALWAYS, "self_attn.*", "gate_proj", "up_proj"), scale_rounding="power_of_two"
            ),
            ["model.layers.*.mlp.down_proj in 2 layers: fprop W e4m3 128x128 / e4m3 128x128 (2^n scale)"],
        ),
    ],
)
def test_a_difference_of_one_side_is_named_and_nothing_else(rollout, train, expected):
    flow = flow_of(rollout, train)
    assert lines(flow.differences()) == expected
    with pytest.raises(ValueError, match=re.escape(expected[0])):
        flow.check(allow_mismatch=False)
    flow.check(allow_mismatch=True)


def test_the_error_names_the_first_groups_and_counts_the_others():
    kept = (*ALWAYS, *(f"layers.{i}.{name}" for i in (0, 1) for name in ("*.o_proj", "*.down_proj")))
    changed = [get_recipe("block128", kv_cache="bf16", keep_bf16=kept), get_recipe("rowwise")]
    with pytest.raises(ValueError) as caught:
        flow_of(*changed).check(allow_mismatch=False)
    message = str(caught.value)
    assert "\n" not in message and "precision.allow_mismatch=true" in message
    assert "model.layers.*.self_attn.q_proj, model.layers.*.self_attn.k_proj" in message
    assert "model.layers.*.self_attn.kv_cache in 2 layers" in message
    flow_of("block128", "rowwise").check(allow_mismatch=True)


def test_a_module_that_one_side_lacks_is_a_difference():
    flow = flow_of()
    train = flow.graph("train")
    shorter = dataclasses.replace(train, nodes=tuple(n for n in train.nodes if n.name != "model.norm"))
    flow = PrecisionFlow(graphs=(flow.graph("rollout"), shorter))
    assert lines(flow.differences()) == [
        "model.norm: fprop X bf16 / absent, fprop W fp32 / absent, fprop Y bf16 / absent"
    ]


def test_what_stays_bf16_says_why():
    kept = flow_of(train=get_recipe("block128", keep_bf16=(*ALWAYS, "layers.0.*"))).kept()
    assert kept["model.layers.0.mlp.down_proj"] == "keep_bf16 has 'layers.0.*'"
    assert "model.layers.1.mlp.down_proj" not in kept
    assert flow_of("bf16", "bf16").kept()[QUERY] == "recipe 'bf16' quantises nothing"


@pytest.mark.parametrize(
    "pattern, message",
    [("gate", "'gate', which names no module"), ("gate_proj", "keeps only part of the fused projections .*'up_proj'")],
)
def test_a_pattern_matches_whole_names_of_whole_weights(pattern, message):
    with pytest.raises(ValueError, match=message):
        flow_of(train=get_recipe("block128", keep_bf16=(*ALWAYS, pattern)))


def test_diff_of_two_flows_names_edge_and_roles():
    flow, other = flow_of(), flow_of(train=get_recipe("block128", saved_activations="bf16"), reference=False)
    assert flow.diff(flow) == []
    found = lines(flow.diff(other), roles=True)
    saved = [line for line in found if "saved X e4m3 128x1 / bf16 (train)" in line]
    assert len(saved) == 1 and "model.layers.*.mlp.down_proj in 2 layers" in saved[0]
    assert all("absent (reference)" in line for line in found if line not in saved) and len(found) > 1


def test_diff_names_shapes_and_reasons_too():
    flow, wider = flow_of(), decoder_modules(decoder_config(tiny_config("qwen3", intermediate_size=300)))
    other = declare_flow(wider, rollout=get_recipe("block128"), train=get_recipe("block128"))
    found = lines(flow.diff(other))
    assert len(found) == 2 and "model.layers.*.mlp.down_proj in 2 layers: shape (96, 200) / (96, 300)" in found
    assert "model.layers.*.mlp.gate_proj, model.layers.*.mlp.up_proj in 2 layers: shape (200, 96) / (300, 96)" in found
    both, each = (
        get_recipe("block128", keep_bf16=(*ALWAYS, *kept))
        for kept in (["down_proj"], ["layers.0.mlp.down_proj", "layers.1.*.down_proj"])
    )
    found = lines(flow_of(both, both).diff(flow_of(each, each)))
    why = "why not FP8: keep_bf16 has 'down_proj' / keep_bf16 has 'layers.0.mlp.down_proj'"
    assert found[0] == f"model.layers.0.mlp.down_proj: {why}" and len(found) == 2


@pytest.mark.parametrize("margin", [1.2500001, 1.25 + 2**-52])
def test_sides_that_differ_in_the_last_digit_of_a_margin_differ(margin):
    static = get_recipe("tensorwise_static")
    found = lines(flow_of(static, dataclasses.replace(static, amax_margin=margin)).differences())
    assert len(found) == 1 and f"(frozen x1.25) / e4m3 tensor (frozen x{margin})" in found[0]


def test_json_gives_back_the_flow():
    kept = get_recipe("rowwise", keep_bf16=(*ALWAYS, "layers.[0246].mlp.*", "model.layers.3.self_attn.o_proj"))
    deep = decoder_modules(decoder_config(tiny_config("qwen3", num_hidden_layers=9)))
    for flow in (
        flow_of(),
        flow_of("fp8_tensor", get_recipe("tensorwise_static"), reference=False),
        declare_flow(deep, rollout=kept, train=get_recipe("w8a16")),
    ):
        text = flow.to_json()
        assert PrecisionFlow.from_json(text) == flow
        assert [graph["role"] for graph in json.loads(text)["graphs"]] == [graph.role for graph in flow.graphs]


def test_json_does_not_grow_with_the_layers():
    texts = []
    for num_layers in (3, 64):
        modules = decoder_modules(decoder_config(tiny_config("qwen3", num_hidden_layers=num_layers)))
        flow = declare_flow(modules, rollout=get_recipe("block128"), train=get_recipe("block128"))
        texts.append(flow.to_json())
        assert PrecisionFlow.from_json(texts[-1]) == flow
    kinds = [json.loads(text)["nodes"] for text in texts]
    assert len(kinds[0]) == len(kinds[1]) and len(texts[1]) < len(texts[0]) + 2000 < 60_000
    (first, rest) = [run["layers"] for run in json.loads(texts[1])["graphs"][0]["nodes"] if run["layers"]]
    assert first == [0] and rest == list(range(1, 64))
    norm = next(
        kind
        for kind in kinds[1]
        if kind["name"] == "model.layers.{i}.input_layernorm"
        and kind["edges"][0]["sources"][0].endswith("mlp.residual")
    )
    assert norm["edges"][0]["sources"] == ["model.layers.{i-1}.mlp.residual"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "3",
        '{"nodes": [], "graphs": [{"role": "x", "recipe": "", "nodes": [{"layers": [], "nodes": [0]}]}]}',
        '{"graphs": [{"role": "train", "recipe": "x", "nodes": [{}]}]}',
    ],
)
def test_other_json_is_refused(text):
    with pytest.raises(ValueError, match="not a precision flow"):
        PrecisionFlow.from_json(text)
