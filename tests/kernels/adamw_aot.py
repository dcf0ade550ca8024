"""Compiles AdamW's kernel for sm_90 in two formats, without a GPU; prints what is in its PTX as JSON."""

import json
import sys

from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.kernels.adamw import _adamw_kernel

COUNTED = ("fma.rn.f32", ".local", "ld.global.v4", "st.global.v4")


def build(master: str, codes: bool) -> dict[str, int]:
    """How often each instruction of interest stands there."""
    moments = {"first_ptr": "*i8", "first_scale_ptr": "*fp32", "second_ptr": "*u8", "second_scale_ptr": "*fp32"}
    if not codes:
        moments = {"first_ptr": "*fp32", "first_scale_ptr": "constexpr"}
        moments |= {"second_ptr": "*fp32", "second_scale_ptr": "constexpr"}
    signature = {"master_ptr": f"*{master}", "grad_ptr": "*fp32", **moments, "clip_ptr": "*fp32", "broken_ptr": "*i32"}
    signature |= {"numel": "i64", "key": "i64"}
    constants = {"CODES": codes, "DECAYS": False, "ROWS": 8, "WHOLE": True} | {
        name: None for name, kind in moments.items() if kind == "constexpr"
    }
    signature |= dict.fromkeys(("keep1", "add1", "keep2", "add2", "step", "adam_eps", "decay"), "fp32") | dict.fromkeys(
        constants, "constexpr"
    )
    attributes = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"}
    source = ASTSource(fn=_adamw_kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": 4, "enable_fp_fusion": False}
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    return {text: ptx.count(text) for text in COUNTED}


if __name__ == "__main__":
    json.dump({"fp32": build("fp32", codes=False), "bf16, codes": build("bf16", codes=True)}, sys.stdout)
