"""Compiles the matrix products of octavo.kernels for sm_90, without a GPU, and prints what is in their PTX as JSON."""

import json
import sys

from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from octavo.kernels import decode_gemm, triton_gemm

POINTERS = {"y_ptr": "*bf16", "bias_ptr": "*bf16", "x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32"}
SIZES = dict.fromkeys(("M", "N", "K"), "i32")
INSTRUCTIONS = ("wgmma.mma_async", "e4m3.e4m3", "bf16.bf16", "cp.async.bulk.tensor", "griddepcontrol.wait", ".local")


def compiled(source, fn, signature, constants, **options):
    """How often each instruction of interest stands in the kernel's PTX."""
    names = [*signature, *constants]
    wide = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")] + [names.index(n) for n in "NK"]
    result = compile(
        source(
            fn,
            signature | dict.fromkeys(constants, "constexpr"),
            {(names.index(name),): value for name, value in constants.items()},
            {(i,): [["tt.divisibility", 16]] for i in wide},
        ),
        target=GPUTarget("cuda", 90, 32),
        options=options,
    )
    return {text: result.asm["ptx"].count(text) for text in INSTRUCTIONS}


def product(kind, M):
    """`triton_gemm` for a number of rows."""
    tiles = triton_gemm.tiles_for(kind, M)
    x, w = "fp8e4nv" if kind == "block" else "bf16", "bf16" if kind == "bf16" else "fp8e4nv"
    signature = {
        "x_desc": f"tensordesc<{x}[{tiles.block_m}, {tiles.block_k}]>",
        "w_desc": f"tensordesc<{w}[{tiles.block_n}, {tiles.block_k}]>",
        **POINTERS,
        **SIZES,
        "stride_x_scale": "i32",
        "stride_w_scale": "i32",
    }
    constants = dict(BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, GROUP=8)
    constants |= dict(STAGES=tiles.num_stages, SWAP=tiles.swap, KIND=kind, BIAS=True)
    return compiled(ASTSource, triton_gemm._product_kernel, signature, constants, num_warps=tiles.num_warps)


def decode(block_m):
    """`decode_gemm` with tiles of so many rows."""

    def descriptor(kind, rows, columns, swizzle, bits):
        layout = f"swizzle_byte_width={swizzle}, element_bitwidth={bits}, rank=2, transposed=False, fp4_padded=False"
        return f"tensordesc<{kind}[{rows}, {columns}],NVMMASharedLayout({layout}, cga_layout=[])>"

    signature = {
        "x_desc": descriptor("fp8e4nv", block_m, 128, 128, 8),
        "w_desc": descriptor("fp8e4nv", 64, 128, 128, 8),
        "scale_desc": descriptor("fp32", 1, max(block_m, 32), 0, 32),
        "y_ptr": "*bf16",
        "w_scale_ptr": "*fp32",
        "bias_ptr": "*bf16",
        **SIZES,
        "stride_w_scale": "i32",
    }
    constants = {"BLOCK_M": block_m, "STAGES": decode_gemm.STAGES[block_m], "BIAS": True}
    options = {"num_warps": 4, "maxnreg": decode_gemm.max_registers(block_m)}
    return compiled(GluonASTSource, decode_gemm._decode_kernel, signature, constants, **options)


if __name__ == "__main__":
    found = {f"{kind} {M}": product(kind, M) for kind in ("block", "bf16", "w8a16") for M in (1, 33, 128, 1000)}
    found |= {f"decode {rows}": decode(rows) for rows in decode_gemm.STAGES}
    json.dump(found, sys.stdout)
