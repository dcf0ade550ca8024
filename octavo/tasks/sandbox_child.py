"""The inside of the sandbox: a script, run as `python -I -S sandbox_child.py`, that imports no other package.

A first process waits for orders and holds nothing that a program must not see. For each it forks one that cuts itself
off (mounts, processes, network), forks again, gives up all rights, sets the limits, and only then reads and runs what
it was started for. `octavo.tasks.sandbox` starts it.
"""

import ctypes
import json
import os
import resource
import runpy
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 2, 32, 4096, 16384, 1 << 18
MNT_DETACH, SYS_PIVOT_ROOT, SYS_CAPSET = 2, {"x86_64": 155, "aarch64": 41}, {"x86_64": 126, "aarch64": 91}
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 36, 38
FIRST_PRIVATE_UID = 2_000_000_000
"""Users that own nothing; each sandbox of a superuser gets one, so that its processes are counted apart."""
MAX_ORDER_BYTES = 2**16
OUT_OF_MEMORY = 77
"""Exit status."""
LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Fork a sandbox for every order that comes in over the socket, until it closes.

    The arguments are the descriptor of that socket and the file of the parts. An order is JSON with descriptors: where
    to tell how it goes, standard input and output, then the part's connections.
    """
    die_with_parent()
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))  # the limit of one check is not for all that follow
    orders = socket.socket(fileno=int(sys.argv[1]))
    parts = runpy.run_path(sys.argv[2])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(orders, MAX_ORDER_BYTES, 16)
        if not message:
            return
        if os.fork() == 0:
            try:
                orders.close()
                start(json.loads(message), parts, *descriptors)
            finally:
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)


def start(config: dict, parts: dict, status: int, stdin: int, stdout: int, *connections: int) -> None:
    """Isolate, limit, run, and tell: this process's number, a line on how it went, the exit status. Never returns."""
    die_with_parent()
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    superuser, isolated = os.geteuid() == 0, True
    try:
        isolate(config, superuser)
    except OSError as error:
        isolated = False
        if not config["allow_unisolated"]:
            os.write(status, f"{os.getpid()} this kernel does not allow it: {error}\n".encode())
            os._exit(1)
        call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        config["root"] = tempfile.mkdtemp(prefix="octavo-program-")
    os.write(status, f"{os.getpid()} ready {'' if isolated else config['root']}\n".encode())
    waiting, alive = os.pipe()
    uid = FIRST_PRIVATE_UID + os.getpid()
    child = os.fork()
    if child == 0:
        for descriptor in (alive, status, stdin, stdout):
            os.close(descriptor)
        if isolated:
            give_up_rights(uid if superuser else None)
        call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if select.select([waiting], [], [], 0)[0]:  # the parent ended before it could be watched
            os._exit(1)
        os.close(waiting)
        limit(config, isolated)
        run(parts[config["part"]], connections)
    for descriptor in (waiting, stdin, stdout, *connections, 0, 1, 2):
        os.close(descriptor)
    _, code = os.waitpid(child, 0)
    if not isolated:
        kill_left_behind()
    os.write(status, str(min(255, 128 + os.WTERMSIG(code)) if os.WIFSIGNALED(code) else os.WEXITSTATUS(code)).encode())
    os._exit(0)


def die_with_parent() -> None:
    """Be killed when the process that started this one ends."""
    parent = os.getppid()
    call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def call(name: str, *arguments: object) -> None:
    """A call of the C library; OSError where it fails."""
    if getattr(LIBC, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def isolate(config: dict, superuser: bool) -> None:
    """Own mounts, processes, network, messages and host name; the file system is what the interpreter needs."""
    uid, gid = os.geteuid(), os.getegid()
    own_user = 0 if superuser else CLONE_NEWUSER
    call("unshare", CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | own_user)
    if not superuser:
        for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    root = config["root"]
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    mount("tmpfs", root, "tmpfs", MS_NOSUID, f"size={config['disk_mb']}m,nr_inodes=4096,mode=755")
    for path in config["visible"]:
        show(path, root)
    os.mkdir(f"{root}/box", 0o777)
    os.chmod(f"{root}/box", 0o777)
    os.mkdir(f"{root}/old")
    machine = os.uname().machine
    if machine not in SYS_PIVOT_ROOT:
        raise OSError(0, f"no known system calls for {machine}")
    call("syscall", SYS_PIVOT_ROOT[machine], root.encode(), f"{root}/old".encode())
    os.chdir("/")
    call("umount2", b"/old", MNT_DETACH)
    os.rmdir("/old")


def show(path: str, root: str) -> None:
    """Make a folder or file of the machine visible, read only; a link as a link."""
    target = root + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        with open(target, "wb"):
            pass
    mount(path, target, flags=MS_BIND | MS_REC)
    kept = os.statvfs(target).f_flag & 0b1111111110  # what the mount had, a user's own may not drop
    if os.path.isdir(path):
        mount("none", target, flags=MS_BIND | MS_REMOUNT | MS_RDONLY | MS_NOSUID | kept)


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """mount(2)."""
    names = (source.encode(), target.encode(), kind.encode() or None)
    call("mount", *names, ctypes.c_ulong(flags), options.encode() or None)


def give_up_rights(uid: int | None) -> None:
    """Become a user without rights, and without a way to get any."""
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    call("syscall", SYS_CAPSET[os.uname().machine], ctypes.byref(header), ctypes.byref((ctypes.c_uint32 * 6)()))
    call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def limit(config: dict, isolated: bool) -> None:
    """Limits of each process, an environment without secrets, a folder of its own."""
    memory, size = config["memory_mb"] * 2**20, config["disk_mb"] * 2**20
    seconds = config["cpu_s"]
    limits = [
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, size),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ]
    if isolated:  # elsewhere it would count all processes of the user
        limits.append((resource.RLIMIT_NPROC, config["num_processes"]))
    for name, value in limits:
        hard = resource.getrlimit(name)[1]
        lowest = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (lowest, lowest))
    os.environ.clear()
    os.environ.update({"PATH": "/usr/bin:/bin", "HOME": "/box", "TMPDIR": "/box", "LANG": "C.UTF-8"})
    os.chdir("/box" if isolated else config["root"])
    os.umask(0o077)


def kill_left_behind() -> None:
    """Without a process namespace: kill what the program forked, as often as more turns up."""
    empty = 0
    while empty < 2:  # one look may miss a process that is being handed on
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                state, parent = file.read().rpartition(")")[2].split()[:2]
                if int(parent) == os.getpid() and state != "Z":
                    found.append(int(name))
        empty = 0 if found else empty + 1
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def run(part: Callable[..., None], descriptors: Sequence[int]) -> None:
    """Run the part that this sandbox was made for, with its connections; never returns."""
    try:
        part(*(socket.socket(fileno=descriptor) for descriptor in descriptors))
        os._exit(0)
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
