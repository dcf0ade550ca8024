"""Log-probabilities, entropy and their gradients against float64, and the same bits for any batch or chunk."""

import math

import pytest
import torch

from octavo.kernels import logprobs as kernel
from octavo.kernels.logprobs import chosen_logprobs, logits_from_hidden, sampling_weights, token_logprobs
from octavo.kernels.operands import grid_operand
from octavo.numerics.error import relative_error

T, D, V = 37, 200, 1003
TEMPERATURE = 0.7
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def problem(dtype, num_tokens=T, width=D, vocabulary=V, spread=3.0):
    """hidden [T, D] and weight [V, D] in the dtype that is multiplied, tokens [T]; spread is that of the logits."""
    hidden = torch.randn(num_tokens, width).to(dtype)
    weight = (torch.randn(vocabulary, width) * spread / math.sqrt(width)).to(dtype)
    return hidden, weight, torch.randint(vocabulary, (num_tokens,))


def ours(hidden, weight, tokens, temperature=TEMPERATURE):
    return token_logprobs(hidden, weight.float(), grid_operand(weight), tokens, temperature)


def reference(hidden, weight, tokens, temperature=TEMPERATURE):
    """log_softmax in the dtype of the inputs: chosen log-probabilities and entropies."""
    log_p = torch.log_softmax(hidden @ weight.T / temperature, dim=-1)
    return log_p.gather(1, tokens[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(dim=-1)


def gradients(function, hidden, weight, tokens, grad, **kwargs):
    """Of hidden and weight."""
    hidden, weight = hidden.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    function(hidden, weight, tokens, **kwargs)[0].backward(grad)
    return hidden.grad, weight.grad


def ours_on_a_master(hidden, weight, tokens, temperature=TEMPERATURE):
    """With the FP32 master as a leaf; what is multiplied is rounded from it beforehand."""
    return token_logprobs(hidden, weight, grid_operand(weight.detach().to(hidden.dtype)), tokens, temperature)


def logit_bound(hidden, weight, temperature):
    """How far an FP32 logit may be from an exact one, [T, 1] float64.

    Rounding to FP32 and the division, 2**-24 each. The grids move each factor by 2**-23 of the amax of its block of
    128, of which the bound takes the row's.
    """
    logits = (hidden.double() @ weight.double().T).abs().amax(dim=1, keepdim=True)
    h, w = hidden.double().abs(), weight.double().abs()
    moved = 2.0**-23 * (h.sum(1, keepdim=True) * w.max() + h.amax(1, keepdim=True) * w.sum(1).max())
    return (2 * 2.0**-24 * logits + moved) / temperature


@every_dtype
@pytest.mark.parametrize("temperature", [1.0, TEMPERATURE, 2.5])
def test_forward_equals_float64(dtype, temperature):
    hidden, weight, tokens = problem(dtype)
    logprobs, entropy = ours(hidden, weight, tokens, temperature)
    expected, expected_entropy = reference(hidden.double(), weight.double(), tokens, temperature)
    # A logprob moves by at most twice what a logit does; exp is off by 2**-23 and the sum of V weights on a grid of
    # 2**-35 by V * 2**-36, both of a sum of at least 1; one rounding to FP32. An entropy is the mean of -logprob under
    # p, and p moves too, by four logit errors relatively.
    logit = logit_bound(hidden, weight, temperature).squeeze(1)
    rest = 2.0**-22 + V * 2.0**-36
    bound = 2 * logit + rest + 2.0**-24 * expected.abs()
    error = (logprobs.double() - expected).abs()
    assert expected.max() < 0.0 and (error <= bound).all(), f"{(error / bound).max():.2f} times the bound"
    error, bound = (entropy.double() - expected_entropy).abs(), (6 * logit + 2 * rest) * (1 + expected_entropy.max())
    assert expected_entropy.min() > 0.1 and (error <= bound).all(), f"{(error / bound).max():.2f} times the bound"


@every_dtype
def test_forward_is_as_good_as_fp32(dtype):
    # Floor: torch's own product and log_softmax in FP32.
    hidden, weight, tokens = problem(dtype)
    expected, expected_entropy = reference(hidden.double(), weight.double(), tokens)
    log_p = torch.log_softmax(hidden.float() @ weight.float().T / TEMPERATURE, dim=-1)
    logprobs, entropy = ours(hidden, weight, tokens)
    error, floor = relative_error(logprobs, expected), relative_error(log_p.gather(1, tokens[:, None])[:, 0], expected)
    assert error <= 1.5 * floor, f"error {error:.3g}, floor {floor:.3g}"
    error, floor = (relative_error(x, expected_entropy) for x in (entropy, -(log_p.exp() * log_p).sum(dim=-1)))
    assert error <= 1.5 * floor, f"error {error:.3g}, floor {floor:.3g}"


def test_by_hand():
    # Logits (0, ln 3) at temperature 1: probabilities 1/4 and 3/4. At temperature 1/2 (0, 2 ln 3): 1/10 and 9/10.
    hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [math.log(3.0)]])
    tokens = torch.tensor([0, 1])
    for temperature, p in ((1.0, (0.25, 0.75)), (0.5, (0.1, 0.9))):
        logprobs, entropy = ours(hidden, weight, tokens, temperature)
        # ln 3 itself is off by 2**-24 of 1.1, doubled at temperature 1/2; exp and the logarithm by as much again.
        torch.testing.assert_close(logprobs.exp(), torch.tensor(p), rtol=2.0**-20, atol=0.0)
        by_hand = -sum(x * math.log(x) for x in p)
        torch.testing.assert_close(entropy, torch.full((2,), by_hand), rtol=2.0**-20, atol=0.0)


