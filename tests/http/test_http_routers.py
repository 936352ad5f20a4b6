"""Routers over HTTP: shapes, refusals, and copies that are there when the source is acked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Call = Callable[..., Any]


def test_put_creates_then_resets_what_is_left_out(call: Call, topic: str) -> None:
    path, ends = f"/v0/routers/{topic}", {"source": f"{topic}.a", "dest": f"{topic}.b"}
    made = call("PUT", path, {**ends, "filter": "x*", "preserve_tag": False, "allow_cycle": True})
    assert made.status == 201
    expected = {
        "router": topic, "created": True, **ends, "preserve_node": True, "preserve_tag": False,
        "filter": ["tag", "Glob", "x*"], "allow_cycle": True, "guarantee": "at_least_once",
        "forwarded_total": 0,
    }  # fmt: skip
    assert {key: value for key, value in made.body.items() if key != "performance"} == expected
    again = call("PUT", path, {**ends, "filter": None})
    assert again.status == 200
    reset = {"created": False, "preserve_tag": True, "filter": None, "allow_cycle": False}
    assert {key: again.body[key] for key in reset} == reset
    for end in ends.values():
        assert call("GET", f"/v0/topics/{end}").status == 200


def test_copies_are_there_when_the_source_is_acked(call: Call, topic: str) -> None:
    call("PUT", f"/v0/routers/{topic}", {"source": f"{topic}.a", "dest": f"{topic}.b", "filter": "x"})
    records = [{"data": 1, "tag": "x"}, {"data": 2}, {"data": 3, "tag": "x"}]
    call("POST", f"/v0/topics/{topic}.a", {"records": records})
    found = call("GET", f"/v0/routers/{topic}").body
    assert (found["forwarded_total"], found["cursor"], found["lag"]) == (2, 3, 0)
    assert call("GET", f"/v0/topics/{topic}.b").body["count"] == 2


def test_a_cycle_is_refused_with_its_topics(call: Call, topic: str) -> None:
    a, b = f"{topic}.a", f"{topic}.b"
    call("PUT", f"/v0/routers/{topic}", {"source": a, "dest": b})
    refused = call("PUT", f"/v0/routers/{topic}.back", {"source": b, "dest": a})
    assert (refused.status, refused.body["error"]["code"]) == (409, "router_cycle")
    assert set(refused.body["error"]["detail"]["cycle"]) == {a, b}
    assert (
        call("PUT", f"/v0/routers/{topic}.back", {"source": b, "dest": a, "allow_cycle": True}).status == 201
    )


def test_a_second_source_and_a_new_end_are_refused(call: Call, topic: str) -> None:
    a, b, c = (f"{topic}.{end}" for end in "abc")
    call("PUT", f"/v0/routers/{topic}", {"source": a, "dest": b})
    for router, ends, reason in (
        (f"{topic}.2", {"source": c, "dest": b}, "router_dest_fan_in"),
        (topic, {"source": a, "dest": c}, "router_repoint_forbidden"),
    ):
        refused = call("PUT", f"/v0/routers/{router}", ends)
        assert (refused.status, refused.body["error"]["code"]) == (409, "topic_exists_incompatible")
        assert refused.body["error"]["detail"]["reason"] == reason
    assert call("GET", f"/v0/topics/{c}").status == 404  # A refusal leaves nothing behind.


def test_wrong_bodies_are_refused(call: Call, topic: str) -> None:
    a, b = f"{topic}.a", f"{topic}.b"
    bodies: list[dict[str, Any]] = [
        {}, {"source": a}, {"dest": b}, {"source": a, "dest": a}, {"source": "", "dest": b},
        {"source": a, "dest": ".b"}, {"source": a, "dest": b, "filter": ["tag", "Glob", "x"]},
        {"source": a, "dest": b, "guarantee": "perhaps"}, {"source": a, "dest": b, "preserve_tag": None},
    ]  # fmt: skip
    for body in bodies:
        assert call("PUT", f"/v0/routers/{topic}", body).status == 400, body
    assert call("PUT", "/v0/routers/.x", {"source": a, "dest": b}).status == 400
    absent = call("PUT", f"/v0/routers/{topic}", {"source": a, "dest": b, "create_dest": False})
    assert (absent.status, absent.body["error"]["detail"]) == (404, {"topic": b})
    assert call("GET", f"/v0/topics/{b}").status == 404


def test_lists_by_source_in_pages(call: Call, topic: str) -> None:
    a = f"{topic}.a"
    for n in range(3):
        call("PUT", f"/v0/routers/{topic}.{n}", {"source": a, "dest": f"{topic}.d{n}"})
    call("PUT", f"/v0/routers/{topic}.x", {"source": f"{topic}.d0", "dest": f"{topic}.e"})
    first = call("GET", f"/v0/routers?source={a}&page_size=2").body
    assert [each["router"] for each in first["routers"]] == [f"{topic}.0", f"{topic}.1"]
    rest = call("GET", f"/v0/routers?source={a}&page_size=2&cursor={first['next_cursor']}").body
    assert [each["router"] for each in rest["routers"]] == [f"{topic}.2"]
    assert "next_cursor" not in rest
    assert len(call("GET", f"/v0/routers?prefix={topic}.").body["routers"]) == 4
    assert len(call("GET", f"/v0/routers?dest={topic}.e").body["routers"]) == 1


def test_delete_is_idempotent_and_a_topic_takes_its_routers_along(call: Call, topic: str) -> None:
    a, b, c = (f"{topic}.{end}" for end in "abc")
    call("PUT", f"/v0/routers/{topic}.1", {"source": a, "dest": b})
    call("PUT", f"/v0/routers/{topic}.2", {"source": b, "dest": c})
    assert call("DELETE", f"/v0/topics/{b}").body["routers_removed"] == [f"{topic}.1", f"{topic}.2"]
    assert call("PUT", f"/v0/routers/{topic}.3", {"source": a, "dest": c}).status == 201
    assert call("DELETE", f"/v0/routers/{topic}.3").body["deleted"] is True
    assert call("DELETE", f"/v0/routers/{topic}.3").body["deleted"] is False
    absent = call("GET", f"/v0/routers/{topic}.3")
    assert (absent.status, absent.body["error"]["code"]) == (404, "router_not_found")


def test_routers_of_a_deleted_topic_oppose_no_new_ones(call: Call, topic: str) -> None:
    """Their shards remove them a moment after the topic. Neither a cycle, nor another source of their
    destination, nor their own name counts any more."""
    for i in range(60):
        a, b, c, d = (f"{topic}.{i}.{end}" for end in "abcd")
        assert call("PUT", f"/v0/routers/{topic}.{i}.1", {"source": a, "dest": b}).status == 201
        assert call("PUT", f"/v0/routers/{topic}.{i}.2", {"source": b, "dest": c}).status == 201
        assert call("DELETE", f"/v0/topics/{b}").body["deleted"]
        new = {1: (c, a), 2: (a, c), 0: (d, c)}[i % 3]
        router = f"{topic}.{i}.{2 if i % 3 == 0 else 3}"
        answer = call("PUT", f"/v0/routers/{router}", dict(zip(("source", "dest"), new, strict=True)))
        assert (answer.status, answer.body["created"]) == (201, True), answer.body
