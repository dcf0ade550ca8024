"""AdamW on one parameter, with its moments in eight bits or FP32 and itself in FP32 or BF16.

    m = scale * sign(c) * (c / 127)^2     c int8      scale: the largest |m| of 256 values that follow each other
    v = scale * (c / 255)^4               c uint8     likewise

Codes lie densely near 0, where most of a block's values are. Each rounding is stochastic, to one of the two neighbours
by chances that leave the mean as it was. To nearest a second moment, of which a step renews 0.1 %, would follow only
gradients several times its root, and a BF16 master would not move at all at a rate of 1e-6. The random bits depend on
a key and the element's place only.

Eight-bit moments in blocks are Dettmers et al.'s (arXiv:2110.02861). As no v above 0 gets code 0, an element that is
small in its block is never divided by 0 (the "zero-point problem" of arXiv:2309.01507).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from octavo.kernels.device import on_gpu
from octavo.kernels.triton_shim import constexpr, tl, triton

BLOCK = 256
"""Values that share a scale."""
CHUNK = 2**20
"""Elements that the reference works on at a time."""
FIRST, SECOND = (torch.int8, 127, 2), (torch.uint8, 255, 4)
"""Type, largest code and power of each moment."""
_BLOCK = constexpr(BLOCK)


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

    @property
    def factors(self) -> tuple[float, ...]:
        """Of the old and the new in each moment, of the step, of sqrt(v), adam_eps, and of the decay."""
        step = self.lr / (1.0 - self.beta1**self.number)
        root = (1.0 - self.beta2**self.number) ** -0.5
        moments = self.beta1, 1.0 - self.beta1, self.beta2, 1.0 - self.beta2
        return *moments, step, root, self.adam_eps, self.lr * self.weight_decay


def adamw_(master: Tensor, grad: Tensor, first: Moment, second: Moment, update: Update, key: int) -> None:
    """Update a master and its moments in place.

    Args:
        master: fp32, or bf16, which is rounded stochastically.
        grad: of its shape; any float type.
        first, second: both in fp32 or both in codes.
        update: the step.
        key: 64 bits of the random numbers.
    """
    if not master.is_contiguous():
        raise ValueError(f"adamw_ wants a contiguous master; got shape {tuple(master.shape)}, stride {master.stride()}")
    if not on_gpu(master, "AdamW"):
        adamw_reference_(master, grad, first, second, update, key)
        return
    rows, numel = 4, master.numel()
    grid = (triton.cdiv(numel, rows * BLOCK),)
    _adamw_kernel[grid](
        master, grad.contiguous(), first.values, first.scale, second.values, second.scale, numel, _signed(key),
        *update.factors, CODES=first.scale is not None, ROWS=rows, WHOLE=numel % BLOCK == 0, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    increment_version(master)


@torch.no_grad()
def adamw_reference_(master: Tensor, grad: Tensor, first: Moment, second: Moment, update: Update, key: int) -> None:
    """`adamw_` in plain torch; defines the right answer."""
    keep1, add1, keep2, add2, step, root, adam_eps, decay = update.factors
    gradients = grad.reshape(-1)
    for start in range(0, master.numel(), CHUNK):
        part = slice(start, min(start + CHUNK, master.numel()))
        p, g = master.view(-1)[part].float(), gradients[part].float()
        bits = random_bits(key, part.start, len(p), master.device)
        m = _values(first, FIRST, part) * keep1 + g * add1
        v = _values(second, SECOND, part) * keep2 + g * g * add2
        p = p - (p * decay + step * m / (_sqrt(v) * root + adam_eps))
        master.view(-1)[part] = p if master.dtype == torch.float32 else stochastic_bf16(p, bits & 0xFFFF)
        _store(first, FIRST, part, m, (bits >> 16) & 0xFFFF)
        _store(second, SECOND, part, v, (bits >> 32) & 0xFFFF)


def stochastic_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """x fp32 -> bf16, up or down by the chance that keeps the mean; bits int64 in [0, 2^16), one number an element."""
    rounded = ((x.view(torch.int32) + bits.int()) & -0x10000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).bfloat16()


def random_bits(key: int, start: int, count: int, device: torch.device) -> Tensor:
    """64 bits for each of `count` elements from `start` on, [count] int64: SplitMix64 (Steele et al. 2014)."""
    x = (torch.arange(start, start + count, device=device) ^ _signed(key)) + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, count: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (x >> count) & (2 ** (64 - count) - 1)


def _signed(number: int) -> int:
    """Of the same 64 bits, with a sign."""
    return (number + 2**63) % 2**64 - 2**63


def _sqrt(x: Tensor) -> Tensor:
    """Of x fp32, rounded once; torch's own on a CPU may be off by a bit."""
    return x.double().sqrt().float()


