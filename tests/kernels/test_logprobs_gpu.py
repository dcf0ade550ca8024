"""Log-probabilities on a GPU: as good as FP32, and the same bits for any batch, in decode and in training."""

import pytest
import torch
from lm_head_checks import (
    as_operand,
    check_bad_rows,
    check_edges,
    check_grad_logits,
    check_kept_grad_logits,
    check_kept_gradients,
    check_values,
    problem,
)

from octavo.kernels import lm_head
from octavo.kernels.logprobs import chosen_logprobs, logits_from_hidden, sampling_weights, token_logprobs
from octavo.kernels.operands import grid_operand
from octavo.numerics.error import relative_error
from octavo.rollout.sampler import SamplingConfig, sample

pytestmark = pytest.mark.gpu
SHAPES = {  # V, D
    "qwen3-8b": (151936, 4096),
    "llama-3-8b": (128256, 4096),
    "qwen2.5-0.5b": (151936, 896),
    "smollm2-135m": (49152, 576),
}
every_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
every_temperature = pytest.mark.parametrize("temperature", [1.0, 0.8])


def on_gpu(num_tokens, shape):
    V, D = shape
    return problem(num_tokens, D, V, device="cuda")


def ours(hidden, weight, tokens, temperature):
    return token_logprobs(hidden, weight, grid_operand(weight), tokens, temperature)[0]


@every_shape
@every_temperature
def test_values_equal_float64(shape, temperature):
    check_values(*on_gpu(70, shape), temperature)


def test_a_vocabulary_and_a_width_that_blocks_do_not_divide():
    check_values(*on_gpu(130, (50_007, 200)), 0.8)


@every_shape
def test_a_row_does_not_depend_on_the_batch(shape):
    hidden, weight, tokens = on_gpu(300, shape)
    whole = ours(hidden, weight, tokens, 0.8)
    assert whole.min() < -5.0
    wrong = [
        M
        for M in range(1, 301)
        for rows in (slice(300 - M, 300),)
        if not torch.equal(ours(hidden[rows], weight, tokens[rows], 0.8), whole[rows])
    ]
    assert not wrong, f"batches of {wrong} rows"


@pytest.mark.parametrize("num_tokens", [2049, 5000])
def test_a_row_of_a_long_batch(num_tokens):
    hidden, weight, tokens = on_gpu(num_tokens, SHAPES["qwen2.5-0.5b"])
    whole = ours(hidden, weight, tokens, 1.0)
    for rows in (slice(0, 64), slice(1000, 1001), slice(num_tokens - 257, num_tokens), slice(0, 2000)):
        assert torch.equal(ours(hidden[rows], weight, tokens[rows], 1.0), whole[rows])


@every_shape
@every_temperature
def test_decode_has_the_bits_of_training(shape, temperature):
    hidden, weight, tokens = on_gpu(300, shape)
    whole, operand = ours(hidden, weight, tokens, temperature), grid_operand(weight)
    for B in (1, 8, 63, 64, 65, 128, 256):
        logits = logits_from_hidden(hidden[:B], operand, temperature)
        assert torch.equal(chosen_logprobs(logits, sampling_weights(logits)[1], tokens[:B]), whole[:B]), f"B {B}"
    keys = [(7, row, 0) for row in range(256)]
    drawn, rollout_logprobs = sample(logits, keys, SamplingConfig(temperature=temperature))
    assert torch.equal(rollout_logprobs, ours(hidden[:256], weight, drawn, temperature))
    assert len(drawn.unique()) > 100


