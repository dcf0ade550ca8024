"""Machine rows under machines that are not this one."""

import importlib.metadata
import tomllib
from pathlib import Path

import pytest
import torch

from octavo.check import machine
from octavo.check.machine import MINIMUM, PINNED, data_row, environment_rows, gpu_rows, package_rows, version_row

REPO = Path(__file__).resolve().parents[2]


def only(rows, name):
    (row,) = [row for row in rows if row.name == name]
    return row


@pytest.mark.parametrize(
    "version, status, step",
    [
        ("2.10.2", "FAIL", "pip install --upgrade 'torch>=2.11'"),
        ("2.11.0+cu130", "OK", ""),
        ("2.13.7", "OK", ""),
        ("2.14.0.dev20270101", "WARN", "make test"),
    ],
)
def test_versions_below_and_above_the_range(version, status, step):
    row = version_row("torch", version)
    assert row.status == status and step in row.next_step and version in row.detail


def test_ranges_and_pins_are_those_of_pyproject():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    for package, least in MINIMUM.items():
        assert f"{package}>={least}" in project["dependencies"]
    for package, pinned in PINNED.items():
        assert project["optional-dependencies"][package] == [f"{package}=={pinned}"]


def fake_gpu(monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (30 * 10**9, 40 * 10**9))
    monkeypatch.setattr(machine, "driver_version", lambda: "580.1")


@pytest.mark.parametrize("capability, status", [((8, 0), "WARN"), ((8, 9), "WARN"), ((9, 0), "OK"), ((10, 0), "WARN")])
def test_a_gpu_that_the_kernels_are_not_for_is_told(capability, status, monkeypatch):
    fake_gpu(monkeypatch, capability)
    (row,) = gpu_rows()
    assert row.status == status
    for text in ("Some GPU", f"{capability[0]}.{capability[1]}", "30.0 GB free of 40.0 GB", "driver 580.1"):
        assert text in row.detail
    assert ("take an H100 or H200; here kernels=reference, device=cpu" in row.next_step) == (status == "WARN")


def test_a_gpu_without_triton_is_told(monkeypatch):
    fake_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(machine, "HAS_TRITON", False)
    (row,) = gpu_rows()
    assert (row.status, row.next_step) == ("WARN", "pip install triton") and "need triton" in row.detail


def test_a_gpu_that_torch_cannot_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "driver_version", lambda: "580.1")
    (row,) = gpu_rows()
    assert row.status == "WARN" and "580.1" in row.detail and "CUDA build" in row.next_step


def test_a_plug_in_of_another_version_is_a_warning(monkeypatch):
    def version(package):
        if package == "triton":
            raise importlib.metadata.PackageNotFoundError(package)
        return "0.9.1" if package == "verl" else "0.1"

    monkeypatch.setattr(importlib.metadata, "version", version)
    rows = list(package_rows())
    assert only(rows, "vllm").status == "WARN" and "vllm==0.24.0" in only(rows, "vllm").next_step
    assert only(rows, "verl").status == "OK"
    assert "not installed" in only(rows, "triton").detail and "pip install triton" in only(rows, "triton").detail


@pytest.mark.parametrize(
    "name, harmless, trap",
    [
        ("GOMP_SPINCOUNT", "3000", "infinity"),
        ("OMP_NUM_THREADS", "1", "4096"),
        ("OMP_NUM_THREADS", "1", "4,2"),
        ("HF_HUB_OFFLINE", "0", "1"),
    ],
)
def test_environment_traps(name, harmless, trap, monkeypatch):
    monkeypatch.setenv(name, harmless)
    assert only(environment_rows(), name).status == "OK"
    monkeypatch.setenv(name, trap)
    row = only(environment_rows(), name)
    assert row.status == "WARN" and row.next_step


def test_data_sets_are_found(tmp_path, monkeypatch):
    for file in ("whole/train.jsonl.gz", "whole/test.jsonl", "half/test.jsonl", "empty/README.md"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("")
    monkeypatch.setenv("OCTAVO_DATA", str(tmp_path))
    assert data_row().detail == f"{tmp_path}: 2 data sets; train and test: whole"
    monkeypatch.setenv("OCTAVO_DATA", str(tmp_path / "no"))
    assert data_row().status == "WARN"


def test_the_limit_of_a_container_counts(monkeypatch):
    files = {"/sys/fs/cgroup/memory.max": "5000000\n", "/sys/fs/cgroup/memory.current": "2000000\n"}
    files["/sys/fs/cgroup/memory.stat"] = "anon 1400000\ninactive_file 500000\n"  # files that may be forgotten
    is_file, read_text = Path.is_file, Path.read_text
    monkeypatch.setattr(Path, "is_file", lambda path: str(path) in files or is_file(path))
    monkeypatch.setattr(Path, "read_text", lambda path: files.get(str(path)) or read_text(path))
    assert machine.memory_bytes() == (3_500_000, 5_000_000)


def test_free_memory_is_below_the_total():
    free, total = machine.memory_bytes()
    assert 10**7 < free < total < 10**14
