"""Linear layers of every recipe, and the float64 product that each of their GEMMs should give."""

import pytest
import torch

from octavo.layers.linear import FP8Linear
from octavo.numerics.error import relative_error
from octavo.numerics.exact import to_grid
from octavo.numerics.fp8 import expand_scale, quantize
from octavo.numerics.recipe import get_recipe

TENSOR, ROW, COLUMN = (None, None), (1, None), (None, 1)
ALONG_K, ALONG_T, SQUARE = (1, 128), (128, 1), (128, 128)
# Blocks of (X, W) in FProp, (dY, W) in DGrad, (dY, X) in WGrad; None is not quantised.
GEMMS = {
    "bf16": ((None, None), (None, None), (None, None)),
    "fp32": ((None, None), (None, None), (None, None)),
    "block128": ((ALONG_K, SQUARE), (ALONG_K, SQUARE), (ALONG_T, ALONG_T)),
    "rowwise": ((ROW, ROW), (ROW, COLUMN), (COLUMN, COLUMN)),
    "tensorwise": ((TENSOR, TENSOR), (TENSOR, TENSOR), (TENSOR, TENSOR)),
    "w8a16": ((None, SQUARE), (ALONG_K, SQUARE), (ALONG_T, ALONG_T)),
    "tensorwise_static": ((TENSOR, TENSOR), (TENSOR, TENSOR), (TENSOR, TENSOR)),
}
QUANTISED = [name for name in GEMMS if name not in ("bf16", "fp32")]
BATCH_INVARIANT = [name for name in GEMMS if name != "tensorwise"]
every_recipe = pytest.mark.parametrize("name", GEMMS)
every_quantised = pytest.mark.parametrize("name", QUANTISED)

K = 200  # a block of 128 and a ragged one
QKV = {"q_proj": 192, "k_proj": 64, "v_proj": 64}


def make_layer(recipe, projections=None, bias=False, in_features=K):
    """A layer with random masters whose projections differ in size, ready to run."""
    recipe = get_recipe(recipe) if isinstance(recipe, str) else recipe
    layer = FP8Linear(in_features, projections or QKV, bias=bias, recipe=recipe, path="model.layers.0.self_attn")
    with torch.no_grad():
        layer.weight.normal_(std=0.1)
        for size, piece in zip((1.0, 0.05, 20.0), layer.weight.split(layer.splits), strict=False):
            piece.mul_(size)
        if bias:
            layer.bias.normal_()
    layer.requantize_()
    return layer


def make_batch(layer, T):
    """X [T, K] and dY [T, N] in the activation format, tokens of different sizes."""
    dtype = torch.float32 if layer.recipe.high_precision == "fp32" else torch.bfloat16
    x, grad_y = (torch.randn(T, n) * (0.1 + torch.rand(T, 1)) for n in (layer.in_features, sum(layer.splits)))
    return x.to(dtype), grad_y.to(dtype)


def run(layer, x, grad_y):
    """Y, dX, dW, db."""
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(grad_y)
    return y.detach(), x.grad, layer.weight.grad, None if layer.bias is None else layer.bias.grad


def hat(x, quant_block, splits=None, dim=1, scale=None):
    """What an operand decodes to, in float64; each fused projection along dim is quantised on its own."""
    if quant_block is None:
        return x.detach().double()
    if scale is not None:
        return (x.float() / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).double() * scale.double()
    pieces = []
    for piece in x.detach().split(splits or [x.shape[dim]], dim=dim):
        q, scales = quantize(piece, quant_block)
        pieces.append(q.double() * expand_scale(scales, piece.shape, quant_block).double())
    return torch.cat(pieces, dim=dim)


def weight_hat(layer, name, block):
    """W as a GEMM of the recipe sees it, in float64."""
    if block is None:
        return layer.weight.detach().to(torch.float32 if name == "fp32" else torch.bfloat16).double()
    return hat(layer.weight, block, layer.splits, dim=0)


def static_scale(x, margin=1.25):
    return (x.float().abs().amax() * margin / 448.0).reshape(1, 1)


def assert_is_product(got, a, b, bias=None, on_grid=False):
    """got is a @ b + bias, rounded once.

    Element by element: FP32 factors, scales and sums round each of n terms by n * 2**-24 at most; on_grid, factors are
    moved to a grid of 2**-23 of their amax instead. On the whole: as good as FP32, or as factors on a grid.
    """
    bias = torch.zeros(1) if bias is None else bias
    expected, terms = a @ b + bias.double(), a.abs() @ b.abs() + bias.double().abs()
    bound = (a.shape[1] + 3) * 2.0**-24 * terms
    bound += (2.0**-8 if got.dtype == torch.bfloat16 else 2.0**-24) * expected.abs()
    if on_grid:
        bound += 2.0**-23 * a.shape[1] * a.abs().amax() * b.abs().amax()
    error = (got.double() - expected).abs()
    assert expected.abs().max() > 0.01
    assert (error <= bound).all(), f"{(error / bound).max():.2f} times the bound"
    floor = (to_grid(a, 23) @ to_grid(b, 23, dim=0) if on_grid else a.float() @ b.float()) + bias.float()
    error, floor = relative_error(got, expected), relative_error(floor.float().to(got.dtype), expected)
    margin = 1.01 if got.dtype == torch.bfloat16 else 1.5
    assert error <= margin * floor, f"error {error:.3g}, floor {floor:.3g}"


def make_twin(layer, recipe):
    """The same masters under another recipe."""
    twin = make_layer(recipe, layer.projections, layer.bias is not None)
    twin.load_state_dict(layer.state_dict())
    twin.requantize_()
    return twin
