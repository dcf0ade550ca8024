"""Lets verl 0.9.1 train on a CPU: a platform, its FSDP2 engine there, and one process group where verl names two.

Imported in every process by VERL_USE_EXTERNAL_MODULES; verl knows GPUs and NPUs only.
"""

import functools
import types

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import PlatformRegistry


@PlatformRegistry.register("octavo_cpu")
class CPU(PlatformCUDA):
    """The host as verl's accelerator; Ray counts it as one GPU."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = types.SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 1,
        get_device_name=lambda *_: "cpu",
        current_device=lambda: "cpu",
        set_device=lambda *_: None,
        synchronize=lambda *_: None,
        empty_cache=lambda: None,
        ipc_collect=lambda: None,
        max_memory_allocated=lambda *_: 0,
        max_memory_reserved=lambda *_: 0,
        memory_allocated=lambda *_: 0,
        memory_reserved=lambda *_: 0,
        mem_get_info=lambda *_: (0, 0),
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
    )

    def is_available(self):
        return True

    def is_platform_available(self, use_smi_check=False):
        return True

    def current_device(self):
        return "cpu"

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    def manual_seed_all(self, seed):
        torch.manual_seed(seed)

    def empty_cache(self):
        pass

    def set_allocator_settings(self, settings):
        pass

    def communication_backend_name(self):
        return "gloo"

    def is_ipc_supported(self):
        return False

    def rollout_env_vars(self):
        return {}


def _named_once(init_process_group):
    """torch refuses "cpu:gloo,cpu:gloo", which verl makes of the device's name."""

    @functools.wraps(init_process_group)
    def named_once(backend=None, **arguments):
        return init_process_group(backend="gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **arguments)

    return named_once


torch.distributed.init_process_group = _named_once(torch.distributed.init_process_group)

from verl.workers.engine.base import EngineRegistry  # noqa: E402  (reads the platform when it is imported)
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402

EngineRegistry.register(model_type="language_model", backend="fsdp2", device="cpu")(FSDPEngineWithLMHead)
