"""A training step on a GPU gives the same bits every time: no sum depends on the order in which threads come."""

import warnings

import pytest
import torch
from gpu_models import RECIPES, VOCAB, decoder_of
from tiny_models import lay_end_to_end, random_prompts
from training_runs import run, tiny_config

from octavo.layers.attention import PackedAttention
from octavo.rl.advantages import subtract_kl
from octavo.rl.loss_clipped import M2PO, m2po_bounds
from octavo.rl.loss_sequence import sequence_mean
from octavo.rl.observatory import ObservedTokens, answer_metrics

pytestmark = pytest.mark.gpu

LENGTHS = (1, 63, 64, 65, 1000, 2047, 4952)
"""Tokens of each sequence, 8,192 in all: a multiple of 128, as `packed_logprobs` makes every batch on a GPU."""


def gradients(decoder, tokens, positions, boundaries, recompute):
    """Of all masters, for the log-probabilities of shifted tokens with random signs."""
    decoder.recompute_layers = recompute
    hidden = decoder(tokens, positions, PackedAttention(boundaries, decoder.recipe.kv_cache))
    logprobs, _ = decoder.logprobs(hidden, tokens.roll(-1), 0.9)
    generator = torch.Generator("cuda").manual_seed(0)
    logprobs.backward(torch.randn(logprobs.shape, generator=generator, device="cuda"))
    found = {name: parameter.grad for name, parameter in decoder.named_parameters()}
    decoder.zero_grad(set_to_none=True)
    return found


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shape, kv_cache", [("qwen3-8b", "fp8"), ("qwen2.5-0.5b", "bf16"), ("qwen2.5-0.5b", "fp8")])
def test_gradients_are_the_same_every_time(shape, recipe, kv_cache):
    decoder = decoder_of(shape, recipe, kv_cache=kv_cache)
    sequences = [random_prompts(length, 1, length, length, VOCAB)[0] for length in LENGTHS]
    batch = [x.cuda() for x in lay_end_to_end(sequences)]
    with torch.no_grad():  # what the first batch teaches a static scale
        decoder(*batch[:2], PackedAttention(batch[2], kv_cache))
    first = gradients(decoder, *batch, recompute=False)
    for recompute in (False, False, True):
        again = gradients(decoder, *batch, recompute)
        wrong = [name for name in first if not torch.equal(first[name], again[name])]
        assert not wrong, f"with recompute_layers={recompute} these differ: {wrong}"
    small = [name for name, gradient in first.items() if not gradient.abs().sum() > 0]
    assert not small, f"no gradient: {small}"


def test_no_operation_of_a_run_is_one_that_torch_calls_nondeterministic(tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # torch asks for it, whether or not it makes a difference
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            settings = {"rollout__engine__cuda_graphs": False, "trainer__num_steps": 2, "evaluation__interval": 2}
            run(tiny_config(tmp_path / "run", device="cuda", **settings))
    finally:
        torch.use_deterministic_algorithms(False)
    named = sorted({str(warning.message).splitlines()[0] for warning in caught if "determinis" in str(warning.message)})
    assert not named, "\n".join(named)


@pytest.fixture
def strict():
    """torch raises for an operation that it calls nondeterministic."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_sums_over_completions_come_in_order(strict):
    num_tokens = 100_000
    first, second, values = (torch.randn(num_tokens, device="cuda") for _ in range(3))
    mask = torch.ones(num_tokens, dtype=torch.bool, device="cuda")
    edges = torch.arange(0, num_tokens + 1, 1000, device="cuda")
    index = torch.arange(num_tokens, device="cuda") // 1000
    less = subtract_kl(values, first, second, mask, edges, 0.1)
    wanted = subtract_kl(*(x.cpu() for x in (values, first, second, mask, edges)), 0.1)
    assert torch.equal(less.cpu(), wanted) and not torch.equal(less, values)
    bounds = m2po_bounds(first.exp(), values, mask, M2PO(budget=0.04))
    assert bounds.low < 1.0 < bounds.high
    tokens = ObservedTokens(loss_mask=mask, advantages=values, entropy=1.0 + second, answer_index=index)
    assert 0.2 < answer_metrics(tokens)["answers/high_entropy_share"] < 0.8
    assert sequence_mean(values, mask, index).abs().sum() > 0
