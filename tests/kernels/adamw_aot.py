"""Compiles AdamW's kernel for sm_90 in four formats, without a GPU; prints what is in its PTX and SASS as JSON."""

import json
import re
import sys

from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.kernels.adamw import BLOCK, _adamw_kernel

ROWS = 8
COUNTED = ("fma.rn.f32", ".local", "ld.global.v4", "st.global.v4")


def build(master: str, codes: bool) -> dict[str, float]:
    """How often each instruction of interest stands there, and how many instructions for each weight in all."""
    moments = {"first_ptr": "*i8", "first_scale_ptr": "*fp32", "second_ptr": "*u8", "second_scale_ptr": "*fp32"}
    if not codes:
        moments = {"first_ptr": "*fp32", "first_scale_ptr": "constexpr"}
        moments |= {"second_ptr": "*fp32", "second_scale_ptr": "constexpr"}
    signature = {"master_ptr": f"*{master}", "grad_ptr": "*fp32", **moments, "clip_ptr": "*fp32", "broken_ptr": "*i32"}
    signature |= {"numel": "i64", "key": "i64"}
    constants = {"CODES": codes, "DECAYS": False, "ROWS": ROWS, "WHOLE": True} | {
        name: None for name, kind in moments.items() if kind == "constexpr"
    }
    signature |= dict.fromkeys(("keep1", "add1", "keep2", "add2", "step", "adam_eps", "decay"), "fp32") | dict.fromkeys(
        constants, "constexpr"
    )
    attributes = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = ASTSource(fn=_adamw_kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    compiled = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    instructions = re.findall(r"^\S+\t(?!NOP)\S", compiled.asm["sass"], flags=re.MULTILINE)
    each = ROWS * BLOCK // (32 * options["num_warps"])
    return {text: compiled.asm["ptx"].count(text) for text in COUNTED} | {"SASS a weight": len(instructions) / each}


if __name__ == "__main__":
    formats = [(master, codes) for master in ("fp32", "bf16") for codes in (False, True)]
    json.dump({master + ", codes" * codes: build(master, codes) for master, codes in formats}, sys.stdout)
