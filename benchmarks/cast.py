"""Casts to FP8, and norm and SwiGLU with and without them, as a share of a large copy's bandwidth in the same run.

    python benchmarks/cast.py        # a table, and benchmarks/results/cast.json (under $OUT if that is set)

Bytes are what an operation must move: each input once, each output and scale once, however often it reads them. Peer:
the same in plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from octavo.bench.measure import copy_speed, milliseconds
from octavo.bench.results import Results, Row
from octavo.kernels.cast import (
    cast_1x128,
    cast_128x1,
    cast_128x128,
    cast_both,
    cast_rows,
)
from octavo.kernels.cast_whole import cast_columns, cast_rows_columns, cast_tensor
from octavo.kernels.norm import add_rms_norm_cast, rms_norm_backward, rms_norm_forward
from octavo.kernels.swiglu import swiglu_backward, swiglu_backward_cast, swiglu_cast, swiglu_forward
from octavo.numerics.fp8 import (
    BLOCK_1X128,
    BLOCK_128X1,
    BLOCK_128X128,
    PER_COLUMN,
    PER_ROW,
    PER_TENSOR,
    QuantBlock,
    quantize,
)

TOKENS = 16384
ACTIVATIONS = {"qwen3-8b hidden": 4096, "qwen3-8b feed-forward": 12288, "qwen2.5-0.5b hidden": 896}
WEIGHTS = {"qwen3-8b gate and up": (24576, 4096), "qwen3-8b down": (4096, 12288)}
GOAL, FUSED_GOAL = 0.85, 0.75
"""Share of the copy bandwidth: of a cast alone, and of what computes the values that it casts."""
NORM_EPS = 1e-6


Cast = Callable[[Tensor], object]


def plain(*quant_blocks: QuantBlock) -> Cast:
    """The casts of each block shape in plain torch."""
    return lambda x: [quantize(x, quant_block) for quant_block in quant_blocks]


def transposed_too(quant_block: QuantBlock) -> Cast:
    """The cast in plain torch, and its transpose."""
    return lambda x: quantize(x, quant_block)[0].T.contiguous()


def plain_norm(x: Tensor, gain: Tensor) -> Tensor:
    """RMSNorm in plain torch."""
    return (x.float() * (x.float().square().mean(dim=-1, keepdim=True) + NORM_EPS).rsqrt() * gain).bfloat16()


def plain_swiglu(gate_up: Tensor) -> Tensor:
    """SwiGLU in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate.float()) * up.float()).bfloat16()


def gradient(function: Callable[..., Tensor], *inputs: Tensor) -> Callable[[Tensor], object]:
    """The backward of a plain torch function, by autograd; the forward is run once, before."""
    inputs = tuple(x.detach().requires_grad_() for x in inputs)
    y = function(*inputs)
    return lambda grad_y: torch.autograd.grad(y, inputs, grad_y, retain_graph=True)


def main() -> None:
    """Measure, print, write."""
    torch.manual_seed(0)
    copy = copy_speed()
    results = Results("cast", "python benchmarks/cast.py")
    results.add(Row(case="copy/1 GiB/uint8", metric="gb_s", value=copy, unit="GB/s"))

    def add(case: str, x: Tensor, cast: Cast, peer: Cast, num_bytes: float, goal: float = GOAL) -> None:
        bound = num_bytes / copy / 1e6
        mine, again, theirs = (bound / milliseconds(partial(work, x), 60) for work in (cast, cast, peer))
        note = f"second run {again:.3f}, plain torch {theirs:.3f}"
        results.add(Row(case=case, metric="bandwidth_share", value=mine, unit="of copy", goal=goal, note=note))

    casts(add)
    norms(add)
    swiglus(add)


def casts(add: Callable[..., None]) -> None:
    """Activations, gradients and weights, cast alone."""
    scale = torch.full((1, 1), 0.01, device="cuda")
    for name, width in ACTIVATIONS.items():
        x = torch.randn(TOKENS, width, device="cuda", dtype=torch.bfloat16)
        size = x.numel()
        scales = 4 * size / 128
        add(f"rows/{name}/bf16", x, cast_rows, plain(PER_ROW), 3 * size + 4 * TOKENS)
        add(f"1x128/{name}/bf16", x, cast_1x128, plain(BLOCK_1X128), 3 * size + scales)
        add(f"128x1/{name}/bf16", x, cast_128x1, plain(BLOCK_128X1), 3 * size + scales)
        add(f"both/{name}/bf16", x, cast_both, plain(BLOCK_1X128, BLOCK_128X1), 4 * size + 2 * scales)
        add(f"columns/{name}/bf16", x, cast_columns, plain(PER_COLUMN), 3 * size)
        add(f"rows and columns/{name}/bf16", x, cast_rows_columns, plain(PER_ROW, PER_COLUMN), 4 * size)
        add(f"tensor/{name}/bf16", x, cast_tensor, plain(PER_TENSOR), 3 * size)
        both_ways = partial(cast_tensor, transposed=True)
        add(f"tensor and transpose/{name}/bf16", x, both_ways, transposed_too(PER_TENSOR), 4 * size)
        add(f"tensor, given scale/{name}/bf16", x, partial(cast_tensor, scale=scale), plain(PER_TENSOR), 3 * size)
    for name, shape in WEIGHTS.items():
        for dtype in (torch.float32, torch.bfloat16):
            w = torch.randn(shape, device="cuda", dtype=dtype)
            case, num_bytes = f"{name}/{str(dtype).removeprefix('torch.')}", w.numel() * (dtype.itemsize + 2)
            add(f"128x128 and transpose/{case}", w, cast_128x128, transposed_too(BLOCK_128X128), num_bytes)
            both_ways = partial(cast_tensor, transposed=True)
            add(f"tensor and transpose/{case}", w, both_ways, transposed_too(PER_TENSOR), num_bytes)
            add(f"rows and columns/{case}", w, cast_rows_columns, plain(PER_ROW, PER_COLUMN), num_bytes)


