"""Without keys, only requests whose Host names loopback are served: DNS rebinding does not get in."""

from __future__ import annotations

import contextlib

import pytest

from ringlog.actors.http_gateway.api.host_check import HostCheck, is_loopback, require_host
from ringlog.errors import Forbidden, InvalidRequest
from tests.support.http_queues import put, stats

LOOPBACK = [
    "localhost", "localhost:4000", "LocalHost:1", "localhost.:80", "127.0.0.1", "127.0.0.1:4000",
    "127.8.9.1:1", "[::1]", "[::1]:4000", "[0:0:0:0:0:0:0:1]:1",
]  # fmt: skip
OTHERS = [
    "", "evil.example", "evil.example:4000", "localhost.evil.example", "127.0.0.1.evil.example",
    "127.0.0.1@evil", "192.168.0.1:4000", "[::2]:1", "[::1", "[::1]x", "::1", "[127.0.0.1]",
    "[localhost]", "localhost:x",
    "0x7f.1", "127.1", "localhost:80:80", "\u0967localhost", "[::ffff:127.0.0.1.evil]", "a" * 10_000,
]  # fmt: skip


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_names_are_admitted(host: str) -> None:
    assert is_loopback(host)
    HostCheck().require_loopback(host)


@pytest.mark.parametrize("host", OTHERS)
def test_other_names_are_refused(host: str) -> None:
    check = HostCheck()
    for _ in range(2):
        with pytest.raises(Forbidden):
            check.require_loopback(host)
    HostCheck(admits_all=True).require_loopback(host)


def test_an_admitted_host_does_not_admit_the_next() -> None:
    check = HostCheck()
    check.require_loopback("127.0.0.1:4000")
    with pytest.raises(Forbidden):
        check.require_loopback("127.0.0.1:4000.evil.example")


@pytest.mark.parametrize("host", ["", None])
def test_a_request_needs_a_host(host: str | None) -> None:
    with pytest.raises(InvalidRequest):
        require_host(host)


@pytest.mark.parametrize("origin", ["", "http://localhost:8000", "https://127.0.0.1", "http://[::1]:3000"])
def test_programs_and_pages_of_this_host_are_admitted(origin: str) -> None:
    """The site of 127.0.0.1 is another one than that of localhost."""
    check = HostCheck()
    check.require_own_page(origin, "")
    if origin:
        check.require_own_page(origin, "cross-site")
    with pytest.raises(Forbidden):
        check.require_own_page("https://evil.example", "")


@pytest.mark.parametrize("origin", ["null", "https://evil.example", "http://[::1", "file://", "x"])
def test_other_pages_are_refused(origin: str) -> None:
    for site in ("", "same-origin", "none", "cross-site"):
        with pytest.raises(Forbidden):
            HostCheck().require_own_page(origin, site)
        HostCheck(admits_all=True).require_own_page(origin, site)


@pytest.mark.parametrize(
    ("site", "is_admitted"),
    [("", True), ("none", True), ("same-origin", True), ("same-site", True), ("cross-site", False)],
)
def test_images_and_links_of_other_pages_are_refused(site: str, is_admitted: bool) -> None:
    """Such a request has no Origin."""
    with contextlib.nullcontext() if is_admitted else pytest.raises(Forbidden):
        HostCheck().require_own_page("", site)
    HostCheck(admits_all=True).require_own_page("", site)


def test_the_gateway_refuses_other_hosts(call) -> None:
    refused = call("GET", "/v0/health", headers={"host": "evil.example"})
    assert (refused.status, refused.body["error"]["code"]) == (403, "forbidden")
    assert call("GET", "/nope", headers={"host": "localhost:1"}).status == 404


def test_the_gateway_refuses_requests_without_a_host(call) -> None:
    assert call.raw(b"GET /v0/health HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_the_gateway_refuses_web_sockets_of_other_pages(call) -> None:
    upgrade = (
        "GET /v0/ws HTTP/1.1\r\nhost: {}\r\nconnection: Upgrade\r\nupgrade: websocket\r\norigin: {}\r\n"
        "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    for host, origin in (("evil.example", "http://localhost"), ("localhost", "https://evil.example")):
        assert call.raw(upgrade.format(host, origin).encode()).startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v0/topics/{}/purge"), ("POST", "/v0/topics/{}/redrive"), ("DELETE", "/v0/topics/{}"),
        ("GET", "/v0/topics/{}/work?node=x&max=1000"), ("POST", "/v0/topics/{}/claim"),
        ("POST", "/v0/topics/{}/groups/g/redrive"), ("GET", "/v0/health"), ("GET", "/none"),
    ],
)  # fmt: skip
def test_the_gateway_refuses_requests_of_other_pages(call, queue: str, method: str, path: str) -> None:
    put(call, queue, 1, 2)
    for sent in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
        refused = call(method, path.format(queue), headers=sent)
        assert (refused.status, refused.body["error"]["code"]) == (403, "forbidden")
    found = stats(call, queue)
    assert (found["ready"], found["in_flight"]) == (2, 0)


def test_the_gateway_serves_pages_of_localhost(call, queue: str) -> None:
    put(call, queue, 1)
    sent = {"origin": "http://localhost:3000", "sec-fetch-site": "same-site"}
    answer = call("POST", f"/v0/topics/{queue}/purge", headers=sent)
    assert (answer.status, answer.body["deleted"]) == (200, 1)
