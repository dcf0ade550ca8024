"""AdamW on one parameter, with its moments in eight bits or FP32 and itself in FP32 or BF16.

    m = scale * sign(c) * (c / 127)^2     c int8      scale: of 256 values that follow each other, 2^-22 above the
    v = scale * (c / 255)^4               c uint8     largest |m| or v; 0 where that is below 2^-126

Codes lie densely near 0, where most of a block's values are. Each rounding is stochastic, to one of the two neighbours
by chances that leave the mean as it was. To nearest a second moment, of which a step renews 0.1 %, would follow only
gradients several times its root, and a BF16 master would not move at all at a rate of 1e-6. The random bits depend on
a key and the element's place only.

For u uniform in [0, 1), a value x in units of code 1 and codes j to the power n, the upper one of j and j + 1 is taken
where x > t(j) = (1 - u) j^n + u (j + 1)^n. t rises; where it reaches x, at a z near x^(1/n) - u, is rounded up to the
code. So z rounded to nearest, plus 1 where x is still above its t, is the code, even with z off by a fifth: the kernel
takes z from approximate roots, and finds the reference's code to the bit.

Eight-bit moments in blocks are Dettmers et al.'s (arXiv:2110.02861). As no v above 0 gets code 0, an element that is
small in its block is never divided by 0 (the "zero-point problem" of arXiv:2309.01507).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from octavo.kernels.device import on_gpu
from octavo.kernels.triton_shim import INTERPRETED, constexpr, tl, triton

BLOCK = 256
"""Values that share a scale."""
CHUNK = 2**20
"""Elements that the reference works on at a time."""
FIRST, SECOND = (torch.int8, 127, 2), (torch.uint8, 255, 4)
"""Type, largest code and power of each moment."""
SMALLEST_SCALE = 2.0**-126
"""A block whose largest value is below counts as zeros."""
MARGIN = 1.0 + 2.0**-22
"""Of a scale over the largest value, so that no rounding takes a share beyond the largest code."""
SMALLEST = 2.0**-100
"""In the step: a second moment counts as at least this, a first moment below as 0."""
GOLDEN = 0x9E3779B97F4A7C15 - 2**64
"""What a key grows by, modulo 2^64, every 2^32 elements."""
_GOLDEN = constexpr(GOLDEN)
_BLOCK, _MARGIN, _CURE = constexpr(BLOCK), constexpr(MARGIN), constexpr(INTERPRETED)
_SMALLEST, _SMALLEST_SCALE = constexpr(SMALLEST), constexpr(SMALLEST_SCALE)


@dataclass(frozen=True)
class Moment:
    """A moment of a parameter: fp32 values, or codes of its shape with a scale [ceil(elements / 256)] fp32."""

    values: Tensor
    scale: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Update:
    """An optimiser step."""

    number: int
    """From 1."""
    lr: float
    beta1: float
    beta2: float
    adam_eps: float
    weight_decay: float
    clip: Tensor
    """[] fp32, on the master's device: multiplies every gradient."""
    broken: Tensor
    """[] int32, likewise: becomes 1 where a master is no longer finite, and is otherwise left alone."""

    @property
    def factors(self) -> tuple[float, ...]:
        """Of the old and the new in each moment; of m / (sqrt(v) + the one after); of the decay."""
        root = (1.0 - self.beta2**self.number) ** 0.5
        step = self.lr / (1.0 - self.beta1**self.number) * root
        moments = self.beta1, 1.0 - self.beta1, self.beta2, 1.0 - self.beta2
        return *moments, step, self.adam_eps * root, self.lr * self.weight_decay


