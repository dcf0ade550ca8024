"""Compiles the kernels of lm_head and the sampler for sm_90, without a GPU; prints what is in their PTX as JSON."""

import json
import sys

from cast_aot import first_steps, stack_bytes
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from octavo.kernels import lm_head, lm_head_gradients, sampling

SIZES = {"T": "i32", "V": "i32"}
SUMS = {"largest_ptr": "*fp32", "weights_ptr": "*i32", "moments_ptr": "*fp32"}
PRODUCT = SIZES | {"D": "i32", "inverse_temperature": "fp32"}
TOKENS = {"tokens_ptr": "*i64"}
ROWS = {"logsumexp_ptr": "*fp32", "grad_ptr": "*fp32"}
MULTIPLYING = {
    "_sums_kernel": PRODUCT | TOKENS | {"chosen_ptr": "*fp32"} | SUMS | {"kept_ptr": "*bf16", "columns": "i32"},
    "_logits_kernel": PRODUCT | {"logits_ptr": "*fp32"},
    "_multiplied_kernel": PRODUCT | TOKENS | ROWS | {"grad_logits_ptr": "*bf16"},
}
KEPT = {"chunk_ptr": "*bf16", "largest_ptr": "*fp32"} | SIZES | TOKENS | ROWS
WANTED = (
    "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16",
    "cp.async.bulk.tensor",
    "fma.rn.f32",
    ".local",
    "st.global.v4",
    "ld.global.v4",
)


def compiled(name: str, signature: dict[str, str], constants: dict[str, int], num_warps: int, num_stages: int) -> dict:
    """How often each instruction of interest stands in the kernel's PTX, and its bytes of stack and shared memory."""
    (kernel,) = (getattr(module, name) for module in (lm_head, lm_head_gradients, sampling) if hasattr(module, name))
    constants = constants | ({"EARLY": True} if "EARLY" in kernel.arg_names else {})
    divisible = [i for i, (key, kind) in enumerate(signature.items()) if kind[0] in "*i" and key != "T"]
    source = ASTSource(
        fn=kernel,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in divisible},
    )
    options = {"num_warps": num_warps, "num_stages": num_stages, **lm_head.UNFUSED}
    result = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    counts = {text: result.asm["ptx"].count(text) for text in WANTED} | {"first": first_steps(result.asm["ptx"])}
    return counts | {"stack": stack_bytes(result.asm["cubin"]), "shared": result.metadata.shared}


def multiplying(name: str, num_rows: int, **constants: bool) -> dict:
    """A kernel that multiplies, as it is launched for this many rows."""
    block_t, num_warps, num_stages = lm_head.configuration(num_rows)
    operands = {
        "hidden": f"tensordesc<bf16[{block_t}, {lm_head.BLOCK_K}]>",
        "weight": f"tensordesc<bf16[{lm_head.BLOCK_V}, {lm_head.BLOCK_K}]>",
    }
    return compiled(name, operands | MULTIPLYING[name], {"BLOCK_T": block_t} | constants, num_warps, num_stages)


DRAW = {
    "logits_ptr": "*fp32",
    "largest_ptr": "*fp32",
    "weights_ptr": "*i32",
    "logsumexp_ptr": "*fp64",
    "seed_ptr": "*i64",
    "sequence_ptr": "*i64",
    "position_ptr": "*i64",
    "tokens_ptr": "*i64",
    "logprobs_ptr": "*fp32",
    "T": "i32",
    "V": "i32",
    "num_tiles": "i32",
}
COMBINE = SUMS | {"logsumexp_ptr": "*fp64", "entropy_ptr": "*fp32", "T": "i32", "num_tiles": "i32"}

if __name__ == "__main__":
    found = {
        "_sums_kernel, few rows": multiplying("_sums_kernel", 64, KEEP=False),
        "_sums_kernel": multiplying("_sums_kernel", 65, KEEP=False),
        "_sums_kernel, few rows, kept": multiplying("_sums_kernel", 64, KEEP=True),
        "_sums_kernel, kept": multiplying("_sums_kernel", 65, KEEP=True),
        "_logits_kernel, few rows": multiplying("_logits_kernel", 64),
        "_logits_kernel": multiplying("_logits_kernel", 65),
        "_multiplied_kernel, few rows": multiplying("_multiplied_kernel", 64),
        "_multiplied_kernel": multiplying("_multiplied_kernel", 65),
        "_kept_kernel": compiled("_kept_kernel", KEPT, {"BLOCK_T": 16}, 4, 3),
        "_row_sums_kernel": compiled("_row_sums_kernel", {"logits_ptr": "*fp32"} | SIZES | SUMS, {"BLOCK_T": 4}, 4, 3),
        "_combine_kernel": compiled("_combine_kernel", COMBINE, {"ROWS": 8, "TILES": 256}, 8, 3),
        "_draw_kernel": compiled("_draw_kernel", DRAW, {"TILES": 1024}, 4, 3),
    }
    json.dump(found, sys.stdout)