@every_dtype
def test_gradients_equal_float64(dtype):
    # Floor: FP32 autograd of the same product; and for BF16 hidden states rounding their exact gradient.
    hidden, weight, tokens = problem(dtype)
    grad = torch.randn(T)
    exact = gradients(reference, hidden.double(), weight.double(), tokens, grad.double())
    plain = list(gradients(reference, hidden.float(), weight.float(), tokens, grad))
    if dtype == torch.bfloat16:
        plain[0] = exact[0].bfloat16()
    got = gradients(ours_on_a_master, hidden, weight.float(), tokens, grad)
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    for name, x, floor, truth in zip(("hidden", "weight"), got, plain, exact, strict=True):
        error, noise = relative_error(x, truth), relative_error(floor, truth)
        assert truth.abs().max() > 0.01
        assert error <= 1.5 * noise, f"{name}: error {error:.3g}, floor {noise:.3g}"


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_gradient_divides_by_the_temperature(temperature):
    hidden, weight, tokens = problem(torch.float32)
    grad = torch.randn(T)
    exact = gradients(reference, hidden.double(), weight.double(), tokens, grad.double(), temperature=temperature)
    plain = gradients(reference, hidden, weight, tokens, grad, temperature=temperature)
    got = gradients(ours_on_a_master, hidden, weight, tokens, grad, temperature=temperature)
    for x, floor, truth in zip(got, plain, exact, strict=True):
        error, noise = relative_error(x, truth), relative_error(floor, truth)
        assert error <= 1.5 * noise, f"error {error:.3g}, floor {noise:.3g}"


