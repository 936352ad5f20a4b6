"""Consumer groups over HTTP, in both modes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.http_queues import wait_until


@pytest.fixture
def topic(call, request) -> str:
    """A topic of this test with five records."""
    name = f"t-{request.node.name}"
    records = [{"data": n, "tag": "even" if n % 2 == 0 else "odd"} for n in range(1, 6)]
    assert call("POST", f"/v0/topics/{name}", {"records": records}).status == 201
    return name


def ask(call, topic: str, what: str, **body: Any) -> Any:
    answer = call("POST", f"/v0/topics/{topic}/groups/{what}", body)
    assert answer.status == 200, answer
    return answer.body


def seqs(body: Any) -> list[int]:
    return [job["$seq"] for job in body["claimed"]]


def test_a_group_is_created_once(call, topic: str) -> None:
    path = f"/v0/topics/{topic}/groups/g"
    answer = call("PUT", path, {"mode": "queue", "max_in_flight": 3})
    assert (answer.status, answer.body["created"], answer.body["max_in_flight"]) == (201, True, 3)
    answer = call("PUT", path, {"mode": "queue"})
    assert (answer.status, answer.body["created"]) == (200, False)
    answer = call("PUT", path, {"mode": "queue", "max_in_flight": 4})
    assert (answer.status, answer.body["error"]["code"]) == (409, "group_incompatible")
    assert call("PUT", path, {"mode": "stream"}).status == 409
    assert call("PUT", path, {}).status == 400
    assert call("PUT", "/v0/topics/absent/groups/g", {"mode": "queue"}).status == 404
    listed = call("GET", f"/v0/topics/{topic}/groups").body["groups"]
    assert [(group["group"], group["mode"]) for group in listed] == [("g", "queue")]
    assert call("DELETE", path).body["deleted"] is True
    assert call("DELETE", path).body["deleted"] is False
    assert call("GET", path).status == 404
    assert call("POST", f"{path}/claim", {"node": "m"}).status == 404


def test_members_share_the_records(call, topic: str) -> None:
    call("PUT", f"/v0/topics/{topic}/groups/g", {"mode": "queue"})
    first = ask(call, topic, "g/claim", node="m1", max=2)
    assert (first["group"], seqs(first)) == ("g", [1, 2])
    assert seqs(ask(call, topic, "g/claim", node="m2", max=2)) == [3, 4]
    found = ask(call, topic, "g/ack", node="m1", seqs=[1, 3])
    assert (found["acked"], found["skipped"]) == (1, [3])
    ask(call, topic, "g/nack", node="m2", seqs=[3])
    extended = ask(call, topic, "g/extend", node="m2", seqs=[4], lease_ms=100_000)
    assert (extended["extended"], list(extended["deadlines"])) == (1, ["4"])
    state = call("GET", f"/v0/topics/{topic}/groups/g").body
    assert (state["lag"], state["undelivered"], state["in_flight"], state["returned"]) == (4, 1, 2, 1)
    assert {member["node"] for member in state["members"]} >= {"m1", "m2"}
    rows = call("GET", f"/v0/topics/{topic}/groups/g/pending").body["pending"]
    assert [(row["$seq"], row["state"]) for row in rows] == [(2, "leased"), (3, "returned"), (4, "leased")]
    assert ask(call, topic, "g/leave", node="m1")["released"] == 1
    assert seqs(ask(call, topic, "g/claim", node="m2", max=9)) == [2, 3, 5]
    assert call("GET", f"/v0/topics/{topic}").body["count"] == 5, "an ack deletes nothing"


def test_a_tag_filter_is_part_of_the_key(call, topic: str) -> None:
    answer = call("PUT", f"/v0/topics/{topic}/groups/g", {"mode": "queue", "tags": "even"})
    assert answer.status == 201, answer
    key = answer.body["group"]
    assert key == "g@=even"
    assert answer.body["tags"] == ["tag", "Eq", "even"]
    assert seqs(ask(call, topic, f"{key}/claim", node="m", max=9)) == [2, 4]
    assert ask(call, topic, f"{key}/ack", node="m", seqs=[2, 4])["acked"] == 2


def test_a_group_starts_and_moves_where_it_is_told(call, topic: str) -> None:
    call("PUT", f"/v0/topics/{topic}/groups/g", {"mode": "queue", "start": 4})
    assert seqs(ask(call, topic, "g/claim", node="m", max=9)) == [4, 5]
    assert ask(call, topic, "g/seek", start="earliest")["cursor"] == 1
    assert seqs(ask(call, topic, "g/claim", node="m", max=9)) == [1, 2, 3, 4, 5]
    ask(call, topic, "g/seek", start="latest")
    assert seqs(ask(call, topic, "g/claim", node="m", max=9)) == []
    assert ask(call, topic, "g/seek", start={"ts": 0})["cursor"] == 1
    assert call("POST", f"/v0/topics/{topic}/groups/g/seek", {"start": "middle"}).status == 400


def test_dead_letters_of_a_group_are_delivered_again(call, topic: str) -> None:
    dead = f"{topic}-dead"
    call("PUT", f"/v0/topics/{topic}/groups/g", {"mode": "queue", "dead_letter": dead, "max_deliveries": 5})
    ask(call, topic, "g/claim", node="m", max=1)
    assert ask(call, topic, "g/reject", node="m", seqs=[1], reason="bad")["rejected"] == 1
    wait_until(lambda: call("GET", f"/v0/topics/{dead}").body.get("count") == 1, "the letter is written")
    found = ask(call, topic, "g/redrive")
    assert (found["moved"], found["dead_letter"]) == (1, dead)
    assert seqs(ask(call, topic, "g/claim", node="m", max=1)) == [1]


def test_one_node_at_a_time_reads_a_stream_group(call, topic: str) -> None:
    call("PUT", f"/v0/topics/{topic}/groups/s", {"mode": "stream"})
    old = ask(call, topic, "s/take", node="m1")
    assert (old["committed"], old["next_from_seq"]) == (0, 0)
    assert ask(call, topic, "s/commit", token=old["token"], seq=2)["is_reader"] is True
    new = ask(call, topic, "s/take", node="m2")
    assert (new["committed"], new["token"] != old["token"]) == (2, True)
    late = ask(call, topic, "s/commit", token=old["token"], seq=4)
    assert (late["is_reader"], late["committed"]) == (False, 2)
    assert ask(call, topic, "s/commit", token=new["token"], seq=5, delivered=5)["committed"] == 5
    state = call("GET", f"/v0/topics/{topic}/groups/s").body
    assert (state["lag"], state["reader"], state["mode"]) == (0, "m2", "stream")
    assert call("POST", f"/v0/topics/{topic}/groups/s/claim", {"node": "m"}).status == 409
    assert call("POST", f"/v0/topics/{topic}/groups/s/commit", {"token": "x", "seq": 1}).status == 400
