"""What begins to wait while the gateway stops, or after its key has changed, ends at once with an answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from ringlog.access.key_ring import BearerKeys, key_id
from ringlog.access.keys import ANYONE, Principal
from ringlog.actors.http_gateway.gateway import Gateway
from ringlog.actors.http_gateway.leases import claims
from ringlog.actors.http_gateway.records import diffs
from ringlog.config import Config
from ringlog.errors import ShuttingDown, Unauthorized
from tests.support.bare_gateway import bare_gateway
from tests.support.server_future import OneSlotFuture

KEY = "rl_guest"


def request_of(gateway: Gateway) -> Any:
    return SimpleNamespace(gateway=gateway, protocol=SimpleNamespace(client_disconnect=OneSlotFuture))


async def test_a_claim_that_comes_late_is_not_made() -> None:
    made: list[Any] = []
    gateway = bare_gateway(is_draining=True, client=SimpleNamespace(run=made.append))
    nothing: Any = None
    with pytest.raises(ShuttingDown):
        await claims._claimed(request_of(gateway), nothing, nothing, nothing, 5.0)
    assert not made
    assert not gateway.streams


async def test_a_diff_that_comes_late_is_answered_with_what_there_is() -> None:
    page = SimpleNamespace(batches=(), tombstone=None, caught_up=True)
    read: list[float] = []

    async def run_reading(_: Any) -> Any:
        gateway.is_draining = True  # The stop has begun while it read.
        return page

    shell = SimpleNamespace(run_reading=run_reading)
    gateway = bare_gateway(client=SimpleNamespace(_shell=shell), loop=asyncio.get_running_loop())
    steps: Any = SimpleNamespace(steps=read.append)
    assert await diffs._run(request_of(gateway), steps, 5.0) is page
    assert read == [0]


def streaming(keys: BearerKeys, **fields: Any) -> Gateway:
    return bare_gateway(
        keys=keys, settings=Config(), slot=SimpleNamespace(add=lambda field, count: None),
        _streaming=Counter(), _principals={}, _revoked=set(), **fields,
    )  # fmt: skip


def guest(*prefixes: str) -> BearerKeys:
    principal = Principal("guest", frozenset({"read"}), prefixes, digest=key_id(KEY))
    return BearerKeys([(key_id(KEY), principal)])


async def test_a_stream_that_comes_late_does_not_begin() -> None:
    gateway = streaming(BearerKeys(admits_all=True), is_draining=True)
    with pytest.raises(ShuttingDown), gateway.stream(ANYONE):
        raise AssertionError
    assert not gateway.streams
    assert not gateway._streaming


async def test_a_stream_does_not_begin_with_rights_that_its_key_has_lost() -> None:
    """The keys have changed between the check of the request and the begin of its stream."""
    principal = guest("a.").find(f"Bearer {KEY}")
    assert principal is not None
    gateway = streaming(guest("a."))
    with gateway.stream(principal):
        assert len(gateway.streams) == 1
    gateway.change_keys(guest("b."))
    with pytest.raises(Unauthorized), gateway.stream(principal):
        raise AssertionError
    assert not gateway.streams
