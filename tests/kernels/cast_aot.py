"""Compiles the kernels of casts, norm and SwiGLU for sm_90, without a GPU, and prints what is in their PTX as JSON."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.kernels import cast_kernels, norm_kernels, swiglu_kernels

TILE = {"WORDS": 64, "ALIGNED": True, "POWER_OF_TWO": False}
BOTH_WAYS = TILE | {"PLAIN": True, "TRANSPOSED": True}
WHOLE = BOTH_WAYS | {"PER_COLUMN": False, "PER_ROW": False, "SPLIT": "rows", "GIVEN": False, "COUNT": False}
PER_ROW = {"PER_COLUMN": True, "PER_ROW": True, "SPLIT": "columns"}
PER_COLUMN = {"WORDS": 32, "PLAIN": False, "PER_COLUMN": True, "SPLIT": ""}
GIVEN = {"TRANSPOSED": False, "SPLIT": "", "GIVEN": True, "COUNT": True}
AMAX = {name: WHOLE[name] for name in ("WORDS", "ALIGNED", "PER_COLUMN", "PER_ROW", "SPLIT")}
NORM = {"R": 1, "BLOCK_D": 4096, "D": 4096, "BITS": 20, "NORM_EPS": 1e-6}
NORM_CAST = NORM | {"ADD": True, "PER_ROW": False, "POWER_OF_TWO": False}
NORM_BACKWARD = {"R": 1, "BLOCK_D": 4096, "D": 4096, "ADD": True}
HEADS = {"R": 32, "BLOCK_D": 128, "D": 128, "BITS": 23, "NORM_EPS": 1e-6}
SWIGLU = {"R": 4, "BLOCK_F": 1024, "AMAX": True}
CASES = {
    "rows": (cast_kernels.rows_kernel, {"BLOCK_M": 1, "BLOCK_K": 4096, "POWER_OF_TWO": False}, 4),
    "1x128": (cast_kernels.rows_kernel, {"BLOCK_M": 32, "BLOCK_K": 128, "POWER_OF_TWO": False}, 4),
    "128x1": (cast_kernels.tile_kernel, BOTH_WAYS | {"WORDS": 32, "PLAIN": False}, 4),
    "both": (cast_kernels.tile_kernel, BOTH_WAYS, 8),
    "128x128": (cast_kernels.block_kernel, {"TRANSPOSED": True, "POWER_OF_TWO": False}, 4),
    "amax": (cast_kernels.amax_kernel, AMAX, 8),
    "amax of rows and columns": (cast_kernels.amax_kernel, AMAX | PER_ROW, 8),
    "columns": (cast_kernels.scaled_kernel, WHOLE | PER_COLUMN, 4),
    "rows and columns": (cast_kernels.scaled_kernel, WHOLE | PER_ROW, 8),
    "tensor": (cast_kernels.scaled_kernel, WHOLE, 8),
    "tensor, given scale": (cast_kernels.scaled_kernel, WHOLE | GIVEN, 8),
    "norm": (norm_kernels.norm_kernel, NORM, 4),
    "norm of heads": (norm_kernels.norm_kernel, HEADS, 4),
    "norm backward": (norm_kernels.backward_kernel, NORM_BACKWARD, 4),
    "norm 1x128": (norm_kernels.norm_cast_kernel, NORM_CAST, 4),
    "sum and norm": (norm_kernels.sum_norm_kernel, NORM | {"ADD": True, "AMAX": True}, 4),
    "norm 128x1": (norm_kernels.norm_transposed_kernel, TILE | {"WORDS": 32}, 4),
    "swiglu": (swiglu_kernels.swiglu_kernel, SWIGLU, 4),
    "swiglu backward": (swiglu_kernels.backward_kernel, SWIGLU, 4),
    "swiglu 1x128": (swiglu_kernels.cast_rows_kernel, {"R": 32, "BLOCK_F": 128, "POWER_OF_TWO": False}, 4),
    "swiglu both": (swiglu_kernels.cast_both_kernel, {"ALIGNED": True, "POWER_OF_TWO": False}, 8),
    "swiglu backward both": (swiglu_kernels.backward_cast_kernel, {"ALIGNED": True, "POWER_OF_TWO": False}, 8),
}
FP32_TOO = ("rows", "128x128", "amax", "amax of rows and columns", "columns", "rows and columns", "tensor")
"""Casts that FP32 masters go through."""
POINTERS = {"bits_ptr": "*i32", "groups_ptr": "*i32", "saturated_ptr": "*i64"} | dict.fromkeys(
    ("x_ptr", "w_ptr", "residual_ptr", "delta_ptr", "h_ptr", "y_ptr", "gate_ptr", "up_ptr"), "*{}"
)
COUNTED = ("cvt.rn.satfinite.e4m3x2.f32", "stmatrix", "ld.global.v4", "ld.global.v2.b64", ".local", "max.u16x2")


def first_steps(ptx: str) -> list[str]:
    """The first three instructions that touch global memory or other kernels."""
    found = re.finditer(r"\b(griddepcontrol\.\w+|(?:ld|st|atom|red)[.\w]*\.global|cp\.async\.)", ptx)
    return [match[1] for match, _ in zip(found, range(3), strict=False)]


def stack_bytes(cubin: bytes) -> int:
    """What ptxas spilled, or a kernel indexed at run time."""
    tool = Path(triton.backends.nvidia.__file__).parent / "bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", usage).group(1))


def pointer_or_size(name: str, dtype: str) -> str:
    """Type of a kernel's argument, after its name."""
    if name in POINTERS:
        return POINTERS[name].format(dtype)
    if name.endswith("_ptr"):
        if name.startswith("grad_"):
            return f"*{dtype}"
        return "*fp8e4nv" if name.startswith("q") else "*fp32"
    return "i32"


def build(kernel, constants: dict, num_warps: int, dtype: str, max_registers: int | None = None):
    """The compiled kernel; every pointer and size a multiple of 16. What may be an activation starts early."""
    constants = constants | ({"EARLY": dtype == "bf16"} if "EARLY" in kernel.arg_names else {})
    signature = {name: pointer_or_size(name, dtype) for name in kernel.arg_names if name not in constants}
    attributes = {(i,): [["tt.divisibility", 16]] for i in range(len(signature))}
    signature = {name: signature.get(name, "constexpr") for name in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    return compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps, "maxnreg": max_registers})


if __name__ == "__main__":
    found = {}
    for name, (kernel, constants, num_warps) in CASES.items():
        for dtype in ("bf16", "fp32") if name in FP32_TOO else ("bf16",):
            registers = 128 if kernel is cast_kernels.scaled_kernel and dtype == "bf16" else None
            assembly = build(kernel, constants, num_warps, dtype, registers).asm
            counts = {text: assembly["ptx"].count(text) for text in COUNTED}
            found[f"{name} {dtype}"] = counts | {
                "first": first_steps(assembly["ptx"]),
                "stack": stack_bytes(assembly["cubin"]),
            }
    json.dump(found, sys.stdout)
