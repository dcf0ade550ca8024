"""Checks of the kernels of lm_head that hold in Triton's interpreter and on a GPU."""

import math

import torch

from octavo.kernels import lm_head
from octavo.kernels.logprobs import chosen_logprobs, logits_from_hidden, sampling_weights, token_logprobs
from octavo.kernels.operands import Operand
from octavo.numerics.error import relative_error
from octavo.numerics.exact import block_edges


def problem(num_tokens, width, vocabulary, device="cpu"):
    """hidden [T, D] and weight [V, D] in BF16, tokens [T] with the ends of tiles among them."""
    hidden = torch.randn(num_tokens, width, device=device).bfloat16()
    weight = (torch.randn(vocabulary, width, device=device) * 3 / math.sqrt(width)).bfloat16()
    tokens = torch.randint(vocabulary, (num_tokens,), device=device)
    edges = [0, vocabulary - 1, lm_head.BLOCK_V - 1, lm_head.BLOCK_V]
    edges = torch.tensor([edge for edge in edges if edge < vocabulary][:num_tokens], device=device)
    tokens[: len(edges)] = edges
    return hidden, weight, tokens


def as_operand(weight):
    """What `grid_operand` gives on a GPU."""
    return Operand(weight, None, block_edges(weight.shape[1]))


def exact(hidden, weight, temperature):
    """log_softmax in float64, [T, V]."""
    return torch.log_softmax(hidden.double() @ weight.double().T / temperature, dim=-1)


def plain_logits(hidden, weight, temperature):
    """The matrix library's own BF16 product, summed in FP32, [T, V]: the floor of errors. Tensor cores cut sums off."""
    if hidden.is_cuda:
        return torch.mm(hidden, weight.T, out_dtype=torch.float32) / temperature
    return hidden.float() @ weight.float().T / temperature


def check_values(hidden, weight, tokens, temperature):
    """Logits, log-probabilities and entropy are as good as plain ones in FP32; stored logits give the same bits."""
    operand = as_operand(weight)
    logprobs, entropy = token_logprobs(hidden, weight.float(), operand, tokens, temperature)
    logits, rough_logits = logits_from_hidden(hidden, operand, temperature), plain_logits(hidden, weight, temperature)
    truth, floor = exact(hidden, weight, temperature), torch.log_softmax(rough_logits, dim=-1)
    pairs = {
        "logits": (logits, rough_logits, hidden.double() @ weight.double().T / temperature),
        "logprobs": (logprobs, *(x.gather(1, tokens[:, None])[:, 0] for x in (floor, truth))),
        "entropy": (entropy, *(-(x.exp() * x).sum(dim=1) for x in (floor, truth))),
    }
    for name, (found, rough, wanted) in pairs.items():
        error, noise = relative_error(found, wanted), max(relative_error(rough, wanted), 2.0**-24)
        assert error <= 1.5 * noise, f"{name} {tuple(weight.shape)}: error {error:.3g}, plain {noise:.3g}"
    again = chosen_logprobs(logits, sampling_weights(logits)[1], tokens)
    assert torch.equal(again, logprobs) and logprobs.max() < 0.0


def check_grad_logits(hidden, weight, tokens, temperature, start, limit):
    """Within `limit` times the rounding to BF16 of float64, for the words from `start` on."""
    grad = torch.randn(len(hidden), device=hidden.device)
    log_p = exact(hidden, weight, temperature)
    logsumexp = ((hidden.double() @ weight.double().T / temperature) - log_p)[:, 0]
    onehot = torch.nn.functional.one_hot(tokens, len(weight))
    wanted = ((onehot - log_p.exp()) * grad[:, None].double())[:, start:]
    found = lm_head.grad_logits_of(hidden, weight[start:], tokens - start, logsumexp, grad, temperature)
    error, noise = relative_error(found, wanted), relative_error(wanted.bfloat16(), wanted)
    assert wanted.abs().max() > 0.1 and error <= limit * noise, f"error {error:.3g}, BF16 {noise:.3g}"


def check_bad_rows(hidden, weight, tokens):
    """NaN and infinity spoil their own row; a token beyond the vocabulary and a bad weight give NaN."""
    hidden, tokens, operand = hidden.clone(), tokens.clone(), as_operand(weight)
    clean, _ = token_logprobs(hidden, weight.float(), operand, tokens, 1.0)
    hidden[1, 3], hidden[3, 5], tokens[2] = torch.nan, torch.inf, len(weight)
    logprobs, entropy = token_logprobs(hidden, weight.float(), operand, tokens, 1.0)
    bad = torch.arange(len(hidden), device=hidden.device)
    assert torch.equal(logprobs.isnan(), (bad >= 1) & (bad <= 3))
    assert torch.equal(entropy.isnan(), (bad == 1) | (bad == 3))
    assert torch.equal(logprobs[4:], clean[4:]) and torch.equal(logprobs[0], clean[0])
    weight = weight.clone()
    weight[-1, 0] = torch.nan
    assert token_logprobs(hidden, weight.float(), as_operand(weight), tokens, 1.0)[0].isnan().all()


def check_edges(device):
    """Equal logits, a certain token, no token."""
    hidden, weight = torch.zeros(2, 8, device=device).bfloat16(), torch.randn(512, 8, device=device).bfloat16()
    tokens = torch.tensor([0, 511], device=device)
    logprobs, entropy = token_logprobs(hidden, weight.float(), as_operand(weight), tokens, 1.0)
    assert logprobs.tolist() == entropy.neg().tolist() == torch.tensor([-math.log(512.0)] * 2).tolist()
    hidden, weight = torch.ones_like(hidden), torch.zeros_like(weight[:300])
    weight[7], tokens = 125.0, torch.tensor([7, 299], device=device)
    logprobs, entropy = token_logprobs(hidden, weight.float(), as_operand(weight), tokens, 1.0)
    assert logprobs.tolist() == [0.0, -1000.0] and entropy.tolist() == [0.0, 0.0]
    logprobs, entropy = token_logprobs(hidden[:0], weight.float(), as_operand(weight), tokens[:0], 1.0)
    assert logprobs.shape == entropy.shape == (0,)
    assert logits_from_hidden(hidden[:0], as_operand(weight)).shape == (0, 300)
