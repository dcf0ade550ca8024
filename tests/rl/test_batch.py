"""Packing: every token once, aligned with its log-probability, groups whole, microbatches within their limit."""

import random
from dataclasses import replace

import pytest
import torch
from tiny_models import VOCAB, tiny_config, tiny_decoder

from octavo.numerics.recipe import get_recipe
from octavo.rl.batch import Microbatch, pack
from octavo.rollout.engine import Completion
from octavo.trainer.policy import packed_logprobs


def completion_of(prompt, tokens, logprobs=None):
    if logprobs is None:
        logprobs = [-0.5 - 0.001 * i for i in range(len(tokens))]
    return Completion(prompt=prompt, tokens=tokens, rollout_logprobs=logprobs, finish_reason="length")


def random_groups(seed, num_prompts, group_size, longest=20):
    """Groups whose tokens say where they come from: no two tokens of the batch are the same number."""
    rng, counter = random.Random(seed), iter(range(10**6))
    groups = []
    for _ in range(num_prompts):
        prompt = [next(counter) for _ in range(rng.randint(1, longest))]
        groups.append([])
        for _ in range(group_size):
            tokens = [next(counter) for _ in range(rng.randint(1, longest))]
            logprobs = torch.tensor([-rng.random() * 5 for _ in tokens]).tolist()
            groups[-1].append(completion_of(prompt, tokens, logprobs))
    return groups, torch.tensor([[rng.gauss(0, 1) for _ in range(group_size)] for _ in range(num_prompts)])


def sequences_of(microbatch):
    """(tokens, loss_mask, rollout_logprobs, advantages) of each sequence, by cu_seqlens."""
    edges = microbatch.cu_seqlens.tolist()
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        yield tuple(
            getattr(microbatch, name)[start:stop].tolist()
            for name in ("tokens", "loss_mask", "rollout_logprobs", "advantages", "positions")
        )


def test_a_small_batch_worked_out_by_hand():
    groups = [
        [completion_of([10, 11], [1, 2, 3], [-0.1, -0.2, -0.3]), completion_of([10, 11], [4], [-0.4])],
        [completion_of([12], [5, 6], [-0.5, -0.6]), completion_of([12], [7, 8], [-0.7, -0.8])],
    ]
    (batch,) = pack(groups, torch.tensor([[1.0, -1.0], [2.0, -2.0]]), num_mini_batches=1, microbatch_tokens=8)
    # Longest first, order kept among equals: 5 tokens, then 3 fill the eight; 3 and 3 are the next microbatch.
    first, second = batch.microbatches
    assert first.tokens.tolist() == [10, 11, 1, 2, 3, 10, 11, 4]
    assert first.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert first.cu_seqlens.tolist() == [0, 5, 8]
    assert first.sequence_index.tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert first.loss_mask.tolist() == [False, False, True, True, True, False, False, True]
    assert first.completion_positions.tolist() == [-2, -1, 0, 1, 2, -2, -1, 0]
    assert first.advantages.tolist() == [0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, -1.0]
    assert torch.equal(first.rollout_logprobs, torch.tensor([0.0, 0.0, -0.1, -0.2, -0.3, 0.0, 0.0, -0.4]))
    assert second.tokens.tolist() == [12, 5, 6, 12, 7, 8]
    assert second.advantages.tolist() == [0.0, 2.0, 2.0, 0.0, -2.0, -2.0]
    assert second.loss_mask.tolist() == [False, True, True, False, True, True]
    assert (batch.num_loss_tokens, batch.num_sequences) == (8, 4)
    assert batch.gather("tokens").tolist() == first.tokens.tolist() + second.tokens.tolist()
    dtypes = {name: getattr(first, name).dtype for name in ("tokens", "positions", "cu_seqlens", "sequence_index")}
    assert set(dtypes.values()) == {torch.int64}
    assert first.loss_mask.dtype == torch.bool
    assert first.advantages.dtype == first.rollout_logprobs.dtype == torch.float32
    assert first.old_logprobs is first.ref_logprobs is first.shadow_old_logprobs is None


