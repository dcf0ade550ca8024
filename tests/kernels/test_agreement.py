"""The proof that back ends agree: what it compares, and that a difference anywhere in that is seen. Here in float64."""

import kernel_products
import pytest
import torch

from octavo.kernels import agreement, gemm
from octavo.kernels.operands import grid_operand, kernel_operand, quantize_matrix
from octavo.numerics.fp8 import BLOCK_1X128, BLOCK_128X128, PER_ROW

CPU = torch.device("cpu")
NAMES = "blocks_agree", "rows_agree", "bf16_agrees", "few_bf16_agree", "w8a16_agrees"
PROOFS = {name: getattr(agreement, name).__wrapped__ for name in NAMES}
ARGUMENTS = {  # N, K, device, and whether there is a bias
    "blocks_agree": [(256, 128, CPU, False), (256, 128, CPU, True)],
    "rows_agree": [(96, 208, CPU, False), (96, 208, CPU, True)],
    "bf16_agrees": [(96, 200, CPU)],
    "few_bf16_agree": [(96, 200, CPU)],
    "w8a16_agrees": [(128, 200, CPU), (128, 256, CPU)],
}
every_proof = pytest.mark.parametrize("name, arguments", [(n, a) for n, calls in ARGUMENTS.items() for a in calls])


@pytest.fixture
def shapes(monkeypatch):
    """Products in float64 for the proofs; the rows, columns and bias of those by triton."""
    kernel_products.as_on_gpu(monkeypatch)
    by_triton, shapes = gemm.triton_product, []

    def triton(kind, x, w, x_scale, w_scale, bias, dtype):
        shapes.append((kind, len(x), x.shape[1], bias is not None))
        return by_triton(kind, x, w, x_scale, w_scale, bias, dtype)

    monkeypatch.setattr(agreement, "triton_product", triton)
    monkeypatch.setattr(agreement, "HAS_GLUON", True)
    for product in ("block_product", "row_product", "decode_weight"):
        monkeypatch.setattr(agreement, product, getattr(gemm, product))
    return shapes


@every_proof
def test_equal_products_agree_at_few_rows_and_many(shapes, name, arguments):
    state = torch.get_rng_state()
    assert PROOFS[name](*arguments)
    rows = [M for _, M, _, _ in shapes]
    assert rows[0] == 1 and max(rows) >= (128 if name in ("rows_agree", "few_bf16_agree") else 4096)
    assert {(K, biased) for _, _, K, biased in shapes} == {(arguments[1], len(arguments) > 3 and arguments[3])}
    assert torch.equal(torch.get_rng_state(), state)


@every_proof
def test_a_last_bit_in_any_of_them_is_seen(shapes, monkeypatch, name, arguments):
    assert PROOFS[name](*arguments)
    right, num_calls = agreement.triton_product, len(shapes)
    for wrong in range(num_calls):
        calls = []

        def one_bit_off(*operands, calls=calls, wrong=wrong, **named):
            calls.append(None)
            y = right(*operands, **named)
            return y if len(calls) != wrong + 1 else y.index_put_((torch.tensor(-1),) * 2, y[-1, -1] * 1.01)

        monkeypatch.setattr(agreement, "triton_product", one_bit_off)
        assert not PROOFS[name](*arguments), f"the {wrong + 1}th of {num_calls} products"


@pytest.mark.parametrize(
    "left, right, M, proof, asked",
    [
        (BLOCK_1X128, BLOCK_128X128, 300, "blocks_agree", (512, 256)),
        (PER_ROW, PER_ROW, 30, "rows_agree", (280, 208)),
        (None, None, 4096, "bf16_agrees", (280, 200)),
        (None, None, 128, "few_bf16_agree", (280, 200)),
        (None, BLOCK_128X128, 4096, "w8a16_agrees", (512, 200)),
    ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_what_is_proved_is_what_runs(shapes, monkeypatch, left, right, M, proof, asked, biased):
    """The sizes as filled up for kernels, the kind of weight, and the bias."""
    calls = []
    for name in PROOFS:
        monkeypatch.setattr(agreement, name, lambda *arguments, name=name: calls.append((name, arguments)) or True)
    x, w = torch.randn(M, 200).bfloat16(), torch.randn(280, 200).bfloat16()
    x = grid_operand_of(x) if left is None else kernel_operand(quantize_matrix(x, left))
    w = grid_operand_of(w) if right is None else kernel_operand(quantize_matrix(w, right, row_splits=[140, 140]))
    gemm.product(x, w, torch.randn(280).bfloat16() if biased else None)
    with_bias = (biased,) if proof in ("blocks_agree", "rows_agree") else ()
    assert calls == [(proof, (*asked, CPU, *with_bias))]


def grid_operand_of(x):
    """As on a GPU."""
    return gemm.Operand(x, None, grid_operand(x).k_edges)
