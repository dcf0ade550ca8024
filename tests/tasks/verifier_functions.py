"""What the tests of the pool run in its workers."""

import os
import signal
import subprocess
import sys
import time

from octavo.tasks.verdict import Verdict


def correct(problem, text):
    return Verdict("correct", 1.0, text)


def loaded_torch():
    return "torch" in sys.modules


def worker_pid():
    return os.getpid()


def sleep_long():
    time.sleep(60)


def spin():
    while True:
        pass


def tower():
    return 9 ** (9 ** (9**9))


def take_memory():
    return [bytes(2**26) for _ in range(2**10)]


def recurse():
    return recurse()


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    os._exit(0)


def end():
    sys.exit(3)


def raise_error():
    raise KeyError("score")


def print_for_ever():
    while True:
        print("x" * 2**20)
        os.write(2, b"x" * 2**20)


def unpicklable():
    return lambda: None


def leave_children(mark):
    """A child that has left the group and the session, and one that has not, both for long."""
    subprocess.Popen([sys.executable, "-c", f"import time; time.sleep(60)  # {mark}"], start_new_session=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", f"import time; time.sleep(60)  # {mark}"])
        os._exit(0)
    spin()
