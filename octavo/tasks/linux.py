"""The few calls of the Linux kernel that keep processes in bounds and that Python 3.11 has no name for."""

import ctypes
import os
import signal
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38


def prctl(option: int, value: int) -> None:
    """prctl(2); OSError where the kernel refuses."""
    check(libc().prctl(option, value, 0, 0, 0), "prctl")


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Get a signal when the thread that started this process ends; exit if `parent`, its process, is gone already."""
    prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


def children() -> set[int]:
    """Living children of this process; what its descendants left behind too, if it is a sub-reaper."""
    found = set()
    for name in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            state, parent = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                found.add(int(name))
    return found


def kill_children(but: Collection[int] = ()) -> None:
    """Kill all children, and theirs as they are handed on; those that fork as fast are met again until none is left."""
    empty = 0
    while empty < 2:  # one look may miss a child that is being handed on
        strays = children() - set(but)
        empty = 0 if strays else empty + 1
        for pid in strays:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def libc() -> ctypes.CDLL:
    """The C library of this process."""
    return ctypes.CDLL(None, use_errno=True)


def check(result: int, call: str) -> None:
    """OSError, with the name of the call, where it returned -1."""
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
