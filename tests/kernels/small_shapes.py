"""Every kernel once on small, ragged shapes: what compute-sanitizer watches in `make sanitize`.

python tests/kernels/small_shapes.py [cuda | cpu]    # a CPU runs the references: the script itself is tested
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from octavo.kernels.adamw import FIRST, SECOND, Moment, Update, adamw_
from octavo.kernels.cast import cast_1x128, cast_128x1, cast_128x128, cast_both, cast_rows
from octavo.kernels.cast_whole import cast_columns, cast_rows_columns, cast_tensor
from octavo.kernels.heads import HeadTransform
from octavo.kernels.logprobs import logits_from_hidden, sampling_weights, token_logprobs
from octavo.kernels.norm import add_rms_norm_cast, rms_norm
from octavo.kernels.operands import grid_operand
from octavo.kernels.swiglu import swiglu, swiglu_backward_cast, swiglu_cast
from octavo.layers.attention import PackedAttention
from octavo.layers.linear import FP8Linear
from octavo.models.config import read_config
from octavo.numerics.recipe import RECIPE_NAMES, get_recipe
from octavo.rollout.kv_cache import KVCache, PagedAttention

TINY = Path(__file__).parents[2] / "examples/tiny/model"


def main(device: str) -> None:
    """Casts, producers, linear layers of every recipe in decode and training, AdamW, lm_head, attention."""
    torch.manual_seed(0)

    def random(*shape: int, grad: bool = False) -> torch.Tensor:
        return torch.randn(*shape, device=device).bfloat16().requires_grad_(grad)

    for T, K in ((1, 16), (130, 200), (256, 384)):
        x, w = random(T, K), torch.randn(T, K, device=device)
        for cast in (cast_rows, cast_1x128, cast_128x1, cast_both, cast_columns, cast_tensor, cast_128x128):
            cast(x), cast(w)
        cast_rows_columns(x), cast_rows_columns(w)
        add_rms_norm_cast(x, random(T, K), torch.ones(K, device=device), 1e-6, transposed=True)
        rms_norm(random(T, K, grad=True), torch.ones(K, device=device), 1e-6).sum().backward()
        gate_up = random(T, 2 * K, grad=True)
        swiglu(gate_up).sum().backward()
        swiglu_cast(gate_up.detach(), transposed=True), swiglu_backward_cast(gate_up.detach(), random(T, K))
    for name in RECIPE_NAMES:
        for K, projections in (
            (256, {"q_proj": 256, "k_proj": 128, "v_proj": 128}),
            (200, {"q_proj": 192, "k_proj": 64}),
        ):
            layer = FP8Linear(K, projections, bias=True, recipe=get_recipe(name), path="layer")
            torch.nn.init.normal_(layer.weight), torch.nn.init.normal_(layer.bias)
            layer.to(device).requantize_()
            for T in (1, 20, 77, 128, 200):
                x = random(T, K, grad=True) if name != "fp32" else torch.randn(T, K, device=device, requires_grad=True)
                layer(x).sum().backward()
                with torch.no_grad():
                    layer(x.detach())
    clip, broken = torch.ones((), device=device), torch.zeros((), dtype=torch.int32, device=device)
    rule = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "adam_eps": 1e-8, "weight_decay": 0.1}
    update = Update(number=1, **rule, clip=clip, broken=broken)
    for T, K in ((1, 16), (130, 200), (256, 384)):
        for master in (random(T, K), torch.randn(T, K, device=device)):
            grad, scales = torch.randn(T, K, device=device), -(-T * K // 256)
            plain = [Moment(torch.zeros_like(grad)) for _ in range(2)]
            codes = [
                Moment(torch.zeros(T, K, dtype=kind[0], device=device), torch.zeros(scales, device=device))
                for kind in (FIRST, SECOND)
            ]
            adamw_(master, grad, *plain, update, 1), adamw_(master, grad, *codes, update, 2)
    for T, D, V in ((1, 64, 100), (70, 200, 1000)):
        hidden, weight, tokens = random(T, D, grad=True), random(V, D), torch.randint(V, (T,), device=device)
        operand = grid_operand(weight)
        logprobs, _ = token_logprobs(hidden, weight.float().requires_grad_(), operand, tokens, 0.8)
        logprobs.sum().backward()
        sampling_weights(logits_from_hidden(hidden.detach(), operand))
    for H, Hkv, Dh in ((4, 2, 64), (7, 1, 96)):
        config = replace(read_config(TINY)[0], num_layers=1, num_heads=H, num_kv_heads=Hkv, head_dim=Dh)
        angles, gains = torch.randn(71, Dh // 2, device=device), torch.ones(2, Dh, device=device, requires_grad=True)
        counted = torch.zeros(1, dtype=torch.int64, device=device)
        transform = HeadTransform(angles.cos(), angles.sin(), *gains, 1e-6, counted)
        for kv_format in ("bf16", "fp8"):
            heads = [random(71, n, Dh, grad=True) for n in (H, Hkv, Hkv)]
            packed = PackedAttention(torch.tensor([0, 70, 70, 71], device=device), kv_format)
            packed.attend(0, *heads, transform, 0.1).sum().backward()
            cache, pages = KVCache(config, 10, 16, kv_format, device), torch.randperm(10, device=device).view(2, 5)
            for firsts, counts in (([0, 0], [70, 1]), ([70, 1], [1, 1])):
                T = sum(counts)
                now = replace(transform, cos=transform.cos[:T], sin=transform.sin[:T])
                with torch.no_grad():
                    PagedAttention(cache, pages, firsts, counts).attend(0, *(x[:T] for x in heads), now, 0.1)
    if device == "cuda":
        torch.cuda.synchronize()
    print(f"every kernel ran on {device}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda")
