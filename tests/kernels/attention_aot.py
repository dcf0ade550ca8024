"""Compiles the kernels of attention for sm_90, without a GPU, and prints what is in each as JSON.

python tests/kernels/attention_aot.py [all]    # all: every variant, not the ones alone that a test has the time for
"""

import json
import re
import sys
from functools import partial
from itertools import product

from cast_aot import first_steps, stack_bytes
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from octavo.kernels import (
    attention_gradients,
    attention_kernels,
    backward_kernels,
    decode_attention,
    gradient_kernels,
    heads_kernels,
    prefill_attention,
    spread_attention,
    spread_kernels,
)
from octavo.kernels.attention_backward import DELTA_ROWS, launch_options
from octavo.kernels.heads import GATHERED_ROWS, TOKENS
from octavo.kernels.triton_attention import FEW_PROGRAMS, UNFUSED, block_width, num_warps

WANTED = ("ldmatrix", "st.shared", "wgmma.mma_async", "mma.sync", "f32.bf16.bf16", "f32.f16.f16", "atom")
SCALES = {"k_scale_ptr": "*fp32", "v_scale_ptr": "*fp32"}
ROWS = {"logsumexp_ptr": "*fp32", "delta_ptr": "*fp32"}


def compiled(kernel, signature, constants, source_class=ASTSource, **options):
    """How often each instruction of interest stands in the kernel's PTX, its bytes of stack and shared memory, and how
    many neighbouring columns of an operand each thread gives to a product, which decides in what order they add up."""
    pointers = [i for i, kind in enumerate(signature.values()) if kind.startswith("*")]
    source = source_class(
        fn=kernel,
        signature=signature | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in pointers},
    )
    result = compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    counts = {text: result.asm["ptx"].count(text) for text in WANTED}
    together = sorted({int(width) for width in re.findall(r"kWidth = (\d+)", result.asm["ttgir"])})
    counts |= {"first": first_steps(result.asm["ptx"]), "together": together}
    counts["early"] = re.findall(r"griddepcontrol\.\w+", result.asm["ptx"])
    return counts | {"stack": stack_bytes(result.asm["cubin"]), "shared": result.metadata.shared}


def shape(head_dim, heads=32, kv_heads=8):
    return {"H": heads, "HKV": kv_heads, "DH": head_dim, "BLOCK_D": block_width(head_dim)}


def forward(rows, head_dim, page_size, fp8, num_programs=FEW_PROGRAMS):
    """`attention_kernel` as it is launched for this many programs."""
    stored = ("*fp8e4nv" if page_size else "*fp16") if fp8 else "*bf16"
    signature = {"q_ptr": "*bf16", "k_ptr": stored, "v_ptr": stored, **SCALES, "out_ptr": "*bf16"}
    signature |= {"logsumexp_ptr": "*fp32", "tiles_ptr": "*i32", "table_ptr": "*i64", "factor": "fp32"}
    constants = shape(head_dim) | {"ROWS": rows, "PAGE": page_size, "STARTS": False, "FP8": fp8}
    options = {"num_warps": num_warps(rows, num_programs), "num_stages": 3, **UNFUSED}
    signature |= {"stride_table": "i32", "num_slots": "i32"}
    return compiled(attention_kernels.attention_kernel, signature, constants, **options)


def fp8_decode(head_dim, cast=False):
    """`decode_attention_kernel`."""
    signature = {"q_ptr": "*bf16", "k_ptr": "*fp8e4nv", "v_ptr": "*fp8e4nv", **SCALES}
    signature |= {"out_ptr": "*i16" if cast else "*bf16", "second_ptr": "*fp32"}
    signature |= {"tiles_ptr": "*i32", "table_ptr": "*i32", "factor": "fp32"}
    signature |= dict.fromkeys(("stride_table", "stride_out", "stride_scale"), "i32")
    constants = {"H": 32, "HKV": 8, "DH": head_dim, "PAGE": 16}
    constants |= {"STAGES": decode_attention.STAGES, "WARPS": decode_attention.WARPS, "EARLY": True}
    constants |= {"CAST": cast, "POWER_OF_TWO": False}
    kernel = decode_attention.decode_attention_kernel
    return compiled(
        kernel, signature, constants, GluonASTSource, num_warps=decode_attention.WARPS, enable_fp_fusion=False
    )


