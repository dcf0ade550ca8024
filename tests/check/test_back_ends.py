"""Which kernels must agree for a model's layers, and what is said when they do not."""

from dataclasses import replace

import kernel_products
import pytest
import torch
from linear_layers import make_layer

from octavo.bench.gemm import linears_of
from octavo.check.back_ends import back_end_rows
from octavo.kernels import agreement
from octavo.models.config import read_config
from octavo.numerics.recipe import get_recipe

CPU = torch.device("cpu")
PROOFS = ("blocks_agree", "rows_agree", "bf16_agrees", "few_bf16_agree", "w8a16_agrees")


@pytest.fixture
def asked(monkeypatch):
    """What was compared; everything agrees but down_proj."""
    asked = []

    def compare(kind):
        def run(N, K, device, *biased):
            asked.append((kind, N, K, *biased))
            return len(asked) < 4

        return run

    for name in PROOFS:
        monkeypatch.setattr(agreement, name, compare(name))
    return asked


@pytest.mark.parametrize(
    "recipe, kind, alone",
    [
        ("block128", "blocks_agree", "triton"),
        ("rowwise", "rows_agree", "cuBLASLt"),
        ("w8a16", "w8a16_agrees", "triton"),
        ("bf16", "bf16_agrees", "triton"),
    ],
)
def test_every_linear_is_compared_in_its_own_way(asked, recipe, kind, alone):
    shape = read_config("examples/tiny/model")[0]
    rows = list(back_end_rows(shape, get_recipe(recipe), CPU))
    assert [row.status for row in rows] == ["OK", "OK", "OK", "WARN"]
    assert {name for name, *_ in asked} == {kind}
    D, F = shape.hidden_size, shape.intermediate_size
    filled = (lambda n: -(-n // 128) * 128) if recipe == "block128" else (lambda n: n)
    assert asked[-1][1:3] == (D, filled(F)) and asked[2][1:3] == (2 * filled(F), filled(D))
    assert rows[0].name.startswith("qkv_proj ") and "give the same bits" in rows[0].detail
    assert f"so {alone} multiplies every batch: exact, and slower" in rows[3].detail and rows[3].next_step


RAGGED = dict(hidden_size=72, num_heads=3, num_kv_heads=1, head_dim=24, intermediate_size=200, qkv_bias=True)


@pytest.mark.parametrize("recipe, M", [("block128", 150), ("rowwise", 3), ("w8a16", 4096), ("bf16", 4096)])
def test_what_is_compared_is_what_a_run_compares(monkeypatch, asked, recipe, M):
    shape = replace(read_config("examples/tiny/model")[0], **RAGGED)
    list(back_end_rows(shape, get_recipe(recipe), CPU))
    checked = list(asked)
    asked.clear()
    kernel_products.as_on_gpu(monkeypatch)
    for name in PROOFS:
        run = lambda N, K, device, *biased, name=name: asked.append((name, N, K, *biased)) or True  # noqa: E731
        monkeypatch.setattr(agreement, name, run)
    for name, (in_features, projections) in linears_of(shape).items():
        layer = make_layer(recipe, projections, bias=name == "qkv_proj", in_features=in_features)
        with torch.no_grad():
            layer(torch.randn(M, in_features).bfloat16())
    assert asked == checked


def test_layers_that_are_kept_in_bf16_are_compared_as_such(asked):
    shape = read_config("examples/tiny/model")[0]
    recipe = get_recipe("block128", keep_bf16=("lm_head", "embed_tokens", "layers.0.mlp.down_proj", "o_proj"))
    rows = list(back_end_rows(shape, recipe, CPU))
    names = [(row.name.split()[0], kind) for row, (kind, *_) in zip(rows, asked, strict=True)]
    assert names == [
        ("qkv_proj", "blocks_agree"),
        ("o_proj", "bf16_agrees"),
        ("gate_up_proj", "blocks_agree"),
        ("down_proj", "blocks_agree"),
        ("down_proj", "bf16_agrees"),
    ]


def test_the_fp32_recipe_has_nothing_to_compare(asked):
    assert not list(back_end_rows(read_config("examples/tiny/model")[0], get_recipe("fp32"), CPU)) and not asked


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["block128", "rowwise", "w8a16", "bf16"])
def test_on_this_gpu_they_agree(recipe):
    device = torch.device("cuda", torch.cuda.current_device())
    rows = list(back_end_rows(read_config("examples/tiny/model")[0], get_recipe(recipe), device))
    assert [row.status for row in rows] == ["OK"] * 4, rows
