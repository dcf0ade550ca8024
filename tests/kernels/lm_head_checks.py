"""Checks of the kernels of lm_head that hold in Triton's interpreter and on a GPU."""

import math

import torch

from octavo.kernels import lm_head, lm_head_gradients
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


def exact_grad_logits(hidden, weight, tokens, temperature, grad):
    """(onehot - softmax) * grad [T, V] float64."""
    onehot = torch.nn.functional.one_hot(tokens, len(weight))
    return (onehot - exact(hidden, weight, temperature).exp()) * grad[:, None].double()


def check_grad_logits(hidden, weight, tokens, temperature, start):
    """As good as float64 rounded to BF16 twice, for the words from `start` on."""
    grad = torch.randn(len(hidden), device=hidden.device)
    logsumexp = lm_head.softmax_sums(hidden, weight, tokens, temperature)[1]
    wanted = exact_grad_logits(hidden, weight, tokens, temperature, grad)[:, start:]
    found = lm_head_gradients.grad_logits_of(hidden, weight[start:], tokens - start, logsumexp, grad, temperature)
    error, noise = relative_error(found, wanted), relative_error(wanted.bfloat16(), wanted)
    assert wanted.abs().max() > 0.1 and error <= 1.5 * noise, f"error {error:.3g}, BF16 {noise:.3g}"
    p = exact(hidden, weight, temperature).exp()[:, start:]
    logsumexp_rounded = 2.0**-18 * p * grad[:, None].abs()  # all that is left where a chosen token is certain
    bound = wanted.abs() * 2.0**-7 * (1.0 + 2.0**-4) + logsumexp_rounded  # the last power: logits and exponentials
    off = (found.double() - wanted).abs() / bound.clamp(min=2.0**-120)
    assert off.max() <= 1.0, f"off by {off.max():.3f} of the bound"


def check_kept_grad_logits(hidden, weight, tokens, temperature):
    """Gradients from what the forward kept have the bits of those multiplied again; it says the same with and without.

    Args:
        hidden, weight, tokens: a token beyond the vocabulary may be among them.
        temperature: divides the logits.
    """
    T, V = len(hidden), len(weight)
    grad = torch.randn(T, device=hidden.device)
    plain, kept = (lm_head.softmax_sums(hidden, weight, tokens, temperature, keep) for keep in (False, True))
    for name, found, wanted in zip(("chosen", "logsumexp", "entropy"), kept, plain, strict=False):
        assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0)), name
    assert plain[3] is None and kept[3][0].shape == (T * V,)
    columns = lm_head.chunk_columns(T)
    for start in range(0, V, columns):
        chunk, logsumexp = weight[start : start + columns], plain[1]
        again = lm_head_gradients.grad_logits_of(hidden, chunk, tokens - start, logsumexp, grad, temperature)
        found = lm_head_gradients.grad_logits_from(kept[3], start, len(chunk), tokens - start, logsumexp, grad)
        assert found.shape == again.shape and found.is_contiguous()
        wrong = (found.view(torch.int16) != again.view(torch.int16)).nonzero()
        assert not len(wrong), f"{len(wrong)} of words from {start} on differ, the first at {wrong[0].tolist()}"
        assert again.abs().max() > 0.0


def check_kept_gradients(hidden, weight, tokens, temperature, monkeypatch):
    """A backward from what was kept, one that multiplies again, and a second one of the same graph: the same bits."""
    grad = torch.randn(len(hidden), device=hidden.device)
    calls, kept_bytes = [], lm_head_gradients.kept_bytes(*hidden.shape[:1], len(weight))
    for name in ("grad_logits_of", "grad_logits_from"):
        function = getattr(lm_head_gradients, name)
        monkeypatch.setattr(
            lm_head_gradients, name, lambda *given, f=function, name=name: calls.append(name) or f(*given)
        )

    def gradients(recompute):
        leaves = hidden.clone().requires_grad_(), weight.float().requires_grad_()
        logprobs = token_logprobs(*leaves, as_operand(weight), tokens, temperature, recompute)[0]
        for _ in range(2):
            calls.append("backward")
            yield torch.autograd.grad(logprobs, leaves, grad, retain_graph=True)

    found = [*gradients(False), *gradients(True)]
    monkeypatch.setattr(lm_head_gradients, "MAX_KEPT_BYTES", 2 * len(hidden) * len(weight) - 1)
    found += gradients(False)
    assert lm_head_gradients.kept_bytes(*hidden.shape[:1], len(weight)) == 0 < kept_bytes
    chunks = len(range(0, len(weight), lm_head.chunk_columns(len(hidden))))
    ways = ["grad_logits_from", *["grad_logits_of"] * 5]
    assert calls == [call for way in ways for call in ("backward", *[way] * chunks)]
    for later in found[1:]:
        assert all(torch.equal(x, first) for x, first in zip(later, found[0], strict=True))
    assert all(x.abs().max() > 0.0 for x in found[0])


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
