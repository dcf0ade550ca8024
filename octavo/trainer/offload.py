"""AdamW's moments in the host's memory while nobody updates: from the last update of a step to the first of the next.

    to_host      after a step's updates    copy, wait, then free the device's memory
    to_device    before the first update   copy, wait; the host's bytes stay as they are

Every moment is whole in one place at any time, and the tensor that the optimiser holds says where: it is copied and
waited for first, and then changes its memory. So whatever raises in between, a checkpoint reads whole moments, and
either call goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from octavo.rollout.lent_memory import tensor_bytes
from octavo.trainer.host_memory import PinnedMemory


class OffloadedMoments:
    """Moments that lie on the host but for updates; there from the beginning.

    Args:
        moments: the live tensors, on one device. Whoever holds them finds them wherever they are.

    Raises:
        ValueError: the host has no room for them.
    """

    def __init__(self, moments: Iterable[Tensor]) -> None:
        live = list(moments)
        (self._device,) = {x.device for x in live}
        assert all(x.is_contiguous() for x in live), "a moment's bytes lie otherwise than on the host"
        self._memory = PinnedMemory(sum(tensor_bytes(x.shape, x.dtype) for x in live))
        self._places = [(x, self._memory.tensor_like(x)) for x in live]
        """Each with its bytes on the host."""
        self.to_host()

    def to_host(self) -> None:
        """Have all on the host, and their memory on the device free."""
        leaving = [(live, host) for live, host in self._places if not _lies_at(live, host)]
        if not leaving:
            return
        for live, host in leaving:
            start_copy(host, live)
        wait(self._device)
        for live, host in leaving:
            live.data = host

    def to_device(self) -> None:
        """Have all on the device.

        Raises:
            torch.cuda.OutOfMemoryError: it has no room; they are where they were.
        """
        coming = [(live, host) for live, host in self._places if _lies_at(live, host)]
        if not coming:
            return
        arrived = [torch.empty_like(host, device=self._device) for _, host in coming]
        for (_, host), on_device in zip(coming, arrived, strict=True):
            start_copy(on_device, host)
        wait(self._device)
        for (live, _), on_device in zip(coming, arrived, strict=True):
            live.data = on_device

    @property
    def on_host(self) -> bool:
        """Whether all are."""
        return all(_lies_at(live, host) for live, host in self._places)


def offload(moments: Mapping[str, Tensor]) -> OffloadedMoments | None:
    """Move moments to the host; None where they are no GPU's, and so in the host's memory anyway.

    Raises:
        ValueError: the host has no room for them.
    """
    if not all(is_on_gpu(x) for x in moments.values()):
        return None
    return OffloadedMoments(moments.values())


def is_on_gpu(x: Tensor) -> bool:
    """Whether its memory is not the host's."""
    return x.is_cuda


def start_copy(target: Tensor, source: Tensor) -> None:
    """Copy after what the device was asked for so far; `wait` says when it is done."""
    target.copy_(source.detach(), non_blocking=True)


def wait(device: torch.device) -> None:
    """Until copies are done, and all that the device was asked for before them."""
    torch.cuda.synchronize(device)


def _lies_at(live: Tensor, place: Tensor) -> bool:
    return live.data_ptr() == place.data_ptr()
