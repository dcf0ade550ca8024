"""The machine: versions, processors, memory, GPUs, optional packages, data folders, environment variables."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch
from packaging.version import Version

from octavo.check.rows import Row, Status, size_text
from octavo.kernels.device import CAPABILITY
from octavo.kernels.triton_shim import HAS_TRITON
from octavo.trainer.host_memory import memory_bytes

MINIMUM = {"torch": "2.11", "transformers": "5.9"}
"""As in pyproject.toml."""
NEWEST_TRIED = {"torch": "2.13", "transformers": "5.24"}
"""Minor versions that the tests have run with."""
OPTIONAL = {
    "triton": "kernels on a GPU",
    "datasets": "tasks read from the Hugging Face hub",
    "tensorboard": "event files of a run",
    "matplotlib": "pictures in reports",
    "wandb": "tracking with Weights & Biases",
    "vllm": "rollout by vLLM",
    "verl": "training on a cluster",
    "torchao": "comparison with its FP8 training",
}
PINNED = {"vllm": "0.24.0", "verl": "0.9.1"}
"""As in pyproject.toml: the plug-ins use what moves between releases."""
LOW_MEMORY_BYTES = 4e9
LOW_DISK_BYTES = 2e9
LONGEST_SPIN = 1_000_000


def machine_rows() -> Iterator[Row]:
    """Python, torch, transformers, processors, memory, disk, GPUs."""
    yield _row("python", "OK", platform.python_version())
    build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    yield version_row("torch", torch.__version__, f", {build}")
    yield version_row("transformers", importlib.metadata.version("transformers"))
    cores = usable_cores()
    yield _row("processors", "OK", f"{cores} usable, torch uses {torch.get_num_threads()} threads")
    free, total = memory_bytes()
    detail = f"{size_text(free)} free of {size_text(total)}"
    if free < LOW_MEMORY_BYTES:
        yield _row("memory", "WARN", detail, "close other programs; a 0.6 B model takes some 20 GB to train here")
    else:
        yield _row("memory", "OK", detail)
    disk = shutil.disk_usage(".").free
    detail = f"{size_text(disk)} free in {Path.cwd()}"
    if disk < LOW_DISK_BYTES:
        yield _row("disk", "WARN", detail, "make room, or give an output_dir on another disk")
    else:
        yield _row("disk", "OK", detail)
    yield from gpu_rows()


def version_row(package: str, version: str, suffix: str = "") -> Row:
    """Whether a version lies in the range that is supported and tried."""
    least, newest = MINIMUM[package], NEWEST_TRIED[package]
    found = Version(Version(version).base_version)
    if found < Version(least):
        step = f"pip install --upgrade '{package}>={least}'"
        return _row(package, "FAIL", f"{version}{suffix}; octavo needs {least} or later", step)
    if found.release[:2] > Version(newest).release[:2]:
        step = f"run `make test`, or pip install '{package}=={newest}.*'"
        return _row(package, "WARN", f"{version}{suffix}; newer than {newest}, the newest tried", step)
    return _row(package, "OK", f"{version}{suffix} (supported: {least} to {newest})")


def gpu_rows() -> Iterator[Row]:
    """Each GPU that torch can use, and one that it cannot."""
    driver = driver_version()
    if not torch.cuda.is_available():
        if driver is not None:
            detail = f"driver {driver} is there, but torch {torch.__version__} cannot use it"
            yield _row("GPU", "WARN", detail, "install a CUDA build of torch that this driver supports (pytorch.org)")
        else:
            step = "take a small model (make demo), or a machine with a GPU"
            yield _row("GPU", "WARN", "none: FP8 is simulated by exact sums on the CPU, right but slow", step)
        return
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        free, total = torch.cuda.mem_get_info(index)
        detail = (
            f"{torch.cuda.get_device_name(index)}, compute capability {capability[0]}.{capability[1]}, "
            f"{size_text(free)} free of {size_text(total)}, driver {driver or 'unknown'}"
        )
        if capability[0] != CAPABILITY:
            step = "take an H100 or H200; here kernels=reference, device=cpu, or precision.recipe=fp32"
            yield _row(f"GPU {index}", "WARN", f"{detail}; the kernels for BF16 and FP8 are for Hopper, 9.0", step)
        elif not HAS_TRITON:
            step = "pip install triton"
            yield _row(f"GPU {index}", "WARN", f"{detail}; the kernels need triton, which is not installed", step)
        else:
            yield _row(f"GPU {index}", "OK", f"{detail}; the kernels run here")


def package_rows() -> Iterator[Row]:
    """Optional packages: their version, or what is missing without them."""
    for package, purpose in OPTIONAL.items():
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            wanted = f"{package}=={PINNED[package]}" if package in PINNED else package
            detail = f"not installed; only for {purpose} (pip install {wanted})"
            yield Row(group="packages", name=package, status="OK", detail=detail)
            continue
        pinned = PINNED.get(package)
        if pinned is not None and Version(version).base_version != pinned:
            detail, step = f"{version}; {purpose} is made for {pinned}", f"pip install {package}=={pinned}"
            yield Row(group="packages", name=package, status="WARN", detail=detail, next_step=step)
        else:
            yield Row(group="packages", name=package, status="OK", detail=f"{version}, for {purpose}")


def environment_rows() -> Iterator[Row]:
    """Where data sets are looked for, and variables that are known to surprise."""
    yield data_row()
    cores = usable_cores()
    spin = os.environ.get("GOMP_SPINCOUNT")
    if spin is None or (spin.isdecimal() and int(spin) <= LONGEST_SPIN):
        yield _environment("GOMP_SPINCOUNT", "OK", "not set" if spin is None else spin)
    else:
        step = "unset it: octavo sets 3000, so that waiting threads do not starve each other"
        yield _environment("GOMP_SPINCOUNT", "WARN", f"{spin}: threads spin long while they wait", step)
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads is None:
        yield _environment("OMP_NUM_THREADS", "OK", "not set")
    elif threads.isdecimal() and 0 < int(threads) <= cores:
        yield _environment("OMP_NUM_THREADS", "OK", threads)
    else:
        step = f"unset it, or set it to {cores}"
        yield _environment("OMP_NUM_THREADS", "WARN", f"{threads}, with {cores} usable processors", step)
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        step = "give folders as model.path and task.path, or unset it"
        yield _environment("HF_HUB_OFFLINE", "WARN", "set: hub ids are found in the local cache only", step)
    else:
        yield _environment("HF_HUB_OFFLINE", "OK", "not set")
    if os.environ.get("TRITON_INTERPRET") == "1":
        step = "unset it: the interpreter rounds E4M3 wrongly"
        yield _environment("TRITON_INTERPRET", "WARN", "set: Triton kernels are interpreted", step)


def data_row() -> Row:
    """The folder of data sets, and which of them are there."""
    named = os.environ.get("OCTAVO_DATA")
    folder = Path(named or "../shared/data")
    if not folder.is_dir():
        if named:
            step = "name a folder with one folder a data set, or unset it"
            return _environment("OCTAVO_DATA", "WARN", f"{named} is no folder", step)
        return _environment("OCTAVO_DATA", "OK", f"not set, and no {folder}: data sets come from task.path or the hub")
    sets = {path.name: {file.name.partition(".")[0] for file in path.glob("*.jsonl*")} for path in folder.iterdir()}
    whole = sorted(name for name, splits in sets.items() if {"train", "test"} <= splits)
    source = str(folder) if named else f"not set, so {folder}"
    num_sets = sum(bool(splits) for splits in sets.values())
    return _environment(
        "OCTAVO_DATA", "OK", f"{source}: {num_sets} data sets; train and test: {', '.join(whole) or 'none'}"
    )


def usable_cores() -> int:
    """Processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def driver_version() -> str | None:
    """Version of the NVIDIA driver as nvidia-smi gives it; None where there is none."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return None
    return next(iter(answer.split()), None)


def _row(name: str, status: Status, detail: str, next_step: str = "") -> Row:
    return Row(group="machine", name=name, status=status, detail=detail, next_step=next_step)


def _environment(name: str, status: Status, detail: str, next_step: str = "") -> Row:
    return Row(group="environment", name=name, status=status, detail=detail, next_step=next_step)
