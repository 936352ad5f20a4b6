"""Queues over HTTP: claims, settlements, lists, and what remains after clients and gateways that vanish."""

from __future__ import annotations

import http.client
import json
import os
import select
import socket
import threading
import time
from typing import Any

import pytest

import ringlog
from ringlog.testing.real_engine import TestEngine
from tests.support.http_queues import (
    FIELDS,
    claim,
    kill_gateway,
    open_request,
    put,
    stats,
    wait_gateway,
    wait_until,
)

# -- claims -----------------------------------------------------------------------------------------


def test_a_claim_has_the_fields_of_the_contract(call, queue: str) -> None:
    put(call, queue, {"a": 1}, "text", None)
    put(call, queue, 4, tag="t", meta={"k": "v"}, node="n")
    before_ms = int(time.time() * 1_000)
    answer = call("POST", f"/v0/topics/{queue}/claim", {"node": "w", "max": 4, "lease_ms": 60_000})
    jobs = answer.body["claimed"]
    assert [job["$seq"] for job in jobs] == [1, 2, 3, 4]
    assert [job["data"] for job in jobs] == [{"a": 1}, "text", None, 4]
    assert all(set(job) == FIELDS for job in jobs[:3])
    assert set(jobs[3]) == FIELDS | {"$tag", "$node", "meta"}
    assert (jobs[3]["$tag"], jobs[3]["meta"], jobs[3]["$node"]) == ("t", {"k": "v"}, "n")
    assert all(job["lease_id"].startswith("lease_") for job in jobs)
    assert len({job["lease_id"] for job in jobs}) == 4
    assert all(abs(job["deadline"] - before_ms - 60_000) < 30_000 for job in jobs)
    assert answer.body["ready"] == 0
    assert answer.body["performance"]["server_total_ms"] > 0


def test_bytes_that_are_not_json_are_wrapped(http_engine: TestEngine, call, queue: str) -> None:
    with ringlog.connect(http_engine.url) as client:
        client.append_many(queue, [b"plain", b"\xff\xfe", b'{"a":\n 1}', None, b""])
    assert [job["data"] for job in claim(call, queue)] == [
        {"$text": "plain"}, {"$base64": "//4="}, {"a": 1}, None, {"$text": ""},
    ]  # fmt: skip


def test_large_jobs_are_read_from_the_files(call, queue: str) -> None:
    """The engine answers a claim of large jobs without their payloads."""
    put(call, queue, *["x" * 20_000] * 8)
    assert [len(job["data"]) for job in claim(call, queue)] == [20_000] * 8


def test_many_runs_and_frames_keep_their_columns_together(call, queue: str) -> None:
    for number in range(4):
        put(call, queue, number, tag=f"t{number}")
    put(call, queue, 4, 5)
    first = claim(call, queue, max=3)
    call("POST", f"/v0/topics/{queue}/nack", {"node": "w", "seqs": [1, 3]})
    jobs = claim(call, queue)
    assert [(job["$seq"], job["data"], job.get("$tag"), job["deliveries"]) for job in jobs] == [
        (1, 0, "t0", 2), (3, 2, "t2", 2), (4, 3, "t3", 1), (5, 4, None, 1), (6, 5, None, 1),
    ]  # fmt: skip
    assert len(first) == 3


@pytest.mark.parametrize(
    "body",
    [
        {"node": ""}, {}, {"node": None}, {"node": "n" * 129}, {"node": "w", "max": -1},
        {"node": "w", "max": "1"}, {"node": "w", "order": "random"},
    ],
)  # fmt: skip
def test_a_wrong_claim_is_refused(call, queue: str, body: dict[str, Any]) -> None:
    answer = call("POST", f"/v0/topics/{queue}/claim", body)
    assert answer.status == 400, answer
    assert answer.body["error"]["code"] == "invalid_request"


def test_numbers_out_of_range_are_reduced(call, queue: str) -> None:
    put(call, queue, 1, 2)
    assert len(claim(call, queue, max=0, lease_ms=1)) == 1
    assert len(claim(call, queue, max=5_000, lease_ms=1 << 40, wait_ms=None)) == 1


@pytest.mark.parametrize("route", ["claim", "ack", "nack", "extend", "reject"])
def test_only_queues_have_jobs(call, queue: str, route: str) -> None:
    call("PUT", "/v0/topics/a-log", {})
    body = {"node": "w", "seqs": [1]}
    answer = call("POST", f"/v0/topics/a-log/{route}", body)
    assert (answer.status, answer.body["error"]["code"]) == (409, "not_a_queue")
    assert answer.body["error"]["detail"]["topic"] == "a-log"
    answer = call("POST", f"/v0/topics/absent/{route}", body)
    assert (answer.status, answer.body["error"]["code"]) == (404, "topic_not_found")
    assert call("GET", "/v0/topics/absent").status == 404


