"""Moments that move on a CPU: pages that nobody locks, and copies that are made as late as they may be."""

from octavo.trainer import host_memory, offload
from octavo.trainer.offload import OffloadedMoments


class FakeDevice:
    """What `offload` asks of a device, for tensors of a CPU. A copy is made when it is waited for, not before."""

    def __init__(self, monkeypatch):
        self.under_way, self.locked, self.made = [], {}, []
        monkeypatch.setattr(offload, "is_on_gpu", lambda x: True)
        monkeypatch.setattr(offload, "start_copy", lambda target, source: self.under_way.append((target, source.data)))
        monkeypatch.setattr(offload, "wait", self.wait)
        monkeypatch.setattr(host_memory, "lock", lambda pages: self.locked.update({pages.data_ptr(): pages.numel()}))
        monkeypatch.setattr(host_memory, "unlock", lambda pages: self.locked.pop(pages.data_ptr()))
        monkeypatch.setattr(offload, "OffloadedMoments", self.make)

    def wait(self, device):
        """All that is under way, one by one."""
        while self.under_way:
            target, source = self.under_way[0]
            target.copy_(source)
            self.under_way.pop(0)

    def make(self, moments):
        """The real ones; `made` has all, in order."""
        self.made.append(OffloadedMoments(moments))
        return self.made[-1]
