"""Topics over HTTP: configure, state, list, delete, delete records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ringlog.actors.http_gateway.admin.topics import (
    config_echo,
    decode_cursor,
    effective_priority,
    encode_cursor,
    requested_settings,
)
from ringlog.errors import InvalidRequest

Call = Callable[..., Any]
DEFAULTS = {
    "type": "log", "ttl_ms": 0, "cap_records": 0, "cap_bytes": 0, "discard": "old", "durable": False,
    "durability": "disk", "priority": None, "auto_priority": True, "auto_create": True,
    "idempotency_window_ms": 120_000, "dedupe_node": True, "lease_ms": 30_000, "claim_jitter_ms": 0,
    "max_deliveries": 0, "dead_letter": None, "leases_durable": False,
}  # fmt: skip


# -- settings ---------------------------------------------------------------------------------------------


def test_put_creates_then_replaces_the_whole_configuration(call: Call, topic: str) -> None:
    path = f"/v0/topics/{topic}"
    made = call("PUT", path, {"ttl_ms": 5_000, "durable": True})
    assert (made.status, made.body["created"], made.body["topic"]) == (201, True, topic)
    assert made.body["config"] == DEFAULTS | {"ttl_ms": 5_000, "durable": True, "durability": "fsync"}
    assert made.body["performance"]["server_total_ms"] >= 0
    again = call("PUT", path, {"cap_records": 7})
    assert (again.status, again.body["created"]) == (200, False)
    assert again.body["config"] == DEFAULTS | {"cap_records": 7}
    assert call("PUT", path).body["config"] == DEFAULTS  # An empty body needs no content type.


def test_put_clamps_numbers_and_ignores_unknown_settings(call: Call, topic: str) -> None:
    body = {"priority": 5_000, "lease_ms": 1, "claim_jitter_ms": 9_999, "type": "queue", "colour": None}
    config = call("PUT", f"/v0/topics/{topic}", body).body["config"]
    assert (config["priority"], config["lease_ms"], config["claim_jitter_ms"]) == (1_000, 100, 5_000)


def test_settings_of_ours_are_echoed_beside_the_config(call: Call, topic: str) -> None:
    made = call("PUT", f"/v0/topics/{topic}", {"compression": "lz4", "durability": None}).body
    assert (made["config"], made["config_extra"]) == (DEFAULTS, {"compression": "lz4"})
    assert "config_extra" not in call("PUT", f"/v0/topics/{topic}", {}).body


def test_a_type_cannot_change(call: Call, topic: str) -> None:
    call("PUT", f"/v0/topics/{topic}", {"ttl_ms": 9})
    refused = call("PUT", f"/v0/topics/{topic}", {"type": "queue"})
    assert (refused.status, refused.body["error"]["code"]) == (409, "topic_exists_incompatible")
    detail = {"topic": topic, "existing_type": "log", "requested_type": "queue"}
    assert refused.body["error"]["detail"] == detail
    assert call("GET", f"/v0/topics/{topic}").body["config"]["ttl_ms"] == 9


@pytest.mark.parametrize("name", [".hidden", "-x", "a%20b", "x" * 256])
def test_an_illegal_name_creates_nothing(call: Call, name: str) -> None:
    assert call("PUT", f"/v0/topics/{name}", {}).status == 400
    assert call("GET", f"/v0/topics/{name}").status == 404
    assert call("DELETE", f"/v0/topics/{name}").body["deleted"] is False


@pytest.mark.parametrize(
    "config",
    [
        {"ttl_ms": -1}, {"ttl_ms": "5"}, {"ttl_ms": None}, {"ttl_ms": 1.5}, {"durable": 1}, {"type": "list"},
        {"discard": None}, {"dead_letter": ".x"}, {"cap_records": True},
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        requested_settings(config)


def test_settings_without_effect_on_a_log_are_stored(call: Call, topic: str) -> None:
    given = {"max_deliveries": 3, "dead_letter": "d", "leases_durable": True, "lease_ms": 5_000}
    put = call("PUT", f"/v0/topics/{topic}", {**given, "ttl_ms": 1 << 63})
    assert put.body["config"] == {**DEFAULTS, **given, "ttl_ms": 3_153_600_000_000}
    assert call("GET", f"/v0/topics/{topic}").body["config"] == put.body["config"]
    assert call("PUT", f"/v0/topics/{topic}", {**given, "ttl_ms": 1 << 63}).status == 200
    assert call("POST", f"/v0/topics/{topic}/claim", {"node": "n"}).status == 409


def test_a_write_stores_settings_without_effect_too(call: Call, topic: str) -> None:
    body = {"records": [{"data": 1}], "config": {"max_deliveries": 3}}
    assert call("POST", f"/v0/topics/{topic}", body).status == 201
    assert call("GET", f"/v0/topics/{topic}").body["config"]["max_deliveries"] == 3


def test_a_queue_is_not_its_own_dead_letter_topic(call: Call, topic: str) -> None:
    assert call("PUT", f"/v0/topics/{topic}", {"type": "queue", "dead_letter": topic}).status == 400


def test_the_echo_has_always_the_same_fields() -> None:
    assert config_echo({}) == {"config": DEFAULTS}


def test_effective_priority_follows_the_last_consumption() -> None:
    now = 10_000_000_000
    assert effective_priority({"priority": 7}, now, now) == 7
    assert effective_priority({}, None, now) == 0
    assert effective_priority({}, now - 90_000_000, now) == 63
    assert effective_priority({"auto_priority": False}, now, now) == 0


# -- state ------------------------------------------------------------------------------------------------


def test_state_has_all_fields(call: Call, topic: str) -> None:
    call("POST", f"/v0/topics/{topic}", {"records": [{"data": 1}, {"data": 2}]})
    quiet = call("GET", f"/v0/topics/{topic}?touch=false").body
    assert quiet["last_read_ts"] is None
    assert quiet["effective_priority"] == 0
    state = call("GET", f"/v0/topics/{topic}").body
    numbers = {name: state[name] for name in ("head_seq", "earliest_seq", "next_seq", "count")}
    assert numbers == {"head_seq": 2, "earliest_seq": 1, "next_seq": 3, "count": 2}
    assert (state["topic"], state["type"], state["config"]) == (topic, "log", DEFAULTS)
    assert state["bytes"] > 0
    assert state["last_write_ts"] > 0
    assert "queue" not in state
    assert call("GET", f"/v0/topics/{topic}?touch=false").body["effective_priority"] > 0


def test_state_of_a_queue_counts_its_jobs(call: Call, topic: str) -> None:
    call("PUT", f"/v0/topics/{topic}", {"type": "queue"})
    call("POST", f"/v0/topics/{topic}", {"records": [{"data": 1}, {"data": 2}]})
    state = call("GET", f"/v0/topics/{topic}").body
    assert state["queue"] == {"ready": 2, "in_flight": 0, "dead_lettered": 0}


def test_state_creates_nothing(call: Call, topic: str) -> None:
    for _ in range(2):
        absent = call("GET", f"/v0/topics/{topic}")
        assert (absent.status, absent.body["error"]["detail"]) == (404, {"topic": topic})


# -- list -------------------------------------------------------------------------------------------------


def test_a_list_comes_in_pages(call: Call, topic: str) -> None:
    names = [f"{topic}.{n}" for n in range(5)]
    for name in reversed(names):
        call("PUT", f"/v0/topics/{name}", {})
    found, path = [], f"/v0/topics?prefix={topic}.&page_size=2"
    pages, cursor = 0, ""
    while True:
        body = call("GET", f"{path}&cursor={cursor}").body
        found += [each["topic"] for each in body["topics"]]
        pages += 1
        if "next_cursor" not in body:
            break
        cursor = body["next_cursor"]
    assert (found, pages) == (names, 3)
    row = {"topic", "head_seq", "earliest_seq", "count", "bytes", "durable", "effective_priority"}
    assert set(call("GET", path).body["topics"][0]) == row


def test_a_full_last_page_has_no_cursor(call: Call, topic: str) -> None:
    for n in range(2):
        call("PUT", f"/v0/topics/{topic}.{n}", {})
    assert "next_cursor" not in call("GET", f"/v0/topics?prefix={topic}.&page_size=2").body


def test_a_wrong_cursor_is_refused_and_a_wrong_page_size_is_the_default(call: Call) -> None:
    assert call("GET", "/v0/topics?cursor=%21%21").status == 400
    assert call("GET", "/v0/topics?page_size=many").status == 200


def test_cursors() -> None:
    for name in ("a", "ab", "abc", "a:b.c-d"):
        assert decode_cursor(encode_cursor(name)) == name
    assert decode_cursor("") == ""
    for cursor in ("a", "é", "_w", "x" * 5_000):
        with pytest.raises(InvalidRequest):
            decode_cursor(cursor)


# -- delete -----------------------------------------------------------------------------------------------


def test_delete_removes_a_topic_once(call: Call, topic: str) -> None:
    call("POST", f"/v0/topics/{topic}", {"records": [{"data": 1}]})
    refused = call("DELETE", f"/v0/topics/{topic}?if_empty=true")
    assert (refused.status, refused.body["error"]["code"]) == (409, "topic_not_empty")
    assert refused.body["error"]["detail"] == {"topic": topic, "count": 1}
    gone = call("DELETE", f"/v0/topics/{topic}")
    assert (gone.status, gone.body["deleted"], gone.body["routers_removed"]) == (200, True, [])
    again = call("DELETE", f"/v0/topics/{topic}")
    assert (again.status, again.body["deleted"], again.body["routers_removed"]) == (200, False, [])
    assert call("GET", f"/v0/topics/{topic}").status == 404


def test_delete_records_by_position_and_by_tag(call: Call, topic: str) -> None:
    path = f"/v0/topics/{topic}/delete"
    tags = ["a1", "a2", "b", None, "b"]
    call("POST", f"/v0/topics/{topic}", {"records": [{"data": n, "tag": tag} for n, tag in enumerate(tags)]})
    first = call("POST", path, {"match": "a*"}).body
    assert (first["deleted"], first["earliest_seq"], first["head_seq"], first["count"]) == (2, 3, 5, 3)
    assert call("POST", path, {"match": "a*"}).body["deleted"] == 0
    assert call("POST", path, {"match": ["tag", "Eq", "b"], "before_seq": 4}).body["deleted"] == 1
    assert call("POST", path, {"before_seq": 0}).body["deleted"] == 0
    assert call("POST", path, {"before_seq": 0, "match": "b"}).body["deleted"] == 0
    rest = call("POST", path, {"before_seq": (1 << 64) - 1}).body
    assert (rest["deleted"], rest["earliest_seq"], rest["count"], rest["bytes"]) == (2, 6, 0, 0)


@pytest.mark.parametrize(
    "body",
    [
        {}, {"match": ["tag", "Glob", "a"]}, {"match": ["node", "Eq", "a"]}, {"match": ["tag", "Like", "a"]},
        {"match": ["tag", "a"]}, {"match": 5}, {"before_seq": -1}, {"before_seq": None}, {"before_seq": "5"},
    ],
)  # fmt: skip
def test_a_wrong_deletion_is_refused(call: Call, topic: str, body: Any) -> None:
    call("PUT", f"/v0/topics/{topic}", {})
    refused = call("POST", f"/v0/topics/{topic}/delete", body)
    assert (refused.status, refused.body["error"]["code"]) == (400, "invalid_request")


def test_a_deletion_needs_a_topic_and_a_content_type(call: Call, topic: str) -> None:
    assert call("POST", f"/v0/topics/{topic}/delete", {"before_seq": 5}).status == 404
    assert call("POST", f"/v0/topics/{topic}/delete", b"{}", {"content-type": "text/plain"}).status == 415