@pytest.mark.parametrize("route", ["pending", "stats", "peek"])
def test_only_queues_have_lists_of_jobs(call, route: str) -> None:
    call("PUT", "/v0/topics/a-log", {})
    assert call("GET", f"/v0/topics/a-log/{route}").status == 409
    assert call("GET", f"/v0/topics/absent/{route}").status == 404


def test_a_claim_waits_for_a_job(call, queue: str) -> None:
    with open_request(call, "POST", f"/v0/topics/{queue}/claim", {"node": "w", "wait_ms": 20_000}) as waiting:
        wait_until(lambda: stats(call, queue)["waiting"] == 1, "the claim waits")
        put(call, queue, "late")
        reply = http.client.HTTPResponse(waiting)
        reply.begin()
        assert json.loads(reply.read())["claimed"][0]["data"] == "late"


def test_a_claim_without_wait_answers_at_once(call, queue: str) -> None:
    assert claim(call, queue, wait_ms=0) == []
    assert claim(call, queue, wait_ms=50) == []


def test_a_waiting_claim_of_a_client_that_left_takes_no_job(call, queue: str) -> None:
    open_request(call, "POST", f"/v0/topics/{queue}/claim", {"node": "gone", "wait_ms": 20_000}).close()
    wait_until(lambda: stats(call, queue)["waiting"] == 0, "the claim ends")
    put(call, queue, "kept")
    [job] = claim(call, queue)
    assert (job["data"], job["deliveries"]) == ("kept", 1)


def test_claims_of_clients_that_leave_lose_no_job_and_count_no_delivery(call, queue: str) -> None:
    """Clients leave while jobs arrive, so that some claims have jobs when their client has left."""
    count = 40
    connections = [
        open_request(call, "POST", f"/v0/topics/{queue}/claim", {"node": f"g{n}", "wait_ms": 20_000})
        for n in range(count)
    ]
    wait_until(lambda: stats(call, queue)["waiting"] == count, "all claims wait")

    def leave() -> None:
        for each in connections:
            # A reset at once: the client does not read what is on its way.
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            each.close()

    thread = threading.Thread(target=leave)
    thread.start()
    put(call, queue, *range(count))
    thread.join()
    wait_until(lambda: stats(call, queue)["waiting"] == 0, "no claim waits")
    # A reply that was written before its client left counts: HTTP cannot tell.
    found = stats(call, queue)
    assert found["ready"] + found["in_flight"] == count
    jobs = claim(call, queue, max=1_000)
    assert len(jobs) == found["ready"] or stats(call, queue)["in_flight"] == count
    assert all(job["deliveries"] == 1 for job in jobs)


# -- settling ---------------------------------------------------------------------------------------


def test_node_and_seq_are_enough(call, queue: str) -> None:
    put(call, queue, *range(5))
    claim(call, queue, max=4)
    answer = call("POST", f"/v0/topics/{queue}/ack", {"node": "w", "seqs": [2, 1, 1, 5, 99]})
    assert answer.status == 200
    body = {name: answer.body[name] for name in ("acked", "skipped", "ready", "in_flight")}
    assert body == {"acked": 2, "skipped": [1, 5, 99], "ready": 1, "in_flight": 2}
    other = call("POST", f"/v0/topics/{queue}/ack", {"node": "other", "seqs": [3]})
    assert (other.body["acked"], other.body["skipped"]) == (0, [3])


def test_a_lease_id_fences(call, queue: str) -> None:
    put(call, queue, "a", "b")
    old = claim(call, queue)
    call("POST", f"/v0/topics/{queue}/nack", {"node": "w", "seqs": [1, 2]})
    new = claim(call, queue)
    ids = [old[0]["lease_id"], new[1]["lease_id"]]
    answer = call("POST", f"/v0/topics/{queue}/ack", {"node": "w", "seqs": [1, 2], "lease_ids": ids})
    assert (answer.body["acked"], answer.body["skipped"]) == (1, [1])
    answer = call("POST", f"/v0/topics/{queue}/ack", {"node": "w", "seqs": [1], "lease_ids": []})
    assert answer.body["acked"] == 1