def boxes(dtype, rows, columns):
    """A descriptor."""
    return f"tensordesc<{dtype}[{rows}, {columns}],{gl.NVMMASharedLayout(128, 16, rank=2)!r}>"


def spread(name, head_dim, fp8):
    """A kernel of `spread_attention`."""
    stored, weights = ("*fp8e4nv", "*fp16") if fp8 else ("*bf16", "*bf16")
    signature = {"q_ptr": "*bf16"} if name in ("scores", "codes") else {}
    signature |= {"k_ptr": stored, "v_ptr": stored, **SCALES, "scores_ptr": "*fp32", "weights_ptr": weights}
    signature |= dict.fromkeys(("largest_ptr", "moves_ptr", "unit_ptr"), "*fp32")
    signature |= {"tiles_ptr": "*i32", "table_ptr": "*i32", "stride_table": "i32", "num_blocks": "i32"}
    results = {"out_ptr": "*bf16", "logsumexp_ptr": "*fp32"}
    signature |= {"scores": {"factor": "fp32"}, "codes": {"factor": "fp32"}, "weights": {}}.get(name, results)
    warps, stages = spread_attention.LAUNCH.get(name, spread_attention.LAUNCH["values"])
    constants = shape(head_dim) | {"PAGE": 16, "FP8": fp8, "EARLY": True}
    if name in ("values", "sum"):
        constants["WIDTH"] = spread_attention.SLICE
    kernel, source, options = getattr(spread_attention, f"_{name}_kernel", None), ASTSource, {"num_stages": stages}
    if name == "codes":
        kernel, source, warps, options = spread_kernels.scores_kernel, GluonASTSource, 1, {}
        constants["STAGES"], unused = spread_attention.CODES_STAGES, ("v_ptr", "weights_ptr", "moves_ptr")
        del constants["FP8"], constants["BLOCK_D"]
    elif name == "sum":
        kernel, source, options = spread_kernels.values_kernel, GluonASTSource, {}
        constants["STAGES"], constants["WARPS"], unused = stages, warps, ("k_ptr", "scores_ptr", *SCALES)
        del constants["BLOCK_D"]
    else:
        unused = ()
    signature = {key: kind for key, kind in signature.items() if key not in unused}
    return compiled(kernel, signature, constants, source, num_warps=warps, **options, **UNFUSED)


def many_queries(head_dim, scaled):
    """`prefill_attention_kernel`."""
    keys = boxes("fp16" if scaled else "bf16", prefill_attention.KV_BLOCK, head_dim)
    signature = {"q_ptr": "*bf16", "k_desc": keys, "v_desc": keys, **SCALES, "out_ptr": "*bf16"}
    signature |= {"logsumexp_ptr": "*fp32", "tiles_ptr": "*i32", "starts_ptr": "*i64", "factor": "fp32"}
    constants = {"H": 32, "HKV": 8, "DH": head_dim, "STARTS": True, "SCALED": scaled}
    constants |= {"STAGES": prefill_attention.STAGES, "REGISTERS": prefill_attention.REGISTERS}
    kernel = prefill_attention.prefill_attention_kernel
    return compiled(kernel, signature, constants, GluonASTSource, num_warps=4, enable_fp_fusion=False)


def backward(name, head_dim):
    """`grad_q` or `grad_kv`."""
    signature = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "d_out_ptr"), "*bf16") | ROWS
    if name == "grad_q":
        signature |= {"grad_q_ptr": "*bf16", "tiles_ptr": "*i32", "softmax_scale": "fp32"}
        kernel, constants = backward_kernels.grad_q_kernel, shape(head_dim) | {"ROWS": 64}
    else:
        signature |= {"grad_k_ptr": "*bf16", "grad_v_ptr": "*bf16", "tiles_ptr": "*i32", "boundaries_ptr": "*i64"}
        signature |= {"softmax_scale": "fp32"}
        kernel, constants = backward_kernels.grad_kv_kernel, shape(head_dim)
    return compiled(kernel, signature, constants, **launch_options(name, head_dim))


