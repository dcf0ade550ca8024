"""Files that are written whole or not at all."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def check_output(path: Path, option: str = "--output") -> None:
    """Refuse what could not be written, before any work.

    Raises:
        ValueError: its folder is missing, or it is no regular file.
    """
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{option} {path} lies in a folder that does not exist. Make it, or give another file")
    if path.is_symlink() or path.exists() and not path.is_file():
        raise ValueError(f"{option} {path} is a link, folder or device, and would be replaced. Give a plain file")


def write_whole(path: Path, text: str) -> None:
    """Write text, UTF-8; an earlier file stays as it is until the new one is complete.

    Raises:
        ValueError: the file cannot be written.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):  # a read-only disk refuses this too
            partial.unlink(missing_ok=True)
        raise ValueError(f"{path} cannot be written: {error.strerror}. Make room, or give another") from error
