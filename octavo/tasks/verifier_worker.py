"""The processes behind `VerifierPool`: a template that forks workers, and the worker that runs one check at a time.

The template has loaded what checks need, so a new worker is there in milliseconds. Neither loads torch. Both die with
the process that started them, however it ends.
"""

import gc
import importlib
import os
import pickle
import random
import resource
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from octavo.tasks.linux import PR_SET_CHILD_SUBREAPER, children, die_with_parent, kill_children, prctl
from octavo.tasks.rewards import load_function
from octavo.tasks.verdict import Verdict

MAX_MESSAGE_BYTES = 64 * 2**20
_LENGTH = struct.Struct("<Q")


def template(descriptor: int, memory_bytes: int, modules: Sequence[str]) -> None:
    """Fork a worker for every connection that comes in over the socket, until it closes.

    Args:
        descriptor: of the socket; a message is one byte with a connection.
        memory_bytes: address space of a worker.
        modules: to load first, as `load_first`; one that fails will fail again where it is used, and be told there.
    """
    signal.signal(signal.SIGTERM, _stop)
    die_with_parent(os.getppid(), signal.SIGTERM)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the workers
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a killed worker leaves behind comes here, to be killed
    orders = socket.socket(fileno=descriptor)
    for name in modules:
        with suppress(Exception):
            load_first(name)
    gc.freeze()  # a worker's collections leave these pages shared
    try:
        try:
            _fork_on_demand(orders, memory_bytes)
        finally:  # of a pool that is killed the socket closes first, and its signal comes while the children are killed
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    finally:
        kill_children()


def _fork_on_demand(orders: socket.socket, memory_bytes: int) -> None:
    """Until the socket closes."""
    workers: set[int] = set()
    while True:
        message, connections, _, _ = socket.recv_fds(orders, 1, 1)
        if not message:
            return
        workers &= children()
        kill_children(but=workers)
        workers.add(_fork_worker(orders, connections[0], memory_bytes))


def load_first(name: str) -> None:
    """Import a module and call its `warm_up`, if it has one; or load the function of a reward, "file.py:name"."""
    if ":" in name:
        load_function(name)
    else:
        getattr(importlib.import_module(name), "warm_up", lambda: None)()


def _stop(number: int, frame: object) -> None:
    """End by way of `finally`, once: a second signal must not cut that short."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit()


def _fork_worker(orders: socket.socket, connection: int, memory_bytes: int) -> int:
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            die_with_parent(parent)
            os.setpgid(0, 0)
            orders.close()
            _serve(socket.socket(fileno=connection), memory_bytes)
        finally:
            os._exit(0)
    os.close(connection)
    orders.sendall(_LENGTH.pack(child))
    return child


def send(connection: socket.socket, message: bytes) -> None:
    """One message, its length first."""
    connection.sendall(_LENGTH.pack(len(message)) + message)


def receive(connection: socket.socket) -> bytes:
    """The next message.

    Raises:
        EOFError: the other side is gone, or sends what is none.
    """
    (length,) = _LENGTH.unpack(_receive_exactly(connection, _LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        raise EOFError(f"a message of {length} bytes")
    return _receive_exactly(connection, length)


def _receive_exactly(connection: socket.socket, length: int) -> bytes:
    parts = []
    while length:
        part = connection.recv(min(length, 2**20))
        if not part:
            raise EOFError("the connection is closed")
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def _serve(connection: socket.socket, memory_bytes: int) -> None:
    """Run checks until the pool closes the connection."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.setrecursionlimit(2000)
    while True:
        try:
            request = receive(connection)
        except EOFError:
            return
        send(connection, pickle.dumps(_answer(request)))


def _answer(request: bytes) -> Any:
    """What the function returned, or the verdict on what it raised."""
    try:
        timeout_s, seed, function, arguments = pickle.loads(request)
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(used.ru_utime + used.ru_stime + timeout_s) + 2  # the pool is earlier, unless it is stopped
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.getrlimit(resource.RLIMIT_CPU)[1]))
        random.seed(seed)
        return function(*arguments)
    except MemoryError:
        return Verdict("crashed", 0.0, "out of memory")
    except RecursionError:
        return Verdict("crashed", 0.0, "recursion too deep")
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - whatever a check raises is its detail
        return Verdict("crashed", 0.0, f"{type(error).__name__}: {error}"[:500])
