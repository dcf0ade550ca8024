"""All findings in order: this machine, then its numbers, then one configuration if there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from octavo.check.exact_rollout import exactness_rows
from octavo.check.machine import environment_rows, machine_rows, package_rows
from octavo.check.numerics import number_rows
from octavo.check.rows import Row
from octavo.check.run_config import config_rows
from octavo.kernels.device import choose_kernels, suits_kernels


def check_rows(config: Path | None, overrides: list[str]) -> Iterator[Row]:
    """Every row, each as soon as it is known."""
    yield from machine_rows()
    yield from package_rows()
    yield from environment_rows()
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        choose_kernels("by_device" if device == "cpu" or suits_kernels(device) else "reference")
        yield from number_rows(device)
        yield from exactness_rows(device)
    if config is not None:
        yield from config_rows(config, overrides)
