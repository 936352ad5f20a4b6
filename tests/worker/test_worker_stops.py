"""`ringlog worker` against a real engine: it gets one or two signals, or is killed."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from ringlog.cli.outcome import CliExit
from ringlog.client.queue import Queue
from ringlog.limits import SECOND_SIGNAL_S
from tests.support.workers import Workers, events, soon

pytestmark = pytest.mark.slow


def test_a_stopped_worker_finishes_started_jobs_and_claims_no_more(workers: Workers, queue: Queue) -> None:
    queue.put_many([b"wait go", b"wait go", b"note", b"note"])
    started = workers.start("program:do", queue.topic, "-c", "2", "--payload", "text")
    soon(lambda: len(workers.noted("wait")) == 2)
    started.send_signal(signal.SIGTERM)
    # Containers and service managers may signal the child processes too. This must not cut off their jobs.
    for child in psutil.Process(started.pid).children():
        child.send_signal(signal.SIGTERM)
    (workers.directory / "go").touch()
    code, counts, log = workers.ended(started)
    assert (code, counts["job_done"]) == (CliExit.DONE, 2)
    assert events(log)["job interrupted"] == 0
    assert (queue.stats().ready, queue.stats().in_flight) == (2, 0)
    assert not workers.noted("note")


def test_jobs_that_exceed_the_stop_timeout_are_returned_at_once(workers: Workers, queue: Queue) -> None:
    queue.put(b"wait for ever")
    started = workers.start(
        "program:do", queue.topic, "-c", "1", "--payload", "text", "--stop-timeout", "100ms"
    )
    soon(lambda: workers.noted("wait"))
    code, counts, log = workers.stop(started)
    assert (code, counts["job_interrupted"]) == (CliExit.FAILED, 1)
    assert (queue.stats().ready, queue.stats().in_flight) == (1, 0)
    (pid,) = workers.noted("wait")
    assert not psutil.pid_exists(pid)
    assert events(log)["job interrupted"] == 1


def waiting(workers: Workers, queue: Queue, job: bytes) -> subprocess.Popen[str]:
    """Start a worker, and wait until it waits in this job."""
    queue.put(job)
    started = workers.start("program:do", queue.topic, "-c", "1", "--payload", "text")
    soon(lambda: workers.noted("wait"))
    return started


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_stops_at_once(workers: Workers, queue: Queue, second: signal.Signals) -> None:
    started = waiting(workers, queue, b"wait for ever")
    started.send_signal(signal.SIGTERM)
    # Pending signals of one kind are merged, so the first must be handled before the second is sent.
    soon(lambda: not _is_pending(started.pid, signal.SIGTERM))
    second_from = time.monotonic() + SECOND_SIGNAL_S  # Earlier it would be the same request.
    soon(lambda: time.monotonic() > second_from)
    started.send_signal(second)
    code, counts, _ = workers.ended(started)
    assert (code, counts["job_interrupted"]) == (CliExit.INTERRUPTED, 1)
    assert (queue.stats().ready, queue.stats().in_flight) == (1, 0)


def test_a_hangup_stops_the_worker_gracefully(workers: Workers, queue: Queue) -> None:
    """Otherwise SIGHUP would kill the worker and cut off its jobs."""
    started = waiting(workers, queue, b"wait go")
    started.send_signal(signal.SIGHUP)
    soon(lambda: not _is_pending(started.pid, signal.SIGHUP))
    (workers.directory / "go").touch()
    code, counts, _ = workers.ended(started)
    assert (code, counts["job_done"]) == (CliExit.DONE, 1)


def test_two_signals_at_once_are_one_request(workers: Workers, queue: Queue) -> None:
    """`timeout` and wrapper scripts signal twice. The second signal must not cut off jobs."""
    started = waiting(workers, queue, b"wait go")
    started.send_signal(signal.SIGTERM)
    soon(lambda: not _is_pending(started.pid, signal.SIGTERM))
    started.send_signal(signal.SIGINT)
    soon(lambda: not _is_pending(started.pid, signal.SIGINT))
    (workers.directory / "go").touch()
    code, counts, _ = workers.ended(started)
    assert (code, counts["job_done"]) == (CliExit.DONE, 1)


def _is_pending(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [
        int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))
    ]
    return any(mask & 1 << (number - 1) for mask in masks)


def test_child_processes_end_with_a_killed_worker(workers: Workers, queue: Queue) -> None:
    queue.put(b"wait for ever")
    started = workers.start("program:do", queue.topic, "-c", "2", "--payload", "text", "--lease", "300ms")
    soon(lambda: workers.noted("wait"))
    children = psutil.Process(started.pid).children()
    assert len(children) == 2
    started.kill()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert queue.claim(wait_ms=10_000), "its lease ended"
