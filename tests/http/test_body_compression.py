"""Replies that are compressed for clients that accept gzip."""

from __future__ import annotations

import gzip
import json

import pytest

from ringlog.actors.http_gateway.api.body_compression import accepts_gzip
from ringlog.limits import HTTP_GZIP_BYTES_MIN, HTTP_GZIP_INLINE_BYTES_MAX
from tests.support.http_client import HttpClient


@pytest.mark.parametrize(
    ("header", "accepts"),
    [
        ("gzip", True), ("GZIP", True), ("gzip, deflate, br", True), ("deflate, gzip;q=0.5", True),
        ("*", True), ("gzip; q=1.0", True), ("", False), ("br", False), ("gzip;q=0", False),
        ("gzip; q=0.000, br", False), ("*;q=0", False), ("gzip;q=0, *", False), ("identity", False),
    ],
)  # fmt: skip
def test_which_clients_accept_gzip(header: str, accepts: bool) -> None:
    assert accepts_gzip(header) is accepts


@pytest.mark.parametrize("size", [HTTP_GZIP_BYTES_MIN, 4 * HTTP_GZIP_INLINE_BYTES_MAX])
def test_long_replies_are_compressed_for_clients_that_accept_it(call: HttpClient, size: int) -> None:
    """A large one is made in a thread."""
    path = f"/v0/topics/packed-{size}"
    call("POST", path, {"records": [{"data": "x" * size}]})
    plain = call("POST", f"{path}/diff", {})
    assert "content-encoding" not in plain.headers
    found = call("POST", f"{path}/diff", {}, {"accept-encoding": "gzip"})
    assert (found.headers["content-encoding"], found.headers["vary"]) == ("gzip", "accept-encoding")
    assert int(found.headers["content-length"]) < size
    assert json.loads(gzip.decompress(found.body))["records"] == plain.body["records"]
    refusing = call("POST", f"{path}/diff", {}, {"accept-encoding": "gzip;q=0"})
    assert "content-encoding" not in refusing.headers


def test_short_replies_are_not_compressed(call: HttpClient) -> None:
    found = call("GET", "/v0/topics?prefix=no-such-", headers={"accept-encoding": "gzip"})
    assert "content-encoding" not in found.headers
    assert found.body["topics"] == []
