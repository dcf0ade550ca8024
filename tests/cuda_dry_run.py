"""The CUDA path on a CPU, for what it allocates: kernels that write nothing, products that are not computed."""

import weakref

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import KernelInterface

from octavo.kernels import agreement, decode_gemm


class Allocations(TorchDispatchMode):
    """Bytes of the storages that were made inside and are still held, and the most there have been at once."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self._held = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                if storage._cdata not in given and storage._cdata not in self._held:
                    self._take(storage)
        return out

    def reset_peak(self):
        """The most from now on."""
        self.peak = self.live

    def _take(self, storage):
        key, size = storage._cdata, storage.nbytes()
        self._held[key] = size
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._free, key)

    def _free(self, key):
        self.live -= self._held.pop(key)


def pretend_cuda(monkeypatch):
    """CPU tensors say that they are CUDA's, so that every launcher allocates as it does there; values are anything."""

    def mm(x, w, *, out=None, out_dtype=None):
        return x.new_zeros(x.shape[0], w.shape[1], dtype=out_dtype or x.dtype) if out is None else out

    def scaled_mm(x, w, *_, output_dtype, **__):
        return torch.zeros(x.shape[0], w.shape[1], dtype=output_dtype)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda kernel, grid: lambda *_, **__: None)
    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", lambda y, *_, out, **__: out)
    monkeypatch.setattr(functional, "scaled_mm", scaled_mm)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: type("", (), {"multi_processor_count": 132})
    )
    monkeypatch.setattr(decode_gemm, "_descriptor", lambda *_, **__: None)
    for name in ("blocks_agree", "rows_agree", "bf16_agrees", "w8a16_agrees"):
        monkeypatch.setattr(agreement, name, lambda *_: True)
