"""The picture's words and colours, read back from the SVG."""

import re

import pytest
from tiny_models import tiny_config

from octavo.models.config import decoder_config
from octavo.models.modules import decoder_modules
from octavo.numerics.flow_edges import declare_flow
from octavo.numerics.recipe import get_recipe
from octavo.report.flow_picture import COLOURS, DIFFERS, draw_flow, usual_layer

MODULES = decoder_modules(decoder_config(tiny_config("qwen3", num_hidden_layers=3)))
ALWAYS = ("lm_head", "embed_tokens")


def svg_of(tmp_path, rollout, train):
    flow = declare_flow(MODULES, rollout=rollout, train=train, reference=False)
    draw_flow(flow, tmp_path / "flow.svg", "tiny")
    return flow, (tmp_path / "flow.svg").read_text()


def words(svg):
    """The texts, which matplotlib leaves as comments beside their outlines."""
    return re.findall(r"<!-- (.*?) -->", svg)


def test_every_role_module_and_tensor_is_there(tmp_path):
    recipe = get_recipe("block128")
    flow, svg = svg_of(tmp_path, recipe, recipe)
    found = words(svg)
    for text in ("rollout (block128)", "train (block128)", "export", "self_attn.q_proj, k_proj, v_proj", "lm_head"):
        assert found.count(text) == 1, text
    assert found.count("scores") == 3  # rollout, old, train
    assert found.count("128x1") == 3 * 4  # dY, X, saved X of qkv, o, gate and up, down
    layer = [node for node in flow.graph("train").nodes if node.name.startswith("model.layers.0.")]
    assert sum(edge.format == "e4m3" for node in layer for edge in node.edges) > 0
    for colour in COLOURS.values():
        assert colour in svg
    assert DIFFERS not in svg


def test_modules_that_differ_are_outlined_on_both_sides(tmp_path):
    down = get_recipe("block128", keep_bf16=(*ALWAYS, "down_proj"))
    _, svg = svg_of(tmp_path, get_recipe("block128"), down)
    assert svg.count(f"stroke: {DIFFERS}") == 2 + 1  # and the legend
    assert "rollout and training differ" in words(svg)


def test_the_layer_drawn_is_of_the_commonest_kind(tmp_path):
    flow, svg = svg_of(tmp_path, *[get_recipe("block128", keep_bf16=(*ALWAYS, "layers.0.*"))] * 2)
    assert usual_layer(flow) == (1, 2, 3)
    assert "tiny: layer 1 and the head (2 of 3 layers are alike; the table has all)" in words(svg)


def test_another_kind_of_file_is_refused(tmp_path):
    flow = declare_flow(MODULES, rollout=get_recipe("bf16"), train=get_recipe("bf16"))
    with pytest.raises(ValueError, match="flow.pdf is neither .svg nor .png"):
        draw_flow(flow, tmp_path / "flow.pdf", "tiny")
    draw_flow(flow, tmp_path / "flow.png", "tiny")
    assert (tmp_path / "flow.png").read_bytes().startswith(b"\x89PNG")
