"""`ringlog worker` against a real engine: the effect of a failing job on its process and on its queue."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

import ringlog
from ringlog.cli.outcome import CliExit
from ringlog.client.queue import Queue
from ringlog.testing.real_engine import engine
from tests.support.workers import Workers, soon, wait_until_empty

pytestmark = pytest.mark.slow


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("exit", "exited with status 3"),
        ("segv", "killed by SIGSEGV"),
        ("raise boom", "ValueError: boom"),
        ("leave", "SystemExit: 4"),
        ("eat", "MemoryError"),
        ("retry soon", "soon"),
    ],
)
def test_a_job_that_fails_once_is_done_at_its_second_delivery(
    workers: Workers, queue: Queue, fault: str, reason: str
) -> None:
    """Whatever the job does to its process, the worker does the jobs after it."""
    queue.put(f"{fault} then note".encode())
    queue.put_many([b"note"] * 10)
    started = workers.start("program:do", queue.topic, "-c", "2", "--payload", "text", "--backoff", "50ms")
    wait_until_empty(queue)
    code, counts, log = workers.stop(started)
    assert (code, counts) == (
        CliExit.DONE,
        {"queue": queue.topic, "target": "program:do", "job_done": 11, "job_failed": 1},
    )
    (failed,) = [line for line in log if line["event"] == "job failed"]
    assert (failed["seq"], failed["deliveries"], failed["level"]) == (1, 1, "error")
    assert reason in failed["reason"]
    assert failed["again_in_ms"] == (1 if "retry" in fault else 50)


def test_a_job_that_fails_too_often_becomes_a_dead_letter(workers: Workers, queue: Queue) -> None:
    with ringlog.connect(workers.environ["RINGLOG_URL"], wait=10) as client:
        client.topics.configure(queue.topic, max_deliveries=2)
    queue.put(b"segv")
    started = workers.start("program:do", queue.topic, "-c", "1", "--payload", "text", "--backoff", "10ms")
    soon(lambda: queue.stats().dead_lettered == 1)
    _, counts, _ = workers.stop(started)
    assert counts["job_failed"] == 2
    (letter,) = queue.dead_letters()
    assert "SIGSEGV" in letter.meta["$dead_letter_reason"], "L26"
    assert letter.meta["$dead_letter_nacks"] == "2"


def test_a_job_over_its_time_limit_is_killed_with_its_process(workers: Workers, queue: Queue) -> None:
    queue.put(b"wait for ever then note")
    started = workers.start(
        "program:do",
        queue.topic,
        "--payload",
        "text",
        "--time-limit",
        "200ms",
        "--backoff",
        "10ms",
        "-c",
        "1",
    )
    wait_until_empty(queue)
    _, counts, log = workers.stop(started)
    assert (counts["job_done"], counts["job_failed"]) == (1, 1)
    (failed,) = [line for line in log if line["event"] == "job failed"]
    assert failed["reason"] == "it ran longer than its time limit"
    assert workers.noted("wait") != workers.noted("note"), "another process did it"


def test_child_processes_of_a_job_end_with_it(workers: Workers, queue: Queue, tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(
        "import os, pathlib, subprocess, time\n"
        "def f(_):\n"
        "    child = subprocess.Popen(['sleep', '1000'])\n"
        "    pathlib.Path('child').write_text(str(child.pid))\n"
        "    time.sleep(1000)\n"
    )
    queue.put(b"")
    started = workers.start("parent:f", queue.topic, "-c", "1", "--time-limit", "500ms", "--backoff", "1h",
                            "--backoff-max", "1h")  # fmt: skip
    soon(lambda: queue.stats().delayed == 1)
    pid = int((tmp_path / "child").read_text())
    soon(lambda: not is_running(pid))
    assert workers.stop(started)[0] == CliExit.DONE


@pytest.mark.timeout(120)
def test_a_worker_continues_after_a_kill_of_its_shard(tmp_path: Path) -> None:
    with engine(wal={"shards": 1}) as running:
        workers = Workers(running.url, tmp_path)
        try:
            with ringlog.connect(running.url, wait=10) as client:
                client.topics.create("jobs", type="queue", durability="fsync")
                queue = client.queue("jobs")
                queue.put_many([b"wait go", b"note"])
                started = workers.start("program:do", "jobs", "-c", "1", "--payload", "text")
                soon(lambda: workers.noted("wait"))
                running.kill("wal_shard")
                (tmp_path / "go").touch()
                wait_until_empty(queue)
                code, counts, _ = workers.stop(started)
            assert code == CliExit.DONE
            assert counts["job_done"] + counts.get("lease_lost", 0) >= 2
            assert workers.noted("note")
        finally:
            workers.end()
