"""The work stream of a queue: what it pushes, when it stops, and that jobs return when it ends."""

from __future__ import annotations

from typing import Any

import pytest

from ringlog.testing.real_engine import TestEngine
from tests.support.http_queues import FIELDS, claim, kill_gateway, put, stats, wait_until


def ack(call, queue: str, *seqs: int) -> Any:
    answer = call("POST", f"/v0/topics/{queue}/ack", {"node": "s", "seqs": seqs})
    assert answer.body["acked"] == len(seqs), answer
    return answer


def test_jobs_are_pushed_up_to_max(call, queue: str) -> None:
    put(call, queue, {"a": 1}, 2, 3)
    with call.stream(f"/v0/topics/{queue}/work?node=s&max=2") as stream:
        assert stream.status == 200
        assert stream.headers["content-type"] == "text/event-stream"
        assert stream.headers["cache-control"] == "no-store"
        assert stream.block().retry == "2000"
        first, second = stream.frames(2)
        assert (first.event, first.id, first.data["data"]) == ("job", "1", {"a": 1})
        assert set(first.data) == FIELDS | {"topic"}
        assert first.data["topic"] == queue
        assert second.data["$seq"] == 2
        assert stats(call, queue)["ready"] == 1, "the stream has max jobs"
        ack(call, queue, 1)
        assert stream.frame().data["$seq"] == 3
        ack(call, queue, 2, 3)
        put(call, queue, "later")
        assert stream.frame().data["data"] == "later"


def test_a_nacked_job_comes_again(call, queue: str) -> None:
    put(call, queue, 1)
    with call.stream(f"/v0/topics/{queue}/work?node=s") as stream:
        assert stream.frame().data["deliveries"] == 1
        call("POST", f"/v0/topics/{queue}/nack", {"node": "s", "seqs": [1]})
        assert stream.frame().data["deliveries"] == 2


def test_jobs_that_end_elsewhere_free_their_slots(call, queue: str) -> None:
    """A lease that expires and a job that is deleted are seen without a settlement over HTTP."""
    put(call, queue, 1, 2)
    with call.stream(f"/v0/topics/{queue}/work?node=s&lease_ms=100") as stream:
        assert stream.frame().data["$seq"] == 1
        again = stream.frame().data
        assert (again["$seq"], again["deliveries"]) == (1, 2)
        call("POST", f"/v0/topics/{queue}/delete", {"before_seq": 2})
        assert stream.until(lambda frame: frame.data["$seq"] == 2)


def test_jobs_return_when_the_client_leaves(call, queue: str) -> None:
    put(call, queue, 1, 2, 3)
    claimed = claim(call, queue, max=1, node="s")
    with call.stream(f"/v0/topics/{queue}/work?node=s&max=5") as stream:
        assert len(stream.frames(2)) == 2
    wait_until(lambda: stats(call, queue)["ready"] == 2, "the jobs of the stream return")
    assert stats(call, queue)["in_flight"] == 1, "a lease of the same node from elsewhere stays"
    assert [(job["$seq"], job["deliveries"]) for job in claim(call, queue)] == [(2, 2), (3, 2)]
    assert claimed[0]["$seq"] == 1


def test_jobs_return_when_the_gateway_is_killed(http_engine: TestEngine, call, queue: str) -> None:
    put(call, queue, 1, 2)
    with call.stream(f"/v0/topics/{queue}/work?node=s&max=2&lease_ms=600000") as stream:
        assert len(stream.frames(2)) == 2
        kill_gateway(http_engine, call)
        wait_until(lambda: stats(call, queue)["ready"] == 2, "the engine sees the death of the gateway")
        assert stream.frame() is None


def test_the_deletion_of_the_queue_ends_the_stream(call, queue: str) -> None:
    with call.stream(f"/v0/topics/{queue}/work?node=s") as stream:
        stream.block()
        call("DELETE", f"/v0/topics/{queue}")
        frame = stream.frame()
        assert (frame.event, frame.data["code"], frame.data["error"]) == ("error", 404, "topic_not_found")
        assert stream.frame() is None


def test_a_full_stream_ends_with_its_queue(call, queue: str) -> None:
    put(call, queue, 1)
    with call.stream(f"/v0/topics/{queue}/work?node=s") as stream:
        assert stream.frame().event == "job"
        call("DELETE", f"/v0/topics/{queue}")
        frame = stream.frame()
        assert (frame.event, frame.data["code"]) == ("error", 404)
        assert stream.frame() is None


@pytest.mark.parametrize(
    ("path", "accept", "status"),
    [
        ("/v0/topics/a-log/work?node=s", "*/*", 409), ("/v0/topics/absent/work?node=s", "*/*", 404),
        ("/v0/topics/{}/work?node=s", "application/json", 406), ("/v0/topics/{}/work", "*/*", 400),
        ("/v0/topics/{}/work?node=", "", 400),
    ],
)  # fmt: skip
def test_refusals_come_before_the_stream(call, queue: str, path: str, accept: str, status: int) -> None:
    call("PUT", "/v0/topics/a-log", {})
    answer = call("GET", path.format(queue), headers={"accept": accept})
    assert answer.status == status, answer
    assert answer.headers["content-type"] == "application/json"
