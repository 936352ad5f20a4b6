"""`ringlog worker` against a real engine: every job is done once, with its payload and its fields."""

from __future__ import annotations

import json
import os
from collections import Counter

import psutil
import pytest

import ringlog
from ringlog.cli.outcome import CliExit
from ringlog.client import Client
from ringlog.client.queue import Queue
from ringlog.testing.real_engine import TestEngine
from tests.support.workers import Workers, events, soon, wait_until_empty

pytestmark = pytest.mark.slow


def test_every_job_is_done_once_and_logged(workers: Workers, queue: Queue) -> None:
    queue.put_many([b"note %d" % n for n in range(200)])
    code, counts, log = workers.run("program:do", queue.topic, "-c", "3", "--payload", "text")
    assert (code, counts["job_done"]) == (CliExit.DONE, 200)
    done = [line for line in log if line["event"] == "job done"]
    assert sorted(line["seq"] for line in done) == list(range(1, 201))
    assert {line["level"] for line in done} == {"info"}
    assert len({line["process"] for line in done}) == 3, "every process had its share"
    assert queue.stats().ready == 0
    assert len(workers.notes()) == 200


def test_a_job_function_gets_the_payload_and_all_fields_of_the_job(workers: Workers, queue: Queue) -> None:
    meta = {"n": 1, "large": 1 << 70}  # MessagePack, in which jobs reach the process, has no such number.
    queue.put(b"[1]", key=b"k", tag="t", meta=meta, headers={"h": b"v"})
    workers.run("program:facts", queue.topic, "--payload", "json", "-c", "1")
    (noted,) = workers.notes()
    kind, *facts, pid = json.loads(noted)
    assert (kind, *facts) == ("list", queue.topic, 1, 1, "k", "t", "v", meta)
    assert not psutil.pid_exists(pid)


def test_payloads_are_decoded_by_the_given_codec(workers: Workers, queue: Queue) -> None:
    queue.put(b'{"to": "ann"}')
    assert workers.run("program:deliver", queue.topic, "--payload", "program:EMAIL")[0] == CliExit.DONE
    queue.put(b"bob")
    assert workers.run("program:later", queue.topic, "--payload", "text")[0] == CliExit.DONE
    assert workers.notes() == ["ann", "awaited bob"]


def test_a_job_that_forks_is_done_when_the_parent_returns(workers: Workers, queue: Queue) -> None:
    queue.put_many([b"%d" % n for n in range(5)])
    code, counts, log = workers.run("program:forks", queue.topic, "--payload", "text", "-c", "1")
    assert (code, counts["job_done"]) == (CliExit.DONE, 5)
    assert workers.notes() == [f"parent of {n}" for n in range(5)]
    assert len({line["process"] for line in log if line["event"] == "job done"}) == 1


def test_a_job_that_cannot_be_decoded_is_rejected_with_the_reason(
    workers: Workers, queue: Queue, ringlog_engine: TestEngine
) -> None:
    queue.put(b'{"from": "ann"}')
    queue.put(b'{"to": "bob"}')
    code, counts, _ = workers.run("program:deliver", queue.topic, "--payload", "program:EMAIL", "-c", "1")
    assert (code, counts["job_done"], counts["job_rejected"]) == (CliExit.DONE, 1, 1)
    with ringlog.connect(ringlog_engine.url, wait=10) as client:
        dead = f"{queue.topic}.dead"
        soon(lambda: any(each.topic == dead for each in client.topics.list(dead)))
        (letter,) = client.read(dead, limit=10, wait_ms=10_000).records
    assert letter.meta["$dead_letter_reason"].startswith("the payload cannot be decoded: ValidationError")


def test_a_rejected_job_is_delayed_if_the_queue_has_no_dead_letter_topic(
    workers: Workers, client: Client, queue: Queue
) -> None:
    name = f"{queue.topic}.plain"
    client.topics.create(name, type="queue")
    plain = client.queue(name)
    plain.put(b"reject for ever")
    code, counts, log = workers.run("program:do", name, "--payload", "text")
    assert (code, counts["job_failed"]) == (CliExit.DONE, 1)
    assert events(log)["queue has no dead-letter topic, job is retried"] == 1
    assert (plain.stats().ready, plain.stats().delayed) == (0, 1)


def test_a_job_may_take_longer_than_its_lease(workers: Workers, queue: Queue) -> None:
    queue.put(b"wait go")
    started = workers.start("program:do", queue.topic, "--payload", "text", "--lease", "1200ms", "-c", "2")
    soon(lambda: workers.noted("wait"))
    # This is the shortest safe lease: a busy host may delay the extension of a lease.
    assert queue.claim(wait_ms=3_000) == [], "nobody else is given it within two leases"
    assert queue.stats().in_flight == 1
    (workers.directory / "go").touch()
    wait_until_empty(queue)
    _, counts, _ = workers.stop(started)
    assert counts["job_done"] == 1
    assert len(workers.noted("wait")) == 1


def test_processes_are_replaced_after_max_jobs_per_process(workers: Workers, queue: Queue) -> None:
    queue.put_many([b"note"] * 10)
    code, counts, _ = workers.run(
        "program:do", queue.topic, "--payload", "text", "-c", "1", "--max-jobs-per-process", "4"
    )
    assert (code, counts["job_done"]) == (CliExit.DONE, 10)
    assert sorted(Counter(workers.noted("note")).values()) == [2, 4, 4]


def test_a_process_can_have_a_memory_limit(workers: Workers, queue: Queue) -> None:
    queue.put(b"note")
    code, _, log = workers.run("program:do", queue.topic, "--payload", "text", "--memory-limit", "4GiB")
    assert (code, events(log)["job done"]) == (CliExit.DONE, 1)


def test_a_worker_finds_the_program_in_its_working_directory(workers: Workers, queue: Queue) -> None:
    """This does not depend on PYTHONSAFEPATH."""
    workers.environ.pop("PYTHONSAFEPATH", None)
    queue.put(b"note")
    assert workers.run("program:do", queue.topic, "--payload", "text")[0] == CliExit.DONE
    assert os.path.exists(workers.directory / "notes")
