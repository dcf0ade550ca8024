"""Random decoders of real widths on a GPU, and the check that a rollout is exact."""

import hashlib
import random

import torch
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from octavo.kernels.operands import quantize_matrix
from octavo.layers.linear import quantized_layers
from octavo.models.config import decoder_config
from octavo.models.decoder import Decoder
from octavo.numerics.recipe import get_recipe
from octavo.rl.batch import pack
from octavo.trainer.policy import packed_logprobs

VOCAB = 8192
SHAPES = {
    "qwen3-8b": (Qwen3Config, 4096, 12288, 32, 8, 128),
    "llama3-8b": (LlamaConfig, 4096, 14336, 32, 8, 128),
    "qwen2.5-0.5b": (Qwen2Config, 896, 4864, 14, 2, 64),
    "smollm2": (LlamaConfig, 576, 1536, 9, 3, 64),
}
"""Class, hidden and intermediate size, heads, KV heads, head width."""
RECIPES = ["block128", "w8a16", "rowwise", "tensorwise_static", "bf16"]


def transformers_config(shape, num_layers=2):
    cls, width, inner, heads, kv_heads, head_dim = shape
    return cls(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=inner, num_hidden_layers=num_layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_dim, max_position_embeddings=9216,
        tie_word_embeddings=False,
    )  # fmt: skip


def decoder_of(shape, recipe, **changes):
    config = transformers_config(SHAPES[shape])
    decoder = Decoder(decoder_config(config), config, get_recipe(recipe, **changes)).cuda()
    update_(decoder, 0)
    return decoder


@torch.no_grad()
def update_(decoder, seed):
    """Other weights, as after an optimiser step; the bytes are written in place."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator, device="cuda")
        parameter.copy_(1.0 + 0.2 * noise if "norm" in name else noise * parameter.shape[-1] ** -0.5)
    decoder.requantize_()


def digests(decoder, fresh):
    """SHA-256 of each FP8 layer's bytes and scales: as they lie there, or of its masters quantised anew on a CPU."""
    found = {}
    for index, layer in enumerate(quantized_layers(decoder)):
        for name in ("weight_q", "dgrad_q"):
            if layer.quantized and name in layer._buffers:
                matrix = layer.quantized_weight(name)
                if fresh:
                    master, rounding = layer.weight.detach().cpu(), layer.recipe.scale_rounding
                    matrix = quantize_matrix(master, matrix.quant_block, rounding, row_splits=layer.splits)
                parts = (matrix.q.cpu().contiguous().view(torch.uint8), matrix.scale.cpu().contiguous())
                found[index, name] = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()
    return found


def prompts_of(count, longest, seed=0):
    rng = random.Random(seed)
    return [[rng.randrange(2, VOCAB) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def assert_exact(decoder, groups, temperature, microbatch_tokens=9000):
    advantages = torch.zeros(len(groups), len(groups[0]))
    (batch,) = pack(groups, advantages, num_mini_batches=1, microbatch_tokens=microbatch_tokens, device="cuda")
    for microbatch in batch.microbatches:
        logprobs = packed_logprobs(decoder, microbatch, temperature)[0].detach()  # as training runs, with a gradient
        with torch.no_grad():
            assert torch.equal(logprobs, packed_logprobs(decoder, microbatch, temperature)[0])
        assert torch.equal(logprobs, microbatch.rollout_logprobs) and logprobs.abs().sum() > 0
