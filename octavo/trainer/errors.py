"""What went wrong, in one line for the user."""

from __future__ import annotations


def reason(error: Exception) -> str:
    """The message on one line.

    What the operating system refused stands without its number (`runs: Permission denied`); an error whose message
    alone says little has its kind before it (`KeyError: 'added_tokens'`).
    """
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    text = " ".join(str(error).split())
    return text if isinstance(error, OSError | ValueError | RuntimeError) else f"{type(error).__name__}: {text}"
