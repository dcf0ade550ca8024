"""What stands for BF16 when bounds are calibrated: the masters themselves, or weights of its own that follow them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from octavo.models.decoder import Decoder
from octavo.numerics.recipe import get_recipe
from octavo.rl.batch import Microbatch
from octavo.rl.calibration_config import CalibrationConfig, EMAReference, SnapshotReference
from octavo.trainer.policy import packed_logprobs


class Reference:
    """The reference of a run's calibrations.

    Args:
        policy: whose masters it follows.
        config: which reference; None or one without weights of its own takes the masters.
        temperature: of the rollout; divides the logits.
    """

    def __init__(self, policy: Decoder, config: CalibrationConfig | None, temperature: float) -> None:
        self.policy, self.temperature = policy, temperature
        self.kind = None if config is None else config.reference
        self.own = _copy_of(policy) if isinstance(self.kind, EMAReference | SnapshotReference) else None
        self.updates_since_copy = torch.zeros((), dtype=torch.int64)
        self.updates_in_step = 0

    @property
    def name(self) -> str:
        """Whose weights a pass runs on."""
        return self.kind.type_name if isinstance(self.kind, EMAReference | SnapshotReference) else "masters"

    @property
    def num_bytes(self) -> int:
        """What it holds beside the masters."""
        if self.own is None:
            return 0
        tensors = [*self.own.parameters(), *self.own.buffers()]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps of it."""
        if self.own is None:
            return {}
        weights = {name: parameter.detach() for name, parameter in self.own.named_parameters()}
        return {"updates_since_copy": self.updates_since_copy, **weights}

    def start_step_(self, step: int) -> None:
        """Before a step's first update: renew the snapshot when that is due."""
        self.updates_in_step = 0
        if isinstance(self.kind, SnapshotReference) and step % self.kind.every == 0:
            self._move(1.0)
            self.updates_since_copy.zero_()

    def follow_(self) -> None:
        """After each update: count it, and move the running average."""
        self.updates_in_step += 1
        self.updates_since_copy += 1
        if isinstance(self.kind, EMAReference):
            self._move(1.0 - self.kind.decay)

    def restored_(self, begins: bool) -> None:
        """After a checkpoint was read: rewrite what the forward reads; `begins` where it held no reference."""
        if self.own is not None:
            self._move(1.0) if begins else self.own.requantize_()

    def old_logprobs(self, microbatch: Microbatch) -> Tensor:
        """[T] fp32, the denominator of r_bf16. Before the step's first update."""
        return self._logprobs(self.own or self.policy, microbatch)

    def now(self, microbatch: Microbatch) -> Tensor:
        """[T] fp32, the numerator of r_bf16, with the weights now."""
        return self._logprobs(self._moving, microbatch)

    def log_ratio(self, microbatch: Microbatch, now: Tensor) -> Tensor:
        """[T] fp32 log r_bf16 from `now` and the microbatch's reference_old_logprobs."""
        assert microbatch.reference_old_logprobs is not None
        moved = now - microbatch.reference_old_logprobs
        if isinstance(self.kind, SnapshotReference):
            moved = moved * (self.updates_in_step / max(int(self.updates_since_copy), 1))
        return moved

    def after_null_change(self, microbatch: Microbatch) -> Tensor:
        """[T] fp32, `now` after one BF16 step of a norm gain: what BF16's own rounding makes of next to nothing."""
        with nudged_gain(self._moving):
            return self._logprobs(self._moving, microbatch)

    @property
    def _moving(self) -> Decoder:
        """The weights that have moved within the step."""
        return self.own if self.own is not None and isinstance(self.kind, EMAReference) else self.policy

    def _logprobs(self, decoder: Decoder, microbatch: Microbatch) -> Tensor:
        return packed_logprobs(decoder, microbatch, self.temperature, shadow=True)[0]

    @torch.no_grad()
    def _move(self, weight: float) -> None:
        """Each tensor by that share of its way to the master; 1 copies."""
        assert self.own is not None
        for mine, master in zip(self.own.parameters(), self.policy.parameters(), strict=True):
            mine.copy_(master) if weight == 1.0 else mine.lerp_(master.to(mine.dtype), weight)
        self.own.requantize_()


@contextmanager
def nudged_gain(decoder: Decoder) -> Iterator[None]:
    """The gain of the middle block's first norm, every value one BF16 step farther from 0; as it was afterwards."""
    blocks = list(decoder.blocks())
    gain = blocks[len(blocks) // 2].input_norm.weight
    before = gain.detach().clone()
    with torch.no_grad():
        gain.copy_((before.bfloat16().view(torch.int16) + 1).view(torch.bfloat16))
    try:
        yield
    finally:
        with torch.no_grad():
            gain.copy_(before)


def _copy_of(policy: Decoder) -> Decoder:
    """A decoder with weights of its own, equal to the policy's."""
    own = Decoder(policy.config, policy.hf_config, get_recipe("bf16"), max_tokens=policy.max_tokens)
    own.to(policy.embed_tokens.device).requires_grad_(False)
    with torch.no_grad():
        for mine, master in zip(own.parameters(), policy.parameters(), strict=True):
            mine.copy_(master)
    own.requantize_()
    return own
