"""Greedy decoding on a GPU is that of transformers, up to ties under BF16; `test_smollm2_gpu` has real weights."""

import pytest
import torch
from gpu_models import SHAPES, VOCAB, transformers_config
from greedy_checks import check_greedy
from tiny_models import random_prompts, tiny_decoder, tiny_transformers
from transformers import Qwen3Config

from octavo.numerics.recipe import get_recipe

pytestmark = pytest.mark.gpu


QWEN3 = (Qwen3Config, 1024, 3072, 16, 8, 128)
"""Qwen3-0.6B's widths."""


@pytest.mark.parametrize("shape", [SHAPES["smollm2"], QWEN3], ids=["smollm2", "qwen3-0.6b"])
def test_greedy_continuations_are_those_of_transformers(shape):
    config = transformers_config(shape, num_layers=6)
    reference = tiny_transformers(config)
    decoder, prompts = tiny_decoder(config, get_recipe("bf16"), reference).cuda(), random_prompts(0, 8, 1, 200, VOCAB)
    agreement = check_greedy(decoder, reference.cuda(), prompts)
    assert agreement.equal_share > 0.75, agreement


def test_a_wrong_weight_is_seen():
    config = transformers_config(SHAPES["smollm2"], num_layers=6)
    reference = tiny_transformers(config)
    decoder = tiny_decoder(config, get_recipe("bf16"), reference).cuda()
    with torch.no_grad():
        decoder.layers[0].down_proj.weight *= 1.2
    decoder.requantize_()
    with pytest.raises(AssertionError, match="below the largest FP32 logit"):
        check_greedy(decoder, reference.cuda(), random_prompts(0, 8, 1, 200, VOCAB))
