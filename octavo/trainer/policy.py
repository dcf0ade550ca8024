"""The policy on a packed microbatch: the independent training forward, and weights against the rollout's mismatch."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.layers.attention import PackedAttention
from octavo.models.decoder import Decoder
from octavo.rl.batch import Microbatch, MiniBatch
from octavo.rl.corrections import correction_weights
from octavo.trainer.config import TrainConfig


def packed_logprobs(
    decoder: Decoder, microbatch: Microbatch, temperature: float, *, shadow: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the sampled tokens under the decoder's weights as they are now.

    Nothing of the rollout is read: keys, values and activations are computed anew from the tokens.

    Args:
        decoder: the policy, or the reference.
        microbatch: T packed tokens.
        temperature: of the rollout; divides the logits.
        shadow: the BF16 reference on the masters instead of the recipe; no gradient.

    Returns:
        logprobs and entropy, [T] fp32 each, 0 where loss_mask is False; logprobs are differentiable.
    """
    if shadow:
        with torch.no_grad():
            return _logprobs(decoder, microbatch, temperature, shadow=True)
    return _logprobs(decoder, microbatch, temperature, shadow=False)


def weights_of(config: TrainConfig, microbatch: Microbatch) -> Tensor:
    """[T] weights that correct for the mismatch of rollout and training."""
    old, rollout_logprobs = microbatch.old_logprobs, microbatch.rollout_logprobs
    assert old is not None
    mask, index, algorithm = microbatch.loss_mask, microbatch.sequence_index, config.algorithm
    return correction_weights(old, rollout_logprobs, mask, index, algorithm.correction, algorithm.tis_cap)


def gathered_weights(config: TrainConfig, mini_batch: MiniBatch) -> Tensor:
    """The same of every microbatch, end to end."""
    return torch.cat([weights_of(config, microbatch) for microbatch in mini_batch.microbatches])


def _logprobs(decoder: Decoder, microbatch: Microbatch, temperature: float, shadow: bool) -> tuple[Tensor, Tensor]:
    kv_format = decoder.recipe.high_precision if shadow else decoder.recipe.kv_cache
    context = PackedAttention(microbatch.cu_seqlens, kv_format)
    hidden = decoder(microbatch.tokens, microbatch.positions, context, shadow=shadow)
    sampled = microbatch.loss_mask.nonzero().squeeze(1)
    logprobs, entropy = decoder.logprobs(hidden[sampled - 1], microbatch.tokens[sampled], temperature)
    zeros = torch.zeros(len(microbatch.tokens), device=logprobs.device)
    return zeros.index_put((sampled,), logprobs), zeros.index_put((sampled,), entropy)
