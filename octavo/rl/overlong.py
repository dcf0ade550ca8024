"""Completions that come near the limit on their length: a penalty before it, and a way out of the loss beyond it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """What is done about long and truncated completions. The defaults do nothing."""

    buffer_tokens: int = 0
    """B: the penalty grows over the last B tokens before rollout.max_completion_tokens. 0 for no penalty."""
    penalty: float = 1.0
    """What a completion loses that is as long as the limit, in reward units. At least 0."""
    filter_truncated: bool = False
    """Leave completions that were cut off out of the loss; they still count in their group's mean."""

    def __post_init__(self) -> None:
        if self.buffer_tokens < 0:
            raise ValueError(f"buffer_tokens is a number of tokens, at least 0; got {self.buffer_tokens}")
        if not self.penalty >= 0.0:
            raise ValueError(f"penalty is subtracted from the reward and must be at least 0; got {self.penalty}")
        if self.buffer_tokens == 0 and self.penalty != OverlongConfig.penalty:
            raise ValueError(
                f"penalty={self.penalty} grows over the last buffer_tokens before the limit, which are 0, so nothing "
                f"would be subtracted. Give buffer_tokens, as 128"
            )


def overlong_penalty(num_tokens: Tensor, max_completion_tokens: int, config: OverlongConfig) -> Tensor:
    """Soft overlong punishment of DAPO (Yu et al. 2025, arXiv:2503.14476, eq. 13).

        0 up to max_completion_tokens - B tokens, then growing linearly to `penalty` at max_completion_tokens

    Args:
        num_tokens: [P, G], tokens of each completion.
        max_completion_tokens: the limit.
        config: OverlongConfig.

    Returns:
        [P, G] fp32 to subtract from rewards, in reward units, in [0, penalty].
    """
    if config.buffer_tokens == 0:
        return torch.zeros(num_tokens.shape)
    beyond = num_tokens.double() - (max_completion_tokens - config.buffer_tokens)
    return (config.penalty * (beyond / config.buffer_tokens).clamp(0.0, 1.0)).to(torch.float32)
