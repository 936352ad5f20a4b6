"""Keys of topics, routers and metrics over HTTP: a key neither reads nor learns of what it does not cover."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ringlog.testing
from ringlog.testing.real_engine import TestEngine
from tests.support.http_client import HttpClient

pytestmark = pytest.mark.slow

OWNER = "owner-" + "a" * 40
MINE = "mine-" + "b" * 40
READER = "reader-" + "c" * 40
ENVIRON = {"RINGLOG_API_KEYS": f"{OWNER},{MINE}::mine.|also.,{READER}:read:mine."}


@pytest.fixture(scope="module")
def engine_with_keys() -> Iterator[TestEngine]:
    """An engine with three keys, topics inside and outside of the prefixes, and routers between them."""
    settings = {"enabled": True, "port": 0}
    with ringlog.testing.engine(http=settings, delivery={"schedulers": 1}, environ=ENVIRON) as running:
        running.wait_ready("http_gateway")
        owner = HttpClient(running.http_url, OWNER)
        for name in ("also.x", "hidden.1", "hidden.2", "mine.a", "mine.b", "z"):
            assert owner("PUT", f"/v0/topics/{name}", {}).status == 201
        for router, source, dest in (
            ("mine.in", "mine.a", "mine.b"), ("mine.out", "mine.a", "hidden.2"), ("r", "mine.a", "mine.c"),
        ):  # fmt: skip
            assert owner("PUT", f"/v0/routers/{router}", {"source": source, "dest": dest}).status == 201
        owner.close()
        yield running


def test_lists_show_only_what_the_key_covers(engine_with_keys: TestEngine) -> None:
    mine = HttpClient(engine_with_keys.http_url, MINE)
    found, cursor = [], ""
    while True:
        body = mine("GET", f"/v0/topics?page_size=2&cursor={cursor}").body
        found += [each["topic"] for each in body["topics"]]
        if "next_cursor" not in body:
            break
        cursor = body["next_cursor"]
    assert found == ["also.x", "mine.a", "mine.b", "mine.c"]
    # The last topic that is shown has no cursor after it, although hidden ones follow.
    assert "next_cursor" not in mine("GET", "/v0/topics?page_size=4").body
    assert mine("GET", "/v0/topics?prefix=hidden").body["topics"] == []
    assert [each["router"] for each in mine("GET", "/v0/routers").body["routers"]] == ["mine.in"]
    assert mine("GET", "/v0/routers?dest=hidden.2").body["routers"] == []
    mine.close()


def test_names_outside_of_the_prefixes_are_refused(engine_with_keys: TestEngine) -> None:
    mine = HttpClient(engine_with_keys.http_url, MINE)
    refused = [
        ("GET", "/v0/topics/hidden.1", None), ("GET", "/v0/topics/absent", None),
        ("PUT", "/v0/topics/hidden.1", {}), ("DELETE", "/v0/topics/hidden.1", None),
        ("POST", "/v0/topics/hidden.1/delete", {"before_seq": 5}),
        ("PUT", "/v0/topics/mine.q", {"type": "queue", "dead_letter": "hidden.1"}),
        ("GET", "/v0/routers/mine.out", None), ("DELETE", "/v0/routers/mine.out", None),
        ("GET", "/v0/routers/r", None),
        ("PUT", "/v0/routers/mine.x", {"source": "mine.b", "dest": "hidden.1"}),
        ("PUT", "/v0/routers/mine.x", {"source": "hidden.1", "dest": "mine.d"}),
    ]  # fmt: skip
    for method, path, body in refused:
        answer = mine(method, path, body)
        assert (answer.status, answer.body["error"]["code"]) == (403, "forbidden"), (method, path)
    assert mine("GET", "/v0/topics/mine.q").status == 404  # A refusal has no effect.
    assert mine("GET", "/v0/topics/mine.d").status == 404
    assert mine("GET", "/v0/routers/mine.in").status == 200
    mine.close()


def test_a_reader_changes_nothing(engine_with_keys: TestEngine) -> None:
    reader = HttpClient(engine_with_keys.http_url, READER)
    assert reader("GET", "/v0/topics/mine.a").status == 200
    for method, path, scope in (
        ("PUT", "/v0/topics/mine.a", "admin"), ("DELETE", "/v0/topics/mine.a", "delete"),
        ("DELETE", "/v0/routers/mine.in", "delete"), ("PUT", "/v0/routers/mine.in", "admin"),
        ("POST", "/v0/topics/mine.a/delete", "delete"),
    ):  # fmt: skip
        answer = reader(method, path, {})
        assert (answer.status, answer.body["error"]["detail"]["required_scope"]) == (403, scope)
    reader.close()


def test_metrics_name_only_topics_that_the_key_covers(engine_with_keys: TestEngine) -> None:
    for key, hidden in ((OWNER, True), (READER, False)):
        client = HttpClient(engine_with_keys.http_url, key)
        text = client("GET", "/v0/metrics").body.decode()
        assert 'ringlog_topic_records{topic="mine.a"} 0' in text
        assert ('topic="hidden.1"' in text) is hidden
        client.close()


def test_two_keys_in_one_request_are_none(engine_with_keys: TestEngine) -> None:
    """A proxy may have checked the other one."""
    client = HttpClient(engine_with_keys.http_url)
    for keys, status in (((OWNER,), b"200"), ((OWNER, OWNER), b"401"), (("unknown", OWNER), b"401")):
        lines = "".join(f"authorization: Bearer {key}\r\n" for key in keys)
        found = client.raw(f"GET /v0/topics HTTP/1.1\r\nhost: localhost\r\n{lines}\r\n".encode())
        assert found.split(b" ")[1] == status
    client.close()


def test_probes_need_no_key_and_metrics_need_one(engine_with_keys: TestEngine) -> None:
    for key, path, status in (
        ("", "/v0/health", 200), ("", "/healthz", 200), ("", "/v0/ready", 200), ("", "/v0/metrics", 401),
        ("unknown", "/v0/metrics", 401), (READER, "/v0/metrics", 200), ("", "/v0/openapi.json", 401),
        ("", "/v0/topics", 401), (READER, "/v0/openapi.json", 200),
    ):  # fmt: skip
        client = HttpClient(engine_with_keys.http_url, key)
        assert client("GET", path).status == status, (key, path)
        client.close()
