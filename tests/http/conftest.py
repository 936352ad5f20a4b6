"""A real engine with the HTTP gateway, and clients for it that need only the standard library."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ringlog.testing.real_engine import TestEngine
from tests.support.engines import engine_fixture
from tests.support.http_client import HttpClient
from tests.support.http_queues import make_queue

http_engine = engine_fixture(
    "module", ready="http_gateway", http={"enabled": True, "port": 0}, delivery={"schedulers": 1}
)
"""A running engine of this module with the HTTP gateway and a delivery scheduler, without keys."""


@pytest.fixture
def call(http_engine: TestEngine) -> Iterator[HttpClient]:
    """`call(method, path, body=None, headers=None)` returns (status, headers, body)."""
    client = HttpClient(http_engine.http_url)
    yield client
    client.close()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic name, or a prefix of names, of this test alone."""
    return "t." + "".join(c if c.isalnum() else "-" for c in request.node.name)[:100]


@pytest.fixture
def queue(call: HttpClient, request: pytest.FixtureRequest) -> str:
    """A queue with the name of the test."""
    return make_queue(call, request)