def adamw_(master: Tensor, grad: Tensor, first: Moment, second: Moment, update: Update, key: int) -> None:
    """Update a master and its moments in place.

    Args:
        master: fp32, or bf16, which is rounded stochastically.
        grad: of its shape; any float type; times `update.clip` its squares are finite.
        first, second: both in fp32 or both in codes.
        update: the step.
        key: 64 bits of the random numbers.
    """
    if not master.is_contiguous():
        raise ValueError(f"adamw_ wants a contiguous master; got shape {tuple(master.shape)}, stride {master.stride()}")
    if not on_gpu(master, "AdamW"):
        adamw_reference_(master, grad, first, second, update, key)
        return
    numel = master.numel()
    whole = numel % BLOCK == 0
    rows = math.gcd(numel // BLOCK, 8) if whole else 8
    grid = (triton.cdiv(numel, rows * BLOCK),)
    _adamw_kernel[grid](
        master, grad.contiguous(), first.values, first.scale, second.values, second.scale, update.clip, update.broken,
        numel, _signed(key), *update.factors, CODES=first.scale is not None, DECAYS=update.factors[-1] != 0.0,
        ROWS=rows, WHOLE=whole, num_warps=max(1, rows // 2), enable_fp_fusion=False,
    )  # fmt: skip
    increment_version(master)


@torch.no_grad()
def adamw_reference_(master: Tensor, grad: Tensor, first: Moment, second: Moment, update: Update, key: int) -> None:
    """`adamw_` in plain torch; defines the right answer."""
    keep1, add1, keep2, add2, step, adam_eps, decay = update.factors
    gradients = grad.reshape(-1)
    for start in range(0, master.numel(), CHUNK):
        part = slice(start, min(start + CHUNK, master.numel()))
        p, g = master.view(-1)[part].float(), gradients[part].float() * update.clip
        bits = random_bits(key, part.start, len(p), master.device)
        m = _values(first, FIRST, part, keep1) + g * add1
        v = _values(second, SECOND, part, keep2) + g * g * add2
        size = _sqrt(v.clamp(min=SMALLEST)) + adam_eps
        p = p - (p * decay + step * (torch.where(m.abs() < SMALLEST, 0.0, m) / size))
        update.broken.logical_or_((~p.isfinite()).any())
        master.view(-1)[part] = p if master.dtype == torch.float32 else stochastic_bf16(p, bits >> 32)
        _store(first, FIRST, part, m, bits & 0xFFFF)
        _store(second, SECOND, part, v, (bits >> 16) & 0xFFFF)


def stochastic_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """x fp32 -> bf16, up or down by the chance that keeps the mean; bits int64 in [0, 2^16), one number an element."""
    rounded = ((x.view(torch.int32) + bits.int()) & -0x10000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).bfloat16()


def random_bits(key: int, start: int, count: int, device: torch.device) -> Tensor:
    """48 bits for each of `count` elements from `start` on, [count] int64.

    The lower 32 bits of an element's place go through a finaliser of 32 bits ("lowbias32", Wellons 2018), with half a
    key ahead of each product; the key grows with the place's other bits. One more product gives the upper 16 bits.
    """
    place = torch.arange(start, start + count, device=device)
    key_here = (place >> 32) * GOLDEN + _signed(key)
    x = (place ^ key_here).int()
    x = (x ^ _shifted(x, 16)) * 0x7FEB352D
    x = (x ^ _shifted(x, 15) ^ (key_here >> 32).int()) * (0x846CA68B - 2**32)
    x = x ^ _shifted(x, 16)
    return (x.long() & (2**32 - 1)) | (_shifted(x * (0x9E3779B1 - 2**32), 16).long() << 32)


def _shifted(x: Tensor, count: int) -> Tensor:
    """x int32, to the right, with zeros from the left."""
    return (x >> count) & (2 ** (32 - count) - 1)


def _signed(number: int) -> int:
    """Of the same 64 bits, with a sign."""
    return (number + 2**63) % 2**64 - 2**63


def _sqrt(x: Tensor) -> Tensor:
    """Of x fp32, rounded once; torch's own on a CPU may be off by a bit."""
    return x.double().sqrt().float()


def _values(moment: Moment, kind: tuple[torch.dtype, int, int], part: slice, factor: float = 1.0) -> Tensor:
    values = moment.values.view(-1)[part]
    if moment.scale is None:
        return values * factor
    _, largest, power = kind
    unit = moment.scale[part.start // BLOCK : -(-part.stop // BLOCK)] * (1.0 / largest**power) * factor
    code = values.float()
    return (code * code.abs() if power == 2 else code.square().square()) * _each(unit, len(values))


def _store(moment: Moment, kind: tuple[torch.dtype, int, int], part: slice, x: Tensor, bits: Tensor) -> None:
    if moment.scale is None:
        moment.values.view(-1)[part] = x
        return
    dtype, largest, power = kind
    amax = torch.nn.functional.pad(x.abs(), (0, -len(x) % BLOCK)).view(-1, BLOCK).amax(dim=1)
    scale = torch.where(amax < SMALLEST_SCALE, 0.0, amax * MARGIN)
    whole = float(largest + 1) ** power  # x is taken in shares of it, so that scales down to the smallest have inverses
    inverse = torch.where(scale == 0.0, 0.0, torch.full_like(scale, largest**power / whole) / scale)
    units, u = x.abs() * _each(inverse, len(x)) * whole, bits * 2.0**-16
    if power == 2:
        code = (units.sqrt() - u).round().nan_to_num(0.0).clamp(min=0.0)
        code = code + (units - u > code * (code + 2.0 * u))
        code = torch.where(x < 0.0, -code, code)
    else:
        code = (units.sqrt().sqrt() - u).round()
        square, side = code.square(), 2.0 * code + 1.0
        code = code + (units - square.square() > u * side * (2.0 * square + side))
        code = code.fmax((x > 0.0).float())  # which a NaN loses to
    moment.values.view(-1)[part] = code.to(dtype)
    moment.scale[part.start // BLOCK : -(-part.stop // BLOCK)] = scale


def _each(blocks: Tensor, count: int) -> Tensor:
    """A number of each block for its elements, of which there are count."""
    return blocks.repeat_interleave(BLOCK)[:count]


@triton.jit(do_not_specialize=["numel", "key"])
def _adamw_kernel(
    master_ptr, grad_ptr, first_ptr, first_scale_ptr, second_ptr, second_scale_ptr, clip_ptr, broken_ptr, numel, key,
    keep1, add1, keep2, add2, step, adam_eps, decay, CODES: tl.constexpr, DECAYS: tl.constexpr, ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Blocks of 256 elements, ROWS of them; WHOLE: there are no others."""
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    start = first_row * _BLOCK
    rows = tl.arange(0, ROWS)
    at = rows[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    left = ROWS * _BLOCK if WHOLE else tl.minimum(numel - start, ROWS * _BLOCK).to(tl.int32)
    inside, row_inside = at < left, rows * _BLOCK < left
    p = tl.load(master_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad_ptr + start + at, mask=inside, other=0.0).to(tl.float32) * tl.load(clip_ptr)
    m = tl.load(first_ptr + start + at, mask=inside, other=0).to(tl.float32)
    v = tl.load(second_ptr + start + at, mask=inside, other=0).to(tl.float32)
    if CODES:
        unit = tl.load(first_scale_ptr + first_row + rows, mask=row_inside, other=0.0) * (1.0 / 127**2) * keep1
        m = m * tl.abs(m) * unit[:, None] + g * add1
        unit = tl.load(second_scale_ptr + first_row + rows, mask=row_inside, other=0.0) * (1.0 / 255**4) * keep2
        v = (v * v) * (v * v) * unit[:, None] + g * g * add2
    else:
        m = m * keep1 + g * add1
        v = v * keep2 + g * g * add2
    size = _sqrt_rn(tl.maximum(v, _SMALLEST)) + adam_eps
    change = step * _div_rn(tl.where(tl.abs(m) < _SMALLEST, 0.0, m), size)
    p = p - (p * decay + change if DECAYS else change)

    key += (start >> 32) * _GOLDEN
    x = at.to(tl.uint32) ^ (start.to(tl.uint32) ^ key.to(tl.uint32))  # start is a multiple of what at stays below
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15) ^ (key >> 32).to(tl.uint32)) * 0x846CA68B
    largest = tl.reduce(tl.reshape(tl.abs(p), (ROWS, 32, 8)), 2, _larger)
    finite = largest < float("inf")
    tl.store(broken_ptr + finite.to(tl.int32) * 0, 1, mask=finite == 0)
    if master_ptr.dtype.element_ty == tl.bfloat16:
        rounded = (p.to(tl.int32, bitcast=True) + (((x ^ (x >> 16)) * 0x9E3779B1) >> 16).to(tl.int32)) & -0x10000
        p = tl.where(tl.abs(p) < float("inf"), rounded.to(tl.float32, bitcast=True), p).to(tl.bfloat16)
    tl.store(master_ptr + start + at, p, mask=inside)
    if CODES:
        upper = (x >> 16) + 0x3F800000
        scale, code = _first_codes(m, _fraction(upper ^ (x & 0xFFFF)))
        tl.store(first_ptr + start + at, code, mask=inside)
        tl.store(first_scale_ptr + first_row + rows, scale, mask=row_inside)
        scale, code = _second_codes(v, _fraction(upper))
        tl.store(second_ptr + start + at, code, mask=inside)
        tl.store(second_scale_ptr + first_row + rows, scale, mask=row_inside)
    else:
        tl.store(first_ptr + start + at, m, mask=inside)
        tl.store(second_ptr + start + at, v, mask=inside)


@triton.jit
def _first_codes(m, u):
    """Scales and codes of blocks. Codes and u are in 128ths: added to 1.5 * 2^16 they are rounded, in the last bits."""
    scale, inverse = _scales(tl.abs(m), (127 / 128) ** 2)
    share = tl.abs(m) * inverse[:, None]
    code = (tl.maximum(tl.sqrt(share) - u, 0.0) + 98304.0) - 98304.0
    code = tl.where(tl.fma(u, -1.0 / 128, share) > code * tl.fma(u, 2.0, code), code + 1.0 / 128, code)
    sign = m.to(tl.int32, bitcast=True) & -0x80000000
    code = (code.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True) + 98304.0
    return scale, code.to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _second_codes(v, u):
    """Likewise, codes in 256ths, added to 1.5 * 2^15, and u in 128ths."""
    scale, inverse = _scales(v, (255 / 256) ** 4)
    share = v * inverse[:, None]
    rounded = tl.fma(u, -0.5, tl.sqrt(tl.sqrt(share))) + 49152.0
    code = rounded - 49152.0
    square, side = code * code, tl.fma(code, 2.0, 1.0 / 256)
    up = share - square * square > u * side * tl.fma(side, 1.0 / 512, square)
    rounded = tl.maximum(tl.where(up, rounded + 1.0 / 256, rounded), tl.where(v > 0.0, 49152.0 + 1.0 / 256, 49152.0))
    return scale, rounded.to(tl.int32, bitcast=True).to(tl.uint8)


@triton.jit
def _scales(x, whole):
    """Scales of blocks of magnitudes, and what takes one to its share of `whole`; NaN where one is."""
    largest = tl.reduce(x, 1, _larger)
    scale = tl.where(largest < _SMALLEST_SCALE, 0.0, largest * _MARGIN)
    return scale, tl.where(scale == 0.0, 0.0, tl.div_rn(whole, scale))


@triton.jit
def _fraction(bits):
    """Of a number in [1, 2) by its bits."""
    return bits.to(tl.float32, bitcast=True) - 1.0


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _sqrt_rn(x):
    """The square root of x in [2^-100, inf), rounded once: what `tl.sqrt_rn` does there, without its branch."""
    if _CURE:
        return tl.sqrt_rn(x)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 inverse, root, half, minus, rest;"
            "rsqrt.approx.ftz.f32 inverse, $1; mul.f32 root, $1, inverse; mul.f32 half, inverse, 0f3F000000;"
            "neg.f32 minus, root; fma.rn.f32 rest, minus, root, $1; fma.rn.f32 $0, rest, half, root; }",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _div_rn(x, y):
    """x / y, rounded once, of an x that is 0 or 2^-100 and more and a y from 2^-50 on: likewise `tl.div_rn`."""
    if _CURE:
        return tl.div_rn(x, y)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 inverse, minus, rest, quotient;"
            "rcp.approx.ftz.f32 inverse, $2; neg.f32 minus, $2; fma.rn.f32 rest, minus, inverse, 0f3F800000;"
            "fma.rn.f32 inverse, inverse, rest, inverse; mul.f32 quotient, $1, inverse;"
            "fma.rn.f32 rest, minus, quotient, $1; fma.rn.f32 $0, inverse, rest, quotient; }",
            "=f,f,f", [x, y], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