@pytest.mark.parametrize("route", ["ack", "nack", "extend"])
@pytest.mark.parametrize(
    "lease_id", ["lease_0", "lease_" + "f" * 16, "lease_" + "f" * 10, "lease_1", "lease_10000000000"]
)
def test_a_lease_id_that_was_never_issued_is_skipped(
    http_engine: TestEngine, call, queue: str, route: str, lease_id: str
) -> None:
    """Alone, and beside others: the engine takes neighbours with equal or following ids together."""
    put(call, queue, "a", "b", "c")
    claim(call, queue)
    before = http_engine.pid_of("wal_shard")
    for seqs in ([1], [1, 2], [1, 2, 3]):
        body = {"node": "w", "seqs": seqs, "lease_ids": [lease_id] * len(seqs)}
        answer = call("POST", f"/v0/topics/{queue}/{route}", body)
        assert (answer.status, answer.body["skipped"]) == (200, seqs)
    assert stats(call, queue)["in_flight"] == 3
    assert http_engine.pid_of("wal_shard") == before


@pytest.mark.parametrize(
    "body",
    [
        {"seqs": [1], "lease_ids": []}, {"node": "", "seqs": [1]}, {"node": "w"},
        {"node": "w", "seqs": [1], "lease_ids": ["", ""]}, {"node": "w", "seqs": [1], "lease_ids": ["x"]},
        {"node": "w", "seqs": [1], "lease_ids": ["lease_"]}, {"node": "w", "seqs": [-1]},
        {"node": "w", "seqs": [1 << 70]}, {"node": "w", "seqs": ["1"]},
        {"node": "w", "seqs": [1], "lease_ids": ["lease_" + "f" * 17]},
    ],
)  # fmt: skip
def test_a_wrong_ack_is_refused(call, queue: str, body: dict[str, Any]) -> None:
    answer = call("POST", f"/v0/topics/{queue}/ack", body)
    assert (answer.status, answer.body["error"]["code"]) == (400, "invalid_request"), answer


def test_too_many_seqs_are_refused(call, queue: str) -> None:
    for route in ("ack", "nack", "extend", "reject"):
        answer = call("POST", f"/v0/topics/{queue}/{route}", {"node": "w", "seqs": [*range(1, 1_002)]})
        assert (answer.status, answer.body["error"]["code"]) == (400, "batch_too_large")
        assert answer.body["error"]["detail"]["seqs"] == 1_001
        assert answer.body["error"]["detail"]["max"] == 1_000


def test_no_seqs_are_no_error(call, queue: str) -> None:
    answer = call("POST", f"/v0/topics/{queue}/ack", {"node": "w", "seqs": []})
    assert (answer.status, answer.body["acked"], answer.body["skipped"]) == (200, 0, [])


def test_a_nack_delays(call, queue: str) -> None:
    put(call, queue, "a", "b")
    claim(call, queue)
    answer = call("POST", f"/v0/topics/{queue}/nack", {"node": "w", "seqs": [1], "delay_ms": 80_000})
    assert {name: answer.body[name] for name in ("nacked", "skipped", "ready", "in_flight")} == {
        "nacked": 1, "skipped": [], "ready": 0, "in_flight": 1,
    }  # fmt: skip
    call("POST", f"/v0/topics/{queue}/nack", {"node": "w", "seqs": [2]})
    assert [(job["$seq"], job["deliveries"]) for job in claim(call, queue)] == [(2, 2)]
    assert stats(call, queue)["delayed"] == 1


def test_an_extension_names_the_deadlines(call, queue: str) -> None:
    put(call, queue, "a", "b")
    jobs = claim(call, queue, max=1, lease_ms=10_000)
    answer = call("POST", f"/v0/topics/{queue}/extend", {"node": "w", "seqs": [1, 2], "lease_ms": 500_000})
    assert (answer.body["extended"], answer.body["skipped"]) == (1, [2])
    assert set(answer.body["deadlines"]) == {"1"}
    assert answer.body["deadlines"]["1"] > jobs[0]["deadline"] + 400_000


def test_an_expired_lease_cannot_be_settled(call, queue: str) -> None:
    put(call, queue, "a")
    claim(call, queue, lease_ms=100)
    wait_until(lambda: stats(call, queue)["in_flight"] == 0, "the lease ends")
    answer = call("POST", f"/v0/topics/{queue}/ack", {"node": "w", "seqs": [1]})
    assert (answer.body["acked"], answer.body["skipped"], answer.body["ready"]) == (0, [1], 1)


# -- lists, purge, dead letters ---------------------------------------------------------------------


