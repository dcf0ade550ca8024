import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import verifier_functions as functions

from octavo.tasks.answers import check_math
from octavo.tasks.problem import Problem
from octavo.tasks.verdict import Verdict
from octavo.tasks.verifiers import VerifierConfig, VerifierPool

PROBLEM = Problem(id="0", text="?", answer="72")


def processes_with(mark):
    """Ids of the processes that have this text in their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                if mark.encode() in (folder / "cmdline").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


def wait_until_gone(pids, seconds=10):
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, f"still there: {alive}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def pool():
    with VerifierPool(VerifierConfig(num_workers=2, timeout_s=1.5, memory_mb=1024)) as pool:
        yield pool


def test_a_function_runs_in_a_worker_without_torch(pool):
    assert pool.submit(functions.correct, PROBLEM, "a").result() == Verdict("correct", 1.0, "a")
    assert pool.submit(functions.loaded_torch).result() is False
    assert pool.submit(functions.worker_pid).result() not in (os.getpid(), os.getppid())


def test_verdicts_are_those_of_this_process_in_order(pool):
    texts = [f"#### {number}" for number in range(60, 80)] + ["", "\\boxed{144/2}", "x" * 10**6]
    found = [future.result() for future in [pool.submit(check_math, PROBLEM, text) for text in texts]]
    assert found == [check_math(PROBLEM, text) for text in texts]
    assert [verdict.outcome for verdict in found].count("correct") == 2


@pytest.mark.parametrize(
    "function, outcome, detail",
    [
        (functions.sleep_long, "timeout", "longer than 1.5 s"),
        (functions.spin, "timeout", "longer than 1.5 s"),
        (functions.tower, "timeout", "longer than 1.5 s"),
        (functions.print_for_ever, "timeout", "longer than 1.5 s"),
        (functions.take_memory, "crashed", "out of memory"),
        (functions.recurse, "crashed", "recursion"),
        (functions.die, "crashed", "lost"),
        (functions.leave, "crashed", "lost"),
        (functions.end, "crashed", "SystemExit: 3"),
        (functions.raise_error, "crashed", "KeyError: 'score'"),
        (functions.unpicklable, "crashed", "lost"),
    ],
)
def test_what_goes_wrong_has_a_verdict_of_its_own_and_the_pool_goes_on(pool, function, outcome, detail):
    verdict = pool.submit(function).result(timeout=20)
    assert (verdict.outcome, verdict.reward) == (outcome, 0.0) and detail in verdict.detail
    assert pool.submit(functions.correct, PROBLEM, "after").result(timeout=20).outcome == "correct"


def test_a_late_check_takes_everything_with_it_that_it_started(pool):
    mark = f"octavo-test-{os.getpid()}-late"
    assert pool.submit(functions.leave_children, mark).result(timeout=20).outcome == "timeout"
    for _ in range(2):  # a replacement clears what the lost worker left behind
        pool.submit(functions.die).result(timeout=20)
        pool.submit(functions.worker_pid).result(timeout=20)
    wait_until_gone(processes_with(mark))


def test_closing_leaves_no_process_and_answers_what_runs():
    pool = VerifierPool(VerifierConfig(num_workers=2, timeout_s=60.0), modules=())
    worker = pool.submit(functions.worker_pid).result()
    running = [pool.submit(functions.spin) for _ in range(2)]
    waiting = pool.submit(functions.spin)
    time.sleep(0.3)
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < 20
    assert [future.result().outcome for future in running] == ["crashed", "crashed"] and waiting.cancelled()
    wait_until_gone([worker])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_one_that_is_killed(number, tmp_path):
    program = textwrap.dedent(
        f"""
        import sys; sys.path[:] = {sys.path!r}
        import verifier_functions as functions
        from octavo.tasks.verifiers import VerifierConfig, VerifierPool
        with VerifierPool(VerifierConfig(num_workers=2, timeout_s=60.0), modules=()) as pool:
            pids = [pool.submit(functions.worker_pid).result() for _ in range(2)]
            futures = [pool.submit(functions.leave_children, "octavo-test-{os.getpid()}-{number}") for _ in range(2)]
            print(*pids, flush=True)
            futures[0].result()
        """
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    time.sleep(0.5)
    left = processes_with(f"octavo-test-{os.getpid()}-{number}")
    assert left, "the children should have started"
    process.send_signal(number)
    process.wait(timeout=20)
    wait_until_gone([*pids, *processes_with(f"octavo-test-{os.getpid()}-{number}")])


def test_a_signal_while_the_template_kills_its_children_spares_none():
    program = textwrap.dedent(
        f"""
        import sys; sys.path[:] = {sys.path!r}
        import os, signal, socket, subprocess
        from octavo.tasks import verifier_worker
        kill_children = verifier_worker.kill_children

        def signalled(*arguments, **options):
            os.kill(os.getpid(), signal.SIGTERM)
            kill_children(*arguments, **options)

        verifier_worker.kill_children = signalled
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        print(child.pid, flush=True)
        ours, theirs = socket.socketpair()
        ours.close()
        verifier_worker.template(theirs.detach(), 2**32, [])
        """
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr
    wait_until_gone([int(done.stdout)])


@pytest.mark.parametrize(
    "field",
    [{"num_workers": -1}, {"timeout_s": 0.0}, {"timeout_s": float("nan")}, {"memory_mb": 1}, {"audit_samples": -1}],
)
def test_bad_fields_are_errors(field):
    with pytest.raises(ValueError, match=next(iter(field))):
        VerifierConfig(**field)
