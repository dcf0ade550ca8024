"""GSPO against values worked out by hand, and its gradients."""

import math

import pytest
import torch

from octavo.rl.loss_sequence import GSPO, GSPOToken, gspo, gspo_token, sequence_mean, sequence_ratio
from octavo.rl.losses import ClipBounds

MASK = torch.tensor([0, 1, 1, 0, 1, 1, 1])
INDEX = torch.tensor([0, 0, 0, 1, 1, 1, 1])
BOUNDS = ClipBounds(low=0.9, high=1.1)


def test_sequence_mean_and_its_gradient():
    # Sequence 0: (1 + 3) / 2 = 2; sequence 1: (2 + 4 + 9) / 3 = 5. What is masked out is not read.
    values = torch.tensor([math.nan, 1.0, 3.0, math.inf, 2.0, 4.0, 9.0], requires_grad=True)
    means = sequence_mean(values, MASK, INDEX)
    assert means.tolist() == [0.0, 2.0, 2.0, 0.0, 5.0, 5.0, 5.0]
    (means * torch.tensor([7.0, 1.0, 2.0, 7.0, 3.0, 0.0, 0.0])).sum().backward()
    assert values.grad.tolist() == pytest.approx([0.0, 1.5, 1.5, 0.0, 1.0, 1.0, 1.0])


def test_a_sequence_without_loss_tokens_lies_between_others():
    # A completion that is masked out is still packed; its neighbours' means are not touched.
    values, index = torch.tensor([1.0, 8.0, 3.0]), torch.tensor([0, 1, 2])
    assert sequence_mean(values, torch.tensor([1, 0, 1]), index).tolist() == [1.0, 0.0, 3.0]
    assert sequence_mean(values, torch.zeros(3), index).tolist() == [0.0, 0.0, 0.0]


def test_a_sequences_ratio_does_not_depend_on_what_it_is_packed_with():
    generator = torch.Generator().manual_seed(0)
    lengths = [700, 3, 41]
    index = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    logprobs, old = torch.randn(2, sum(lengths), generator=generator)
    mask = torch.rand(sum(lengths), generator=generator) < 0.8
    whole = sequence_ratio(logprobs, old, mask, index)
    for sequence, start in enumerate((0, 700, 703)):
        part = slice(start, start + lengths[sequence])
        alone = sequence_ratio(logprobs[part], old[part], mask[part], torch.zeros(lengths[sequence], dtype=torch.int64))
        assert torch.equal(whole[part], alone)


@pytest.mark.parametrize("loss", [gspo, gspo_token])
@pytest.mark.parametrize(
    "logs, advantage, loss_value, factor",
    [
        # s = exp(mean of logs); loss -min(s A, clamp(s) A); d/dlogprobs of the sum over 3 tokens is -s A each, or 0.
        ([0.3, -0.3, 0.03], 2.0, -2 * math.exp(0.01), -2 * math.exp(0.01)),  # inside, although two tokens are not
        ([0.3, 0.3, 0.0], 2.0, -2.2, 0.0),  # A > 0 above: no token has a gradient
        ([-0.3, -0.3, 0.0], 2.0, -2 * math.exp(-0.2), -2 * math.exp(-0.2)),  # A > 0 below: kept
        ([-0.3, -0.3, 0.0], -2.0, 1.8, 0.0),  # A < 0 below
        ([0.3, 0.3, 0.0], -2.0, 2 * math.exp(0.2), 2 * math.exp(0.2)),  # A < 0 above: kept
    ],
)
def test_losses_and_gradients_of_a_sequence(loss, logs, advantage, loss_value, factor):
    old = torch.tensor([-9.0, -1.0, -2.0, -3.0], dtype=torch.float64)
    logprobs = (old + torch.tensor([5.0, *logs], dtype=torch.float64)).requires_grad_()
    mask, index = torch.tensor([0, 1, 1, 1]), torch.zeros(4, dtype=torch.int64)
    losses = loss(logprobs, old, torch.full((4,), advantage), BOUNDS, torch.ones(4), mask, index)
    losses[1:].sum().backward()
    assert losses[1:].tolist() == pytest.approx([loss_value] * 3, rel=1e-12)
    assert logprobs.grad.tolist() == pytest.approx([0.0] + [factor] * 3, rel=1e-12)


def test_the_two_forms_differ_where_advantages_do():
    # s = 1, weights 1, A = 1, 3: gspo gives both tokens -(1 + 3) / 2, the token form each its own.
    old = torch.tensor([-1.0, -2.0])
    gradients = []
    for loss in (gspo, gspo_token):
        logprobs = old.clone().requires_grad_()
        arguments = torch.tensor([1.0, 3.0]), BOUNDS, torch.ones(2), torch.ones(2), torch.zeros(2, dtype=torch.int64)
        loss(logprobs, old, *arguments).sum().backward()
        gradients.append(logprobs.grad.tolist())
    assert gradients == [[-2.0, -2.0], [-1.0, -3.0]]


def test_offsets_are_those_of_the_paper_and_are_checked():
    for config in (GSPO(), GSPOToken()):
        assert config.bounds() == ClipBounds(low=1 - 3e-4, high=1 + 4e-4)
    with pytest.raises(ValueError, match="clip_low is an offset"):
        GSPO(clip_low=1.0)
