"""SmolLM2's real weights: every recipe is exact over three updates, and greedy decoding is that of transformers."""

import pytest
import torch
from gpu_models import RECIPES, assert_exact, digests
from greedy_checks import check_greedy
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo.layers.linear import quantized_layers
from octavo.models.checkpoint import load_decoder
from octavo.numerics.recipe import get_recipe
from octavo.rl.batch import pack
from octavo.rollout.engine import Engine, EngineConfig
from octavo.rollout.sampler import SamplingConfig
from octavo.tasks.prompts import stop_token_ids
from octavo.trainer.optimizer import Optimizer, OptimizerConfig
from octavo.trainer.policy import packed_logprobs

pytestmark = pytest.mark.gpu

QUESTIONS = [
    "What is 17 times 23?",
    "Name three rivers in France.",
    "Write a haiku about the sea.",
    "A train leaves at 9:40 and arrives at 12:05. How long does it take?",
    "Explain in one sentence why the sky is blue.",
    "Solve for x: 3x + 5 = 20.",
    "Translate 'good morning' into Italian.",
    "What comes next: 2, 4, 8, 16?",
]
MAX_TOKENS = 1024
UPDATES = 3


@pytest.fixture(scope="module")
def prompts(smollm2):
    """Chat prompts of different lengths."""
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        for question in QUESTIONS
    ]
    found = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert len(set(map(len, found))) > 3
    return found


@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_rollout_equals_training_over_three_updates(recipe, kv_cache, smollm2, prompts):
    decoder = load_decoder(smollm2, get_recipe(recipe, kv_cache=kv_cache), max_tokens=MAX_TOKENS, device="cuda")
    stops = stop_token_ids(AutoTokenizer.from_pretrained(smollm2), None, decoder.hf_config)
    engine = Engine(decoder, EngineConfig(kv_cache_tokens=32768), stops)
    optimizer = Optimizer(dict(decoder.named_parameters()), OptimizerConfig(lr=1e-5), UPDATES, fused=True)
    signs = torch.randn(len(prompts), 4)
    before = None
    for update in range(UPDATES + 1):
        sampling = SamplingConfig(temperature=0.9)
        groups = engine.generate(prompts, sampling, max_completion_tokens=200, group_size=4, seed=1)
        assert groups != before, "an update changed no sample"
        assert_exact(decoder, groups, 0.9)
        before = groups
        if update < UPDATES:
            learn(decoder, optimizer, groups, signs)
    assert sum(len(completion.tokens) for group in groups for completion in group) > 1000


def learn(decoder, optimizer, groups, signs):
    """One policy-gradient update, and what follows it."""
    (batch,) = pack(groups, signs, num_mini_batches=1, microbatch_tokens=4096, device="cuda")
    for microbatch in batch.microbatches:
        logprobs, _ = packed_logprobs(decoder, microbatch, 0.9)
        (-(logprobs * microbatch.advantages)[microbatch.loss_mask].sum() / batch.num_loss_tokens).backward()
    assert optimizer.step()["optimizer/grad_norm"] > 0.0
    decoder.requantize_()
    decoder.freeze_activation_scales_()
    assert all(layer.quantized == decoder.recipe.quantizes for layer in quantized_layers(decoder))
    assert digests(decoder, fresh=False) == digests(decoder, fresh=True)


def test_greedy_continuations_are_those_of_transformers(smollm2, prompts):
    decoder = load_decoder(smollm2, get_recipe("bf16"), max_tokens=MAX_TOKENS, device="cuda")
    reference = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).cuda().eval()
    agreement = check_greedy(decoder, reference, prompts)
    assert agreement.equal_share > 0.85, agreement