def test_gradient_is_that_of_the_weight_that_was_multiplied():
    # The master may be anything: its values are not read.
    hidden, weight, tokens = problem(torch.bfloat16)
    operand, grad = grid_operand(weight), torch.randn(T)
    results = []
    for master in (weight.float(), torch.full((V, D), torch.nan)):
        leaf, master = hidden.clone().requires_grad_(), master.requires_grad_()
        token_logprobs(leaf, master, operand, tokens, TEMPERATURE)[0].backward(grad)
        results.append((leaf.grad, master.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert results[0][1].abs().max() > 0.0


def test_only_what_needs_a_gradient_gets_one():
    hidden, weight, tokens = problem(torch.float32)
    both = gradients(ours_on_a_master, hidden, weight, tokens, torch.ones(T))
    leaf = hidden.clone().requires_grad_()
    ours(leaf, weight, tokens)[0].sum().backward()
    assert torch.equal(leaf.grad, both[0])
    master = weight.clone().requires_grad_()
    logprobs, entropy = ours_on_a_master(hidden, master, tokens)
    assert logprobs.requires_grad and not entropy.requires_grad
    logprobs.sum().backward()
    assert torch.equal(master.grad, both[1])


# The same bits for any batch, chunk and order.


@pytest.mark.parametrize("rows", [1, 2, 7, 36])
@every_dtype
def test_chunks_change_nothing(dtype, rows, monkeypatch):
    hidden, weight, tokens = problem(dtype)
    grad = torch.randn(T)
    whole, whole_grads = ours(hidden, weight, tokens), gradients(ours_on_a_master, hidden, weight.float(), tokens, grad)
    monkeypatch.setattr(kernel, "MAX_LOGITS_PER_CHUNK", rows * V + V // 2)
    assert len(list(kernel._chunks(T, V))) == -(-T // rows)
    for got, expected in zip(ours(hidden, weight, tokens), whole, strict=True):
        assert expected.abs().max() > 0.0 and torch.equal(got, expected)
    # The gradient is FP32 in the order of the matrix library: as exact in chunks, not the same bits.
    exact = gradients(reference, hidden.double(), weight.double(), tokens, grad.double())
    chunked = gradients(ours_on_a_master, hidden, weight.float(), tokens, grad)
    for got, before, truth in zip(chunked, whole_grads, exact, strict=True):
        error, floor = relative_error(got, truth), relative_error(before, truth)
        assert error <= 1.5 * floor, f"error {error:.3g}, in one chunk {floor:.3g}"


def test_a_vocabulary_larger_than_a_chunk(monkeypatch):
    hidden, weight, tokens = problem(torch.bfloat16, num_tokens=3)
    whole = ours(hidden, weight, tokens)
    monkeypatch.setattr(kernel, "MAX_LOGITS_PER_CHUNK", 10)
    assert all(torch.equal(got, expected) for got, expected in zip(ours(hidden, weight, tokens), whole, strict=True))


@every_dtype
def test_a_token_does_not_depend_on_its_batch(dtype):
    hidden, weight, tokens = problem(dtype, num_tokens=70)
    whole, operand = ours(hidden, weight, tokens)[0], grid_operand(weight)
    logits = logits_from_hidden(hidden, operand, TEMPERATURE)
    assert whole.min() < -5.0
    for size in (1, 2, 3, 8, 15, 33, 69):
        for rows in (slice(0, size), slice(70 - size, 70)):
            assert torch.equal(ours(hidden[rows], weight, tokens[rows])[0], whole[rows])
            assert torch.equal(logits_from_hidden(hidden[rows], operand, TEMPERATURE), logits[rows])
    # The sampler's path: the same integers and the same logprob from a row on its own.
    for row in range(0, 70, 7):
        weights, logsumexp = sampling_weights(logits[row : row + 1])
        assert torch.equal(weights, sampling_weights(logits)[0][row : row + 1])
        assert torch.equal(
            chosen_logprobs(logits[row : row + 1], logsumexp, tokens[row : row + 1]), whole[row : row + 1]
        )


def test_the_order_of_the_vocabulary_changes_nothing():
    hidden, weight, tokens = problem(torch.bfloat16)
    logprobs, _ = ours(hidden, weight, tokens)
    for _ in range(5):
        order = torch.randperm(V)
        assert torch.equal(ours(hidden, weight[order], order.argsort()[tokens])[0], logprobs)


def test_threads_change_nothing():
    hidden, weight, tokens = problem(torch.bfloat16)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        single, _ = ours(hidden, weight, tokens)
        torch.set_num_threads(2)
        assert torch.equal(ours(hidden, weight, tokens)[0], single)
    finally:
        torch.set_num_threads(before)


def test_strided_inputs():
    hidden, weight, tokens = (
        torch.randn(D, 2 * T).T[::2].bfloat16(),
        torch.randn(D, V).T.bfloat16() / 5,
        torch.arange(T),
    )
    expected = ours(hidden.contiguous(), weight.contiguous(), tokens)
    for got, same in zip(ours(hidden, weight, tokens), expected, strict=True):
        assert torch.equal(got, same)
    leaf = hidden.clone().requires_grad_()
    ours(leaf, weight, tokens)[0].backward(torch.ones(1).expand(T))
    assert torch.equal(
        leaf.grad, gradients(ours_on_a_master, hidden.contiguous(), weight.float(), tokens, torch.ones(T))[0]
    )


# Weights of the sampler.


def test_sampling_weights_are_whole_numbers_of_a_softmax():
    logits = torch.randn(5, V) * 4
    weights, logsumexp = sampling_weights(logits)
    assert torch.equal(weights, weights.round()) and torch.equal(
        weights.amax(dim=1), torch.full((5,), 2.0**35).double()
    )
    exact = torch.exp(logits.double() - logits.double().amax(dim=1, keepdim=True)) * 2.0**35
    # exp of an FP32 difference: rounding that is 2**-24 of it, exp 2**-23; then half a unit of the grid.
    difference = logits.double().amax(dim=1, keepdim=True) - logits.double()
    bound = exact * (2.0**-23 + difference * 2.0**-24) + 0.5
    assert ((weights - exact).abs() <= bound).all()
    torch.testing.assert_close(
        logsumexp, torch.logsumexp(logits.double(), dim=1, keepdim=True), rtol=0.0, atol=2.0**-20 + V * 2.0**-36
    )


def test_sampling_weights_by_hand():
    weights, logsumexp = sampling_weights(torch.tensor([[3.0, 3.0, -1e9, 3.0]]))
    assert weights.tolist() == [[2.0**35, 2.0**35, 0.0, 2.0**35]]
    assert logsumexp.item() == 3.0 + math.log(3.0)


def test_chosen_logprobs_round_once():
    # 2**-30 is lost in FP32 beside 1, but not before the subtraction.
    logits, logsumexp = torch.tensor([[1.0, 5.0]]), torch.tensor([[1.0 + 2.0**-30]], dtype=torch.float64)
    assert chosen_logprobs(logits, logsumexp, torch.tensor([0])).item() == -(2.0**-30)


# Edges.


@every_dtype
def test_a_certain_token(dtype):
    # A logit 1000 above the rest: logprob 0, entropy 0, no gradient; the others -1000.
    hidden, weight = torch.ones(2, 1, dtype=dtype), torch.zeros(50, 1, dtype=dtype)
    weight[7] = 1000.0
    tokens = torch.tensor([7, 3])
    logprobs, entropy = ours(hidden, weight, tokens, 1.0)
    assert logprobs.tolist() == [0.0, -1000.0] and entropy.tolist() == [0.0, 0.0]
    grad_hidden, grad_weight = gradients(
        ours_on_a_master, hidden, weight.float(), tokens, torch.tensor([1.0, 0.0]), temperature=1.0
    )
    assert torch.equal(grad_hidden, torch.zeros_like(grad_hidden))
    assert torch.equal(grad_weight, torch.zeros_like(grad_weight))


@every_dtype
def test_equal_logits(dtype):
    hidden, weight, tokens = torch.zeros(3, D, dtype=dtype), torch.randn(64, D).to(dtype), torch.tensor([0, 5, 63])
    logprobs, entropy = ours(hidden, weight, tokens)
    expected = torch.tensor(math.log(64.0))
    assert torch.equal(logprobs, -expected.expand(3)) and torch.equal(entropy, expected.expand(3))


def test_empty_and_one_word():
    hidden, weight, tokens = problem(torch.bfloat16, num_tokens=0)
    logprobs, entropy = ours(hidden, weight, tokens)
    assert logprobs.shape == entropy.shape == (0,)
    grad_hidden, grad_weight = gradients(ours_on_a_master, hidden, weight.float(), tokens, torch.zeros(0))
    assert grad_hidden.shape == (0, D) and torch.equal(grad_weight, torch.zeros(V, D))
    hidden, weight, tokens = problem(torch.float32, vocabulary=1)
    logprobs, entropy = ours(hidden, weight, tokens)
    assert torch.equal(logprobs, torch.zeros(T)) and torch.equal(entropy, torch.zeros(T))


def test_huge_logits():
    # Logits around 1e30: the largest has all the weight.
    hidden, weight, tokens = problem(torch.float32, num_tokens=4)
    logits = logits_from_hidden(hidden * 1e30, grid_operand(weight))
    logprobs, entropy = ours(hidden * 1e30, weight, logits.argmax(dim=1))
    assert logprobs.tolist() == [0.0] * 4 and entropy.tolist() == [0.0] * 4


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_row_spoils_itself_only(bad):
    hidden, weight, tokens = problem(torch.bfloat16)
    clean, _ = ours(hidden, weight, tokens)
    hidden[4, 10] = bad
    logprobs, entropy = ours(hidden, weight, tokens)
    expected = torch.arange(T) == 4
    assert torch.equal(logprobs.isnan(), expected) and torch.equal(entropy.isnan(), expected)
    assert torch.equal(logprobs[~expected], clean[~expected])
