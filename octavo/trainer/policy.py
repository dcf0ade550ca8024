"""The policy on a packed microbatch: the independent training forward, and weights against the rollout's mismatch."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.kernels.device import runs_kernels
from octavo.kernels.operands import TOKEN_BLOCK
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


def filled_up(tokens: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Copies of the first sequence's beginning after the last, until the tokens are a multiple of TOKEN_BLOCK.

    They do to every activation what that beginning does, so that no amax of a whole matrix moves, and have no gradient.
    In the backward of a recipe by blocks, X's last block of tokens is quantised together with them.

    Args:
        tokens: [T] int64.
        cu_seqlens: [N + 1] int64 sequence boundaries, from 0 to T.

    Returns:
        index [T'] int64, which token stands at each place, and the boundaries of all sequences.
    """
    T = len(tokens)
    index, missing = torch.arange(T, device=tokens.device), -T % TOKEN_BLOCK
    if missing:
        longest = int(cu_seqlens[1:2].item())
        index = torch.cat([index, torch.arange(missing, device=tokens.device) % longest])
        ends = [*range(T + longest, T + missing, longest), T + missing]
        cu_seqlens = torch.cat([cu_seqlens, cu_seqlens.new_tensor(ends)])
    return index, cu_seqlens


def _logprobs(decoder: Decoder, microbatch: Microbatch, temperature: float, shadow: bool) -> tuple[Tensor, Tensor]:
    kv_format = decoder.recipe.high_precision if shadow else decoder.recipe.kv_cache
    tokens, positions, cu_seqlens = microbatch.tokens, microbatch.positions, microbatch.cu_seqlens
    sampled = microbatch.loss_mask.nonzero().squeeze(1)
    if runs_kernels(tokens):
        index, cu_seqlens = filled_up(tokens, cu_seqlens)
        tokens, positions = tokens[index], positions[index]
    hidden = decoder(tokens, positions, PackedAttention(cu_seqlens, kv_format), shadow=shadow)
    logprobs, entropy = decoder.logprobs(hidden[sampled - 1], microbatch.tokens[sampled], temperature)
    zeros = torch.zeros(len(microbatch.tokens), device=logprobs.device)
    return zeros.index_put((sampled,), logprobs), zeros.index_put((sampled,), entropy)
