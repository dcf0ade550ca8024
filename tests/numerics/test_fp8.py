"""The E4M3 quantiser, bit for bit against a slow one written here from the list of all 256 codes."""

import numpy as np
import pytest
import torch

from octavo.numerics.fp8 import (
    BLOCK_1X128,
    BLOCK_128X1,
    BLOCK_128X128,
    E4M3,
    E4M3_MAX,
    MIN_AMAX,
    PER_COLUMN,
    PER_ROW,
    PER_TENSOR,
    block_amax,
    dequantize,
    expand_scale,
    quantize,
    quantize_with_scale,
    scale_from_amax,
)

BLOCKS = {
    "per_tensor": PER_TENSOR,
    "per_row": PER_ROW,
    "per_column": PER_COLUMN,
    "1x128": BLOCK_1X128,
    "128x1": BLOCK_128X1,
    "128x128": BLOCK_128X128,
}
every_block = pytest.mark.parametrize("quant_block", BLOCKS.values(), ids=BLOCKS)
every_rounding = pytest.mark.parametrize("rounding", ["none", "power_of_two"])

# Codes 0x00 to 0x7e are the values from 0 to 448 in ascending order: four exponent bits with bias 7, three of mantissa.
VALUES = np.array([m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) for e in range(16) for m in range(8)][:127])


def nearest_codes(x):
    """x float64 -> uint8 codes of the nearest E4M3 values; ties go to the even code, |x| above 448 to 448."""
    size = np.minimum(np.abs(x), 448.0)
    above = np.searchsorted(VALUES, size)
    below = np.maximum(above - 1, 0)
    up, down = VALUES[above] - size, size - VALUES[below]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (code + 128 * np.signbit(x)).astype(np.uint8)


def slow_scale(amax, rounding):
    """amax float32 -> scale float32, NaN unless amax is finite."""
    if not np.isfinite(amax):
        return np.float32(np.nan)
    scale = max(amax, np.float32(2.0**-54)) / np.float32(448.0)
    if rounding == "none":
        return scale
    power = np.float32(2.0**-70)
    while power < scale:
        power *= np.float32(2.0)
    return power


