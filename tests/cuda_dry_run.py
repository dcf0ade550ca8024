"""The CUDA path on a CPU, for what it allocates: kernels that write nothing, products that are not computed."""

import weakref

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import KernelInterface

from octavo.kernels import agreement, decode_gemm, lm_head
from octavo.rollout import decode, engine, sampler
from octavo.trainer import run


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
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(decode_gemm, "_descriptor", lambda *_, **__: None)
    for module in (engine, decode):
        monkeypatch.setattr(module, "has_kernel", lambda x: False)  # no graphs, and what is drawn is kept
    for name in ("blocks_agree", "rows_agree", "bf16_agrees", "few_bf16_agree", "w8a16_agrees"):
        monkeypatch.setattr(agreement, name, lambda *_: True)


def pretend_finite(monkeypatch):
    """What no kernel writes is 0, and every sampled token is 1: a whole training step can run."""
    full = torch.full
    monkeypatch.setattr(
        torch, "full", lambda size, value, **options: full(size, value if value == value else 0, **options)
    )
    monkeypatch.setattr(torch, "empty", lambda *size, **options: torch.zeros(*size, **options))
    monkeypatch.setattr(torch, "empty_like", lambda x, **options: torch.zeros_like(x, **options))

    def draw_tokens(logits, *_):
        lm_head.combined(*lm_head.sums_of(logits))
        return torch.ones(len(logits), dtype=torch.int64), torch.zeros(len(logits))

    monkeypatch.setattr(sampler, "draw_tokens", draw_tokens)
    for name in ("check_live", "check_observed"):  # which look at numbers
        monkeypatch.setattr(run, name, lambda *_: None)


def pretend_to_measure(monkeypatch, allocations):
    """torch.cuda tells of these allocations."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocations.live)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: allocations.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: allocations.reset_peak())
