"""Products on a GPU: as good as their quantised inputs allow, and a row's bits the same for any number of rows."""

import dataclasses
import random

import pytest
import torch

from octavo.kernels import agreement, gemm
from octavo.kernels.deep_gemm import deep_gemm
from octavo.kernels.gemm import product
from octavo.kernels.operands import grid_operand, quantize_matrix
from octavo.numerics.error import relative_error
from octavo.numerics.fp8 import BLOCK_1X128, BLOCK_128X1, BLOCK_128X128, PER_COLUMN, PER_ROW, PER_TENSOR

pytestmark = pytest.mark.gpu
MODELS = {  # D, F, widths of q, k and v
    "qwen3-8b": (4096, 12288, (4096, 1024, 1024)),
    "llama-3-8b": (4096, 14336, (4096, 1024, 1024)),
    "qwen2.5-7b": (3584, 18944, (3584, 512, 512)),
    "qwen2.5-0.5b": (896, 4864, (896, 128, 128)),
    "smollm2-135m": (576, 1536, (576, 192, 192)),
}
RECIPES = {  # blocks of X and W in FProp
    "bf16": (None, None),
    "block128": (BLOCK_1X128, BLOCK_128X128),
    "w8a16": (None, BLOCK_128X128),
    "rowwise": (PER_ROW, PER_ROW),
    "tensorwise_static": (PER_TENSOR, PER_TENSOR),
}
every_recipe = pytest.mark.parametrize("recipe", RECIPES)


def linears(model):
    """K and the widths of the fused projections of a decoder layer's four products."""
    D, F, qkv = MODELS[model]
    return [(D, qkv), (qkv[0], (D,)), (D, (F, F)), (F, (D,))]


def activations(M, K, dtype=torch.bfloat16):
    """Tokens of different sizes."""
    return (torch.randn(M, K, device="cuda") * torch.exp2(torch.randint(-3, 4, (M, 1), device="cuda"))).to(dtype)


def operands(recipe, x, w, splits):
    """X and W ready for FProp, and what they decode to."""
    left, right = RECIPES[recipe]
    static = None if left != PER_TENSOR else (x.float().abs().amax() * 0.9 / 448.0).reshape(1, 1)
    x = grid_operand(x) if left is None else quantize_matrix(x, left, scale=static).operand()
    w = grid_operand(w.bfloat16()) if right is None else quantize_matrix(w, right, row_splits=list(splits)).operand()
    return x, w


def rows_of(operand, rows):
    """Some rows of an activation."""
    scale = None if operand.scale is None else operand.scale[rows]
    return dataclasses.replace(operand, values=operand.values[rows], scale=scale)


@every_recipe
@pytest.mark.parametrize("model", MODELS)
def test_a_row_does_not_depend_on_the_number_of_rows(model, recipe):
    """From decoding one token to training on thousands, whichever back ends that takes."""
    generator = random.Random(0)
    larger = [generator.randrange(301, 9000) for _ in range(5)]  # four products: twenty of them
    for K, splits in linears(model):
        x, w = operands(recipe, activations(9000, K), torch.randn(sum(splits), K, device="cuda") * 0.02, splits)
        whole = product(x, w)
        assert whole.shape == (9000, sum(splits)) and whole.isfinite().all() and (whole != 0).float().mean() > 0.9
        wrong = []
        for M in [*range(1, 301), *larger]:
            start = generator.randrange(9000 - M + 1)
            rows = slice(start, start + M)
            if not torch.equal(product(rows_of(x, rows), w), whole[rows]):
                wrong.append(M)
        assert not wrong, f"K = {K}, {splits}: {len(wrong)} numbers of rows differ, first {wrong[:5]}"


