"""The tables as text: every module once, with the formats of its tensors."""

import io

from rich.console import Console
from tiny_models import tiny_config

from octavo.models.config import decoder_config
from octavo.models.modules import decoder_modules
from octavo.numerics.flow_edges import declare_flow
from octavo.numerics.recipe import get_recipe
from octavo.report.flow_table import flow_report, kept_lines

MODULES = decoder_modules(decoder_config(tiny_config("qwen3")))


def printed(flow, allow_mismatch=False):
    console = Console(file=io.StringIO(), width=220)
    for part in flow_report(flow, allow_mismatch):
        console.print(part, soft_wrap=isinstance(part, str))
    return console.file.getvalue()


def row(text, name):
    """Cells of the row that begins with this module, line by line."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if f" {name} " in line)
    found = []
    for line in lines[start:]:
        if not line.startswith("│"):
            return found
        found.append([cell.strip() for cell in line.split("│")[1:-1]])
    raise AssertionError(name)


def test_a_row_holds_the_formats_of_its_tensors():
    flow = declare_flow(MODULES, rollout=get_recipe("block128"), train=get_recipe("block128"))
    text = printed(flow)
    assert "train, and FProp of rollout, old, reference: recipe block128; between modules bf16; masters and" in text
    first, second, third = row(text, "model.layers.*.self_attn.q_proj")
    assert [cells[0] for cells in (second, third)] == ["k_proj", "v_proj"]
    assert first[1:8] == [
        "6",
        "e4m3 1x128",
        "e4m3 128x128",
        "dY e4m3 1x128",
        "dY X e4m3 128x1",
        "e4m3 128x1",
        "exact E4M3 sums",
    ]
    assert second[4] == "W e4m3 128x128" and second[7] == "FP32 product"
    attention = row(text, "model.layers.*.self_attn.attention")
    assert [cells[2] for cells in attention[:3]] == ["Q P fp16", "K^ V^ bf16", "scores fp32"]
    assert attention[0][6] == "Q K^ V^ Y bf16"
    assert "Rollout and training are one forward" in text and "Export: model/ in bf16" in text


def test_two_forwards_have_two_tables_and_a_list_of_what_differs():
    flow = declare_flow(MODULES, rollout=get_recipe("fp8_channel"), train=get_recipe("block128"), reference=False)
    text = printed(flow)
    assert "rollout: recipe fp8_channel; between modules bf16" in text and "train, and FProp of old: recipe" in text
    assert row(text, "model.layers.*.self_attn.kv_cache")[0][2:6] == ["K V bf16", "", "copy", "kv_cache is bf16"]
    assert "Rollout / training differ, which octavo train refuses:" in text
    assert "fprop X e4m3 row / e4m3 1x128" in text
    assert "differ, as precision.allow_mismatch allows:" in printed(flow, allow_mismatch=True)


def test_what_is_not_fp8_is_listed_by_reason_and_side():
    kept = get_recipe("block128", keep_bf16=("lm_head", "embed_tokens", "layers.1.mlp.down_proj"))
    flow = declare_flow(MODULES, rollout=get_recipe("block128"), train=kept)
    never, named = kept_lines(flow)
    assert never.startswith("train, rollout: never quantised: model.embed_tokens, model.layers.*.input_layernorm, ")
    assert named == "train: keep_bf16 has 'layers.1.mlp.down_proj': model.layers.1.mlp.down_proj"
