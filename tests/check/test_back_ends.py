"""Which kernels must agree for a model's layers, and what is said when they do not."""

import pytest
import torch

from octavo.check.back_ends import back_end_rows
from octavo.kernels import agreement
from octavo.models.config import read_config
from octavo.numerics.recipe import get_recipe

CPU = torch.device("cpu")


@pytest.fixture
def asked(monkeypatch):
    """What was compared; everything agrees but down_proj."""
    asked = []

    def compare(kind):
        def run(N, K, device):
            asked.append((kind, N, K))
            return len(asked) < 4

        return run

    for name in ("blocks_agree", "rows_agree", "bf16_agrees"):
        monkeypatch.setattr(agreement, name, compare(name))
    return asked


@pytest.mark.parametrize(
    "recipe, kind, alone",
    [
        ("block128", "blocks_agree", "triton"),
        ("rowwise", "rows_agree", "cuBLASLt"),
        ("w8a16", "bf16_agrees", "triton"),
        ("bf16", "bf16_agrees", "triton"),
    ],
)
def test_every_linear_is_compared_in_its_own_way(asked, recipe, kind, alone):
    shape = read_config("examples/tiny/model")[0]
    rows = list(back_end_rows(shape, get_recipe(recipe), CPU))
    assert [row.status for row in rows] == ["OK", "OK", "OK", "WARN"]
    assert {name for name, _, _ in asked} == {kind}
    D, F = shape.hidden_size, shape.intermediate_size
    filled = (lambda n: -(-n // 128) * 128) if recipe == "block128" else (lambda n: n)
    assert asked[-1][1:] == (filled(D), filled(F)) and asked[2][1:] == (2 * filled(F), filled(D))
    assert rows[0].name.startswith("qkv_proj ") and "give the same bits" in rows[0].detail
    assert f"so {alone} multiplies every batch: exact, and slower" in rows[3].detail and rows[3].next_step


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["block128", "rowwise", "w8a16", "bf16"])
def test_on_this_gpu_they_agree(recipe):
    device = torch.device("cuda", torch.cuda.current_device())
    rows = list(back_end_rows(read_config("examples/tiny/model")[0], get_recipe(recipe), device))
    assert [row.status for row in rows] == ["OK"] * 4, rows
