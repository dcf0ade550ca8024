"""The tables as text: every module once, with the formats of its tensors."""

import io

from rich.console import Console
from rich.text import Text
from tiny_models import tiny_config

from octavo.models.config import decoder_config
from octavo.models.modules import decoder_modules
from octavo.numerics.flow_edges import declare_flow
from octavo.numerics.recipe import get_recipe
from octavo.report.flow_table import flow_report, kept_lines

MODULES = decoder_modules(decoder_config(tiny_config("qwen3")))


def printed(flow, allow_mismatch=False, width=150):
    console = Console(file=io.StringIO(), width=width)
    for part in flow_report(flow, allow_mismatch):
        console.print(part, soft_wrap=isinstance(part, Text))
    return console.file.getvalue()


def row(text, layers, module):
    """The lines of a module's row, one space between words."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith(f"{layers} {module} "))
    return [lines[start].removeprefix(f"{layers} {module} "), *lines[start + 1 : lines.index("", start)]]


PROJECTION = [
    "FProp X e4m3 1x128 E4M3 sums",
    "k_proj W e4m3 128x128",
    "v_proj",
    "DGrad dY e4m3 1x128 any order",
    "W e4m3 128x128",
    "WGrad dY X e4m3 128x1 any order",
    "saved X e4m3 128x1 copy",
]


def test_a_row_holds_the_formats_of_its_tensors():
    flow = declare_flow(MODULES, rollout=get_recipe("block128"), train=get_recipe("block128"))
    text = printed(flow)
    first, *_ = text.splitlines()
    assert first == (
        "train, and FProp of rollout, old, reference: recipe block128; between modules bf16; masters and gradients fp32"
    )
    assert row(text, "0-1", "self_attn.q_proj") == PROJECTION
    assert row(text, "0-1", "self_attn.attention") == [
        "FProp Q P fp16 ordered sums, FP32 softmax",
        "K^ V^ bf16",
        "scores fp32",
        "DGrad dY bf16 any order",
        "P fp32",
        "saved Q K^ V^ Y bf16 copy",
    ]
    assert "Rollout and training are one forward" in text and "Export: model/ in bf16" in text


def test_a_table_fits_into_80_columns_and_breaks_no_word():
    static = get_recipe("tensorwise_static", scale_rounding="power_of_two")
    for recipe in (get_recipe("block128"), static):
        flow = declare_flow(MODULES, rollout=recipe, train=recipe)
        narrow, wide = (printed(flow, width=width).split("Rollout and training")[0] for width in (80, 300))
        table = narrow.splitlines()[1:]
        assert max(len(line.rstrip()) for line in table) <= 80
        assert sorted(narrow.split()) == sorted(wide.split())


def test_two_forwards_have_two_tables_and_a_list_of_what_differs():
    flow = declare_flow(MODULES, rollout=get_recipe("fp8_channel"), train=get_recipe("block128"), reference=False)
    text = printed(flow)
    assert "rollout: recipe fp8_channel; between modules bf16\n" in text and "train, and FProp of old: recipe" in text
    assert row(text, "0-1", "self_attn.kv_cache") == ["FProp K V bf16 copy"]
    assert "rollout: kv_cache is bf16: layers 0-1: self_attn.kv_cache" in text
    assert "Rollout / training differ, which octavo train refuses:" in text
    assert "fprop X e4m3 row / e4m3 1x128" in text
    assert "differ, as precision.allow_mismatch allows:" in printed(flow, allow_mismatch=True)


def test_what_is_not_fp8_is_listed_by_reason_and_side():
    kept = get_recipe("block128", keep_bf16=("lm_head", "embed_tokens", "layers.1.mlp.down_proj"))
    flow = declare_flow(MODULES, rollout=get_recipe("block128"), train=kept)
    never, named = kept_lines(flow)
    assert never.startswith(
        "train, rollout: never quantised: model.embed_tokens, model.norm, lm_head; layers 0-1: input_"
    )
    assert named == "train: keep_bf16 has 'layers.1.mlp.down_proj': layers 1: mlp.down_proj"
