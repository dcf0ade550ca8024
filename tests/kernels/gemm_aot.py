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


def decode(kind, block_m):
    """`decode_gemm` with tiles of so many rows."""

    def descriptor(dtype, box, swizzle, bits):
        layout = f"swizzle_byte_width={swizzle}, element_bitwidth={bits}, rank=2, transposed=False, fp4_padded=False"
        return f"tensordesc<{dtype}[{box[0]}, {box[1]}],NVMMASharedLayout({layout}, cga_layout=[])>"

    w_box, x_box = decode_gemm.boxes(kind, block_m)
    bytes_kind, high_kind = ("fp8e4nv", 8), ("bf16", 16)
    x_kind, w_kind = {
        "block": (bytes_kind, bytes_kind),
        "row": (bytes_kind, bytes_kind),
        "bf16": (high_kind, high_kind),
        "w8a16": (high_kind, bytes_kind),
    }[kind]
    scales = descriptor("fp32", decode_gemm.scale_box(block_m), 0, 32)
    signature = {
        "x_desc": descriptor(x_kind[0], x_box, 128, x_kind[1]),
        "w_desc": descriptor(w_kind[0], w_box, 128, w_kind[1]),
        "scale_desc": scales if kind == "block" else "*bf16",
        "y_ptr": "*bf16",
        "x_scale_ptr": "*fp32",
        "w_scale_ptr": "*fp32",
        "bias_ptr": "*bf16",
        **SIZES,
        "stride_w_scale": "i32",
    }
    stages = decode_gemm.num_stages(kind, block_m)
    constants = {"KIND": kind, "BLOCK_M": block_m, "STAGES": stages, "BIAS": True}
    options = {"num_warps": 4, "maxnreg": decode_gemm.max_registers(kind, block_m), "enable_fp_fusion": False}
    return compiled(GluonASTSource, decode_gemm._decode_kernel, signature, constants, **options)


if __name__ == "__main__":
    found = {f"{kind} {M}": product(kind, M) for kind in ("block", "bf16", "w8a16") for M in (1, 33, 128, 1000)}
    kinds = ("block", "row", "bf16", "w8a16")
    found |= {f"decode {kind} {rows}": decode(kind, rows) for kind in kinds for rows in (16, 32, 64)}
    json.dump(found, sys.stdout)
