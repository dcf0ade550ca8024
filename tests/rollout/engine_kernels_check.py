"""The engine on a GPU's path in Triton's interpreter: decode and packed training through the same kernels.

python tests/rollout/engine_kernels_check.py, with TRITON_INTERPRET=1
"""

import warnings

import pytest
import torch
from kernel_products import as_on_gpu
from tiny_models import mismatch, random_prompts, tiny_config, tiny_decoder

from octavo.numerics.recipe import get_recipe
from octavo.rollout import decode
from octavo.rollout.engine import Engine, EngineConfig
from octavo.rollout.sampler import SamplingConfig

if __name__ == "__main__":
    warnings.simplefilter("ignore")  # NumPy's, of infinities and of the random numbers' products
    with pytest.MonkeyPatch.context() as patch:
        as_on_gpu(patch)
        drawn = []
        draw = decode.draw
        patch.setattr(decode, "draw", lambda *arguments: drawn.append(arguments[0]) or draw(*arguments))
        decoder = tiny_decoder(tiny_config("qwen3", num_hidden_layers=1), get_recipe("block128", kv_cache="fp8"))
        engine = Engine(decoder, EngineConfig(page_size=4, kv_cache_tokens=60, decode_steps=3), ())
        engine.decode_steps = 3
        prompts, sampling = random_prompts(0, 2, 5, 11), SamplingConfig(temperature=0.8)
        completions = engine.generate(prompts, sampling, max_completion_tokens=5, seed=2**64 - 3)
        assert len(drawn) == 4, "a prefill, then decode steps"
        difference = mismatch(decoder, completions, sampling.temperature)
        assert len(difference) == 10 and (difference == 0.0).all(), difference
        lows = [logprob for group in completions for completion in group for logprob in completion.rollout_logprobs]
        assert min(lows) < -1.0

        step = engine.decode.start

        def sabotaged(sequences, *arguments):
            slot = sequences[0].pages[0] * 4 + 1
            codes = engine.cache.k.view(torch.uint8)[0, slot, 0]
            codes[(codes & 0x7F).argmax()] ^= 0x08
            return step(sequences, *arguments)

        patch.setattr(engine.decode, "start", sabotaged)
        completions = engine.generate(prompts[:1], sampling, max_completion_tokens=3, seed=2**64 - 3)
        assert (mismatch(decoder, completions, sampling.temperature) != 0.0).any()