@every_recipe
@pytest.mark.parametrize("M", [1, 7, 16, 17, 40, 100, 129, 300, 5000])
@pytest.mark.parametrize(
    "K, splits", [(4096, (4096, 1024, 1024)), (896, (896, 128, 128)), (576, (576, 192, 192)), (200, (96, 40))]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fprop_is_as_good_as_its_inputs(recipe, M, K, splits, dtype):
    x, w = activations(M, K), torch.randn(sum(splits), K, device="cuda") * 0.02
    bias = torch.randn(sum(splits), device="cuda").bfloat16()
    left, right = operands(recipe, x, w, splits)
    exact = left.decode().double() @ right.decode().double().T + bias.double()
    if recipe == "w8a16":
        exact = x.double() @ right.decode().bfloat16().double().T + bias.double()
    truth = x.double() @ w.double().T + bias.double()
    got = product(left, right, bias, dtype)
    assert got.dtype == dtype and got.shape == (M, sum(splits))
    floor = relative_error(exact.to(dtype), truth)
    error = relative_error(got, truth)
    assert 0.0005 < floor and error <= 1.5 * floor, f"error {error:.5f}, floor {floor:.5f}"
    assert relative_error(got, exact) <= (2.0**-8 if dtype == torch.bfloat16 else 2.0**-9)  # fast accumulation: 1.3e-3


@pytest.mark.parametrize("T", [128, 300, 4096])
@pytest.mark.parametrize("K, splits", [(4096, (4096, 1024, 1024)), (576, (576, 192, 192)), (208, (96, 48))])
@pytest.mark.parametrize(
    "dy_block, w_block, across",
    [
        (BLOCK_1X128, BLOCK_128X128, BLOCK_128X1),
        (PER_ROW, PER_COLUMN, PER_COLUMN),
        (PER_TENSOR, PER_TENSOR, PER_TENSOR),
    ],
)
def test_gradients_are_as_good_as_their_inputs(T, K, splits, dy_block, w_block, across):
    N, sizes = sum(splits), list(splits)
    x, w, grad_y = activations(T, K), torch.randn(N, K, device="cuda") * 0.02, activations(T, N) * 2.0**-20
    w_hat = quantize_matrix(w, w_block, row_splits=sizes)
    dy_hat = quantize_matrix(grad_y, dy_block, column_splits=sizes)
    truth = grad_y.double() @ w.double()
    floor = relative_error(dy_hat.dequantize().double() @ w_hat.dequantize().double(), truth)
    error = relative_error(product(dy_hat.operand(), w_hat.T.operand()), truth)
    assert 0.01 < floor and error <= 1.5 * floor, f"dgrad: error {error:.4f}, floor {floor:.4f}"
    pad = torch.nn.functional.pad
    x, grad_y = (pad(y, (0, 0, 0, -T % 128)) for y in (x, grad_y))
    x_hat, dy_hat = quantize_matrix(x, across), quantize_matrix(grad_y, across, column_splits=sizes)
    truth = grad_y.double().T @ x.double()
    floor = relative_error(dy_hat.dequantize().double().T @ x_hat.dequantize().double(), truth)
    got = product(dy_hat.T.operand(), x_hat.T.operand(), dtype=torch.float32)
    error = relative_error(got, truth)
    assert got.dtype == torch.float32 and 0.01 < floor and error <= 1.5 * floor, f"wgrad: {error:.4f}, {floor:.4f}"


@pytest.mark.parametrize("K, splits", [(4096, (4096,)), (576, (576, 192, 192))])
def test_back_ends_by_name_agree_and_refuse_what_they_cannot(K, splits):
    x, w = activations(256, K), torch.randn(sum(splits), K, device="cuda") * 0.02
    left, right = operands("block128", x, w, splits)
    names = ["triton", "scaled_mm"] + (["deep_gemm"] if deep_gemm() is not None else [])
    results = [product(left, right, backend=name) for name in names]
    assert all(torch.equal(result, results[0]) for result in results)
    with pytest.raises(ValueError, match="backend 'cublas' does not multiply FP8 by blocks; these do: scaled_mm"):
        product(left, right, backend="cublas")
    with pytest.raises(ValueError, match="backend 'reference' does not take operands of torch.float8_e4m3fn"):
        product(left, right, backend="reference")
    with pytest.raises(ValueError, match="backend 'triton' does not multiply FP8 by rows; these do: scaled_mm, triton"):
        product(*operands("rowwise", x, w, splits), backend="triton")
    if deep_gemm() is None:
        with pytest.raises(ValueError, match="the package deep_gemm is not installed"):
            product(left, right, backend="deep_gemm")


def test_agreement_sees_another_order_of_the_sum(monkeypatch):
    """The proof can fail: the same products with K reversed differ in the last bits, and then `triton` does it all."""
    device = torch.device("cuda", torch.cuda.current_device())
    assert all(agreement.blocks_agree(4096, 4096, device, biased) for biased in (False, True))
    assert agreement.bf16_agrees(4096, 4096, device) and agreement.w8a16_agrees(4096, 4096, device)
    scaled_mm = agreement.block_product
    flip = lambda y: y.unflatten(1, (-1, 128)).flip(1).flatten(1).contiguous()  # noqa: E731

    def reversed_blocks(x, w, x_scale, w_scale, bias, dtype):
        scale = x_scale.flip(1).T.contiguous().T
        return scaled_mm(
            flip(x.view(torch.uint8)).view(x.dtype),
            flip(w.view(torch.uint8)).view(w.dtype),
            scale,
            w_scale.flip(1).contiguous(),
            bias,
            dtype,
        )

    agreement.blocks_agree.cache_clear()
    monkeypatch.setattr(agreement, "block_product", reversed_blocks)
    assert not agreement.blocks_agree(4096, 4096, device, False)
    left, right = operands("block128", activations(500, 4096), torch.randn(4096, 4096, device="cuda"), (4096,))
    assert gemm._backend(left, right, False) == "triton"
    agreement.blocks_agree.cache_clear()


def test_a_wrong_byte_or_scale_changes_the_product():
    left, right = operands("block128", activations(8, 4096), torch.randn(4096, 4096, device="cuda"), (4096,))
    before = product(left, right)
    right.values.view(torch.uint8)[77, 1000] ^= 0x80
    assert (product(left, right) != before).any(dim=0).nonzero().flatten().tolist() == [77]
    right.values.view(torch.uint8)[77, 1000] ^= 0x80
    right.scale[3, 5] *= 1.01
    assert (product(left, right) != before).any(dim=0).nonzero().flatten().amin() >= 384
    right.scale[3, 5] /= 1.01
    right.values.view(torch.uint8)[5, 5] = 0x7F
    assert product(left, right)[:, 5].isnan().all()


@every_recipe
def test_no_rows_and_no_tokens(recipe):
    left, right = operands(recipe, activations(4, 256), torch.randn(128, 256, device="cuda"), (128,))
    assert product(rows_of(left, slice(0, 0)), right).shape == (0, 128)