@pytest.mark.parametrize("seed", range(20))
def test_every_token_is_there_once_and_aligned(seed):
    rng = random.Random(seed)
    num_mini_batches, group_size = rng.choice([1, 2, 3]), rng.randint(1, 5)
    groups, advantages = random_groups(seed, num_mini_batches * rng.randint(1, 4), group_size)
    limit = rng.choice([1, 15, 60, 10_000])
    batches = pack(groups, advantages, num_mini_batches=num_mini_batches, microbatch_tokens=limit)
    assert len(batches) == num_mini_batches
    size = len(groups) // num_mini_batches
    for number, batch in enumerate(batches):
        wanted = {}
        for p in range(number * size, (number + 1) * size):  # groups stay whole and in their mini-batch
            for g, completion in enumerate(groups[p]):
                wanted[tuple(completion.prompt + completion.tokens)] = (completion, advantages[p, g].item())
        assert batch.num_sequences == len(wanted)
        assert batch.num_loss_tokens == sum(len(completion.tokens) for completion, _ in wanted.values())
        assert batch.num_loss_tokens == batch.gather("loss_mask").sum().item()
        for microbatch in batch.microbatches:
            T = len(microbatch.tokens)
            lengths = microbatch.cu_seqlens.diff()
            assert T == microbatch.cu_seqlens[-1] == sum(lengths) and microbatch.cu_seqlens[0] == 0
            assert T <= limit or len(lengths) == 1, "only a sequence too long by itself may exceed the limit"
            assert torch.equal(microbatch.sequence_index, torch.repeat_interleave(torch.arange(len(lengths)), lengths))
            for tokens, mask, logprobs, advantage, positions in sequences_of(microbatch):
                completion, wanted_advantage = wanted.pop(tuple(tokens))  # no padding, no duplicate
                before, after = len(completion.prompt), len(completion.tokens)
                assert mask == [False] * before + [True] * after
                assert logprobs == [0.0] * before + completion.rollout_logprobs
                assert advantage == [0.0] * before + [wanted_advantage] * after
                assert positions == list(range(before + after))
        assert not wanted, "sequences are missing"


def test_microbatches_are_filled_to_the_limit():
    groups = [[completion_of([0], [1] * 9)] for _ in range(7)]
    (batch,) = pack(groups, torch.zeros(7, 1), num_mini_batches=1, microbatch_tokens=30)
    assert [len(microbatch.tokens) for microbatch in batch.microbatches] == [30, 30, 10]
    (batch,) = pack(groups, torch.zeros(7, 1), num_mini_batches=1, microbatch_tokens=29)
    assert [len(microbatch.tokens) for microbatch in batch.microbatches] == [20, 20, 20, 10]


@pytest.mark.parametrize("num_prompts, num_mini_batches, sizes", [(3, 2, [1, 2]), (2, 4, [1, 1]), (5, 3, [1, 2, 2])])
def test_groups_that_do_not_split_evenly_make_mini_batches_of_nearly_one_size(num_prompts, num_mini_batches, sizes):
    groups, advantages = random_groups(0, num_prompts, 2)
    batches = pack(groups, advantages, num_mini_batches=num_mini_batches, microbatch_tokens=1000)
    assert [batch.num_sequences for batch in batches] == [2 * size for size in sizes]


@pytest.mark.parametrize("shape", [(2, 3), (3, 2), (4, 3)])
def test_advantages_of_another_shape_are_refused(shape):
    groups, _ = random_groups(0, 3, 3)
    with pytest.raises(ValueError, match=r"advantages are \(\d, \d\), but the groups .* sizes \[3, 3, 3\]"):
        pack(groups, torch.zeros(shape), num_mini_batches=1, microbatch_tokens=100)


@pytest.mark.parametrize("num_tokens, num_logprobs", [(3, 2), (2, 3)])
def test_a_completion_without_a_logprob_for_each_token_is_refused(num_tokens, num_logprobs):
    # The counts of the two even out over the batch: the values would shift by one without an error.
    groups = [[completion_of([0], [1] * num_tokens, [-1.0] * num_logprobs), completion_of([0], [1] * 2, [-2.0] * 2)]]
    groups.append([completion_of([0], [1] * num_logprobs, [-3.0] * num_tokens), completion_of([0], [1], [-4.0])])
    with pytest.raises(ValueError, match=f"{num_tokens} tokens and {num_logprobs} rollout_logprobs"):
        pack(groups, torch.zeros(2, 2), num_mini_batches=1, microbatch_tokens=100)


