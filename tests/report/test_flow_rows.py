"""Which modules share a row."""

import pytest
from tiny_models import tiny_config

from octavo.models.config import decoder_config
from octavo.models.modules import decoder_modules
from octavo.numerics.flow_edges import declare_graph
from octavo.numerics.recipe import get_recipe
from octavo.report.flow_rows import flow_rows, number_ranges


def rows_of(num_layers, *kept):
    modules = decoder_modules(decoder_config(tiny_config("llama", num_hidden_layers=num_layers)))
    recipe = get_recipe("block128", keep_bf16=("lm_head", "embed_tokens", *kept))
    graph = declare_graph("train", modules, recipe)
    return {(row.layers, row.modules): len(row.nodes) for row in flow_rows(graph.nodes)}, graph


def test_equal_layers_and_equal_neighbours_share_a_row():
    rows, graph = rows_of(4)
    assert rows["0-3", "self_attn.q_proj, k_proj, v_proj"] == 12 and rows["0-3", "self_attn.o_proj"] == 4
    assert rows["", "model.embed_tokens"] == rows["", "lm_head"] == 1
    assert sum(rows.values()) == len(graph.nodes)


def test_layers_of_another_kind_have_rows_of_their_own():
    rows, graph = rows_of(5, "layers.[02].mlp.*")
    assert rows["0,2", "mlp.down_proj"] == 2 and rows["1,3-4", "mlp.down_proj"] == 3
    assert rows["0,2", "mlp.gate_proj, up_proj"] == 4 and rows["0-4", "self_attn.o_proj"] == 5
    assert sum(rows.values()) == len(graph.nodes)


@pytest.mark.parametrize("numbers, text", [([0], "0"), ([0, 1, 2], "0-2"), ([0, 2, 3, 4, 9], "0,2-4,9")])
def test_number_ranges(numbers, text):
    assert number_ranges(numbers) == text