def test_pending_jobs_come_in_pages(call, queue: str) -> None:
    put(call, queue, *range(5))
    jobs = claim(call, queue, max=4)
    call("POST", f"/v0/topics/{queue}/nack", {"node": "w", "seqs": [2], "delay_ms": 90_000, "reason": "busy"})
    found, cursor, pages = [], "", 0
    while True:
        answer = call("GET", f"/v0/topics/{queue}/pending?page_size=2&cursor={cursor}")
        found += answer.body["pending"]
        pages += 1
        if "next_cursor" not in answer.body:
            break
        cursor = answer.body["next_cursor"]
    assert pages == 2
    assert [row["$seq"] for row in found] == [1, 2, 3, 4]
    assert [row["state"] for row in found] == ["leased", "delayed", "leased", "leased"]
    assert [row.get("lease_id") for row in found if row["$seq"] != 2] == [
        job["lease_id"] for job in jobs if job["$seq"] != 2
    ]
    assert (found[1]["reason"], found[1]["failures"]) == ("busy", 1)
    assert call("GET", f"/v0/topics/{queue}/pending?cursor=x").status == 400
    assert call("GET", f"/v0/topics/{queue}/pending?node=other").body["pending"] == []


def test_peek_and_purge(call, queue: str) -> None:
    put(call, queue, {"a": 1}, 2, 3)
    claim(call, queue, max=1)
    answer = call("GET", f"/v0/topics/{queue}/peek?limit=2")
    assert [(job["$seq"], job["data"]) for job in answer.body["jobs"]] == [(1, {"a": 1}), (2, 2)]
    answer = call("POST", f"/v0/topics/{queue}/purge")
    assert (answer.status, answer.body["deleted"]) == (200, 3)
    assert stats(call, queue)["ready"] == stats(call, queue)["in_flight"] == 0


def test_rejected_jobs_become_dead_letters_and_return(call, queue: str) -> None:
    dead = f"{queue}-dead"
    answer = call("POST", f"/v0/topics/{queue}/reject", {"node": "w", "seqs": [1]})
    assert answer.status == 400, "the queue has no dead-letter topic"
    call("PUT", f"/v0/topics/{queue}", {"type": "queue", "max_deliveries": 3, "dead_letter": dead})
    put(call, queue, "a", "b")
    claim(call, queue)
    answer = call("POST", f"/v0/topics/{queue}/reject", {"node": "w", "seqs": [1, 9], "reason": "bad"})
    assert (answer.body["rejected"], answer.body["skipped"]) == (1, [9])
    wait_until(lambda: stats(call, queue)["dead_lettered"] == 1, "the job moves")
    answer = call("POST", f"/v0/topics/{queue}/redrive", {"limit": 0})
    assert (answer.status, answer.body["moved"]) == (200, 0)
    answer = call("POST", f"/v0/topics/{queue}/redrive")
    assert (answer.body["moved"], answer.body["dead_letter"]) == (1, dead)
    assert [job["data"] for job in claim(call, queue)] == ["a"]


# -- the gateway ends -------------------------------------------------------------------------------


def test_an_ack_works_after_the_gateway_was_killed(http_engine: TestEngine, call, queue: str) -> None:
    put(call, queue, "a", "b")
    jobs = claim(call, queue)
    kill_gateway(http_engine, call)
    assert stats(call, queue)["in_flight"] == 2
    answer = call("POST", f"/v0/topics/{queue}/ack", {"node": "w", "seqs": [1]})
    assert (answer.body["acked"], answer.body["in_flight"]) == (1, 1)
    body = {"node": "w", "seqs": [2], "lease_ids": [jobs[1]["lease_id"]]}
    assert call("POST", f"/v0/topics/{queue}/ack", body).body["acked"] == 1


def test_a_waiting_claim_of_a_killed_gateway_takes_no_job(http_engine: TestEngine, call, queue: str) -> None:
    """Not even a job that is put before the next gateway serves requests."""
    with (
        open_request(call, "POST", f"/v0/topics/{queue}/claim", {"node": "w", "wait_ms": 20_000}),
        ringlog.connect(http_engine.url) as client,
    ):
        client.topics.state(queue)
        wait_until(lambda: stats(call, queue)["waiting"] == 1, "the claim waits")
        gateway = os.pidfd_open(http_engine.pid_of("http_gateway"))
        http_engine.kill("http_gateway")
        # Its first thread ends before the others.
        assert select.select([gateway], [], [], 15)[0]
        os.close(gateway)
        client.append(queue, b'"kept"')
        wait_gateway(call)
        [job] = claim(call, queue)
        assert (job["data"], job["deliveries"]) == ("kept", 1)