def gradients(name, head_dim, pair=2):
    """`grad_kv_kernel`, or `grad_q_kernel` of one head or two, of `gradient_kernels`."""
    rows, numbers = boxes("bf16", gradient_kernels.ROWS, head_dim), ("first_head", "num_heads", "num_blocks")
    constants = {"GROUP": 4, "HKV": 8, "DH": head_dim, "REGISTERS": attention_gradients.REGISTERS}
    if name == "kv":
        signature = dict.fromkeys(("q_desc", "d_out_desc", "k_desc", "v_desc"), rows)
        signature |= {"log2sum_ptr": "*fp32", "delta_ptr": "*fp32"}
        signature |= dict.fromkeys(("grad_k_ptr", "grad_v_ptr", "blocks_ptr"), "*bf16") | {"tiles_ptr": "*i32"}
        signature |= dict.fromkeys((*numbers, "T"), "i32") | {"softmax_scale": "fp32"}
        kernel, constants["STAGES"] = gradient_kernels.grad_kv_kernel, attention_gradients.STAGES
    else:
        signature = {"blocks_desc": boxes("bf16", gradient_kernels.KEYS // 2, gradient_kernels.ROWS), "k_desc": rows}
        signature |= {"grad_q_ptr": "*bf16", "tiles_ptr": "*i32"} | dict.fromkeys(numbers, "i32")
        signature |= {"softmax_scale": "fp32"}
        constants |= {"HEADS": pair, "STAGES": attention_gradients.KEY_STAGES[pair]}
        kernel = gradient_kernels.grad_q_kernel
    return compiled(kernel, signature, constants, GluonASTSource, num_warps=4)


def rows(head_dim):
    """`rows_kernel`."""
    signature = {"out_ptr": "*bf16", "d_out_ptr": "*bf16", "logsumexp_ptr": "*fp32", "delta_ptr": "*fp32"}
    signature |= {"log2sum_ptr": "*fp32", "T": "i32"}
    constants = {"R": attention_gradients.TOKENS, "H": 32, "DH": head_dim}
    return compiled(gradient_kernels.rows_kernel, signature, constants, num_warps=4)


def delta(head_dim):
    signature = {"out_ptr": "*bf16", "d_out_ptr": "*bf16", "delta_ptr": "*fp32", "num_rows": "i32"}
    constants = {"R": DELTA_ROWS, "DH": head_dim, "BLOCK_D": block_width(head_dim)}
    return compiled(backward_kernels.delta_kernel, signature, constants, num_warps=4)


def heads(head_dim, norm, slots, fp8):
    """`heads_kernel`, started early."""
    stored = "*fp8e4nv" if fp8 else "*bf16"
    signature = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*bf16")
    signature |= dict.fromkeys(("stride_q", "stride_k", "stride_v"), "i32")
    signature |= dict.fromkeys(("q_gain_ptr", "k_gain_ptr", "cos_ptr", "sin_ptr"), "*fp32") | {"slots_ptr": "*i64"}
    signature |= {"q_out_ptr": "*bf16", "k_out_ptr": stored, "v_out_ptr": stored, **SCALES}
    signature |= {"inverse_ptr": "*fp32", "saturated_ptr": "*i64", "T": "i32"}
    constants = shape(head_dim) | {"R": TOKENS, "BITS": 23, "NORM_EPS": 1e-6, "NORM": norm, "SLOTS": slots, "FP8": fp8}
    constants["EARLY"] = True
    return compiled(heads_kernels.heads_kernel, signature, constants, num_warps=4, **UNFUSED)


def gather(head_dim):
    """`gather_kernel` of FP8."""
    signature = {"values_ptr": "*fp8e4nv", "scale_ptr": "*fp32", "slots_ptr": "*i64", "out_ptr": "*fp16"}
    constants = {
        "HKV": 8,
        "WIDTH": 8 * head_dim,
        "BLOCK_HEADS": 8,
        "BLOCK_WIDTH": 1024,
        "R": GATHERED_ROWS,
        "FP8": True,
    }
    return compiled(
        heads_kernels.gather_kernel, signature | {"out_scale_ptr": "*fp32", "S": "i32"}, constants, num_warps=4
    )


def rotate_back(head_dim):
    signature = dict.fromkeys(("q_ptr", "k_ptr"), "*bf16") | dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32")
    signature |= dict.fromkeys(("q_out_ptr", "k_out_ptr"), "*bf16") | {"T": "i32"}
    constants = shape(head_dim) | {"R": TOKENS}
    return compiled(heads_kernels.rotate_back_kernel, signature, constants, num_warps=4, **UNFUSED)


def every_variant():
    """Name and compilation of each kernel for each width, KV format and way to lie in memory."""
    for width in decode_attention.WIDTHS:
        yield f"codes fp8 {width}", partial(fp8_decode, width)
        yield f"codes fp8 {width} cast", partial(fp8_decode, width, True)
        for kv_format, scaled in (("bf16", False), ("fp8", True)):
            yield f"many {kv_format} {width}", partial(many_queries, width, scaled)
    for width in attention_gradients.WIDTHS:
        yield f"gradients_kv bf16 {width}", partial(gradients, "kv", width)
        yield f"gradients_q bf16 {width}", partial(gradients, "q", width)
        yield f"gradients_q bf16 {width} odd", partial(gradients, "q", width, 1)
        yield f"rows bf16 {width}", partial(rows, width)
    yield "spread fp8 codes", partial(spread, "codes", 128, True)
    for name in (*spread_attention.LAUNCH, "sum"):
        for kv_format, fp8 in (("bf16", False), ("fp8", True)):
            yield f"spread {kv_format} {name}", partial(spread, name, 128, fp8)
    for width in (64, 96, 128):
        for kv_format, fp8 in (("bf16", False), ("fp8", True)):
            yield f"decode {kv_format} {width}", partial(forward, 16, width, 16, fp8)
            yield f"decode {kv_format} few {width}", partial(forward, 16, width, 16, fp8, 1)
            yield f"prefill {kv_format} {width}", partial(forward, 64, width, 16, fp8)
            yield f"packed {kv_format} {width}", partial(forward, 64, width, 0, fp8)
            for norm, slots in product((False, True), repeat=2):
                name = f"heads {kv_format} {width}{' norm' if norm else ''}{' slots' if slots else ''}"
                yield name, partial(heads, width, norm, slots, fp8)
        yield f"grad_q bf16 {width}", partial(backward, "grad_q", width)
        yield f"grad_kv bf16 {width}", partial(backward, "grad_kv", width)
        yield f"delta bf16 {width}", partial(delta, width)
        yield f"rotate_back bf16 {width}", partial(rotate_back, width)
        yield f"gather fp8 {width}", partial(gather, width)


SOME = (
    *("decode bf16 64", "decode fp8 128", "prefill fp8 96", "packed bf16 128", "heads fp8 128 norm slots"),
    *("grad_q bf16 128", "grad_kv bf16 128", "delta bf16 96", "rotate_back bf16 64", "gather fp8 128", "codes fp8 128"),
    *("codes fp8 128 cast", "many fp8 128", "gradients_kv bf16 128", "gradients_q bf16 128", "rows bf16 128"),
    *("spread fp8 scores", "spread bf16 weights", "spread fp8 values", "spread fp8 codes", "spread bf16 sum"),
)
"""Every kernel and width once at least."""

if __name__ == "__main__":
    chosen = every_variant() if sys.argv[1:] == ["all"] else (v for v in every_variant() if v[0] in SOME)
    json.dump({name: make() for name, make in chosen}, sys.stdout)
