"""The training forward of the policy: values, gradients to every master, and the BF16 shadow beside it."""

import itertools

import pytest
import torch
from tiny_models import (
    masters_by_name,
    pack_all,
    random_prompts,
    tiny_config,
    tiny_decoder,
    tiny_transformers,
)

from octavo.layers.attention import PackedAttention
from octavo.numerics.recipe import RECIPE_NAMES, get_recipe
from octavo.rollout.engine import Engine, EngineConfig
from octavo.rollout.sampler import SamplingConfig
from octavo.trainer.policy import filled_up, packed_logprobs

FAMILIES = ("llama", "qwen2", "qwen3")


def sampled_batch(decoder, temperature=1.0, seed=0):
    """One microbatch that the decoder itself has sampled, and its completions."""
    completions = Engine(decoder, EngineConfig(), (3,)).generate(
        random_prompts(seed, 4),
        SamplingConfig(temperature=temperature),
        max_completion_tokens=20,
        group_size=2,
        seed=seed,
    )
    (batch,) = pack_all(completions, microbatch_tokens=10_000)
    (microbatch,) = batch.microbatches
    return microbatch, completions


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_entropy_equal_transformers(family, temperature):
    config = tiny_config(family)
    reference = tiny_transformers(config)
    decoder = tiny_decoder(config, get_recipe("fp32"), reference)
    microbatch, _ = sampled_batch(decoder, temperature)
    logprobs, entropy = packed_logprobs(decoder, microbatch, temperature)
    edges = microbatch.cu_seqlens.tolist()
    checked = 0
    for start, stop in itertools.pairwise(edges):
        tokens = microbatch.tokens[start:stop]
        with torch.no_grad():
            wanted = (reference(tokens[None]).logits[0, :-1] / temperature).log_softmax(dim=-1)
        mask = microbatch.loss_mask[start:stop]
        for place in mask.nonzero().flatten().tolist():
            row = wanted[place - 1]
            assert abs(logprobs[start + place].item() - row[tokens[place]].item()) < 2e-5
            assert abs(entropy[start + place].item() + (row.exp() * row).sum().item()) < 5e-5
            checked += 1
    assert checked == microbatch.loss_mask.sum() > 40
    assert (logprobs[~microbatch.loss_mask] == 0.0).all() and (entropy[~microbatch.loss_mask] == 0.0).all()


@pytest.mark.parametrize("recipe", [name for name in RECIPE_NAMES if name != "tensorwise"])
def test_logprobs_are_the_engines(recipe):
    decoder = tiny_decoder(tiny_config("qwen3"), get_recipe(recipe))
    microbatch, completions = sampled_batch(decoder, 0.8)
    logprobs, _ = packed_logprobs(decoder, microbatch, 0.8)
    assert torch.equal(logprobs.detach(), microbatch.rollout_logprobs)
    reported = sorted(x for group in completions for completion in group for x in completion.rollout_logprobs)
    assert sorted(logprobs[microbatch.loss_mask].tolist()) == reported


@pytest.mark.parametrize("lengths", [(200, 7, 30), (9, 4), (128,), (1,)])
@pytest.mark.parametrize("recipe", ["block128", "tensorwise"])
def test_what_fills_up_blocks_of_tokens_changes_nothing(recipe, lengths):
    """Not even under one scale for all tokens."""
    decoder = tiny_decoder(tiny_config("qwen3"), get_recipe(recipe))
    T, cu_seqlens = sum(lengths), torch.tensor([0, *itertools.accumulate(lengths)])
    tokens, positions = torch.randint(0, 50, (T,)), torch.cat([torch.arange(length) for length in lengths])
    index, edges = filled_up(tokens, cu_seqlens)
    assert len(index) % 128 == 0 and len(index) - T < 128 and torch.equal(index[:T], torch.arange(T))
    assert edges[: len(cu_seqlens)].tolist() == cu_seqlens.tolist() and edges[-1] == len(index)
    for start, stop in itertools.pairwise(edges[len(cu_seqlens) - 1 :].tolist()):
        assert index[start:stop].tolist() == list(range(stop - start)) and 0 < stop - start <= lengths[0]
    alone = decoder(tokens, positions, PackedAttention(cu_seqlens, decoder.recipe.kv_cache))
    filled = decoder(tokens[index], positions[index], PackedAttention(edges, decoder.recipe.kv_cache))
    assert torch.equal(filled[:T], alone)


