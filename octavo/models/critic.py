"""The critic: a decoder of its own whose last hidden state says how much reward is still to come."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from octavo.layers.attention import AttentionContext
from octavo.models.decoder import Decoder


class Critic(nn.Module):
    """V of every token's state, as a product of the hidden state and one vector; 0 before the first update.

    Args:
        decoder: becomes a part of the critic, without its lm_head.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        if decoder.lm_head is not None:
            decoder.lm_head = None
            del decoder.lm_head_hp
        self.decoder = decoder
        device = decoder.embed_tokens.device
        self.head = nn.Parameter(torch.zeros(decoder.config.hidden_size, device=device))
        self.head_bias = nn.Parameter(torch.zeros(1, device=device))

    def forward(self, tokens: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """tokens, positions [T] int64 -> V [T] fp32; row t is the state after token t."""
        hidden = self.decoder(tokens, positions, context)
        return hidden.float() @ self.head + self.head_bias
