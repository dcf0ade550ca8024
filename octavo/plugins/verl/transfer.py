"""What crosses from the training engine to vLLM: named tensors between a header and the fingerprints of all of them.

    octavo.header        [2] int64      policy_version, number of tensors
    NAME.weight          [N, K] e4m3    and after it NAME.weight_scale_inv, fp32, a scale for each 128x128; or BF16
    octavo.fingerprints  [n] int64      of each tensor, in order

Header and fingerprints are no weights of any model, so a receiver that does not know them refuses the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

HEADER = "octavo.header"
FINGERPRINTS = "octavo.fingerprints"
Named = tuple[str, Tensor]
"""A tensor and its name."""
_CHUNK = 1 << 20
_MODULUS = 1 << 64


def fingerprint(tensor: Tensor) -> int:
    """Sum of (i + 1) x byte i, modulo 2^64 and as an int64: any changed byte changes it, and any two swapped.

    Computed where the tensor lies, in parts of 8 MB.
    """
    total = 0
    for start, part in enumerate(tensor.detach().contiguous().flatten().view(torch.uint8).split(_CHUNK)):
        place = torch.arange(start * _CHUNK + 1, start * _CHUNK + len(part) + 1, device=part.device)
        total += int((part.long() * place).sum())
    return (total + _MODULUS // 2) % _MODULUS - _MODULUS // 2


def stamped(tensors: Iterable[Named], num_tensors: int, policy_version: int) -> Iterator[Named]:
    """The stream of named tensors with its header and fingerprints; one tensor is held at a time."""
    yield HEADER, torch.tensor([policy_version, num_tensors])
    found = []
    for name, tensor in tensors:
        found.append(fingerprint(tensor))
        yield name, tensor
    yield FINGERPRINTS, torch.tensor(found)


@dataclass
class Arrival:
    """The receiving end of one stream, whose tensors come in buckets."""

    policy_version: int | None = None
    """Of the weights on their way."""
    num_tensors: int = 0
    """How many the header announced."""
    found: list[int] = field(default_factory=list)
    """Fingerprints of those that have come."""
    complete: bool = False
    """Whether all have come, unharmed."""

    def take(self, bucket: Sequence[Named]) -> list[Named]:
        """The weights of a bucket, which are not checked before the last one has come.

        Raises:
            ValueError: the stream has no header, or what came is not what was sent.
        """
        weights = []
        for name, tensor in bucket:
            if name == HEADER:
                self.policy_version, self.num_tensors = tensor.tolist()
            elif self.policy_version is None:
                raise ValueError(
                    f"weights for vLLM begin with {HEADER!r}; got {name!r}. The sender is not octavo's engine with "
                    f"rollout_weights=fp8: set actor.strategy=octavo, or leave worker_extension_cls at verl's"
                )
            elif name == FINGERPRINTS:
                self._check(tensor.tolist())
            else:
                self.found.append(fingerprint(tensor))
                weights.append((name, tensor))
        return weights

    def _check(self, sent: list[int]) -> None:
        if len(self.found) != self.num_tensors or self.found != sent:
            changed = sum(mine != theirs for mine, theirs in zip(self.found, sent, strict=False))
            raise ValueError(
                f"weights of policy_version {self.policy_version} arrived damaged: {len(self.found)} of "
                f"{self.num_tensors} tensors came, {changed} of them changed on the way. Nothing may be sampled with "
                f"them; start the run again from its last checkpoint"
            )
        self.complete = True