def gradients_of(recipe, family, microbatch, **changes):
    decoder = tiny_decoder(tiny_config(family), get_recipe(recipe, **changes))
    logprobs, _ = packed_logprobs(decoder, microbatch, 1.0)
    weights = torch.linspace(-1.0, 1.0, len(logprobs))  # as advantages do, both signs
    (logprobs * weights).sum().backward()
    return masters_by_name(decoder, gradients=True), logprobs


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recipe", ["block128", "rowwise", "w8a16", "tensorwise_static"])
def test_gradient_reaches_every_master_and_points_the_right_way(recipe, family):
    microbatch, _ = sampled_batch(tiny_decoder(tiny_config(family), get_recipe("fp32")))
    exact, _ = gradients_of("fp32", family, microbatch)
    gradients, logprobs = gradients_of(recipe, family, microbatch)
    assert logprobs.requires_grad
    assert gradients.keys() == exact.keys()
    cosines = {}
    for name, wanted in exact.items():
        assert gradients[name].dtype == torch.float32
        assert torch.isfinite(gradients[name]).all() and wanted.norm() > 1e-3
        cosines[name] = torch.cosine_similarity(gradients[name].flatten(), wanted.flatten(), dim=0).item()
        assert 0.5 < (gradients[name].norm() / wanted.norm()).item() < 2.0, name
    worst = min(cosines, key=cosines.get)
    print(f"smallest cosine {cosines[worst]:.3f} of {worst}, mean {sum(cosines.values()) / len(cosines):.3f}")
    assert cosines[worst] > 0.8, cosines


def test_bf16_gradients_are_closer_than_fp8_ones():
    microbatch, _ = sampled_batch(tiny_decoder(tiny_config("qwen3"), get_recipe("fp32")))
    exact, bf16, fp8 = (gradients_of(name, "qwen3", microbatch)[0] for name in ("fp32", "bf16", "block128"))
    for name, wanted in exact.items():
        errors = [((x[name] - wanted).norm() / wanted.norm()).item() for x in (bf16, fp8)]
        assert 0.0 < errors[0] < 0.15, (name, errors)
        assert errors[0] < errors[1], (name, errors)


def test_gradient_adds_up_over_microbatches():
    decoder = tiny_decoder(tiny_config("qwen2"), get_recipe("bf16"))
    microbatch, completions = sampled_batch(decoder)
    (split,) = pack_all(completions, microbatch_tokens=60)
    assert len(split.microbatches) > 2
    packed_logprobs(decoder, microbatch, 1.0)[0].sum().backward()
    together = {name: x.clone() for name, x in masters_by_name(decoder, gradients=True).items()}
    decoder.zero_grad()
    for part in split.microbatches:
        packed_logprobs(decoder, part, 1.0)[0].sum().backward()
    for name, x in masters_by_name(decoder, gradients=True).items():
        assert ((x - together[name]).norm() / together[name].norm()).item() < 2e-3, name


def test_prompt_tokens_get_no_loss_gradient():
    # The last token of a sequence predicts nothing, and the first prompt token is predicted by nothing.
    decoder = tiny_decoder(tiny_config("llama"), get_recipe("fp32"))
    microbatch, _ = sampled_batch(decoder)
    logprobs, _ = packed_logprobs(decoder, microbatch, 1.0)
    (logprobs * (~microbatch.loss_mask)).sum().backward()
    assert all((parameter.grad == 0.0).all() for parameter in decoder.parameters())


@pytest.mark.parametrize("recipe", ["block128", "w8a16", "tensorwise_static"])
def test_shadow_carries_no_gradient_and_is_bf16(recipe):
    config = tiny_config("qwen3")
    decoder = tiny_decoder(config, get_recipe(recipe))
    microbatch, _ = sampled_batch(decoder)
    logprobs, entropy = packed_logprobs(decoder, microbatch, 1.0)
    shadow, shadow_entropy = packed_logprobs(decoder, microbatch, 1.0, shadow=True)
    assert logprobs.requires_grad and not shadow.requires_grad and not shadow_entropy.requires_grad
    wanted, wanted_entropy = packed_logprobs(tiny_decoder(config, get_recipe("bf16")), microbatch, 1.0)
    assert torch.equal(shadow, wanted.detach()) and torch.equal(shadow_entropy, wanted_entropy)
    difference = (shadow - logprobs.detach())[microbatch.loss_mask]
    assert (difference != 0.0).float().mean() > 0.9
    assert 0.001 < difference.abs().mean() < 0.5
    # The shadow is on the masters, whatever bytes run.
    with torch.no_grad():
        decoder.layers[0].o_proj.weight.mul_(1.2)
    moved, _ = packed_logprobs(decoder, microbatch, 1.0, shadow=True)
    assert not torch.equal(moved, shadow)
    assert torch.equal(packed_logprobs(decoder, microbatch, 1.0)[0], logprobs)


def test_old_weights_give_a_ratio_of_exactly_one_and_new_ones_do_not():
    decoder = tiny_decoder(tiny_config("qwen3"), get_recipe("block128"))
    microbatch, _ = sampled_batch(decoder)
    optimizer = torch.optim.SGD(decoder.parameters(), lr=1e-2)
    logprobs, _ = packed_logprobs(decoder, microbatch, 1.0)
    assert (torch.exp(logprobs - microbatch.rollout_logprobs) == 1.0).all()
    (-logprobs.sum() / microbatch.loss_mask.sum()).backward()  # make the samples likelier
    optimizer.step()
    decoder.requantize_()
    updated, _ = packed_logprobs(decoder, microbatch, 1.0)
    assert updated.sum() > logprobs.sum()
    assert (updated != logprobs)[microbatch.loss_mask].float().mean() > 0.9