@pytest.mark.parametrize("shape", [SHAPES["smollm2-135m"], SHAPES["qwen3-8b"]], ids=["smollm2-135m", "qwen3-8b"])
def test_gradients_equal_float64(shape, monkeypatch):
    """Floor: float64 throughout, but for gradients of logits rounded to BF16."""
    hidden, weight, tokens = on_gpu(150, shape)
    grad = torch.randn(150, device="cuda")
    exact = hidden.double() @ weight.double().T / 0.8
    grad_logits = -torch.softmax(exact, dim=1)
    grad_logits.scatter_add_(1, tokens[:, None], torch.ones_like(exact[:, :1]))
    grad_logits *= grad[:, None].double() / 0.8
    rounded = grad_logits.bfloat16().double()
    found = []
    monkeypatch.setattr(lm_head, "GRAD_LOGITS_PER_CHUNK", 150 * 20_000)
    for _ in range(2):
        leaf, master = hidden.clone().requires_grad_(), weight.float().requires_grad_()
        token_logprobs(leaf, master, as_operand(weight), tokens, 0.8)[0].backward(grad)
        found.append((leaf.grad, master.grad))
    assert all(torch.equal(first, second) for first, second in zip(*found, strict=True))
    for name, mine, rough, truth in (
        ("hidden", found[0][0], rounded @ weight.double(), grad_logits @ weight.double()),
        ("weight", found[0][1], rounded.T @ hidden.double(), grad_logits.T @ hidden.double()),
    ):
        error, noise = relative_error(mine, truth), relative_error(rough, truth)
        assert truth.abs().max() > 0.1 and error <= 1.5 * noise, f"{name}: error {error:.3g}, floor {noise:.3g}"
    check_grad_logits(hidden, weight, tokens, 0.8, 20_224)


@every_temperature
@pytest.mark.parametrize("num_tokens, shape", [(150, SHAPES["qwen3-8b"]), (2000, SHAPES["smollm2-135m"])])
def test_gradients_from_what_the_forward_keeps(num_tokens, shape, temperature, monkeypatch):
    given = on_gpu(num_tokens, shape)
    monkeypatch.setattr(lm_head, "GRAD_LOGITS_PER_CHUNK", num_tokens * 20_000)
    check_kept_grad_logits(*given, temperature)
    check_kept_gradients(*given, temperature, monkeypatch)


@pytest.mark.parametrize("num_tokens", [33, 200])
def test_gradients_of_a_vocabulary_that_nothing_divides(num_tokens, monkeypatch):
    given = on_gpu(num_tokens, (50_007, 200))
    monkeypatch.setattr(lm_head, "GRAD_LOGITS_PER_CHUNK", num_tokens * 9_000)
    check_kept_grad_logits(*given, 0.8)
    check_kept_gradients(*given, 0.8, monkeypatch)


def test_only_what_needs_a_gradient_gets_one():
    hidden, weight, tokens = on_gpu(100, SHAPES["smollm2-135m"])
    both = hidden.clone().requires_grad_(), weight.float().requires_grad_()
    token_logprobs(*both, as_operand(weight), tokens, 1.0)[0].sum().backward()
    leaf, master = hidden.clone().requires_grad_(), weight.float().requires_grad_()
    token_logprobs(leaf, weight.float(), as_operand(weight), tokens, 1.0)[0].sum().backward()
    token_logprobs(hidden, master, as_operand(weight), tokens, 1.0)[0].sum().backward()
    assert torch.equal(leaf.grad, both[0].grad) and torch.equal(master.grad, both[1].grad)
    assert leaf.grad.abs().max() > 0.0 and master.grad.abs().max() > 0.0


def test_edges():
    check_bad_rows(*on_gpu(70, SHAPES["qwen2.5-0.5b"]))  # the last tile is half a tile
    check_edges("cuda")
    hidden, weight, tokens = on_gpu(0, (300, 64))
    hidden.requires_grad_()
    master = weight.float().requires_grad_()
    token_logprobs(hidden, master, as_operand(weight), tokens, 1.0)[0].sum().backward()
    assert hidden.grad.shape == (0, 64) and torch.equal(master.grad, torch.zeros(300, 64, device="cuda"))


def test_fp32_keeps_the_reference_and_its_two_roles_equal():
    hidden, weight, tokens = (x.float() if x.is_floating_point() else x for x in on_gpu(70, (3000, 200)))
    logprobs = ours(hidden, weight, tokens, 0.8)
    logits = logits_from_hidden(hidden[:9], grid_operand(weight), 0.8)
    assert torch.equal(chosen_logprobs(logits, sampling_weights(logits)[1], tokens[:9]), logprobs[:9])
    on_cpu = ours(hidden.cpu(), weight.cpu(), tokens.cpu(), 0.8)
    assert relative_error(logprobs.cpu(), on_cpu) < 2.0**-22


def test_a_weight_rewritten_before_the_backward_is_refused():
    hidden, weight, tokens = on_gpu(10, (3000, 64))
    logprobs = token_logprobs(hidden.requires_grad_(), weight.float(), as_operand(weight), tokens, 1.0)[0]
    weight.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        logprobs.sum().backward()