def norms(add: Callable[..., None]) -> None:
    """RMSNorm of hidden states, fused or not, and of heads; no peer of the fused ones has the sum."""
    width = ACTIVATIONS["qwen3-8b hidden"]
    x, delta, grad_y = torch.randn(3, TOKENS, width, device="cuda").bfloat16()
    gain, size, name = torch.randn(width, device="cuda"), x.numel(), "qwen3-8b hidden/bf16"
    inverse_rms = rms_norm_forward(x, gain, NORM_EPS)[1]
    peer = partial(plain_norm, gain=gain)
    add(f"norm/{name}", x, lambda x: rms_norm_forward(x, gain, NORM_EPS), peer, 4 * size)
    backward = gradient(plain_norm, x, gain)
    add(f"norm backward/{name}", grad_y, partial(rms_norm_backward, x, gain, inverse_rms), backward, 6 * size)
    del backward
    for cast, quant_block, transposed, num_bytes in (
        ("1x128", BLOCK_1X128, False, 7),
        ("rows", PER_ROW, False, 7),
        ("1x128 and 128x1", BLOCK_1X128, True, 8),
    ):
        blocks = (quant_block, BLOCK_128X1) if transposed else (quant_block,)
        add(
            f"sum, norm, {cast}/{name}",
            x,
            lambda x, b=quant_block, t=transposed: add_rms_norm_cast(
                x, delta, gain, NORM_EPS, quant_block=b, transposed=t
            ),
            lambda x, blocks=blocks: plain(*blocks)(peer(x + delta)),
            num_bytes * size,
            FUSED_GOAL,
        )
    heads = torch.randn(TOKENS, 48, 128, device="cuda", dtype=torch.bfloat16)[:, :32]
    gain = gain[:128].contiguous()
    inverse_rms, name, size = rms_norm_forward(heads, gain, NORM_EPS)[1], "qwen3-8b query heads/bf16", heads.numel()
    add(f"norm/{name}", heads, lambda x: rms_norm_forward(x, gain, NORM_EPS), partial(plain_norm, gain=gain), 4 * size)
    backward = gradient(plain_norm, heads, gain)
    grad_y = torch.randn_like(heads)
    add(f"norm backward/{name}", grad_y, partial(rms_norm_backward, heads, gain, inverse_rms), backward, 6 * size)


def swiglus(add: Callable[..., None]) -> None:
    """SwiGLU, fused or not."""
    width, name = ACTIVATIONS["qwen3-8b feed-forward"], "qwen3-8b feed-forward/bf16"
    x = torch.randn(TOKENS, 2 * width, device="cuda", dtype=torch.bfloat16)
    grad_y, size = torch.randn(TOKENS, width, device="cuda", dtype=torch.bfloat16), TOKENS * width
    backward = gradient(plain_swiglu, x)
    add(f"swiglu/{name}", x, swiglu_forward, plain_swiglu, 6 * size)
    add(f"swiglu backward/{name}", grad_y, partial(swiglu_backward, x), backward, 10 * size)
    for cast, quant_block, transposed, num_bytes in (
        ("1x128", BLOCK_1X128, False, 5),
        ("rows", PER_ROW, False, 5),
        ("1x128 and 128x1", BLOCK_1X128, True, 6),
    ):
        blocks = (quant_block, BLOCK_128X1) if transposed else (quant_block,)
        add(
            f"swiglu, {cast}/{name}",
            x,
            partial(swiglu_cast, quant_block=quant_block, transposed=transposed),
            lambda x, blocks=blocks: plain(*blocks)(plain_swiglu(x)),
            num_bytes * size,
            FUSED_GOAL,
        )
    add(
        f"swiglu backward, 1x128 and 128x1/{name}",
        grad_y,
        partial(swiglu_backward_cast, x),
        lambda grad_y: plain(BLOCK_1X128, BLOCK_128X1)(backward(grad_y)[0]),
        10 * size,
        FUSED_GOAL,
    )


if __name__ == "__main__":
    if torch.cuda.is_available():
        main()
    else:
        print("benchmarks/cast.py measures a GPU, and there is none here: skipped")
