"""Training in fewer kernels on a GPU, at real widths: log-probabilities and gradients of the same bits."""

import pytest
import torch
from gpu_models import VOCAB, decoder_of

from octavo.layers.attention import PackedAttention

pytestmark = pytest.mark.gpu
LENGTHS = {"whole blocks": [700, 1, 1347, 1024, 1024], "ragged": [700, 1, 77]}


def trained(decoder, lengths):
    """Log-probabilities of random tokens, and the gradient of every parameter."""
    generator, num_tokens = torch.Generator("cuda").manual_seed(0), sum(lengths)
    tokens = torch.randint(VOCAB, (num_tokens,), generator=generator, device="cuda")
    weights = torch.randn(num_tokens, generator=generator, device="cuda")
    positions = torch.cat([torch.arange(length, device="cuda") for length in lengths])
    edges = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    decoder.zero_grad()
    hidden = decoder(tokens, positions, PackedAttention(edges, decoder.recipe.kv_cache))
    logprobs = decoder.logprobs(hidden, tokens, 1.0)[0]
    (weights * logprobs).sum().backward()
    return {"logprobs": logprobs.detach()} | {name: p.grad for name, p in decoder.named_parameters()}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("shape", ["qwen3-8b", "smollm2", "qwen2.5-0.5b"])
@pytest.mark.parametrize("recipe", ["block128", "rowwise", "tensorwise"])
def test_the_same_bits_in_fewer_kernels(recipe, shape, lengths, recompute):
    decoder = decoder_of(shape, recipe)
    decoder.recompute_layers = recompute
    found = trained(decoder, LENGTHS[lengths])
    decoder.fuses = False
    wanted = trained(decoder, LENGTHS[lengths])
    different = [name for name in found if not torch.equal(found[name], wanted[name]) or not found[name].any()]
    assert not different, different
