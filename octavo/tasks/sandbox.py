"""Runs untrusted programs cut off from the machine: no network, no files but the interpreter's, no way out.

Namespaces of the kernel do it (mounts, processes, network, users), with limits on memory, CPU, file size, open files
and processes; everything that a program started is gone when its sandbox is closed. Where the kernel refuses, only
the limits are left, and a sandbox starts only if that was allowed.
"""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

ALLOW_UNISOLATED = "OCTAVO_ALLOW_UNISOLATED"
"""Environment variable; 1 lets programs run without isolation where the kernel allows none."""
CHILD, PARTS = (str(Path(__file__).with_name(name)) for name in ("sandbox_child.py", "code_parts.py"))


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one sandbox."""

    cpu_s: int = 60
    """CPU time of a process."""
    memory_mb: int = 1024
    """Address space of a process, in MiB."""
    disk_mb: int = 16
    """All files that the program writes, in MiB; they are in memory and vanish with it."""
    num_processes: int = 32
    """Processes and threads at a time."""


class Sandbox:
    """One isolated process and what it starts.

    Args:
        part: function of `code_parts` that runs inside.
        connections: its sockets; this process's copies are closed.
        limits: Limits.
        stdin: descriptor of its standard input; None for an empty one.
        stdout: whether its output is kept, to be read from the descriptor `stdout`.

    Raises:
        OSError: the kernel refuses isolation, and it is not allowed to do without.
    """

    def __init__(
        self,
        part: Literal["candidate", "judge", "program"],
        connections: list[socket.socket],
        limits: Limits,
        stdin: int | None = None,
        stdout: bool = False,
    ) -> None:
        self._folder = ""  # of its files, where it is not isolated
        told, tells = os.pipe()
        self._status = open(told, "rb", buffering=0)
        nothing = os.open(os.devnull, os.O_RDWR)
        self.stdout, prints = os.pipe() if stdout else (-1, nothing)
        config = {
            "root": _mount_point(),
            "visible": _visible(),
            "part": part,
            "allow_unisolated": os.environ.get(ALLOW_UNISOLATED) == "1",
            **vars(limits),
        }
        descriptors = [tells, nothing if stdin is None else stdin, prints]
        descriptors += [connection.fileno() for connection in connections]
        try:
            _template(os.getpid()).order(config, descriptors)
        except OSError:
            _template.cache_clear()  # it is gone; the next sandbox starts another
            raise
        finally:
            for descriptor in {tells, nothing, prints}:
                os.close(descriptor)
            for connection in connections:
                connection.close()
        number, _, said = self._status.readline().decode(errors="replace").strip().partition(" ")
        self._pid = int(number or 0)
        if not said.startswith("ready"):
            self.close()
            raise OSError(f"no sandbox: {said or 'it did not start'}")
        self._folder = said.removeprefix("ready").strip()

    def wait(self, deadline: float) -> int:
        """The exit status once it has ended: 128 and the number of the signal for a process that was killed.

        Raises:
            TimeoutError: it has not ended when time.monotonic() reaches the deadline.
        """
        if not select.select([self._status], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise TimeoutError
        return int(self._status.read() or 128 + signal.SIGKILL)

    def close(self) -> None:
        """Kill what still runs."""
        if self._pid:
            with suppress(ProcessLookupError):
                os.killpg(self._pid, signal.SIGKILL)
        self._status.read()  # ends when the process is gone
        self._status.close()
        if self.stdout >= 0:
            os.close(self.stdout)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Template:
    """The process that forks sandboxes, with everything loaded and nothing in it that a program must not see."""

    def __init__(self) -> None:
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", CHILD, str(theirs.fileno()), PARTS],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={},
            start_new_session=True,
        )
        theirs.close()

    def order(self, config: dict, descriptors: list[int]) -> None:
        """Start a sandbox."""
        socket.send_fds(self._orders, [json.dumps(config).encode()], descriptors)


@lru_cache(maxsize=1)
def _template(pid: int) -> _Template:
    """This process's own; `pid` keeps a forked one from using its parent's."""
    return _Template()


@lru_cache(maxsize=1)
def refusal() -> str | None:
    """Why this machine cannot isolate a program; None if it can. Starts one to find out."""
    if not sys.platform.startswith("linux"):
        return f"programs are isolated by Linux namespaces, and this is {sys.platform}"
    ours, theirs = socket.socketpair()
    with ours:
        allowed = os.environ.pop(ALLOW_UNISOLATED, None)
        try:
            Sandbox("program", [theirs], Limits()).close()
        except OSError as error:
            return str(error)
        finally:
            if allowed is not None:
                os.environ[ALLOW_UNISOLATED] = allowed
    return None


@lru_cache(maxsize=1)
def _mount_point() -> str:
    """An empty folder over which each sandbox mounts its own files, seen by nobody else; so one is enough for all."""
    path = Path(tempfile.gettempdir()) / f"octavo-sandbox-{os.getuid()}"
    path.mkdir(exist_ok=True)
    return str(path)


@lru_cache(maxsize=1)
def _visible() -> list[str]:
    """What a program sees of the file system: the interpreter, its libraries, and three devices."""
    interpreter = Path(sys.executable).resolve().parent
    wanted = ["/usr/lib", "/usr/lib64", "/usr/bin", "/lib", "/lib64", "/bin", sys.base_prefix, str(interpreter)]
    wanted += [f"/dev/{name}" for name in ("null", "zero", "urandom")]
    found: list[str] = []
    for path in wanted:
        covered = any(path == other or path.startswith(other + "/") for other in found)
        if os.path.exists(path) and not covered and path != "/":
            found.append(path)
    return found


def exit_reason(status: int) -> str:
    """What an exit status says."""
    from octavo.tasks.sandbox_child import OUT_OF_MEMORY

    if status == OUT_OF_MEMORY:
        return "out of memory"
    with suppress(ValueError):
        return f"killed by {signal.Signals(status - 128).name}"
    return f"exit status {status}"