def test_an_empty_prompt_is_refused():
    # Its first token would be predicted by the last hidden state of the sequence before it.
    groups = [[completion_of([3], [1, 2])], [completion_of([], [1, 2])]]
    with pytest.raises(ValueError, match="a completion of prompt 1 has 0 prompt tokens"):
        pack(groups, torch.zeros(2, 1), num_mini_batches=1, microbatch_tokens=100)


def test_to_keeps_every_field():
    groups, advantages = random_groups(1, 2, 2)
    (batch,) = pack(groups, advantages, num_mini_batches=1, microbatch_tokens=1000)
    microbatch = batch.microbatches[0]
    moved = microbatch.to("cpu")
    assert isinstance(moved, Microbatch)
    for name, value in vars(microbatch).items():
        assert (value is None and getattr(moved, name) is None) or torch.equal(value, getattr(moved, name))


def logprobs_by_sequence(decoder, groups, microbatch_tokens):
    """Log-probabilities of each sequence's sampled tokens, by its tokens."""
    (batch,) = pack(
        groups, torch.zeros(len(groups), len(groups[0])), num_mini_batches=1, microbatch_tokens=microbatch_tokens
    )
    found = {}
    for microbatch in batch.microbatches:
        with torch.no_grad():
            logprobs, entropy = packed_logprobs(decoder, microbatch, 0.9)
        for start, stop in zip(microbatch.cu_seqlens[:-1].tolist(), microbatch.cu_seqlens[1:].tolist(), strict=True):
            found[tuple(microbatch.tokens[start:stop].tolist())] = torch.stack([logprobs, entropy])[:, start:stop]
    return found


@pytest.mark.parametrize("recipe", ["block128", "rowwise", "w8a16", "bf16", "tensorwise_static", "fp32"])
def test_a_sequences_bits_do_not_depend_on_what_it_is_packed_with(recipe):
    decoder = tiny_decoder(tiny_config("qwen3"), get_recipe(recipe))
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 70))] for _ in range(4)]
    groups = [
        [completion_of(prompt, [rng.randrange(VOCAB) for _ in range(rng.randint(1, 70))]) for _ in range(2)]
        for prompt in prompts
    ]
    packed = logprobs_by_sequence(decoder, groups, 10_000)
    assert len(packed) == 8
    others = [
        logprobs_by_sequence(decoder, groups[::-1], 10_000),  # the other order among equals
        logprobs_by_sequence(decoder, groups, 150),  # other neighbours
        logprobs_by_sequence(decoder, groups, 1),  # alone
        logprobs_by_sequence(decoder, [group[:1] for group in groups[1:]], 10_000),  # fewer
    ]
    assert [len(other) for other in others] == [8, 8, 8, 3]
    for other in others:
        for tokens, values in other.items():
            assert torch.equal(values, packed[tokens])
    assert torch.cat(list(packed.values()), dim=1)[0].min() < -2.0


def test_under_dynamic_tensorwise_they_do_depend():
    decoder = tiny_decoder(tiny_config("qwen3"), get_recipe("tensorwise"))
    groups = [[completion_of([1, 2, 3], list(range(5, 40)))], [completion_of([4], list(range(40, 90)))]]
    packed, alone = (logprobs_by_sequence(decoder, groups, limit) for limit in (10_000, 1))
    assert any(not torch.equal(packed[tokens], alone[tokens]) for tokens in packed)


def test_truncated_completions_are_left_out_of_the_loss():
    groups, advantages = random_groups(3, 4, 3)
    stopped = [
        [replace(c, finish_reason="stop") if (p + g) % 2 else c for g, c in enumerate(group)]
        for p, group in enumerate(groups)
    ]
    stopped[2] = groups[2]  # all of the third prompt were cut off
    kept = [c for group in stopped for c in group if c.finish_reason == "stop"]
    batches = pack(stopped, advantages, num_mini_batches=4, microbatch_tokens=40, leave_out_truncated=True)
    assert [batch.num_sequences for batch in batches] == [1, 2, 2]  # none of the third
    assert sum(batch.num_loss_tokens for batch in batches) == sum(len(c.tokens) for c in kept)
    sampled = torch.cat([batch.gather("tokens")[batch.gather("loss_mask")] for batch in batches])
    assert sorted(sampled.tolist()) == sorted(token for c in kept for token in c.tokens)
    assert pack(groups, advantages, num_mini_batches=4, microbatch_tokens=40, leave_out_truncated=True) == []
