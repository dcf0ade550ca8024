"""Random completions packed in several ways, and losses over them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.rl.batch import Microbatch
from octavo.rl.calibration_losses import plain_bounds
from octavo.rl.loss_clipped import BAPO, M2PO, PPOClip
from octavo.rl.loss_likelihood import CISPO, DPPOKL, DPPOTV, Reinforce
from octavo.rl.loss_sequence import GSPO, GSPOToken
from octavo.rl.losses import ClipBounds, ClipConfig, reduce_loss
from octavo.rl.policy_loss import chosen_bounds, fixed_bounds, policy_losses

CLIP = ClipBounds(low=0.8, high=1.28)
LOSSES = (
    PPOClip(),
    PPOClip(dual_clip=1.5),
    GSPO(clip_low=0.05, clip_high=0.05),
    GSPOToken(clip_low=0.05, clip_high=0.05),
    CISPO(ratio_cap=1.3),
    BAPO(positive_share=0.6),
    DPPOTV(max_decrease=0.02, max_increase=0.02, ratio_cap=1.3),
    DPPOKL(max_decrease=0.002, max_increase=0.002, ratio_cap=1.3),
    M2PO(budget=0.02),
    Reinforce(),
)


def loss_id(config) -> str:
    return config.type_name + ("_dual" if getattr(config, "dual_clip", None) else "")


@dataclass(frozen=True)
class Completions:
    """Sequences behind prompts of junk: each value is a list of one float64 tensor a sequence."""

    logprobs: list[Tensor]
    old_logprobs: list[Tensor]
    advantages: list[Tensor]
    weights: list[Tensor]

    @classmethod
    def random(cls, lengths: list[int], seed: int = 0, per_token: bool = False) -> "Completions":
        """Ratios with a spread of 0.3, advantages of both signs, constant along a completion unless per_token."""
        generator = torch.Generator().manual_seed(seed)

        def noise(length: int) -> Tensor:
            return torch.randn(length, generator=generator, dtype=torch.float64)

        old = [-0.05 - noise(length).abs() for length in lengths]
        return cls(
            logprobs=[(x + 0.3 * noise(len(x))).clamp(max=-1e-3) for x in old],
            old_logprobs=old,
            advantages=[noise(n) if per_token else noise(1).repeat(n) for n in lengths],
            weights=[noise(n).abs() for n in lengths],
        )


def packed(completions: Completions, places: list[int], num_prompt: int = 2) -> tuple[Microbatch, Tensor, Tensor]:
    """The sequences at `places` end to end behind prompts of junk: microbatch, logprobs with gradient, weights."""

    def join(parts: list[Tensor], junk: float) -> Tensor:
        before = torch.full((num_prompt,), junk, dtype=torch.float64)
        return torch.cat([torch.cat([before, parts[place]]) for place in places])

    lengths = torch.tensor([num_prompt + len(completions.logprobs[place]) for place in places])
    index = torch.repeat_interleave(torch.arange(len(places)), lengths)
    edges = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    positions = torch.arange(len(index)) - edges[index]
    microbatch = Microbatch(
        tokens=torch.zeros_like(index),
        positions=positions,
        cu_seqlens=edges,
        sequence_index=index,
        loss_mask=positions >= num_prompt,
        advantages=join(completions.advantages, -40.0),
        rollout_logprobs=join(completions.old_logprobs, -2.0),
        old_logprobs=join(completions.old_logprobs, -5.0),
    )
    return microbatch, join(completions.logprobs, -3.0).requires_grad_(), join(completions.weights, 9.0)


def bounds_for(config, completions: Completions) -> ClipBounds | None:
    """Bounds of the loss, from all sequences where it chooses them."""
    if not isinstance(config, BAPO | M2PO):
        return fixed_bounds(config, plain_bounds(config, ClipConfig()))
    batch, logprobs, weights = packed(completions, list(range(len(completions.logprobs))), num_prompt=0)
    ratio = torch.exp(logprobs.detach() - batch.old_logprobs)
    return chosen_bounds(config, ratio, batch.advantages, weights, batch.loss_mask)


def loss_and_gradients(config, completions, parts, reduction="token_mean", num_prompt=2) -> tuple[float, list[Tensor]]:
    """The mini-batch's loss, and its gradient by sequence, when packed into microbatches of `parts`."""
    bounds, total = bounds_for(config, completions), 0.0
    gradients: dict[int, Tensor] = {}
    for places in parts:
        batch, logprobs, weights = packed(completions, places, num_prompt)
        loss = reduce_loss(
            policy_losses(config, logprobs, batch, bounds, weights),
            batch.loss_mask,
            batch.sequence_index,
            reduction,
            num_loss_tokens=sum(map(len, completions.logprobs)),
            num_sequences=len(completions.logprobs),
            max_completion_tokens=12,
        )
        loss.backward()
        total += loss.item()
        for place, gradient in zip(places, logprobs.grad.split(batch.cu_seqlens.diff().tolist()), strict=True):
            assert not gradient[:num_prompt].any()
            gradients[place] = gradient[num_prompt:]
    return total, [gradients[place] for place in sorted(gradients)]
