"""Compiles the kernels of octavo.kernels.cast for sm_90, without a GPU, and prints what is in their PTX as JSON."""

import json
import sys

from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.kernels import cast

CONSTANTS = {"POWER_OF_TWO": False}
BOTH = {"x_ptr": "*{}", "q_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "q_t_ptr": "*fp8e4nv", "scale_t_ptr": "*fp32"}
SIZES = {name: "i32" for name in ("T", "K", "stride", "stride_t")}
KERNELS = {
    "_rows_kernel": (
        {"x_ptr": "*{}", "q_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "K": "i32", "stride": "i32"},
        {"BLOCK_K": 4096},
    ),
    "_1x128_kernel": (
        {"x_ptr": "*{}", "q_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "M": "i32", "K": "i32", "stride": "i32"},
        {"BLOCK_M": 32},
    ),
    "_128x1_kernel": (
        {name: kind for name, kind in (BOTH | SIZES).items() if name not in ("q_ptr", "scale_ptr")},
        {"BLOCK_K": 64},
    ),
    "_both_kernel": (BOTH | SIZES, {}),
    "_128x128_kernel": (
        {"w_ptr": "*{}", "q_ptr": "*fp8e4nv", "q_t_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "N": "i32"} | SIZES,
        {},
    ),
}


def compiled(name: str, dtype: str, num_warps: int) -> dict[str, int]:
    """How often each instruction of interest stands in the kernel's PTX."""
    signature, more = KERNELS[name]
    signature = {key: kind.format(dtype) for key, kind in signature.items() if name != "_128x128_kernel" or key != "T"}
    constants = CONSTANTS | more
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(len(signature))}
    source = ASTSource(
        fn=getattr(cast, name),
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs=attributes,
    )
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}).asm["ptx"]
    return {text: ptx.count(text) for text in ("cvt.rn.satfinite.e4m3x2.f32", "stmatrix", "ld.global.v4", ".local")}


if __name__ == "__main__":
    found = {
        f"{name} {dtype} {warps}": compiled(name, dtype, warps)
        for name in KERNELS
        for dtype in ("bf16", "fp32")
        for warps in (4, 8)
    }
    json.dump(found, sys.stdout)