def _values(moment: Moment, kind: tuple[torch.dtype, int, int], part: slice) -> Tensor:
    values = moment.values.view(-1)[part]
    if moment.scale is None:
        return values
    _, largest, power = kind
    share = values.float() * (1.0 / largest)
    scale = moment.scale[part.start // BLOCK : -(-part.stop // BLOCK)].repeat_interleave(BLOCK)[: len(values)]
    return share * share.abs() * scale if power == 2 else share.square().square() * scale


def _store(moment: Moment, kind: tuple[torch.dtype, int, int], part: slice, x: Tensor, bits: Tensor) -> None:
    if moment.scale is None:
        moment.values.view(-1)[part] = x
        return
    dtype, largest, power = kind
    blocks = torch.nn.functional.pad(x, (0, -len(x) % BLOCK)).view(-1, BLOCK)
    scale = blocks.abs().amax(dim=1)
    share = (blocks.abs() / scale[:, None]).nan_to_num_(0.0).view(-1)[: len(x)]  # of a block of zeros 0 / 0
    root = _sqrt(share) if power == 2 else _sqrt(_sqrt(share))
    low = (root * largest).floor().clamp(max=largest - 1)
    below, above = ((edge * (1.0 / largest)).square() for edge in (low, low + 1.0))
    if power == 4:
        below, above = below.square(), above.square()
    code = low + (bits * 2.0**-16 * (above - below) < share - below)
    code = code * x.sign() if power == 2 else torch.where(share > 0.0, code.clamp(min=1.0), code)
    moment.values.view(-1)[part] = code.to(dtype)
    moment.scale[part.start // BLOCK : -(-part.stop // BLOCK)] = scale


@triton.jit(do_not_specialize=["numel", "key"])
def _adamw_kernel(
    master_ptr, grad_ptr, first_ptr, first_scale_ptr, second_ptr, second_scale_ptr, numel, key,
    keep1, add1, keep2, add2, step, root, adam_eps, decay, CODES: tl.constexpr, ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Blocks of 256 elements, ROWS of them."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = rows[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    row_inside = rows * _BLOCK < numel
    inside = row_inside[:, None] if WHOLE else at < numel
    p = tl.load(master_ptr + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad_ptr + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(first_ptr + at, mask=inside, other=0).to(tl.float32)
    v = tl.load(second_ptr + at, mask=inside, other=0).to(tl.float32)
    if CODES:
        m, v = m * (1.0 / 127.0), v * (1.0 / 255.0)
        m = m * tl.abs(m) * tl.load(first_scale_ptr + rows, mask=row_inside, other=0.0)[:, None]
        v = (v * v) * (v * v) * tl.load(second_scale_ptr + rows, mask=row_inside, other=0.0)[:, None]
    m = m * keep1 + g * add1
    v = v * keep2 + g * g * add2
    p = p - (p * decay + tl.div_rn(step * m, tl.sqrt_rn(v) * root + adam_eps))

    x = (at.to(tl.uint64) ^ key.to(tl.int64).to(tl.uint64, bitcast=True)) + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    bits = x ^ (x >> 31)
    if master_ptr.dtype.element_ty == tl.bfloat16:
        whole = (p.to(tl.int32, bitcast=True) + (bits & 0xFFFF).to(tl.int32)) & -0x10000
        finite = tl.abs(p) < float("inf")
        p = tl.where(finite, whole.to(tl.float32, bitcast=True), p).to(tl.bfloat16)
    tl.store(master_ptr + at, p, mask=inside)
    if CODES:
        scale = tl.max(tl.abs(m), axis=1)
        share = tl.where(scale[:, None] > 0.0, tl.div_rn(tl.abs(m), scale[:, None]), 0.0)
        low = tl.minimum(tl.floor(tl.sqrt_rn(share) * 127.0), 126.0)
        below, above = low * (1.0 / 127.0), (low + 1.0) * (1.0 / 127.0)
        code = _either(share, low, below * below, above * above, (bits >> 16) & 0xFFFF)
        tl.store(first_ptr + at, tl.where(m < 0.0, -code, code).to(tl.int8), mask=inside)
        tl.store(first_scale_ptr + rows, scale, mask=row_inside)
        scale = tl.max(v, axis=1)
        share = tl.where(scale[:, None] > 0.0, tl.div_rn(v, scale[:, None]), 0.0)
        low = tl.minimum(tl.floor(tl.sqrt_rn(tl.sqrt_rn(share)) * 255.0), 254.0)
        below, above = low * (1.0 / 255.0), (low + 1.0) * (1.0 / 255.0)
        below, above = below * below, above * above
        code = _either(share, low, below * below, above * above, (bits >> 32) & 0xFFFF)
        code = tl.where(share > 0.0, tl.maximum(code, 1.0), code)
        tl.store(second_ptr + at, code.to(tl.int32).to(tl.uint8), mask=inside)
        tl.store(second_scale_ptr + rows, scale, mask=row_inside)
    else:
        tl.store(first_ptr + at, m, mask=inside)
        tl.store(second_ptr + at, v, mask=inside)


@triton.jit
def _either(share, low, below, above, bits):
    """The code below a share or the one above it, with the mean of the share."""
    return low + (bits.to(tl.float32) * 0.0000152587890625 * (above - below) < share - below).to(tl.float32)
