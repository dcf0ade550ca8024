"""A folder for weights on their way, which goes with the process, however it ends: memory that nobody frees is dear."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

PREFIX = "octavo_vllm_"
LOCK = "lock"


class TransferFolder:
    """A new folder in `parent`, held by a lock; folders there that no process holds any more are removed.

    Raises:
        ValueError: parent is no folder that can be written.
    """

    def __init__(self, parent: str) -> None:
        for left in Path(parent).glob(f"{PREFIX}*/{LOCK}"):
            _remove_if_left(left)
        try:
            hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=parent))  # seen once it is locked
            descriptor = os.open(hidden / LOCK, os.O_CREAT | os.O_RDWR)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            self.path = hidden.with_name(hidden.name.removeprefix("."))
            hidden.rename(self.path)
        except OSError as error:
            raise ValueError(
                f"rollout.engine.transfer_dir={parent!r} cannot take the weights: {error.strerror}. Give a folder "
                f"that can be written, on a disk or in memory"
            ) from error
        self._end = weakref.finalize(self, _end, self.path, descriptor)

    def check_room(self, folder: Path) -> None:
        """Refuse a disk without room for another version of what is in `folder`.

        Raises:
            ValueError: as said.
        """
        size, free = sum(file.stat().st_size for file in folder.iterdir()), shutil.disk_usage(self.path).free
        if free < size:
            raise ValueError(
                f"rollout.engine.transfer_dir={str(self.path.parent)!r} has {free / 1e9:.2f} GB free beside the first "
                f"version of the weights, and the next one takes {size / 1e9:.2f} GB. Make room, or give another"
            )


def _remove_if_left(lock: Path) -> None:
    with suppress(OSError):  # another user's, or gone meanwhile
        descriptor = os.open(lock, os.O_RDWR | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent)
        finally:
            os.close(descriptor)


def _end(path: Path, descriptor: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(descriptor)
