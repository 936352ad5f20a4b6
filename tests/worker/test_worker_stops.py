"""`ringlog worker` against a real engine: it gets one or two signals, or is killed."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

import ringlog
import ringlog.aio
from ringlog.cli.outcome import CliExit
from ringlog.client.queue import Queue
from ringlog.clock import SystemClock
from ringlog.limits import SECOND_SIGNAL_S
from ringlog.testing.real_engine import TestEngine, engine
from ringlog.worker import wire
from ringlog.worker.options import WorkerOptions
from ringlog.worker.pool import Worker
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
    _second_signal(started, second)
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


def _second_signal(started: subprocess.Popen[str], number: signal.Signals) -> None:
    """Stop a worker, then send it a second signal once that is not the same request any more."""
    started.send_signal(signal.SIGTERM)
    # Pending signals of one kind are merged, so the first must be handled before the second is sent.
    soon(lambda: not _is_pending(started.pid, signal.SIGTERM))
    second_from = time.monotonic() + SECOND_SIGNAL_S  # Earlier it would be the same request.
    soon(lambda: time.monotonic() > second_from)
    started.send_signal(number)


@pytest.mark.parametrize("signals", [1, 2])
def test_a_stop_takes_effect_while_the_engine_is_away(tmp_path: Path, signals: int) -> None:
    """The undoing of its claim would wait for the engine up to the timeout of the client."""
    with engine(wal={"shards": 1}) as running:
        workers = Workers(running.url, tmp_path)
        with ringlog.connect(running.url, wait=10) as client:
            client.topics.create("q", type="queue")
            if signals == 2:
                client.queue("q").put(b"wait for ever")
            started = workers.start("program:do", "q", "-c", "2", "--payload", "text", "--timeout", "60s")
            soon(lambda: client.queue("q").stats().waiting, "the worker waits in a claim")
            soon(lambda: signals == 1 or workers.noted("wait"))
        running.crash()
        try:
            if signals == 1:
                started.send_signal(signal.SIGTERM)
            else:
                _second_signal(started, signal.SIGTERM)
            assert started.wait(timeout=5) == (CliExit.DONE if signals == 1 else CliExit.INTERRUPTED)
        finally:
            workers.end()


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


async def _stop_while_a_job_arrives(url: str, topic: str, passes: int) -> bool:
    """Put a job while the claim of a worker waits, and stop the worker some passes of the loop later.

    Return whether it ran the job.
    """
    async with ringlog.aio.connect(url, wait=10) as client:
        queue = client.queue(topic)
        wanted = WorkerOptions(target="builtins:bytes", queue=topic)
        setup = wire.Setup(fd=-1, parent_pid=0, target=wanted.target, payload="raw", log_level="error")
        worker = Worker(queue, wanted, setup, SystemClock())
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(30):
            while not (await queue.stats()).waiting:
                assert not running.done()
            putting = asyncio.create_task(queue.put(b""))
            for _ in range(passes):
                await asyncio.sleep(0)
            worker.stop()
            assert await running
        await putting
        return bool(worker.job_counts)


def test_a_stop_counts_no_delivery_of_a_job_that_was_not_begun(
    queue: Queue, ringlog_engine: TestEngine
) -> None:
    """Otherwise a rolling restart of workers moves jobs to the dead letters that no function ever got."""
    with ringlog.connect(ringlog_engine.url, wait=10) as client:
        client.topics.configure(queue.topic, max_deliveries=1)
    for n in range(1, 31):
        was_run = asyncio.run(_stop_while_a_job_arrives(ringlog_engine.url, queue.topic, 2 * n))
        if not was_run:
            (job,) = queue.claim(wait_ms=10_000)
            assert (job.seq, job.deliveries) == (n, 1)
            job.ack()
    assert queue.stats().dead_lettered == 0
