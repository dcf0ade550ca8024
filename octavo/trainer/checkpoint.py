"""Checkpoint folders: tensors in safetensors, the rest in JSON, a manifest with the SHA-256 of each file.

    RUN/checkpoints/step_000020/
        policy-00000.safetensors ...   tensors, at most SHARD_BYTES a file
        state.json                     numbers and text
        manifest.json                  size and SHA-256 of every other file

A folder gets its name only when it is whole and on disk, so a process that is killed leaves the last good one. Reading
checks the manifest first; a folder that fails is set aside and the next older one is taken.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = 2
"""Of the folder; another number is refused."""
SHARD_BYTES = 4 * 2**30
"""Most bytes of tensors in one file, and so the memory that writing them takes beside the tensors."""
FOLDER = "checkpoints"
_NAME = re.compile(r"step_(\d{6,})(-before-evaluation)?")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the run is saved whole, so that it can go on after whatever stops it."""

    interval: int = 20
    """Steps between checkpoints; the end of the run, Ctrl-C and SIGTERM make one too. 0 makes only those."""
    keep_last: int = 2
    """Newest checkpoints that stay on disk."""
    keep_best: bool = True
    """Save whenever the evaluation accuracy is the run's best, and keep that checkpoint too."""

    def __post_init__(self) -> None:
        for name, least in (("interval", 0), ("keep_last", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint on disk."""

    path: Path
    state: dict[str, Any]
    """What was given to `write_checkpoint`, as JSON gives it back."""

    def holds(self, group: str) -> bool:
        """Whether it has tensors of a group."""
        return any(self.path.glob(f"{group}-*.safetensors"))

    def tensors(self, group: str) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor on the CPU) of a group, one at a time."""
        for file in sorted(self.path.glob(f"{group}-*.safetensors")):
            with safe_open(file, framework="pt") as reader:
                for name in reader.keys():
                    yield name, reader.get_tensor(name)

    @torch.no_grad()
    def copy_into(self, group: str, targets: Mapping[str, Tensor]) -> None:
        """Fill `targets` in place with the group's tensors of the same names.

        Raises:
            ValueError: names or shapes differ, so the checkpoint belongs to another model or recipe.
        """
        missing = dict(targets)
        for name, tensor in self.tensors(group):
            target = missing.pop(name, None)
            if target is None or target.shape != tensor.shape or target.dtype != tensor.dtype:
                wanted = "nothing of that name" if target is None else f"{target.dtype} {tuple(target.shape)}"
                raise ValueError(
                    f"{self.path} holds {name} as {tensor.dtype} {tuple(tensor.shape)}, and this run has {wanted}: it "
                    f"was left by another model, recipe or optimizer. Give model.path, precision and the formats of "
                    f"optimizer as the run had them"
                )
            target.copy_(tensor)
        if missing:
            raise ValueError(
                f"{self.path} has no {next(iter(missing))!r}: it was left by another model, recipe or optimizer. "
                f"Give model.path, precision and the formats of optimizer as the run had them"
            )


def checkpoint_name(step: int, before_evaluation: bool = False) -> str:
    """Folder of the state after `step` steps; before the last one's evaluation, when that was interrupted."""
    return f"step_{step:06d}" + ("-before-evaluation" if before_evaluation else "")


def write_checkpoint(path: Path, groups: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any]) -> None:
    """Write a checkpoint, whole or not at all.

    Args:
        path: RUN/checkpoints/NAME.
        groups: {group: {name: tensor}}.
        state: what JSON can hold; floats come back to the bit.

    Raises:
        OSError: the disk is full or broken, or one of that name is there; nothing that was there is lost.
    """
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        for group, tensors in groups.items():
            for number, shard in enumerate(_shards(tensors)):
                _save_tensors(partial / f"{group}-{number:05d}.safetensors", shard)
        (partial / "state.json").write_text(json.dumps(state), encoding="utf-8")
        files = sorted(partial.iterdir())
        for file in files:
            _sync(file)
        manifest = {file.name: {"bytes": file.stat().st_size, "sha256": _sha256(file)} for file in files}
        text = json.dumps({"format": FORMAT, "files": manifest}, indent=1)
        (partial / "manifest.json").write_text(text, encoding="utf-8")
        _sync(partial / "manifest.json")
        _sync(partial)
        partial.rename(path)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync(path.parent)


def read_checkpoint(path: Path) -> Checkpoint:
    """Check every file against the manifest and read the state.

    Raises:
        ValueError: a file is missing, shorter or longer than written, or differs by a bit; or the format is another.
    """
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        version, files = manifest["format"], manifest["files"]
        expected = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except OSError as error:
        raise ValueError(f"{path / 'manifest.json'} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path / 'manifest.json'} is damaged") from error
    if version != FORMAT:
        raise ValueError(f"{path} has format {version}, and this octavo reads {FORMAT}: use the octavo that wrote it")
    for name, (size, digest) in expected.items():
        file = path / name
        try:
            if not file.is_file():
                raise ValueError(f"{file} is missing")
            if file.stat().st_size != size:
                raise ValueError(f"{file} has {file.stat().st_size} bytes instead of {size}")
            if _sha256(file) != digest:
                raise ValueError(f"{file} is damaged: its SHA-256 is not the manifest's")
        except OSError as error:
            raise ValueError(f"{file} cannot be read: {error.strerror}") from error
    if "state.json" not in expected:
        raise ValueError(f"{path / 'manifest.json'} names no state.json")
    return Checkpoint(path=path, state=json.loads((path / "state.json").read_bytes()))


def list_checkpoints(run_folder: Path) -> list[Path]:
    """Checkpoints of a run by name, newest first, good or not."""
    folder = run_folder / FOLDER
    found = [(match, path) for path in folder.glob("step_*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda pair: (int(pair[0][1]), pair[0][2] is None), reverse=True)]


def steps_done(path: Path) -> int:
    """Steps behind a checkpoint, from its name."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def newest_checkpoint(run_folder: Path, most_steps: int | None = None) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and one line for each newer one that is not.

    Args:
        run_folder: of the run.
        most_steps: leave out checkpoints of more steps.

    Raises:
        ValueError: there are checkpoints and none is whole.
    """
    damage: list[str] = []
    for path in list_checkpoints(run_folder):
        if most_steps is not None and steps_done(path) > most_steps:
            continue
        try:
            return read_checkpoint(path), damage
        except ValueError as error:
            damage.append(str(error))
    if damage:
        raise ValueError(
            f"none of the {len(damage)} checkpoints of {run_folder} is whole: {'; '.join(damage)}. "
            f"overwrite=true without --resume starts the run anew"
        )
    return None, []


def set_aside(run_folder: Path, newer_than: Path) -> None:
    """Rename the checkpoints newer than a good one, which are damaged, to NAME.damaged; remove leftovers of a kill."""
    for path in list_checkpoints(run_folder):
        if path.name == newer_than.name:
            break
        target = path.with_name(path.name + ".damaged")
        shutil.rmtree(target, ignore_errors=True)
        path.rename(target)
    for pattern in ("*.partial", "*.removed"):
        for path in newer_than.parent.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def prune(run_folder: Path, keep_last: int, best: str | None, rollback_limit: int | None = None) -> None:
    """Remove all but the newest `keep_last` checkpoints, the one named `best`, and those that a rollback may need.

    The latter are the newest two of at most `rollback_limit` steps, and the oldest of more, which will follow them.
    """
    paths = list_checkpoints(run_folder)
    kept = {path.name for path in paths[:keep_last]} | {best}
    if rollback_limit is not None:
        sound = [path.name for path in paths if steps_done(path) <= rollback_limit]
        later = [path.name for path in paths if steps_done(path) > rollback_limit]
        kept |= {*sound[:2], *later[-1:]}
    for path in paths:
        if path.name not in kept:
            _remove(path)


def remove_newer(run_folder: Path, most_steps: int) -> None:
    """Remove the checkpoints of more steps."""
    for path in list_checkpoints(run_folder):
        if steps_done(path) > most_steps:
            _remove(path)


def _remove(path: Path) -> None:
    """Out of sight first, so that a kill in between leaves no half checkpoint under its name."""
    hidden = path.with_name(path.name + ".removed")
    shutil.rmtree(hidden, ignore_errors=True)
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _shards(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Tensors on the CPU, in order, at most SHARD_BYTES at a time (a larger one by itself)."""
    shard: dict[str, Tensor] = {}
    room = SHARD_BYTES
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if shard and size > room:
            yield shard
            shard, room = {}, SHARD_BYTES
        shard[name] = tensor.detach().to("cpu").contiguous()
        room -= size
    if shard:
        yield shard


def _save_tensors(file: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file(tensors, file)
    except SafetensorError as error:  # its own class for a full disk
        raise OSError(None, str(error), str(file)) from error


def _sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
