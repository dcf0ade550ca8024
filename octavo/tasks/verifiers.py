"""Checks in processes of their own: none can stall, crash or flood the run, and each has a time that it may take.

A check that is late is killed with everything it started, and its verdict is `timeout`; one whose worker is lost is
`crashed`. Neither is ever `wrong`. The pool starts with the first check and ends with `close`, or with this process.
"""

import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from octavo.tasks.sandbox import ALLOW_UNISOLATED
from octavo.tasks.verdict import Verdict
from octavo.tasks.verifier_worker import receive, send

SYMBOLIC = "octavo.tasks.answers_symbolic"
START_TIMEOUT_S = 120
"""For a worker to appear; loading modules on a busy machine takes seconds."""


@dataclass(frozen=True, kw_only=True)
class VerifierConfig:
    """Where completions are checked: in processes apart from the run, within these limits."""

    num_workers: int = 0
    """Processes; 0 is one for each CPU that this process may use, 16 at most."""
    timeout_s: float = 5.0
    """For one completion, seconds of wall clock; a later check is killed (outcome timeout)."""
    memory_mb: int = 4096
    """Address space of one worker, in MiB; a program in a completion has a limit of its own."""
    audit_samples: int = 32
    """Completions of each outcome that the run's folder keeps, the newest."""
    allow_unisolated: bool = False
    """Run programs although this kernel lets none be cut off from network and files."""

    def __post_init__(self) -> None:
        for name, least in (("num_workers", 0), ("memory_mb", 512), ("audit_samples", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}; got {getattr(self, name)}")
        if not 0.1 <= self.timeout_s <= 3600.0:
            raise ValueError(f"timeout_s lies between 0.1 and 3600; got {self.timeout_s}")


class VerifierPool:
    """Runs functions in worker processes.

    Args:
        config: VerifierConfig.
        modules: that every worker has loaded from the start, so that loading them is in nobody's time; also functions
            of rewards, as "file.py:name".
    """

    def __init__(self, config: VerifierConfig, modules: Sequence[str] = (SYMBOLIC,)) -> None:
        self.config = config
        self.num_workers = config.num_workers or min(16, len(os.sched_getaffinity(0)))
        self._threads = ThreadPoolExecutor(self.num_workers, thread_name_prefix="verifier")
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._template = _Template(config, modules)
        for _ in range(self.num_workers):
            self._idle.put(_Worker(self._template))
        weakref.finalize(self, _Template.close, self._template)

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Run `function(*arguments)` in a worker; both must pickle.

        Returns:
            A future that never raises but when it was cancelled: what the function returned, or a Verdict `timeout` or
            `crashed`.
        """
        return self._threads.submit(self._run, function, arguments)

    def close(self) -> None:
        """Drop what waits, kill what runs; no process is left when it returns."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._template.close()
        self._threads.shutdown(wait=True)

    def __enter__(self) -> "VerifierPool":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        worker = self._idle.get()
        try:
            return worker.run(function, arguments, self.config.timeout_s)
        except Exception as error:  # noqa: BLE001 - the future carries a verdict, whatever the machine refuses
            worker.kill()
            return Verdict("crashed", 0.0, f"no worker: {type(error).__name__}: {error}"[:500])
        finally:
            self._idle.put(worker)


class _Template:
    """The process that forks workers; started anew if it is lost."""

    def __init__(self, config: VerifierConfig, modules: Sequence[str]) -> None:
        self.config, self.modules = config, tuple(modules)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._orders: socket.socket | None = None
        self._closed = False

    def fork(self) -> tuple[int, socket.socket]:
        """A new worker: its process id and the connection to it."""
        with self._lock:
            if self._closed:
                raise OSError("the pool is closed")
            for attempt in range(2):
                if self._process is None or self._process.poll() is not None:
                    self._start()
                assert self._orders is not None
                ours, theirs = socket.socketpair()
                try:
                    socket.send_fds(self._orders, [b"+"], [theirs.fileno()])
                    number = self._orders.recv(8, socket.MSG_WAITALL)
                    if len(number) == 8:
                        return int.from_bytes(number, "little"), ours
                except OSError:
                    if attempt:
                        raise
                finally:
                    theirs.close()
                ours.close()
                self._stop()
            raise OSError("the template process does not start workers")

    def close(self) -> None:
        """Kill the template, and with it every worker."""
        with self._lock:
            self._closed = True
            self._stop()

    def _start(self) -> None:
        self._stop()
        self._orders, theirs = socket.socketpair()
        self._orders.settimeout(START_TIMEOUT_S)  # also for loading the modules
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; from octavo.tasks.verifier_worker import template; "
            f"template({theirs.fileno()}, {self.config.memory_mb * 2**20}, {self.modules!r})"
        )
        environment = {key: value for key, value in os.environ.items() if key != ALLOW_UNISOLATED}
        if self.config.allow_unisolated:
            environment[ALLOW_UNISOLATED] = "1"
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C in the terminal is for the run, which then closes the pool
        )
        theirs.close()

    def _stop(self) -> None:
        if self._orders is not None:
            self._orders.close()
        if self._process is not None:
            self._process.terminate()  # it ends its workers first
            try:
                self._process.wait(START_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._orders, self._process = None, None


class _Worker:
    """One worker process after another, seen from one thread at a time."""

    def __init__(self, template: _Template) -> None:
        self.template = template
        self.pid = 0
        self.connection: socket.socket | None = None

    def run(self, function: Callable[..., Any], arguments: tuple[Any, ...], timeout_s: float) -> Any:
        """What the function returns, or the verdict on it."""
        seed = zlib.crc32(pickle.dumps(arguments))  # the same random numbers for a completion, whichever worker has it
        request = pickle.dumps((timeout_s, seed, function, arguments))
        if self.connection is None:
            self.pid, self.connection = self.template.fork()
        try:
            self.connection.settimeout(timeout_s)
            send(self.connection, request)
            return pickle.loads(receive(self.connection))
        except TimeoutError:
            self.kill()
            return Verdict("timeout", 0.0, f"longer than {timeout_s:g} s")
        except (EOFError, OSError) as error:
            self.kill()
            return Verdict("crashed", 0.0, f"the worker was lost: {error}")

    def kill(self) -> None:
        """End the process and all that it started; the next check gets another."""
        if self.connection is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.connection.close()
        self.connection = None
