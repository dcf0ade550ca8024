"""The reference path on a GPU: the same exact sums, so the same bytes as on a CPU and the same bits in both roles."""

import json
from pathlib import Path

import pytest
import torch

from octavo.kernels.gemm import gemm
from octavo.kernels.operands import quantize_matrix
from octavo.models.checkpoint import load_decoder
from octavo.numerics.fp8 import BLOCK_1X128, BLOCK_128X1, BLOCK_128X128, PER_ROW, PER_TENSOR, quantize
from octavo.numerics.recipe import get_recipe
from octavo.rl.batch import pack
from octavo.rollout.engine import Engine, EngineConfig
from octavo.rollout.sampler import SamplingConfig
from octavo.trainer.config import TrainConfig
from octavo.trainer.config_file import load_config
from octavo.trainer.metrics import Display
from octavo.trainer.policy import packed_logprobs
from octavo.trainer.train import train

REPO = Path(__file__).resolve().parents[2]
TINY_MODEL = REPO / "examples/tiny/model"

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("quant_block", [PER_TENSOR, PER_ROW, BLOCK_1X128, BLOCK_128X1, BLOCK_128X128])
def test_quantiser_gives_the_bytes_of_the_cpu(quant_block):
    x = torch.randn(300, 576) * torch.exp(4 * torch.randn(300, 1))
    q, scale = quantize(x, quant_block)
    q_gpu, scale_gpu = quantize(x.cuda(), quant_block)
    assert torch.equal(q.view(torch.uint8), q_gpu.cpu().view(torch.uint8))
    assert torch.equal(scale, scale_gpu.cpu()) and scale.amin() > 0


def test_block_products_give_the_bits_of_the_cpu():
    x, w = torch.randn(77, 576), torch.randn(320, 576)
    left, right = quantize_matrix(x, BLOCK_1X128), quantize_matrix(w, BLOCK_128X128)
    left_gpu, right_gpu = quantize_matrix(x.cuda(), BLOCK_1X128), quantize_matrix(w.cuda(), BLOCK_128X128)
    expected = gemm(left.operand(), right.operand())
    found = gemm(left_gpu.reference_operand(), right_gpu.reference_operand())
    assert torch.equal(found.cpu(), expected) and expected.abs().amax() > 1


@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
@pytest.mark.parametrize("recipe", ["bf16", "block128", "rowwise", "w8a16", "tensorwise_static"])
def test_rollout_equals_packed_training_forward(recipe, kv_cache):
    decoder = load_decoder(TINY_MODEL, get_recipe(recipe, kv_cache=kv_cache), device="cuda")
    engine = Engine(decoder, EngineConfig(page_size=4, kv_cache_tokens=256), [1])
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, 14, (int(n),), generator=generator).tolist() for n in torch.randint(1, 40, (12,))]
    groups = engine.generate(prompts, SamplingConfig(temperature=0.8), max_completion_tokens=30, group_size=4, seed=3)
    assert engine.num_preemptions > 0
    advantages = torch.zeros(12, 4)
    (batch,) = pack(groups, advantages, num_mini_batches=1, microbatch_tokens=500, device="cuda")
    for microbatch in batch.microbatches:
        with torch.no_grad():
            logprobs, _ = packed_logprobs(decoder, microbatch, 0.8)
        assert torch.equal(logprobs, microbatch.rollout_logprobs) and logprobs.abs().sum() > 0


@pytest.mark.parametrize("interval", [1, 2])
def test_demo_config_trains_on_the_gpu(interval, tmp_path, monkeypatch):
    """Held to the rollout by a forward without gradients, and by the one that is trained in the step without it."""
    monkeypatch.chdir(REPO)
    changes = ["device=cuda", f"output_dir={tmp_path / 'run'}", "trainer.num_steps=3", "evaluation.num_problems=32"]
    changes.append(f"trainer.exactness_interval={interval}")
    folder = train(load_config(TrainConfig, "examples/demo.yaml", changes), Display())
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["mismatch/max_abs_logprob_diff"] for line in lines] == [0.0, 0.0, 0.0]
    assert all(line["policy/ratio_std"] > 0 for line in lines)