def slow_quantize(x, quant_block, rounding):
    """Block by block: x [M, K] -> codes [M, K] uint8 and scale, as numpy arrays."""
    x = x.float().numpy()
    M, K = x.shape
    rows, columns = quant_block[0] or M, quant_block[1] or K
    codes = np.zeros((M, K), dtype=np.uint8)
    scale = np.zeros((-(-M // rows), -(-K // columns)), dtype=np.float32)
    for i, j in np.ndindex(scale.shape):
        block = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scale[i, j] = slow_scale(np.abs(x[block]).max(), rounding)
        if np.isfinite(scale[i, j]):
            codes[block] = nearest_codes((x[block] / scale[i, j]).astype(np.float64))
        else:
            codes[block] = 0x7F
    return codes, scale


def assert_equals_slow_quantizer(x, quant_block, rounding="none"):
    q, scale = quantize(x, quant_block, rounding)
    codes, slow = slow_quantize(x, quant_block, rounding)
    assert q.dtype == E4M3 and scale.dtype == torch.float32
    np.testing.assert_array_equal(scale.numpy(), slow)  # NaN equals NaN
    got = q.view(torch.uint8).numpy()
    got = np.where(got == 0xFF, 0x7F, got)  # NaN of either sign
    np.testing.assert_array_equal(got, codes)
    return q, scale


def wide(M, K):
    """Values over 40 binary orders of magnitude, neighbouring blocks far apart."""
    exponents = torch.randint(-20, 20, (M, -(-K // 16))).repeat_interleave(16, dim=1)[:, :K]
    return torch.randn(M, K) * 2.0**exponents


def test_all_codes_are_what_torch_decodes():
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).double().numpy()
    np.testing.assert_array_equal(codes[:127], VALUES)
    np.testing.assert_array_equal(codes[128:255], -VALUES)
    assert np.isnan(codes[[127, 255]]).all()
    assert VALUES[-1] == E4M3_MAX == 448.0


@every_block
@every_rounding
@pytest.mark.parametrize("M, K", [(7, 576), (7, 1), (7, 129), (1, 576), (1, 1), (129, 130), (128, 256)])
def test_quantize_equals_slow_quantizer(quant_block, rounding, M, K):
    q, scale = assert_equals_slow_quantizer(wide(M, K), quant_block, rounding)
    assert (q.double() != 0.0).double().mean() > 0.2  # per tensor, most of these values are too small to be seen
    assert (scale > 0.0).all()


@every_block
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtype_of_the_input_changes_nothing(quant_block, dtype):
    x = torch.randn(7, 300).to(dtype)
    q, scale = quantize(x, quant_block)
    assert_equals_slow_quantizer(x, quant_block)
    as_float, float_scale = quantize(x.float(), quant_block)
    assert torch.equal(q.view(torch.uint8), as_float.view(torch.uint8))
    assert torch.equal(scale, float_scale)


@every_block
def test_strided_inputs(quant_block):
    x = torch.randn(300, 258)
    for view in (x.T, x[::2], x[:, 1::2], x[:, :129].T, x[:1].expand(130, -1), x.flip(1)):
        q, scale = quantize(view, quant_block)
        same, same_scale = quantize(view.contiguous(), quant_block)
        assert torch.equal(q.view(torch.uint8), same.view(torch.uint8)) and torch.equal(scale, same_scale)
        assert q.is_contiguous()
        assert_equals_slow_quantizer(view, quant_block)


@every_block
def test_the_input_is_left_alone(quant_block):
    x = torch.randn(128, 256) * 1e3
    before = x.clone()
    quantize(x, quant_block)
    quantize_with_scale(x, torch.full((1, 1), 1e-3), PER_TENSOR)
    assert torch.equal(x, before)


@every_block
@pytest.mark.parametrize("M, K", [(0, 128), (5, 0), (0, 0)])
def test_empty(quant_block, M, K):
    q, scale = quantize(torch.zeros(M, K), quant_block)
    assert q.shape == (M, K) and scale.numel() == 0
    assert dequantize(q, scale, quant_block).shape == (M, K)


@pytest.mark.parametrize("x", [torch.zeros(3), torch.zeros(2, 3, 4), torch.zeros(2, 2, dtype=torch.int32)])
def test_only_floating_matrices(x):
    with pytest.raises(ValueError, match=r"quantize wants a floating-point matrix \[M, K\]; got shape"):
        quantize(x, PER_ROW)


# Special contents. Each is one row of 128, the second of three 1x128 blocks; the neighbours hold ordinary values.
SPECIAL = {
    "zero": [0.0],
    "minus zero": [-0.0],
    "denormal": [1e-40, -1e-45, 0.0],
    "denormal beside normal": [1e-40, 1.0],
    "below MIN_AMAX": [2.0**-60, -(2.0**-62), 2.0**-55],
    "just below MIN_AMAX": [2.0**-54 * (1 - 2**-23), -(2.0**-54)],
    "far below MIN_AMAX": [2.0**-100, 2.0**-90],
    "huge": [3e38, -1e38, 1.0],
    "largest float": [torch.finfo(torch.float32).max, 3e38],
    "inf": [1.0, torch.inf],
    "minus inf": [-torch.inf, 2.0],
    "nan": [torch.nan, 5.0],
    "nan and inf": [torch.nan, torch.inf],
}


@every_rounding
@every_block
@pytest.mark.parametrize("content", SPECIAL.values(), ids=SPECIAL)
def test_special_blocks_equal_slow_quantizer(content, quant_block, rounding):
    x = torch.randn(3, 384)
    x[1, 128:256] = torch.tensor(content).repeat(128)[:128]
    assert_equals_slow_quantizer(x, quant_block, rounding)


def test_zeros_stay_exact_zeros():
    q, scale = quantize(torch.zeros(2, 130), BLOCK_1X128)
    assert torch.equal(scale, torch.full((2, 2), MIN_AMAX / 448.0))
    assert torch.equal(dequantize(q, scale, BLOCK_1X128), torch.zeros(2, 130))


def test_tiny_blocks_keep_their_bits():
    # 2**-60 / (2**-54 / 448) = 7, a code; 3 * 2**-62 / (2**-54 / 448) = 5.25, which rounds to 5.
    x = torch.tensor([[2.0**-60, -(2.0**-60), 3 * 2.0**-62, 0.0]])
    q, scale = quantize(x, PER_ROW)
    assert q.float().tolist() == [[7.0, -7.0, 5.0, 0.0]]
    assert torch.equal(scale, torch.tensor([[MIN_AMAX / 448.0]]))


@every_rounding
def test_product_of_the_smallest_scales_is_a_normal_float(rounding):
    scale = scale_from_amax(torch.zeros(1), rounding)
    assert (scale * scale).item() >= torch.finfo(torch.float32).tiny


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_block
@every_rounding
def test_a_bad_value_spoils_its_block_and_no_other(bad, dtype, quant_block, rounding):
    M, K, row, column = 140, 300, 131, 200
    x = torch.randn(M, K).to(dtype)
    x[row, column] = bad
    rows, columns = quant_block[0] or M, quant_block[1] or K
    in_block = torch.zeros(M, K, dtype=torch.bool)
    top, left = row // rows * rows, column // columns * columns
    in_block[top : top + rows, left : left + columns] = True
    q, scale = quantize(x, quant_block, rounding)
    decoded = dequantize(q, scale, quant_block)
    assert torch.equal(decoded.isnan(), in_block)
    assert torch.equal(q.float().isnan(), in_block)
    assert scale.isnan().sum() == 1
    clean, clean_scale = quantize(torch.where(in_block, 0.0, x), quant_block, rounding)
    assert torch.equal(decoded[~in_block], dequantize(clean, clean_scale, quant_block)[~in_block])


def test_every_midpoint_goes_to_the_even_code():
    # An amax of 448 makes the scale 1, so that the quotients are the values themselves.
    middle = (VALUES[:-1] + VALUES[1:]) / 2
    even = [code if code % 2 == 0 else code + 1 for code in range(126)]
    x = torch.tensor(np.concatenate([[448.0], middle, -middle]), dtype=torch.float32)[None]
    assert torch.equal(x[0].double(), torch.tensor(np.concatenate([[448.0], middle, -middle])))  # exact in FP32
    q, scale = quantize(x, PER_ROW)
    assert scale.item() == 1.0
    assert q.view(torch.uint8)[0].tolist() == [126, *even, *(code + 128 for code in even)]
    # One step of FP32 to either side of a midpoint is no tie.
    outwards = torch.nextafter(x[0, 1:127], torch.tensor(torch.inf))
    inwards = torch.nextafter(x[0, 1:127], torch.tensor(0.0))
    q, _ = quantize(torch.cat([x[0, :1], outwards, inwards])[None], PER_ROW)
    assert q.view(torch.uint8)[0].tolist() == [126, *range(1, 127), *range(126)]


@every_block
def test_a_coded_matrix_is_a_fixed_point(quant_block):
    # All 253 distinct values, with 448 in every row, column and block: nothing may move.
    x = torch.tensor(np.concatenate([VALUES, -VALUES[1:]]), dtype=torch.float32)
    x = torch.cat([x, torch.full((3,), 448.0)]).view(2, 128).repeat(64, 1)
    x[:, -1], x[-1] = 448.0, 448.0
    q, scale = quantize(x, quant_block)
    assert (scale == 1.0).all()
    assert torch.equal(q.float(), x)


def test_power_of_two_scales_round_up_and_exact_powers_stay():
    for exponent in range(-60, 118):
        amax = torch.tensor([448.0 * 2.0**exponent])
        below, above = (torch.nextafter(amax, torch.tensor(x)) for x in (0.0, torch.inf))
        scale = scale_from_amax(torch.cat([amax, below, above]), "power_of_two")
        assert scale.tolist() == [2.0**exponent, 2.0**exponent, 2.0 ** (exponent + 1)]


@every_block
def test_a_power_of_two_scale_is_exact_in_bf16(quant_block):
    x = wide(129, 300)
    q, scale = quantize(x, quant_block, "power_of_two")
    mantissa, _ = torch.frexp(scale)
    assert (mantissa == 0.5).all()
    exact = q.double() * expand_scale(scale, (129, 300), quant_block).double()
    assert exact.abs().amax() > 0.0
    assert torch.equal(dequantize(q, scale, quant_block).bfloat16().double(), exact)
    plain, plain_scale = quantize(x, quant_block)  # which other scales are not
    decoded = dequantize(plain, plain_scale, quant_block)
    assert not torch.equal(decoded.bfloat16().float(), decoded)


@every_block
def test_block_amax_and_expand_scale_tile_the_matrix(quant_block):
    M, K = 130, 300
    x = torch.randn(M, K)
    rows, columns = quant_block[0] or M, quant_block[1] or K
    amax = block_amax(x, quant_block)
    spread = expand_scale(amax, (M, K), quant_block)
    assert amax.min() > 0.0
    for i, j in [(0, 0), (0, 299), (127, 127), (127, 128), (128, 127), (129, 299), (64, 256)]:
        top, left = i // rows * rows, j // columns * columns
        assert spread[i, j] == x[top : top + rows, left : left + columns].abs().amax()


def test_quantize_with_scale_saturates():
    x = torch.tensor([[448.0, 449.0, 1e30, -1e30, torch.inf, -torch.inf, 447.0, 0.3]])
    q = quantize_with_scale(x, torch.ones(1, 1), PER_TENSOR)
    assert q.float().tolist() == [[448.0, 448.0, 448.0, -448.0, 448.0, -448.0, 448.0, 0.3125]]
    assert quantize_with_scale(torch.tensor([[torch.nan]]), torch.ones(1, 1), PER_TENSOR).float().isnan().all()


def test_division_is_rounded_to_nearest():
    # Quotients that a multiplication by the reciprocal gets wrong: x / scale is a tie, x * (1 / scale) is not.
    scale = torch.tensor([[1.0]]) / torch.arange(3.0, 400.0)[:, None]
    ties = torch.tensor([8.5, 9.5, 17.0, 19.0, 0.0009765625])
    x = ties * scale
    by_reciprocal = 0
    for row, s in zip(x, scale, strict=True):
        q = quantize_with_scale(row[None], s[None], PER_TENSOR).view(torch.uint8).numpy()[0]
        np.testing.assert_array_equal(q, nearest_codes((row.numpy() / s.numpy()).astype(np.float64)))
        by_reciprocal += (q != nearest_codes((row.numpy() * (1 / s.numpy())).astype(np.float64))).sum()
    assert by_reciprocal > 0  # so the test can tell the two apart
