"""The time in which the body of a request must arrive, or what is left of it after the answer."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ringlog.access.keys import ANYONE
from ringlog.actors.http_gateway.api.error_replies import HttpError
from ringlog.actors.http_gateway.api.request import Request
from ringlog.actors.http_gateway.api.request_body import RequestBody
from ringlog.actors.http_gateway.gateway import Gateway
from ringlog.clock import SystemClock
from ringlog.config import Config
from ringlog.limits import HTTP_BODY_S_MAX, HTTP_DISCARD_S_MAX

HEADERS = {"content-type": "application/json", "content-length": "10"}


class SilentProtocol:
    """The connection of a client that sends a head and no body."""

    async def __call__(self) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    def __aiter__(self) -> SilentProtocol:
        return self

    async def __anext__(self) -> bytes:
        return await self()


def silent_request() -> tuple[Any, Request, RequestBody]:
    """Return a gateway with the clock and the table of late bodies, and a request without its body."""
    gateway = SimpleNamespace(
        reading={}, discarding={}, is_draining=False, clock=SystemClock(), settings=Config()
    )
    scope = SimpleNamespace(headers=HEADERS, http_version="1.1", query_string="")
    protocol = SilentProtocol()
    body = RequestBody(cast("Any", gateway), cast("Any", scope), cast("Any", protocol))
    args: Any = (gateway, scope, protocol, body, None, ("t",))
    return gateway, Request(*args, ANYONE, ""), body


def after(gateway: Any, seconds: float) -> int:
    now_ns: int = gateway.clock.monotonic_ns()
    return now_ns + round(seconds * 1e9)


async def test_a_body_that_does_not_arrive_is_answered_with_408() -> None:
    gateway, request, body = silent_request()
    reading = asyncio.ensure_future(request.body())
    await asyncio.sleep(0)
    Gateway.end_late_bodies(cast("Gateway", gateway), after(gateway, HTTP_BODY_S_MAX - 5))
    assert len(gateway.reading) == 1
    Gateway.end_late_bodies(cast("Gateway", gateway), after(gateway, HTTP_BODY_S_MAX + 1))
    with pytest.raises(HttpError) as caught:
        await reading
    assert (caught.value.http_status, caught.value.http_code) == (408, "request_timeout")
    assert not gateway.reading
    assert body.is_left
    assert body.ends_connection


async def test_a_body_without_a_reader_is_not_awaited_for_long() -> None:
    gateway, _, body = silent_request()
    assert body.is_left
    assert not body.ends_connection
    discarding = asyncio.ensure_future(body.discard())
    await asyncio.sleep(0)
    Gateway.end_late_bodies(cast("Gateway", gateway), after(gateway, HTTP_DISCARD_S_MAX - 1))
    assert len(gateway.discarding) == 1
    Gateway.end_late_bodies(cast("Gateway", gateway), after(gateway, HTTP_DISCARD_S_MAX + 1))
    await discarding
    assert not gateway.discarding


async def test_a_stop_waits_for_no_body_without_a_reader() -> None:
    gateway, _, body = silent_request()
    discarding = asyncio.ensure_future(body.discard())
    await asyncio.sleep(0)
    Gateway.end_discards(cast("Gateway", gateway))
    await discarding
    assert not gateway.discarding
    gateway.is_draining = True
    assert body.ends_connection
    await body.discard()


async def test_a_client_that_leaves_is_no_timeout() -> None:
    gateway, request, _ = silent_request()
    reading = asyncio.ensure_future(request.body())
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not gateway.reading
