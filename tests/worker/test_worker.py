"""`ringlog worker` against a real engine, in processes as a shell starts them."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest

import ringlog
from ringlog.cli.outcome import Exit
from ringlog.client.queue import Queue
from ringlog.testing.real_engine import TestEngine, engine
from tests.worker.conftest import Workers, soon, wait_until_empty

pytestmark = pytest.mark.slow


def events(log: list[dict]) -> Counter[str]:
    return Counter(line["event"] for line in log)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_every_job_is_done_once_and_is_a_line_of_the_log(workers: Workers, queue: Queue) -> None:
    queue.put_many([b"note %d" % n for n in range(200)])
    code, counts, log = workers.run("program:do", queue.topic, "-c", "3", "--payload", "text")
    assert (code, counts["job_done"]) == (Exit.DONE, 200)
    done = [line for line in log if line["event"] == "job done"]
    assert sorted(line["seq"] for line in done) == list(range(1, 201))
    assert {line["level"] for line in done} == {"info"}
    assert len({line["process"] for line in done}) == 3, "every process had its share"
    assert queue.stats().ready == 0
    assert len(workers.notes()) == 200


def test_a_function_has_its_payload_and_what_else_is_known_of_the_job(workers: Workers, queue: Queue) -> None:
    queue.put(b"[1]", key=b"k", tag="t", meta={"n": 1}, headers={"h": b"v"})
    workers.run("program:facts", queue.topic, "--payload", "json", "-c", "1")
    (noted,) = workers.notes()
    kind, *facts, pid = json.loads(noted)
    assert (kind, *facts) == ("list", queue.topic, 1, 1, "k", "t", "v", {"n": 1})
    assert not psutil.pid_exists(pid)


def test_payloads_are_decoded_by_the_codec_that_is_named(workers: Workers, queue: Queue) -> None:
    queue.put(b'{"to": "ann"}')
    assert workers.run("program:deliver", queue.topic, "--payload", "program:EMAIL")[0] == Exit.DONE
    queue.put(b"bob")
    assert workers.run("program:later", queue.topic, "--payload", "text")[0] == Exit.DONE
    assert workers.notes() == ["ann", "awaited bob"]


def test_what_cannot_be_decoded_is_rejected_with_the_reason(
    workers: Workers, queue: Queue, ringlog_engine: TestEngine
) -> None:
    queue.put(b'{"from": "ann"}')
    queue.put(b'{"to": "bob"}')
    code, counts, _ = workers.run("program:deliver", queue.topic, "--payload", "program:EMAIL", "-c", "1")
    assert (code, counts["job_done"], counts["job_rejected"]) == (Exit.DONE, 1, 1)
    with ringlog.connect(ringlog_engine.url, wait=10) as client:
        dead = f"{queue.topic}.dead"
        soon(lambda: any(each.topic == dead for each in client.topics.list(dead)))
        (letter,) = client.read(dead, limit=10, wait_ms=10_000).records
    assert letter.meta["$dead_letter_reason"].startswith("the payload cannot be decoded: ValidationError")


def test_without_dead_letters_what_is_rejected_rests_and_stays(
    workers: Workers, ringlog_engine: TestEngine, queue: Queue
) -> None:
    with ringlog.connect(ringlog_engine.url, wait=10) as client:
        name = f"{queue.topic}.plain"
        client.topics.create(name, type="queue")
        plain = client.queue(name)
        plain.put(b"reject for ever")
        code, counts, log = workers.run("program:do", name, "--payload", "text")
        assert (code, counts["job_failed"]) == (Exit.DONE, 1)
        assert events(log)["queue has no dead letters"] == 1
        assert (plain.stats().ready, plain.stats().delayed) == (0, 1)


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
def test_a_job_that_fails_once_is_done_the_second_time(
    workers: Workers, queue: Queue, fault: str, reason: str
) -> None:
    """Whatever it does to its process: jobs behind it are done, and nothing is lost."""
    queue.put(f"{fault} then note".encode())
    queue.put_many([b"note"] * 10)
    started = workers.start("program:do", queue.topic, "-c", "2", "--payload", "text", "--backoff", "50ms")
    wait_until_empty(queue)
    code, counts, log = workers.stop(started)
    assert (code, counts) == (
        Exit.DONE,
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


def test_a_job_over_its_time_limit_loses_its_process(workers: Workers, queue: Queue) -> None:
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


def test_a_job_may_take_longer_than_its_lease(workers: Workers, queue: Queue) -> None:
    queue.put(b"wait go")
    started = workers.start("program:do", queue.topic, "--payload", "text", "--lease", "200ms", "-c", "2")
    soon(lambda: workers.noted("wait"))
    assert queue.claim(wait_ms=1_000) == [], "nobody else is given it within five leases"
    assert queue.stats().in_flight == 1
    (workers.directory / "go").touch()
    wait_until_empty(queue)
    _, counts, _ = workers.stop(started)
    assert counts["job_done"] == 1
    assert len(workers.noted("wait")) == 1


def test_processes_are_replaced_after_so_many_jobs(workers: Workers, queue: Queue) -> None:
    queue.put_many([b"note"] * 10)
    code, counts, _ = workers.run(
        "program:do", queue.topic, "--payload", "text", "-c", "1", "--max-jobs-per-process", "4"
    )
    assert (code, counts["job_done"]) == (Exit.DONE, 10)
    assert sorted(Counter(workers.noted("note")).values()) == [2, 4, 4]


def test_a_process_may_have_a_limit_of_memory(workers: Workers, queue: Queue) -> None:
    queue.put(b"note")
    code, _, log = workers.run("program:do", queue.topic, "--payload", "text", "--memory-limit", "4GiB")
    assert (code, events(log)["job done"]) == (Exit.DONE, 1)


def test_told_to_stop_it_ends_what_it_began_and_nothing_else(workers: Workers, queue: Queue) -> None:
    queue.put_many([b"wait go", b"wait go", b"note", b"note"])
    started = workers.start("program:do", queue.topic, "-c", "2", "--payload", "text")
    soon(lambda: len(workers.noted("wait")) == 2)
    started.send_signal(signal.SIGTERM)
    # Its processes may be told as well, as a container or a service manager does: a job is not cut off by it.
    for child in psutil.Process(started.pid).children():
        child.send_signal(signal.SIGTERM)
    (workers.directory / "go").touch()
    code, counts, log = workers.ended(started)
    assert (code, counts["job_done"]) == (Exit.DONE, 2)
    assert events(log)["job cut off"] == 0
    assert (queue.stats().ready, queue.stats().in_flight) == (2, 0)
    assert not workers.noted("note")


def test_what_takes_too_long_to_stop_is_given_back_at_once(workers: Workers, queue: Queue) -> None:
    queue.put(b"wait for ever")
    started = workers.start(
        "program:do", queue.topic, "-c", "1", "--payload", "text", "--stop-timeout", "100ms"
    )
    soon(lambda: workers.noted("wait"))
    code, counts, log = workers.stop(started)
    assert (code, counts["job_cut_off"]) == (Exit.FAILED, 1)
    assert (queue.stats().ready, queue.stats().in_flight) == (1, 0)
    (pid,) = workers.noted("wait")
    assert not psutil.pid_exists(pid)
    assert events(log)["job cut off"] == 1


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_does_not_wait(workers: Workers, queue: Queue, second: signal.Signals) -> None:
    queue.put(b"wait for ever")
    started = workers.start("program:do", queue.topic, "-c", "1", "--payload", "text")
    soon(lambda: workers.noted("wait"))
    started.send_signal(signal.SIGTERM)
    # The first is taken before the second is sent: two of a kind that are pending are one.
    soon(lambda: not _is_pending(started.pid, signal.SIGTERM))
    started.send_signal(second)
    code, counts, _ = workers.ended(started)
    assert (code, counts["job_cut_off"]) == (Exit.INTERRUPTED, 1)
    assert (queue.stats().ready, queue.stats().in_flight) == (1, 0)


def _is_pending(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    masks = [
        int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))
    ]
    return any(mask & 1 << (number - 1) for mask in masks)


def test_no_process_outlives_a_worker_that_was_killed(workers: Workers, queue: Queue) -> None:
    queue.put(b"wait for ever")
    started = workers.start("program:do", queue.topic, "-c", "2", "--payload", "text", "--lease", "300ms")
    soon(lambda: workers.noted("wait"))
    children = psutil.Process(started.pid).children()
    assert len(children) == 2
    started.kill()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    assert queue.claim(wait_ms=10_000), "its lease ended"


def test_what_a_job_started_ends_with_its_process(workers: Workers, queue: Queue, tmp_path: Path) -> None:
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
    assert workers.stop(started)[0] == Exit.DONE


@pytest.mark.parametrize(
    ("target", "more", "words"),
    [
        ("nothing.there:f", (), "there is no module 'nothing'"),
        ("program:deliverr", (), "has no 'deliverr'; is it 'deliver'?"),
        ("program:HERE", (), "it is not a function"),
        ("program:do", ("--payload", "program:not_a_codec"), "a codec has encode and decode"),
        ("broken:f", (), "importing 'broken:f' failed: ZeroDivisionError"),
        ("wants:f", (), "No module named 'no_such_thing'"),
        ("dies:f", (), "while it imported the function, its process exited with status 9"),
        ("program", (), "name the function as package.module:function"),
        ("program:do", ("--payload", "pickle"), "a payload is raw, text, json or package.module:codec"),
        ("program:do", ("-c", "0"), "concurrency out of range"),
        ("program:do", ("-c", "2000"), "concurrency out of range"),
        ("program:do", ("--backoff", "2s", "--backoff-max", "1s"), "back-off"),
        ("program:do", ("--memory-limit", "much"), "is not a size"),
    ],
)
def test_what_cannot_be_run_is_said_before_any_job_is_taken(
    workers: Workers, queue: Queue, target: str, more: tuple[str, ...], words: str
) -> None:
    (workers.directory / "broken.py").write_text("1 / 0\n")
    (workers.directory / "wants.py").write_text("import no_such_thing\n")
    (workers.directory / "dies.py").write_text("import os\nos._exit(9)\n")
    queue.put(b"job")
    started = workers.start(target, queue.topic, *more)
    out, err = started.communicate(timeout=40)
    assert (started.returncode, out) == (Exit.USAGE, "")
    assert words in err.splitlines()[-1]
    assert (queue.stats().ready, queue.peek()[0].data) == (1, b"job")


def test_queues_and_engines_that_are_not_there_have_their_exit_codes(
    workers: Workers, queue: Queue, tmp_path: Path
) -> None:
    assert workers.run("program:do", f"{queue.topic}.absent")[0] == Exit.NOT_FOUND
    with ringlog.connect(workers.environ["RINGLOG_URL"], wait=10) as client:
        client.topics.create(f"{queue.topic}.log")
    assert workers.run("program:do", f"{queue.topic}.log")[0] == Exit.FAILED
    workers.environ["RINGLOG_URL"] = f"ringlog://{tmp_path}/nowhere"
    assert workers.run("program:do", queue.topic)[0] == Exit.NO_CONNECTION


@pytest.mark.timeout(120)
def test_a_worker_goes_on_after_its_engine_was_killed(tmp_path: Path) -> None:
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
            assert code == Exit.DONE
            assert counts["job_done"] + counts.get("lease_lost", 0) >= 2
            assert workers.noted("note")
        finally:
            workers.end()


def test_a_worker_needs_no_checkout_around_it(workers: Workers, queue: Queue) -> None:
    """The program is found where the worker was started, whatever the path says."""
    workers.environ.pop("PYTHONSAFEPATH", None)
    queue.put(b"note")
    assert workers.run("program:do", queue.topic, "--payload", "text")[0] == Exit.DONE
    assert os.path.exists(workers.directory / "notes")
